"""The result of a scan as frozen records; `qres.records.as_json` takes them to JSON and back.

One word per thing, the same here, in result.json and in the reports. No arrays: everything is small enough to read.
Units are in the names (`_bytes`, `_db`, `_s`); KLD is in nats per token; probabilities and shares are fractions.
A number that does not exist (nothing measured, not finite) is `None`, never NaN: JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qres.records.devices import Deployment, DeviceAdvice
from qres.records.files import LevelFile, SharedTensors, TypeShare
from qres.records.output import Output
from qres.records.prediction import Prediction
from qres.records.recipe import FileTensor, Mix, Recipe, Recovery, Rung, Stock
from qres.records.stream import Extreme, Health, NoiseFloor, NonFinite, Point
from qres.records.units import Sensitivity

SCHEMA_VERSION = 2
"""Raised when a field changes its meaning or goes away; new optional fields do not raise it."""


@dataclass(frozen=True)
class Reference:
    """The 16-bit model that everything is compared with."""

    path: str
    name: str
    architecture: str
    norm_placement: str
    """`pre`, `post`, `sandwich`, `pre, parallel`, ... as found in the graph; `unknown` when the stream was not
    mapped."""
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    bytes: int
    bpw: float
    types: tuple[TypeShare, ...]
    is_16bit: bool
    """False when its large tensors are already quantized: then everything below compares with a damaged model."""


@dataclass(frozen=True)
class Settings:
    """What was run, enough to run it again."""

    qres_version: str
    llama_cpp: str
    """llama-cpp-python version."""
    system: str
    """llama.cpp's own line of CPU features and backends."""
    n_ctx: int
    """Tokens per chunk."""
    chunks: int
    """Chunks that the figures below come from."""
    rank_chunks: int
    """Chunks that ranked the units (other text, see `rank_text`)."""
    scored_tokens: int
    """Positions with output statistics: the second half of each chunk, as llama-perplexity."""
    text: str
    rank_text: str
    unused_tokens: int
    """Tokens of the text that were not decoded: they fill no chunk, or --chunks left them out."""
    massive_tokens: int
    """Tokens with massive activations, kept out of the per-token quantiles."""
    threads: int
    n_gpu_layers: int
    units: str
    """`ranked` (as many as the default budget allows) or `all`."""
    elapsed_s: float
    chunk_digests: tuple[str, ...]
    """Of all chunks that were decoded: recipes are verified on others."""


@dataclass(frozen=True)
class Level:
    """One quantized file, measured."""

    name: str
    file: LevelFile
    """What the file holds, from its header."""
    output: Output
    """What it does to the next-token distribution."""
    points: tuple[Point, ...]
    """Its stream, point by point; empty where the stream is not mapped."""
    sensitivity: Sensitivity
    """What its units do alone, by patching, and what to keep at 16 bit."""
    sound: bool = True
    """False where values within it are not finite, even if its logits are: never called good."""


@dataclass(frozen=True)
class Comparison:
    """Two levels on the same tokens: mean KLD of `a` minus that of `b`, standard error of the paired difference."""

    a: str
    b: str
    kld_difference: float | None
    kld_difference_se: float | None


@dataclass(frozen=True)
class Verdict:
    """The answer in three lines."""

    level: str | None
    headline: str
    keep: str
    details: str


@dataclass(frozen=True)
class Skipped:
    """Something that could not be measured, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Result:
    """A whole scan: what `result.json` holds."""

    schema_version: int
    reference: Reference
    settings: Settings
    noise_floor: NoiseFloor
    stream: tuple[Health, ...]
    levels: tuple[Level, ...]
    comparisons: tuple[Comparison, ...]
    deployment: tuple[Deployment, ...]
    device_advice: tuple[DeviceAdvice, ...]
    assumptions: tuple[str, ...]
    verdict: Verdict
    prediction: Prediction
    """The damage of every tensor at every type."""
    fingerprint: str
    """Of the reference, see `qres.gguf.difference.fingerprint`: what a recipe is for."""
    tensors: tuple[FileTensor, ...]
    """Of the reference, in file order."""
    skipped: tuple[Skipped, ...] = dataclasses.field(default=())
    warnings: tuple[str, ...] = dataclasses.field(default=())
    non_finite: tuple[NonFinite, ...] = dataclasses.field(default=())
    extremes: tuple[Extreme, ...] = dataclasses.field(default=())
    """Of the reference, largest first."""
    shared: tuple[SharedTensors, ...] = dataclasses.field(default=())
    ladder: tuple[Rung, ...] = dataclasses.field(default=())
    """What llama.cpp would make of the reference, level by level; empty where it cannot quantize it."""
    mixes: tuple[Mix, ...] = dataclasses.field(default=())
    """The best recipes over a range of sizes, smallest first."""
    stock: tuple[Stock, ...] = dataclasses.field(default=())
    """The levels of `ladder`, with what is predicted of them."""
    recoveries: tuple[Recovery, ...] = dataclasses.field(default=())
    """What 16 bit is worth, and what other types are."""
    recipes: tuple[Recipe, ...] = dataclasses.field(default=())
    """For the default budgets; with `--recipe` built and verified."""
