"""What runs on which device, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deployment:
    """One level on one device at one context length: calculated, not measured on the device."""

    device: str
    """Name of the class of devices."""
    ram_bytes: int
    """Memory of the device."""
    usable_bytes: int
    """What the device is assumed to leave to one application: half on a phone, 70 % on a laptop."""
    n_ctx: int
    """Context length in tokens."""
    level: str
    """Name of the level."""
    weights_bytes: int
    """Tensor data of the file."""
    cache_bytes: int
    """KV cache (F16) and recurrent state, by llama.cpp's own accounting."""
    compute_bytes: int
    """llama.cpp's compute buffers for a batch of 512 tokens on CPU."""
    needed_bytes: int
    """`weights_bytes`, `cache_bytes` and `compute_bytes` together."""
    fits: bool
    """`needed_bytes` is at most `usable_bytes`."""


@dataclass(frozen=True)
class DeviceAdvice:
    """The level recommended for one device, at 4096 tokens of context or the longest measured below that."""

    device: str
    """Name of the class of devices."""
    n_ctx: int
    """Context length in tokens."""
    level: str | None
    """Name of the level; None when no measured level fits."""
    kld_mean: float | None
    """Its mean KLD."""
    reason: str
    """Why this level."""
