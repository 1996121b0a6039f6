"""Predicted sensitivity as records: part of a result, like `qres.records`.

Whatever is called `predicted` here comes from one backward pass through the reference, never from a measurement; what
was measured carries `measured` or `patched` in its name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class TypeDamage:
    """One tensor given one type, alone, in an otherwise exact model."""

    type: str
    """ggml type name."""
    bytes: int
    """What the tensor takes as this type."""
    predicted_kld: float | None
    """Nats per scored token, not calibrated."""
    predicted_se: float | None
    """Standard error: tokens clustered by chunk, or by label draw where there is one chunk only. None below two."""


@dataclass(frozen=True)
class TensorDamage:
    """One matrix in one unit that uses it; a tied head is two rows, one as the embedding and one as the head."""

    tensor: str
    role: str
    """`attention q`, `ffn down`, `experts gate`, `embedding`, `head`, ...; `other` where the name tells nothing."""
    unit: str
    """As `Unit.unit`; empty when it belongs to none."""
    layer: int | None
    weights: int
    types: tuple[TypeDamage, ...]
    """Smallest first."""


@dataclass(frozen=True)
class Prediction:
    """The damage of every tensor at every type, from one backward pass, or why there is none."""

    used: bool
    """The replay of the reference agreed with llama.cpp, and its predictions are in this result."""
    reason: str
    """Why it is not used; empty when it is."""
    replay_kld: float | None
    """KL(llama.cpp || replay) of the reference, nats per scored token: the replay's own check."""
    replay_nmse: float | None
    """Squared error of the replay's logits over their variance."""
    replay_kld_limit: float
    chunks: int
    tokens: int
    """Scored positions that the prediction is a mean over."""
    draws: int
    """Label draws per chunk."""
    dtype: str
    device: str
    imatrix: str
    """File whose importance matrix the types were made with; empty for none."""
    elapsed_s: float
    tensors: tuple[TensorDamage, ...] = dataclasses.field(default=())
    imatrix_digest: str = ""
    """SHA-256 of its entries."""


@dataclass(frozen=True)
class Calibration:
    """What the predictions of one level are multiplied with: on the ranking text, measured over predicted."""

    factor: float
    predicted_kld: float
    """Sum over all tensors at the types that the level's file gives them, not calibrated."""
    predicted_se: float | None
    measured_kld: float
    """Of the level, on the same text."""


@dataclass(frozen=True)
class Trust:
    """Predicted against patched KLD of one level's units that were patched; the embedding and the head included."""

    units: int
    top: int
    """Of them, chosen because they were predicted to be the worst."""
    random: int
    """Of them, drawn from all others."""
    spearman: float | None
    """Rank correlation; None below 4 units."""
    slope: float | None
    """Of ln patched over ln predicted, least squares; 1 where they are proportional."""
    worst: tuple[str, ...]
    """Up to three units with the largest |ln(patched / predicted)| after calibration, worst first."""
