"""Faults that are real: signals, dead processes, full disks and changing files, put into `python -m qres`."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from qres.measure import checkpoint
from tests import archs, faults, tiny
from tests.faults import Scan, fill, seconds, small_disk

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="scans are watched through /proc"),
]

KEPT = "The chunks that were finished are kept: the same command with --resume goes on from there"
INTERRUPTED = "qres: interrupted"
AT_ONCE_S = 2.0
"""From Ctrl-C to the prompt, on a quiet machine."""
ENDLESS = ("--chunks", 500)
"""More than is measured before a test ends the scan."""


@dataclass(frozen=True)
class Shelf:
    """What the tests of this file share: models, and a cache with levels of them."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def copy(self, folder: Path, name: str = "tiny.gguf") -> Path:
        """A model of a test's own; the shared cache finds it by its content."""
        return Path(shutil.copy(self.folder / name, folder / name))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """`tiny.gguf` with three levels in the cache, and `deep.gguf`, which takes longer, with none."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    tiny.write_llama(shelf.folder / "tiny.gguf", change=tiny.predictive)
    tiny.write_llama(shelf.folder / "deep.gguf", n_layer=12, change=tiny.predictive)
    with Scan(small("tiny.gguf", "--levels", "Q4_K_M,Q5_K_M,Q8_0"), shelf.folder) as scan:
        scan.until(lambda: scan.loads("tiny-Q8_0.gguf"), "all made")
    return shelf


def small(model: str, *options: object) -> list[object]:
    """A quick scan; of options given twice the later one counts, but --levels adds up."""
    return ["scan", model, "--n-ctx", 64, "--rank-chunks", 2, "--chunks", 2, "--threads", 1, "--out", "out", *options]


def begin(shelf: Shelf, folder: Path, *options: object, model: str = "tiny.gguf", own: bool = False) -> Scan:
    """A scan of a copy of a model, with the shared cache or an empty one of its own."""
    shelf.copy(folder, model)
    env = {} if own else {"QRES_CACHE": str(shelf.cache)}
    return Scan(small(model, "--levels", "Q8_0", *options), folder, env)


def again(
    shelf: Shelf,
    folder: Path,
    *options: object,
    model: str = "tiny.gguf",
    own: bool = False,
    yielding: bool = False,
) -> Scan:
    """The same with the model that is there already."""
    env = {} if own else {"QRES_CACHE": str(shelf.cache)}
    return Scan(small(model, "--levels", "Q8_0", *options), folder, env, yielding=yielding)


def state(folder: Path) -> Path:
    return folder / "out" / "unfinished.npz"


def done(folder: Path) -> int:
    """Chunks that the state of an unfinished scan holds."""
    kept = checkpoint.load(state(folder), {})
    return kept.rank_done + kept.report_done if kept else 0


def partial(folder: Path) -> list[Path]:
    return list(folder.rglob("*.partial"))


def finished(folder: Path) -> list[str]:
    """Reports under their final names."""
    return [name for name in ("result.json", "report.html", "report.md") if (folder / "out" / name).exists()]


def result(folder: Path) -> dict[str, Any]:
    """A result without what differs from run to run."""
    loaded: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
    del loaded["settings"]["elapsed_s"], loaded["prediction"]["elapsed_s"]
    return loaded


def require_clean(scan: Scan, *folders: Path) -> None:
    """No process, no partial file, nothing in the folder for temporary files, and no traceback."""
    assert scan.gone(faults.PATIENCE_S) == []
    for folder in (scan.folder, *folders):
        assert partial(folder) == []
    assert list(scan.temporary.iterdir()) == []
    assert "Traceback" not in scan.stderr, scan.stderr


def require_quiet(scan: Scan) -> None:
    """Nothing has been said so far but the estimate."""
    assert scan.lines() == []


def require_refused(scan: Scan, code: int, *words: str) -> None:
    """One line that says so, and nothing printed as an answer."""
    assert scan.ends() == code, scan.stderr
    assert scan.stdout == ""
    assert len(scan.lines()) == 1, scan.stderr
    for word in words:
        assert word in scan.stderr
    require_clean(scan)


# -- Ctrl-C

Moment = Callable[[Scan, Path], object]


def handlers_set(scan: Scan, _folder: Path) -> object:
    """The first thing the program does; an interrupt before that is Python's."""
    return scan.has("SigCgt", signal.SIGTERM)


def importing(scan: Scan, _folder: Path) -> object:
    return scan.imports("_multiarray_umath")


def worker_works(scan: Scan, _folder: Path) -> object:
    return scan.loads("libllama")


def reading(scan: Scan, _folder: Path) -> object:
    """The weights, in this process: the estimate has been said, and the model is open."""
    return "Needs about" in scan.stderr and scan.opens("deep.gguf")


def making(_scan: Scan, folder: Path) -> object:
    return list((folder / "cache").rglob(".*.gguf.*.partial"))


def loading(scan: Scan, _folder: Path) -> object:
    return scan.loads("tiny-Q8_0.gguf")


def measuring(_scan: Scan, folder: Path) -> object:
    return state(folder).exists()


def rendering(_scan: Scan, folder: Path) -> object:
    return finished(folder)


def interrupted(shelf: Shelf, folder: Path, when: Moment, number: signal.Signals, group: bool) -> Scan:
    """A scan that was interrupted at a moment, with everything checked that holds for any moment."""
    deep = when in (reading, making)
    length = ("--chunks", 2) if when is rendering else ENDLESS
    with begin(shelf, folder, *length, model="deep.gguf" if deep else "tiny.gguf", own=deep) as scan:
        scan.until(lambda: when(scan, folder), when.__name__)
        took = scan.interrupt(number, group)
        code, last = (130, [INTERRUPTED]) if number is signal.SIGINT else (143, [])
        assert scan.popen.returncode == code, scan.stderr
        said = scan.lines()
        if when is handlers_set:  # libraries are loading, there is nothing to tidy up: the process just ends
            assert said in ([], last)
        else:
            assert said in (last, [KEPT, *last])
        assert took < seconds(AT_ONCE_S)
        require_clean(scan, shelf.cache)
    return scan


EARLY = [handlers_set, importing, worker_works, reading, making, loading, measuring]


@pytest.mark.parametrize("when", EARLY)
def test_interrupt_leaves_nothing(shelf: Shelf, tmp_path: Path, when: Moment) -> None:
    """Ctrl-C in a terminal: every process of the group gets it."""
    interrupted(shelf, tmp_path, when, signal.SIGINT, group=True)
    kept = [state(tmp_path)] if when is measuring else []
    assert [path for path in (tmp_path / "out").rglob("*") if path.name != "unfinished.npz"] == []
    assert [path for path in [state(tmp_path)] if path.exists()] == kept
    assert list((tmp_path / "cache").rglob("*.gguf")) == []


def test_interrupt_of_the_parent_alone(shelf: Shelf, tmp_path: Path) -> None:
    interrupted(shelf, tmp_path, measuring, signal.SIGINT, group=False)
    assert finished(tmp_path) == []


def test_termination_is_as_clean(shelf: Shelf, tmp_path: Path) -> None:
    interrupted(shelf, tmp_path, measuring, signal.SIGTERM, group=True)
    assert finished(tmp_path) == []


def test_interrupt_while_reports_are_written(shelf: Shelf, tmp_path: Path) -> None:
    """The result is whole as soon as it has its name; the state is kept until everything is written."""
    interrupted(shelf, tmp_path, rendering, signal.SIGINT, group=True)
    assert "report.md" not in finished(tmp_path)
    assert result(tmp_path)["levels"]
    assert done(tmp_path) == 4


def test_interrupt_again_and_again(shelf: Shelf, tmp_path: Path) -> None:
    """An impatient user presses it while the scan tidies up, and while it leaves."""
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        scan.until(lambda: measuring(scan, tmp_path), "measuring")
        while scan.popen.poll() is None:
            os.killpg(scan.pid, signal.SIGINT)
            time.sleep(0.005)
        assert scan.popen.returncode == 130, scan.stderr
        assert scan.lines() == [KEPT, INTERRUPTED]
        require_clean(scan)


def test_worker_never_sees_an_interrupt(shelf: Shelf, tmp_path: Path) -> None:
    """Not even before its first line of Python: the terminal sends it to every process, the parent decides."""
    with begin(shelf, tmp_path) as scan:
        worker = scan.freeze(scan.worker, "a worker starts")
        worker.send_signal(signal.SIGINT)
        worker.resume()
        scan.until(lambda: measuring(scan, tmp_path), "measuring")
        require_quiet(scan)


def begin_with_long_text(shelf: Shelf, folder: Path, threads: str = "2") -> Scan:
    """The first worker is sent more than a pipe holds: until it reads, its parent waits."""
    (folder / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 10_000)
    shelf.copy(folder)
    env = {"QRES_CACHE": str(shelf.cache), "OPENBLAS_NUM_THREADS": threads}
    return Scan(small("tiny.gguf", "--levels", "Q8_0", "--text", "long.txt", *ENDLESS), folder, env)


@pytest.mark.parametrize(
    ("number", "threads"),
    [(signal.SIGINT, "1"), (signal.SIGINT, "2"), (signal.SIGTERM, "2")],
)
def test_interrupt_while_a_worker_starts(shelf: Shelf, tmp_path: Path, number: signal.Signals, threads: str) -> None:
    """numpy's threads make a difference: a signal that one thread holds back is delivered to another one."""
    with begin_with_long_text(shelf, tmp_path, threads) as scan:
        worker = scan.freeze(scan.worker, "a worker starts")
        os.killpg(scan.pid, number)
        scan.settle(lambda: scan.popen.poll() is not None or scan.has("ShdPnd", number), 0.5)
        with suppress(psutil.NoSuchProcess):
            worker.resume()
            scan.settle(lambda: scan.popen.poll() is not None or not scan.has("SigBlk", signal.SIGINT), seconds(5))
            worker.suspend()  # should it be waited for, let that be seen
        scan.settle(lambda: scan.popen.poll() is not None, seconds(5))
        assert scan.popen.poll() == (130 if number is signal.SIGINT else 143), scan.stderr
        with suppress(psutil.NoSuchProcess):
            worker.resume()
        require_clean(scan)


def test_worker_killed_before_it_begins(shelf: Shelf, tmp_path: Path) -> None:
    with begin_with_long_text(shelf, tmp_path) as scan:
        scan.freeze(scan.worker, "a worker starts").kill()
        scan.settle(lambda: scan.popen.poll() is not None, seconds(5))
        assert scan.popen.poll() == 5, scan.stderr
        require_refused(scan, 5, "died with SIGKILL")


def test_interrupt_while_the_state_is_saved(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        scan.freeze(lambda: partial(tmp_path / "out"), "saving")
        scan.interrupt()
        assert scan.popen.returncode == 130, scan.stderr
        require_clean(scan)


# -- going on


RESUMED = ("--rank-chunks", 4, "--chunks", 28)
EVERY_CHUNK = 32


@pytest.fixture(scope="module")
def whole(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scan that was never interrupted; --resume without a state changes nothing."""
    folder = tmp_path_factory.mktemp("whole")
    with begin(shelf, folder, *RESUMED, "--resume") as scan:
        assert scan.ends() == 0, scan.stderr
        assert scan.lines() == []
    assert not state(folder).exists()
    return folder


def reached_chunks(folder: Path, least: int) -> bool:
    return state(folder).exists() and done(folder) >= least


def test_resumed_scan_is_the_same(shelf: Shelf, whole: Path, tmp_path: Path) -> None:
    """Cut off in both passes, by Ctrl-C and by the loss of every process, it ends as if it never was."""
    shelf.copy(tmp_path)
    resume: tuple[object, ...] = ()
    reached = 0
    for least, number in ((1, signal.SIGINT), (3, signal.SIGKILL), (7, signal.SIGTERM)):
        with again(shelf, tmp_path, *RESUMED, *resume, yielding=True) as scan:
            more = max(least, reached + 1)  # a busy machine may have stopped the one before later than it was to
            scan.freeze(functools.partial(reached_chunks, tmp_path, more), f"{more} chunks are done")
            assert reached < done(tmp_path) < EVERY_CHUNK
            scan.interrupt(number)
            if number is not signal.SIGKILL:
                assert scan.lines()[-1 if number is signal.SIGTERM else -2] == KEPT
            said = f"Going on with the unfinished scan: {reached} of {EVERY_CHUNK} chunks are done"
            assert (said in scan.stderr) is bool(resume)
            assert scan.gone(faults.PATIENCE_S) == []
        reached = done(tmp_path)
        resume = ("--resume",)
    with again(shelf, tmp_path, *RESUMED, "--resume") as scan:
        assert scan.ends() == 0, scan.stderr
        assert scan.lines() == [f"Going on with the unfinished scan: {reached} of {EVERY_CHUNK} chunks are done"]
        require_clean(scan)
    assert result(tmp_path) == result(whole)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "charts",
        "report.html",
        "report.md",
        "result.json",
    ]


@pytest.fixture(scope="module")
def unfinished(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scan that was cut off."""
    folder = tmp_path_factory.mktemp("unfinished")
    with begin(shelf, folder, *RESUMED) as scan:
        scan.freeze(lambda: measuring(scan, folder), "measuring")
        scan.interrupt()
    assert state(folder).exists()
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--n-ctx", 32), "text was"),
        (("--units", "all"), "--units was ranked, now it is all"),
    ],
)
def test_resume_of_another_scan_is_refused(
    shelf: Shelf, unfinished: Path, options: tuple[object, ...], words: str
) -> None:
    before = state(unfinished).read_bytes()
    with again(shelf, unfinished, *RESUMED, *options, "--resume") as scan:
        require_refused(scan, 3, "is another one", words, "Give the same arguments, or scan without --resume")
    assert state(unfinished).read_bytes() == before


def bomb(path: Path) -> None:
    """An array that is said to hold a quadrillion numbers."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tree.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


class Runs:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def pickled(path: Path) -> None:
    np.savez(path, tree=np.array([Runs(path.with_name("executed"))], dtype=object))
    with np.load(path, allow_pickle=True) as arrays:  # it would: the test cannot pass for want of a working pickle
        arrays["tree"]
    path.with_name("executed").rmdir()


def random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(50_000))


@pytest.mark.parametrize("damage", [random_bytes, pickled, bomb])
def test_resume_from_a_file_that_is_no_state(
    shelf: Shelf, unfinished: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(unfinished / "out", tmp_path / "out")
    damage(state(tmp_path))
    with begin(shelf, tmp_path, *RESUMED, "--resume") as scan:
        require_refused(scan, 3, "unfinished.npz cannot be read", "Remove it, or scan without --resume")
    assert not (tmp_path / "out" / "executed").exists()


# -- processes that die


def test_worker_killed_while_it_makes_a_level(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, model="deep.gguf", own=True) as scan:
        scan.freeze(lambda: making(scan, tmp_path), "making").kill()
        assert scan.ends() == 5, scan.stderr
        assert scan.lines()[-1].startswith("qres: llama.cpp died with SIGKILL: ")
        assert scan.lines()[-1].endswith("The system may have run out of memory.")
        require_clean(scan)
    assert list((tmp_path / "cache").rglob("*.gguf")) == []
    assert finished(tmp_path) == []


def test_worker_killed_while_it_measures(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        scan.freeze(lambda: measuring(scan, tmp_path), "measuring").kill()
        assert scan.ends() == 5, scan.stderr
        kept, last = scan.lines()
        assert kept == KEPT
        assert last.startswith("qres: llama.cpp died with SIGKILL: ")
        assert last.endswith("The system may have run out of memory.")
        require_clean(scan)
    assert finished(tmp_path) == []


def test_parent_killed_while_a_level_is_made(shelf: Shelf, tmp_path: Path) -> None:
    """The worker follows it; the next scan is not held up by what is left, and takes it away."""
    with begin(shelf, tmp_path, model="deep.gguf", own=True) as scan:
        worker = scan.freeze(lambda: making(scan, tmp_path), "making")
        scan.popen.kill()
        scan.popen.wait()
        assert partial(tmp_path) != []
        worker.resume()
        assert scan.gone(seconds(10)) == []
        assert list(scan.temporary.iterdir()) == []
    with again(shelf, tmp_path, *ENDLESS, model="deep.gguf", own=True) as scan:
        scan.until(lambda: measuring(scan, tmp_path), "measuring")
        require_quiet(scan)
        scan.interrupt()
        assert partial(tmp_path / "cache") == []
    assert len(list((tmp_path / "cache").rglob("*.gguf"))) == 1


def test_parent_killed_while_the_state_is_saved(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        worker = scan.freeze(lambda: partial(tmp_path / "out"), "saving")
        scan.popen.kill()
        worker.kill()
        assert scan.gone(seconds(10)) == []
        assert partial(tmp_path) != []
    with again(shelf, tmp_path, *ENDLESS) as scan:
        scan.until(scan.worker, "under way")
        assert partial(tmp_path) == []


# -- full disks


def test_disk_full_while_a_level_is_made(shelf: Shelf, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "270m") as disk:
        shelf.copy(tmp_path, "deep.gguf")
        with Scan(small("deep.gguf", "--levels", "Q8_0", "--cache", disk), tmp_path) as scan:
            worker = scan.freeze(lambda: list(disk.rglob("*.partial")), "making")
            fill(disk)
            worker.resume()
            assert scan.ends() == 3, scan.stderr
            assert "is full" in scan.lines()[-1]
            assert str(disk) in scan.lines()[-1]
            require_clean(scan)
        assert list(disk.rglob("*.gguf")) == []
    assert finished(tmp_path) == []


def test_level_is_larger_than_a_file_may_be(shelf: Shelf, tmp_path: Path) -> None:
    shelf.copy(tmp_path, "deep.gguf")
    with Scan(small("deep.gguf", "--levels", "Q8_0"), tmp_path, file_size=1 << 20) as scan:
        assert scan.ends() == 5, scan.stderr
        assert "Q8_0 could not be made" in scan.stderr
        require_clean(scan)
    assert list((tmp_path / "cache").rglob("*.gguf")) == []


def kept_result(scan: Scan) -> Path:
    """The file that the last line says the result is in."""
    words = scan.lines()[-1]
    assert "he result is kept in " in words, scan.stderr
    return Path(words.split("he result is kept in ")[1].split(", from which")[0])


def test_disk_full_when_reports_are_written(shelf: Shelf, whole: Path, tmp_path: Path) -> None:
    """Neither the state nor a report can be saved; the scan goes on, and its result is kept in the cache."""
    with small_disk(tmp_path / "disk", "40m") as disk:
        (tmp_path / "out").symlink_to(disk)
        with begin(shelf, tmp_path, *RESUMED) as scan:
            worker = scan.freeze(lambda: measuring(scan, tmp_path), "measuring")
            fill(disk)
            worker.resume()
            assert scan.ends() == 3, scan.stderr
            first, kept, last = scan.lines()
            assert first.startswith("The scan cannot be gone on with if it is cut off: ")
            assert "No space left on device" in first
            assert kept == KEPT
            assert last.startswith("qres: cannot write ")
            require_clean(scan)
            rescued = kept_result(scan)
        assert finished(tmp_path) == []
    ours, theirs = json.loads(rescued.read_text()), result(whole)
    rescued.unlink()
    assert ours["levels"] == theirs["levels"]


def test_disk_full_everywhere_keeps_the_state(shelf: Shelf, tmp_path: Path) -> None:
    """The cache is on the same disk: what is left is the state, and the message says so."""
    with small_disk(tmp_path / "disk", "40m") as disk:
        shutil.copytree(shelf.cache, disk / "cache")
        shelf.copy(tmp_path)
        arguments = small("tiny.gguf", "--levels", "Q8_0", "--out", "disk/out", "--cache", "disk/cache")
        with Scan(arguments, tmp_path) as scan:
            worker = scan.freeze((disk / "out" / "unfinished.npz").exists, "measuring")
            ballast = fill(disk)
            worker.resume()
            assert scan.ends() == 3, scan.stderr
            assert scan.lines()[-2] == KEPT
            assert "cannot write" in scan.lines()[-1]
            require_clean(scan)
        ballast.unlink()
        with Scan([*arguments, "--resume"], tmp_path) as scan:
            scan.until(lambda: "Going on with the unfinished scan" in scan.stderr, "resumed")


@pytest.mark.parametrize("limit", [16 << 10, 256 << 10])
def test_report_is_larger_than_a_file_may_be(shelf: Shelf, tmp_path: Path, limit: int) -> None:
    """Below the size of the state and of the result, and between the result and the page."""
    shelf.copy(tmp_path)
    env = {"QRES_CACHE": str(shelf.cache)}
    with Scan(small("tiny.gguf", "--levels", "Q8_0"), tmp_path, env, file_size=limit) as scan:
        assert scan.ends() == 3, scan.stderr
        assert "File too large" in scan.lines()[-1]
        require_clean(scan, shelf.cache)
        if limit == 16 << 10:
            assert scan.lines()[0].startswith("The scan cannot be gone on with if it is cut off: ")
            assert finished(tmp_path) == []
            return
        rescued = kept_result(scan)
    assert finished(tmp_path) == ["result.json"]
    with Scan(["report", rescued, "--out", "page.html"], tmp_path) as scan:
        assert scan.ends() == 0, scan.stderr
    assert (tmp_path / "page.html").exists()
    rescued.unlink()


# -- folders that change


def test_output_folder_is_read_only(shelf: Shelf, tmp_path: Path) -> None:
    if os.geteuid():
        (tmp_path / "out").mkdir(mode=0o555)
        with begin(shelf, tmp_path) as scan:
            require_refused(scan, 3, "cannot write to out", "Choose another folder with --out")
        return
    with small_disk(tmp_path / "out", "40m") as disk:  # no mode stops root
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with begin(shelf, tmp_path) as scan:
            require_refused(scan, 3, "cannot write to out", "Choose another folder with --out")


def test_partial_file_of_another_program_stays(shelf: Shelf, tmp_path: Path) -> None:
    """The output folder may be one that other programs use, such as a folder for downloads."""
    (tmp_path / "out").mkdir()
    foreign = tmp_path / "out" / ".film.mkv.partial"
    foreign.write_text("half of it")
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        scan.until(scan.worker, "under way")
    assert foreign.exists()


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("mine")


@pytest.mark.parametrize("change", [removed, replaced_by_a_file])
def test_output_folder_goes_away_during_the_scan(shelf: Shelf, tmp_path: Path, change: Callable[[Path], None]) -> None:
    with begin(shelf, tmp_path) as scan:
        worker = scan.freeze(lambda: measuring(scan, tmp_path), "measuring")
        change(tmp_path / "out")
        worker.resume()
        code = scan.ends()
        require_clean(scan)
        assert scan.lines()[0].startswith("The scan cannot be gone on with if it is cut off: ")
        if change is removed:
            assert code == 0, scan.stderr
            assert len(finished(tmp_path)) == 3
            return
        assert code == 3, scan.stderr
        rescued = kept_result(scan)
    assert (tmp_path / "out").read_text() == "mine"
    assert json.loads(rescued.read_text())["levels"]
    rescued.unlink()


def test_cache_folder_goes_away_while_it_is_measured(shelf: Shelf, tmp_path: Path) -> None:
    """The levels are mapped; what another process takes out of the cache does no harm."""
    shutil.copytree(shelf.cache, tmp_path / "cache")
    shelf.copy(tmp_path)
    with Scan(small("tiny.gguf", "--levels", "Q4_K_M,Q5_K_M"), tmp_path) as scan:
        worker = scan.freeze(lambda: measuring(scan, tmp_path), "measuring")
        shutil.rmtree(tmp_path / "cache")
        worker.resume()
        assert scan.ends() == 0, scan.stderr
        require_clean(scan)
    assert [level["name"] for level in result(tmp_path)["levels"]] == ["Q4_K_M", "Q5_K_M"]


def test_cache_folder_goes_away_while_a_level_is_made(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, model="deep.gguf", own=True) as scan:
        worker = scan.freeze(lambda: making(scan, tmp_path), "making")
        shutil.rmtree(tmp_path / "cache")
        worker.resume()
        require_refused(scan, 3, "cache")
    assert finished(tmp_path) == []


# -- an output that is an input


def named(name: str) -> Callable[[Path, Path], Path]:
    """The input is where an output belongs."""

    def place(given: Path, out: Path) -> Path:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        return given.rename(target)

    return place


def symlinked(given: Path, out: Path) -> Path:
    (out / "report.md").symlink_to(given)
    return given


def hard_linked(given: Path, out: Path) -> Path:
    os.link(given, out / "report.html")
    return given


PLACES = {
    "result.json": named("result.json"),
    "report.html": named("report.html"),
    "symlink": symlinked,
    "hard link": hard_linked,
    "state": named("unfinished.npz"),
    "chart": named("charts/ladder.svg"),
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("model", "result.json"),
        ("model", "hard link"),
        ("text", "result.json"),
        ("text", "report.html"),
        ("text", "symlink"),
        ("tokens", "hard link"),
        ("model", "state"),
        ("text", "state"),
        ("text", "chart"),
    ],
)
def test_output_that_is_an_input_is_refused(shelf: Shelf, tmp_path: Path, kind: str, place: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    model = shelf.copy(tmp_path)
    text = tmp_path / "input.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30 if kind == "text" else "1 2 3 4 5 " * 60)
    given = PLACES[place](model if kind == "model" else text, out)
    before = given.read_bytes()
    arguments = small(str(given), "--levels", "Q8_0") if kind == "model" else small("tiny.gguf", f"--{kind}", given)
    with Scan([*arguments, "--chunks", 1, "--rank-chunks", 1], tmp_path, {"QRES_CACHE": str(shelf.cache)}) as scan:
        scan.ends()
        assert given.exists()
        assert given.read_bytes() == before
        require_refused(scan, 3, "is an input and would be overwritten", "Choose another place with --out")


# -- two scans at once


def test_second_scan_into_one_folder_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path) as first:
        worker = first.freeze(lambda: measuring(first, tmp_path), "measuring")
        with again(shelf, tmp_path) as second:
            require_refused(second, 3, "another scan is writing to out", "Wait for it, or choose another --out")
        worker.resume()
        assert first.ends() == 0, first.stderr
        require_clean(first)
    assert len(finished(tmp_path)) == 3


def test_two_scans_make_a_level_once(shelf: Shelf, tmp_path: Path) -> None:
    once = ("--chunks", 1, "--rank-chunks", 1)
    with begin(shelf, tmp_path, *once, model="deep.gguf", own=True) as first:
        worker = first.freeze(lambda: making(first, tmp_path), "making")
        with again(shelf, tmp_path, *once, "--out", "other", model="deep.gguf", own=True) as second:
            waits = "Waiting for another scan that is making deep-Q8_0.gguf"
            second.until(lambda: waits in second.stderr, "waiting")
            worker.resume()
            first.until(lambda: list((tmp_path / "cache").rglob("*.gguf")), "made")
            made = next((tmp_path / "cache").rglob("*.gguf")).stat()
            assert first.ends() == 0, first.stderr
            assert second.ends() == 0, second.stderr
            require_clean(second)
            assert second.lines() == [waits]
            assert first.lines() == []
    (level,) = (tmp_path / "cache").rglob("*.gguf")
    assert (level.stat().st_ino, level.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


# -- files that change


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def overwrite(path: Path) -> None:
    """Some of the last layer's weights, which lie before the head."""
    with path.open("r+b") as file:
        file.seek(-300_000, os.SEEK_END)
        file.write(b"\0" * 100_000)


def truncate(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize("change", [append, truncate])
def test_model_changes_while_it_is_measured(shelf: Shelf, tmp_path: Path, change: Callable[[Path], None]) -> None:
    with begin(shelf, tmp_path, *ENDLESS) as scan:
        worker = scan.freeze(lambda: measuring(scan, tmp_path), "measuring")
        change(tmp_path / "tiny.gguf")
        worker.resume()
        assert scan.ends() in (3, 5), scan.stderr
        (line,) = scan.lines()  # no word of --resume, which would refuse: the model has another date
        assert "tiny.gguf changed while it was measured" in line
        require_clean(scan)
    assert finished(tmp_path) == []


def test_level_of_a_model_that_changed_meanwhile_is_not_kept(shelf: Shelf, tmp_path: Path) -> None:
    """The cache goes by content: a level of other content would be taken for this model's ever after."""
    with begin(shelf, tmp_path, *ENDLESS, model="deep.gguf", own=True) as scan:
        worker = scan.freeze(lambda: making(scan, tmp_path), "making")
        overwrite(tmp_path / "deep.gguf")
        worker.resume()
        assert scan.ends() == 3, scan.stderr
        assert "deep.gguf changed while it was measured" in scan.lines()[-1]
    assert list((tmp_path / "cache").rglob("*.gguf")) == []


def test_model_is_cut_off_while_a_level_is_made(shelf: Shelf, tmp_path: Path) -> None:
    with begin(shelf, tmp_path, model="deep.gguf", own=True) as scan:
        worker = scan.freeze(lambda: making(scan, tmp_path), "making")
        truncate(tmp_path / "deep.gguf")
        worker.resume()
        assert scan.ends() in (3, 5), scan.stderr
        assert "deep.gguf changed while it was measured" in scan.lines()[-1]
        require_clean(scan)
    assert list((tmp_path / "cache").rglob("*.gguf")) == []


def test_level_replaced_or_damaged_in_the_cache(shelf: Shelf, tmp_path: Path) -> None:
    """Replaced while it is mapped it does no harm; what is damaged is made again by the next scan."""
    shutil.copytree(shelf.cache, tmp_path / "cache")
    level = next((tmp_path / "cache").rglob("tiny-Q8_0.gguf"))
    good = level.read_bytes()
    with begin(shelf, tmp_path, own=True) as scan:
        worker = scan.freeze(lambda: measuring(scan, tmp_path), "measuring")
        level.with_name("new").write_bytes(good[: len(good) // 2])
        level.with_name("new").replace(level)
        worker.resume()
        assert scan.ends() == 0, scan.stderr
        require_clean(scan)
    with again(shelf, tmp_path, *ENDLESS, own=True) as scan:
        scan.until(lambda: measuring(scan, tmp_path), "measuring")
        require_quiet(scan)
    assert level.read_bytes() == good


# -- levels that crash llama.cpp


def deadly(source: Path, target: Path) -> None:
    """A copy whose norm has a negative epsilon: it loads, and ggml asserts in the first decode that it is none."""
    data = bytearray(source.read_bytes())
    key = b"llama.attention.layer_norm_rms_epsilon"
    at = data.index(key) + len(key) + 4  # behind the value's type
    assert struct.unpack_from("<f", data, at)[0] == pytest.approx(1e-5)
    struct.pack_into("<f", data, at, -1.0)
    target.write_bytes(data)


@pytest.fixture(scope="module")
def files(shelf: Shelf) -> tuple[Path, Path]:
    """A level that can be measured, and one that takes the process down."""
    good = next(shelf.cache.rglob("tiny-Q8_0.gguf"))
    bad = shelf.folder / "bad.gguf"
    deadly(next(shelf.cache.rglob("tiny-Q4_K_M.gguf")), bad)
    return good, bad


def given_files(*paths: Path) -> list[object]:
    return small(str(paths[0]), *paths[1:], "--rank-chunks", 3, "--chunks", 8)


def test_level_that_crashes_is_left_out(shelf: Shelf, tmp_path: Path, files: tuple[Path, Path]) -> None:
    """Also by a scan that is cut off behind the crash and gone on with, as the note says, by the same command."""
    model = shelf.copy(tmp_path)
    with Scan(given_files(model, *files), tmp_path) as scan:
        scan.freeze(lambda: "Going on without it" in scan.stderr and measuring(scan, tmp_path), "measuring again")
        scan.interrupt()
        warning, *rest = scan.lines()
        assert warning.startswith("Q4_K_M cannot be measured: llama.cpp died with SIGABRT: ops.cpp:")
        assert rest[-2:] == [KEPT, INTERRUPTED]
        require_clean(scan)
    with Scan([*given_files(model, *files), "--resume"], tmp_path) as scan:
        assert scan.ends() == 0, scan.stderr
        assert "Going on with the unfinished scan" in scan.stderr
    loaded = result(tmp_path)
    assert [level["name"] for level in loaded["levels"]] == ["Q8_0"]
    rows = [row for row in loaded["skipped"] if row["what"] == "Q4_K_M"]
    assert len(rows) == 1
    assert "GGML_ASSERT" in rows[0]["reason"]


def test_only_level_or_reference_that_crashes(shelf: Shelf, tmp_path: Path, files: tuple[Path, Path]) -> None:
    model = shelf.copy(tmp_path)
    dead = tmp_path / "dead.gguf"
    deadly(model, dead)
    for models in ((model, files[1]), (dead, files[0])):
        with Scan(given_files(*models), tmp_path) as scan:
            require_refused(scan, 5, "llama.cpp died with SIGABRT: ops.cpp:")
    assert not (tmp_path / "out").exists()


def test_made_level_that_crashes_is_left_out(tmp_path: Path) -> None:
    """Of one architecture llama.cpp 0.3.36 aborts on Q4_K_M."""
    archs.make("qwen4exp-moe", tmp_path)
    (tmp_path / "ids.txt").write_text(" ".join(str((7 * i * i + 3 * i + 1) % 128) for i in range(400)))
    arguments = small("qwen4exp-moe.gguf", "--tokens", "ids.txt", "--levels", "Q4_K_M,F32")
    with Scan([*arguments, "--chunks", 1, "--rank-chunks", 1], tmp_path) as scan:
        assert scan.ends() == 0, scan.stderr
        assert "Q4_K_M cannot be measured: llama.cpp died with SIGABRT: binary-ops.cpp" in scan.stderr
        require_clean(scan)
    loaded = result(tmp_path)
    assert [level["name"] for level in loaded["levels"]] == ["F32"]
    assert "Q4_K_M" in [row["what"] for row in loaded["skipped"]]
