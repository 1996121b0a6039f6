"""The tables by layer and by unit: the stream, what each layer does to it, and what each unit is worth."""

from __future__ import annotations

from collections.abc import Sequence

from qres.records.result import Level, Result
from qres.records.stream import Point
from qres.records.units import KeepCheck, RankCorrelation
from qres.report.formatting import NA, against_floor, fixed, mib, percent, significant
from qres.report.rows.stream import is_scaled
from qres.report.tables import prediction
from qres.report.tables.table import Cell, Column, Table, number, table, text

MEASURES = (
    ("injected_error", "injected error"),
    ("local_error", "local error"),
    ("drift", "drift"),
    ("branch_ratio", "branch ratio"),
    ("depth", "depth"),
)
"""Cheap measures of a unit: field of `RankCorrelation`, and its name in words."""


def points(result: Result, level: Level) -> Table:
    """Every stream point of one level."""
    floors, scaled = result.noise_floor.drift_points, is_scaled(level)
    columns = (
        Column("point", "text"),
        Column("ratio, reference"),
        Column("ratio"),
        Column("ratio p95"),
        Column("drift"),
        Column("drift p95"),
        Column("growth"),
        Column("cosine"),
        Column("SQNR dB"),
        Column("local error"),
        Column("injected error"),
        Column("drift share"),
        Column("made here"),
        *((Column("by scaling"),) if scaled else ()),
        Column("largest value"),
    )
    rows = (_point_row(point, floors[point.index] if floors else None, scaled=scaled) for point in level.points)
    note = (
        "Medians over tokens. Drift is from the free run, local and injected error from the forced run. Drift shares "
        "add up to 100 %; a negative share pulls back towards the reference."
    )
    if scaled:
        note += " By scaling: what a scale or norm of the stream itself, on its way into the add, did to the drift."
    title = f"{level.name}: every stream point"
    return table(f"points-{level.name}", title, columns, rows, note=note, folded=True)


def units(result: Result, level: Level) -> Table:
    """Every unit of one level, measured or not."""
    floor = result.noise_floor.kld_mean
    columns = (
        Column("unit", "text"),
        Column("KLD ± SE"),
        *prediction.unit_column(level),
        Column("how", "text"),
        Column("injected error"),
        Column("local error"),
        Column("ratio"),
        Column("drift"),
        Column("MiB at level"),
        Column("MiB at 16 bit" if result.reference.is_original else "MiB in the reference"),
        Column("tensors", "text"),
    )
    rows = (
        (
            text(unit.unit),
            number(unit.kld, against_floor(unit.kld, floor, unit.kld_se)),
            *prediction.unit_cell(unit, level),
            text(unit.method),
            *(
                number(value, significant(value))
                for value in (unit.injected_error, unit.local_error, unit.ratio, unit.drift)
            ),
            number(unit.bytes_at_level, mib(unit.bytes_at_level)),
            number(unit.bytes_at_16bit, mib(unit.bytes_at_16bit)),
            text(_tensors(unit.weights)),
        )
        for unit in level.sensitivity.units
    )
    every = level.sensitivity.units
    measured = sum(unit.kld is not None for unit in every)
    note = (
        f"{measured} of {len(every)} units measured, each quantized alone in an otherwise exact model, on the "
        f"ranking text ({result.settings.rank_text}).{prediction.unit_note(level)}"
    )
    title = f"{level.name}: every unit quantized alone"
    return table(f"units-{level.name}", title, columns, rows, note=note, folded=len(level.sensitivity.units) > 12)


def keep(result: Result, level: Level) -> Table:
    """What to keep at 16 bit, best first, with the running cost."""
    columns = (
        Column("unit", "text"),
        Column("as", "text"),
        Column("KLD recovered"),
        Column("of the gap"),
        Column("+MiB"),
        Column("so far"),
        Column("confidence"),
        Column("worth", "text"),
        Column("reason", "text"),
        Column("tensors", "text"),
    )
    weights = {unit.unit: unit.weights for unit in level.sensitivity.units}
    rows = []
    total = 0
    for row in level.sensitivity.keep_16bit:
        total += row.bytes_added
        rows.append(
            (
                text(row.unit),
                text(row.type),
                number(row.kld_recovered, against_floor(row.kld_recovered, result.noise_floor.kld_mean)),
                number(row.gap_share, percent(row.gap_share)),
                number(row.bytes_added, mib(row.bytes_added)),
                number(total, mib(total)),
                number(row.confidence, percent(row.confidence, 0)),
                text("yes" if row.worth_it else "no"),
                text(row.reason),
                text(_tensors(row.tensors or weights.get(row.unit, ()))),
            )
        )
    marked = [index for index, row in enumerate(level.sensitivity.keep_16bit) if row.worth_it]
    note = f"{_cut(level)} {keep_check(result, level)}".strip()
    return table(f"keep-{level.name}", f"{level.name}: the ordered list", columns, rows, note=note, marked=marked)


def _tensors(names: Sequence[str]) -> str:
    """Tensors of a unit, the block they share named once: `blk.3: attn_k, attn_output`."""
    parts = [name.removesuffix(".weight").split(".", 2) for name in names]
    if parts and all(len(part) == 3 and part[:2] == parts[0][:2] for part in parts):
        return f"{'.'.join(parts[0][:2])}: {', '.join(part[2] for part in parts)}"
    return ", ".join(name.removesuffix(".weight") for name in names)


def keep_check(result: Result, level: Level) -> str:
    """What the recommended list does on text that did not choose it; empty when it was not checked."""
    check: KeepCheck | None = level.sensitivity.keep_check
    if check is None:
        listed = level.sensitivity.keep_16bit
        return "The list was not checked on other text: read it as a ranking." if listed else ""
    return (
        f"Checked together on the reporting text ({result.settings.text}), which did not choose the list: without the "
        f"errors of {', '.join(check.units)} the KLD of all injected errors goes from "
        f"{significant(check.kld_all_injected)} to {significant(check.kld_without_units)}, which recovers "
        f"{percent(check.recovered_share)} for {mib(check.bytes_added)} MiB."
    )


def health(result: Result) -> Table:
    """The reference's stream, point by point."""
    columns = (
        Column("point", "text"),
        Column("norm"),
        Column("mean"),
        Column("variance"),
        Column("largest value"),
        Column("kurtosis"),
        Column("channels in use"),
        Column("F16 headroom"),
    )
    rows = (
        (
            text(row.label),
            *(number(value, significant(value)) for value in (row.norm_median, row.mean, row.variance, row.absmax)),
            number(row.kurtosis, significant(row.kurtosis)),
            number(row.participation, significant(row.participation)),
            number(row.f16_headroom, _headroom(row.f16_headroom)),
        )
        for row in result.stream
    )
    note = (
        "Tokens with massive activations are left out, except for the largest value. Kurtosis is 3 for a normal "
        "distribution; channels in use is the participation ratio; headroom is 65504 over the largest value."
    )
    return table("health", "Stream health of the reference", columns, rows, note=note, folded=len(result.stream) > 8)


def rank_correlations(result: Result) -> Table:
    """How well each cheap measure ranks the units by their measured KLD."""
    columns = (Column("level", "text"), Column("units"), *(Column(words) for _, words in MEASURES))
    rows: list[tuple[Cell, ...]] = []
    for level in result.levels:
        ranks = level.sensitivity.rank_correlation
        if ranks is not None:
            values = [value for _, value in _correlations(ranks)]
            rows.append(
                (
                    text(level.name),
                    number(ranks.units, str(ranks.units)),
                    *(number(value, fixed(value)) for value in values),
                )
            )
    note = (
        "Spearman correlation with the measured KLD of the same units: 1 is the same order, 0 is no relation. "
        "Drift is a screen; KLD decides."
    )
    if result.settings.units == "ranked":
        chosen = "which were chosen by their injected error: among so few, so alike, these figures say little."
        if any(level.sensitivity.trust is not None for level in result.levels):
            chosen = "which are those predicted to be the worst and some drawn at random."
        note += f" Only the patched branches are counted, {chosen} With --units all they cover every branch."
    return table("ranks", "Which cheap measure predicts the damage?", columns, rows, note=note)


def rank_sentence(level: Level) -> str:
    """The rank correlation of one level in words."""
    ranks = level.sensitivity.rank_correlation
    if ranks is None:
        return f"{level.name}: no rank correlation was computed."
    known = [(words, value) for words, value in _correlations(ranks) if value is not None]
    if not known:
        return f"{level.name}: no rank correlation, fewer than 4 units were measured."
    best, value = max(known, key=lambda pair: pair[1])
    rest = ", ".join(f"{words} {fixed(other)}" for words, other in known if words != best)
    return f"{level.name}: {best} {_strength(value)} ({fixed(value)}{f'; {rest}' if rest else ''})."


def additivity(result: Result) -> Table:
    """Whether the damages of single units add up to the damage of the level."""
    columns = (
        Column("level", "text"),
        Column("KLD of the level"),
        Column("sum of single units"),
        Column("all errors injected"),
    )
    rows = (
        (
            text(level.name),
            *(
                number(value, significant(value))
                for value in (
                    level.sensitivity.additivity.kld_level,
                    level.sensitivity.additivity.kld_sum_of_units,
                    level.sensitivity.additivity.kld_all_injected,
                )
            ),
        )
        for level in result.levels
        if level.sensitivity.additivity is not None
    )
    note = (
        "On the ranking text. The sum exists only when every unit was measured; the last column adds the errors of "
        "all branches and the embedding to the reference at once, without the head."
    )
    return table("additivity", "Do single damages add up?", columns, rows, note=note)


def _point_row(point: Point, floor: float | None, *, scaled: bool) -> tuple[Cell, ...]:
    sqnr = "∞" if point.drift_median == 0 else fixed(point.sqnr_db, 1)
    return (
        text(point.label),
        *(
            number(value, significant(value))
            for value in (point.reference_ratio_median, point.ratio_median, point.ratio_p95)
        ),
        number(point.drift_median, against_floor(point.drift_median, floor)),
        number(point.drift_p95, significant(point.drift_p95)),
        number(point.drift_growth, fixed(point.drift_growth)),
        number(point.cosine_median, fixed(point.cosine_median, 5)),
        number(point.sqnr_db, sqnr),
        number(point.local_error_median, significant(point.local_error_median)),
        number(point.injected_error_median, significant(point.injected_error_median)),
        number(point.ledger_share, percent(point.ledger_share)),
        number(point.generated_share, percent(point.generated_share)),
        *((number(point.scaling_share, percent(point.scaling_share)),) if scaled else ()),
        number(point.absmax, significant(point.absmax)),
    )


def _cut(level: Level) -> str:
    if not level.sensitivity.keep_16bit:
        return "Nothing to keep at 16 bit."
    worth = sum(row.worth_it for row in level.sensitivity.keep_16bit)
    if worth == len(level.sensitivity.keep_16bit):
        return "Every listed unit is worth its bytes."
    if worth == 0:
        return "No unit is worth its bytes: each reason names what buys more KLD per byte."
    first = "The first is worth its bytes" if worth == 1 else f"The first {worth} are worth their bytes"
    return f"{first}; for the others the reason names what buys more KLD per byte."


def _headroom(value: float | None) -> str:
    if value is None:
        return NA
    return f"{significant(value)} (does not fit F16)" if value < 1 else f"{significant(value)}×"


def _correlations(ranks: RankCorrelation) -> list[tuple[str, float | None]]:
    return [(words, getattr(ranks, field)) for field, words in MEASURES]


def _strength(value: float) -> str:
    if value >= 0.8:
        return "orders the units almost as the measured KLD does"
    if value >= 0.5:
        return "orders the units roughly as the measured KLD does, and is the best of the cheap measures"
    return "is the best of the cheap measures and still does not order the units reliably"
