"""Provides files (local or in a bucket), terminal output, signals, time limits, removal of credentials, and function imports."""
