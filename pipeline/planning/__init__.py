"""Estimates the memory, duration and cost of a job from the shapes of its model."""
