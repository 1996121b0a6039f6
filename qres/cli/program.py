"""The command line as a program: signals, standard streams, and every expected failure as one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Sequence

import typer

from qres.cli.app import app
from qres.errors import QresError, reason_of

INTERRUPTED = 130
TERMINATED = 143
PATIENCE_S = 1.7
"""After an interrupt, until the process ends with what is not tidied up left behind."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs the app and turns every expected failure into one line and an exit code."""
    _open_standard_streams()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)
        code = app(args=arguments, standalone_mode=False)  # typer hands an interrupt back as 130
        if code == INTERRUPTED:
            _fail("interrupted", "", INTERRUPTED)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", "", INTERRUPTED)
    except QresError as error:
        _fail(error.message, error.hint, error.exit_code)
    except OSError as error:  # a full disk or a closed terminal behind standard output
        _fail(f"cannot write the answer: {reason_of(error)}", "", 3)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own errors: unknown option, missing argument
            if not error.format_message():  # no arguments at all: the help has been shown
                sys.exit(2)
            _fail(error.format_message(), "see qres --help", 2)
        raise


def _leave(number: int, _frame: object) -> None:
    """On Ctrl-C or SIGTERM: tidy up and go, once; whatever hangs in there does so for two seconds at most."""
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, signal.SIG_IGN)
    code = INTERRUPTED if number == signal.SIGINT else TERMINATED
    timer = threading.Timer(PATIENCE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(TERMINATED)


def _open_standard_streams() -> None:
    """Daemons start programs with these closed, which libraries do not expect; and no terminal knows all characters."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(message: str, hint: str, code: int) -> None:
    if os.environ.get("QRES_DEBUG"):
        import traceback

        traceback.print_exc()
    from rich.console import Console
    from rich.text import Text

    from qres.printable import plain_line, sentence

    line = Text.assemble(("qres: ", "bold red"), plain_line(message))
    if hint:
        line.append(f"{'' if message.endswith(('.', '?')) else '.'} {sentence(plain_line(hint))}")
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    sys.exit(code)
