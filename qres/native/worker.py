"""Runs native work in a child process, so that an abort or a segfault in llama.cpp becomes one readable line.

The child gets a picklable task; what it tells its listener and the result come back over a pipe. Its standard error
comes over another one, whose last lines explain a crash (GGML_ASSERT prints there and nowhere else); QRES_DEBUG=1 shows
all of it. Nothing is written to disk. The child ends when the parent does, however the parent dies; Ctrl-C in the
parent kills the child at once.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol, TypeVar

from qres.errors import CrashError, NativeError, OutOfMemoryError, QresError
from qres.events import Event, Listener, Remote

_T = TypeVar("_T")
_Done_co = TypeVar("_Done_co", covariant=True)


class Task(Protocol[_Done_co]):
    """Work for the child process: a picklable object that imports what it needs only when it works."""

    def work(self, listener: Listener) -> _Done_co:
        """Do it; called in the child. The result is pickled, too."""


_LOG_BYTES = 1 << 18
"""Bytes of the child's last words that are kept."""
_PATIENCE_S = 5.0
"""Seconds to wait for the rest of a dead child's log."""


def run(task: Task[_T], listener: Listener) -> _T:
    """Let a child process do the work.

    Args:
        task: Of a class that stands at the top of a module.
        listener: Hears in this process what the task tells.

    Returns:
        What the task's `work` returned.

    Raises:
        QresError: as `work` raised it.
        CrashError: the child died; the message has the signal and llama.cpp's last words.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    log_receiver, log_sender = context.Pipe(duplex=False)
    # The work comes over a pipe, too: with `args`, a child that dies early leaves its parent writing for ever.
    inbox, outbox = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(inbox, sender, log_sender))
    log = _LastWords(log_receiver)
    try:
        with _interrupts_wait():
            child.start()
            for end in (inbox, sender, log_sender):
                end.close()
            log.start()
        with suppress(OSError):  # it died: so says its exit code
            outbox.send(task)
        heard = _Heard(listener)
        outcome = _receive(receiver, heard)
        child.join()
    finally:
        if child.pid is not None:
            if child.is_alive():  # an interrupt, or an error in the listener
                child.kill()
            child.join()
        receiver.close()
        outbox.close()
        log.close()
        if os.environ.get("QRES_DEBUG"):
            sys.stderr.write(log.text())
    if outcome is None:
        raise _crash(child.exitcode, log.text(), heard.working)
    kind, value = outcome
    if kind == "error":
        raise value
    result: _T = value
    return result


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold signals back while the child starts, so that it is known by then and can be ended.

    The child inherits the mask and never sees a Ctrl-C, which the terminal sends to all; the parent decides. The mask
    alone would not do for the parent: what one thread holds back is delivered to another one, numpy's for instance.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # else `start` starts it, which ends with the signals let through
    caught: list[tuple[int, FrameType | None]] = []
    handlers = {n: signal.signal(n, lambda *seen: caught.append(seen)) for n in (signal.SIGINT, signal.SIGTERM)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for held, handler in handlers.items():
            signal.signal(held, handler)
    for number, frame in caught[:1]:
        decide = handlers[signal.Signals(number)]
        if callable(decide):
            decide(number, frame)


class _LastWords:
    """The end of what the child wrote to standard error, collected as it comes: a full pipe would stop the child."""

    def __init__(self, receiver: Connection) -> None:
        self._receiver = receiver
        self._tail = b""
        self._thread = threading.Thread(target=self._collect, daemon=True)

    def start(self) -> None:
        """Begin to read; the other end must be the child's alone by then."""
        self._thread.start()

    def _collect(self) -> None:
        with suppress(OSError):
            while piece := os.read(_descriptor(self._receiver), 1 << 16):
                self._tail = (self._tail + piece)[-_LOG_BYTES:]

    def close(self) -> None:
        """Wait for the end of the log."""
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():  # else someone the child started still holds the pipe
            self._receiver.close()

    def text(self) -> str:
        """The last words collected so far, at most `_LOG_BYTES` of them."""
        return self._tail.decode(errors="replace")


def _descriptor(connection: Connection) -> int:
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.open_osfhandle(connection.fileno(), 0)
    return connection.fileno()


class _Heard:
    """Repeats events on a listener, and remembers which model worked last."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.working = ""

    def hear(self, event: Event) -> None:
        if event.call == "working":
            self.working = str(event.arguments[0])
        event.repeat(self._listener)


def _receive(receiver: Connection, heard: _Heard) -> tuple[str, Any] | None:
    """Events until the outcome; None when the child closed the pipe without one."""
    while True:
        try:
            kind, value = receiver.recv()
        except (EOFError, OSError):
            return None
        if kind != "event":
            return kind, value
        heard.hear(value)


def _child(inbox: Connection, sender: Connection, log: Connection) -> None:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml_abort would start a debugger for a stack nobody reads
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(_descriptor(log), 2)
    sys.stderr = os.fdopen(2, "w", errors="replace", closefd=False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        task = inbox.recv()
        result = task.work(Remote(lambda event: sender.send(("event", event))))
        sender.send(("result", result))
    except QresError as error:
        sender.send(("error", error))
    except MemoryError:
        sender.send(
            (
                "error",
                OutOfMemoryError("out of memory", "fewer levels, a smaller --n-ctx, or a machine with more memory"),
            )
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


def _crash(exitcode: int | None, log: str, working: str) -> CrashError:
    """What a dead child's exit code and log say."""
    lines = log.splitlines()
    aborts = [match[1] for match in map(_ABORT.search, lines) if match]
    telling = aborts or [line.strip() for line in lines if _SPEAKING.search(line)]
    words = telling[-1] if telling else (lines[-1].strip() if lines else "no message")
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "the system may have run out of memory" if name == "SIGKILL" else ""
        killed = name in {"SIGKILL", "SIGTERM"}
        return CrashError(f"llama.cpp died with {name}: {words}", hint, killed=killed, working=working)
    return CrashError(f"the native process ended with status {exitcode}: {words}", working=working)
