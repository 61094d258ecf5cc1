"""What the rest builds on: files on a path or in a bucket, the terminal, the process, deadlines, credentials, functions."""
