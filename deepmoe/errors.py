"""Exceptions that end a command with one sentence instead of a traceback."""


class UserError(ValueError):
    """Bad input: a wrong name, key, file or shape.

    The message is one sentence that names what is wrong and, where it can, what would be right.
    The command line prints it and exits with the class's exit code.
    """

    exit_code = 2


class TrainingDiverged(UserError):
    """The loss became NaN or exploded."""

    exit_code = 3


class TrainingInterrupted(UserError):
    """A signal asked the run to stop; it saved a checkpoint and can be resumed."""

    exit_code = 75  # "temporary failure" by the convention of sysexits.h
