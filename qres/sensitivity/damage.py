"""What each type does to one matrix: the weights quantized, and their error seen by the gradients.

With x what a token puts into the matrix and g the gradient of a sampled label's log probability for what comes out, the
predicted KLD of giving the matrix W the type q is 1/(2T) sum_t (g_t . (W_q - W) x_t)^2: the Fisher information of the
output distribution, which the second derivative of the KLD is (docs/sensitivity.md). Squared per position: the square
of the sum over positions has the right mean, but far too much variance.

A quantized matrix also rounds what it is multiplied with, to 8 bits in blocks with one scale each: with x' for the
rounded x, the error is (W_q - W) x' + W (x' - x). Where a few channels are huge, as they are in most models, the second
part can be the larger one.

The output matrix needs no draw: there the same second-order KLD is half the variance of the logits' error under the
reference's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qres.arrays import Floats
from qres.errors import NativeError
from qres.levels import TYPE_TRAITS
from qres.native.blocks import round_trip
from qres.sensitivity.prediction import Sums
from qres.sensitivity.replay.attention import averaged
from qres.sensitivity.replay.products import Mixing, Site
from qres.sensitivity.replay.weights import Weights, blocks


@dataclass
class Use:
    """One chunk's use of one matrix."""

    x: Tensor
    """[n, weights per row], or the numbers of the rows [n]."""
    rounding: dict[int, Tensor] = field(default_factory=dict)
    """What rounding to 8 bits adds to x, by the length of the blocks; for the blocks that fit its rows."""
    gradients: list[Tensor] = field(default_factory=list)
    """One per label draw: [n, rows], or [n, weights per row] for picked rows."""
    mixing: Mixing | None = None
    """How an attention averages what the matrix makes; gradients are then what is left beside that attention."""
    averaged: list[Tensor] = field(default_factory=list)
    """With mixing, gradients of the attention's averages [n3, tokens, heads, dv], one per draw."""
    lse: Tensor | None = None
    """For the output matrix, log sum exp of the logits at the scored positions [n]; there are no gradients then."""


def rounding_block(type_name: str) -> int | None:
    """Channels that share a scale when the input of a matrix of this type is rounded; None for 16 bit.

    `vec_dot_type` in ggml-cpu.c: Q8_K for types with blocks of 256, else Q8_0 or Q8_1, which round alike.
    """
    block = TYPE_TRAITS[type_name].block_size
    return None if block == 1 else (256 if block == 256 else 32)


def rounding_error(x: Tensor, block: int) -> Tensor:
    """What rounding x [n, channels] to 8 bits in blocks adds to it (`quantize_row_q8_0_ref`, `quantize_row_q8_K_ref`).

    Returns:
        Float32 [n, channels].
    """
    parts = x.reshape(len(x), -1, block)
    scale = parts.abs().amax(dim=-1, keepdim=True) / 127
    steps = torch.round(parts / scale.clamp(min=torch.finfo(torch.float32).tiny))
    kept = scale if block == 256 else scale.to(torch.float16).to(torch.float32)
    return (steps * kept - parts).reshape(x.shape)


def damage(
    weights: Weights,
    site: Site,
    uses: Sequence[Use],
    types: Sequence[str],
    importance: Floats | None,
    dtype: torch.dtype,
    threads: int,
) -> Sums:
    """What each type does to one matrix.

    Args:
        weights: Of the reference.
        site: The matrix.
        uses: Of each chunk.
        types: To quantize to, all of which fit its rows.
        importance: Mean squares of its inputs [weights per row], for the quantizer; None without a matrix of them.
        dtype: Of the products; bfloat16 is exact enough for an error's size.
        threads: For the quantizer.

    Returns:
        Sums by type, without types that ggml cannot make of these weights.
    """
    work = _Quantized(weights, site, tuple(types), importance, threads)
    if site.picks_rows:
        sums = _of_rows(work, uses)
    elif uses[0].lse is not None:
        sums = _of_head(work, uses, dtype)
    else:
        sums = _of_product(work, uses, dtype)
    return {name: found for name, found in sums.items() if name not in work.impossible}


@dataclass
class _Quantized:
    """One matrix, and the errors that types make in it."""

    weights: Weights
    site: Site
    types: tuple[str, ...]
    importance: Floats | None
    threads: int
    impossible: set[str] = field(default_factory=set)
    """Types that ggml refused to make of these weights."""

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, int, Tensor]]:
        """First and last row of a block, and its exact weights [rows, weights per row]."""
        _, height, row = self.weights.shape(self.site.tensor)
        for start, stop in [(0, height)] if whole else blocks(height, row):
            yield start, stop, self.weights.rows(self.site.tensor, start, stop, self.site.matrix)

    def errors(self, exact: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each type and what it adds to these weights."""
        values = exact.cpu().numpy()
        made = np.empty_like(values)
        for name in self.types:
            try:
                round_trip(values, name, self.threads, self.importance, made)
            except NativeError:
                self.impossible.add(name)
            else:
                yield name, torch.from_numpy(made).to(exact.device) - exact


def _of_product(work: _Quantized, uses: Sequence[Use], dtype: torch.dtype) -> Sums:
    """Any other matrix: a product of the error with what went in, seen by what came back."""
    effects = {
        name: [[torch.zeros(len(u.x), device=u.x.device) for _ in u.gradients] for u in uses] for name in work.types
    }
    inputs = [_RoundedInput(use, dtype) for use in uses]
    for start, stop, exact in work.blocks(whole=any(use.mixing is not None for use in uses)):
        own = _own_rounding(inputs, exact.to(dtype))
        for name, error in work.errors(exact):
            low = error.to(dtype)
            for use, x, rounded, effect in zip(uses, inputs, own, effects[name], strict=True):
                y = _output_error(x, low, name, rounded)
                for g, sums in zip(use.gradients, effect, strict=True):
                    sums.add_((g[:, start:stop] * y).sum(dim=1))
                if use.mixing is not None:
                    out = mixed(use.mixing, y, dtype)
                    for g, sums in zip(use.averaged, effect, strict=True):
                        sums.add_((g * out).sum(dim=(0, 2, 3)))
    return {
        name: [[float(effect.double().square().sum()) for effect in draws] for draws in chunks]
        for name, chunks in effects.items()
    }


class _RoundedInput:
    """One chunk's input as it is, and rounded to 8 bits in blocks, in the type of the products."""

    def __init__(self, use: Use, dtype: torch.dtype) -> None:
        self.exact = use.x.to(dtype)
        self.error = {block: error.to(dtype) for block, error in use.rounding.items()}
        self.rounded = {block: self.exact + error for block, error in self.error.items()}


def _own_rounding(inputs: Sequence[_RoundedInput], exact: Tensor) -> list[dict[int, Tensor]]:
    """What rounding each input does to the output of the exact matrix [n, rows], by block."""
    return [{block: (error @ exact.T).to(torch.float32) for block, error in one.error.items()} for one in inputs]


def _output_error(x: _RoundedInput, error: Tensor, name: str, own: Mapping[int, Tensor]) -> Tensor:
    """Error of the output [n, rows] with weights that are off by `error`, and the input rounded for their type."""
    block = rounding_block(name)
    if block is None or block not in own:
        return (x.exact @ error.T).to(torch.float32)
    return (x.rounded[block] @ error.T).to(torch.float32) + own[block]


def mixed(mixing: Mixing, y: Tensor, dtype: torch.dtype) -> Tensor:
    """What errors y [tokens, rows] of values become as averages [n3, tokens, heads, dv]."""
    return averaged(mixing.weights.to(dtype), mixing.carry(y).to(dtype)).to(torch.float32)


def _of_rows(work: _Quantized, uses: Sequence[Use]) -> Sums:
    """An embedding: only the rows that the text uses become quantized; the error of a row is what comes out."""
    ids, where = torch.unique(torch.cat([use.x for use in uses]), return_inverse=True)
    places = where.split([len(use.x) for use in uses])
    return {
        name: [
            [float((error[at] * g).sum(dim=1).double().square().sum()) for g in use.gradients]
            for use, at in zip(uses, places, strict=True)
        ]
        for name, error in work.errors(work.weights.picked(work.site.tensor, ids))
    }


def _of_head(work: _Quantized, uses: Sequence[Use], dtype: torch.dtype) -> Sums:
    """The output matrix: variance of the error of the logits under the reference's distribution.

    Row block by row block, so that no second matrix of logits is ever held.
    """
    moments = {  # by type and chunk: sum p d, and sum p d^2 [2, n]
        name: [torch.zeros(2, len(use.x), dtype=torch.float64, device=use.x.device) for use in uses]
        for name in work.types
    }
    inputs = [_RoundedInput(use, dtype) for use in uses]
    for _, _, exact in work.blocks():
        p = [torch.exp(use.x @ exact.T - use.lse[:, None]) for use in uses if use.lse is not None]
        own = _own_rounding(inputs, exact.to(dtype))
        for name, error in work.errors(exact):
            low = error.to(dtype)
            for i, x in enumerate(inputs):
                d = _output_error(x, low, name, own[i])
                pd = p[i] * d
                moments[name][i][0] += pd.sum(dim=1)
                moments[name][i][1] += (pd * d).sum(dim=1)
    return {
        name: [[float((second - first.square()).clamp(min=0).sum())] for first, second in chunks]
        for name, chunks in moments.items()
    }
