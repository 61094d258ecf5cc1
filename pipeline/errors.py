"""The one error that is the user's to mend: everything else is a bug or a failed run and keeps its traceback."""


class InputError(Exception):
    """The job file or the data is wrong; the command line prints the message and exits with status 2.

    The message says what was wrong, the value found, where it stands (`file:line` or `section.key`),
    what is expected, and what to type next.
    """
