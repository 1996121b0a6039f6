"""Reference and levels loaded side by side: what is done with one chunk of tokens.

Nothing is stored between chunks but running statistics, so memory does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qres.capture import IDENTITY_TOLERANCE, Forced, Snapshot, capture, force, identity_error, inject
from qres.corpus import Chunk
from qres.drift import DriftStats, HealthStats, norms, reference_norms
from qres.errors import InputError, QresError, UnsupportedError
from qres.metrics import ChunkMean, Doubles, Floats, OutputStats, Quantiles, Scored, score, score_reference
from qres.native.session import Session
from qres.records import NoiseFloor
from qres.residual import ResidualMap, trace


@dataclass
class LevelStats:
    """Running statistics of one level on one text."""

    output: OutputStats
    drift: DriftStats | None
    """None when the stream could not be mapped."""
    units: dict[int, ChunkMean] = field(default_factory=dict)
    """KLD of each unit alone, by unit index: 0 the embedding, 1..M the branches, M + 1 the head."""
    all_injected: ChunkMean = field(default_factory=ChunkMean)
    """KLD of all the level's branch and embedding errors added to the reference at once."""
    without_kept: ChunkMean = field(default_factory=ChunkMean)
    """The same without the errors of the units that are to stay at 16 bit."""


@dataclass(frozen=True)
class ChunkRun:
    """What one chunk leaves for patching."""

    chunk: Chunk
    scored: Scored
    forced: tuple[Forced, ...]
    """Per level; empty when the stream could not be mapped."""


class Lockstep:
    """Sessions of the reference and the levels, and the maps of their streams."""

    def __init__(
        self, reference: Session, levels: Sequence[tuple[str, Session]], threads: int, step: Callable[[str], None]
    ) -> None:
        self.reference = reference
        self.levels = [session for _, session in levels]
        self.names = [name for name, _ in levels]
        self.threads = threads
        self._step = step
        self.rmap: ResidualMap | None = None
        self._maps: list[ResidualMap] = []
        self._reference_memory: Snapshot | None = None
        self._level_memory: Snapshot | None = None
        self.unmapped = ""
        """Why the stream is not mapped; empty when it is."""

    # -- the map

    def map_streams(self, weights: frozenset[str], chunk: Chunk) -> None:
        """Map every model's graph for chunks of this length, and check the reference's map against a decode.

        Leaves `rmap` None and says why in `unmapped` when there is no map: the output can still be measured.
        """
        try:
            self.rmap, *self._maps = [self._trace(model, weights, chunk) for model in (self.reference, *self.levels)]
            self._step("recording the graphs")
            shape = _shape(self.rmap)
            odd = next((n for n, rmap in zip(self.names, self._maps, strict=True) if _shape(rmap) != shape), None)
            if odd is not None:
                raise UnsupportedError(f"{odd} computes another graph than the reference")
            snapshot, _ = capture(self.reference, self.rmap, chunk)
            self._step("checking the stream map")
            off = identity_error(self.rmap, snapshot)
            if off > IDENTITY_TOLERANCE:
                raise UnsupportedError(f"stream after is not stream before + branch: {off:.0f} float32 roundings off")
        except QresError as error:  # the output of a model that decodes can be measured all the same
            self.rmap, self._maps = None, []
            self.unmapped = f"{error.message}: {error.hint}" if error.hint else error.message

    @staticmethod
    def _trace(model: Session, weights: frozenset[str], chunk: Chunk) -> ResidualMap:
        return trace(model.record(chunk), weights, model.n_embd, model.n_vocab, len(chunk))

    @property
    def points(self) -> int:
        """Stream points, 0 when the stream is not mapped."""
        return len(self.rmap.branches) + 1 if self.rmap else 0

    @property
    def _reads(self) -> tuple[int, ...]:
        return tuple(b.reads for b in self.rmap.branches) if self.rmap else ()

    def new_stats(self) -> list[LevelStats]:
        """Empty statistics for each level."""
        return [LevelStats(OutputStats(), DriftStats(self.points) if self.rmap else None) for _ in self.levels]

    # -- decodes

    def noise_floor(self, weights: frozenset[str], chunk: Chunk) -> NoiseFloor:
        """The reference against itself in other arithmetic: without flash attention, and in two halves.

        Both are choices that users make without a thought and that no level can be blamed for.
        """
        half = len(chunk) // 2
        pieces = (chunk[:half], chunk[half:])
        whole, logits = self._capture_or_decode(self.reference, self.rmap, chunk)
        scored = score_reference(logits, chunk)
        stats = OutputStats()
        options = replace(self.reference.options, flash_attention=False)
        with Session(self.reference.path, options, share=self.reference) as other:
            other_map = self._trace(other, weights, pieces[0]) if self.rmap else None
            parts, streams = [], []
            for i, piece in enumerate(pieces):
                snapshot, logits = self._capture_or_decode(other, other_map, piece, start=i * half)
                parts.append(logits.copy())
                streams.append(snapshot.stream if snapshot else ())
        stats.update(score(scored, np.concatenate(parts)))
        self._step("noise floor")
        if whole is None:
            return NoiseFloor(stats.kld.mean, None)
        known = reference_norms(whole, self.threads)
        drift, by_point = Quantiles(), Quantiles(len(whole.stream))
        rows = []
        for x, norm, first, second in zip(whole.stream, known.stream, *streams, strict=True):
            rows.append(norms(np.concatenate([first, second]) - x) / np.maximum(norm, np.finfo(np.float64).tiny))
        plain = np.stack(rows)[:, known.plain]
        drift.update(plain.reshape(1, -1))
        by_point.update(plain)
        points = tuple(by_point.quantile(0.5, i) for i in range(len(rows)))
        return NoiseFloor(stats.kld.mean, drift.quantile(0.5), points)

    @staticmethod
    def _capture_or_decode(
        model: Session, rmap: ResidualMap | None, chunk: Chunk, start: int = 0
    ) -> tuple[Snapshot | None, Floats]:
        if rmap is None:
            return None, model.decode(chunk, start=start)
        return capture(model, rmap, chunk, start)

    def run_chunk(self, chunk: Chunk, stats: Sequence[LevelStats], health: HealthStats | None = None) -> ChunkRun:
        """Decode one chunk by the reference, then by each level free-running and forced, and update the statistics."""
        if self.rmap is None:
            scored = score_reference(self.reference.decode(chunk), chunk)
            self._require_finite(scored, None)
            self._step("reference")
            for name, level, one in zip(self.names, self.levels, stats, strict=True):
                one.output.update(score(scored, level.decode(chunk)))
                self._step(name)
            return ChunkRun(chunk, scored, ())
        snapshot, logits = capture(self.reference, self.rmap, chunk, reuse=self._reference_memory)
        self._reference_memory = snapshot
        scored = score_reference(logits, chunk)
        self._require_finite(scored, snapshot)
        known = reference_norms(snapshot, self.threads)
        if health:
            health.update(snapshot, known, self._reads, self.threads)
        self._step("reference")
        forced = []
        for i, one in enumerate(stats):
            free = self._free_run(i, chunk, scored, one)
            result = force(self.levels[i], self._maps[i], chunk, snapshot)
            one.units.setdefault(self.points, ChunkMean()).update(score(scored, result.logits).kld)
            assert one.drift is not None
            one.drift.update(snapshot, known, free, result.errors, self._reads, self.threads)
            self._step(f"{self.names[i]}, forced")
            forced.append(result)
        return ChunkRun(chunk, scored, tuple(forced))

    def _require_finite(self, scored: Scored, snapshot: Snapshot | None) -> None:
        """Nothing can be compared with a reference whose own output is not finite; say where that starts."""
        if np.isfinite(scored.nll).any():
            return
        where = ""
        if snapshot is not None and self.rmap is not None:
            bad = [i for i, x in enumerate(snapshot.stream) if not np.isfinite(x).all()]
            if bad:
                where = f" from {self.rmap.branches[bad[0] - 1].unit if bad[0] else 'the embedding'} on"
        raise InputError(
            f"{self.reference.path.name}: the reference's own output is not finite{where}",
            "its weights are damaged, or its activations overflow",
        )

    def _free_run(self, i: int, chunk: Chunk, scored: Scored, stats: LevelStats) -> Snapshot:
        snapshot, logits = capture(self.levels[i], self._maps[i], chunk, reuse=self._level_memory)
        self._level_memory = snapshot
        stats.output.update(score(scored, logits))
        self._step(self.names[i])
        return snapshot

    def patch(self, run: ChunkRun, level: int, units: Sequence[int], stats: LevelStats) -> None:
        """Add each unit's error alone to the reference, then all of them, and measure the KLD."""
        errors = run.forced[level].errors
        for unit in units:
            stats.units.setdefault(unit, ChunkMean()).update(self._inject(run, {unit: errors[unit]}))
            self._step(f"{self.names[level]}, one unit alone")
        stats.all_injected.update(self._inject(run, dict(enumerate(errors))))
        self._step(f"{self.names[level]}, all units")

    def check_kept(self, run: ChunkRun, level: int, kept: Sequence[int], stats: LevelStats) -> None:
        """All errors against all but those of the units that are to stay at 16 bit."""
        errors = run.forced[level].errors
        stats.all_injected.update(self._inject(run, dict(enumerate(errors))))
        self._step(f"{self.names[level]}, all units")
        rest = {i: error for i, error in enumerate(errors) if i not in kept}
        stats.without_kept.update(self._inject(run, rest))
        self._step(f"{self.names[level]}, without the kept units")

    def _inject(self, run: ChunkRun, errors: dict[int, Floats]) -> Doubles:
        assert self.rmap is not None
        return score(run.scored, inject(self.reference, self.rmap, run.chunk, errors)).kld


def _shape(rmap: ResidualMap) -> list[tuple[str, int, bool]]:
    return [(branch.unit, branch.reads, branch.closes) for branch in rmap.branches]
