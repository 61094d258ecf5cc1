"""Settles a job into a run: decides and checks each question about it once, and passes the values on."""
