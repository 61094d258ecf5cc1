"""Verbs that are not stages of training: they use what stages left, or look at a job before it runs."""
