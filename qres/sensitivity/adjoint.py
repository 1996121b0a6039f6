"""The damage of every tensor at every type, from one backward pass through the reference.

Per chunk: record the graph, replay it, compare with llama.cpp's logits, draw labels from the reference's own
distribution, and take their log probability's gradient back through the replay, piece by piece. All chunks pass a piece
before the next one begins: its matrices are then quantized once for all of them, and nothing of it is kept but sums.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qres.arrays import Floats
from qres.errors import UnsupportedError
from qres.events import Listener
from qres.gguf.inventory import Inventory
from qres.metrics.output import scored_positions
from qres.native.graph import Graph
from qres.native.session import Session
from qres.residual.map import ResidualMap
from qres.sensitivity.collector import Collector, InputSquares, empty
from qres.sensitivity.damage import Use, damage
from qres.sensitivity.prediction import PredictionSums, Sums, TensorSums, added
from qres.sensitivity.replay.graph import Replay, Run, Seeds, State
from qres.sensitivity.replay.products import Site
from qres.sensitivity.replay.weights import Weights
from qres.sensitivity.scored import draws, kld, nmse
from qres.text.chunks import Chunk

IMPOSSIBLE_KLD = 1e4
"""Nats per token that no tensor costs: logits would have to change by as much. Gradients that say so mean nothing."""


@dataclass(frozen=True)
class Request:
    """What to predict, of which tensors and types, and how exactly."""

    types: Mapping[str, tuple[str, ...]]
    """Tensor -> types to predict, all of which fit its rows."""
    importance: Mapping[str, Floats]
    """Tensor -> mean squares of its inputs [matrices, weights per row], for the quantizer."""
    draws: int
    device: str
    dtype: str
    """Type of the products within backward: `float32`, `bfloat16`, or `auto` for the faster one.

    The check of the replay is always in float32.
    """
    threads: int
    limit: float
    """Largest KLD between llama.cpp and the replay at which predictions are made."""


def predict(
    reference: Session,
    inventory: Inventory,
    chunks: Sequence[Chunk],
    rmap: ResidualMap | None,
    request: Request,
    listener: Listener,
    inputs: InputSquares | None = None,
) -> PredictionSums:
    """Predict the KLD of giving each tensor each type.

    Args:
        reference: The model, loaded by llama.cpp.
        inventory: Its file.
        chunks: Token ids, all of one length.
        rmap: Where the residual stream is; None where it is not known: tensors then belong to no unit.
        request: What to predict.
        listener: Hears of progress.
        inputs: Filled with what an importance matrix needs; None where none is wanted.

    Returns:
        The prediction; its `reason` says why there is none: an operation that the replay does not know, or logits that
        are not llama.cpp's.

    Raises:
        NativeError: the reference cannot be decoded.
    """
    torch.set_num_threads(request.threads)
    started = time.monotonic()
    work = _Adjoint(reference, inventory, rmap, request, listener, inputs)
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
        listener: Listener,
        inputs: InputSquares | None,
    ) -> None:
        self.reference, self.rmap, self.request, self.listener = reference, rmap, request, listener
        self.weights = Weights(inventory, torch.device(request.device), request.threads)
        self.inputs = inputs
        dtype = _dtype(request)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.found = PredictionSums(limit=request.limit, dtype=dtype)
        self.replay: Replay | None = None
        self.runs: list[Run] = []
        self.labels: list[list[Tensor]] = []
        self.lse: list[Tensor] = []
        self.rows: dict[tuple[str, int | None], Sums] = {}
        self.experts: dict[tuple[str, int | None], dict[int, dict[str, float]]] = {}
        self._done = self._total = 0

    def _step(self, doing: str) -> None:
        self._done += 1
        self.listener.step(min(self._done, self._total), self._total, doing)

    # -- forward

    def replay_all(self, chunks: Sequence[Chunk]) -> None:
        """Replay every chunk and compare it with llama.cpp; `found.reason` is set where they differ."""
        klds: list[float] = []
        errors: list[float] = []
        for number, chunk in enumerate(chunks):
            graph, native = self.reference.record_inputs(chunk, self.weights.names)
            where = scored_positions(len(chunk))
            logits = torch.from_numpy(np.array(native[where]))  # a copy: the buffer is used again
            replay = self._replay_of(graph, len(chunk))
            self._total = len(chunks) * (1 + len(replay.pieces)) + len(self.request.types)
            run = replay.forward(graph.inputs)
            own = run.logits[where].to("cpu", copy=True)
            run.logits = torch.empty(0)  # only its distribution is needed from here on
            klds.append(kld(logits, own))
            errors.append(nmse(logits, own))
            self.found.replay_kld, self.found.replay_nmse = float(np.mean(klds)), float(np.mean(errors))
            if np.isnan(self.found.replay_kld):
                whose = "the reference's own output" if not logits.isfinite().all() else "what the replay computes"
                self.found.reason = f"{whose} is not finite everywhere"
                return
            self.found.hold_to(self.request.limit)
            if not self.found.used:
                return
            self.runs.append(run)
            self.lse.append(own.logsumexp(dim=1).to(self.weights.device))
            self.labels.append(draws(own, self.request.draws, number))
            self.found.counts.append(len(own))
            self._step("replaying the reference")

    def _replay_of(self, graph: Graph, tokens: int) -> Replay:
        """The replay, made of the first chunk's graph; the others must have the same."""
        if self.replay is None:
            self.replay = Replay(graph, self.weights, self.reference.n_vocab, tokens, self.reference.n_layer)
        elif graph.nodes != self.replay.graph.nodes:
            raise UnsupportedError("the graph of one chunk is not that of another")
        return self.replay

    # -- backward

    def go_back(self) -> None:
        """From the logits to the embedding, a piece at a time."""
        assert self.replay is not None
        replay = self.replay
        replay.products_in(self.dtype)
        behind: list[list[State]] = [[] for _ in self.runs]
        for piece in reversed(range(len(replay.pieces))):
            collected: list[dict[Site, Use]] = []
            for i, run in enumerate(self.runs):
                collector = Collector(
                    self.request.types, self.weights, self.dtype, replay.head, self.lse[i], self.inputs
                )
                behind[i] = replay.backward(run, piece, self._seeds(i, piece, behind[i]), collector)
                run.starts[piece] = {}
                collected.append(collector.uses())
                self._step("taking gradients back")
            self._quantize(collected)
        self.found.tensors = [
            TensorSums(tensor, unit, sums, *self._silent(tensor, unit)) for (tensor, unit), sums in self.rows.items()
        ]

    def _silent(self, tensor: str, unit: int | None) -> tuple[int, dict[str, float]]:
        """Experts that no token reached, and what they would add by the median of those that some did."""
        reached = self.experts[tensor, unit]
        silent = self.weights.shape(tensor)[0] - len(reached)
        if not silent:
            return 0, {}
        types = set.intersection(*(set(one) for one in reached.values()))
        return silent, {name: silent * statistics.median(one[name] for one in reached.values()) for name in types}

    def _seeds(self, i: int, piece: int, behind: list[State]) -> Seeds:
        """What backward starts from: at the logits the drawn labels' gradients, elsewhere those of the piece behind."""
        replay, labels, lse = self.replay, self.labels[i], self.lse[i]
        assert replay is not None
        if piece + 1 < len(replay.pieces):
            return lambda _: behind

        def at_logits(state: State) -> list[State]:
            logits = state[replay.result].reshape(-1, replay.n_vocab)
            where = scored_positions(len(logits))
            out = []
            for y in labels:
                g = torch.zeros_like(logits)
                torch.exp(torch.sub(logits[where], lse[:, None], out=g[where]), out=g[where]).neg_()
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
            uses = [use or empty(known) for use in found]
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
            self._require_possible(site.tensor, sums, uses)
            key = site.tensor, self._unit(site)
            self._add(key, sums)
            self._of_expert(key, site.matrix, sums)
            if site.tensor != tensor:
                tensor = site.tensor
                self._step(f"quantizing {tensor}")

    def _require_possible(self, tensor: str, sums: Sums, uses: Sequence[Use]) -> None:
        """No prediction at all is better than one without some tensors: whatever adds up would take them for harmless.

        Raises:
            UnsupportedError: numbers that are no KLD, as gradients that overflow make them.
        """
        largest = max((draw for chunks in sums.values() for draws in chunks for draw in draws), default=0.0)
        if not all(math.isfinite(draw) for chunks in sums.values() for draws in chunks for draw in draws):
            silent = any(use.x.dim() == 2 and bool((use.x == 0).all(dim=1).any()) for use in uses)
            why = " (a token's values are all 0 there: gradients of norms overflow at 0)" if silent else ""
            raise UnsupportedError(f"the backward pass has no finite result for {tensor}{why}")
        if largest / 2 / min(self.found.counts) > IMPOSSIBLE_KLD:
            raise UnsupportedError(
                f"the backward pass predicts more than {IMPOSSIBLE_KLD:,.0f} nats for {tensor}, which no KLD reaches"
            )

    def _add(self, key: tuple[str, int | None], sums: Sums) -> None:
        before = self.rows.get(key)
        if before is None:
            self.rows[key] = sums
        else:  # another expert, or another use; a type that is missing in one of them is not predicted
            self.rows[key] = {name: added([before[name], sums[name]]) for name in before if name in sums}

    def _of_expert(self, key: tuple[str, int | None], matrix: int, sums: Sums) -> None:
        """Keep what each matrix of a tensor adds by itself."""
        own = self.experts.setdefault(key, {}).setdefault(matrix, dict.fromkeys(sums, 0.0))
        for name, rows in sums.items():
            own[name] = own.get(name, 0.0) + self.found.kld(rows)[0]

    def _unit(self, site: Site) -> int | None:
        """The unit that a use belongs to: where several have the tensor, the first that comes after the use."""
        if self.rmap is None or self.replay is None:
            return None
        if site.picks_rows and site.tensor in self.rmap.embedding_weights:
            return 0
        ordinal = self.replay.graph.nodes[site.node].ordinal
        having = [branch for branch in self.rmap.branches if site.tensor in branch.weights]
        after = [branch.index for branch in having if branch.node >= ordinal]
        if after:
            return after[0]
        if site.tensor in self.rmap.head_weights:
            return self.rmap.head.index
        return having[-1].index if having else None


def _dtype(request: Request) -> str:
    """bfloat16 only where it is an instruction: elsewhere it is slower than float32."""
    if request.dtype != "auto":
        return request.dtype
    if request.device != "cpu":
        return "bfloat16"
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return "bfloat16" if any(is_supported and is_supported() for is_supported in known) else "float32"
