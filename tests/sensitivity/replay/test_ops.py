"""Every operation in torch against the installed ggml: values, and gradients against differences of ggml's values."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qres.sensitivity.replay import attention, ops
from tests.sensitivity.replay.ggml_op import After, Array, error, gradient_errors

_OPS = {**ops.OPS, **attention.OPS}

_EXACT = 1e-12
"""Normalised error to which float32 agrees when only the order of sums and the rounding of functions differ."""
_TABLE = 1e-6
"""ggml looks GELU up in a table of float16."""
_HALF = 3e-6
"""ggml's flash attention rounds queries to float16 and sums up values in it; measured: 1.4e-6."""


def _values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _numbers(high: int, *shape: int) -> Array:
    return np.random.default_rng([high, *shape]).integers(0, high, shape).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """One call of ggml."""

    name: str
    sources: Sequence[Array | None]
    extra: tuple[Any, ...] = ()
    within: float = _EXACT
    after: tuple[After, ...] = ()
    order: tuple[int, ...] | None = None
    """Slots of the node, as indices into the sources; None where the order is the same."""

    def error(self) -> float:
        return error(_OPS, f"ggml_{self.name}", self.sources, *self.extra, after=self.after, order=self.order)


def _check(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=label) for label, case in cases.items()])


# -- norms, sums and elementwise operations

_X = _values(2, 6, 5, 33)
_PLAIN = {
    "norm": Case("norm", [_X], (1e-3,)),
    "rms-norm": Case("rms_norm", [_X], (1e-3,)),
    "l2-norm": Case("l2_norm", [_X], (1e-3,)),
    "l2-norm-small": Case("l2_norm", [_X * 1e-3], (0.1,)),
    "group-norm": Case("group_norm", [_X], (3, 1e-3)),
    "group-norm-uneven": Case("group_norm", [_X], (4, 1e-3)),
    "add": Case("add", [_X, _values(6, 1, 33)]),
    "add-tiled": Case("add", [_X, _values(3, 1, 11)]),
    "add1": Case("add1", [_X, _values(1)]),
    "sub": Case("sub", [_X, _values(33)]),
    "mul": Case("mul", [_X, _values(2, 1, 5, 1)]),
    "div": Case("div", [_X, np.abs(_values(33)) + 1]),
    "scale": Case("scale", [_X], (-1.7,)),
    "scale-bias": Case("scale_bias", [_X], (-1.7, 0.3)),
    "clamp": Case("clamp", [_X], (-0.5, 0.7)),
    "sqr": Case("sqr", [_X]),
    "sqrt": Case("sqrt", [np.abs(_X)]),
    "log": Case("log", [np.abs(_X) + 1]),
    "sin": Case("sin", [_X * 5]),
    "cos": Case("cos", [_X * 5]),
    "leaky-relu": Case("leaky_relu", [_X], (0.1, False)),
    "sum": Case("sum", [_X + 1]),
    "sum-rows": Case("sum_rows", [_X]),
    "mean": Case("mean", [_X]),
    "cumsum": Case("cumsum", [_X]),
    "fill": Case("fill", [_X], (2.5,)),
    "arange": Case("arange", [], (1.0, 9.0, 2.0)),
    "xielu": Case("xielu", [_X * 3], (0.8, 0.6, 0.5, -1e-6)),
    **{f"tri-{kind}": Case("tri", [_values(2, 3, 9, 9)], (kind,)) for kind in range(4)},
}


@_check(_PLAIN)
def test_plain_operations(case: Case) -> None:
    assert case.error() < case.within


_UNARY = (
    *("abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish"),
    *("hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc"),
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, name in enumerate(_UNARY) if name != "xielu"],
    ids=str,
)
def test_unary_operations(kind: int, name: str) -> None:
    x = np.concatenate(
        [_values(3, 7, 33) * 4, np.array([-0.5, 0.5, 1.5, 2.5, 0.0, -0.0] * 77, np.float32).reshape(2, 7, 33)]
    )
    within = _TABLE if name in ("gelu", "gelu_quick") else _EXACT
    assert error(_OPS, "ggml_unary", [x], kind) < within


_GLU = ("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick")


@pytest.mark.parametrize("form", ["whole", "swapped", "split"])
@pytest.mark.parametrize("kind", [0, 1, 2, 4, 5], ids=lambda kind: _GLU[kind])
def test_gated_operations(kind: int, form: str) -> None:
    within = _TABLE if kind in (1, 5) else _EXACT
    if form == "split":
        found = error(_OPS, "ggml_glu_split", [_values(3, 7, 32), _values(3, 7, 32, seed=1)], kind)
    else:
        found = error(_OPS, "ggml_glu", [_values(3, 7, 64)], kind, form == "swapped")
    assert found < within


@_check(
    {
        "oai": Case("swiglu_oai", [_values(3, 7, 32) * 4, _values(3, 7, 32, seed=1) * 4], (1.702, 7.0)),
        "oai-low-limit": Case("swiglu_oai", [_values(3, 7, 32) * 4, _values(3, 7, 32, seed=1) * 4], (1.5, 2.0)),
        "clamp": Case("swiglu_clamp", [_values(3, 7, 32) * 4, _values(3, 7, 32, seed=1) * 4], (2.0,)),
    }
)
def test_gates_with_limits(case: Case) -> None:
    assert case.error() < case.within


# -- moving values around

_MOVED = {
    "repeat": Case("repeat_4d", [_values(1, 2, 3, 4)], (8, 3, 4, 2)),
    "repeat-rows": Case("repeat_4d", [_values(1, 2, 1, 4)], (4, 5, 2, 3)),
    **{
        f"concat-{dim}": Case(
            "concat", [_values(2, 3, 4, 5), _values(*(n + (3 - i == dim) for i, n in enumerate((2, 3, 4, 5))))], (dim,)
        )
        for dim in range(4)
    },
    "cont": Case("cont", [_X]),
    "dup": Case("dup", [_X]),
    "cpy-half": Case("cast", [_X], (1,), within=1e-7),
    "get-rows": Case("get_rows", [_values(50, 33), _numbers(50, 7)]),
    "get-rows-batched": Case("get_rows", [_values(2, 3, 50, 33), _numbers(50, 2, 3, 7)]),
    "set-rows": Case("set_rows", [_values(50, 33), _values(4, 33), np.array([3, 1, 49, 0])], order=(1, 2, 0)),
    "set-rows-broadcast": Case(
        "set_rows",
        [_values(2, 6, 50, 33), _values(2, 6, 4, 33), np.array([[[3, 1, 49, 0], [5, 6, 7, 8], [8, 7, 6, 0]]])],
        order=(1, 2, 0),
    ),
    "set-rows-narrow-numbers": Case(
        "set_rows", [_values(50, 33), _values(4, 33), np.array([3, 1, 49, 0], np.int32)], order=(1, 2, 0)
    ),
    "set": Case("set", [_values(4, 5, 6), _values(2, 3, 4)], (24, 120, 480, 4 * (30 + 6 + 1))),
    "acc": Case("acc", [_values(4, 5, 6), _values(2, 3, 4)], (24, 120, 480, 4 * (30 + 6 + 1))),
    "add-id": Case("add_id", [_values(7, 2, 33), _values(8, 33), _numbers(8, 7, 2)]),
    "argsort-up": Case("argsort", [_values(3, 5, 40)], (0,)),
    "argsort-down": Case("argsort", [_values(3, 5, 40)], (1,)),
}


@_check(_MOVED)
def test_moving_operations(case: Case) -> None:
    assert case.error() < case.within


# -- rotary positions

_SECTIONS = (ctypes.c_int * 4)(8, 12, 12, 0)


def _rope(
    mode: int,
    *,
    n_dims: int = 64,
    base: float = 10000.0,
    scale: float = 1.0,
    blend: float = 0.0,
    magnitude: float = 1.0,
    factors: bool = False,
    offset: int = 0,
    sections: tuple[int, ...] = (8, 12, 12, 0),
    back: bool = False,
    width: int = 80,
) -> Case:
    tokens = 9
    x = _values(1, tokens, 3, width)
    rows = 4 if mode & 8 else 1
    positions = (np.arange(rows * tokens, dtype=np.int32) * 37 % 500).astype(np.int32)
    freq = np.linspace(1, 4, n_dims // 2).astype(np.float32) if factors else None
    after: tuple[After, ...] = (("ggml_rope_set_offset", [], (offset,)),) if offset else ()
    multi = ((ctypes.c_int * 4)(*sections),) if mode & 8 else ()
    name = ("rope_multi" if mode & 8 else "rope_ext") + ("_back" if back else "")
    extra = (n_dims, *multi, mode, 256, base, scale, blend, magnitude, 32.0, 1.0)
    return Case(name, [x, positions, freq], extra, within=1e-10, after=after)


_ROPE = {
    "normal": _rope(0),
    "normal-all": _rope(0, width=64),
    "normal-back": _rope(0, back=True),
    "normal-scaled": _rope(0, scale=0.25, magnitude=0.8),
    "normal-yarn": _rope(0, scale=0.25, blend=1.0, magnitude=1.1),
    "normal-factors": _rope(0, factors=True, base=500000.0),
    "normal-offset": _rope(0, offset=16),
    "neox": _rope(2),
    "neox-back": _rope(2, back=True),
    "neox-yarn": _rope(2, scale=0.1, blend=0.7),
    "neox-factors-yarn": _rope(2, factors=True, scale=0.5, blend=1.0, base=150000.0),
    "neox-offset": _rope(2, offset=16),
    "neox-odd": _rope(2, n_dims=20, width=33),
    "mrope": _rope(8),
    "mrope-yarn": _rope(8, scale=0.25, blend=1.0),
    "mrope-fourth": _rope(8, sections=(8, 8, 8, 8)),
    "mrope-short-sections": _rope(8, sections=(4, 6, 6, 0)),
    "vision": _rope(24, n_dims=32, width=64, sections=(16, 16, 0, 0)),
    "vision-short": _rope(24, n_dims=32, width=64, sections=(8, 8, 0, 0)),
    "imrope": _rope(40, sections=(12, 10, 10, 0)),
    "imrope-yarn-factors": _rope(40, sections=(11, 11, 10, 0), scale=0.25, blend=1.0, factors=True),
    "imrope-fourth": _rope(40, sections=(8, 8, 8, 8)),
}


@_check(_ROPE)
def test_rotary_positions(case: Case) -> None:
    assert case.error() < case.within


# -- softmax and attention


def _mask(*shape: int, kind: type = np.float32, past: int = 0) -> Array:
    """Causal, with a bias that differs from place to place."""
    *_, rows, columns = shape
    seen = np.arange(columns) <= np.arange(rows)[:, None] + past
    return np.where(seen, _values(*shape, seed=9), -np.inf).astype(kind)


def _soft_max(mask: Array | None, scale: float, bias: float, heads: int = 6, *, sinks: bool = False) -> Case:
    after: tuple[After, ...] = (("ggml_soft_max_add_sinks", [_values(heads)], ()),) if sinks else ()
    return Case("soft_max_ext", [_values(2, heads, 5, 33), mask], (scale, bias), after=after)


_SOFT_MAX = {
    "plain": _soft_max(None, 1.0, 0.0),
    "scaled": _soft_max(None, 0.3, 0.0),
    "mask": _soft_max(_mask(5, 33), 0.3, 0.0),
    "half-mask": _soft_max(_mask(5, 33, kind=np.float16), 0.3, 0.0),
    "mask-per-head": _soft_max(_mask(2, 6, 5, 33), 0.3, 0.0),
    "mask-per-sequence": _soft_max(_mask(2, 1, 5, 33), 0.3, 0.0),
    "mask-tiled": _soft_max(_mask(1, 3, 5, 33), 0.3, 0.0),
    "mask-with-more-rows": _soft_max(_mask(8, 33), 0.3, 0.0),
    "alibi": _soft_max(_mask(5, 33), 0.3, 8.0),
    "alibi-eight-heads": _soft_max(_mask(5, 33), 0.3, 8.0, heads=8),
    "sinks": _soft_max(_mask(5, 33), 0.3, 0.0, sinks=True),
    "sinks-alone": _soft_max(None, 0.3, 0.0, sinks=True),
    "sinks-alibi": _soft_max(_mask(5, 33), 0.3, 4.0, sinks=True),
}


@_check(_SOFT_MAX)
def test_softmax(case: Case) -> None:
    if case.after and case.sources[1] is None:  # slots: x, none, sinks
        case = Case(case.name, case.sources, case.extra, case.within, case.after, (0, -1, 2))
    assert case.error() < case.within


def _attention(
    *,
    heads: int = 4,
    shared: int = 1,
    bias: float = 0.0,
    cap: float = 0.0,
    sinks: bool = False,
    mask: tuple[int, ...] | None = (12, 64),
    sequences: int = 1,
    half: bool = True,
    tokens: int = 12,
) -> Case:
    kind = np.float16 if half else np.float32
    q = _values(sequences, heads, tokens, 32)
    k = _values(sequences, heads // shared, 64, 32, seed=1).astype(kind)
    v = _values(sequences, heads // shared, 64, 16, seed=2).astype(kind)
    given = None if mask is None else _mask(*mask, kind=np.float16, past=40)
    after: tuple[After, ...] = (("ggml_flash_attn_ext_add_sinks", [_values(heads) * 2], ()),) if sinks else ()
    within = _HALF if half else _EXACT
    return Case("flash_attn_ext", [q, k, v, given], (32**-0.5, bias, cap), within, after)


_ATTENTION = {
    f"{name}{'' if half else '-f32'}": _attention(half=half, **options)
    for half in (True, False)
    for name, options in dict[str, dict[str, Any]](
        plain={"mask": None},
        mask={},
        grouped={"shared": 2},
        one_key_head={"shared": 4},
        one_token={"tokens": 1, "mask": (1, 64)},
        padded_mask={"mask": (16, 64)},
        cap={"cap": 5.0},
        alibi={"bias": 8.0},
        alibi_six_heads={"bias": 8.0, "heads": 6},
        sinks={"sinks": True},
        sinks_no_mask={"sinks": True, "mask": None},
        all={"sinks": True, "bias": 4.0, "cap": 3.0, "shared": 2, "sequences": 2, "mask": (2, 1, 12, 64)},
        many_tokens={"tokens": 80, "mask": (80, 64)},
    ).items()
}


@_check(_ATTENTION)
def test_flash_attention(case: Case) -> None:
    assert case.error() < case.within


def test_largest_values_are_the_same_set() -> None:
    """ggml leaves the order of TOP_K open."""
    from tests.sensitivity.replay.ggml_op import run, tensors

    x = _values(3, 5, 40)
    node, expected = run("ggml_top_k", [x], 6)
    found = _OPS[node.op](node, *tensors([x])).numpy()
    assert np.array_equal(np.sort(expected, axis=-1), np.sort(found, axis=-1))


# -- gradients

_SMOOTH = {
    **{
        name: _PLAIN[name]
        for name in ("norm", "rms-norm", "l2-norm", "group-norm", "mul", "div", "log", "sin", "xielu")
    },
    **{name: _MOVED[name] for name in ("repeat", "concat-1", "get-rows-batched", "set", "acc", "add-id")},
    **{name: _ROPE[name] for name in ("normal-yarn", "neox", "imrope")},
    **{name: _SOFT_MAX[name] for name in ("alibi",)},
    **{name: _ATTENTION[name] for name in ("mask-f32", "grouped-f32", "cap-f32", "alibi-f32")},
}


_SCATTER = "torch 2.13: as_strided_scatter gives its base the gradient of what was written, not of what was kept"


@_check(_SMOOTH)
def test_gradients(case: Case) -> None:
    if case.name in ("soft_max_ext",):  # what is masked stays so: only the scores move
        case = Case(case.name, [case.sources[0], np.asarray(case.sources[1]).astype(np.float16)], case.extra)
    found = gradient_errors(_OPS, f"ggml_{case.name}", case.sources, *case.extra)
    assert max(found) < 1e-2
