"""Recorded graphs built by hand, with strides and memory as ggml lays them out, and weights that are arrays."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from qres.levels import TYPE_TRAITS, TYPES_BY_ID
from qres.native.graph import LEAF, Graph, Node
from qres.sensitivity.replay.weights import Weights

F32, F16, I32, I64 = (TYPE_TRAITS[name].id for name in ("F32", "F16", "I32", "I64"))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class FakeWeights:
    """As `Weights`, of tensors [matrices, rows, weights per row] in memory; all F32 unless said otherwise."""

    def __init__(self, tensors: Mapping[str, Tensor], types: Mapping[str, str] | None = None) -> None:
        self.device = torch.device("cpu")
        self._tensors = {name: t.reshape((1,) * (3 - t.dim()) + tuple(t.shape)) for name, t in tensors.items()}
        self._types = types or {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, int, int]:
        a, b, c = self._tensors[name].shape
        return a, b, c

    def type(self, name: str) -> str:
        return self._types.get(name, "F32")

    def rows(self, name: str, start: int, stop: int, matrix: int = 0) -> Tensor:
        return self._tensors[name][matrix, start:stop]

    def picked(self, name: str, ids: Tensor) -> Tensor:
        return self._tensors[name][0, ids]

    def whole(self, name: str) -> Tensor:
        return self._tensors[name].reshape(-1)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].squeeze(0)


def weights(types: Mapping[str, str] | None = None, **tensors: Tensor) -> tuple[Weights, FakeWeights]:
    """The same object twice: for who takes `Weights`, and for who looks into it. `a_b` is named `a.b`."""
    fake = FakeWeights({name.replace("_", "."): t for name, t in tensors.items()}, types)
    return cast(Weights, fake), fake


class Builder:
    """Writes a graph as the recorder would see it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.executed: list[int] = []
        self.inputs: dict[int, bytes] = {}

    def _append(self, op: str, ordinal: int, ne: tuple[int, ...], type_id: int, **more: object) -> int:
        four = cast(tuple[int, int, int, int], (*ne, *(1,) * (4 - len(ne))))
        size = TYPES_BY_ID[type_id].block_bytes
        nb = more.pop("nb", None) or (
            size,
            size * four[0],
            size * four[0] * four[1],
            size * four[0] * four[1] * four[2],
        )
        slots = cast(tuple[int | None, ...], more.pop("slots", ()))
        name = cast(str, more.pop("name", ""))
        self.nodes.append(
            Node(
                index=len(self.nodes),
                ordinal=ordinal,
                op=op,
                name=name,
                ne=four,
                type=type_id,
                sources=tuple(slot for slot in slots if slot is not None),
                slots=slots,
                nb=cast(tuple[int, int, int, int], nb),
                params=(*cast(tuple[int, ...], more.pop("params", ())), *(0,) * 16)[:16],
                view_root=cast("int | None", more.pop("root", None)),
                view_offset=cast(int, more.pop("offset", 0)),
            )
        )
        assert not more
        return len(self.nodes) - 1

    def leaf(self, name: str, *ne: int, type_id: int = F32) -> int:
        """A weight."""
        return self._append("NONE", LEAF, ne, type_id, name=name)

    def given(self, name: str, values: Tensor, type_id: int = F32) -> int:
        """An input or a cache with its values [..., ne1, ne0]."""
        kind = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}[type_id]
        index = self._append("NONE", LEAF, tuple(reversed(values.shape)), type_id, name=name)
        self.inputs[index] = values.numpy().astype(kind).tobytes()
        return index

    def op(self, op: str, *slots: int | None, ne: tuple[int, ...] | None = None, **more: object) -> int:
        """A computed node; of its first source's shape and float32 unless said otherwise."""
        shape = ne or self.nodes[next(slot for slot in slots if slot is not None)].ne
        type_id = cast(int, more.pop("type_id", F32))
        index = self._append(op, len(self.executed), shape, type_id, slots=slots, **more)
        self.executed.append(index)
        return index

    def view(self, source: int, *ne: int, nb: tuple[int, ...] | None = None, offset: int = 0, op: str = "VIEW") -> int:
        """A view of a source's memory; strides and offset in bytes, those of a contiguous tensor unless given."""
        node = self.nodes[source]
        root = source if node.view_root is None else node.view_root
        strides = None if nb is None else (*nb, *(nb[-1],) * (4 - len(nb)))
        return self.op(op, source, ne=ne, type_id=node.type, nb=strides, root=root, offset=node.view_offset + offset)

    def into(self, op: str, *slots: int, target: int, params: tuple[int, ...] = ()) -> int:
        """A computed node that writes into another tensor's memory, in the target's shape and type."""
        node = self.nodes[target]
        root = target if node.view_root is None else node.view_root
        return self.op(
            op, *slots, ne=node.ne, type_id=node.type, nb=node.nb, root=root, offset=node.view_offset, params=params
        )

    def matmul(self, weight: int, x: int) -> int:
        """MUL_MAT."""
        return self.op("MUL_MAT", weight, x, ne=(self.nodes[weight].ne[1], *self.nodes[x].ne[1:]))

    def graph(self) -> Graph:
        """All of it."""
        return Graph(tuple(self.nodes), tuple(self.executed), self.inputs)


def words(*values: float) -> tuple[int, ...]:
    """Floats as words of `op_params`."""
    return tuple(struct.unpack("<i", struct.pack("<f", value))[0] for value in values)
