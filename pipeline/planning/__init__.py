"""Computes the requirements of a job from shapes."""
