"""Whether llama.cpp takes a model: asked of itself, in the worker process, without loading any weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qres.errors import CrashError, InputError, QresError
from qres.events import Listener, Logged
from qres.native import worker
from qres.printable import show


@dataclass(frozen=True)
class LayoutTask:
    """Lay out a model: its vocabulary, hyperparameters, and every tensor's name and shape are checked."""

    path: Path

    def work(self, listener: Listener) -> None:
        """Lay it out, in the worker; raises as `session.loaded_model`."""
        from qres.native.memory import layout

        with layout(self.path):
            pass


def refusal(path: Path) -> QresError | None:
    """Why llama.cpp does not take a model, None when it does.

    Only what a layout shows: a model that llama.cpp takes can still fail when it computes.

    Args:
        path: The model's first file.
    """
    try:
        worker.run(LayoutTask(path), Logged())
    except CrashError as error:
        if error.killed:
            raise
        return InputError(
            f"llama.cpp cannot load {show(path.name)}: {error.message}", "get the file again, or convert again"
        )
    except QresError as error:
        return error
    return None


def require(path: Path) -> None:
    """Refuse a model that llama.cpp does not take.

    Raises:
        QresError: as `refusal`.
    """
    error = refusal(path)
    if error:
        raise error
