"""What runs on which device, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deployment:
    """One level on one device at one context length."""

    device: str
    ram_bytes: int
    usable_bytes: int
    """What the device is assumed to leave to one application."""
    n_ctx: int
    level: str
    weights_bytes: int
    cache_bytes: int
    compute_bytes: int
    needed_bytes: int
    fits: bool


@dataclass(frozen=True)
class DeviceAdvice:
    """The level recommended for one device."""

    device: str
    n_ctx: int
    level: str | None
    kld_mean: float | None
    reason: str
