"""One ggml operation, computed by the installed library: what the operations in torch are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from llama_cpp._ctypes_extensions import load_shared_library
from torch import Tensor

from qres.levels import TYPE_TRAITS
from qres.native import blocks, ggml
from qres.native.graph import Node
from qres.sensitivity.replay.ops import Op

Array = npt.NDArray[Any]

_TYPES: Mapping[str, int] = {"float32": 0, "float16": 1, "int32": 26, "int64": 27}
"""`ggml_type` of each kind of array."""
_KINDS = {number: np.dtype(kind) for kind, number in _TYPES.items()}


@dataclass(frozen=True)
class Quantized:
    """A tensor of another type, made of float32 rows: the operation in torch gets what its blocks stand for."""

    array: Array
    kind: str
    """e.g. `Q4_K`, `BF16`."""


@dataclass(frozen=True)
class Viewed:
    """An array whose strides the tensor keeps, as a permuted or cut one has in a graph; a plain array lies in order.

    ggml aborts where an operation does not take such strides.
    """

    array: Array


Source = Array | Quantized | Viewed | None

After = tuple[str, Sequence[Source], tuple[Any, ...]]


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def _library() -> dict[str, Any]:
    """The functions that build and compute a graph."""
    cpu = cast(ctypes.CDLL, load_shared_library("ggml-cpu", Path(llama_cpp.__file__).parent / "lib"))
    cpu.ggml_cpu_init.restype = None
    cpu.ggml_cpu_init.argtypes = ()
    cpu.ggml_cpu_init()  # fills the tables of float16 and GELU
    compute = cpu.ggml_graph_compute_with_ctx
    compute.restype = ctypes.c_int
    compute.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return {
        "init": ggml.declare("ggml_init", pointer, _InitParams),
        "free": ggml.declare("ggml_free", None, pointer),
        "new_tensor": ggml.declare(
            "ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, number, number, number, number
        ),
        "view": ggml.declare("ggml_view_4d", pointer, pointer, pointer, *(number,) * 4, *(ctypes.c_size_t,) * 4),
        "new_graph": ggml.declare("ggml_new_graph", pointer, pointer),
        "expand": ggml.declare("ggml_build_forward_expand", None, pointer, pointer),
        "compute": compute,
    }


def run(
    name: str,
    sources: Sequence[Source],
    *extra: Any,  # noqa: ANN401 - whatever the C function takes
    after: Sequence[After] = (),
    n_threads: int = 1,
) -> tuple[Node, Array]:
    """Compute one operation on the CPU.

    Args:
        name: The C function that makes it, e.g. `ggml_ssm_scan`; called with the context, the sources and `extra`.
        sources: Arrays with reversed dimensions, [..., ne1, ne0], float32, float16, int32 or int64; `Quantized` and
            `Viewed` ones; None is NULL.
        extra: The other arguments: int (any width) and float (32 bits) as they are, or ctypes values.
        after: Calls `(function, arrays, extra)` that change the operation before it is computed, made with the tensor
            instead of the context first, e.g. `("ggml_flash_attn_ext_add_sinks", [sinks], ())`.
        n_threads: Threads to compute with.

    Returns:
        The node as qres records it (its sources have the indices 0 ...) and its value [ne3, ne2, ne1, ne0].
    """
    library = _library()
    size = sum(_span(s.array) if isinstance(s, Viewed) else _array(s).nbytes for s in sources if s is not None)
    context = library["init"](_InitParams((64 << 20) + 24 * size, None, False))
    try:
        address = _call(name, context, context, sources, extra, ctypes.c_void_p)
        for function, arrays, more in after:
            _call(function, context, address, arrays, more, None)
        graph = library["new_graph"](context)
        library["expand"](graph, address)
        status = library["compute"](context, graph, n_threads)
        assert status == 0, f"{name}: ggml_status {status}"
        return _node(address), _value(address)
    finally:
        library["free"](context)


def _call(name: str, context: int, first: int, arrays: Sequence[Source], extra: Sequence[Any], kind: Any) -> int:  # noqa: ANN401
    function = getattr(ggml._lib, name)
    function.restype = kind
    function.argtypes = None
    tensors = [ctypes.c_void_p(None if array is None else _tensor(context, array)) for array in arrays]
    return cast(int, function(ctypes.c_void_p(first), *tensors, *(_argument(value) for value in extra)))


def _argument(value: Any) -> Any:  # noqa: ANN401
    """Floats have 32 bits in ggml's functions; an integer of 64 bits is right for narrower ones, too."""
    if isinstance(value, bool | int):
        return ctypes.c_int64(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


def _array(source: Array | Quantized | Viewed) -> Array:
    return source if isinstance(source, np.ndarray) else source.array


def _span(array: Array) -> int:
    """Bytes from an array's first element to behind its last one."""
    assert all(stride > 0 for n, stride in zip(array.shape, array.strides, strict=True) if n > 1)
    return int(sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize)


def _tensor(context: int, source: Array | Quantized | Viewed) -> int:
    array = _array(source)
    if isinstance(source, Viewed):
        return _view(context, array)
    shape = (1,) * (4 - array.ndim) + array.shape
    if isinstance(source, Quantized):
        kind, data = TYPE_TRAITS[source.kind].id, blocks.quantize(array.reshape(-1, shape[-1]), source.kind, threads=1)
    else:
        kind, data = _TYPES[array.dtype.name], np.ascontiguousarray(array)
    address = cast(int, _library()["new_tensor"](context, kind, *reversed(shape)))
    ctypes.memmove(ggml.at(address).data, data.ctypes.data, data.nbytes)
    return address


def _view(context: int, array: Array) -> int:
    """A tensor over a copy of an array's memory, gaps included."""
    kind, span = _TYPES[array.dtype.name], _span(array)
    root = cast(int, _library()["new_tensor"](context, kind, span // array.itemsize, 1, 1, 1))
    ctypes.memmove(ggml.at(root).data, array.ctypes.data, span)
    ne = [1, 1, 1, 1]
    ne[: array.ndim] = reversed(array.shape)
    nb: list[int] = []
    for i, n in enumerate(ne):  # numpy says nothing of strides where there is one element
        apart = array.itemsize if i == 0 else nb[-1] * ne[i - 1]
        nb.append(apart if n == 1 else array.strides[-1 - i])
    address = cast(int, _library()["view"](context, root, *ne, *nb[1:], 0))
    ggml.at(address).nb[0] = nb[0]  # where the dimensions were permuted
    return address


def _node(address: int) -> Node:
    tensor = ggml.at(address)
    slots: list[int | None] = []
    for source in tensor.src:
        slots.append(len([slot for slot in slots if slot is not None]) if source else None)
    while slots and slots[-1] is None:
        slots.pop()
    present = tuple(slot for slot in slots if slot is not None)
    ne, nb = tensor.ne, tensor.nb
    return Node(
        index=len(present),
        ordinal=0,
        op=ggml.op_name(tensor.op),
        name=tensor.name.decode(),
        ne=(ne[0], ne[1], ne[2], ne[3]),
        type=tensor.type,
        sources=present,
        slots=tuple(slots),
        nb=(nb[0], nb[1], nb[2], nb[3]),
        params=tuple(tensor.op_params),
    )


def _value(address: int) -> Array:
    """A copy of a tensor's value, whatever its strides."""
    tensor = ggml.at(address)
    kind = _KINDS[tensor.type]
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    if 0 in shape:
        return np.empty(shape, kind)
    size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + kind.itemsize
    return np.array(np.ndarray(shape, kind, ctypes.string_at(tensor.data, size), strides=strides))


def tensors(sources: Sequence[Source]) -> list[Tensor | None]:
    """Sources as an operation in torch takes them: four dimensions, float32 or int64, strides where they are viewed."""
    found: list[Tensor | None] = []
    for source in sources:
        if source is None:
            found.append(None)
            continue
        array = _stored(source) if isinstance(source, Quantized) else _array(source)
        kind = np.float32 if array.dtype.kind == "f" else np.int64
        value = torch.from_numpy(np.array(array, kind))
        if isinstance(source, Viewed):
            strides = [stride // array.itemsize for stride in array.strides]
            value = torch.empty_strided(array.shape, strides, dtype=value.dtype).copy_(value)
        found.append(value[(None,) * (4 - value.ndim)])
    return found


def _stored(source: Quantized) -> Array:
    """What blocks stand for."""
    width = source.array.shape[-1]
    raw = blocks.quantize(source.array.reshape(-1, width), source.kind, threads=1)
    return blocks.dequantize(raw, source.kind, width, threads=1).reshape(source.array.shape)


def normalised_error(reference: Array, value: Array) -> float:
    """Mean squared error, divided by the variance of the reference around 0."""
    a, b = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    assert a.shape == b.shape, f"{b.shape} instead of {a.shape}"
    return float(np.square(a - b).sum() / max(np.square(a).sum(), 1e-30))


def error(
    ops: Mapping[str, Op],
    name: str,
    sources: Sequence[Source],
    *extra: Any,  # noqa: ANN401
    after: Sequence[After] = (),
    order: Sequence[int] | None = None,
) -> float:
    """Normalised error of an operation in torch against ggml's.

    Args:
        ops: The operations by name.
        name: As in `run`.
        sources: As in `run`; those of `after` follow in the order of the calls.
        extra: As in `run`.
        after: As in `run`.
        order: Which array each slot of the node holds, where it is not the order of the arguments; -1 is none.

    Returns:
        `normalised_error` of the two values.
    """
    node, expected = run(name, sources, *extra, after=after)
    given = tensors([*sources, *(array for call in after for array in call[1])])
    slots = given if order is None else [None if i < 0 else given[i] for i in order]
    return normalised_error(expected, ops[node.op](node, *slots).numpy())


def gradient_errors(
    ops: Mapping[str, Op],
    name: str,
    sources: Sequence[Source],
    *extra: Any,  # noqa: ANN401
    step: float = 1e-2,
    valid: Callable[[Array], Array] = lambda value: value,
) -> list[float]:
    """Relative errors of torch's gradients against central differences of ggml's own values.

    The loss is a random projection of the result. Each float source is moved along its gradient plus a random direction
    of equal length, so that the slope is no difference of large numbers.

    Args:
        ops: The operations by name.
        name: As in `run`.
        sources: As in `run`, in the order of the node's slots.
        extra: As in `run`.
        step: Length of the move, in root mean squares of the source.
        valid: Picks the part of a result that counts.

    Returns:
        One relative error for each source that is float32.
    """
    rng = np.random.default_rng(7)
    node, value = run(name, sources, *extra)
    projection = rng.standard_normal(valid(value).shape)

    def loss(moved: Sequence[Source]) -> float:
        return float((valid(run(name, moved, *extra)[1]).astype(np.float64) * projection).sum())

    given = tensors(sources)
    moving = (np.ndarray, Viewed)
    wanted = [i for i, s in enumerate(sources) if isinstance(s, moving) and _array(s).dtype == np.float32]
    leaves = [cast(Tensor, given[i]).requires_grad_(True) for i in wanted]
    out = valid(cast(Any, ops[node.op](node, *given)))
    grads = torch.autograd.grad((cast(Tensor, out) * torch.from_numpy(projection)).sum(), leaves)
    found = []
    for i, grad in zip(wanted, grads, strict=True):
        source = _array(cast(Array | Viewed, sources[i]))
        slope = grad.numpy().astype(np.float64).reshape(source.shape)
        other = rng.standard_normal(source.shape)
        move = slope / np.linalg.norm(slope) + other / np.linalg.norm(other)
        move *= step * np.linalg.norm(source) / np.linalg.norm(move)
        up, down = ((source + sign * move).astype(np.float32) for sign in (1, -1))
        actual = (up.astype(np.float64) - down) / 2
        high, low = (loss([*sources[:i], _moved(sources[i], values), *sources[i + 1 :]]) for values in (up, down))
        numeric = (high - low) / 2
        found.append(abs(float((slope * actual).sum()) - numeric) / abs(numeric))
    return found


def _moved(source: Source, values: Array) -> Array | Viewed:
    """Other values in the place of a source."""
    if not isinstance(source, Viewed):
        return values
    memory = np.zeros(_span(source.array) // source.array.itemsize, source.array.dtype)
    view = np.lib.stride_tricks.as_strided(memory, source.array.shape, source.array.strides)
    view[...] = values
    return Viewed(view)
