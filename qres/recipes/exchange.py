"""Which exchanges of types are worth measuring: one tensor is given more bytes, another one pays for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qres.recipes.choices import TensorOptions, padded
from qres.text.chunks import Fresh
from qres.text.source import Source

SIDE_ERROR = 0.35
"""Relative standard error of the predicted change of one tensor alone; units scatter so around the line between
predicted and patched KLD (docs/sensitivity.md)."""
_STEPS = 2
"""Options up and down that a tensor may move."""


@dataclass(frozen=True)
class Step:
    """One tensor from one type to another."""

    tensor: str
    before: str
    after: str
    bytes: int
    """Bytes added; negative for a step down."""
    loss: float
    """Predicted change of the KLD, not calibrated."""


@dataclass(frozen=True)
class Proposal:
    """An exchange that may be worth a trial: a step up, and one down that pays for it."""

    up: Step
    down: Step | None
    """None where the budget has room."""
    hope: float
    """Expected improvement if both predictions are off by `SIDE_ERROR`: what orders the trials."""

    @property
    def loss(self) -> float:
        """Predicted change of both together."""
        return self.up.loss + (self.down.loss if self.down else 0.0)

    @property
    def bytes(self) -> int:
        """Added by both together."""
        return self.up.bytes + (self.down.bytes if self.down else 0)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the exchange: the one up, and the one down where there is one."""
        return (self.up, self.down) if self.down else (self.up,)


def proposals(
    rows: Sequence[TensorOptions], types: Mapping[str, str], room: int, *, is_file: bool = False
) -> list[Proposal]:
    """All exchanges that fit, most promising first.

    Args:
        rows: Options of the tensors that may change.
        types: What they are now.
        room: Bytes that the budget has left.
        is_file: Bytes count as in a file, with padding.
    """
    steps = [step for row in rows for step in _steps(row, types[row.tensor.name], is_file)]
    ups, downs = [step for step in steps if step.bytes > 0], [step for step in steps if step.bytes < 0]
    found = [Proposal(up, None, _hope(up, None)) for up in ups if up.bytes <= room]
    found += [
        Proposal(up, down, _hope(up, down))
        for up in ups
        for down in downs
        if up.tensor != down.tensor and up.bytes + down.bytes <= room
    ]
    return sorted(found, key=lambda one: (-one.hope, one.up.tensor, one.up.after))


def _steps(row: TensorOptions, now: str, is_file: bool) -> Iterator[Step]:
    """To the options next to the present one that no smaller option beats."""
    if now not in row.types:
        return
    ranks = range(len(row.types))
    sensible = [
        k
        for k in ranks
        if not any(row.losses[j] < row.losses[k] and row.bytes[j] <= row.bytes[k] for j in ranks)
        and not any(row.losses[j] == row.losses[k] and row.bytes[j] < row.bytes[k] for j in ranks)
    ]
    here = row.types.index(now)
    below = [k for k in sensible if row.bytes[k] < row.bytes[here]]
    above = [k for k in sensible if row.bytes[k] > row.bytes[here]]
    for k in (*below[-_STEPS:], *above[:_STEPS]):
        after, before = ((padded(row.bytes[i]) if is_file else row.bytes[i]) for i in (k, here))
        yield Step(row.tensor.name, now, row.types[k], after - before, row.losses[k] - row.losses[here])


def _hope(up: Step, down: Step | None) -> float:
    """Mean of max(0, improvement) for a normal distribution around the predicted change."""
    mean = -(up.loss + (down.loss if down else 0.0))
    spread = SIDE_ERROR * math.hypot(up.loss, down.loss if down else 0.0)
    if spread <= 0:
        return max(0.0, mean)
    z = mean / spread
    return mean * 0.5 * math.erfc(-z / math.sqrt(2)) + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


# -- what crosses the border to the worker


@dataclass(frozen=True)
class RefineJob:
    """What the worker is to refine: a recipe's types, and how far it may go."""

    reference: Path
    rows: tuple[TensorOptions, ...]
    """Options of the tensors that may change."""
    types: Mapping[str, str]
    """Tensor -> type, of all tensors that are quantized."""
    room: int
    """Bytes that the budget has left."""
    is_file: bool
    """It is of a file: padding counts."""
    importance: Mapping[str, npt.NDArray[np.float32]]
    sources: tuple[Source, ...]
    used: tuple[str, ...]
    chunks: int
    n_ctx: int
    threads: int
    trials: int
    """Exchanges to measure at most."""


@dataclass(frozen=True)
class Trial:
    """A measured exchange that was kept."""

    proposal: Proposal
    change: float
    change_se: float | None


@dataclass
class Refined:
    """What came of it."""

    types: dict[str, str]
    kld_before: float
    kld_after: float
    tried: int = 0
    kept: list[Trial] = field(default_factory=list)
    text: Fresh = field(default_factory=lambda: Fresh("", ()))
    """What it was measured on."""
    elapsed_s: float = 0.0
