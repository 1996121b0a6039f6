"""Keeps what a piece's matrices were given in one chunk, and what gradients came back to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qres.arrays import Floats
from qres.metrics.output import scored_positions
from qres.sensitivity.damage import Use, mixed, rounding_block, rounding_error
from qres.sensitivity.replay.products import Mixing, Site, not_zero
from qres.sensitivity.replay.weights import Weights


@dataclass
class InputSquares:
    """Sums of the squares of what goes into each matrix, for an importance matrix."""

    sums: dict[str, Floats]
    """Tensor -> [matrices, weights per row]."""
    counts: dict[str, Floats]
    """Tensor -> rows that were summed, by matrix."""


class Collector:
    """The `products.ProductTap` that keeps what one piece's matrices were given in one chunk, and what came back."""

    def __init__(
        self,
        types: Mapping[str, tuple[str, ...]],
        weights: Weights,
        dtype: torch.dtype,
        head: int | None,
        lse: Tensor,
        inputs: InputSquares | None,
    ) -> None:
        """Begin a piece of one chunk.

        Args:
            types: Tensor -> types to predict; other tensors are passed over.
            weights: Of the model.
            dtype: What is kept is kept in it.
            head: Node that multiplies with the output matrix, where that gives the logits.
            lse: log sum exp of the chunk's logits at the scored positions [n].
            inputs: Sums for an importance matrix, added to.
        """
        self._types, self._weights, self._dtype = types, weights, dtype
        self._head, self._lse, self._inputs = head, lse, inputs
        self._uses: dict[Site, Use] = {}
        self._known: dict[tuple[int, tuple[int, ...]], Use] = {}

    def enters(self, site: Site, x: Tensor) -> None:
        """Keep what goes into a matrix, and sum its squares for an importance matrix."""
        x = x.detach()
        if self._inputs is not None:
            _sum_squares(self._inputs, site, self._weights.shape(site.tensor)[0], x)
        types = self._types.get(site.tensor, ())
        if not types:
            return
        if site.node == self._head:
            x = x[scored_positions(len(x))]
            self._uses[site] = Use(x, _rounding(x, types), lse=self._lse)
            return
        # Query, key and value read the same memory, which autograd keeps until backward: one copy for all.
        place = (x.data_ptr(), tuple(x.shape))
        if place not in self._known:
            rounding = {block: error.to(self._dtype) for block, error in _rounding(x, types).items()}
            self._known[place] = Use(x.to(self._dtype), rounding)
        self._uses[site] = replace(self._known[place], gradients=[])

    def product(self, site: Site, x: Tensor, g: Tensor) -> None:
        """Keep the gradient that came back to a product, less what came by way of an attention's averages."""
        if not self._types.get(site.tensor) or site.node == self._head:
            return
        if site.picks_rows and site not in self._uses:
            self._uses[site] = Use(x.detach())
        use = self._uses[site]
        if use.mixing is not None:
            g = g - _through(use.mixing, use.averaged[-1], g)
        use.gradients.append(g.to(self._dtype))

    def averages(self, site: Site, mixing: Mixing) -> None:
        """Note how an attention averages what a matrix makes."""
        if site in self._uses:
            low = replace(mixing, weights=mixing.weights.to(self._dtype))
            self._uses[site] = replace(self._uses[site], mixing=low)

    def averaged(self, site: Site, g: Tensor) -> None:
        """Keep the gradient that came back to these averages."""
        if site in self._uses:
            self._uses[site].averaged.append(g)

    def uses(self) -> dict[Site, Use]:
        """Each site's use in the chunk; without those that no gradient came back to."""
        return {site: _trimmed(use) for site, use in self._uses.items() if use.gradients or use.lse is not None}


def _through(mixing: Mixing, averaged: Tensor, like: Tensor) -> Tensor:
    """The part of a matrix's output gradient that came by way of the attention's averages."""
    y = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        out = mixed(mixing, y, torch.float32)
    return torch.autograd.grad(out, y, averaged)[0]


def _rounding(x: Tensor, types: Sequence[str]) -> dict[int, Tensor]:
    """What rounding adds to an input, for the blocks of these types."""
    blocks = {rounding_block(name) for name in types} - {None}
    return {block: rounding_error(x, block) for block in sorted(b for b in blocks if b) if x.shape[1] % block == 0}


def _trimmed(use: Use) -> Use:
    """Without rows that no gradient came back to, as behind the last scored position, where rows are on their own."""
    if use.lse is not None or use.mixing is not None:
        return use
    reached = torch.stack([not_zero(g) for g in use.gradients]).any(dim=0)
    return use if bool(reached.all()) else _rows(use, torch.nonzero(reached).flatten())


def _rows(use: Use, at: Tensor) -> Use:
    return Use(
        use.x[at],
        {block: error[at] for block, error in use.rounding.items()},
        [g[at] for g in use.gradients],
        lse=None if use.lse is None else use.lse[at],
    )


def empty(like: Use) -> Use:
    """The use of a matrix in a chunk that did not use it, as an expert that no token went to: no rows."""
    return _rows(like, torch.empty(0, dtype=torch.int64, device=like.x.device))


def _sum_squares(inputs: InputSquares, site: Site, matrices: int, x: Tensor) -> None:
    sums = inputs.sums.setdefault(site.tensor, np.zeros((matrices, x.shape[1]), np.float32))
    counts = inputs.counts.setdefault(site.tensor, np.zeros(matrices, np.float32))
    sums[site.matrix] += x.square().sum(dim=0).cpu().numpy()
    counts[site.matrix] += len(x)
