"""The residual stream as records: its health, a level's drift from it, and where its numbers break."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NonFinite:
    """Where a model's values stop being finite: the first computation whose output is not."""

    model: str
    """`reference`, or the level."""
    unit: str
    """The branch that it happens in, such as `3.ffn`; `head` behind the last one; empty when the stream was not
    mapped."""
    layer: int | None
    operation: str
    """ggml's operation, such as `MUL_MAT`."""
    label: str
    """llama.cpp's name for its output."""
    tensor: str
    """The weight that enters there; empty when there is none."""
    token: int | None
    """First position in the chunk that is affected."""
    where: str
    """Which chunk."""
    input_absmax: float | None
    """Largest finite magnitude that the weight was multiplied with."""
    broken_weights: tuple[str, ...] = ()
    """Tensors of the file that hold values that are not finite themselves."""

    @property
    def place(self) -> str:
        """Where, in words."""
        unit = self.unit or (f"layer {self.layer}" if self.layer is not None else "a place before the first layer")
        using = f" with {self.tensor}" if self.tensor else ""
        token = f"from token {self.token} of {self.where} on" if self.token is not None else f"in {self.where}"
        return f"in {unit} ({self.operation}{using}, {token})"


@dataclass(frozen=True)
class Extreme:
    """A magnitude beyond 65504, the largest 16-bit float, or beyond half of it."""

    model: str
    what: str
    """`weight`: a value of the tensor; `input`: what the tensor is multiplied with; `stream`: the residual stream."""
    layer: int | None
    name: str
    """The tensor, or the stream point."""
    absmax: float


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
