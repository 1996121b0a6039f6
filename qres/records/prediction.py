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
    """ggml's name of the type."""
    bytes: int
    """What the tensor takes as this type."""
    predicted_kld: float | None
    """Predicted, not calibrated, nats per scored token; None when not finite."""
    predicted_se: float | None
    """Its standard error: tokens clustered by chunk, or by label draw where there is one chunk only; None below two."""
    silent_kld: float = 0.0
    """What experts that no token reached would add if each were like the median of the others: in no prediction, but
    counted where a recipe chooses types."""


@dataclass(frozen=True)
class TensorDamage:
    """One matrix in one unit that uses it; a tied head is two rows, one as the embedding and one as the head."""

    tensor: str
    """Name of the tensor."""
    role: str
    """`attention q`, `ffn down`, `experts gate`, `embedding`, `head`, ...; `other` where the name tells nothing."""
    unit: str
    """Name of the unit, as in `Unit`; empty when it belongs to none."""
    layer: int | None
    """Block number."""
    weights: int
    """Weights in it."""
    types: tuple[TypeDamage, ...]
    """Its damage at each type, smallest first; a type that its rows cannot hold, or that is only a substitute for one
    that they hold, is left out."""
    silent_experts: int = 0
    """Experts in it that no token of the ranking text reached: nothing is predicted of them."""


@dataclass(frozen=True)
class Prediction:
    """The damage of every tensor at every type, from one backward pass, or why there is none."""

    used: bool
    """The replay agreed with llama.cpp, and its predictions are in this result."""
    reason: str
    """Why it is not used; empty when it is."""
    replay_kld: float | None
    """KL(llama.cpp || replay) of the reference, nats per scored token: the replay's own check."""
    replay_nmse: float | None
    """Squared error of the replay's logits over their variance."""
    replay_kld_limit: float
    """The largest `replay_kld` with which it is used."""
    chunks: int
    """Chunks of the ranking text that were replayed."""
    tokens: int
    """Scored positions that the predictions are means over."""
    draws: int
    """Label draws per chunk."""
    dtype: str
    """What the products were computed in."""
    device: str
    """Where torch computed."""
    imatrix: str
    """File whose importance matrix the types were made with; empty for none."""
    elapsed_s: float
    """Seconds that it took."""
    tensors: tuple[TensorDamage, ...] = dataclasses.field(default=())
    """One row per matrix and unit that uses it; empty when not used."""
    imatrix_digest: str = ""
    """SHA-256 of the importance matrix's entries; empty for none."""


@dataclass(frozen=True)
class Calibration:
    """What the predictions of one level's units are multiplied with; on the ranking text."""

    factor: float
    """`measured_kld` / `predicted_kld`."""
    predicted_kld: float
    """Sum over all tensors at the types that the level's file gives them, not calibrated."""
    predicted_se: float | None
    """Standard error of `predicted_kld`."""
    measured_kld: float
    """KLD of the level on the same text."""


@dataclass(frozen=True)
class Trust:
    """Predicted against patched KLD of one level's units that have both, embedding and head included."""

    units: int
    """Units that have both figures."""
    top: int
    """Of them, chosen because they were predicted to be the worst."""
    random: int
    """Of them, drawn from all others."""
    spearman: float | None
    """Rank correlation; None below 4 units."""
    slope: float | None
    """Slope of ln patched over ln predicted, least squares; 1 where they are in proportion. None below 4 units."""
    worst: tuple[str, ...]
    """Up to three units with the largest |ln(patched / predicted)| after calibration, worst first."""
