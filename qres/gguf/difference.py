"""How two GGUF files differ, and whether they hold the same bytes. What reads the weights says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qres.errors import InputError, reason_of
from qres.gguf.format.metadata import Digest, Unreadable, Value, array_elements, element_text
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import SIXTEEN_BIT, Inventory
from qres.printable import show

_PIECE = 1 << 20  # bytes read at a time

_TOKENIZER_KEYS = (
    "model",
    "pre",
    "tokens",
    "merges",
    "scores",
    "token_type",
    # The padding id is left out: it never enters a chunk, and re-uploads change it.
    "bos_token_id",
    "eos_token_id",
    "eot_token_id",
    "unknown_token_id",
    "seperator_token_id",  # spelled so in the files
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
)


def tokenizer_differences(reference: Inventory, quantized: Inventory) -> tuple[str, ...]:
    """What may make the same text other token ids, in words: one line per key; empty when nothing does."""
    found = []
    for key in _TOKENIZER_KEYS:
        full = f"tokenizer.ggml.{key}"
        ours, theirs = reference.metadata.get(full), quantized.metadata.get(full)
        if ours == theirs:
            continue
        if isinstance(ours, Digest) and isinstance(theirs, Digest):
            found.append(_array_difference(full, (reference, ours), (quantized, theirs)))
        else:
            found.append(f"{full} is {_said(ours)} in the reference, {_said(theirs)} in the quantized file")
    if not found and reference.n_vocab != quantized.n_vocab:
        sizes = f"{reference.n_vocab} tokens in the reference, {quantized.n_vocab} in the quantized file"
        found.append(f"the vocabulary has {sizes}")
    return tuple(found)


def _array_difference(key: str, reference: tuple[Inventory, Digest], quantized: tuple[Inventory, Digest]) -> str:
    """How two arrays with different digests differ: in length, in type, or in which element first."""
    ours, theirs = reference[1], quantized[1]
    unit = "bytes" if ours.element_type == "byte" else "entries"
    if ours.length != theirs.length:
        return f"{key} has {ours.length} {unit} in the reference, {theirs.length} in the quantized file"
    if ours.element_type != theirs.element_type:
        return f"{key} holds {ours.element_type} in the reference, {theirs.element_type} in the quantized file"
    if ours.element_type not in ("array", "byte"):
        pairs = zip(*(array_elements(one.shards[0], array) for one, array in (reference, quantized)), strict=False)
        try:
            for index, (our, their) in enumerate(pairs):
                if our != their:
                    said = [show(element_text(ours.element_type, element)) for element in (our, their)]
                    return f"{key}[{index}] is {said[0]} in the reference, {said[1]} in the quantized file"
        except OSError as error:
            raise _unreadable(error) from error
    return f"{key} has {ours.length} {unit} in both files, but not the same ones"


def _said(value: Value | None) -> str:
    match value:
        case None:
            return "not set"
        case Digest():
            return f"a list of {value.length}"
        case Unreadable():
            return "unreadable"
    return show(repr(value))


def vector_difference(reference: Inventory, quantized: Inventory) -> str | None:
    """The first vector (norm weights, biases) that is F32 in both files, but not the same bytes; None if there is none.

    Quantizing leaves these alone, so that a difference means another model of the same shape: another fine-tune, or
    another stage of training. Rope factors are left out: each converter computes them.

    Raises:
        InputError: a file cannot be read.
    """
    theirs = {tensor.name: tensor for tensor in quantized.tensors if tensor.type == "F32"}
    for tensor in reference.tensors:
        if tensor.n_dims != 1 or tensor.type != "F32" or tensor.name not in theirs or "rope" in tensor.name:
            continue
        other = theirs[tensor.name]
        if tensor.shape == other.shape and not _same_bytes(reference, tensor, quantized, other):
            return tensor.name
    return None


def same_data(inventory: Inventory, a: str, b: str) -> bool:
    """Whether two tensors of one file hold the same bytes in the same type and shape.

    Raises:
        InputError: the file cannot be read.
    """
    tensors = {tensor.name: tensor for tensor in inventory.tensors}
    one, other = tensors.get(a), tensors.get(b)
    if one is None or other is None or (one.type_id, one.shape) != (other.type_id, other.shape):
        return False
    return _same_bytes(inventory, one, inventory, other)


@dataclass(frozen=True)
class Changes:
    """What a file holds otherwise than the reference, in tensors of the same name, shape and type."""

    tensors: tuple[str, ...] = ()
    """Those with other bytes, in the reference's order. Rope factors are left out: each converter computes them."""
    exact: tuple[str, ...] = ()
    """Those of them at 16 bit or more: quantizing would have copied them."""
    of_exact: int = 0
    """Tensors that are at the same type of 16 bit or more in both files."""
    is_copy: bool = False
    """All tensors are the same, byte for byte."""


def changes(reference: Inventory, other: Inventory) -> Changes:
    """Compare what two files hold at the same type: one read of that.

    Raises:
        InputError: a file cannot be read.
    """
    theirs = {tensor.name: tensor for tensor in other.tensors}
    pairs = [(t, theirs[t.name]) for t in reference.tensors if t.name in theirs]
    alike = [(t, o) for t, o in pairs if (t.type_id, t.shape) == (o.type_id, o.shape)]
    changed = [t for t, o in alike if not _same_bytes(reference, t, other, o)]
    counted = [t for t, _ in alike if "rope" not in t.name]
    found = [t for t in changed if "rope" not in t.name]
    return Changes(
        tensors=tuple(t.name for t in found),
        exact=tuple(t.name for t in found if t.type in SIXTEEN_BIT),
        of_exact=sum(t.type in SIXTEEN_BIT for t in counted),
        is_copy=not changed and len(alike) == len(reference.tensors) == len(other.tensors),
    )


@dataclass(frozen=True)
class Overlap:
    """The matrices that two files hold byte for byte alike."""

    tensors: int
    of: int
    """Matrices whose name is in both files."""
    bytes: int
    """Bytes that the matrices that are alike take in one file."""


def shared_tensors(a: Inventory, b: Inventory) -> Overlap:
    """Compare the matrices of two files: alike are those of the same name, type, shape and bytes.

    Raises:
        InputError: a file cannot be read.
    """
    others = {tensor.name: tensor for tensor in b.tensors if tensor.n_dims >= 2}
    pairs = [(t, others[t.name]) for t in a.tensors if t.n_dims >= 2 and t.name in others]
    alike = [
        tensor
        for tensor, other in pairs
        if (tensor.type_id, tensor.shape) == (other.type_id, other.shape) and _same_bytes(a, tensor, b, other)
    ]
    return Overlap(len(alike), len(pairs), sum(tensor.n_bytes or 0 for tensor in alike))


def _same_bytes(a: Inventory, tensor: Tensor, b: Inventory, other: Tensor) -> bool:
    """Two tensors of known and equal size hold the same bytes; read in pieces up to the first that differs.

    Read, not mapped: a file that becomes shorter meanwhile would kill the process by a signal.
    """
    if tensor.n_bytes is None:
        return False
    try:
        with (
            a.shards[tensor.shard].open("rb", buffering=0) as ours,
            b.shards[other.shard].open("rb", buffering=0) as theirs,
        ):
            ours.seek(tensor.offset)
            theirs.seek(other.offset)
            left = tensor.n_bytes
            while left:
                piece = ours.read(min(left, _PIECE))
                if not piece or piece != theirs.read(len(piece)):
                    return False
                left -= len(piece)
    except OSError as error:
        raise _unreadable(error) from error
    return True


def _unreadable(error: OSError) -> InputError:
    return InputError(f"cannot read {show(error.filename or 'the file')}: {reason_of(error)}")


def fingerprint(inventory: Inventory) -> str:
    """SHA-256 over architecture, names, shapes and types, and the first 4 KiB of each tensor's data.

    Tells a model from another fine-tune of it, whose matrices differ everywhere, without reading gigabytes; does not
    depend on how the model is split, nor on metadata.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256(inventory.architecture.encode())
    try:
        for tensor in sorted(inventory.tensors, key=lambda tensor: tensor.name):
            with inventory.shards[tensor.shard].open("rb", buffering=0) as file:
                file.seek(tensor.offset)
                begin = file.read(min(tensor.n_bytes or 0, 4096))
            digest.update(f"\0{tensor.name}\0{tensor.shape}\0{tensor.type}\0".encode())
            digest.update(begin)
    except OSError as error:
        raise _unreadable(error) from error
    return digest.hexdigest()


def content_digest(paths: Path | Sequence[Path], progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 over the bytes of all the files in order, read in pieces; `progress` is told (bytes done, bytes in all).

    Raises:
        InputError: a file cannot be read.
    """
    files = (paths,) if isinstance(paths, Path) else tuple(paths)
    digest, done = hashlib.sha256(), 0
    try:
        total = sum(path.stat().st_size for path in files)
        for path in files:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
                    done += len(piece)
                    if progress:
                        progress(done, total)
    except OSError as error:
        raise _unreadable(error) from error
    return digest.hexdigest()
