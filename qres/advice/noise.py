"""When the noise floor can be taken for one: the reference against itself is noise only while it is small.

Pure functions; every threshold is explained where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qres.records.stream import NoiseFloor

MOST_KLD = 1e-3
"""Nats per token. Sound models differ from themselves by 1e-9 to 1e-5, good levels from the reference by 1e-2 or less:
beyond this the two runs did not compute the same thing. Some models mask tokens in the first row of a decode, others
see less when a chunk comes in halves."""
MOST_DRIFT = 1.0
"""A stream that is off by its own size is another stream."""


def floor(kld: float | None, drift: float | None, points: Sequence[float | None] = ()) -> NoiseFloor:
    """The noise floor of what was measured, each part none with the reason where it cannot be noise.

    Args:
        kld: Mean KLD of the reference against itself, nats per token; None where no position has a finite one.
        drift: Median drift, over its own size; None where no token has a finite one.
        points: The same at each stream point.
    """
    known, moved = _finite(kld), _finite(drift)
    reason, drift_reason = "", ""
    if known is None:
        reason = "the reference against itself has no finite KLD"
    elif known > MOST_KLD:
        reason = (
            f"the reference in two halves differs from itself by a KLD of {known:.2g}, and arithmetic alone by "
            f"{MOST_KLD:g} at most"
        )
    if moved is None:
        drift_reason = "the reference against itself has no finite drift"
    elif moved > MOST_DRIFT:
        drift_reason = f"the reference in two halves drifts from itself by {moved:.2g} times its own size"
    return NoiseFloor(
        kld_mean=None if reason else known,
        drift_median=None if drift_reason else moved,
        drift_points=() if drift_reason else tuple(map(_finite, points)),
        reason=reason,
        drift_reason=drift_reason,
        measured_kld=known,
        measured_drift=moved,
    )


def none(reason: str) -> NoiseFloor:
    """No noise floor, because it was not measured."""
    return NoiseFloor(None, None, reason=reason, drift_reason=reason)


def beside(found: NoiseFloor, klds: Sequence[float | None], drifts: Sequence[float | None]) -> NoiseFloor:
    """The noise floor beside the levels that it is to judge: none where it exceeds even the largest damage.

    A level of 0 is an exact copy: no floor is too large for that one, and it is left aside.

    Args:
        found: As `floor` made it.
        klds: Mean KLD of each level, on the text that the floor is of.
        drifts: Largest median drift of each level.
    """
    worst, moved = (max((x for x in values if x and math.isfinite(x)), default=None) for values in (klds, drifts))
    if found.kld_mean is not None and worst is not None and found.kld_mean > worst:
        reason = (
            f"the reference in two halves differs from itself by a KLD of {found.kld_mean:.2g}, and no level differs "
            f"from it by more than {worst:.2g}"
        )
        found = replace(found, kld_mean=None, reason=reason)
    if found.drift_median is not None and moved is not None and found.drift_median > moved:
        reason = (
            f"the reference in two halves drifts from itself by {found.drift_median:.2g}, and no level drifts from it "
            f"by more than {moved:.2g}"
        )
        found = replace(found, drift_median=None, drift_points=(), drift_reason=reason)
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
