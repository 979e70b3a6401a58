"""Exceptions that end a command with one sentence instead of a traceback."""


def reason(error: BaseException, most: int = 100) -> str:
    """What an error says, in one short line: libraries quote what they were given at length."""
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().partition("\n")[0][:most] or type(error).__name__


class UserError(ValueError):
    """Bad input: a wrong name, key, file or shape.

    The message is one sentence that names what is wrong and, where it can, what would be right.
    The command line prints it and exits with the class's exit code.
    """

    exit_code = 2


class TrainingDiverged(UserError):
    """The loss became NaN or exploded."""

    exit_code = 3


class OutputClosed(UserError):
    """What is printed can't be written: a full disk, or (which needs no word) a closed pipe."""

    exit_code = 1

    def __init__(self, reason: str | None = None) -> None:
        super().__init__("the output was closed" if reason is None else reason)
        self.quiet = reason is None


class TrainingInterrupted(UserError):
    """A signal, or a closed output, ended the run; it saved a checkpoint and can be resumed."""

    exit_code = 75  # "temporary failure" by the convention of sysexits.h

    def __init__(self, stopped: str, saved: object, resume: str = "--resume") -> None:
        super().__init__(f"{stopped}; {saved} is saved, and {resume} goes on from it")
        self.stopped, self.saved = stopped, saved

    def resumed_by(self, resume: str) -> "TrainingInterrupted":
        """The same, of a run that another command than `train` goes on with."""
        return TrainingInterrupted(self.stopped, self.saved, resume)
