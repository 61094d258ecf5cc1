"""The foundation: files on a path or in a bucket, the terminal, the process, deadlines, credentials, functions."""
