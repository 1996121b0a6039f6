"""Which file is the reference, and which are to be compared with it; each pair checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qres.errors import InputError, QresError, UsageError
from qres.events import Listener
from qres.gguf import claims, model_file
from qres.gguf.difference import tokenizer_differences, vector_difference
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import not_executed, pair
from qres.printable import counted, show

_GIVE = "give quantized files of this reference"


@dataclass(frozen=True)
class Given:
    """What the arguments are."""

    reference: Inventory
    files: tuple[Inventory, ...]
    """Each file once."""
    remarks: tuple[str, ...]
    """What a reader of the result must know."""
    tokenizers: Mapping[Path, tuple[str, ...]]
    """Of files with another tokenizer than the reference, what is different: the text decides whether it matters."""


def read_inputs(model: Path, files: Sequence[Path], listener: Listener) -> Given:
    """Read the arguments, drop repetitions, and find out which one is the 16-bit model: their order does not matter.

    Raises:
        InputError: a file that cannot be used, or two that are not the same model.
        UnsupportedError: a model that cannot be measured.
        UsageError: several 16-bit models behind one that is not.
    """
    first = model_file.read(model)
    others = _once([model_file.read(path) for path in files], listener)
    remarks: list[str] = []
    full = [other for other in others if other.is_16bit]
    if full and not first.is_16bit:
        if len(full) > 1:
            raise UsageError(
                f"{first.path.name} is not 16 bit, {' and '.join(other.path.name for other in full)} are",
                "give the one to compare with first",
            )
        others = _once([first, *(other for other in others if other is not full[0])], listener)
        first = full[0]
        listener.note(f"Taken as the reference: {first.path.name}, the 16-bit one")
    model_file.require_language_model(first, "reference")
    if not first.is_16bit:
        kind = claims.publishers_mix(first) or first.file_type or "already quantized"
        remarks.append(
            f"The reference {first.path.name} is {kind} at {first.bpw:.2f} bits per weight, not 16 bit: every figure "
            "compares with an already damaged model."
        )
    for one in (first, *others):
        disagreement = claims.level_disagreement(one)
        if disagreement:
            remarks.append(f"{one.path.name}: {disagreement}.")
    for other in (first, *others):
        remarks += _never_run(other)
    tokenizers = {}
    for other in others:
        remarks += _require_same_model(first, other)
        if other.path.samefile(first.path):
            listener.note(f"{other.path.name} is the reference itself: every difference will be 0")
            continue
        remarks += _other_vectors(first, other)
        different = tokenizer_differences(first, other)
        if different:
            tokenizers[other.path] = different
    return Given(first, tuple(others), tuple(remarks), tokenizers)


def _other_vectors(reference: Inventory, other: Inventory) -> list[str]:
    vector = vector_difference(reference, other)
    if not vector:
        return []
    return [
        f"{other.path.name} was not made from {reference.path.name}: {show(vector)} differs, which quantizing "
        "leaves alone. The figures are the distance between two models, not what quantization did."
    ]


def _never_run(inventory: Inventory) -> list[str]:
    """Of a file with blocks that llama.cpp skips, what that means for the figures."""
    return [
        f"{inventory.path.name}: block {one.block} (NextN, {one.bytes / 2**20:.1f} MiB) is not executed: no figure "
        "depends on it, and nothing is known of its types."
        for one in not_executed(inventory)
    ]


def tokenizer_remarks(given: Given, retokenized: Mapping[Path, str], *, as_ids: bool) -> tuple[str, ...]:
    """What other tokenizers mean for the figures.

    Args:
        given: The files.
        retokenized: By file, where its tokenizer makes other ids of the measuring text; empty for the same ids.
        as_ids: Token ids were given instead of text.

    Raises:
        InputError: a tokenizer that makes other ids.
    """
    remarks = []
    for path, different in given.tokenizers.items():
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        if retokenized.get(path):
            raise InputError(
                f"{path.name} has another tokenizer than {given.reference.path.name}: {different[0]}{more}; "
                f"{retokenized[path]}",
                "their outputs cannot be compared on this text: give files made from this reference, or --tokens",
            )
        why = "token ids were given, so that no tokenizer takes part" if as_ids else "the text becomes the same tokens"
        remarks.append(
            f"{path.name}: {different[0]}{more}; {why}, and the figures hold. Programs may use it otherwise."
        )
    return tuple(remarks)


def _once(files: Sequence[Inventory], listener: Listener) -> list[Inventory]:
    """Each file once: a link, or another shard of the same set, is the same file."""
    kept: list[Inventory] = []
    for inventory in files:
        if any(inventory.path.samefile(other.path) for other in kept):
            listener.note(f"{inventory.path.name} was given twice: it is measured once")
        else:
            kept.append(inventory)
    return kept


def hidden_tokens(count: int, names: Sequence[str]) -> tuple[str, ...]:
    """Special tokens of the model that are read as characters in the measuring text, and what to do about it."""
    if not count:
        return ()
    shown = ", ".join(map(show, names[:3])) + (" and others" if len(names) > 3 else "")
    stand = "stands" if count == 1 else "stand"
    return (
        f"{counted(count, 'special token')} of this model {stand} in the text as plain characters ({shown}): "
        "--special parses them, as a chat program does.",
    )


def _require_same_model(reference: Inventory, other: Inventory) -> list[str]:
    """Refuse another model; of the same one, what a reader must know about how its file lays it out."""
    try:
        model_file.require_language_model(other, "candidate")
    except QresError as error:  # what to give in the place of a reference is no help here
        raise type(error)(error.message, _GIVE) from error
    found = pair(reference, other)
    if found.problem:
        raise InputError(
            f"{other.path.name} is not the same model as {reference.path.name}: {found.problem}",
            _GIVE,
        )
    return [f"{other.path.name} {found.remark}."] if found.remark else []
