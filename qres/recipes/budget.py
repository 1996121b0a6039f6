"""What a recipe may cost, as users write it: a size, bits per weight, a level's size, or a KLD."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from qres import levels
from qres.errors import UsageError

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_FORMS = "same-as:Q4_K_M, 4.9bpw, +0.10bpw, 1.2GiB or kld:0.01"


@dataclass(frozen=True)
class Budget:
    """One limit; the fields that it does not use are None."""

    text: str
    """As it was given."""
    level: str | None = None
    """No more bytes than this level."""
    bpw: float | None = None
    """Bits per weight over all tensors."""
    more_bpw: float | None = None
    """Bits per weight beyond the level that recipes start from."""
    file_bytes: int | None = None
    kld: float | None = None
    """Calibrated KLD that is not to be exceeded: as few bytes as do."""


def parse(text: str) -> Budget:
    """The budget of that spelling; case and spaces do not matter.

    Raises:
        UsageError: none of the forms, an unknown level, or a number that is no limit.
    """
    spelled = re.sub(r"\s+", "", text)
    word = spelled.lower()
    if word.startswith("same-as:"):
        return Budget(text.strip(), level=levels.parse(spelled[len("same-as:") :]).name)
    if match := re.fullmatch(rf"kld:{_NUMBER}(e[+-]?\d+)?", word):
        return Budget(text.strip(), kld=_positive(text, match[1] + (match[2] or "")))
    if match := re.fullmatch(rf"(\+?){_NUMBER}bpw", word):
        value = _positive(text, match[2])
        return Budget(text.strip(), more_bpw=value) if match[1] else Budget(text.strip(), bpw=value)
    if match := re.fullmatch(rf"{_NUMBER}([kmg]i?b|b)", word):
        return Budget(text.strip(), file_bytes=math.floor(_positive(text, match[1]) * _UNITS[match[2]]))
    raise UsageError(f"{text!r} is not a budget", f"give one such as {_FORMS}")


def _positive(text: str, number: str) -> float:
    value = float(number)
    if not 0 < value < 1e15:
        raise UsageError(f"the budget {text!r} is no limit", f"give one such as {_FORMS}")
    return value
