"""Which experts the text reached, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertUse:
    """The experts of one layer of the reference, over all text that was decoded for the figures."""

    layer: int
    """Block number."""
    experts: int
    """Experts in it."""
    unreached: int
    """Those that no token was sent to: nothing is known of them."""
    least: int
    """Tokens that the least used expert got, of those that were reached."""
    most: int
    """Tokens that the most used expert got."""
    unreached_bytes: int
    """Bytes of the reference's tensors that the unreached experts take."""
