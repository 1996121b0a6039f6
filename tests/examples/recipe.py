"""A small scanned model that recipes can be made for, its numbers set by hand, and every mix of its types.

Two layers and an embedding that is the head as well. Rows of 576 take fallback types only. What is calculated here
takes sizes from gguf-py and sums from the tables below, never from qres, so that tests can compare with it. All other
figures (the stream, the settings, what an output has beside its KLD) are those of the real example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qres.records.prediction import Prediction, TensorDamage, TypeDamage
from qres.records.recipe import FileTensor, Rung
from qres.records.result import Level, Result
from tests.examples.levels import changed_level
from tests.examples.result import example as whole_example

EMBEDDING = "token_embd.weight"
NORM, ROUTER, OTHER_NORM = "blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "output_norm.weight"
OUT_0, DOWN_0 = "blk.0.attn_output.weight", "blk.0.ffn_down.weight"
OUT_1, DOWN_10 = "blk.1.attn_output.weight", "blk.10.ffn_down.weight"
UNPREDICTED = "blk.1.nextn.eh_proj.weight"

TENSORS = (
    FileTensor(EMBEDDING, (576, 1001), "F16", "F16"),
    FileTensor(NORM, (576,), "F32", ""),
    FileTensor(OUT_0, (512, 576), "F16", "F16"),
    FileTensor(ROUTER, (576, 3), "F32", "F16"),
    FileTensor(DOWN_0, (1024, 576), "BF16", "BF16"),
    FileTensor(OUT_1, (512, 576), "F16", "F16"),
    FileTensor(UNPREDICTED, (576, 129), "F16", "F16"),
    FileTensor(DOWN_10, (1024, 576), "F32", "F16"),
    FileTensor(OTHER_NORM, (576,), "F32", ""),
)
NAMES = tuple(tensor.name for tensor in TENSORS)
SHAPES = {tensor.name: tensor.shape for tensor in TENSORS}

AS_EMBEDDING = {"Q4_0": 0.00312, "IQ4_NL": 0.00300, "Q5_0": 0.00080, "Q5_1": 0.00075, "Q8_0": 0.00005}
AS_HEAD = {"Q4_0": 0.0208, "IQ4_NL": 0.0200, "Q5_0": 0.0050, "Q5_1": 0.0046, "Q8_0": 0.0003}
DAMAGE: dict[str, dict[str, float]] = {
    OUT_0: {"Q4_K": 0.0030, "Q5_K": 0.0008, "Q6_K": 0.0002, "Q8_0": 0.00001},
    ROUTER: {"Q4_0": 0.5, "Q8_0": 0.1},  # predicted, but never quantized
    DOWN_0: {"Q4_0": 0.0066, "Q4_K": 0.0060, "Q5_K": 0.0015, "Q6_K": 0.0004, "Q8_0": 0.00003},
    OUT_1: {"Q4_0": 0.00107, "IQ4_NL": 0.00100, "Q4_K": 0.00101, "Q5_K": 0.0003, "Q6_K": 0.00008, "Q8_0": 0.00002},
    DOWN_10: {"IQ4_NL": 0.0020, "Q4_K": 0.00215, "Q5_K": 0.0005, "Q6_K": 0.00011, "Q8_0": 0.00001},
}
"""Predicted KLD, not calibrated."""
OPTIONS: dict[str, dict[str, float]] = {
    EMBEDDING: {name: AS_EMBEDDING[name] + AS_HEAD[name] for name in AS_HEAD} | {"F16": 0.0},
    OUT_0: DAMAGE[OUT_0] | {"F16": 0.0},
    DOWN_0: DAMAGE[DOWN_0] | {"BF16": 0.0},
    OUT_1: DAMAGE[OUT_1] | {"F16": 0.0},
    DOWN_10: DAMAGE[DOWN_10] | {"F16": 0.0},
}
"""What can be chosen, and what it costs."""

HEADER_BYTES = 8000


def _types(embedding: str, out_0: str, down_0: str, out_1: str, unpredicted: str, down_10: str) -> dict[str, str]:
    return {
        EMBEDDING: embedding,
        NORM: "F32",
        OUT_0: out_0,
        ROUTER: "F32",
        DOWN_0: down_0,
        OUT_1: out_1,
        UNPREDICTED: unpredicted,
        DOWN_10: down_10,
        OTHER_NORM: "F32",
    }


LADDER = {
    "Q2_K": _types("Q8_0", "Q3_K", "Q3_K", "Q3_K", "Q4_0", "Q2_K"),  # types without predictions
    "Q4_0": _types("Q8_0", "Q4_K", "Q4_0", "Q4_0", "Q5_0", "Q4_K"),  # the bytes of Q4_K_S, but worse
    "Q4_K_S": _types("Q8_0", "Q4_K", "Q4_K", "Q4_K", "Q5_0", "Q4_K"),
    "Q4_K_M": _types("Q8_0", "Q4_K", "Q6_K", "Q4_K", "Q5_0", "Q4_K"),
    "Q5_K_M": _types("Q8_0", "Q5_K", "Q6_K", "Q5_K", "Q5_1", "Q5_K"),
    "Q6_K": _types("Q8_0", "Q6_K", "Q6_K", "Q6_K", "Q8_0", "Q6_K"),
    "Q8_0": _types("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
}
MEASURED = {"Q4_K_M": 0.0076, "Q6_K": 0.00099}
"""KLD of the levels that were measured, on the reporting text."""
RAW = {"Q4_K_M": 0.00691, "Q6_K": 0.00114}
"""What is predicted of them: sums of the tables above, by hand."""


def example() -> Result:
    """The result of a scan of that model at two levels."""
    result = whole_example()
    assert result.prediction is not None
    return replace(
        result,
        levels=tuple(level(name, kld) for name, kld in MEASURED.items()),
        settings=replace(result.settings, chunk_digests=("5d7e", "90ab")),
        prediction=replace(result.prediction, tensors=damages()),
        fingerprint="f1d0",
        tensors=TENSORS,
        ladder=tuple(Rung(name, tuple(types.values())) for name, types in LADDER.items()),
    )


def level(name: str, kld: float | None, types: Mapping[str, str] | None = None, kld_se: float = 0.0003) -> Level:
    """A measured level of these types, or of those that the ladder has; no unit was patched."""
    held = types or LADDER[name]
    base = whole_example().levels[0]
    return changed_level(
        base,
        name=name,
        file_type=name,
        bytes=HEADER_BYTES + sum(padded(size(tensor, kind)) for tensor, kind in held.items()),
        tensor_types=tuple(held.values()),
        units=(),
        keep_16bit=(),
        keep_check=None,
        calibration=None,
        output=replace(base.output, kld_mean=kld, kld_se=kld_se, chunks=8),
    )


def damages() -> tuple[TensorDamage, ...]:
    """What was predicted: of the embedding twice, as it is the head as well."""
    return (
        _damage(EMBEDDING, "embedding", "embedding", AS_EMBEDDING),
        *(_damage(name, "other", f"{name.split('.')[1]}.ffn", losses) for name, losses in DAMAGE.items()),
        _damage(EMBEDDING, "head", "head", AS_HEAD),
    )


def _damage(tensor: str, role: str, unit: str, losses: Mapping[str, float]) -> TensorDamage:
    types = tuple(TypeDamage(name, size(tensor, name), loss, loss / 10) for name, loss in losses.items())
    return TensorDamage(tensor, role, unit, None, math.prod(SHAPES[tensor]), types)


def without_predictions(result: Result, tensor: str, kind: str) -> Result:
    """The result with a type of a tensor that has no prediction in the last row that has the type."""
    found = result.prediction
    assert isinstance(found, Prediction)
    rows = list(found.tensors)
    last = max(i for i, row in enumerate(rows) if row.tensor == tensor)
    types = tuple(replace(one, predicted_kld=None) if one.type == kind else one for one in rows[last].types)
    rows[last] = replace(rows[last], types=types)
    return replace(result, prediction=replace(found, tensors=tuple(rows)))


# -- bytes and sums


def size(tensor: str, kind: str) -> int:
    """Bytes of a tensor as that type, by gguf-py's table."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert SHAPES[tensor][0] % block_size == 0, f"{tensor} cannot be {kind}"
    return math.prod(SHAPES[tensor]) // block_size * block_bytes


def padded(n_bytes: int) -> int:
    """With what comes before the next multiple of 32."""
    return n_bytes + (-n_bytes) % 32


def data_bytes(types: Mapping[str, str]) -> int:
    """Of all tensors."""
    return sum(size(tensor, kind) for tensor, kind in types.items())


def file_bytes(types: Mapping[str, str]) -> int:
    """Of the file that has them."""
    return HEADER_BYTES + sum(padded(size(tensor, kind)) for tensor, kind in types.items())


def loss(types: Mapping[str, str]) -> float:
    """Predicted KLD, not calibrated."""
    return math.fsum(
        OPTIONS[tensor][kind]
        for tensor, kind in types.items()
        if tensor in OPTIONS and kind not in {"F32", "F16", "BF16"}
    )


def calibrated(raw: float) -> float:
    """The prediction as a level's measurement would have it: factors on a straight line over ln raw."""
    if raw == 0:
        return 0.0
    known = sorted((math.log(RAW[name]), MEASURED[name] / RAW[name]) for name in RAW)
    return raw * float(np.interp(math.log(raw), [x for x, _ in known], [y for _, y in known]))


@dataclass(frozen=True)
class Mixes:
    """Every choice of types for what can be chosen, with what the others have at the level that is started from."""

    choices: Sequence[tuple[str, ...]]
    """In the order of `OPTIONS`."""
    bytes: npt.NDArray[np.int64]
    file_bytes: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]

    def types(self, at: int) -> dict[str, str]:
        """Tensor -> type of one of them."""
        chosen = LADDER["Q4_K_M"] | dict(zip(OPTIONS, self.choices[at], strict=True))
        return {name: chosen[name] for name in NAMES}

    def least_loss(self, allowed: npt.NDArray[np.bool_]) -> float:
        """The smallest prediction among some."""
        return float(self.losses[allowed].min())


@cache
def mixes() -> Mixes:
    """All of them: about seven thousand."""
    fixed = {name: kind for name, kind in LADDER["Q4_K_M"].items() if name not in OPTIONS}
    choices = list(product(*OPTIONS.values()))
    sizes = [{kind: size(tensor, kind) for kind in options} for tensor, options in OPTIONS.items()]
    rows = [[size[kind] for size, kind in zip(sizes, choice, strict=True)] for choice in choices]
    kld = [
        math.fsum(options[kind] for options, kind in zip(OPTIONS.values(), choice, strict=True)) for choice in choices
    ]
    return Mixes(
        choices,
        np.array([sum(row) for row in rows]) + data_bytes(fixed),
        np.array([sum(padded(one) for one in row) for row in rows]) + file_bytes(fixed),
        np.array(kld),
    )
