"""The exceptions that end a program with one line."""


class UserError(Exception):
    """Something the user can fix: printed as one line on stderr, exit code 2, no traceback.

    The text says what was given, what was expected and what to do about it.
    """


class WrongKernel(Exception):
    """A kernel that computes something else than its oracle: one line on stderr, exit code 1."""
