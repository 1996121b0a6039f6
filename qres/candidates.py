"""Which files a scan compares: the reference, and the levels, given or made; each pair checked to be the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from qres import claims, gguf_file, level_cache, levels
from qres.errors import CrashError, InputError, NativeError, QresError, UsageError
from qres.file_stamp import Stamp
from qres.findings import SharedTensors
from qres.gguf_cursor import show
from qres.gguf_file import Inventory
from qres.imatrix import Imatrix
from qres.levels import Level
from qres.records import Skipped

_GIVE = "give quantized files of this reference"

OnProgress = Callable[[int, int], None]
Note = Callable[[str], None]


class Listener(Protocol):
    """Hears how a scan gets on; the command line draws it."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; `total` counts its steps where that is known."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Progress within the stage."""

    def note(self, text: str) -> None:
        """Something the user may want to know now."""

    def warn(self, text: str) -> None:
        """Something the user must mind."""


@dataclass(frozen=True)
class Candidate:
    """A level to measure."""

    name: str
    inventory: Inventory


@dataclass(frozen=True)
class Given:
    """What the arguments are."""

    reference: Inventory
    files: tuple[Inventory, ...]
    """Each file once."""
    remarks: tuple[str, ...]
    """What a reader of the result must know."""


def given(model: Path, files: Sequence[Path], note: Note) -> Given:
    """Read the arguments, drop repetitions, and find out which one is the 16-bit model: their order does not matter.

    Raises:
        InputError: a file that cannot be used, or two that are not the same model.
        UnsupportedError: a model that cannot be measured.
        UsageError: several 16-bit models behind one that is not.
    """
    first = gguf_file.read(model)
    others = _once([gguf_file.read(path) for path in files], note)
    remarks: list[str] = []
    full = [other for other in others if other.is_16bit]
    if full and not first.is_16bit:
        if len(full) > 1:
            raise UsageError(
                f"{first.path.name} is not 16 bit, {' and '.join(other.path.name for other in full)} are",
                "give the one to compare with first",
            )
        others = _once([first, *(other for other in others if other is not full[0])], note)
        first = full[0]
        note(f"Taken as the reference: {first.path.name}, the 16-bit one")
    gguf_file.require_language_model(first, "reference")
    if not first.is_16bit:
        kind = first.file_type or "already quantized"
        remarks.append(
            f"The reference {first.path.name} is {kind} at {first.bpw:.2f} bits per weight, not 16 bit: every figure "
            "compares with an already damaged model."
        )
    for one in (first, *others):
        disagreement = claims.level_disagreement(one)
        if disagreement:
            remarks.append(f"{one.path.name}: {disagreement}.")
    for other in others:
        _require_same_model(first, other)
        if other.path.samefile(first.path):
            note(f"{other.path.name} is the reference itself: every difference will be 0")
            continue
        vector = gguf_file.vector_difference(first, other)
        if vector:
            remarks.append(
                f"{other.path.name} was not made from {first.path.name}: {show(vector)} differs, which quantizing "
                "leaves alone. The figures are the distance between two models, not what quantization did."
            )
    return Given(first, tuple(others), tuple(remarks))


def _once(files: Sequence[Inventory], note: Note) -> list[Inventory]:
    """Each file once: a link, or another shard of the same set, is the same file."""
    kept: list[Inventory] = []
    for inventory in files:
        if any(inventory.path.samefile(other.path) for other in kept):
            note(f"{inventory.path.name} was given twice: it is measured once")
        else:
            kept.append(inventory)
    return kept


def _require_same_model(reference: Inventory, other: Inventory) -> None:
    try:
        gguf_file.require_language_model(other, "candidate")
    except QresError as error:  # what to give in the place of a reference is no help here
        raise type(error)(error.message, _GIVE) from error
    difference = gguf_file.shape_difference(reference, other)
    if difference:
        raise InputError(
            f"{other.path.name} is not the same model as {reference.path.name}: {difference}",
            _GIVE,
        )
    difference = gguf_file.tokenizer_difference(reference, other)
    if difference:
        raise InputError(
            f"{other.path.name} has another tokenizer than {reference.path.name}: {difference}",
            "their outputs cannot be compared: give files made from this reference",
        )


def from_files(files: Sequence[Inventory]) -> list[Candidate]:
    """Given files as candidates, smallest first, by names of their own: everything about a level is found by its name.

    The file type alone where it is enough, else with the file's name, its folder, or a running number.
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
    return _by_size(Candidate(show(name), inventory) for name, inventory in zip(names, files, strict=True))


def _kind(inventory: Inventory) -> str:
    """The level that a file claims to be, unless it holds something else."""
    if claims.level_disagreement(inventory):
        return claims.main_type(inventory)
    return inventory.file_type or inventory.path.stem


def _by_size(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.inventory.file_bytes)


def levels_to_make(names: Sequence[str], *, with_imatrix: bool = False) -> tuple[Level, ...]:
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


def require_16bit(reference: Inventory) -> None:
    """Refuse to make levels of what is quantized already, as llama.cpp does.

    Raises:
        InputError: the reference is no 16-bit model.
    """
    if not reference.is_16bit:
        raise InputError(
            f"{reference.path.name} is {reference.file_type or 'quantized'} already: no level can be made from it",
            "give the 16-bit model, or quantized files to compare with it",
        )


def made(
    reference: Inventory,
    wanted: Sequence[Level],
    folder: Path,
    threads: int,
    listener: Listener,
    stamps: Sequence[Stamp],
    imatrix: Imatrix | None = None,
) -> tuple[list[Candidate], tuple[Skipped, ...]]:
    """Make levels, or find them in the cache; one that llama.cpp refuses does not end the others.

    Raises:
        InputError: no room, a folder that cannot be written, or a reference that changed.
        NativeError: none could be made.
    """
    listener.stage("reading the reference", None)
    digest = gguf_file.content_digest(reference.shards, in_mib(listener))
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for level in wanted:
        try:
            inventory = level_file(reference, digest, level, folder, threads, listener, stamps, imatrix)
            found.append(Candidate(level.name, inventory))
        except NativeError as error:
            if isinstance(error, CrashError) and error.killed:  # for want of memory, perhaps: the next would be, too
                raise
            skipped.append(Skipped(level.name, str(error)))
            listener.warn(f"{level.name} could not be made: {error}")
    if not found:
        raise NativeError(f"no level could be made: {'; '.join(f'{row.what}: {row.reason}' for row in skipped)}")
    return _by_size(found), tuple(skipped)


def level_file(
    reference: Inventory,
    digest: str,
    level: Level,
    folder: Path,
    threads: int,
    listener: Listener,
    stamps: Sequence[Stamp],
    imatrix: Imatrix | None,
) -> Inventory:
    """A level's file, from the cache or made now; `digest` is of the reference's content.

    Raises:
        InputError: no room, a folder that cannot be written, or a reference that changed.
        NativeError: llama.cpp failed.
    """
    target = level_cache.level_path(folder, reference, digest, level, version("llama-cpp-python"), imatrix)
    listener.stage(f"making {level.name}", None)
    return level_cache.make(reference, level, target, threads, listener.step, listener.note, stamps, imatrix)


def in_mib(listener: Listener) -> OnProgress:
    """A listener of bytes read that tells another in MiB."""
    return lambda done, total: listener.step(done // 2**20, total // 2**20, "MiB")


def shared(candidates: Sequence[Candidate], on_progress: OnProgress) -> tuple[SharedTensors, ...]:
    """Pairs of candidates with matrices that are the same byte for byte."""
    rows = []
    pairs = [(a, b) for i, a in enumerate(candidates) for b in candidates[i + 1 :]]
    for done, (a, b) in enumerate(pairs):
        on_progress(done, len(pairs))
        found = gguf_file.shared_tensors(a.inventory, b.inventory)
        if found.tensors:
            rows.append(SharedTensors(a.name, b.name, found.tensors, found.of, found.bytes))
    return tuple(rows)
