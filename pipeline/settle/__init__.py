"""A job becomes a run: each question about it is asked once here, checked, and answered by a value that is handed on."""
