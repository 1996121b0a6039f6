"""What the worker needs to know of files: bytes and types, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qres import levels
from qres.files import Stamp
from qres.gguf import hyperparameters
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.gguf.model_file import bytes_at
from qres.gguf.pairing import ROPE_FACTORS, executed, pair
from qres.measure.job import ModelFile


def model_file(name: str, inventory: Inventory, stamps: Mapping[Path, Stamp]) -> ModelFile:
    """What the worker needs to know about the reference."""
    return ModelFile(
        name=name,
        path=str(inventory.path.absolute()),
        file_bytes=inventory.file_bytes,
        tensor_bytes={tensor.name: tensor.n_bytes or 0 for tensor in inventory.tensors},
        tensor_types={tensor.name: tensor.type for tensor in inventory.tensors},
        stamps=tuple(stamps[path] for path in inventory.shards),
    )


def level_file(
    name: str,
    reference: Inventory,
    inventory: Inventory,
    stamps: Mapping[Path, Stamp],
    changed: frozenset[str] = frozenset(),
) -> ModelFile:
    """What it needs to know about a level: bytes and types by the reference's names, wherever the file has them.

    Args:
        name: Of the level.
        reference: What it is compared with.
        inventory: Its file.
        stamps: Of all files.
        changed: Its tensors that have the reference's type and other bytes.
    """
    places = pair(reference, inventory).places
    names = [{tensor.name for tensor in executed(one)}.difference(ROPE_FACTORS) for one in (reference, inventory)]
    same = names[0] == names[1] and all(place.tensors == (tensor,) for tensor, place in places.items())
    return replace(
        model_file(name, inventory, stamps),
        tensor_bytes={tensor: place.n_bytes for tensor, place in places.items()},
        tensor_types={tensor: place.type for tensor, place in places.items()},
        own_names=frozenset() if same else frozenset(tensor.name for tensor in inventory.tensors),
        changed=changed,
        keys=tuple(map(str, hyperparameters.differences(reference, inventory))),
    )


def bytes_16bit(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at 16 bit, or as it is where that is less; vectors (norms, biases) are at every level so."""
    return _matrix_bytes(inventory, "F16")


def bytes_q8_0(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at Q8_0, or as it is where that is less."""
    return _matrix_bytes(inventory, "Q8_0")


def predicted_types(reference: Inventory, given: Sequence[Inventory]) -> dict[str, tuple[str, ...]]:
    """For each matrix, the types to predict the damage of: usual ones that fit its rows, and those of the levels.

    Of what is quantized in the reference only smaller ones, and none where levels leave it as it is.
    """
    held: dict[str, list[str]] = {}
    for inventory in given:
        for tensor in inventory.tensors:
            held.setdefault(tensor.name, []).append(tensor.type)
    types, quantized = {}, reference.quantized
    for tensor in _matrices(reference):
        usual = [levels.fitting_type(name, tensor.row) for name in levels.PREDICTED]
        if tensor.name in quantized:
            usual = (
                [] if reference.is_original else [one for one in usual if bytes_at(tensor, one) < (tensor.n_bytes or 0)]
            )
        wanted = usual + held.get(tensor.name, [])
        exact = {tensor.type, "F32", "F16"} if tensor.type != "BF16" else {"F32", "BF16"}
        types[tensor.name] = tuple(dict.fromkeys(name for name in wanted if name not in exact))
    return types


def _matrices(inventory: Inventory) -> list[Tensor]:
    """Tensors of two dimensions or more, of the blocks that run."""
    return [tensor for tensor in executed(inventory) if tensor.n_dims >= 2]


def _matrix_bytes(inventory: Inventory, type_name: str) -> dict[str, int]:
    quantized = inventory.quantized
    return {
        t.name: min(bytes_at(t, type_name), t.n_bytes or 0) if t.name in quantized else bytes_at(t, type_name)
        for t in _matrices(inventory)
    }


def types_16bit(inventory: Inventory, values: Sequence[Magnitudes]) -> dict[str, str]:
    """The 16-bit type that holds each matrix with room to spare; its own of what is quantized in the reference.

    BF16 stays BF16; F32 and F16 become it where a weight is in the upper half of the range of F16 or beyond; anything
    else is F16.

    Args:
        inventory: The reference.
        values: Its values, tensor by tensor.
    """
    quantized = inventory.quantized
    return {
        tensor.name: quantized.get(tensor.name, "BF16" if tensor.type == "BF16" or found.near_f16 else "F16")
        for tensor, found in zip(inventory.tensors, values, strict=True)
        if tensor.n_dims >= 2
    }
