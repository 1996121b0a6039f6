"""What crosses the border between the command and the worker process: the job, its progress, and what was measured.

Kept apart from the code that measures, so that only the worker loads llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qres.corpus import Source
from qres.records import (
    Additivity,
    Comparison,
    Health,
    Keep,
    KeepCheck,
    NoiseFloor,
    Output,
    Point,
    RankCorrelation,
    Unit,
)


@dataclass(frozen=True)
class ModelFile:
    """A model to load."""

    name: str
    path: str
    file_bytes: int
    tensor_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Job:
    """Everything the worker needs."""

    reference: ModelFile
    types_16bit: Mapping[str, str]
    """`F16` or `BF16` for each matrix of the reference, should it be kept."""
    bytes_16bit: Mapping[str, int]
    """What each matrix takes at 16 bit."""
    bytes_q8_0: Mapping[str, int]
    """What it takes at Q8_0."""
    levels: tuple[ModelFile, ...]
    n_ctx: int
    chunks: int | None
    rank_chunks: int
    threads: int
    n_gpu_layers: int
    all_units: bool
    with_noise_floor: bool
    text: Source
    rank_text: Source | None
    """None: the end of `text` ranks and its beginning reports."""


@dataclass(frozen=True)
class Progress:
    """One event: how much of the measuring is done, in decodes."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True)
class MeasuredLevel:
    """The measured half of `records.Level`; the other half is in the file's header."""

    output: Output
    points: tuple[Point, ...]
    units: tuple[Unit, ...]
    keep_16bit: tuple[Keep, ...]
    keep_check: KeepCheck | None
    rank_correlation: RankCorrelation | None
    additivity: Additivity | None


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
    n_ctx: int
    chunks: int
    rank_chunks: int
    text: str
    rank_text: str
    unused_tokens: int
    massive_tokens: int
    noise_floor: NoiseFloor
    no_noise_floor: str
    """Why there is no noise floor; empty when there is one."""
    stream: tuple[Health, ...]
    levels: tuple[MeasuredLevel, ...]
    comparisons: tuple[Comparison, ...]
