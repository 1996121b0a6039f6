"""What predicting costs and how well it predicts, for `make bench`: SmolLM2-135M at Q4_K_M against patching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from qres.events import Logged
from qres.gguf import model_file
from qres.levels import fitting_type
from qres.metrics.means import ChunkMean, spearman
from qres.metrics.output import score, score_reference
from qres.native import blocks
from qres.native.session import Session, SessionOptions
from qres.residual.capture import capture, force, inject
from qres.residual.map import ResidualMap
from qres.residual.trace import trace
from qres.sensitivity.adjoint import Request, predict
from qres.sensitivity.prediction import PredictionSums, added
from qres.text.chunks import Chunk

SIX_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
CHUNKS = 2
LIMIT = 1e-5

Say = Callable[..., None]


class _Memory:
    """Peak of the process's own memory (without mapped files) while it runs, in bytes."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.before = self.peak = self._own()

    def _own(self) -> int:
        used = self._process.memory_info()
        return int(used.rss - used.shared)

    @contextmanager
    def watched(self) -> Iterator[_Memory]:
        """Look a hundred times a second."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                self.peak = max(self.peak, self._own())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()


def measure(files: Sequence[Path], rank: Sequence[Chunk], report: Sequence[Chunk], say: Say) -> None:
    """Print the figures.

    Args:
        files: The reference and Q4_K_M.
        rank: Chunks to predict and patch on.
        report: Chunks of another text.
        say: Prints one figure.
    """
    from tests.bench.run import N_CTX, THREADS, seconds

    options = SessionOptions(N_CTX, THREADS)
    reference, level = Session(files[0], options), Session(files[1], options)
    inventory = model_file.read(files[0])
    names = frozenset(tensor.name for tensor in inventory.tensors)
    held = {tensor.name: tensor.type for tensor in model_file.read(files[1]).tensors}
    rmap = trace(reference.record(rank[0]), names, reference.n_embd, reference.n_vocab, N_CTX)
    types = {
        tensor.name: tuple(dict.fromkeys(fitting_type(name, tensor.row) for name in SIX_TYPES))
        for tensor in inventory.tensors
        if tensor.n_dims > 1
    }

    def run(chunks: Sequence[Chunk], draws: int, of: Mapping[str, tuple[str, ...]]) -> PredictionSums:
        request = Request(of, {}, draws, "cpu", "auto", THREADS, LIMIT)
        return predict(reference, inventory, chunks, rmap, request, Logged())

    plain = sum(seconds(lambda c=chunk: reference.decode(c)) for chunk in rank)  # type: ignore[misc]
    with _timed_quantizer() as quantizing, _Memory().watched() as memory:
        started = time.perf_counter()
        run(rank, 1, types)
        whole = time.perf_counter() - started
    say("prediction, 6 types, less quantizing / plain decodes", (whole - quantizing[0]) / plain, "at most 12")
    logits = 2 * 4 * N_CTX * reference.n_vocab
    weights = sum(tensor.n_weights for tensor in inventory.tensors)
    extra = memory.peak - memory.before
    say("memory of the prediction", extra / 2**20, f"{weights / 4 / 2**20:.0f} and activations", " MiB")
    say("  of it logits and their gradient", logits / 2**20, "", " MiB")

    of_level = {name: (held[name],) for name in types}
    patched, measured = _patched(reference, level, rmap, rank, names)
    for draws in (1, 4):
        found = run(rank, draws, of_level)
        sums = found.level(held)
        pairs = [(found.kld(sums[unit])[0], kld) for unit, kld in patched.items() if unit in sums]
        rank_correlation = spearman([a for a, _ in pairs], [b for _, b in pairs]) or 0.0
        say(f"Spearman with patching all {len(pairs)} units, {draws} draws", rank_correlation, "0.93; 0.95 with 4")
        if draws == 1:
            factor = measured / found.kld(added(sums.values()))[0]
    elsewhere = run(report, 1, of_level)
    total = elsewhere.kld(added(elsewhere.level(held).values()))[0] * factor
    say("calibrated sum / measured, other text", total / _level_kld(reference, level, report), "0.85 to 1.15")


@contextmanager
def _timed_quantizer() -> Iterator[list[float]]:
    """Adds up the time within the quantizer."""
    spent, original = [0.0], blocks.round_trip

    def timed(*args: Any, **kwargs: Any) -> blocks.Floats:  # noqa: ANN401
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    blocks.round_trip = timed
    try:
        yield spent
    finally:
        blocks.round_trip = original


def _patched(
    reference: Session, level: Session, rmap: ResidualMap, chunks: Sequence[Chunk], names: frozenset[str]
) -> tuple[dict[int, float], float]:
    """KLD of every unit patched alone (the head forced), and of the level."""
    level_map = trace(level.record(chunks[0]), names, level.n_embd, level.n_vocab, len(chunks[0]))
    head = len(rmap.branches) + 1
    units: dict[int, ChunkMean] = {i: ChunkMean() for i in range(head + 1)}
    for chunk in chunks:
        snapshot, logits = capture(reference, rmap, chunk)
        scored = score_reference(logits, chunk)
        forced = force(level, level_map, chunk, snapshot)
        units[head].update(score(scored, forced.logits).kld)
        for i, error in enumerate(forced.errors):
            units[i].update(score(scored, inject(reference, rmap, chunk, {i: error})).kld)
    return {i: mean.mean or 0.0 for i, mean in units.items()}, _level_kld(reference, level, chunks)


def _level_kld(reference: Session, level: Session, chunks: Sequence[Chunk]) -> float:
    total = ChunkMean()
    for chunk in chunks:
        scored = score_reference(reference.decode(chunk), chunk)
        total.update(score(scored, level.decode(chunk)).kld)
    return total.mean or 0.0
