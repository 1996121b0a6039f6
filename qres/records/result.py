"""The result of a scan as frozen records; `qres.records.as_json` takes them to JSON and back.

One word per thing, the same here, in result.json and in the reports. No arrays: everything is small enough to read.
Units are in the names (`_bytes`, `_db`, `_s`); KLD is in nats per token; probabilities and shares are fractions.
A number that does not exist (nothing measured, not finite) is `None`, never NaN: JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qres.records.devices import Deployment, DeviceAdvice
from qres.records.experts import ExpertUse
from qres.records.files import LevelFile, NotExecuted, SharedTensors, TypeShare
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
    """The file given to llama.cpp; of a split model the first shard."""
    name: str
    """`general.name`, else the file's name without its ending."""
    architecture: str
    """`general.architecture`."""
    norm_placement: str
    """Found in the graph: `pre`, `post` (on the branch), `sandwich` (both), `post-add` (on the stream) or `none`, with
    `, parallel` where branches share their input; `unknown` when the stream was not mapped."""
    n_layer: int
    """Layers, by llama.cpp's count."""
    n_embd: int
    """Width of the stream."""
    n_vocab: int
    """Tokens in the vocabulary."""
    n_ctx_train: int
    """Context length the model was trained for."""
    bytes: int
    """Size of all its files."""
    bpw: float
    """8 * bytes of tensor data / weights."""
    types: tuple[TypeShare, ...]
    """What each tensor type holds, most bytes first."""
    is_16bit: bool
    """At least 95 % of the weights in matrices are F16, BF16 or F32; when false, everything compares with an already
    quantized model, unless `released_in` says that it is the original."""
    not_executed: tuple[NotExecuted, ...] = ()
    """Blocks that never run: nothing that is measured depends on them."""
    released_in: str = ""
    """Type that the model was published in, `MXFP4` or `NVFP4`: tensors of that type are the original, and levels keep
    them; empty for any other reference."""

    @property
    def is_original(self) -> bool:
        """Levels and recipes can be made of it: at 16 bit, or as it was released."""
        return self.is_16bit or bool(self.released_in)


@dataclass(frozen=True)
class Settings:
    """What was run, enough to run it again."""

    qres_version: str
    """Version of qres."""
    llama_cpp: str
    """Version of llama-cpp-python."""
    system: str
    """llama.cpp's own line of CPU features and backends."""
    n_ctx: int
    """Tokens per chunk; smaller than asked for when the text is shorter than a chunk."""
    chunks: int
    """Chunks that the figures come from."""
    rank_chunks: int
    """Chunks that ranked the units, of `rank_text`."""
    scored_tokens: int
    """Positions with output statistics over all chunks, the second half of each as in llama-perplexity; non-finite ones
    included."""
    text: str
    """Name of the reporting text."""
    rank_text: str
    """Name of the ranking text."""
    unused_tokens: int
    """Tokens of the reporting text that were not decoded: they fill no chunk, or `--chunks` left them out. Estimated by
    bytes where only the beginning of a long text was tokenized."""
    massive_tokens: int
    """Tokens of the reporting text with massive activations, kept out of the per-token quantiles."""
    threads: int
    """CPU threads."""
    n_gpu_layers: int
    """Layers put on the GPU."""
    units: str
    """`ranked` (as many as the default budget allows) or `all`."""
    elapsed_s: float
    """Seconds from start to result."""
    chunk_digests: tuple[str, ...]
    """Short digests of all chunks that were decoded: recipes are verified on others."""
    special: bool = False
    """Special tokens that stand in the text were parsed, not read as characters."""


@dataclass(frozen=True)
class Level:
    """One quantized file, measured."""

    name: str
    """The level asked for; of a given file, its `file_type`, else its name; made unique by the file's name where two
    are equal."""
    file: LevelFile
    """What the file holds, from its header."""
    output: Output
    """Its next-token distribution against the reference's."""
    points: tuple[Point, ...]
    """Its stream, point by point; empty when the stream was not mapped."""
    sensitivity: Sensitivity
    """What its units do alone, by patching, and what to keep at 16 bit."""
    sound: bool = True
    """False where values within it are not finite, even if its logits are; such a level is never called good."""
    differs: tuple[str, ...] = ()
    """Where it computes another function than the reference, in words: keys with both values, or where the graphs part;
    empty when both compute the same. Nothing is advised about the bits of a level that differs."""
    is_copy: bool = False
    """Its tensors are the reference's, byte for byte: the same model under another name."""


@dataclass(frozen=True)
class Comparison:
    """A level and the next larger one on the same tokens; left out when non-finite positions make the tokens differ."""

    a: str
    """The smaller file."""
    b: str
    """The larger file."""
    kld_difference: float | None
    """Mean KLD of `a` minus that of `b`."""
    kld_difference_se: float | None
    """Standard error of the paired difference."""


@dataclass(frozen=True)
class Verdict:
    """The answer in three lines."""

    level: str | None
    """Name of the level; None when none was measured, or when the reference itself is no working model."""
    headline: str
    """Ship it, or the least damaged of what was measured."""
    keep: str
    """What to keep at 16 bit in it."""
    details: str
    """By which bounds, and what the next smaller level misses."""


@dataclass(frozen=True)
class Skipped:
    """Something that could not be measured."""

    what: str
    """What is missing."""
    reason: str
    """Why it could not be measured."""


@dataclass(frozen=True)
class Result:
    """A whole scan: what `result.json` holds."""

    schema_version: int
    """Version of the format, raised when a field changes its meaning or goes away."""
    reference: Reference
    """The 16-bit model."""
    settings: Settings
    """What was run."""
    noise_floor: NoiseFloor
    """The reference against itself."""
    stream: tuple[Health, ...]
    """The reference's stream, point by point; empty when the stream was not mapped."""
    levels: tuple[Level, ...]
    """The files measured, smallest first."""
    comparisons: tuple[Comparison, ...]
    """Neighbouring levels, paired."""
    deployment: tuple[Deployment, ...]
    """Every level on every device at every context length."""
    device_advice: tuple[DeviceAdvice, ...]
    """One row per device."""
    assumptions: tuple[str, ...]
    """Sentences on which `deployment` and `device_advice` rest."""
    verdict: Verdict
    """Which level to ship, and what to keep at 16 bit in it."""
    prediction: Prediction
    """Predicted damage of every tensor at every type."""
    fingerprint: str
    """SHA-256 over the reference's architecture, the names, shapes and types of its tensors, and the first 4 KiB of
    each: what a recipe is for."""
    tensors: tuple[FileTensor, ...]
    """The reference's tensors, in file order."""
    skipped: tuple[Skipped, ...] = dataclasses.field(default=())
    """What could not be measured, and why."""
    warnings: tuple[str, ...] = dataclasses.field(default=())
    """What to know before believing the figures."""
    non_finite: tuple[NonFinite, ...] = dataclasses.field(default=())
    """Where values stop being finite, one row per model."""
    extremes: tuple[Extreme, ...] = dataclasses.field(default=())
    """The reference's magnitudes beyond half of the largest 16-bit float, largest first."""
    shared: tuple[SharedTensors, ...] = dataclasses.field(default=())
    """Pairs of levels that hold matrices alike."""
    ladder: tuple[Rung, ...] = dataclasses.field(default=())
    """What llama.cpp would make of the reference, level by level; empty where it cannot quantize it, or where it is not
    at 16 bit."""
    mixes: tuple[Mix, ...] = dataclasses.field(default=())
    """The best recipes from the size of the smallest level to that of the largest, smallest first; empty without
    predictions."""
    stock: tuple[Stock, ...] = dataclasses.field(default=())
    """The levels of `ladder`, with what is predicted of them, smallest first; empty without predictions."""
    recoveries: tuple[Recovery, ...] = dataclasses.field(default=())
    """What 16 bit is worth, and what other types are, for every level measured; empty without predictions."""
    recipes: tuple[Recipe, ...] = dataclasses.field(default=())
    """For the size of each level measured, and for 0.10 and 0.25 bits per weight more than the smallest; with
    `--recipe` built and verified. Empty without predictions."""
    experts: tuple[ExpertUse, ...] = dataclasses.field(default=())
    """Which experts the text reached, one row per layer that has any; empty when the stream was not mapped."""
