"""How many decodes a scan takes: the plan that progress is counted against."""

from __future__ import annotations

from qres.measure.job import Job
from qres.measure.lockstep import Lockstep
from qres.measure.state import State
from qres.sensitivity import patching

_ONCE = 4
"""Decodes before the first chunk: the map's check, the graphs, the range of the activations, the noise floor; and one
for the range in each level."""


def _plain_decodes(job: Job, lockstep: Lockstep, rank: int, report: int) -> int:
    """Decodes of so many chunks without the units that are patched."""
    levels = len(lockstep.alive)
    if lockstep.rmap is None:
        return (1 + levels) * (rank + report)
    return (1 + 2 * levels) * (rank + report) + levels * (rank + 2 * min(report, len(job.texts.rank)))


def n_units(job: Job, lockstep: Lockstep) -> int:
    """How many units are patched per level."""
    if lockstep.rmap is None:
        return 0
    budget = patching.budget(decodes(job, lockstep, 0), len(lockstep.alive), len(job.texts.rank))
    return lockstep.points if job.all_units else min(lockstep.points, budget)


def decodes(job: Job, lockstep: Lockstep, n_units: int) -> int:
    """Decodes of the whole scan."""
    rank, report = len(job.texts.rank), len(job.texts.report)
    plain = _plain_decodes(job, lockstep, rank, report)
    return _ONCE + len(lockstep.alive) + plain + n_units * len(lockstep.alive) * rank


def decodes_done(job: Job, state: State, lockstep: Lockstep) -> int:
    """Decodes that a scan that goes on need not do again."""
    plain = _plain_decodes(job, lockstep, state.rank_done, state.report_done)
    return 2 + plain + state.n_units * len(lockstep.alive) * state.rank_done
