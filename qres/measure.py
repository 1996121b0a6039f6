"""The measuring part of a scan, inside the worker process: two passes over two texts.

The ranking text finds the units whose errors do the damage, by patching. The reporting text, which took no part in that
choice, gives every figure about the levels and checks the chosen list as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qres import corpus, summary
from qres.advice import NextLevel, UnitDamage, keep_list
from qres.drift import HealthStats
from qres.errors import QresError
from qres.job import Job, Measured, MeasuredLevel, Progress
from qres.lockstep import LevelStats, Lockstep
from qres.native.session import Session, SessionOptions, system_info
from qres.records import Keep, NoiseFloor
from qres.residual import ResidualMap
from qres.sensitivity import patching


@dataclass(frozen=True)
class Texts:
    """What is decoded."""

    rank: tuple[corpus.Chunk, ...]
    report: tuple[corpus.Chunk, ...]
    rank_name: str
    report_name: str
    unused: int


def measure(emit: Callable[[object], None], job: Job) -> Measured:
    """Run a job; `emit` gets Progress events.

    Raises:
        QresError: a model that cannot be loaded or measured, or a text that is too short.
    """
    options = SessionOptions(job.n_ctx, job.threads, job.n_gpu_layers)
    with ExitStack() as stack:
        reference = stack.enter_context(Session(Path(job.reference.path), options))
        levels = [(level.name, stack.enter_context(Session(Path(level.path), options))) for level in job.levels]
        texts = _texts(job, reference)
        counter = _Counter(emit)
        lockstep = Lockstep(reference, levels, job.threads, counter.step)
        weights = frozenset(job.reference.tensor_bytes)
        lockstep.map_streams(weights, texts.rank[0])
        n_units = counter.plan(job, lockstep, texts)
        noise, no_noise = _noise_floor(job, lockstep, texts.rank[0])
        rank = _rank(lockstep, texts, n_units)
        keeps = [_keep(job, lockstep.rmap, rank, i, noise) for i in range(len(levels))]
        other_text = texts.rank_name != texts.report_name  # a list is not checked on the text that chose it
        kept = [_kept_units(lockstep.rmap, keep) if other_text else () for keep in keeps]
        health = HealthStats(lockstep.points) if lockstep.rmap else None
        report = _report(lockstep, texts, kept, health)
        rmap = lockstep.rmap
        return Measured(
            norm_placement=rmap.norm_placement if rmap else "unknown",
            unmapped=lockstep.unmapped,
            system=system_info(),
            n_layer=reference.n_layer,
            n_embd=reference.n_embd,
            n_vocab=reference.n_vocab,
            n_ctx_train=reference.n_ctx_train,
            n_ctx=len(texts.report[0]),
            chunks=len(texts.report),
            rank_chunks=len(texts.rank),
            text=texts.report_name,
            rank_text=texts.rank_name,
            unused_tokens=texts.unused,
            massive_tokens=health.massive if health else 0,
            noise_floor=noise,
            no_noise_floor=no_noise,
            stream=summary.health(rmap, health) if rmap and health else (),
            levels=tuple(
                _level(job, rmap, i, rank[i], report[i], health, keeps[i], kept[i]) for i in range(len(levels))
            ),
            comparisons=summary.comparisons([name for name, _ in levels], report),
        )


def _level(
    job: Job,
    rmap: ResidualMap | None,
    i: int,
    rank: LevelStats,
    report: LevelStats,
    health: HealthStats | None,
    keep: tuple[Keep, ...],
    kept: Sequence[int],
) -> MeasuredLevel:
    """The records of level i."""
    output = report.output.compute()
    if rmap is None or report.drift is None or health is None:
        return MeasuredLevel(output, (), (), (), None, None, None)
    units = summary.units(rmap, rank, job.levels[i].tensor_bytes, job.bytes_16bit)
    return MeasuredLevel(
        output=output,
        points=summary.points(rmap, report.drift, health),
        units=units,
        keep_16bit=keep,
        keep_check=summary.keep_check(rmap, report, kept, keep),
        rank_correlation=summary.rank_correlation(units),
        additivity=summary.additivity(units, rank),
    )


def _noise_floor(job: Job, lockstep: Lockstep, chunk: corpus.Chunk) -> tuple[NoiseFloor, str]:
    """The noise floor, or why there is none: it is a comfort, not a reason to end a scan."""
    if not job.with_noise_floor:
        return NoiseFloor(None, None), "a diffusion model reads the whole chunk at once: halves of it see another text"
    try:
        return lockstep.noise_floor(frozenset(job.reference.tensor_bytes), chunk), ""
    except QresError as error:
        return NoiseFloor(None, None), error.message


class _Counter:
    """Counts decodes against the plan."""

    def __init__(self, emit: Callable[[object], None]) -> None:
        self._emit = emit
        self._done = 0
        self._total = 0

    def plan(self, job: Job, lockstep: Lockstep, texts: Texts) -> int:
        """Set the total; returns how many units are patched per level."""
        levels, rank, report = len(job.levels), len(texts.rank), len(texts.report)
        if lockstep.rmap is None:
            self._total = (1 + levels) * (rank + report)
            return 0
        rest = 3 + (1 + 2 * levels) * (rank + report) + levels * (rank + 2 * min(rank, report))
        wanted = lockstep.points if job.all_units else min(lockstep.points, patching.budget(rest, levels, rank))
        self._total = rest + wanted * levels * rank
        return wanted

    def step(self, doing: str) -> None:
        """One decode is done."""
        self._done += 1
        if self._total:
            self._emit(Progress(min(self._done, self._total), self._total, doing))


def _texts(job: Job, model: Session) -> Texts:
    """Chunks that rank and chunks that report; the same single chunk for both when the text has only one."""

    def cut(source: corpus.Source, limit: int | None) -> corpus.Chunks:
        ids = corpus.tokens_of(source, model.tokenize, model.n_vocab)
        return corpus.chunk(ids, job.n_ctx, model.bos(), limit)

    if job.rank_text is not None:
        report, rank = cut(job.text, job.chunks), cut(job.rank_text, job.rank_chunks)
        if len(rank.chunks[0]) == len(report.chunks[0]):
            return Texts(rank.chunks, report.chunks, job.rank_text.name, job.text.name, report.unused)
        # One map serves chunks of one length: a text shorter than a chunk has to rank itself.
    every = cut(job.text, None if job.chunks is None else job.chunks + job.rank_chunks)
    n = len(every.chunks)
    if n == 1:
        return Texts(every.chunks, every.chunks, job.text.name, job.text.name, every.unused)
    split = n - min(job.rank_chunks, n // 2)
    split = split if job.chunks is None else min(split, job.chunks)
    report_name, rank_name = (f"{job.text.name}, chunks {a} to {b}" for a, b in ((1, split), (split + 1, n)))
    return Texts(every.chunks[split:], every.chunks[:split], rank_name, report_name, every.unused)


def _rank(lockstep: Lockstep, texts: Texts, n_units: int) -> list[LevelStats]:
    """First pass: which units do the damage. The first chunk's injected errors choose the units that are patched."""
    stats = lockstep.new_stats()
    chosen: dict[int, tuple[int, ...]] = {}
    for chunk in texts.rank:
        run = lockstep.run_chunk(chunk, stats)
        for i in range(len(run.forced)):
            if i not in chosen:
                chosen[i] = _choose(lockstep, stats[i], n_units)
            lockstep.patch(run, i, chosen[i], stats[i])
        del run  # its error arrays, before the next chunk makes its own
    return stats


def _choose(lockstep: Lockstep, stats: LevelStats, n_units: int) -> tuple[int, ...]:
    """Units to patch; the embedding always when it is the head's tensor too, whose damage is then that of both uses."""
    assert stats.drift is not None
    injected = [stats.drift.injected.quantile(0.5, point) for point in range(lockstep.points)]
    chosen = patching.choose(injected, n_units)
    tied = lockstep.rmap is not None and _tied(lockstep.rmap)
    return (*chosen[: n_units - 1], 0) if tied and 0 not in chosen and injected[0] else chosen


def _tied(rmap: ResidualMap) -> bool:
    return bool(set(rmap.embedding_weights) & set(rmap.head_weights))


def _report(
    lockstep: Lockstep, texts: Texts, kept: Sequence[tuple[int, ...]], health: HealthStats | None
) -> list[LevelStats]:
    """Second pass: the figures, and the chosen units checked together on as many chunks as ranked them."""
    stats = lockstep.new_stats()
    for number, chunk in enumerate(texts.report):
        run = lockstep.run_chunk(chunk, stats, health)
        for i, units in enumerate(kept):
            if units and run.forced and number < len(texts.rank):
                lockstep.check_kept(run, i, units, stats[i])
        del run
    return stats


def _keep(
    job: Job, rmap: ResidualMap | None, rank: Sequence[LevelStats], i: int, noise: NoiseFloor
) -> tuple[Keep, ...]:
    """The list of what to keep at 16 bit, from the ranking text."""
    level_kld = rank[i].output.kld.mean
    if rmap is None or level_kld is None:
        return ()
    tied = _tied(rmap)
    units = []
    for index, damage in rank[i].units.items():
        if tied and index == 0:
            continue  # one tensor: its cost and both its damages are listed as the head
        names = summary.unit_weights(rmap, index)
        sums = list(damage.sums)
        if tied and index > len(rmap.branches) and 0 in rank[i].units:
            sums = [a + b for a, b in zip(sums, rank[i].units[0].sums, strict=True)]
        added = sum(_added(job, i, name) for name in names)
        kept_type = "BF16" if any(job.types_16bit.get(name) == "BF16" for name in names) else "F16"
        units.append(UnitDamage(patching.unit_name(rmap, index), tuple(sums), tuple(damage.counts), added, kept_type))
    return keep_list(units, level_kld, noise.kld_mean, _next_level(job, rank, i, level_kld))


def _added(job: Job, level: int, name: str) -> int:
    """Bytes that one tensor at 16 bit adds; none where the level already holds it at 16 bit or above."""
    return max(0, job.bytes_16bit.get(name, 0) - job.levels[level].tensor_bytes[name])


def _next_level(job: Job, rank: Sequence[LevelStats], i: int, level_kld: float) -> NextLevel:
    """The uniform alternative: the next larger level of the scan that is better.

    Where none was measured, Q8_0 at its best: its size is known, and it cannot recover more than everything.
    """
    own = job.levels[i].file_bytes
    larger = [
        NextLevel(job.levels[k].name, level_kld - kld, job.levels[k].file_bytes - own)
        for k, stats in enumerate(rank)
        if (kld := stats.output.kld.mean) is not None and job.levels[k].file_bytes > own and kld < level_kld
    ]
    if larger:
        return min(larger, key=lambda n: n.bytes_added)
    held = job.levels[i].tensor_bytes
    q8 = sum(max(0, size - held[name]) for name, size in job.bytes_q8_0.items())
    whole = sum(_added(job, i, name) for name in job.bytes_16bit)
    return NextLevel("Q8_0 at most", level_kld, q8) if q8 else NextLevel("16 bit", level_kld, whole)


def _kept_units(rmap: ResidualMap | None, keep: Sequence[Keep]) -> tuple[int, ...]:
    """Indices of the units worth keeping whose errors can be left out of an injected run (all but the head)."""
    if rmap is None:
        return ()
    names = {row.unit for row in keep if row.worth_it}
    return tuple(i for i in range(len(rmap.branches) + 1) if patching.unit_name(rmap, i) in names)
