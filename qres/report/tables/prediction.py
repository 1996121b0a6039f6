"""The tables of predicted sensitivity. Every predicted number carries its sign; a measured one never does."""

from __future__ import annotations

from qres.records.prediction import TensorDamage
from qres.records.result import Level, Result
from qres.records.units import Unit
from qres.report.formatting import NA, PREDICTED, against_floor, count, fixed, mib, percent, predicted, significant
from qres.report.rows import prediction
from qres.report.rows.prediction import Role, predicts
from qres.report.tables.table import Cell, Column, Table, number, table, text

NO_TYPE = "—"
MOST = 20
"""Tensors in the short list of a level."""
_RAW = "Predicted and not calibrated: the sum over a level's own types times its factor is the KLD of that level."

_NOT_PREDICTED = (
    f"{NO_TYPE}: not predicted, because rows do not hold whole blocks of the type, or because they hold those of the "
    "type that it stands in for."
)


def trust(result: Result) -> Table:
    """How the predictions of each level compare with what was patched."""
    columns = (
        Column("level", "text"),
        Column("units"),
        Column("chosen as predicted worst"),
        Column("drawn at random"),
        Column("Spearman"),
        Column("slope"),
    )
    rows = []
    for level in result.levels:
        found = level.sensitivity.trust
        counts = (None, None, None) if found is None else (found.units, found.top, found.random)
        both = (None, None) if found is None else (found.spearman, found.slope)
        rows.append(
            (
                text(level.name),
                *(number(value, NA if value is None else count(value)) for value in counts),
                *(number(value, fixed(value)) for value in both),
            )
        )
    chosen = "All units were patched."
    if result.settings.units != "all":
        chosen = (
            "Of the units that were patched: how many were chosen because the prediction put them first, and how many "
            "were drawn from all others. The head, which is always measured, is among the units, but neither."
        )
    note = (
        f"{chosen} Spearman correlation: 1 is the same order, 0 is no relation. Slope of ln patched over ln predicted: "
        "1 where they are in proportion."
    )
    missing = [level.name for level in result.levels if level.sensitivity.trust is None]
    if missing:
        note += f" No comparison was made at {', '.join(missing)}."
    return table("trust", "How well they agree", columns, rows, note=note)


def worst(result: Result) -> Table:
    """The units where the prediction was furthest from what was patched, both numbers beside each other."""
    columns = (
        Column("level", "text"),
        Column("unit", "text"),
        Column("patched ± SE"),
        Column("predicted ± SE", "predicted"),
        Column("patched / predicted"),
    )
    floor = result.noise_floor.kld_mean
    rows = []
    for level in result.levels:
        units = {unit.unit: unit for unit in level.sensitivity.units}
        for name in level.sensitivity.trust.worst if level.sensitivity.trust is not None else ():
            unit = units.get(name)
            if unit is not None:
                times = _times(unit)
                rows.append(
                    (
                        text(level.name),
                        text(name),
                        number(unit.kld, against_floor(unit.kld, floor, unit.kld_se)),
                        number(unit.predicted_kld, predicted(unit.predicted_kld, unit.predicted_se)),
                        number(times, significant(times)),
                    )
                )
    return table("worst", "Furthest off", columns, rows, note="Predictions are calibrated.")


def calibration(result: Result) -> Table:
    """What the predictions of each level are multiplied with, and from which two numbers."""
    columns = (
        Column("level", "text"),
        Column("predicted ± SE", "predicted"),
        Column("measured KLD"),
        Column("factor"),
    )
    rows = (
        (
            text(level.name),
            number(found.predicted_kld, predicted(found.predicted_kld, found.predicted_se)),
            number(found.measured_kld, significant(found.measured_kld)),
            number(found.factor, fixed(found.factor)),
        )
        for level in result.levels
        if (found := level.sensitivity.calibration) is not None
    )
    note = (
        "Predicted: the sum over all tensors at the types that the level's file gives them. Measured: the level "
        f"itself, on the same text ({result.settings.rank_text}). The predictions of the level's units are multiplied "
        "with the factor, so that they add up to what was measured: that they do is no evidence for them."
    )
    return table("calibration", "What the predictions were multiplied with", columns, rows, note=note)


def replay(result: Result) -> Table:
    """The replay of the reference: what it was, and its own check against llama.cpp."""
    found = result.prediction
    if not found.used:
        return table("replay", "The replay that the predictions come from", (Column("", "text"),), ())
    pairs = (
        ("KLD against llama.cpp", f"{significant(found.replay_kld)}, limit {significant(found.replay_kld_limit)}"),
        ("squared error of the logits", f"{significant(found.replay_nmse)} of their variance"),
        ("text", f"{count(found.chunks)} chunks, {count(found.tokens)} scored positions"),
        ("label draws", f"{count(found.draws)} per chunk"),
        ("calculated in", f"{found.dtype} on {found.device}, {significant(found.elapsed_s)} s"),
        ("importance matrix", found.imatrix or "none"),
    )
    rows = ((text(name), text(value)) for name, value in pairs)
    note = "The reference computed again from llama.cpp's own graph, with gradients: one pass forward, one backward."
    columns = (Column("", "text"), Column("", "text"))
    return table("replay", "The replay that the predictions come from", columns, rows, note=note)


def by_role(result: Result) -> Table:
    """Predicted KLD summed over layers: roles against types, smallest type first."""
    bits = prediction.type_bits(prediction.tensors(result))
    columns = (
        Column("role", "text"),
        Column("tensors"),
        Column("million weights"),
        *(Column(f"predicted {name}", "predicted") for name in bits),
    )
    rows = (
        (
            text(role.name),
            number(role.tensors, count(role.tensors)),
            number(role.weights, fixed(role.weights / 1e6, 1)),
            *(_sum(role, name) for name in bits),
        )
        for role in prediction.roles(result)
    )
    sizes = ", ".join(f"{name} {fixed(value)}" for name, value in bits.items())
    note = (
        f"{_RAW} Each column gives every tensor of a role that type, and adds up over layers; (k of n): k of them "
        f"have a value. {_NOT_PREDICTED} Bits per weight: {sizes}."
    )
    return table("roles", "Predicted KLD by role and type", columns, rows, note=note)


def most_sensitive(result: Result, level: Level) -> Table:
    """The tensors with the largest prediction when all are asked for the level's base type."""
    name = prediction.base_types(result).get(level.name)
    found = [
        (row, damage) for row in prediction.tensors(result) if name and (damage := prediction.asked_for(row, name))
    ]
    total = sum(damage.predicted_kld or 0.0 for _, damage in found)
    known = sorted(
        ((row, damage) for row, damage in found if damage.predicted_kld is not None),
        key=lambda pair: -(pair[1].predicted_kld or 0.0),
    )
    columns = (
        Column("tensor", "code"),
        Column("role", "text"),
        Column("unit", "text"),
        Column("type", "text"),
        Column("MiB"),
        Column("predicted KLD ± SE", "predicted"),
        Column("predicted share", "predicted"),
    )
    rows = (
        (
            text(row.tensor),
            text(row.role),
            text(row.unit or "none"),
            text(damage.type),
            number(damage.bytes, mib(damage.bytes)),
            number(damage.predicted_kld, predicted(damage.predicted_kld, damage.predicted_se)),
            _share(damage.predicted_kld, total),
        )
        for row, damage in known[:MOST]
    )
    note = (
        f"{name}, the level's base type, asked for every tensor; where its rows do not hold it, the type that "
        "llama.cpp takes instead. The file gives some tensors others. Not calibrated. Shares are of the sum over "
        f"{count(len(known))} tensors, {predicted(total)}."
    )
    title = f"{level.name}: the {min(MOST, len(known))} tensors predicted to be most sensitive"
    return table(f"tensors-{level.name}", title, columns, rows, note=note, folded=True)


def every_tensor(result: Result) -> Table:
    """Every tensor at every type; for the page."""
    tensors = prediction.tensors(result)
    names = list(prediction.type_bits(tensors))
    columns = (
        Column("tensor", "code"),
        Column("role", "text"),
        Column("unit", "text"),
        Column("million weights"),
        *(Column(f"predicted {name}", "predicted") for name in names),
    )
    rows = (_tensor(row, names) for row in tensors)
    note = f"{_RAW} {_NOT_PREDICTED} Standard errors are in result.json."
    return table("every-tensor", "Every tensor at every type", columns, rows, note=note, folded=True, page_only=True)


def unit_cell(unit: Unit, level: Level) -> tuple[Cell, ...]:
    """The prediction of a unit; nothing at all in a level without predictions."""
    if not predicts(level):
        return ()
    return (number(unit.predicted_kld, predicted(unit.predicted_kld, unit.predicted_se)),)


def unit_column(level: Level) -> tuple[Column, ...]:
    """The column of it."""
    return (Column("predicted ± SE", "predicted"),) if predicts(level) else ()


def unit_note(level: Level) -> str:
    """What the column holds; empty without one."""
    if not predicts(level):
        return ""
    both = sum(unit.kld is not None and unit.predicted_kld is not None for unit in level.sensitivity.units)
    only = sum(unit.kld is None and unit.predicted_kld is not None for unit in level.sensitivity.units)
    factor = (
        f", calibrated with the factor {fixed(level.sensitivity.calibration.factor)}"
        if level.sensitivity.calibration
        else ""
    )
    return (
        f" Predicted (≈) is calculated from gradients, not measured{factor}: {both} units have both figures, {only} "
        "only a prediction."
    )


def _tensor(row: TensorDamage, names: list[str]) -> tuple[Cell, ...]:
    values = {damage.type: damage.predicted_kld for damage in row.types}
    return (
        text(row.tensor),
        text(row.role),
        text(row.unit or "none"),
        number(row.weights, fixed(row.weights / 1e6, 2)),
        *(number(values[name], predicted(values[name])) if name in values else number(None, NO_TYPE) for name in names),
    )


def _sum(role: Role, name: str) -> Cell:
    total = role.by_type.get(name)
    if total is None:
        return number(None, NO_TYPE)
    if not total.tensors:
        return number(None, NA)
    part = "" if total.tensors == role.tensors else f" ({total.tensors} of {role.tensors})"
    return number(total.kld, f"{predicted(total.kld)}{part}")


def _share(value: float | None, total: float) -> Cell:
    if value is None or total <= 0:
        return number(None, NA)
    return number(value / total, f"{PREDICTED}{percent(value / total)}")


def _times(unit: Unit) -> float | None:
    if unit.kld is None or not unit.predicted_kld or unit.predicted_kld <= 0:
        return None
    return unit.kld / unit.predicted_kld
