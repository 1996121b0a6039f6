"""What the charts of predicted sensitivity draw, and the sums over tensors that its tables show, too."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from qres.levels import FALLBACK, LEVELS_BY_NAME
from qres.records.prediction import TensorDamage, TypeDamage
from qres.records.result import Level, Result
from qres.report.formatting import PREDICTED, plus_minus, predicted
from qres.report.rows.stream import Row

OTHER = "none"
"""Where on the layer axis a tensor stands that is in no layer and neither the embedding nor the head."""


@dataclass
class Sum:
    """Predicted KLD of several tensors at one type."""

    kld: float = 0.0
    tensors: int = 0
    """Those that have a prediction."""


@dataclass
class Role:
    """The tensors of one role, over all layers."""

    name: str
    tensors: int = 0
    weights: int = 0
    by_type: dict[str, Sum] = field(default_factory=dict)


def tensors(result: Result) -> tuple[TensorDamage, ...]:
    """Everything that was predicted; empty where nothing was."""
    return result.prediction.tensors if result.prediction.used else ()


def asked_for(tensor: TensorDamage, name: str) -> TypeDamage | None:
    """What the tensor does when this type is asked for: as its fallback where its rows do not hold the type."""
    by_type = {damage.type: damage for damage in tensor.types}
    return by_type.get(name) or by_type.get(FALLBACK.get(name, ""))


def type_bits(rows: Iterable[TensorDamage]) -> dict[str, float]:
    """Bits per weight of every type in the predictions, smallest first."""
    bytes_of: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for row in rows:
        for damage in row.types:
            bytes_of[damage.type] += damage.bytes
            weights[damage.type] += row.weights
    bits = {name: 8 * size / weights[name] if weights[name] else 0.0 for name, size in bytes_of.items()}
    return dict(sorted(bits.items(), key=lambda pair: (pair[1], pair[0])))


def roles(result: Result) -> list[Role]:
    """Sums over layers: the embedding, attention, the others in order of appearance, the head."""
    found: dict[str, Role] = {}
    for row in tensors(result):
        role = found.setdefault(row.role, Role(row.role))
        role.tensors += 1
        role.weights += row.weights
        for damage in row.types:
            total = role.by_type.setdefault(damage.type, Sum())
            if damage.predicted_kld is not None:
                total.kld += damage.predicted_kld
                total.tensors += 1
    return sorted(found.values(), key=lambda role: _order(role.name))  # stable


def _order(role: str) -> int:
    return {"embedding": 0, "attention": 1, "other": 3, "head": 4}.get(role.partition(" ")[0], 2)


def base_types(result: Result) -> dict[str, str]:
    """Level -> the type that it asks for where it singles nothing out; a level without a prediction is left out.

    The type of most of its tensors where the level is none that llama.cpp makes.
    """
    known = set(type_bits(tensors(result)))
    found: dict[str, str] = {}
    for level in result.levels:
        recipe = LEVELS_BY_NAME.get(level.file.file_type) or LEVELS_BY_NAME.get(level.name)
        shares = [share for share in level.file.types if share.type in known]
        if recipe is not None and known & {recipe.base, FALLBACK.get(recipe.base)}:
            found[level.name] = recipe.base
        elif shares:
            found[level.name] = max(shares, key=lambda share: (share.tensors, share.weights)).type
    return found


def heat(result: Result) -> list[Row]:
    """Predicted KLD by layer and role, at the base type of every level."""
    cells: dict[tuple[str, str, str], list[tuple[TensorDamage, TypeDamage]]] = defaultdict(list)
    for base in dict.fromkeys(base_types(result).values()):
        for row in tensors(result):
            damage = asked_for(row, base)
            if damage is not None and damage.predicted_kld is not None:
                cells[base, place(row), row.role].append((row, damage))
    rows = []
    for (base, layer, role), members in cells.items():
        value = sum(damage.predicted_kld or 0.0 for _, damage in members)
        if 0 < value < math.inf:  # a logarithmic scale has no colour for either end
            error = members[0][1].predicted_se if len(members) == 1 else None
            label = members[0][0].tensor if len(members) == 1 else f"{len(members)} tensors"
            shown = predicted(value, error)
            types = ", ".join(dict.fromkeys(damage.type for _, damage in members))
            cell = {"base": base, "layer": layer, "role": role, "value": value}
            rows.append({**cell, "type": types, "label": label, "text": shown})
    return rows


def place(row: TensorDamage) -> str:
    """Where on the layer axis a tensor stands."""
    if row.layer is not None:
        return str(row.layer)
    return {"embedding": "emb", "head": "head"}.get(row.unit, OTHER)


def pairs(result: Result) -> list[Row]:
    """Units that were both patched and predicted, with one standard error to each side."""
    rows: list[Row] = []
    for level in result.levels:
        worst = level.sensitivity.trust.worst if level.sensitivity.trust is not None else ()
        for unit in level.sensitivity.units:
            guess, kld = unit.predicted_kld, unit.kld
            if guess is not None and kld is not None and guess > 0 and kld > 0:
                guess_error, error = unit.predicted_se or 0.0, unit.kld_se or 0.0
                rows.append(
                    {
                        "level": level.name,
                        "branch": unit.branch,
                        "label": unit.unit,
                        "name": unit.unit if unit.unit in worst else "",
                        "x": guess,
                        "value": kld,
                        "left": max(guess - guess_error, guess / 10),
                        "right": guess + guess_error,
                        "low": max(kld - error, kld / 10),
                        "high": kld + error,
                        "guess": f"{PREDICTED}{plus_minus(guess, unit.predicted_se)}",
                        "text": plus_minus(kld, unit.kld_se),
                    }
                )
    return rows


def ranges(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Level -> the smallest and the largest value on either axis, standard errors included."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        low, high = min(row["left"], row["low"]), max(row["right"], row["high"])
        before = found.get(row["level"], (low, high))
        found[row["level"]] = min(before[0], low), max(before[1], high)
    return found


def predicts(level: Level) -> bool:
    """Whether any unit of the level has a prediction."""
    return any(unit.predicted_kld is not None for unit in level.sensitivity.units)
