"""Errors that speak for themselves: the command line prints their message. All others keep their traceback."""


class InputError(Exception):
    """The job file or the data is wrong; the command line prints the message and exits with status 2.

    The message says what was wrong, the value found, where it stands (`file:line` or `section.key`),
    what is expected, and what to type next.
    """


class Failure(Exception):
    """Something that was to be proved does not hold; the command line prints the message and exits with status 1."""
