"""What a level does to the next-token distribution, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Output statistics of one part of the scored positions."""

    label: str
    """Which part of them."""
    tokens: int
    """Positions in it."""
    kld_mean: float | None
    """Mean KLD in it."""
    same_top: float | None
    """Share with the same top token."""


@dataclass(frozen=True)
class Histogram:
    """Counts of the per-token KLD in logarithmic bins, 8 per factor of ten; values of 0 are in the first bin."""

    edges: tuple[float, ...]
    """One more than `counts`."""
    counts: tuple[int, ...]
    """Positions in each bin."""


@dataclass(frozen=True)
class Output:
    """The quantized model's next-token distribution against the reference's.

    On the scored positions of the reporting text. `_se` is the standard error with tokens clustered by chunk; None
    below two chunks.
    """

    tokens: int
    """Positions that the figures come from."""
    chunks: int
    """Chunks that they lie in."""
    kld_mean: float | None
    """Mean KLD, nats per token."""
    kld_se: float | None
    """Standard error of `kld_mean`."""
    kld_median: float | None
    """Median of the KLD of a token."""
    kld_p90: float | None
    """90 % quantile of the KLD of a token."""
    kld_p95: float | None
    """95 % quantile of the KLD of a token."""
    kld_p99: float | None
    """99 % quantile of the KLD of a token."""
    kld_p999: float | None
    """99.9 % quantile of the KLD of a token."""
    kld_max: float | None
    """Largest KLD of a token."""
    same_top: float | None
    """Share of positions where both models put the same token first."""
    same_top_se: float | None
    """Standard error of `same_top`."""
    ppl: float | None
    """Perplexity of the quantized model."""
    ppl_reference: float | None
    """Perplexity of the reference on the same positions."""
    ln_ppl_ratio: float | None
    """ln(`ppl` / `ppl_reference`); 0.01 is one percent more perplexity."""
    ln_ppl_ratio_se: float | None
    """Standard error of `ln_ppl_ratio`."""
    ln_ppl_correlation: float | None
    """Pearson correlation of the two models' negative log-likelihoods per token."""
    rms_delta_p: float | None
    """Root mean square of the change in the probability given to the text's next token."""
    mean_delta_p: float | None
    """Mean change in the probability given to the text's next token; negative when the quantized model gives the real
    token less."""
    delta_p_p05: float | None
    """5 % quantile of that change."""
    delta_p_median: float | None
    """Median of that change."""
    delta_p_p95: float | None
    """95 % quantile of that change."""
    by_position: tuple[Group, ...]
    """Four quarters of the scored positions of a chunk, early to late."""
    by_confidence: tuple[Group, ...]
    """Four groups by the reference's top probability: below 25 %, 25 to 50 %, 50 to 75 %, above."""
    kld_histogram: Histogram
    """Counts of the per-token KLD."""
    nonfinite_tokens: int
    """Positions where the level's or the reference's logits give no finite KLD or log-likelihood; left out of
    everything above."""
    reference_nonfinite_tokens: int = 0
    """Those of `nonfinite_tokens` where the reference's do not: not the level's fault."""
    first_half: Group | None = None
    """Every fourth position of the first half of each chunk, which no other figure comes from: what a short prompt
    sees. None when it was not looked at."""
