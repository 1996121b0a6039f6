"""Reference and levels loaded side by side: what is done with one chunk of tokens.

Nothing is stored between chunks but running statistics, so memory does not depend on the length of the text. A level
that fails is left out from there on; only the reference's failure ends the scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from qres.advice import noise
from qres.arrays import Doubles, Floats
from qres.errors import InputError, QresError, UnsupportedError
from qres.levels import F16_MAX
from qres.measure import same_function
from qres.measure.job import REFERENCE
from qres.measure.progress import DecodeProgress
from qres.measure.state import LevelStats, State
from qres.metrics.means import ChunkMean
from qres.metrics.output import OutputStats, Scored, TokenScores, score, score_reference
from qres.metrics.quantiles import Quantiles
from qres.native.graph import Graph
from qres.native.session import Session
from qres.records.stream import NoiseFloor
from qres.residual.capture import IDENTITY_TOLERANCE, Forced, Snapshot, capture, force, identity_error, inject
from qres.residual.drift import DriftStats, HealthStats, norms, reference_norms
from qres.residual.map import ResidualMap
from qres.residual.routes import Route, counters, routes
from qres.residual.survey import survey
from qres.residual.trace import trace
from qres.text.chunks import Chunk


@dataclass(frozen=True)
class ChunkRun:
    """What one chunk leaves for patching."""

    chunk: Chunk
    scored: Scored
    forced: Mapping[int, Forced]
    """By level; empty when the stream could not be mapped."""


class Lockstep:
    """Sessions of the reference and the levels, and the maps of their streams."""

    def __init__(
        self,
        reference: Session,
        names: Sequence[str],
        levels: Mapping[int, Session],
        threads: int,
        progress: DecodeProgress,
        weights: frozenset[str],
        other_layouts: Sequence[bool],
        state: State,
    ) -> None:
        """Put sessions side by side.

        Args:
            reference: The model that everything is compared with.
            names: Of all levels.
            levels: Sessions by index into `names`; a level that could not be loaded has none.
            threads: For the sums.
            progress: Hears which model works, and what is done.
            weights: Names of the tensors in the models' files.
            other_layouts: For each level, whether it holds the reference's weights in other tensors.
            state: Of the scan: levels that fail, broken numbers and ranges of inputs are written into it.
        """
        self.reference = reference
        self.levels = levels
        self.names = names
        self.threads = threads
        self.state = state
        self._progress = progress
        self._weights = weights
        self._other_layouts = other_layouts
        self.rmap: ResidualMap | None = None
        self._maps: dict[int, ResidualMap] = {}
        self.routes: tuple[Route, ...] = ()
        """Where the reference chooses experts; empty where it has none."""
        self.unmatched: dict[int, str] = {}
        """Levels whose branches are not the reference's, and why: only their output is measured."""
        self.differences: dict[int, str] = {}
        """Where a level's graph parts from the reference's; empty where both compute the same."""
        self._reference_memory: Snapshot | None = None
        self._level_memory: Snapshot | None = None
        self.unmapped = ""
        """Why the stream is not mapped; empty when it is."""

    @property
    def alive(self) -> list[int]:
        """Levels that have not failed."""
        return [i for i in sorted(self.levels) if i not in self.state.failed]

    @contextmanager
    def _level(self, i: int) -> Iterator[None]:
        """Work of level i: its failure is noted instead of ending the scan, unless it was the last one left."""
        self._progress.working(self.names[i])
        try:
            yield
        except QresError as error:
            self.state.failed[i] = str(error)
            if not self.alive:
                raise

    # -- the map

    def map_streams(self, chunk: Chunk) -> None:
        """Map every model's graph for chunks of this length, and check the reference's map against a decode.

        Leaves `rmap` None and says why in `unmapped` when there is no map: the output can still be measured. A level
        whose branches are others is in `unmatched`.
        """
        self._progress.working(REFERENCE)
        graph = self._record(self.reference, chunk)
        self.routes = routes(graph, self._weights)
        for route in self.routes:
            self.state.routed.setdefault(route.layer, np.zeros(route.experts, np.int64))
        try:
            rmap = self._map(self.reference, graph, chunk)
            snapshot, _ = capture(self.reference, rmap, chunk)
            self._progress.step("checking the stream map")
            off = identity_error(rmap, snapshot)
            if off > IDENTITY_TOLERANCE:
                raise UnsupportedError(f"stream after is not stream before + branch: {off:.0f} float32 roundings off")
            self.rmap = rmap
        except QresError as error:  # the output of a model that decodes can be measured all the same
            self.unmapped = str(error)
        for i in self.alive:
            with self._level(i):
                self._match(i, graph, chunk)
        self._progress.step("recording the graphs")

    def _match(self, i: int, reference: Graph, chunk: Chunk) -> None:
        """Compare a level's graph with the reference's, and map its stream."""
        graph = self._record(self.levels[i], chunk)
        other_layout = self._other_layouts[i]
        self.differences[i] = same_function.difference(reference, graph, self._weights, other_layout=other_layout)
        if self.rmap is None:
            return
        try:
            rmap = self._map(self.levels[i], graph, chunk)
            if _shape(rmap) != _shape(self.rmap):
                raise UnsupportedError("its branches are not the reference's")
            self._maps[i] = rmap
        except QresError as error:
            self.unmatched[i] = str(error)

    def _record(self, model: Session, chunk: Chunk) -> Graph:
        weights = (name for name in self._weights if not name.startswith(same_function.ROPE_FACTORS))
        return model.record(chunk, frozenset(weights))

    def _map(self, model: Session, graph: Graph, chunk: Chunk) -> ResidualMap:
        return trace(graph, self._weights, model.n_embd, model.n_vocab, len(chunk))

    def _trace(self, model: Session, chunk: Chunk) -> ResidualMap:
        return self._map(model, model.record(chunk), chunk)

    def survey(self, chunk: Chunk, where: str) -> None:
        """Look at every value within every model on one chunk: how large, and whether they are finite.

        Logits can be finite where values within are not (docs/facts.md, 29).
        """
        self._survey_reference(chunk, where)
        for i in self.alive:
            with self._level(i):
                self._survey_level(i, chunk, where)

    def _survey_reference(self, chunk: Chunk, where: str) -> None:
        self._progress.working(REFERENCE)
        found = survey(self.reference, self.rmap, chunk, self._weights, REFERENCE, where)
        self._progress.step("range of the activations")
        for name, absmax in found.inputs.items():
            self.state.inputs[name] = max(absmax, self.state.inputs.get(name, 0.0))
        if found.non_finite:
            self.state.non_finite.setdefault(REFERENCE, found.non_finite)

    def _survey_level(self, i: int, chunk: Chunk, where: str) -> None:
        name = self.names[i]
        found = survey(self.levels[i], self._maps.get(i), chunk, self._weights, name, where)
        self._progress.step(f"{name}, range of the activations")
        if found.non_finite:
            self.state.non_finite.setdefault(name, found.non_finite)

    @property
    def points(self) -> int:
        """Stream points, 0 when the stream is not mapped."""
        return self.rmap.n_points if self.rmap else 0

    @property
    def _reads(self) -> tuple[int, ...]:
        return tuple(b.reads for b in self.rmap.branches) if self.rmap else ()

    def new_stats(self) -> list[LevelStats]:
        """Empty statistics for each level."""
        return [LevelStats(OutputStats(), DriftStats(self.points) if self.rmap else None) for _ in self.names]

    # -- decodes

    def noise_floor(self, chunk: Chunk) -> NoiseFloor:
        """The reference against itself in other arithmetic: without flash attention, and in two halves.

        Both are choices that users make without a thought and that no level can be blamed for.
        """
        self._progress.working(REFERENCE)
        half = len(chunk) // 2
        pieces = (chunk[:half], chunk[half:])
        whole, logits = self._capture_or_decode(self.reference, self.rmap, chunk)
        scored = score_reference(logits, chunk)
        stats = OutputStats()
        options = replace(self.reference.options, flash_attention=False)
        with Session(self.reference.path, options, share=self.reference) as other:
            other_map = self._trace(other, pieces[0]) if self.rmap else None
            parts, streams = [], []
            for i, piece in enumerate(pieces):
                snapshot, logits = self._capture_or_decode(other, other_map, piece, start=i * half)
                parts.append(logits.copy())
                streams.append(snapshot.stream if snapshot else ())
        stats.update(score(scored, np.concatenate(parts)))
        self._progress.step("noise floor")
        if whole is None:
            return replace(noise.floor(stats.kld.mean, None), drift_reason="the residual stream is not mapped")
        known = reference_norms(whole, self.threads)
        drift, by_point = Quantiles(), Quantiles(len(whole.stream))
        rows = []
        for x, norm, first, second in zip(whole.stream, known.stream, *streams, strict=True):
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is left out
                moved = norms(np.concatenate([first, second]) - x)
            rows.append(moved / np.maximum(norm, np.finfo(np.float64).tiny))
        plain = np.stack(rows)[:, known.plain]
        drift.update(plain.reshape(1, -1))
        by_point.update(plain)
        points = tuple(by_point.quantile(0.5, i) for i in range(len(rows)))
        return noise.floor(stats.kld.mean, drift.quantile(0.5), points)

    @staticmethod
    def _capture_or_decode(
        model: Session, rmap: ResidualMap | None, chunk: Chunk, start: int = 0, reuse: Snapshot | None = None
    ) -> tuple[Snapshot | None, Floats]:
        if rmap is None:
            return None, model.decode(chunk, start=start)
        return capture(model, rmap, chunk, start, reuse)

    def run_chunk(
        self, chunk: Chunk, where: str, stats: Sequence[LevelStats], health: HealthStats | None = None
    ) -> ChunkRun:
        """Decode one chunk by the reference, then by each level free-running and forced, and update the statistics.

        Args:
            chunk: Token ids.
            where: What to call the chunk where something is wrong with it.
            stats: One per level.
            health: The reference's own statistics.

        Raises:
            InputError: the reference's output is not finite.
            QresError: the reference failed, or the last level did.
        """
        self._progress.working(REFERENCE)
        snapshot, logits = self._run_reference(chunk)
        self._reference_memory = snapshot
        scored = score_reference(logits, chunk)
        self._require_finite(scored, chunk, where)
        known = reference_norms(snapshot, self.threads) if snapshot else None
        if snapshot and known and health:
            health.update(snapshot, known, self._reads, self.threads)
        self._progress.step("reference")
        forced: dict[int, Forced] = {}
        for i in self.alive:
            with self._level(i):
                free, scores, early = self._free_run(i, chunk, scored, where)
                if snapshot is None or known is None or free is None:
                    stats[i].output.update(scores, early)
                    continue
                result = force(self.levels[i], self._maps[i], chunk, snapshot)
                head = score(scored, result.logits).kld
                # From here on nothing can fail: a level that did has statistics of whole chunks only.
                stats[i].output.update(scores, early)
                stats[i].units.setdefault(self.points, ChunkMean()).update(head)
                drift = stats[i].drift
                assert drift is not None
                drift.update(snapshot, known, free, result.errors, self._reads, self.threads)
                self._progress.step(f"{self.names[i]}, forced")
                forced[i] = result
        return ChunkRun(chunk, scored, forced)

    def _run_reference(self, chunk: Chunk) -> tuple[Snapshot | None, Floats]:
        """Its free run; which experts it chooses is counted on the way."""
        if self.rmap is None:
            return None, self.reference.decode(chunk)
        beside = counters(self.routes, self.state.routed)
        return capture(self.reference, self.rmap, chunk, reuse=self._reference_memory, beside=beside)

    def _require_finite(self, scored: Scored, chunk: Chunk, where: str) -> None:
        """Nothing can be compared with a reference whose own output is not finite; say where that starts."""
        finite = np.isfinite(scored.nll)
        if finite.all():
            return
        if REFERENCE not in self.state.non_finite:
            self._survey_reference(chunk, where)
        if finite.any():
            return
        found = self.state.non_finite.get(REFERENCE)
        overflows = found is not None and found.input_absmax is not None and found.input_absmax > F16_MAX
        start = f": its values stop being finite {found.place}" if found else ""
        raise InputError(
            f"{self.reference.path.name}: the reference's own output is not finite{start}",
            f"an activation of {found.input_absmax:,.0f} overflows 16-bit float, which ends at {F16_MAX:,.0f}: convert "
            "the original model to BF16"
            if found and overflows
            else "its weights are damaged: qres inspect --values names the tensors",
        )

    def _free_run(
        self, i: int, chunk: Chunk, scored: Scored, where: str
    ) -> tuple[Snapshot | None, TokenScores, TokenScores | None]:
        level, rmap, name = self.levels[i], self._maps.get(i), self.names[i]
        snapshot, logits = self._capture_or_decode(level, rmap, chunk, reuse=self._level_memory)
        self._level_memory = snapshot
        scores = score(scored, logits)
        early = score(scored.early, logits) if scored.early else None
        self._progress.step(name)
        if scores.nonfinite and np.isfinite(scored.nll).all() and name not in self.state.non_finite:
            self._survey_level(i, chunk, where)
        return snapshot, scores, early

    def patch(self, run: ChunkRun, level: int, units: Sequence[int], stats: LevelStats) -> None:
        """Add each unit's error alone to the reference, then all of them, and measure the KLD."""
        self._progress.working(REFERENCE)
        errors = run.forced[level].errors
        for unit in units:
            stats.units.setdefault(unit, ChunkMean()).update(self._inject(run, {unit: errors[unit]}))
            self._progress.step(f"{self.names[level]}, one unit alone")
        stats.all_injected.update(self._inject(run, dict(enumerate(errors))))
        self._progress.step(f"{self.names[level]}, all units")

    def check_kept(self, run: ChunkRun, level: int, kept: Sequence[int], stats: LevelStats) -> None:
        """All errors against all but those of the units that are to stay at 16 bit."""
        self._progress.working(REFERENCE)
        errors = run.forced[level].errors
        stats.all_injected.update(self._inject(run, dict(enumerate(errors))))
        self._progress.step(f"{self.names[level]}, all units")
        rest = {i: error for i, error in enumerate(errors) if i not in kept}
        stats.without_kept.update(self._inject(run, rest))
        self._progress.step(f"{self.names[level]}, without the kept units")

    def _inject(self, run: ChunkRun, errors: dict[int, Floats]) -> Doubles:
        assert self.rmap is not None
        return score(run.scored, inject(self.reference, self.rmap, run.chunk, errors)).kld


def _shape(rmap: ResidualMap) -> list[tuple[str, int, bool]]:
    return [(branch.unit, branch.reads, branch.closes) for branch in rmap.branches]
