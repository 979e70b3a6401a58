"""The one exception for mistakes that a user can mend."""


class UserError(ValueError):
    """Bad input: a wrong name, key, file or shape.

    The message is one sentence that names what is wrong and, where it can, what would be right.
    The command line prints it and exits with code 2.
    """
