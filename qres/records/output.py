"""What a level does to the next-token distribution, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Output statistics of one part of the scored positions."""

    label: str
    tokens: int
    kld_mean: float | None
    same_top: float | None


@dataclass(frozen=True)
class Histogram:
    """Counts of per-token KLD in logarithmic bins; `edges` has one more entry than `counts`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """The quantized model's next-token distribution against the reference's, on the scored positions.

    `_se` is the standard error with tokens clustered by chunk; None with fewer than two chunks.
    """

    tokens: int
    chunks: int
    kld_mean: float | None
    kld_se: float | None
    kld_median: float | None
    kld_p90: float | None
    kld_p95: float | None
    kld_p99: float | None
    kld_p999: float | None
    kld_max: float | None
    same_top: float | None
    """Fraction of positions where both models put the same token first."""
    same_top_se: float | None
    ppl: float | None
    ppl_reference: float | None
    ln_ppl_ratio: float | None
    """ln(ppl / ppl_reference); 0.01 is one percent more perplexity."""
    ln_ppl_ratio_se: float | None
    ln_ppl_correlation: float | None
    """Pearson correlation of the two models' per-token negative log-likelihoods."""
    rms_delta_p: float | None
    """Root mean square change of the probability given to the text's next token."""
    mean_delta_p: float | None
    delta_p_p05: float | None
    delta_p_median: float | None
    delta_p_p95: float | None
    by_position: tuple[Group, ...]
    """Quarters of the scored positions of a chunk, early to late."""
    by_confidence: tuple[Group, ...]
    """By the reference's top probability."""
    kld_histogram: Histogram
    nonfinite_tokens: int
    """Positions whose logits were not finite, the level's or the reference's; left out of everything above."""
    reference_nonfinite_tokens: int = 0
    """Those of them where the reference's were not: not the level's fault."""
