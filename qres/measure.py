"""The measuring part of a scan, inside the worker process: two passes over two texts.

The ranking text finds the units whose errors do the damage, by patching. The reporting text, which took no part in that
choice, gives every figure about the levels and checks the chosen list as a whole. After every chunk the state is saved,
so that a scan that was cut off goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from qres import checkpoint, predicting, summary
from qres.advice import NextLevel, UnitDamage, keep_list
from qres.checkpoint import State
from qres.drift import HealthStats
from qres.errors import QresError
from qres.file_stamp import require_unchanged
from qres.job import REFERENCE, Job, Measured, MeasuredLevel, Note, Progress, Stage, Working
from qres.levels import F16_MAX
from qres.lockstep import LevelStats, Lockstep
from qres.native.session import Session, SessionOptions, system_info
from qres.records import Keep, NoiseFloor
from qres.residual import ResidualMap
from qres.sensitivity import patching


def measure(emit: Callable[[object], None], job: Job) -> Measured:
    """Run a job; `emit` gets Stage, Progress, Working and Note events.

    Raises:
        QresError: a reference that cannot be loaded or measured, a file that changed, or no level left.
    """
    events = _Events(emit)
    state = _state(job)
    with ExitStack() as stack:
        lockstep = _loaded(job, state, events, stack)
        lockstep.map_streams(job.texts.rank[0])
        _begin(job, state, lockstep, events)
        save = _Saver(job, state, events)
        _predict(job, state, lockstep, events, save)
        _rank(job, state, lockstep, save)
        keeps = {i: _keep(job, state, lockstep.rmap, lockstep.alive, i) for i in lockstep.alive}
        other_text = job.texts.rank_name != job.texts.report_name  # a list is not checked on the text that chose it
        kept = {i: _kept_units(lockstep.rmap, keep) if other_text else () for i, keep in keeps.items()}
        _report(job, state, lockstep, kept, save)
        return _measured(job, state, lockstep, keeps, kept)


def _state(job: Job) -> State:
    """What an earlier run left, or a new state; one that is not gone on from is in the way of the next --resume."""
    found = None
    if job.state and job.resume:
        found = checkpoint.load(job.state, job.about)
    elif job.state:
        job.state.unlink(missing_ok=True)
    return found or State()


def _loaded(job: Job, state: State, events: _Events, stack: ExitStack) -> Lockstep:
    """All models side by side; a level that cannot be loaded is left out."""
    options = SessionOptions(job.n_ctx, job.threads, job.n_gpu_layers)
    events.working(REFERENCE)
    reference = stack.enter_context(Session(Path(job.reference.path), options))
    sessions = {}
    for i, level in enumerate(job.levels):
        if level.name in job.crashed:
            state.failed[i] = job.crashed[level.name]
        if i in state.failed:
            continue
        events.working(level.name)
        try:
            sessions[i] = stack.enter_context(Session(Path(level.path), options))
        except QresError as error:
            state.failed[i] = str(error)
            if len(state.failed) == len(job.levels):
                raise
    names = [level.name for level in job.levels]
    lockstep = Lockstep(reference, names, sessions, job.threads, events, frozenset(job.reference.tensor_bytes))
    lockstep.failed, lockstep.non_finite, lockstep.inputs = state.failed, state.non_finite, state.inputs
    return lockstep


def _begin(job: Job, state: State, lockstep: Lockstep, events: _Events) -> None:
    """What is found out once, on the first chunk; of a scan that goes on, it is known already."""
    is_new = state.noise is None
    if is_new:
        state.n_units = _n_units(job, lockstep)
    events.total = _decodes(job, lockstep, state.n_units)
    if is_new:
        chunk = job.texts.rank[0]
        state.rank, state.report = lockstep.new_stats(), lockstep.new_stats()
        state.health = HealthStats(lockstep.points) if lockstep.rmap else None
        lockstep.survey(chunk, f"chunk 1 of {job.texts.rank_name}")
        state.noise, state.no_noise = _noise_floor(job, lockstep)
    if not is_new:
        events.resume(_decodes_done(job, state, lockstep))
        done = f"{state.rank_done + state.report_done} of {len(job.texts.rank) + len(job.texts.report)} chunks are done"
        events.note(f"Going on with the unfinished scan: {done}")


def _predict(job: Job, state: State, lockstep: Lockstep, events: _Events, save: _Saver) -> None:
    """The damage of every tensor at every type, once; of a scan that goes on, it is known already."""
    if state.prediction is None:
        events.working(REFERENCE)
        events.stage("predicting what each type does to each tensor")
        floor = state.noise.kld_mean if state.noise else None
        state.prediction = predicting.predict(job, lockstep, floor, events)
        save()
        events.stage("measuring")


def _noise_floor(job: Job, lockstep: Lockstep) -> tuple[NoiseFloor, str]:
    """The noise floor, or why there is none: it is a comfort, not a reason to end a scan."""
    if not job.with_noise_floor:
        return NoiseFloor(None, None), "a diffusion model reads the whole chunk at once: halves of it see another text"
    try:
        return lockstep.noise_floor(job.texts.rank[0]), ""
    except QresError as error:
        return NoiseFloor(None, None), error.message


class _Events:
    """Tells the parent what goes on, and counts decodes against the plan."""

    def __init__(self, emit: Callable[[object], None]) -> None:
        self._emit = emit
        self._done = 0
        self.total = 0

    def working(self, model: str) -> None:
        """A model begins to work."""
        self._emit(Working(model))

    def step(self, doing: str) -> None:
        """One decode is done."""
        self._done += 1
        if self.total:
            self._emit(Progress(min(self._done, self.total), self.total, doing))

    def resume(self, done: int) -> None:
        """Decodes of an earlier run count as done."""
        self._done += done

    def stage(self, title: str) -> None:
        """A part of the work with steps of its own begins."""
        self._emit(Stage(title))

    def predicting(self, done: int, total: int, doing: str) -> None:
        """A step of the prediction, which is no decode of the plan."""
        self._emit(Progress(min(done, total), total, doing))

    def note(self, text: str) -> None:
        """Something the user should know now."""
        self._emit(Note(text))


_ONCE = 4
"""Decodes before the first chunk: the map's check, the graphs, the range of the activations, the noise floor; and one
for the range in each level."""


def _plain_decodes(job: Job, lockstep: Lockstep, rank: int, report: int) -> int:
    """Decodes of so many chunks without the units that are patched."""
    levels = len(lockstep.alive)
    if lockstep.rmap is None:
        return (1 + levels) * (rank + report)
    return (1 + 2 * levels) * (rank + report) + levels * (rank + 2 * min(report, len(job.texts.rank)))


def _n_units(job: Job, lockstep: Lockstep) -> int:
    """How many units are patched per level."""
    if lockstep.rmap is None:
        return 0
    budget = patching.budget(_decodes(job, lockstep, 0), len(lockstep.alive), len(job.texts.rank))
    return lockstep.points if job.all_units else min(lockstep.points, budget)


def _decodes(job: Job, lockstep: Lockstep, n_units: int) -> int:
    """Decodes of the whole scan."""
    rank, report = len(job.texts.rank), len(job.texts.report)
    plain = _plain_decodes(job, lockstep, rank, report)
    return _ONCE + len(lockstep.alive) + plain + n_units * len(lockstep.alive) * rank


def _decodes_done(job: Job, state: State, lockstep: Lockstep) -> int:
    """Decodes that a scan that goes on need not do again."""
    plain = _plain_decodes(job, lockstep, state.rank_done, state.report_done)
    return 2 + plain + state.n_units * len(lockstep.alive) * state.rank_done


class _Saver:
    """Called after every chunk: are the files still the same, and where does the scan go on if it is cut off now?"""

    def __init__(self, job: Job, state: State, events: _Events) -> None:
        self._job, self._state, self._events = job, state, events
        self._path = job.state

    def __call__(self) -> None:
        require_unchanged(stamp for model in (self._job.reference, *self._job.levels) for stamp in model.stamps)
        if self._path is None:
            return
        try:
            checkpoint.save(self._path, self._state, self._job.about)
        except OSError as error:  # the scan can still be finished
            self._events.note(f"The scan cannot be gone on with if it is cut off: {self._path}: {error.strerror}")
            self._path = None


def _rank(job: Job, state: State, lockstep: Lockstep, save: _Saver) -> None:
    """First pass: which units do the damage.

    The prediction chooses the units that are patched; where there is none, the first chunk's injected errors do.
    """
    for number in range(state.rank_done, len(job.texts.rank)):
        where = f"chunk {number + 1} of {job.texts.rank_name}"
        run = lockstep.run_chunk(job.texts.rank[number], where, state.rank)
        for i in run.forced:
            if i not in state.chosen:
                state.chosen[i] = _choose(job, state, lockstep, i)
            lockstep.patch(run, i, state.chosen[i], state.rank[i])
        del run  # its error arrays, before the next chunk makes its own
        state.rank_done = number + 1
        save()


def _choose(job: Job, state: State, lockstep: Lockstep, i: int) -> tuple[int, ...]:
    """Units to patch; the embedding always when it is the head's tensor too, whose damage is then that of both uses."""
    drift, n_units = state.rank[i].drift, state.n_units
    assert drift is not None
    injected = [drift.injected.quantile(0.5, point) for point in range(lockstep.points)]
    chosen = patching.choose(injected, n_units)
    if state.prediction and state.prediction.used and len(chosen) == n_units < lockstep.points:
        chosen = predicting.choose(state.prediction, job.levels[i].tensor_types, injected, n_units)
        state.drawn[i] = chosen[-predicting.RANDOM_UNITS :]
    tied = lockstep.rmap is not None and _tied(lockstep.rmap)
    return (*chosen, 0) if tied and 0 not in chosen and injected[0] else chosen


def _tied(rmap: ResidualMap) -> bool:
    return bool(set(rmap.embedding_weights) & set(rmap.head_weights))


def _report(job: Job, state: State, lockstep: Lockstep, kept: Mapping[int, tuple[int, ...]], save: _Saver) -> None:
    """Second pass: the figures, and the chosen units checked together on as many chunks as ranked them."""
    for number in range(state.report_done, len(job.texts.report)):
        where = f"chunk {number + 1} of {job.texts.report_name}"
        run = lockstep.run_chunk(job.texts.report[number], where, state.report, state.health)
        for i in run.forced:
            if kept.get(i) and number < len(job.texts.rank):
                lockstep.check_kept(run, i, kept[i], state.report[i])
        del run
        state.report_done = number + 1
        save()


def _keep(job: Job, state: State, rmap: ResidualMap | None, alive: Sequence[int], i: int) -> tuple[Keep, ...]:
    """The list of what to keep at 16 bit, from the ranking text; `_with_types` settles the types at the end."""
    rank = state.rank
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
        units.append(UnitDamage(patching.unit_name(rmap, index), tuple(sums), tuple(damage.counts), added, "F16"))
    floor = state.noise.kld_mean if state.noise else None
    return keep_list(units, level_kld, floor, _next_level(job, rank, alive, i, level_kld))


def _with_types(job: Job, state: State, rmap: ResidualMap, keep: Sequence[Keep]) -> tuple[Keep, ...]:
    """BF16 instead of F16 for units with a weight or an activation that F16 can hold barely or not at all.

    That is: with a matrix that is to stay BF16, with a matmul whose input is in the upper half of the range of F16 or
    beyond (back ends turn it into F16), or that leads to such a point of the stream.
    """
    wide = set()
    for i in range(len(rmap.branches) + 2):
        names = summary.unit_weights(rmap, i)
        weights = any(job.types_16bit.get(name) == "BF16" for name in names)
        inputs = any(state.inputs.get(name, 0.0) > F16_MAX / 2 for name in names)
        stream = state.health is not None and i <= len(rmap.branches) and state.health.absmax[i] > F16_MAX / 2
        if weights or inputs or stream:
            wide.add(patching.unit_name(rmap, i))
    return tuple(replace(row, type="BF16" if row.unit in wide else "F16") for row in keep)


def _added(job: Job, level: int, name: str) -> int:
    """Bytes that one tensor at 16 bit adds; none where the level already holds it at 16 bit or above."""
    return max(0, job.bytes_16bit.get(name, 0) - job.levels[level].tensor_bytes[name])


def _next_level(job: Job, rank: Sequence[LevelStats], alive: Sequence[int], i: int, level_kld: float) -> NextLevel:
    """The uniform alternative: the next larger level of the scan that is better.

    Where none was measured, Q8_0 at its best: its size is known, and it cannot recover more than everything.
    """
    own = job.levels[i].file_bytes
    larger = [
        NextLevel(job.levels[k].name, level_kld - kld, job.levels[k].file_bytes - own)
        for k in alive
        if (kld := rank[k].output.kld.mean) is not None and job.levels[k].file_bytes > own and kld < level_kld
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


def _measured(
    job: Job,
    state: State,
    lockstep: Lockstep,
    keeps: Mapping[int, tuple[Keep, ...]],
    kept: Mapping[int, tuple[int, ...]],
) -> Measured:
    """Everything as records."""
    rmap, health, alive = lockstep.rmap, state.health, lockstep.alive
    reference, noise = lockstep.reference, state.noise
    assert noise is not None
    assert state.prediction is not None
    return Measured(
        norm_placement=rmap.norm_placement if rmap else "unknown",
        unmapped=lockstep.unmapped,
        system=system_info(),
        n_layer=reference.n_layer,
        n_embd=reference.n_embd,
        n_vocab=reference.n_vocab,
        n_ctx_train=reference.n_ctx_train,
        n_ctx=len(job.texts.report[0]),
        chunks=len(job.texts.report),
        rank_chunks=len(job.texts.rank),
        text=job.texts.report_name,
        rank_text=job.texts.rank_name,
        unused_tokens=job.texts.unused,
        massive_tokens=health.massive if health else 0,
        noise_floor=noise,
        no_noise_floor=state.no_noise,
        stream=summary.health(rmap, health) if rmap and health else (),
        inputs=state.inputs,
        non_finite=tuple(state.non_finite.values()),
        failed={job.levels[i].name: reason for i, reason in state.failed.items()},
        levels=tuple(_level(job, state, rmap, i, keeps[i], kept[i]) for i in alive),
        sensitivity=predicting.sensitivity(job, state.prediction, rmap),
        comparisons=summary.comparisons([job.levels[i].name for i in alive], [state.report[i] for i in alive]),
    )


def _level(
    job: Job, state: State, rmap: ResidualMap | None, i: int, keep: tuple[Keep, ...], kept: Sequence[int]
) -> MeasuredLevel:
    """The records of level i."""
    rank, report, health, name = state.rank[i], state.report[i], state.health, job.levels[i].name
    output = report.output.compute()
    prediction, types = state.prediction, job.levels[i].tensor_types
    assert prediction is not None
    factor = predicting.calibration(prediction, types, rank.output.kld.mean)
    if rmap is None or report.drift is None or health is None:
        return MeasuredLevel(name, output, (), (), (), None, None, None, factor)
    units = summary.units(rmap, rank, job.levels[i].tensor_bytes, job.bytes_16bit)
    if factor:
        units = predicting.with_predictions(units, rmap, prediction, types, factor.factor)
    return MeasuredLevel(
        name=name,
        output=output,
        points=summary.points(rmap, report.drift, health),
        units=units,
        keep_16bit=_with_types(job, state, rmap, keep),
        keep_check=summary.keep_check(rmap, report, kept, keep),
        rank_correlation=summary.rank_correlation(units),
        additivity=summary.additivity(units, rank),
        calibration=factor,
        trust=predicting.trust(units, {patching.unit_name(rmap, unit) for unit in state.drawn.get(i, ())}),
    )
