"""What to keep at 16 bit, from a scan's running statistics: units and their bytes in, rows of the list out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qres.advice.keep import NextLevel, UnitDamage, keep_list
from qres.levels import F16_MAX
from qres.measure.job import Job
from qres.measure.state import LevelStats, State
from qres.records.units import Keep
from qres.residual.map import ResidualMap


def keep_rows(job: Job, state: State, rmap: ResidualMap | None, alive: Sequence[int], i: int) -> tuple[Keep, ...]:
    """The list of what to keep at 16 bit, from the ranking text; `_with_types` settles the types at the end."""
    rank = state.rank
    level_kld = rank[i].output.kld.mean
    if rmap is None or level_kld is None:
        return ()
    embedding, units = rmap.units[0], []
    for unit, damage in ((rmap.units[index], damage) for index, damage in rank[i].units.items()):
        sums = list(damage.sums)
        if rmap.is_tied and unit == embedding:
            continue  # one tensor: its cost and both its damages are listed as the head
        if rmap.is_tied and unit.is_head and embedding.index in rank[i].units:
            sums = [a + b for a, b in zip(sums, rank[i].units[embedding.index].sums, strict=True)]
        tensors = _otherwise(job, i, unit.weights)
        added = sum(_added(job, i, name) for name in tensors)
        units.append(UnitDamage(unit.name, tuple(sums), tuple(damage.counts), added, "F16", tensors))
    floor = state.noise.kld_mean if state.noise else None
    return keep_list(units, level_kld, floor, _next_level(job, rank, alive, i, level_kld))


def with_types(job: Job, state: State, rmap: ResidualMap, keep: Sequence[Keep]) -> tuple[Keep, ...]:
    """The type of each row: the reference's own below 16 bit and for what costs no bytes, else F16 or BF16.

    BF16 is for units with a weight or an activation that F16 can hold barely or not at all. That is: with a matrix
    that is to stay BF16, with a matmul whose input is in the upper half of the range of F16 or beyond (back ends turn
    it into F16), or that leads to such a point of the stream.
    """
    wide = set()
    for unit in rmap.units:
        weights = any(job.types_16bit.get(name) == "BF16" for name in unit.weights)
        inputs = any(state.inputs.get(name, 0.0) > F16_MAX / 2 for name in unit.weights)
        stream = state.health is not None and not unit.is_head and state.health.absmax[unit.index] > F16_MAX / 2
        if weights or inputs or stream:
            wide.add(unit.name)
    return tuple(replace(row, type=_type(job, row, wide=row.unit in wide)) for row in keep)


def _type(job: Job, row: Keep, *, wide: bool) -> str:
    """Of what a row names; several types joined by `and`."""
    if row.tensors and not row.bytes_added:
        return " and ".join(dict.fromkeys(job.reference.tensor_types[name] for name in row.tensors))
    held = [job.types_16bit[name] for name in row.tensors if name in job.types_16bit] or ["F16"]
    plain = "BF16" if wide else "F16"
    return " and ".join(dict.fromkeys(plain if kind in ("F16", "BF16") else kind for kind in held))


def _otherwise(job: Job, level: int, names: Sequence[str]) -> tuple[str, ...]:
    """The tensors that the level holds below 16 bit, or otherwise than the reference."""
    changed = job.levels[level].changed
    return tuple(name for name in names if name in changed or _added(job, level, name))


def _added(job: Job, level: int, name: str) -> int:
    """Bytes that one tensor at 16 bit adds; none where the level has it so, as large as the reference, or not."""
    wanted = job.bytes_16bit.get(name, 0)
    return max(0, wanted - job.levels[level].tensor_bytes.get(name, wanted))


def _next_level(
    job: Job, rank: Sequence[LevelStats], alive: Sequence[int], i: int, level_kld: float
) -> NextLevel | None:
    """The uniform alternative: the next larger level of the scan that is better, if it is smaller than the reference.

    Where none was measured, Q8_0 at its best: its size is known, and it cannot recover more than everything. There is
    none for a file that holds most matrices as the reference does: nothing uniform lies between the two.
    """
    own, whole_model = job.levels[i].file_bytes, job.reference.file_bytes
    larger = [
        NextLevel(job.levels[k].name, level_kld - kld, job.levels[k].file_bytes - own)
        for k in alive
        if (kld := rank[k].output.kld.mean) is not None
        and own < job.levels[k].file_bytes < whole_model
        and kld < level_kld
    ]
    if larger:
        return min(larger, key=lambda n: n.bytes_added)
    if 2 * len(_otherwise(job, i, tuple(job.bytes_16bit))) < len(job.bytes_16bit):
        return None
    held = job.levels[i].tensor_bytes
    q8 = sum(max(0, size - held[name]) for name, size in job.bytes_q8_0.items() if name in held)
    whole = sum(_added(job, i, name) for name in job.bytes_16bit)
    return NextLevel("Q8_0 at most", level_kld, q8) if q8 else NextLevel("16 bit", level_kld, whole)


def kept_units(rmap: ResidualMap | None, keep: Sequence[Keep]) -> tuple[int, ...]:
    """Indices of the units worth keeping whose errors can be left out of an injected run (all but the head)."""
    if rmap is None:
        return ()
    names = {row.unit for row in keep if row.worth_it}
    return tuple(unit.index for unit in rmap.in_stream if unit.name in names)
