"""Every error a user can cause, each with what to do about it and the exit code it ends with.

    QresError                exit 1   base: something qres refused to do
    +-- UsageError           exit 2   options that do not go together, unknown level
    +-- InputError           exit 3   a file or text that cannot be used
    |   +-- ChangedError     exit 3   a file that changed while it was measured
    +-- UnsupportedError     exit 4   a valid model that qres or llama.cpp cannot measure
    +-- NativeError          exit 5   llama.cpp failed
        +-- OutOfMemoryError exit 5   this machine has not enough of it
        +-- CrashError       exit 5   its process died

An interrupt (Ctrl-C) ends with 130. `qres.cli.program.main` is the one place that catches these.
"""

from __future__ import annotations


def reason_of(error: Exception) -> str:
    """The system's word for what went wrong (`No space left on device`), else the error's own text."""
    return str(getattr(error, "strerror", None) or error)


class QresError(Exception):
    """An expected failure: one line that says what is wrong, one that says what to do.

    Attributes:
        message: What is wrong, with the expected and the actual value where there are any.
        hint: What the user can do about it; empty when the message already says so.
        exit_code: Exit status of the command.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both in args, so that the error survives pickling across the process border
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(QresError):
    """Options that contradict each other or name something that does not exist."""

    exit_code = 2


class InputError(QresError):
    """A model file, text or output folder that cannot be used."""

    exit_code = 3


class ChangedError(InputError):
    """A file that was written to while it was used: what was measured so far counts for nothing."""


class UnsupportedError(QresError):
    """A valid model whose output qres cannot measure (embedding-only, encoder-decoder, ...)."""

    exit_code = 4


class NativeError(QresError):
    """llama.cpp returned an error."""

    exit_code = 5


class OutOfMemoryError(NativeError):
    """The work needs more memory than there is."""


class CrashError(NativeError):
    """The process that llama.cpp ran in died.

    Attributes:
        killed: Someone else ended it (SIGKILL, SIGTERM): the user, or the system for want of memory.
        working: The model that worked last; empty before any did.
    """

    def __init__(self, message: str, hint: str = "", *, killed: bool = False, working: str = "") -> None:
        super().__init__(message, hint)
        self.killed = killed
        self.working = working
