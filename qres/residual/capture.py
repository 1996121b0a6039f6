"""One chunk through one model: read the stream, force it, or inject errors into it.

Three runs, all from inside the eval callback, none of which changes how llama.cpp computes (docs/facts.md, 4, 7 and
8):

    capture  reads every stream point and branch of a free-running model
    force    replaces every stream point by the reference's, so that each branch's error is its own weights' alone
    inject   adds given errors to branches of the reference and lets the rest of the model run on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qres.arrays import Floats
from qres.errors import NativeError
from qres.native import ggml
from qres.native.session import Session
from qres.residual.map import ResidualMap

Handler = Callable[[int], None]

EPS = float(np.finfo(np.float32).eps)
IDENTITY_TOLERANCE = 4.0
"""Largest |x_after - (x_before + branches)| in units of float32 rounding of the summands; one add is exact to 0.5."""


@dataclass(frozen=True)
class Snapshot:
    """The residual stream of one chunk in one model."""

    stream: tuple[Floats, ...]
    """M + 1 arrays [n_tokens, n_embd]: the stream after the embedding and after each branch."""
    branches: tuple[Floats, ...]
    """M arrays [n_tokens, n_embd]; branches[j - 1] leads to stream[j]."""
    stream_in: Mapping[int, Floats]
    """Stream operand of the add of branch j where it is not stream[j - 1] (scaled or normed on the way)."""
    arrays: Mapping[int, Floats]
    """All of the above by graph ordinal, for `capture` to read the next chunk into."""

    def entering(self, index: int) -> Floats:
        """The stream as the add of branch `index` (1..M) takes it, [n_tokens, n_embd].

        That is stream[index - 1] after every scale or norm on the way.
        """
        return self.stream_in.get(index, self.stream[index - 1])


@dataclass(frozen=True)
class Forced:
    """What a quantized model computes when every branch gets the reference's input."""

    errors: tuple[Floats, ...]
    """M + 1 arrays [n_tokens, n_embd]: error of the embedding, then of each branch."""
    logits: Floats
    """Logits of the quantized head on the reference's last stream point: its own error. Valid until the next decode."""


class _GraphTap:
    """Calls handlers at given ordinals of the graph, after checking that the graph is still the one that was mapped."""

    def __init__(self, checks: Mapping[int, tuple[str, str]], handlers: Mapping[int, Handler]) -> None:
        self._checks = checks
        self._handlers = handlers
        self._next = 0
        self._current = 0
        self.seen = 0

    def ask(self, _address: int) -> bool:
        self._current = self._next
        self._next += 1
        return self._current in self._handlers

    def see(self, address: int) -> None:
        tensor = ggml.at(address)
        found = (ggml.op_name(tensor.op), tensor.name.decode(errors="replace"))
        if found != self._checks[self._current]:
            raise NativeError(
                f"the compute graph changed: node {self._current} is {found}, it was {self._checks[self._current]}"
            )
        self.seen += 1
        self._handlers[self._current](address)


def _run(
    session: Session,
    checks: Mapping[int, tuple[str, str]],
    tokens: Sequence[int],
    handlers: Mapping[int, Handler],
    start: int = 0,
) -> Floats:
    tap = _GraphTap(checks, handlers)
    logits = session.decode(tokens, tap, start)
    if tap.seen != len(handlers):
        raise NativeError(f"only {tap.seen} of {len(handlers)} graph nodes were computed")
    return logits


def capture(
    session: Session,
    rmap: ResidualMap,
    tokens: Sequence[int],
    start: int = 0,
    reuse: Snapshot | None = None,
    beside: Mapping[int, tuple[tuple[str, str], Handler]] | None = None,
) -> tuple[Snapshot, Floats]:
    """Run the model freely and read its stream.

    Args:
        session: The model.
        rmap: Its residual map.
        tokens: The chunk.
        start: As `Session.decode`.
        reuse: An earlier snapshot of the same map that is no longer needed: its memory is overwritten.
        beside: Other nodes to be looked at: ordinal -> operation and name there, and what is called.

    Returns:
        The snapshot, and the logits [n_tokens, n_vocab] (valid until the next decode).
    """
    values: dict[int, Floats] = {}
    old = reuse.arrays if reuse else {}

    def keep(ordinal: int) -> Handler:
        def handler(address: int) -> None:
            values[ordinal] = ggml.read(address, old.get(ordinal))

        return handler

    handlers = {ordinal: keep(ordinal) for ordinal in rmap.checks}
    other = beside or {}
    checks = {**rmap.checks, **{ordinal: check for ordinal, (check, _) in other.items()}}
    handlers |= {ordinal: handler for ordinal, (_, handler) in other.items()}
    logits = _run(session, checks, tokens, handlers, start)
    stream = [values[rmap.embedding]]
    stream_in = {}
    for branch in rmap.branches:
        if branch.stream_in is not None:
            stream_in[branch.index] = values[branch.stream_in]
        before = stream_in.get(branch.index, stream[-1])  # `Snapshot.entering`, of a snapshot in the making
        # Branches that one add adds together get a stream point each: the sum so far, which llama.cpp never forms.
        stream.append(values[branch.add] if branch.closes else before + values[branch.node])
    return Snapshot(tuple(stream), tuple(values[b.node] for b in rmap.branches), stream_in, values), logits


def identity_error(rmap: ResidualMap, snapshot: Snapshot) -> float:
    """How well stream after = stream before + branches holds.

    Returns:
        The largest |after - (before + branches)| over all residual adds, in units of float32 rounding of
        |before| + |branches|; below `IDENTITY_TOLERANCE` on a correct map.
    """
    worst = 0.0
    total = magnitude = snapshot.stream[0]
    starts = True
    for branch in rmap.branches:
        if starts:
            total = snapshot.entering(branch.index)
            magnitude = np.abs(total)
        added = snapshot.branches[branch.index - 1]
        total = total + added
        magnitude = magnitude + np.abs(added)
        starts = branch.closes
        if branch.closes:
            miss = np.abs(snapshot.stream[branch.index] - total)
            rounding = np.maximum(magnitude * EPS, np.finfo(np.float32).tiny)
            off = miss / rounding
            worst = max(worst, float(np.max(off, where=np.isfinite(off), initial=0.0)))  # NaN is not the map's fault
    return worst


def force(session: Session, rmap: ResidualMap, tokens: Sequence[int], reference: Snapshot) -> Forced:
    """Run a quantized model with every stream point replaced by the reference's.

    Each branch then reads exactly what it reads in the reference, so its difference is what its own weights do.
    """
    errors: dict[int, Floats] = {}
    handlers: dict[int, Handler] = {}

    def embedding(address: int) -> None:
        errors[0] = ggml.read(address)
        errors[0] -= reference.stream[0]
        ggml.write(address, reference.stream[0])

    def measure(index: int) -> Handler:
        def handler(address: int) -> None:
            errors[index] = ggml.read(address)
            errors[index] -= reference.branches[index - 1]

        return handler

    def replace(index: int) -> Handler:
        def handler(address: int) -> None:
            ggml.write(address, reference.stream[index])

        return handler

    handlers[rmap.embedding] = embedding
    for branch in rmap.branches:
        handlers[branch.node] = measure(branch.index)
        if branch.closes:
            handlers[branch.add] = replace(branch.index)
    logits = _run(session, rmap.checks, tokens, handlers)
    return Forced(tuple(errors[i] for i in range(rmap.n_points)), logits)


def inject(session: Session, rmap: ResidualMap, tokens: Sequence[int], errors: Mapping[int, Floats]) -> Floats:
    """Run the reference with errors added to the stream where their branches enter it.

    Args:
        session: The reference model.
        rmap: Its residual map.
        tokens: The chunk.
        errors: Branch index (0 for the embedding) -> error [n_tokens, n_embd].

    Returns:
        Logits [n_tokens, n_vocab], valid until the next decode.
    """
    sums: dict[int, Floats] = {}
    for index, error in errors.items():
        ordinal = rmap.embedding if index == 0 else rmap.branches[index - 1].add
        sums[ordinal] = sums[ordinal] + error if ordinal in sums else error

    def add(error: Floats) -> Handler:
        def handler(address: int) -> None:
            ggml.write(address, ggml.read(address) + error)

        return handler

    return _run(session, rmap.checks, tokens, {ordinal: add(error) for ordinal, error in sums.items()})
