"""Which level runs on which device: memory needed against what a device leaves to one application. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qres.advice.verdict import is_good
from qres.records.devices import Deployment, DeviceAdvice
from qres.records.result import Level

CONTEXTS = (2048, 4096, 8192)
ADVICE_CONTEXT = 4096

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A class of devices by the memory they are sold with."""

    name: str
    ram_bytes: int
    share: float
    """Assumed part of the memory that one application can use."""


PHONE_SHARE = 0.5
LAPTOP_SHARE = 0.7
DEVICES = (
    *(Device(f"phone, {n} GB", n * GIB, PHONE_SHARE) for n in (4, 6, 8, 12)),
    *(Device(f"laptop, {n} GB", n * GIB, LAPTOP_SHARE) for n in (8, 16)),
)

ASSUMPTIONS = (
    f"A phone leaves {PHONE_SHARE:.0%} of its memory to one application, a laptop {LAPTOP_SHARE:.0%}: assumptions, not "
    "measurements; a phone with many services running leaves less.",
    "Memory needed = the file's tensor data + the KV cache (F16) or recurrent state + llama.cpp's compute buffers for "
    "a batch of 512 tokens, the last two by llama.cpp's own accounting on CPU. The application itself is not counted.",
    "A level is advised for a device when it is the smallest good one that fits; where no good one fits, the least "
    "damaged that does. Nothing here says how fast it runs.",
)


def deployment(
    levels: Sequence[Level], weights_bytes: Mapping[str, int], memory: Mapping[int, tuple[int, int]]
) -> tuple[Deployment, ...]:
    """Every level on every device at every context length.

    Args:
        levels: As measured.
        weights_bytes: Level name -> bytes of tensor data.
        memory: Context length -> (cache bytes, compute bytes).
    """
    rows = []
    for device in DEVICES:
        usable = int(device.ram_bytes * device.share)
        for n_ctx, (cache, compute) in memory.items():
            for level in levels:
                needed = weights_bytes[level.name] + cache + compute
                rows.append(
                    Deployment(
                        device=device.name,
                        ram_bytes=device.ram_bytes,
                        usable_bytes=usable,
                        n_ctx=n_ctx,
                        level=level.name,
                        weights_bytes=weights_bytes[level.name],
                        cache_bytes=cache,
                        compute_bytes=compute,
                        needed_bytes=needed,
                        fits=needed <= usable,
                    )
                )
    return tuple(rows)


def device_advice(levels: Sequence[Level], rows: Sequence[Deployment]) -> tuple[DeviceAdvice, ...]:
    """One recommended level per device, at ADVICE_CONTEXT or the longest context below it; none without levels."""
    if not levels:
        return ()
    contexts = sorted({row.n_ctx for row in rows if row.n_ctx <= ADVICE_CONTEXT})
    if not contexts:
        return ()
    n_ctx = contexts[-1]
    by_name = {level.name: level for level in levels if level.output.kld_mean is not None and not level.differs}
    out = []
    for device in DEVICES:
        here = [row for row in rows if row.device == device.name and row.n_ctx == n_ctx and row.level in by_name]
        fitting = [by_name[row.level] for row in here if row.fits]
        out.append(_advise(device, n_ctx, fitting, here))
    return tuple(out)


def _advise(device: Device, n_ctx: int, fitting: Sequence[Level], rows: Sequence[Deployment]) -> DeviceAdvice:
    usable = device.ram_bytes * device.share / GIB
    if not rows:
        return DeviceAdvice(device.name, n_ctx, None, None, "no level could be measured")
    if not fitting:
        least = min((row.needed_bytes for row in rows), default=0) / GIB
        reason = f"no measured level fits: the smallest needs {least:.2f} GiB, {usable:.1f} GiB are usable"
        return DeviceAdvice(device.name, n_ctx, None, None, reason)
    good = sorted((level for level in fitting if is_good(level)), key=lambda level: level.file.bytes)
    chosen = good[0] if good else min(fitting, key=lambda level: level.output.kld_mean or 0.0)
    needed = next(row.needed_bytes for row in rows if row.level == chosen.name) / GIB
    why = "smallest good level that fits" if good else "least damaged level that fits; none that fits is good"
    return DeviceAdvice(
        device.name, n_ctx, chosen.name, chosen.output.kld_mean, f"{why}: needs {needed:.2f} of {usable:.1f} GiB usable"
    )
