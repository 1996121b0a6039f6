"""The predicted sensitivity of the example: tensors at types, from which units, factors and trust are calculated.

Every tensor has a size of damage that makes its unit's prediction come out near what was patched, off by a fixed wave,
so that nothing is random and the records agree: a unit's prediction is the sum of its tensors' at the level's types,
times the level's factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from qres.levels import TYPE_TRAITS
from qres.records.prediction import Calibration, Prediction, TensorDamage, Trust, TypeDamage
from qres.records.result import Level
from qres.records.units import Unit
from tests.examples.levels import changed_level

KEPT_TYPES = ("Q4_0", "Q5_0", "Q8_0")
BLOCK_TYPES = ("Q4_K", "Q6_K")
"""Only for rows of whole blocks of 256: in the example those of ffn_down."""
WEIGHTS = {"embedding": 28_311_552, "head": 28_311_552, "attn_q": 331_776, "attn_k": 110_592, "attn_v": 110_592}
ROLES = {
    "attn_q": "attention q",
    "attn_k": "attention k",
    "attn_v": "attention v",
    "attn_output": "attention output",
    "ffn_gate": "ffn gate",
    "ffn_up": "ffn up",
    "ffn_down": "ffn down",
}
SHARE = {
    "attn_q": 0.09,
    "attn_k": 0.06,
    "attn_v": 0.48,
    "attn_output": 0.37,
    "ffn_gate": 0.18,
    "ffn_up": 0.23,
    "ffn_down": 0.59,
}
ERROR = {"Q4_0": 4.3, "Q4_K": 2.9, "Q5_0": 1.0, "Q6_K": 0.21, "Q8_0": 0.052}
"""Squared error of a type over that of Q5_0."""
RAW = 0.93
"""Predictions over measurements, before calibration."""
REPLAY_LIMIT = 1e-4


def own_type(level: str, tensor: str) -> str:
    """What the level's file gives a tensor."""
    if level == "Q8_0":
        return "Q8_0"
    return "Q4_K" if "ffn_down" in tensor else "Q5_0"


def sensitivity(level: Level) -> Prediction:
    """The predictions, such that they come near the patched units of this level."""
    rows = []
    for place, unit in enumerate(level.sensitivity.units):
        wave = math.exp(0.22 * math.sin(2.3 * place) + (0.5 if unit.unit == "3.ffn" else 0.0))
        damage = RAW * wave * (unit.kld if unit.kld is not None else 0.00137)
        for name in unit.weights:
            rows.append(_tensor(unit, "token_embd.weight" if unit.kind == "head" else name, damage, level.name))
    return Prediction(
        used=True,
        reason="",
        replay_kld=2.4e-6,
        replay_nmse=3.1e-7,
        replay_kld_limit=REPLAY_LIMIT,
        chunks=2,
        tokens=510,
        draws=2,
        dtype="float32",
        device="cpu",
        imatrix="",
        elapsed_s=6.2,
        tensors=tuple(rows),
    )


def _tensor(unit: Unit, tensor: str, damage: float, level: str) -> TensorDamage:
    part = tensor.split(".")[2] if tensor.startswith("blk.") else unit.unit
    weights = WEIGHTS.get(part, 884_736 if part.startswith("ffn") else 331_776)
    own = damage * SHARE.get(part, 1.0) / ERROR[own_type(level, tensor)]
    names = sorted(
        (*KEPT_TYPES, *BLOCK_TYPES) if part == "ffn_down" else KEPT_TYPES,
        key=lambda name: TYPE_TRAITS[name].block_bytes / TYPE_TRAITS[name].block_size,
    )
    types = []
    for name in names:
        traits = TYPE_TRAITS[name]
        kld = None if tensor == "blk.4.attn_k.weight" and name == "Q4_0" else own * ERROR[name]
        size = weights * traits.block_bytes // traits.block_size
        types.append(TypeDamage(name, size, kld, None if kld is None else 0.09 * kld))
    return TensorDamage(
        tensor=tensor,
        role=ROLES.get(part, part),
        unit=unit.unit,
        layer=unit.layer,
        weights=weights,
        types=tuple(types),
    )


def predicted(level: Level, found: Prediction, measured: float, top: int) -> Level:
    """The level with what follows from the predictions: factor, units, and how far to trust them."""
    sums: dict[str, float] = {}
    squares: dict[str, float] = {}
    for row in found.tensors:
        damage = next(one for one in row.types if one.type == own_type(level.name, row.tensor))
        assert damage.predicted_kld is not None
        assert damage.predicted_se is not None
        sums[row.unit] = sums.get(row.unit, 0.0) + damage.predicted_kld
        squares[row.unit] = squares.get(row.unit, 0.0) + damage.predicted_se**2
    raw = sum(sums.values())
    factor = measured / raw
    units = tuple(
        dataclasses.replace(
            unit, predicted_kld=factor * sums[unit.unit], predicted_se=factor * math.sqrt(squares[unit.unit])
        )
        for unit in level.sensitivity.units
    )
    calibration = Calibration(factor, raw, math.sqrt(sum(squares.values())), measured)
    return changed_level(level, units=units, calibration=calibration, trust=_trust(units, top))


def _trust(units: Sequence[Unit], top: int) -> Trust:
    both = [(unit.unit, unit.predicted_kld, unit.kld) for unit in units if unit.kld and unit.predicted_kld]
    guesses, found = [math.log(guess) for _, guess, _ in both], [math.log(kld) for _, _, kld in both]
    off = {name: abs(math.log(kld / guess)) for name, guess, kld in both}
    worst = sorted(off, key=lambda name: -off[name])[:3]
    return Trust(
        units=len(both),
        top=top,
        random=len(both) - top - any(name == "head" for name, _, _ in both),
        spearman=_slope(_ranks(guesses), _ranks(found)),
        slope=_slope(guesses, found),
        worst=tuple(worst),
    )


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares; of ranks without ties it is their correlation."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)
