"""One ggml operation, computed by the installed library: what the operations in torch are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from llama_cpp._ctypes_extensions import load_shared_library
from torch import Tensor

from qres.native import ggml
from qres.native.graph import Node
from qres.sensitivity.ops import Op

Array = npt.NDArray[Any]

_TYPES: Mapping[str, int] = {"float32": 0, "float16": 1, "int32": 26, "int64": 27}
"""`ggml_type` of each kind of array."""
_KINDS = {number: np.dtype(kind) for kind, number in _TYPES.items()}

After = tuple[str, Sequence[Array | None], tuple[Any, ...]]


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
        "new_graph": ggml.declare("ggml_new_graph", pointer, pointer),
        "expand": ggml.declare("ggml_build_forward_expand", None, pointer, pointer),
        "compute": compute,
    }


def run(
    name: str,
    sources: Sequence[Array | None],
    *extra: Any,  # noqa: ANN401 - whatever the C function takes
    after: Sequence[After] = (),
    n_threads: int = 1,
) -> tuple[Node, Array]:
    """Compute one operation on the CPU.

    Args:
        name: The C function that makes it, e.g. `ggml_ssm_scan`; called with the context, the sources and `extra`.
        sources: Arrays with reversed dimensions, [..., ne1, ne0], float32, float16, int32 or int64; None is NULL.
        extra: The other arguments: int (any width) and float (32 bits) as they are, or ctypes values.
        after: Calls `(function, arrays, extra)` that change the operation before it is computed, made with the tensor
            instead of the context first, e.g. `("ggml_flash_attn_ext_add_sinks", [sinks], ())`.
        n_threads: Threads to compute with.

    Returns:
        The node as qres records it (its sources have the indices 0 ...) and its value [ne3, ne2, ne1, ne0].
    """
    library = _library()
    size = sum(source.nbytes for source in sources if source is not None)
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


def _call(name: str, context: int, first: int, arrays: Sequence[Array | None], extra: Sequence[Any], kind: Any) -> int:  # noqa: ANN401
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


def _tensor(context: int, array: Array) -> int:
    shape = (1,) * (4 - array.ndim) + array.shape
    data = np.ascontiguousarray(array)
    address = cast(int, _library()["new_tensor"](context, _TYPES[array.dtype.name], *reversed(shape)))
    ctypes.memmove(ggml.at(address).data, data.ctypes.data, data.nbytes)
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


def tensors(sources: Sequence[Array | None]) -> list[Tensor | None]:
    """Sources as an operation in torch takes them: four dimensions, float32 or int64."""
    found: list[Tensor | None] = []
    for source in sources:
        if source is None:
            found.append(None)
            continue
        whole = source.reshape((1,) * (4 - source.ndim) + source.shape)
        kind = np.float32 if source.dtype.kind == "f" else np.int64
        found.append(torch.from_numpy(np.array(whole, kind)))
    return found


def normalised_error(reference: Array, value: Array) -> float:
    """Mean squared error, divided by the variance of the reference around 0."""
    a, b = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    assert a.shape == b.shape, f"{b.shape} instead of {a.shape}"
    return float(np.square(a - b).sum() / max(np.square(a).sum(), 1e-30))


def error(
    ops: Mapping[str, Op],
    name: str,
    sources: Sequence[Array | None],
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
    sources: Sequence[Array | None],
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

    def loss(moved: Sequence[Array | None]) -> float:
        return float((valid(run(name, moved, *extra)[1]).astype(np.float64) * projection).sum())

    given = tensors(sources)
    wanted = [i for i, source in enumerate(sources) if source is not None and source.dtype == np.float32]
    leaves = [cast(Tensor, given[i]).requires_grad_(True) for i in wanted]
    out = valid(cast(Any, ops[node.op](node, *given)))
    grads = torch.autograd.grad((cast(Tensor, out) * torch.from_numpy(projection)).sum(), leaves)
    found = []
    for i, grad in zip(wanted, grads, strict=True):
        source = cast(Array, sources[i])
        slope = grad.numpy().astype(np.float64).reshape(source.shape)
        other = rng.standard_normal(source.shape)
        move = slope / np.linalg.norm(slope) + other / np.linalg.norm(other)
        move *= step * np.linalg.norm(source) / np.linalg.norm(move)
        up, down = ((source + sign * move).astype(np.float32) for sign in (1, -1))
        actual = (up.astype(np.float64) - down) / 2
        numeric = (loss([*sources[:i], up, *sources[i + 1 :]]) - loss([*sources[:i], down, *sources[i + 1 :]])) / 2
        found.append(abs(float((slope * actual).sum()) - numeric) / abs(numeric))
    return found
