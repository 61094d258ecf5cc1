"""Computes from shapes what a job needs."""
