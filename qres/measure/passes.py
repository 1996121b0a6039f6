"""The measuring part of a scan, inside the worker process: two passes over two texts.

The ranking text finds the units whose errors do the damage, by patching. The reporting text, which took no part in that
choice, gives every figure about the levels and checks the chosen list as a whole. After every chunk the state is saved,
so that a scan that was cut off goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from qres.advice import noise
from qres.errors import QresError, reason_of
from qres.events import Listener
from qres.files import require_unchanged
from qres.measure import checkpoint, predict, summary
from qres.measure.decodes import decodes, decodes_done, n_units
from qres.measure.job import REFERENCE, Job, Measured, MeasuredLevel, Routed
from qres.measure.keep_units import keep_rows, kept_units, with_types
from qres.measure.lockstep import Lockstep
from qres.measure.progress import DecodeProgress
from qres.measure.state import State
from qres.native.session import Session, SessionOptions, system_info
from qres.records.stream import NoiseFloor
from qres.records.units import Keep, Sensitivity
from qres.residual.drift import HealthStats
from qres.sensitivity import patching, trust


def measure(job: Job, listener: Listener) -> Measured:
    """Run a job.

    Raises:
        QresError: a reference that cannot be loaded or measured, a file that changed, or no level left.
    """
    progress = DecodeProgress(listener)
    state = _state(job)
    with ExitStack() as stack:
        lockstep = _loaded(job, state, progress, stack)
        lockstep.map_streams(job.texts.rank[0])
        _warn_of_others(job, lockstep, listener)
        _begin(job, state, lockstep, progress)
        save = _Saver(job, state, progress)
        _predict(job, state, lockstep, progress, save)
        _rank(job, state, lockstep, save)
        _settle_floor(state, lockstep)
        keeps = {i: keep_rows(job, state, lockstep.rmap, lockstep.alive, i) for i in lockstep.alive}
        other_text = job.texts.rank_name != job.texts.report_name  # a list is not checked on the text that chose it
        kept = {i: kept_units(lockstep.rmap, keep) if other_text else () for i, keep in keeps.items()}
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


def _loaded(job: Job, state: State, progress: DecodeProgress, stack: ExitStack) -> Lockstep:
    """All models side by side; a level that cannot be loaded is left out."""
    options = SessionOptions(job.n_ctx, job.threads, job.n_gpu_layers)
    progress.working(REFERENCE)
    reference = stack.enter_context(Session(Path(job.reference.path), options))
    sessions = {}
    for i, level in enumerate(job.levels):
        if level.name in job.crashed:
            state.failed[i] = job.crashed[level.name]
        if i in state.failed:
            continue
        progress.working(level.name)
        try:
            sessions[i] = stack.enter_context(Session(Path(level.path), options))
        except QresError as error:
            state.failed[i] = str(error)
            if len(state.failed) == len(job.levels):
                raise
    names = [level.name for level in job.levels]
    weights = frozenset(job.reference.tensor_bytes).union(*(level.own_names for level in job.levels))
    other_layouts = [bool(level.own_names) for level in job.levels]
    return Lockstep(reference, names, sessions, job.threads, progress, weights, other_layouts, state)


def _differs(job: Job, lockstep: Lockstep, i: int) -> tuple[str, ...]:
    """Where level i computes another function than the reference."""
    found = lockstep.differences.get(i, "")
    return (*job.levels[i].keys, f"in the graph, {found}") if found else ()


def _warn_of_others(job: Job, lockstep: Lockstep, listener: Listener) -> None:
    """Before hours of measuring: a level whose figures will not be about its bits."""
    for i in lockstep.alive:
        differs = _differs(job, lockstep, i)
        if differs:
            name = job.levels[i].name
            listener.warn(f"{name} does not compute the same function as the reference: {'; '.join(differs)}")


def _begin(job: Job, state: State, lockstep: Lockstep, progress: DecodeProgress) -> None:
    """What is found out once, on the first chunk; of a scan that goes on, it is known already."""
    is_new = state.noise is None
    if is_new:
        state.n_units = n_units(job, lockstep)
    progress.total = decodes(job, lockstep, state.n_units)
    if is_new:
        chunk = job.texts.rank[0]
        state.rank, state.report = lockstep.new_stats(), lockstep.new_stats()
        state.health = HealthStats(lockstep.points) if lockstep.rmap else None
        lockstep.survey(chunk, f"chunk 1 of {job.texts.rank_name}")
        state.noise = _noise_floor(job, lockstep)
    if not is_new:
        progress.resume(decodes_done(job, state, lockstep))
        done = f"{state.rank_done + state.report_done} of {len(job.texts.rank) + len(job.texts.report)} chunks are done"
        progress.listener.note(f"Going on with the unfinished scan: {done}")


def _predict(job: Job, state: State, lockstep: Lockstep, progress: DecodeProgress, save: _Saver) -> None:
    """The damage of every tensor at every type, once; of a scan that goes on, it is known already."""
    if state.prediction is None:
        listener = progress.listener
        listener.working(REFERENCE)
        listener.stage("predicting what each type does to each tensor")
        floor = state.noise.kld_mean if state.noise else None
        state.prediction = predict.predict(job, lockstep, floor, listener)
        save()
        listener.stage("measuring")


def _noise_floor(job: Job, lockstep: Lockstep) -> NoiseFloor:
    """The noise floor, or why there is none: it is a comfort, not a reason to end a scan."""
    if not job.with_noise_floor:
        return noise.none("a diffusion model reads the whole chunk at once: halves of it see another text")
    try:
        return lockstep.noise_floor(job.texts.rank[0])
    except QresError as error:
        return noise.none(error.message)


def _settle_floor(state: State, lockstep: Lockstep) -> None:
    """Now that the levels' damage on the ranking text is known: does the noise floor count beside it?

    A prediction whose replay was allowed to be as far from llama.cpp as a floor that does not is taken back with it.
    """
    assert state.noise is not None
    ranked = [state.rank[i] for i in lockstep.alive]
    drifts = [one.drift.largest_median for one in ranked if one.drift is not None]
    state.noise = noise.beside(state.noise, [one.output.kld.mean for one in ranked], drifts)
    if state.prediction and state.prediction.used and state.noise.kld_mean is None:
        state.prediction.hold_to(predict.KLD_LIMIT)


class _Saver:
    """Called after every chunk: are the files still the same, and where does the scan go on if it is cut off now?"""

    def __init__(self, job: Job, state: State, progress: DecodeProgress) -> None:
        self._job, self._state, self._listener = job, state, progress.listener
        self._path = job.state

    def __call__(self) -> None:
        require_unchanged(stamp for model in (self._job.reference, *self._job.levels) for stamp in model.stamps)
        if self._path is None:
            return
        try:
            checkpoint.save(self._path, self._state, self._job.about)
        except OSError as error:  # the scan can still be finished
            self._listener.note(f"The scan cannot be gone on with if it is cut off: {self._path}: {reason_of(error)}")
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
        chosen = patching.choose_predicted(state.prediction, job.levels[i].tensor_types, injected, n_units)
        state.drawn[i] = chosen[-patching.RANDOM_UNITS :]
    tied = lockstep.rmap is not None and lockstep.rmap.is_tied
    return (*chosen, 0) if tied and 0 not in chosen and injected[0] else chosen


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


def _measured(
    job: Job,
    state: State,
    lockstep: Lockstep,
    keeps: Mapping[int, tuple[Keep, ...]],
    kept: Mapping[int, tuple[int, ...]],
) -> Measured:
    """Everything as records."""
    rmap, health, alive = lockstep.rmap, state.health, lockstep.alive
    reference, floor = lockstep.reference, state.noise
    assert floor is not None
    assert state.prediction is not None
    return Measured(
        norm_placement=rmap.norm_placement if rmap else "unknown",
        unmapped=lockstep.unmapped,
        system=system_info(),
        n_layer=reference.n_layer,
        n_embd=reference.n_embd,
        n_vocab=reference.n_vocab,
        n_ctx_train=reference.n_ctx_train,
        massive_tokens=health.massive if health else 0,
        noise_floor=floor,
        stream=summary.health(rmap, health) if rmap and health else (),
        inputs=state.inputs,
        non_finite=tuple(state.non_finite.values()),
        failed={job.levels[i].name: reason for i, reason in state.failed.items()},
        levels=tuple(_level(job, state, lockstep, i, keeps[i], kept[i]) for i in alive),
        prediction=predict.record(job, state.prediction, rmap),
        routed=tuple(
            Routed(route.layer, route.weights, tuple(state.routed[route.layer].tolist())) for route in lockstep.routes
        )
        if rmap
        else (),
        comparisons=summary.comparisons([job.levels[i].name for i in alive], [state.report[i] for i in alive]),
    )


def _level(
    job: Job, state: State, lockstep: Lockstep, i: int, keep: tuple[Keep, ...], kept: Sequence[int]
) -> MeasuredLevel:
    """The records of level i."""
    differs, unmatched = _differs(job, lockstep, i), lockstep.unmatched.get(i, "")
    rmap = None if unmatched else lockstep.rmap
    rank, report, health, name = state.rank[i], state.report[i], state.health, job.levels[i].name
    output = report.output.compute()
    prediction, types = state.prediction, job.levels[i].tensor_types
    assert prediction is not None
    factor = trust.calibration(prediction, types, rank.output.kld.mean)
    if rmap is None or report.drift is None or health is None:
        return MeasuredLevel(name, output, (), Sensitivity(calibration=factor), differs, unmatched)
    units = summary.units(rmap, rank, job.levels[i].tensor_bytes, job.bytes_16bit)
    if factor:
        units = trust.with_predictions(units, rmap, prediction, types, factor.factor)
    sensitivity = Sensitivity(
        units=units,
        keep_16bit=with_types(job, state, rmap, keep),
        keep_check=summary.keep_check(rmap, report, kept, keep),
        rank_correlation=summary.rank_correlation(units),
        additivity=summary.additivity(units, rank),
        calibration=factor,
        trust=trust.trust(units, {rmap.units[index].name for index in state.drawn.get(i, ())}),
    )
    return MeasuredLevel(name, output, summary.points(rmap, report.drift, health), sensitivity, differs)
