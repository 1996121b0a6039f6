"""Which file is the reference, and which are to be compared with it; each pair checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qres.errors import InputError, QresError, UsageError
from qres.events import Listener
from qres.gguf import claims, model_file
from qres.gguf.difference import Changes, changes, shape_difference, tokenizer_difference
from qres.gguf.inventory import Inventory
from qres.printable import show

_GIVE = "give quantized files of this reference"


@dataclass(frozen=True)
class Given:
    """What the arguments are."""

    reference: Inventory
    files: tuple[Inventory, ...]
    """Each file once."""
    changes: tuple[Changes, ...]
    """What each of them holds otherwise than the reference at the same type."""
    remarks: tuple[str, ...]
    """What a reader of the result must know."""


def read_inputs(model: Path, files: Sequence[Path], listener: Listener) -> Given:
    """Read the arguments, drop repetitions, and find out which one is the original: their order does not matter.

    Raises:
        InputError: a file that cannot be used, or two that are not the same model.
        UnsupportedError: a model that cannot be measured.
        UsageError: several originals behind a file that is none.
    """
    first = model_file.read(model)
    others = _once([model_file.read(path) for path in files], listener)
    remarks: list[str] = []
    best = _original(first, others)
    if best is not first:
        others = _once([first, *(other for other in others if other is not best)], listener)
        first = best
        which = "the 16-bit one" if first.is_16bit else "as it was released"
        listener.note(f"Taken as the reference: {first.path.name}, {which}")
    model_file.require_language_model(first, "reference")
    remarks += _about_reference(first)
    for one in (first, *others):
        disagreement = claims.level_disagreement(one)
        if disagreement:
            remarks.append(f"{one.path.name}: {disagreement}.")
    found = []
    for other in others:
        _require_same_model(first, other)
        found.append(_changes(first, other, listener))
        remarks += _about_changes(first, other, found[-1])
    return Given(first, tuple(others), tuple(found), tuple(remarks))


_WHOLE, _RELEASED, _QUANTIZED = range(3)


def _rank(model: Inventory) -> int:
    """How well a file serves as the reference: the less, the better."""
    return _WHOLE if not model.quantized else _RELEASED if model.is_original else _QUANTIZED


def _original(first: Inventory, others: Sequence[Inventory]) -> Inventory:
    """The file to compare with: the first, unless exactly one other is nearer to the original.

    Raises:
        UsageError: the first is quantized, and several others are not.
    """
    rank = min(map(_rank, (first, *others)))
    better = [other for other in others if _rank(other) == rank < _rank(first)]
    if len(better) > 1 and not first.is_original:
        raise UsageError(
            f"{first.path.name} is not 16 bit, {' and '.join(other.path.name for other in better)} are",
            "give the one to compare with first",
        )
    return better[0] if len(better) == 1 else first


def _about_reference(model: Inventory) -> list[str]:
    """What a reader must know of the reference: that it is quantized itself, or a part of it."""
    if not model.is_original:
        return [
            f"The reference {model.path.name} is {claims.quantized_as(model)} at {model.bpw:.2f} bits per weight, not "
            "16 bit: every figure compares with an already quantized model, whose own damage is in none of them."
        ]
    if model.quantized and not model.released_in:
        names, kinds = list(model.quantized), " and ".join(dict.fromkeys(model.quantized.values()))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return [
            f"The reference {model.path.name} holds {show(names[0])}{more} at {kinds}, not 16 bit: what that does is "
            "in no figure, and levels keep such tensors as they are."
        ]
    return []


def _changes(reference: Inventory, other: Inventory, listener: Listener) -> Changes:
    if other.path.samefile(reference.path):
        listener.note(f"{other.path.name} is the reference itself: every difference will be 0")
        return Changes(is_copy=True)
    return changes(reference, other)


def _about_changes(reference: Inventory, other: Inventory, found: Changes) -> list[str]:
    """What a reader must know of a file whose tensors are all the reference's, or not those that should be."""
    if found.is_copy and not other.path.samefile(reference.path):
        return [f"{other.path.name} holds the same tensors as the reference: every difference is 0."]
    if not found.exact:
        return []
    named = ", ".join(show(name) for name in found.exact[:3])
    more = f" and {len(found.exact) - 3} more" if len(found.exact) > 3 else ""
    one = len(found.exact) == 1
    said = f"{named}{more} {'differs' if one else 'differ'}, although {'it is' if one else 'they are'} of the same type"
    meaning = (
        "The figures are the distance between two models, not what quantization did."
        if len(found.exact) > found.of_exact / 2
        else f"All else that quantizing copies is the same: {'it was' if one else 'they were'} changed or damaged in "
        "one of the two."
    )
    return [f"{other.path.name} was not made from {reference.path.name}: {said} in both. {meaning}"]


def _once(files: Sequence[Inventory], listener: Listener) -> list[Inventory]:
    """Each file once: a link, or another shard of the same set, is the same file."""
    kept: list[Inventory] = []
    for inventory in files:
        if any(inventory.path.samefile(other.path) for other in kept):
            listener.note(f"{inventory.path.name} was given twice: it is measured once")
        else:
            kept.append(inventory)
    return kept


def _require_same_model(reference: Inventory, other: Inventory) -> None:
    try:
        model_file.require_language_model(other, "candidate")
    except QresError as error:  # what to give in the place of a reference is no help here
        raise type(error)(error.message, _GIVE) from error
    difference = shape_difference(reference, other)
    if difference:
        raise InputError(
            f"{other.path.name} is not the same model as {reference.path.name}: {difference}",
            _GIVE,
        )
    difference = tokenizer_difference(reference, other)
    if difference:
        raise InputError(
            f"{other.path.name} has another tokenizer than {reference.path.name}: {difference}",
            "their outputs cannot be compared: give files made from this reference",
        )
