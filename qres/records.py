"""The result of a scan as frozen records; `qres.result_json` takes them to JSON and back.

One word per thing, the same here, in result.json and in the reports. No arrays: everything is small enough to read.
Units are in the names (`_bytes`, `_db`, `_s`); KLD is in nats per token; probabilities and shares are fractions.
A number that does not exist (nothing measured, not finite) is `None`, never NaN: JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qres.device_records import Deployment as Deployment  # noqa: PLC0414 - part of a result, found here
from qres.device_records import DeviceAdvice as DeviceAdvice  # noqa: PLC0414
from qres.findings import Extreme, NonFinite, SharedTensors
from qres.output_records import Group as Group  # noqa: PLC0414
from qres.output_records import Histogram as Histogram  # noqa: PLC0414
from qres.output_records import Output as Output  # noqa: PLC0414
from qres.recipe_records import FileTensor, Mix, Recipe, Recovery, Rung, Stock
from qres.sensitivity_records import Calibration, Sensitivity, Trust

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes away; new optional fields do not raise it."""


@dataclass(frozen=True)
class TypeShare:
    """How much of a file one tensor type holds."""

    type: str
    """ggml type name as in the file, e.g. `Q4_K`."""
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Fallback:
    """A tensor that llama.cpp could not give the type that the level asks for."""

    tensor: str
    wanted: str
    type: str
    """What the file really holds."""
    reason: str


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
    chunk_digests: tuple[str, ...] = ()
    """Of all chunks that were decoded: recipes are verified on others."""


@dataclass(frozen=True)
class NoiseFloor:
    """The reference against itself, in two halves and without flash attention: what is only arithmetic noise."""

    kld_mean: float | None
    drift_median: float | None
    """Over all stream points."""
    drift_points: tuple[float | None, ...] = ()
    """Median drift at each stream point; noise grows along the stream as drift does."""


@dataclass(frozen=True)
class Health:
    """The reference's stream at one point, over the tokens without massive activations unless said otherwise."""

    index: int
    layer: int | None
    branch: str
    label: str
    norm_median: float | None
    mean: float | None
    variance: float | None
    absmax: float | None
    """Over all tokens, massive ones included."""
    kurtosis: float | None
    """Of the values of one token, median over tokens; 3 for a normal distribution."""
    participation: float | None
    """(sum x^2)^2 / sum x^4 per token, median: how many channels carry the stream."""
    f16_headroom: float | None
    """65504 / absmax; below 1 the point does not fit 16-bit float."""


@dataclass(frozen=True)
class Point:
    """One stream point of one level. Index 0 is the stream after the embedding; point j comes after residual add j.

    `_median` and `_p95` are over tokens. Drift is |x^q - x| / |x| in the free-running quantized model.
    """

    index: int
    layer: int | None
    branch: str
    """`embedding`, `attention`, `ffn`, `moe`, `ssm`, `conv`, ... or several joined by `+`."""
    label: str
    weights: tuple[str, ...]
    """Tensors of the file behind the branch."""
    ratio_median: float | None
    """|branch| / |stream that the branch reads| in the quantized model; above 1 the branch overwrites the stream."""
    ratio_p95: float | None
    reference_ratio_median: float | None
    drift_median: float | None
    drift_p95: float | None
    drift_growth: float | None
    """drift_median over that of the point before."""
    cosine_median: float | None
    sqnr_db: float | None
    """-20 log10(drift_median)."""
    local_error_median: float | None
    """|b^ - b| / |b|, b^ computed by the quantized layer on the reference's stream."""
    injected_error_median: float | None
    """|b^ - b| / |x|: what the layer's own weights put into the stream."""
    ledger_share: float | None
    """This point's part of the final drift; over all points they add up to 1."""
    generated_share: float | None
    """The part of `ledger_share` made by the layer's own weights; the rest it inherited from drift below."""
    absmax: float | None


@dataclass(frozen=True)
class Unit:
    """A branch, the embedding or the head, quantized alone."""

    unit: str
    """`embedding`, `head`, or `<layer>.<branch>` such as `3.ffn`."""
    kind: str
    """`branch`, `embedding` or `head`."""
    layer: int | None
    branch: str
    kld: float | None
    """Mean KLD that this unit's quantization error causes in an otherwise exact model; None when not measured."""
    kld_se: float | None
    method: str
    """`patched`, `forced` (the head), or why there is no figure."""
    injected_error: float | None
    local_error: float | None
    ratio: float | None
    drift: float | None
    weights: tuple[str, ...]
    """Tensors of the file that the unit consists of, norms and biases left out."""
    bytes_at_level: int
    bytes_at_16bit: int
    predicted_kld: float | None = None
    """Calibrated prediction for the unit's tensors at the level's types; None without a replay."""
    predicted_se: float | None = None

    @property
    def is_measured(self) -> bool:
        """The KLD comes from a decode."""
        return self.method in ("patched", "forced")


@dataclass(frozen=True)
class Keep:
    """One unit of the ordered list of what to keep at 16 bit."""

    unit: str
    type: str
    """`F16`, or `BF16` where the reference holds one of its matrices as BF16 or with values beyond F16."""
    kld_recovered: float
    gap_share: float
    """kld_recovered over the level's whole KLD on the ranking text."""
    bytes_added: int
    confidence: float | None
    """How often the unit stays in the list's first k when chunks are resampled."""
    worth_it: bool
    """False from the row on where the next larger level buys more KLD per byte."""
    reason: str


@dataclass(frozen=True)
class KeepCheck:
    """The recommended list measured together, on the reporting text that did not choose it."""

    units: tuple[str, ...]
    kld_all_injected: float
    """All the level's local errors injected into the reference."""
    kld_without_units: float
    """The same without the listed units' errors."""
    recovered_share: float
    bytes_added: int
    recovered_se: float | None = None
    """Standard error of `recovered_share`, paired by chunk."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation of cheap measures with the measured KLD of the same units; None below 4 units."""

    units: int
    branch_ratio: float | None
    drift: float | None
    local_error: float | None
    injected_error: float | None
    depth: float | None


@dataclass(frozen=True)
class Additivity:
    """Do single-unit damages add up? All on the ranking text."""

    kld_level: float | None
    kld_sum_of_units: float | None
    """Only when every unit was patched."""
    kld_all_injected: float | None
    """All local errors of branches and embedding added to the reference run at once (no head error)."""


@dataclass(frozen=True)
class Level:
    """One quantized file, measured."""

    name: str
    path: str
    file_type: str
    """What `general.file_type` claims."""
    bytes: int
    bpw: float
    """8 * bytes of tensor data / weights, from the file."""
    nominal_bpw: float | None
    types: tuple[TypeShare, ...]
    fallback_tensors: tuple[Fallback, ...]
    output: Output
    points: tuple[Point, ...]
    units: tuple[Unit, ...]
    keep_16bit: tuple[Keep, ...]
    keep_check: KeepCheck | None
    rank_correlation: RankCorrelation | None
    additivity: Additivity | None
    calibration: Calibration | None = None
    trust: Trust | None = None
    tensor_types: tuple[str, ...] = ()
    """Type of each of `Result.tensors` in this file; empty text where the file lacks it."""
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
    skipped: tuple[Skipped, ...] = dataclasses.field(default=())
    warnings: tuple[str, ...] = dataclasses.field(default=())
    non_finite: tuple[NonFinite, ...] = dataclasses.field(default=())
    extremes: tuple[Extreme, ...] = dataclasses.field(default=())
    """Of the reference, largest first."""
    shared: tuple[SharedTensors, ...] = dataclasses.field(default=())
    sensitivity: Sensitivity | None = None
    """None in older results."""
    fingerprint: str = ""
    """Of the reference, see `gguf_compare.fingerprint`: what a recipe is for."""
    tensors: tuple[FileTensor, ...] = dataclasses.field(default=())
    """Of the reference, in file order."""
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
