"""The one exception a user is meant to see."""


class UserError(Exception):
    """Something the user can fix: printed as one line on stderr, exit code 2, no traceback.

    The text says what was given, what was expected and what to do about it.
    """
