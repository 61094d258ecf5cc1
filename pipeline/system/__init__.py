"""What the rest stands on: files on a path or in a bucket, the terminal, signals, deadlines, credentials."""
