"""The running statistics of a scan: everything that the chunks done so far have left."""

from __future__ import annotations

from dataclasses import dataclass, field

from qres.metrics.means import ChunkMean
from qres.metrics.output import OutputStats
from qres.records.stream import NoiseFloor, NonFinite
from qres.residual.drift import DriftStats, HealthStats
from qres.residual.routes import Counts
from qres.sensitivity.prediction import PredictionSums


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


@dataclass
class State:
    """Of all levels; kept in a file after every chunk, and gone on from."""

    rank: list[LevelStats] = field(default_factory=list)
    report: list[LevelStats] = field(default_factory=list)
    health: HealthStats | None = None
    rank_done: int = 0
    """Chunks of the ranking text that are finished."""
    report_done: int = 0
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Units to patch, by level."""
    drawn: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Those of them that were drawn at random."""
    prediction: PredictionSums | None = None
    """None before it was tried."""
    n_units: int = 0
    """How many of them."""
    noise: NoiseFloor | None = None
    """None at the very beginning only."""
    routed: dict[int, Counts] = field(default_factory=dict)
    """Layer -> how often each of its experts was chosen [experts], in the reference's own runs."""
    inputs: dict[str, float] = field(default_factory=dict)
    """Largest magnitude that each weight of the reference is multiplied with."""
    failed: dict[int, str] = field(default_factory=dict)
    """Levels that cannot be measured, and why."""
    non_finite: dict[str, NonFinite] = field(default_factory=dict)
    """By model."""
