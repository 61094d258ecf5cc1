"""Estimates memory, hours and dollars of a job from the shapes of its model."""
