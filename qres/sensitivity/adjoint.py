"""The damage of every tensor at every type, from one backward pass through the reference.

Per chunk: record the graph, replay it, compare with llama.cpp's logits, draw labels from the reference's own
distribution, and take their log probability's gradient back through the replay, piece by piece. All chunks pass a piece
before the next one begins: its matrices are then quantized once for all of them, and nothing of it is kept but sums.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qres.corpus import Chunk
from qres.errors import UnsupportedError
from qres.gguf_file import Inventory
from qres.native.graph import Graph
from qres.native.session import Session
from qres.residual import ResidualMap
from qres.sensitivity.damage import Use, damage, mixed, rounding_block, rounding_error
from qres.sensitivity.linear import Mixing, Site
from qres.sensitivity.prediction import Prediction, Sums, TensorSums, added
from qres.sensitivity.replay import Replay, Run, Seeds, State
from qres.sensitivity.weights import Weights

Floats = npt.NDArray[np.float32]

_HUGE = 1e30
"""Logits beyond this are llama.cpp's way of ruling a token out; no error is measured by them."""


@dataclass(frozen=True)
class Request:
    """What to predict."""

    types: Mapping[str, tuple[str, ...]]
    """Tensor -> types to predict, all of which fit its rows."""
    importance: Mapping[str, Floats]
    """Tensor -> mean squares of its inputs [matrices, weights per row], for the quantizer."""
    draws: int
    device: str
    dtype: str
    """Of products within backward: `float32`, `bfloat16`, or `auto` for the faster one.

    The check of the replay is always in float32.
    """
    threads: int
    limit: float
    """Largest KLD between llama.cpp and the replay at which predictions are made."""


class Events(Protocol):
    """Hears how it gets on."""

    def predicting(self, done: int, total: int, doing: str) -> None:
        """Progress."""


@dataclass
class Inputs:
    """Sums of the squares of what goes into each matrix, for an importance matrix."""

    sums: dict[str, Floats]
    """Tensor -> [matrices, weights per row]."""
    counts: dict[str, Floats]
    """Tensor -> rows that were summed, by matrix."""


def predict(
    reference: Session,
    inventory: Inventory,
    chunks: Sequence[Chunk],
    rmap: ResidualMap | None,
    request: Request,
    events: Events,
    inputs: Inputs | None = None,
) -> Prediction:
    """Predict the KLD of giving each tensor each type.

    Args:
        reference: The model, loaded by llama.cpp.
        inventory: Its file.
        chunks: Token ids, all of one length.
        rmap: Where the residual stream is; None where it is not known: tensors then belong to no unit.
        request: What to predict.
        events: Hears of progress.
        inputs: Filled with what an importance matrix needs; None where none is wanted.

    Returns:
        The prediction; its `reason` says why there is none: an operation that the replay does not know, or logits that
        are not llama.cpp's.

    Raises:
        NativeError: the reference cannot be decoded.
    """
    torch.set_num_threads(request.threads)
    started = time.monotonic()
    work = _Adjoint(reference, inventory, rmap, request, events, inputs)
    try:
        work.replay_all(chunks)
        if work.found.used:
            work.go_back()
    except UnsupportedError as error:
        work.found.reason = error.message
    work.found.elapsed_s = time.monotonic() - started
    return work.found


class _Adjoint:
    """One prediction in the making."""

    def __init__(
        self,
        reference: Session,
        inventory: Inventory,
        rmap: ResidualMap | None,
        request: Request,
        events: Events,
        inputs: Inputs | None,
    ) -> None:
        self.reference, self.rmap, self.request, self.events = reference, rmap, request, events
        self.weights = Weights(inventory, torch.device(request.device), request.threads)
        self.inputs = inputs
        dtype = _dtype(request)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.found = Prediction(limit=request.limit, dtype=dtype)
        self.replay: Replay | None = None
        self.graph: Graph | None = None
        self.runs: list[Run] = []
        self.labels: list[list[Tensor]] = []
        self.lse: list[Tensor] = []
        self.rows: dict[tuple[str, int | None], Sums] = {}
        self._done = self._total = 0

    def _step(self, doing: str) -> None:
        self._done += 1
        self.events.predicting(self._done, self._total, doing)

    # -- forward

    def replay_all(self, chunks: Sequence[Chunk]) -> None:
        """Replay every chunk and compare it with llama.cpp; `found.reason` is set where they differ."""
        self._total = 3 * len(chunks) + 1
        kld, nmse = [], []
        for number, chunk in enumerate(chunks):
            graph, native = self.reference.record_inputs(chunk, self.weights.names)
            logits = torch.from_numpy(np.array(native[_scored(len(chunk))]))  # a copy: the buffer is used again
            replay = self._replay_of(graph, len(chunk))
            self._total = len(chunks) * (1 + len(replay.pieces)) + len(self.request.types)
            run = replay.forward(graph.inputs)
            own = run.logits[_scored(len(chunk))].cpu()
            run.logits = torch.empty(0)  # only its distribution is needed from here on
            kld.append(_kld(logits, own))
            nmse.append(_nmse(logits, own))
            self.found.replay_kld, self.found.replay_nmse = float(np.mean(kld)), float(np.mean(nmse))
            if not self.found.replay_kld <= self.request.limit:
                self.found.reason = (
                    f"its logits are not llama.cpp's: KLD {self.found.replay_kld:.2g}, at most "
                    f"{self.request.limit:.2g} would be arithmetic"
                )
                return
            self.runs.append(run)
            self.lse.append(own.logsumexp(dim=1).to(self.weights.device))
            self.labels.append(_draws(own, self.request.draws, number))
            self.found.counts.append(len(own))
            self._step("replaying the reference")

    def _replay_of(self, graph: Graph, tokens: int) -> Replay:
        """The replay, made of the first chunk's graph; the others must have the same."""
        if self.replay is None or self.graph is None:
            self.graph = graph
            self.replay = Replay(graph, self.weights, self.reference.n_vocab, tokens, self.reference.n_layer)
        elif graph.nodes != self.graph.nodes:
            raise UnsupportedError("the graph of one chunk is not that of another")
        return self.replay

    # -- backward

    def go_back(self) -> None:
        """From the logits to the embedding, a piece at a time."""
        assert self.replay is not None
        self.replay.products_in(self.dtype)
        behind: list[list[State]] = [[] for _ in self.runs]
        for piece in reversed(range(len(self.replay.pieces))):
            collected: list[dict[Site, Use]] = []
            for i, run in enumerate(self.runs):
                collector = _Collector(self, i)
                behind[i] = self.replay.backward(run, piece, self._seeds(i, piece, behind[i]), collector)
                run.starts[piece] = {}
                collected.append(collector.uses())
                self._step("taking gradients back")
            self._quantize(collected)
        self.found.tensors = [TensorSums(tensor, unit, sums) for (tensor, unit), sums in self.rows.items()]

    def _seeds(self, i: int, piece: int, behind: list[State]) -> Seeds:
        """What backward starts from: at the logits the drawn labels' gradients, elsewhere those of the piece behind."""
        replay, labels, lse = self.replay, self.labels[i], self.lse[i]
        assert replay is not None
        if piece + 1 < len(replay.pieces):
            return lambda _: behind

        def at_logits(state: State) -> list[State]:
            logits = state[replay.result].reshape(-1, replay.n_vocab)
            where = _scored(len(logits))
            p = torch.exp(logits[where] - lse[:, None])
            out = []
            for y in labels:
                g = torch.zeros_like(logits)
                g[where] = -p
                g[torch.arange(where.start, where.stop, device=g.device), y.to(g.device)] += 1
                out.append({replay.result: g.reshape(-1)})
            return out

        return at_logits

    # -- the matrices of a piece

    def _quantize(self, collected: Sequence[Mapping[Site, Use]]) -> None:
        sites = sorted({site for one in collected for site in one}, key=lambda s: (s.tensor, s.node, s.matrix))
        tensor = ""
        for site in sites:
            found = [one.get(site) for one in collected]
            known = next(use for use in found if use is not None)
            uses = [use or _empty(known) for use in found]
            importance = self.request.importance.get(site.tensor)
            sums = damage(
                self.weights,
                site,
                uses,
                self.request.types[site.tensor],
                None if importance is None else importance[site.matrix],
                self.dtype,
                self.request.threads,
            )
            self._add((site.tensor, self._unit(site)), sums)
            if site.tensor != tensor:
                tensor = site.tensor
                self._step(f"quantizing {tensor}")

    def _add(self, key: tuple[str, int | None], sums: Sums) -> None:
        before = self.rows.get(key)
        if before is None:
            self.rows[key] = sums
        else:  # another expert, or another use; a type that is missing in one of them is not predicted
            self.rows[key] = {name: added([before[name], sums[name]]) for name in before if name in sums}

    def _unit(self, site: Site) -> int | None:
        """The unit that a use belongs to: where several have the tensor, the first that comes after the use."""
        if self.rmap is None or self.graph is None:
            return None
        if site.picks_rows and site.tensor in self.rmap.embedding_weights:
            return 0
        ordinal = self.graph.nodes[site.node].ordinal
        having = [branch for branch in self.rmap.branches if site.tensor in branch.weights]
        after = [branch.index for branch in having if branch.node >= ordinal]
        if after:
            return after[0]
        if site.tensor in self.rmap.head_weights:
            return len(self.rmap.branches) + 1
        return having[-1].index if having else None


class _Collector:
    """What one piece's matrices were given in one chunk, and what came back to them."""

    def __init__(self, work: _Adjoint, chunk: int) -> None:
        assert work.replay is not None
        self._types = work.request.types
        self._inputs = work.inputs
        self._weights = work.weights
        self._dtype = work.dtype
        self._head = work.replay.head
        self._lse = work.lse[chunk]
        self._uses: dict[Site, Use] = {}
        self._known: dict[tuple[int, tuple[int, ...]], Use] = {}

    def enters(self, site: Site, x: Tensor) -> None:
        """Part of `linear.Tap`."""
        x = x.detach()
        if self._inputs is not None:
            _sum_squares(self._inputs, site, self._weights.shape(site.tensor)[0], x)
        types = self._types.get(site.tensor, ())
        if not types:
            return
        if site.node == self._head:
            x = x[_scored(len(x))]
            self._uses[site] = Use(x, _rounding(x, types), lse=self._lse)
            return
        # Query, key and value read the same memory, which autograd keeps until backward: one copy for all.
        place = (x.data_ptr(), tuple(x.shape))
        if place not in self._known:
            rounding = {block: error.to(self._dtype) for block, error in _rounding(x, types).items()}
            self._known[place] = Use(x.to(self._dtype), rounding)
        self._uses[site] = replace(self._known[place], gradients=[])

    def product(self, site: Site, x: Tensor, g: Tensor) -> None:
        """Part of `linear.Tap`."""
        if site.tensor not in self._types or site.node == self._head:
            return
        if site.picks_rows and site not in self._uses:
            self._uses[site] = Use(x.detach())
        use = self._uses[site]
        if use.mixing is not None:
            g = g - _through(use.mixing, use.averaged[-1], g)
        use.gradients.append(g.to(self._dtype))

    def averages(self, site: Site, mixing: Mixing) -> None:
        """Part of `linear.Tap`."""
        if site in self._uses:
            low = replace(mixing, weights=mixing.weights.to(self._dtype))
            self._uses[site] = replace(self._uses[site], mixing=low)

    def averaged(self, site: Site, g: Tensor) -> None:
        """Part of `linear.Tap`."""
        if site in self._uses:
            self._uses[site].averaged.append(g)

    def uses(self) -> dict[Site, Use]:
        """By site; without rows that no gradient came back to, as behind the last scored position."""
        reached = {site: use for site, use in self._uses.items() if use.gradients or use.lse is not None}
        return {
            site: use if use.lse is not None or use.mixing is not None else _trimmed(use)
            for site, use in reached.items()
        }


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
    reached = torch.stack([g.abs().amax(dim=1) for g in use.gradients]).amax(dim=0) > 0
    return use if bool(reached.all()) else _rows(use, torch.nonzero(reached).flatten())


def _rows(use: Use, at: Tensor) -> Use:
    return Use(
        use.x[at],
        {block: error[at] for block, error in use.rounding.items()},
        [g[at] for g in use.gradients],
        None if use.lse is None else use.lse[at],
    )


def _empty(like: Use) -> Use:
    """Of a chunk that did not use a matrix: no token went to that expert."""
    return _rows(like, torch.empty(0, dtype=torch.int64, device=like.x.device))


def _sum_squares(inputs: Inputs, site: Site, matrices: int, x: Tensor) -> None:
    sums = inputs.sums.setdefault(site.tensor, np.zeros((matrices, x.shape[1]), np.float32))
    counts = inputs.counts.setdefault(site.tensor, np.zeros(matrices, np.float32))
    sums[site.matrix] += x.square().sum(dim=0).cpu().numpy()
    counts[site.matrix] += len(x)


def _dtype(request: Request) -> str:
    """bfloat16 only where it is an instruction: elsewhere it is slower than float32."""
    if request.dtype != "auto":
        return request.dtype
    if request.device != "cpu":
        return "bfloat16"
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return "bfloat16" if any(is_supported and is_supported() for is_supported in known) else "float32"


def _scored(tokens: int) -> slice:
    """The scored positions: the second half, less the last token (`metrics.score_reference`)."""
    return slice(tokens // 2, tokens - 1)


def _draws(logits: Tensor, count: int, chunk: int) -> list[Tensor]:
    """Labels drawn from the model's own distribution [positions], the same ones in every run."""
    generator = torch.Generator().manual_seed(chunk)
    cumulative = logits.softmax(dim=1).cumsum(dim=1)
    at = torch.rand(len(logits), count, generator=generator) * cumulative[:, -1:]
    return list(torch.searchsorted(cumulative, at).clamp(max=logits.shape[1] - 1).unbind(1))


def _few(rows: Tensor) -> list[Tensor]:
    """A few MB of logits at a time."""
    return [rows[i : i + 16] for i in range(0, len(rows), 16)]


def _kld(reference: Tensor, other: Tensor) -> float:
    """Mean KL(reference || other) over the rows; sums in float64."""
    total = 0.0
    for p, q in zip(_few(reference), _few(other), strict=True):
        a, b = p.double().log_softmax(dim=1), q.double().log_softmax(dim=1)
        terms = a.exp() * (a - b)
        total += float(terms.where(a != -torch.inf, 0.0).sum())
    return total / len(reference)


def _nmse(reference: Tensor, other: Tensor) -> float:
    """Squared error over the variance of the reference, tokens that it rules out left aside; sums in float64."""
    n = first = second = error = 0.0
    for a, b in zip(_few(reference), _few(other), strict=True):
        usual = a.abs() < _HUGE
        x, y = a.where(usual, 0.0).double(), b.where(usual, 0.0).double()
        n += float(usual.sum())
        first += float(x.sum())
        second += float(x.square().sum())
        error += float((x - y).square().sum())
    return error / (second - first * first / n)
