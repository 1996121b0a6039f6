"""The levels to measure: made by qres, found in the cache, or given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qres import levels
from qres.errors import CrashError, InputError, NativeError, UnsupportedError, UsageError
from qres.events import Listener, OnProgress
from qres.gguf import claims, difference
from qres.gguf.difference import Changes
from qres.gguf.inventory import Inventory
from qres.levels import LevelSpec
from qres.printable import show
from qres.quantize.cache import level_file
from qres.quantize.original import Original
from qres.records.files import SharedTensors
from qres.records.result import Skipped

_NONE = Changes()


@dataclass(frozen=True)
class Candidate:
    """A level to measure."""

    name: str
    inventory: Inventory
    changes: Changes = _NONE
    """What it holds otherwise than the reference at the same type; nothing where qres made it."""


def from_files(files: Sequence[Inventory], changes: Sequence[Changes] = ()) -> list[Candidate]:
    """Given files as candidates, smallest first, by names of their own: everything about a level is found by its name.

    The file type alone where it is enough, else with the file's name, its folder, or a running number. `changes` are
    those of the files, in their order.
    """
    kinds = [_kind(inventory) for inventory in files]
    for naming in (
        lambda kind, _path, _i: kind,
        lambda kind, path, _i: f"{kind} ({path.name})",
        lambda kind, path, _i: f"{kind} ({path.parent.name}/{path.name})",
        lambda kind, _path, i: f"{kind} (file {i + 1})",
    ):
        names = [naming(kinds[i], inventory.path.resolve(), i) for i, inventory in enumerate(files)]
        if len(set(names)) == len(names):
            break
    known = changes or [_NONE] * len(files)
    return _by_size(Candidate(show(names[i]), inventory, known[i]) for i, inventory in enumerate(files))


def _kind(inventory: Inventory) -> str:
    """The level that a file claims to be, unless it holds something else."""
    if claims.level_disagreement(inventory):
        return claims.main_type(inventory)
    return inventory.file_type or inventory.path.stem


def _by_size(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.inventory.file_bytes)


def levels_to_make(names: Sequence[str], *, with_imatrix: bool = False) -> tuple[LevelSpec, ...]:
    """The levels of these names, each once.

    Raises:
        UsageError: unknown, none, or one that cannot be made without an importance matrix.
    """
    wanted = tuple(dict.fromkeys(levels.parse(name) for name in names))
    if not wanted:
        raise UsageError("--levels names no level", "give some, such as Q4_K_M,Q6_K")
    for level in wanted:
        if level.needs_imatrix and not with_imatrix:
            raise UsageError(
                f"{level.name} needs an importance matrix",
                "give one to qres scan with --imatrix, or take another level",
            )
    return wanted


def require_original(reference: Inventory, *, recipe: bool) -> None:
    """Refuse to make levels, or only recipes, of what is quantized already, as llama.cpp does.

    Raises:
        InputError: levels were asked for, of a reference that is no original.
        UnsupportedError: the same of recipes.
    """
    if reference.is_original:
        return
    what = f"{reference.path.name} is {claims.quantized_as(reference)} already"
    if recipe:
        raise UnsupportedError(
            f"{what}: llama.cpp quantizes no weights a second time, so that no recipe can be built from it",
            "give the 16-bit model as the reference, or leave --recipe out",
        )
    raise InputError(
        f"{what}: no level can be made from it", "give the 16-bit model, or quantized files to compare with it"
    )


def made(
    original: Original, wanted: Sequence[LevelSpec], folder: Path, listener: Listener
) -> tuple[list[Candidate], tuple[Skipped, ...]]:
    """Make levels, or find them in the cache; one that llama.cpp refuses does not end the others.

    Args:
        original: What to make them from, with its digest.
        wanted: The levels.
        folder: The cache.
        listener: Hears of progress.

    Raises:
        InputError: no room, a folder that cannot be written, or an original that changed.
        NativeError: none could be made.
    """
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for level in wanted:
        try:
            found.append(Candidate(level.name, level_file(original, level, folder, listener)))
        except NativeError as error:
            if isinstance(error, CrashError) and error.killed:  # for want of memory, perhaps: the next would be, too
                raise
            skipped.append(Skipped(level.name, str(error)))
            listener.warn(f"{level.name} could not be made: {error}")
    if not found:
        raise NativeError(f"no level could be made: {'; '.join(f'{row.what}: {row.reason}' for row in skipped)}")
    return _by_size(found), tuple(skipped)


def shared(candidates: Sequence[Candidate], on_progress: OnProgress) -> tuple[SharedTensors, ...]:
    """Pairs of candidates with matrices that are the same byte for byte."""
    rows = []
    pairs = [(a, b) for i, a in enumerate(candidates) for b in candidates[i + 1 :]]
    for done, (a, b) in enumerate(pairs):
        on_progress(done, len(pairs))
        found = difference.shared_tensors(a.inventory, b.inventory)
        if found.tensors:
            rows.append(SharedTensors(a.name, b.name, found.tensors, found.of, found.bytes))
    return tuple(rows)
