"""The tables about levels, output and devices: which numbers are shown, in which words. The same for every medium.

Tables by layer are in `layer_tables`, those about files and settings in `file_tables`. Nothing is measured here;
a value below the noise floor is said to be below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qres.records.output import Group, Output
from qres.records.result import Comparison, Level, Result
from qres.records.stream import NoiseFloor
from qres.report.formatting import (
    NA,
    against_floor,
    change,
    count,
    fixed,
    mib,
    multiple,
    percent,
    plus_minus,
    significant,
)
from qres.report.tables.table import Cell, Column, Table, number, table, text


@dataclass(frozen=True)
class KeyNumber:
    """One of the numbers beside the verdict."""

    value: str
    label: str
    note: str


def recommended(result: Result) -> Level | None:
    """The level that the verdict names, if it was measured."""
    return next((level for level in result.levels if level.name == result.verdict.level), None)


def focus(result: Result) -> Level | None:
    """The level that charts show first: the recommended one, else the last."""
    return recommended(result) or (result.levels[-1] if result.levels else None)


def key_numbers(result: Result) -> tuple[KeyNumber, ...]:
    """KLD, size and agreement of the recommended level; none without a recommendation."""
    level = recommended(result)
    if level is None:
        return ()
    output, floor = level.output, result.noise_floor.kld_mean
    return (
        KeyNumber(
            plus_minus(output.kld_mean, output.kld_se),
            "mean KLD, nats per token",
            f"{_in_floors(output.kld_mean, floor)} · {change(output.ln_ppl_ratio)} perplexity",
        ),
        KeyNumber(
            percent(output.same_top),
            "same top token",
            f"at {count(output.tokens)} scored positions",
        ),
        KeyNumber(
            f"{mib(level.file.bytes)} MiB",
            f"{fixed(level.file.bpw)} bits per weight",
            f"{percent(level.file.bytes / result.reference.bytes, 0)} of the 16-bit file"
            if result.reference.is_16bit and not result.reference.released_in
            else f"{percent(level.file.bytes / result.reference.bytes, 0)} of the reference file",
        ),
    )


def levels(result: Result) -> Table:
    """One row per level: what it costs and what it changes."""
    floor = result.noise_floor.kld_mean
    columns = (
        Column("level", "text"),
        Column("MiB"),
        Column("bits/weight"),
        Column("KLD mean ± SE"),
        Column("× noise floor"),
        Column("KLD median"),
        Column("KLD p99"),
        Column("same top"),
        Column("PPL change"),
    )
    rows = []
    for level in result.levels:
        out = level.output
        rows.append(
            (
                text(level.name),
                number(level.file.bytes, mib(level.file.bytes)),
                number(level.file.bpw, fixed(level.file.bpw)),
                number(out.kld_mean, _or_nonfinite(plus_minus(out.kld_mean, out.kld_se), level)),
                number(out.kld_mean, multiple(out.kld_mean, floor)),
                number(out.kld_median, significant(out.kld_median)),
                number(out.kld_p99, significant(out.kld_p99)),
                number(out.same_top, percent(out.same_top)),
                number(out.ln_ppl_ratio, change(out.ln_ppl_ratio, out.ln_ppl_ratio_se)),
            )
        )
    marked = [index for index, level in enumerate(result.levels) if level.name == result.verdict.level]
    note = " ".join(part for part in (_marked(marked), _floor_sentence(result.noise_floor), _nonfinite(result)) if part)
    return table("levels", "What each level costs and changes", columns, rows, note=note, marked=marked)


def comparisons(result: Result) -> Table:
    """Levels compared in pairs on the same tokens."""
    columns = (Column("levels", "text"), Column("KLD difference ± SE"), Column("told apart", "text"))
    rows = (
        (
            text(f"{pair.a} {chr(0x2212)} {pair.b}"),
            number(pair.kld_difference, plus_minus(pair.kld_difference, pair.kld_difference_se)),
            text(_told_apart(pair)),
        )
        for pair in result.comparisons
    )
    note = (
        "Both levels saw the same tokens, so the difference is known better than either mean. "
        "Below 2 standard errors the order of the two is not established."
    )
    return table("comparisons", "Paired comparisons", columns, rows, note=note)


def deployment(result: Result) -> Table:
    """Memory on each device."""
    columns = (
        Column("device", "text"),
        Column("context"),
        Column("level", "text"),
        Column("weights"),
        Column("cache"),
        Column("compute"),
        Column("needed"),
        Column("usable"),
        Column("fits", "text"),
    )
    rows = (
        (
            text(row.device),
            number(row.n_ctx, count(row.n_ctx)),
            text(row.level),
            *(
                number(size, mib(size))
                for size in (
                    row.weights_bytes,
                    row.cache_bytes,
                    row.compute_bytes,
                    row.needed_bytes,
                    row.usable_bytes,
                )
            ),
            text("yes" if row.fits else "no"),
        )
        for row in result.deployment
    )
    note = " ".join(("Calculated, not measured on the device. Sizes in MiB.", *result.assumptions))
    return table("deployment", "Memory on devices", columns, rows, note=note, folded=len(result.deployment) > 12)


def advice(result: Result) -> Table:
    """The level recommended for each device."""
    columns = (
        Column("device", "text"),
        Column("context"),
        Column("level", "text"),
        Column("KLD mean"),
        Column("reason", "text"),
    )
    rows = (
        (
            text(row.device),
            number(row.n_ctx, count(row.n_ctx)),
            text(row.level or "none fits"),
            number(row.kld_mean, against_floor(row.kld_mean, result.noise_floor.kld_mean)),
            text(row.reason),
        )
        for row in result.device_advice
    )
    return table("advice", "Level for each device", columns, rows)


def output(result: Result) -> Table:
    """The rest of the output measures of each level."""
    columns = (
        Column("level", "text"),
        Column("KLD p90"),
        Column("KLD p95"),
        Column("KLD p99.9"),
        Column("KLD max"),
        Column("PPL"),
        Column("PPL reference"),
        Column("NLL correlation"),
        Column("RMS Δp"),
        Column("mean Δp"),
        Column("Δp p5"),
        Column("Δp p95"),
    )
    rows = []
    for level in result.levels:
        out = level.output
        tails = (out.kld_p90, out.kld_p95, out.kld_p999, out.kld_max, out.ppl, out.ppl_reference)
        deltas = (out.rms_delta_p, out.mean_delta_p, out.delta_p_p05, out.delta_p_p95)
        rows.append(
            (
                text(level.name),
                *(number(value, significant(value)) for value in tails),
                number(out.ln_ppl_correlation, fixed(out.ln_ppl_correlation, 4)),
                *(number(value, percent(value, 2)) for value in deltas),
            )
        )
    return table("output", "The tail, perplexity and probabilities", columns, rows)


def by_position(result: Result) -> Table:
    """Output measures by the position in the chunk."""
    groups = [(level.name, _positions(level.output)) for level in result.levels]
    note = "Quarters of the scored positions of a chunk, early to late: does damage grow with context?"
    if any(level.output.first_half for level in result.levels):
        note += (
            " The first half of a chunk is what a short prompt sees; every fourth position of it is looked at, and no "
            "other figure comes from it."
        )
    return _groups("position", "By position", groups, note)


def _positions(output: Output) -> tuple[Group, ...]:
    """The first half where it was looked at, then the quarters of what is scored."""
    return output.by_position if output.first_half is None else (output.first_half, *output.by_position)


def by_confidence(result: Result) -> Table:
    """Output measures by how sure the reference is."""
    groups = [(level.name, level.output.by_confidence) for level in result.levels]
    note = "By the probability of the reference's first choice: where it is unsure, a changed choice costs less."
    return _groups("confidence", "By the reference's confidence", groups, note)


def _groups(name: str, title: str, groups: list[tuple[str, tuple[Group, ...]]], note: str) -> Table:
    columns = (
        Column("level", "text"),
        Column("positions", "text"),
        Column("tokens"),
        Column("KLD"),
        Column("same top"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            text(level),
            text(group.label),
            number(group.tokens, count(group.tokens)),
            number(group.kld_mean, significant(group.kld_mean)),
            number(group.same_top, percent(group.same_top)),
        )
        for level, parts in groups
        for group in parts
    ]
    return table(f"by-{name}", title, columns, rows, note=note, folded=len(rows) > 12)


def _in_floors(value: float | None, floor: float | None) -> str:
    shown = multiple(value, floor)
    if shown == NA:
        return "no noise floor to compare with"
    return "below the noise floor" if shown.startswith("below") else f"{shown} the noise floor"


def _marked(marked: list[int]) -> str:
    return "Marked: the recommended level." if marked else ""


def _floor_sentence(noise: NoiseFloor) -> str:
    floor = noise.kld_mean
    if floor is None:
        return f"There is no noise floor: {noise.reason}." if noise.reason else "No noise floor was measured."
    if floor == 0:
        return "The reference repeats itself exactly: the noise floor is 0."
    return (
        f"Noise floor: KLD {significant(floor)}, the reference against itself; less than that cannot be told from "
        "arithmetic noise. A KLD means little across models: compare multiples of the noise floor."
    )


def _or_nonfinite(shown: str, level: Level) -> str:
    return f"{NA} (non-finite)" if shown == NA and level.output.nonfinite_tokens else shown


def _nonfinite(result: Result) -> str:
    parts = [
        f"{level.name} {count(own)}"
        for level in result.levels
        if (own := level.output.nonfinite_tokens - level.output.reference_nonfinite_tokens)
    ]
    return f"Positions left out because their logits were not finite: {', '.join(parts)}." if parts else ""


def _told_apart(pair: Comparison) -> str:
    if pair.kld_difference is None or pair.kld_difference_se is None:
        return NA
    if math.fabs(pair.kld_difference) > 2 * pair.kld_difference_se:
        return f"yes, {pair.b if pair.kld_difference > 0 else pair.a} is closer to the reference"
    return "no, within 2 standard errors"


def drift_floor(noise: NoiseFloor) -> str:
    """What the drift of the reference against itself says about the drifts below it."""
    floor = noise.drift_median
    if floor is None:
        why = f"There is no noise floor of drift: {noise.drift_reason}."
        return (
            f"Drift is a screen, KLD decides. {why if noise.drift_reason else 'No noise floor of drift was measured.'}"
        )
    return (
        f"Drift is a screen, KLD decides. The reference drifts {significant(floor)} from itself: the noise floor here."
    )
