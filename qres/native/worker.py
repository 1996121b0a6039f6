"""Runs native work in a child process, so that an abort or a segfault in llama.cpp becomes one readable line.

The child gets a picklable function and arguments; events and the result come back over a pipe. Its standard error goes
to a temporary file, whose last lines explain a crash (GGML_ASSERT prints there and nowhere else); QRES_DEBUG=1 shows
all of it. The child ends when the parent does, however the parent dies; Ctrl-C in the parent kills the child at once.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from qres.errors import NativeError, QresError

Emit = Callable[[object], None]
"""Sends one picklable event to the parent."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


def run(
    work: Callable[Concatenate[Emit, _P], _T], on_event: Callable[[Any], None], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Call work(emit, *args, **kwargs) in a child process.

    Args:
        work: A module-level function.
        on_event: Called in this process with each event.
        *args: For `work`; pickled.
        **kwargs: For `work`; pickled.

    Returns:
        What `work` returned.

    Raises:
        QresError: as `work` raised it.
        NativeError: the child died; the message has the signal and llama.cpp's last words.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="qres-") as folder:
        log = Path(folder) / "native.log"
        child = context.Process(target=_child, args=(sender, log, work, args, kwargs))
        child.start()
        sender.close()
        try:
            outcome = _receive(receiver, on_event)
            child.join()
        finally:
            if child.is_alive():  # an interrupt, or an error in on_event
                child.kill()
            child.join()
            receiver.close()
            if os.environ.get("QRES_DEBUG") and log.exists():
                sys.stderr.write(log.read_text(errors="replace"))
        if outcome is None:
            raise _crash(child.exitcode, log)
    kind, value = outcome
    if kind == "error":
        raise value
    result: _T = value
    return result


def _receive(receiver: Connection, on_event: Callable[[Any], None]) -> tuple[str, Any] | None:
    """Events until the outcome; None when the child closed the pipe without one."""
    while True:
        try:
            kind, value = receiver.recv()
        except (EOFError, OSError):
            return None
        if kind != "event":
            return kind, value
        on_event(value)


def _child(
    sender: Connection, log: Path, work: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml_abort would start a debugger for a stack nobody reads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", errors="replace", closefd=False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        result = work(lambda event: sender.send(("event", event)), *args, **kwargs)
        sender.send(("result", result))
    except QresError as error:
        sender.send(("error", error))
    except MemoryError:
        sender.send(
            ("error", NativeError("out of memory", "fewer levels, a smaller --n-ctx, or a machine with more memory"))
        )
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        sender.send(
            ("error", NativeError(f"internal error: {type(error).__name__}: {error}", "QRES_DEBUG=1 shows more"))
        )


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_ABORT = re.compile(r"(?:^|/)([\w.-]+\.(?:cpp|cc|c|cu|h|hpp|m|mm):\d+: .*)")
"""How ggml_abort begins: source file, line, what was wrong."""
_SPEAKING = re.compile(r"error|fail|what\(\)|not enough|out of", re.IGNORECASE)


def _crash(exitcode: int | None, log: Path) -> NativeError:
    """What a dead child's exit code and log say."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    aborts = [match[1] for match in map(_ABORT.search, lines) if match]
    telling = aborts or [line.strip() for line in lines if _SPEAKING.search(line)]
    words = telling[-1] if telling else (lines[-1].strip() if lines else "no message")
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "the system may have run out of memory" if name == "SIGKILL" else ""
        return NativeError(f"llama.cpp died with {name}: {words}", hint)
    return NativeError(f"the native process ended with status {exitcode}: {words}")
