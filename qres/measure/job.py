"""What crosses the border between the command and the worker process: jobs, and what was measured.

Kept apart from the code that measures, so that only the worker loads llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qres.files import Stamp
from qres.metrics.output import OutputStats
from qres.metrics.quantiles import Quantiles
from qres.records.output import Output
from qres.records.prediction import Prediction
from qres.records.result import Comparison
from qres.records.stream import Health, NoiseFloor, NonFinite, Point
from qres.records.units import Sensitivity
from qres.text.chunks import Texts
from qres.text.source import Source


@dataclass(frozen=True)
class ComparisonJob:
    """What to compare, on what."""

    reference: Path
    weights: frozenset[str]
    """Names of the tensors in the models' files."""
    files: tuple[Path, ...]
    sources: tuple[Source, ...]
    """The first that has enough is taken."""
    used: tuple[str, ...]
    """Digests of chunks to leave out."""
    chunks: int
    n_ctx: int
    threads: int
    n_gpu_layers: int


@dataclass
class Compared:
    """One file's statistics."""

    output: OutputStats = field(default_factory=OutputStats)
    drift: Quantiles = field(default_factory=Quantiles)
    """Of the last stream point; empty where the stream is not mapped."""


REFERENCE = "reference"
"""What the reference is called where levels have names."""

STATE_NAME = "unfinished.npz"
"""The state of a scan in the output folder, until the reports are written."""


@dataclass(frozen=True)
class Preflight:
    """What was found out before anything large is made or loaded."""

    texts: Texts
    own: tuple[int, int] | None
    """Bytes of the cache and of the compute buffers of a context as the scan makes it; None when not known."""
    memory: Mapping[int, tuple[int, int]]
    """The same of contexts on devices, by their length."""
    no_memory: str
    """Why some are missing; empty when all are there."""
    retokenized: Mapping[Path, str] = field(default_factory=dict)
    """By file with another tokenizer, where it makes other ids of the texts; empty for the same ids."""
    hidden: int = 0
    """Special tokens that stand in the text and are read as characters."""
    hidden_names: tuple[str, ...] = ()
    """Which ones."""


@dataclass(frozen=True)
class ModelFile:
    """A model to load."""

    name: str
    path: str
    file_bytes: int
    tensor_bytes: Mapping[str, int]
    tensor_types: Mapping[str, str]
    stamps: tuple[Stamp, ...]
    """Of all its files: nothing measured counts when they change meanwhile."""
    own_names: frozenset[str] = frozenset()
    """Names of the tensors in its own file, where they are not those of `tensor_bytes`; empty where they are."""
    keys: tuple[str, ...] = ()
    """Hyperparameters that are not the reference's, in words."""
    changed: frozenset[str] = frozenset()
    """Of a level, tensors that have the type of the reference's, but other bytes."""


@dataclass(frozen=True)
class PredictionJob:
    """What to predict from the reference, and how."""

    types: Mapping[str, tuple[str, ...]]
    """For each matrix of the reference, the types whose damage is predicted."""
    importance: Mapping[str, npt.NDArray[np.float32]]
    """Mean squares of the inputs of matrices, for the quantizer; empty without an importance matrix."""
    imatrix: str
    """Name of its file; empty for none."""
    imatrix_digest: str
    make_imatrix: Path | None
    """Where to write one."""
    draws: int
    """Label draws per chunk."""
    device: str
    dtype: str
    """Of products within backward: `float32`, `bfloat16` or `auto`."""


@dataclass(frozen=True)
class Job:
    """Everything the worker needs."""

    reference: ModelFile
    types_16bit: Mapping[str, str]
    """`F16` or `BF16` for each matrix of the reference by its own values, should it be kept; its own type where it is
    below 16 bit."""
    bytes_16bit: Mapping[str, int]
    """What each matrix takes at 16 bit, or in the reference where that is less."""
    bytes_q8_0: Mapping[str, int]
    """What it takes at Q8_0, or in the reference where that is less."""
    levels: tuple[ModelFile, ...]
    texts: Texts
    n_ctx: int
    threads: int
    n_gpu_layers: int
    all_units: bool
    with_noise_floor: bool
    prediction: PredictionJob
    state: Path | None = None
    """File that the state after each chunk is kept in."""
    resume: bool = False
    """Go on from the state in that file, if there is one."""
    crashed: Mapping[str, str] = field(default_factory=dict)
    """Levels that took the process down, and how: left out."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the scan is: a state of another one is not gone on from."""


@dataclass(frozen=True)
class MeasuredLevel:
    """The measured part of `records.result.Level`."""

    name: str
    output: Output
    points: tuple[Point, ...]
    sensitivity: Sensitivity
    differs: tuple[str, ...] = ()
    """Where it computes another function than the reference; empty when both compute the same."""
    unmatched: str = ""
    """Why its stream and units are not measured though the reference's are; empty when they are."""


@dataclass(frozen=True)
class Routed:
    """How often the experts of one layer were chosen."""

    layer: int
    weights: tuple[str, ...]
    """Tensors with a matrix per expert."""
    counts: tuple[int, ...]
    """Tokens that each expert got."""


@dataclass(frozen=True)
class Measured:
    """What the worker sends back."""

    norm_placement: str
    unmapped: str
    """Why the stream was not mapped; empty when it was."""
    system: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    massive_tokens: int
    noise_floor: NoiseFloor
    stream: tuple[Health, ...]
    inputs: Mapping[str, float]
    """Largest magnitude that each weight of the reference is multiplied with."""
    non_finite: tuple[NonFinite, ...]
    failed: Mapping[str, str]
    """Levels that could not be measured, and why."""
    levels: tuple[MeasuredLevel, ...]
    comparisons: tuple[Comparison, ...]
    prediction: Prediction
    routed: tuple[Routed, ...] = ()
    """How often the reference chose its experts, layer by layer; empty where it has none, or no map."""
