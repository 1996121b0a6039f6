"""A scan in a process of its own that faults are put into: watched through /proc and its files, stopped, killed.

Triggers are what a scan does, not how long it has run: a loaded machine moves every moment, but not their order.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from tests.conftest import ALONE

PATIENCE_S = 240.0
"""Until a test gives up on something that should have happened: many times what it takes on two quiet cores."""
_POLL_S = 0.002


class Scan:
    """A running `python -m qres`, alone in its session. As a context manager, it takes everything down at the end."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        env: dict[str, str] | None = None,
        file_size: int | None = None,
        yielding: bool = False,
    ) -> None:
        """Start it.

        Args:
            arguments: Of the command.
            folder: Current folder; cache, temporary files and what it prints go there unless `env` says otherwise.
            env: Variables to set.
            file_size: Largest file that it and its children may write (RLIMIT_FSIZE).
            yielding: It leaves the CPU to whoever watches it, so that on a busy machine, too, a moment is seen in time.
        """
        self.folder = folder
        self._number = len(list(folder.glob("stderr-*.txt")))
        self.temporary = folder / f"tmp-{self._number}"
        self.temporary.mkdir()
        command = [sys.executable, "-m", "qres", *map(str, arguments)]
        if file_size is not None:  # by the shell, in units of 1024 bytes: code between fork and exec is not safe here
            command = ["bash", "-c", f'ulimit -f {file_size // 1024}; exec "$@"', "bash", *command]
        if yielding:
            command = ["nice", "-n", "19", *command]
        with self._file("stdout").open("wb") as out, self._file("stderr").open("wb") as errors:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env={
                    **{name: value for name, value in os.environ.items() if name not in ALONE},
                    "QRES_CACHE": str(folder / "cache"),
                    "TMPDIR": str(self.temporary),
                    "QRES_DEBUG": "",
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self.popen.pid

    def _file(self, stream: str) -> Path:
        return self.folder / f"{stream}-{self._number}.txt"

    def __enter__(self) -> Scan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()

    # -- what it does

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self._file("stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has said."""
        return self._file("stderr").read_text(errors="replace")

    def lines(self) -> list[str]:
        """What it has said, without the estimate that begins every scan."""
        return [line for line in self.stderr.splitlines() if not line.startswith("Needs about")]

    def processes(self) -> list[psutil.Process]:
        """All that is alive of its session, also when the parent is gone."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def worker(self) -> psutil.Process | None:
        """The process that llama.cpp runs in, when there is one."""
        with suppress(OSError, psutil.NoSuchProcess):
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                process = psutil.Process(int(pid))
                if "spawn_main" in " ".join(process.cmdline()):
                    return process
        return None

    def status(self, field: str) -> int:
        """A mask of signals from the parent's /proc/PID/status: SigBlk, SigCgt, ..."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    return int(line.split()[1], 16)
        return 0

    def has(self, field: str, number: signal.Signals) -> bool:
        """Is the signal in the mask?"""
        return bool(self.status(field) >> (number - 1) & 1)

    def until(self, what: Callable[[], object], why: str) -> None:
        """Wait for a moment of the scan, which must come before its end."""
        end = time.monotonic() + PATIENCE_S
        while not what():
            ended = self.popen.poll()
            assert ended is None or what(), f"ended with {ended} before: {why}\n{self.stderr}"
            assert time.monotonic() < end, f"never came: {why}\n{self.stderr}"
            time.sleep(_POLL_S)

    def settle(self, what: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
        """Wait until something is so, or for as long as there is patience."""
        end = time.monotonic() + limit_s
        while not what() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def ends(self) -> int:
        """Wait for the end; the exit code."""
        return self.popen.wait(PATIENCE_S)

    def freeze(self, what: Callable[[], object], why: str) -> psutil.Process:
        """Wait for a moment at which there is a worker, and stop the worker there, so that the moment lasts.

        A moment that is over before the worker stands still is let go; what comes again is waited for.
        """
        while True:
            self.until(lambda: self.worker() and what(), why)
            worker = self.worker()
            if worker is None:
                continue
            with suppress(psutil.NoSuchProcess):
                worker.suspend()
                self.settle(functools.partial(_stands_still, worker))
                if what() and worker.status() == psutil.STATUS_STOPPED:
                    return worker
                worker.resume()

    def interrupt(self, number: signal.Signals = signal.SIGINT, group: bool = True) -> float:
        """Send a signal, wait for the end, and say how many seconds that took."""
        started = time.monotonic()
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)
        while self.popen.poll() is None:
            assert time.monotonic() - started < PATIENCE_S, f"does not end after {number.name}\n{self.stderr}"
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def loads(self, name: str) -> bool:
        """Does the worker have this file in its memory?"""
        return self._maps(self.worker(), name)

    def opens(self, name: str) -> bool:
        """Does the parent have this file open?"""
        with suppress(OSError):
            for link in Path(f"/proc/{self.pid}/fd").iterdir():
                with suppress(OSError):
                    if link.readlink().name == name:
                        return True
        return False

    def imports(self, name: str) -> bool:
        """Has the parent loaded a library whose name has this in it?"""
        return self._maps(psutil.Process(self.pid), name)

    @staticmethod
    def _maps(process: psutil.Process | None, name: str) -> bool:
        with suppress(OSError):
            return process is not None and name in Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
        return False

    def gone(self, within_s: float) -> list[str]:
        """Processes that are left of it after a while, by their command lines; empty as soon as there are none."""
        end = time.monotonic() + within_s
        while True:
            left = []
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    left.append(" ".join(process.cmdline()))
            if not left or time.monotonic() > end:
                return left
            time.sleep(_POLL_S * 10)


def _stands_still(process: psutil.Process) -> bool:
    return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


def seconds(quiet: float) -> float:
    """A limit in seconds, as it is on this machine now: longer when more processes want to run than there are CPUs."""
    return quiet * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory, as root; skips elsewhere: `unshare -rm` makes a user root for a test."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk (try under unshare -rm): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left on a disk; the file that does."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\1" * 4096)
    return path
