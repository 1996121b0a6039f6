"""Changes to the code that tests must notice: made one by one in a copy of the tree, where the tests named must fail.

    python -m tests.mutants [WORD ...]

Words choose the files that have one of them in their path. The list is tests/mutants.toml.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
PATIENCE_S = 180.0
"""A mutant that runs longer is noticed, too: its tests take seconds."""
PROCESSES = 2


@dataclass(frozen=True)
class Mutant:
    """One change."""

    path: str
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """At least one of these fails."""

    def __str__(self) -> str:
        return f"{self.path}: {_line(self.old)} -> {_line(self.new)}"


def _line(text: str) -> str:
    return " ".join(text.split()) or "nothing"


def read(words: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of the files that have one of the words in their path; of all files without any."""
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))["file"]
    return [
        Mutant(table["path"], old, new, tuple(table["tests"]))
        for table in tables
        for old, new in table["mutants"]
        if not words or any(word in table["path"] for word in words)
    ]


def moved(mutants: Sequence[Mutant]) -> list[str]:
    """What does not stand exactly once in its file any more, and mutants that are in the list twice."""
    found = []
    for mutant in mutants:
        path = ROOT / mutant.path
        times = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if times != 1:
            found.append(f"stands {times} times in its file: {mutant}")
    return [*found, *(f"is there twice: {mutant}" for mutant in dict.fromkeys(mutants) if mutants.count(mutant) > 1)]


class Tree:
    """A copy of what tests need, in which a file is changed and changed back."""

    _times = count(1_000_000_000)
    """Modification times: bytecode is taken for stale by them, in whole seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("qres", "tests", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Makefile"):
            shutil.copy(path, folder)

    def write(self, name: str, text: str) -> None:
        """Write a file so that Python compiles it again."""
        path, time = self.folder / name, next(self._times)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (time, time))

    def test(self, tests: Sequence[str]) -> int | None:
        """Pytest's exit code; None after too long."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests],
                cwd=self.folder,
                env={**environment, "PYTHONPATH": str(self.folder), "PYTHONPYCACHEPREFIX": ""},
                capture_output=True,
                timeout=PATIENCE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


FAILED = (1, 2, None)
"""A test failed, a module of tests cannot even be imported, or it took too long."""


def survivors(mutants: Sequence[Mutant], folder: Path) -> list[Mutant]:
    """Those that no test noticed."""
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for i in range(PROCESSES):
        trees.put(Tree(folder / str(i)))

    def survives(mutant: Mutant) -> bool:
        tree = trees.get()
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        try:
            tree.write(mutant.path, text.replace(mutant.old, mutant.new))
            code = tree.test(mutant.tests)
        finally:
            tree.write(mutant.path, text)
            trees.put(tree)
        if code not in (0, *FAILED):
            raise SystemExit(f"pytest ended with {code}: {mutant}")
        print("survived" if code == 0 else "noticed ", mutant, flush=True)  # noqa: T201
        return code == 0

    with ThreadPoolExecutor(PROCESSES) as pool:
        return [mutant for mutant, alive in zip(mutants, pool.map(survives, mutants), strict=True) if alive]


def main(words: Sequence[str]) -> str | None:
    """Run the list; what is wrong, in words."""
    mutants = read(words)
    if not mutants:
        return "no file has such a word in its path"
    lost = moved(mutants)
    if lost:
        return "\n".join(["The code has moved, mend tests/mutants.toml:", *lost])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if Tree(folder / "unchanged").test(tests) != 0:
            return "The tests fail without any change."
        alive = survivors(mutants, folder)
    if alive:
        return "\n".join([f"{len(alive)} of {len(mutants)} mutants survived:", *map(str, alive)])
    print(f"All {len(mutants)} mutants were noticed.")  # noqa: T201
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
