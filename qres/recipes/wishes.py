"""What a user wants of a recipe beside the budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qres import levels
from qres.errors import UsageError


@dataclass(frozen=True)
class Wishes:
    """What a user wants beside the budget."""

    purpose: str = "any"
    """`any`, or a key of `levels.FAST`."""
    pins: tuple[tuple[str, str], ...] = ()
    """Regular expression, type: for all tensors whose name it is found in; the first that matches counts."""
    level: str | None = None
    """Level that `+0.10bpw` and `--keep-16bit` start from; None for the smallest that was measured."""


def parse_pin(text: str) -> tuple[str, str]:
    """`REGEX=TYPE` in two.

    Raises:
        UsageError: no such type, or no regular expression.
    """
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"--pin {text!r} is not REGEX=TYPE", "give one such as --pin 'ffn_down=Q6_K'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--pin {text!r}: {pattern!r} is no regular expression: {error}",
            "put a backslash before special characters",
        ) from error
    levels.fitting_type(name.upper(), 256 * 128)  # raises where there is no such type
    if name.upper() not in levels.MAKEABLE:
        raise UsageError(f"--pin {text!r}: llama.cpp makes no weights of type {name.upper()}", "take one such as Q6_K")
    return pattern, name.upper()
