"""The few ggml declarations that llama-cpp-python does not make, checked against the loaded library at import.

qres reads compute-graph nodes from inside llama.cpp's eval callback. ggml exports no getters for a node's shape,
operation and sources, so the struct itself is declared here (ggml.h, `struct ggml_tensor`), and `_check_layout` builds
a small graph through the library and compares every field that qres reads with what must be in it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llama_cpp._ctypes_extensions import load_shared_library

from qres.errors import NativeError

MAX_DIMS = 4
MAX_OP_PARAMS = 64
MAX_SRC = 10
MAX_NAME = 64

TYPE_F32 = 0
"""ggml_type of a 32-bit float tensor; every stream point and branch is one."""
TYPE_I32 = 26
"""ggml_type of 32-bit integers: numbers of rows and experts."""

OP_PARAM_COUNT = MAX_OP_PARAMS // 4


class CTensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h, as vendored by llama-cpp-python 0.3.36."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),
        ("nb", ctypes.c_size_t * MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * OP_PARAM_COUNT),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


def _load() -> ctypes.CDLL:
    """The ggml-base library that llama.cpp itself has loaded."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    return cast(ctypes.CDLL, load_shared_library("ggml-base", folder))


_lib = _load()


def declare(name: str, restype: Any, *argtypes: Any) -> Any:  # noqa: ANN401 - ctypes has no better word
    """The library's function `name` with its prototype set.

    Raises:
        NativeError: the installed library does not have it.
    """
    try:
        function = getattr(_lib, name)
    except AttributeError as error:
        raise NativeError(
            f"the installed llama-cpp-python lacks {name}", "install the version that qres names in pyproject.toml"
        ) from error
    function.restype = restype
    function.argtypes = argtypes
    return function


# const char * ggml_op_name(enum ggml_op op);
_op_name = declare("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
# size_t ggml_nbytes(const struct ggml_tensor * tensor);
_nbytes = declare("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
# bool ggml_is_contiguous(const struct ggml_tensor * tensor);
_is_contiguous = declare("ggml_is_contiguous", ctypes.c_bool, ctypes.c_void_p)
# void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
_tensor_get = declare(
    "ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)
# void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
_tensor_set = declare(
    "ggml_backend_tensor_set", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


def op_name(op: int) -> str:
    """Name of a `ggml_op`, e.g. `MUL_MAT`."""
    return cast(bytes, _op_name(op)).decode()


def at(address: int) -> CTensor:
    """The tensor at an address given by the eval callback; valid only while its graph is."""
    return CTensor.from_address(address)


def is_plain(address: int) -> bool:
    """Whether `read` and `write` take the tensor: F32 and contiguous."""
    return at(address).type == TYPE_F32 and bool(_is_contiguous(address))


def read(address: int, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """Copy a contiguous F32 tensor out of whatever backend holds it.

    Args:
        address: The tensor.
        out: An array to read into, used when it has the tensor's shape: fresh memory costs more than the copy.

    Returns:
        float32 array of shape [ne1 * ne2 * ne3, ne0]: one row per token.

    Raises:
        NativeError: the tensor is not F32 or not contiguous.
    """
    tensor = at(address)
    _require_plain(tensor, address)
    shape = (tensor.ne[1] * tensor.ne[2] * tensor.ne[3], tensor.ne[0])
    if out is None or out.shape != shape:
        out = np.empty(shape, dtype=np.float32)
    _tensor_get(address, out.ctypes.data, 0, out.nbytes)
    return out


def read_integers(address: int) -> npt.NDArray[np.int32]:
    """Copy a tensor of 32-bit integers of up to two dimensions, also where it is a view: int32 [ne1, ne0].

    Raises:
        NativeError: it holds something else, or has more dimensions.
    """
    tensor = at(address)
    if tensor.type != TYPE_I32 or tensor.ne[2] * tensor.ne[3] != 1:
        raise NativeError(f"tensor {tensor.name.decode(errors='replace')} is no table of integers")
    data, shape = read_bytes(address), (tensor.ne[1], tensor.ne[0])
    table: npt.NDArray[np.int32] = np.ndarray(shape, np.int32, data, strides=(tensor.nb[1], tensor.nb[0]))
    return np.array(table)


def read_bytes(address: int) -> bytes:
    """Copy a tensor of any type out of its backend as it lies in memory."""
    data = ctypes.create_string_buffer(_nbytes(address))
    _tensor_get(address, data, 0, len(data))
    return data.raw


def write(address: int, values: npt.NDArray[np.float32]) -> None:
    """Overwrite a contiguous F32 tensor; later nodes of the graph read the new values.

    Raises:
        NativeError: the tensor is not F32 or not contiguous, or has another number of bytes than `values`.
    """
    tensor = at(address)
    _require_plain(tensor, address)
    data = np.ascontiguousarray(values, dtype=np.float32)
    if data.nbytes != _nbytes(address):
        raise NativeError(
            f"tensor {tensor.name.decode()} holds {_nbytes(address)} bytes, {data.nbytes} were to be written"
        )
    _tensor_set(address, data.ctypes.data, 0, data.nbytes)


def write_bytes(address: int, data: npt.NDArray[np.uint8]) -> None:
    """Overwrite a tensor of any type as it lies in memory.

    Raises:
        NativeError: it has another number of bytes.
    """
    data = np.ascontiguousarray(data)
    if data.nbytes != _nbytes(address):
        name = at(address).name.decode(errors="replace")
        raise NativeError(f"tensor {name} holds {_nbytes(address)} bytes, {data.nbytes} were to be written")
    _tensor_set(address, data.ctypes.data, 0, data.nbytes)


def _require_plain(tensor: CTensor, address: int) -> None:
    if not is_plain(address):
        raise NativeError(f"tensor {tensor.name.decode()} is not a contiguous F32 tensor (type {tensor.type})")


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params` of ggml.h: what a ggml context is made with."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _check_layout() -> None:
    """Build `mul_mat(a, b)` and a view through the library; every declared field must hold what ggml put there."""
    init = declare("ggml_init", ctypes.c_void_p, _InitParams)
    free = declare("ggml_free", None, ctypes.c_void_p)
    new_2d = declare(
        "ggml_new_tensor_2d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    )
    mul_mat = declare("ggml_mul_mat", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    view_1d = declare(
        "ggml_view_1d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    )
    set_name = declare("ggml_set_name", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    overhead = declare("ggml_tensor_overhead", ctypes.c_size_t)

    context = init(_InitParams(64 * 1024, None, False))
    try:
        a = new_2d(context, TYPE_F32, 4, 3)
        b = new_2d(context, TYPE_F32, 4, 2)
        product = mul_mat(context, a, b)
        view = view_1d(context, product, 2, 8)
        set_name(product, b"qres-layout-check")
        p, v = at(product), at(view)
        sound = (
            overhead() >= ctypes.sizeof(CTensor)
            and list(p.ne) == [3, 2, 1, 1]
            and list(p.nb) == [4, 12, 24, 24]
            and op_name(p.op) == "MUL_MAT"
            and list(p.src)[:3] == [a, b, None]
            and p.name == b"qres-layout-check"
            and at(a).src[0] is None
            and op_name(v.op) == "VIEW"
            and v.view_src == product
            and v.view_offs == 8
            and v.data == p.data + 8
        )
    finally:
        free(context)
    if not sound:
        raise NativeError(
            "the installed llama-cpp-python lays out ggml_tensor differently from what qres was written for",
            "install the version range that qres names in pyproject.toml",
        )


_check_layout()
