"""The device that torch predicts on."""

from __future__ import annotations

import torch

from qres.errors import UsageError


def require_device(device: str) -> None:
    """Refuse a device that this torch cannot use.

    Args:
        device: As torch names it, such as `cuda` or `cuda:1`.

    Raises:
        UsageError: torch has no such device.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split("\n")[0].split())[:150]
        raise UsageError(
            f"--device {device}: torch cannot use it: {reason}", "leave it out to predict on the CPU"
        ) from None
