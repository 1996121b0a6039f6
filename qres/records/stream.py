"""The residual stream as records: its health, a level's drift from it, and where its numbers break."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NonFinite:
    """Where a model's values stop being finite: the first computation whose output is not.

    On the first chunk where that happened.
    """

    model: str
    """`reference`, or the level."""
    unit: str
    """The branch that it happens in, such as `3.ffn`; `head` behind the last one; empty when the stream was not
    mapped."""
    layer: int | None
    """Block number of the last weight used."""
    operation: str
    """ggml's operation, such as `MUL_MAT`."""
    label: str
    """llama.cpp's name of its output."""
    tensor: str
    """The weight that enters there; empty when there is none."""
    token: int | None
    """First position of the chunk that is affected."""
    where: str
    """Which chunk of which text."""
    input_absmax: float | None
    """Largest finite magnitude that the weight was multiplied with; beyond 65504 it overflows in F16."""
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
    """A magnitude of the reference beyond 32752, half of the largest 16-bit float.

    Inputs are seen on the first ranking chunk, and on the first one where the reference's output is not finite; the
    stream on the reporting text, weights in the file.
    """

    model: str
    """`reference`."""
    what: str
    """`weight`: a value of the tensor; `input`: what the tensor is multiplied with; `stream`: the residual stream."""
    layer: int | None
    """Block number."""
    name: str
    """The tensor, or llama.cpp's name of the stream point."""
    absmax: float
    """The magnitude."""


@dataclass(frozen=True)
class NoiseFloor:
    """The reference against itself in other arithmetic: without flash attention and in two halves.

    On the first ranking chunk. Not measured for diffusion models. What is measured counts only where it can be noise: a
    KLD of 0.001 nats at most, a drift of 1 at most, and neither above that of the most damaged level, exact copies
    aside.
    """

    kld_mean: float | None
    """Mean KLD over the scored positions of that chunk; None for the `reason`."""
    drift_median: float | None
    """Median drift over all stream points and the tokens without massive activations; None for the `drift_reason`."""
    drift_points: tuple[float | None, ...] = ()
    """The same at each stream point: noise grows along the stream as drift does."""
    reason: str = ""
    """Why there is no `kld_mean`; empty when there is one."""
    drift_reason: str = ""
    """Why there is no `drift_median`; empty when there is one."""
    measured_kld: float | None = None
    """What was measured for `kld_mean`, whether it counts or not."""
    measured_drift: float | None = None
    """What was measured for `drift_median`, whether it counts or not."""


@dataclass(frozen=True)
class Health:
    """The reference's stream at one point, on the reporting text.

    Tokens with massive activations are left out unless the field says otherwise.
    """

    index: int
    """0 is the stream after the embedding, j the stream after residual add j."""
    layer: int | None
    """Block number; None for the embedding."""
    branch: str
    """Kind of branch that was added last, as in `Point`."""
    label: str
    """llama.cpp's name of the tensor; names are not unique."""
    norm_median: float | None
    """Euclidean norm of a token's vector, median over tokens."""
    mean: float | None
    """Mean value, averaged over tokens."""
    variance: float | None
    """Variance of a token's values, averaged over tokens."""
    absmax: float | None
    """Largest absolute value over all tokens, massive ones included."""
    kurtosis: float | None
    """Kurtosis of the values of one token, median over tokens; 3 for a normal distribution."""
    participation: float | None
    """(sum x^2)^2 / sum x^4 per token, median over tokens: how many channels carry the stream."""
    f16_headroom: float | None
    """65504 / `absmax`; below 1 the point does not fit 16-bit float."""


@dataclass(frozen=True)
class Point:
    """One stream point of one level, on the reporting text.

    Quantiles are over tokens without massive activations.
    """

    index: int
    """0 is the stream after the embedding, j the stream after residual add j."""
    layer: int | None
    """Block number; None for the embedding."""
    branch: str
    """`embedding`, `attention`, `ffn`, `moe`, `ssm`, `conv`, `rwkv` or `other`, by the weights behind the branch."""
    label: str
    """llama.cpp's name of the tensor; names are not unique."""
    weights: tuple[str, ...]
    """Tensors of the file behind the branch."""
    ratio_median: float | None
    """Branch ratio of the free-running quantized model, |branch| / |stream|; above 1 the branch overwrites the stream.
    The stream is the point that the branch reads, as it enters the next add: after every scale or norm on the way. None
    for the embedding."""
    ratio_p95: float | None
    """95 % quantile of the branch ratio."""
    reference_ratio_median: float | None
    """Branch ratio of the reference."""
    drift_median: float | None
    """Free-run drift, |x^q - x| / |x|."""
    drift_p95: float | None
    """95 % quantile of the drift."""
    drift_growth: float | None
    """`drift_median` over that of the point before; None at the first point."""
    cosine_median: float | None
    """Cosine of the quantized and the reference's stream."""
    sqnr_db: float | None
    """-20 log10(`drift_median`), None when the drift is 0."""
    local_error_median: float | None
    """Error of the branch, computed by the quantized layer on the reference's stream, over the branch: |b^ - b| /
    |b|."""
    injected_error_median: float | None
    """The same error over the stream that it goes into, |b^ - b| / |x|, x being the reference's stream right after the
    add: what the layer's own weights put there."""
    ledger_share: float | None
    """This point's part of the final drift; over all points they add up to 1."""
    generated_share: float | None
    """The part of `ledger_share` that the layer's own weights made. What is neither in it nor in `scaling_share` is
    inherited: the branch's reaction to drift below."""
    absmax: float | None
    """Largest absolute value of the quantized stream over all tokens."""
    scaling_share: float | None = None
    """The part of `ledger_share` that a scale or norm of the stream itself made, between the point before and the add:
    it makes the drift that is there larger or smaller. 0 where the stream goes into the add as it is."""
