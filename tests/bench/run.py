"""`make bench`: what measuring costs, as ratios of one run. Machines are noisy; ratios of interleaved runs are less so.

Prints one line per figure with the bound it should keep. Nothing here is a test: a busy machine may miss a bound.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from qres.events import Logged
from qres.gguf import model_file
from qres.measure.lockstep import Lockstep
from qres.measure.progress import DecodeProgress
from qres.measure.state import State
from qres.native.memory import layout
from qres.native.quantizer import quantize
from qres.native.session import Session, SessionOptions
from qres.native.vocabulary import Vocabulary
from qres.pipeline import demo
from qres.residual.capture import Snapshot, capture, force, inject
from qres.residual.trace import trace
from qres.text import chunks, source
from tests.bench import prediction as bench_prediction
from tests.bench import recipe as bench_recipe

N_CTX, ROUNDS, THREADS = 512, 7, os.cpu_count() or 2
UNITS = 8


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def say(what: str, value: float, bound: str, unit: str = "") -> None:
    """One figure."""
    sys.stdout.write(f"{what:62} {value:8.3f}{unit}   {bound}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    libraries = _peak_bytes()
    say("qres --help", min(seconds(_help) for _ in range(5)), "below 0.3", " s")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files = [demo.reference(home)]
        for name, ftype in (("Q4_K_M", 15), ("Q5_K_M", 17)):
            files.append(home / f"{name}.gguf")
            quantize(files[0], files[-1], ftype, THREADS)
        _measure(files, libraries)
        texts = [_chunks(files[0], name) for name in ("rank", "report")]
        bench_prediction.measure(files, texts[0], texts[1], say)
        bench_recipe.measure(files[0], THREADS, say)


def _chunks(model: Path, text: str) -> list[chunks.Chunk]:
    """The first chunks of a built-in text."""
    with layout(model) as laid_out:
        ids = Vocabulary(laid_out, model.name).tokenize(source.built_in(text).text or b"")
    return list(chunks.chunk(ids, N_CTX, None, bench_prediction.CHUNKS).chunks)


def _help() -> None:
    subprocess.run([sys.executable, "-m", "qres", "--help"], check=True, capture_output=True)


def _measure(files: list[Path], libraries: int) -> None:
    options = SessionOptions(N_CTX, THREADS)
    reference, *levels = (Session(path, options) for path in files)
    with layout(files[0]) as model:
        ids = Vocabulary(model, files[0].name).tokenize(source.built_in("report").text or b"")
    chunk = chunks.chunk(ids, N_CTX, None, 1).chunks[0]
    weights = frozenset(tensor.name for tensor in model_file.read(files[0]).tensors)
    rmap = trace(reference.record(chunk), weights, reference.n_embd, reference.n_vocab, N_CTX)
    level_map = trace(levels[0].record(chunk), weights, reference.n_embd, reference.n_vocab, N_CTX)
    snapshots: list[Snapshot] = [capture(reference, rmap, chunk)[0]]

    plain, captured = [], []
    for _ in range(ROUNDS):
        plain.append(seconds(lambda: reference.decode(chunk)))
        captured.append(seconds(lambda: capture(reference, rmap, chunk, reuse=snapshots[0])))
    say("capture / plain decode, reference", _ratio(captured, plain), "at most 1.05")

    plain, captured, forced, injected = [], [], [], []
    snapshots.append(capture(levels[0], level_map, chunk)[0])
    for _ in range(ROUNDS):
        plain.append(seconds(lambda: levels[0].decode(chunk)))
        captured.append(seconds(lambda: capture(levels[0], level_map, chunk, reuse=snapshots[1])))
        forced.append(seconds(lambda: force(levels[0], level_map, chunk, snapshots[0])))
    say("capture / plain decode, Q4_K_M", _ratio(captured, plain), "at most 1.05")
    say("forced / plain decode, Q4_K_M", _ratio(forced, plain), "")
    errors = {30: force(levels[0], level_map, chunk, snapshots[0]).errors[30]}
    plain = []
    for _ in range(ROUNDS):
        plain.append(seconds(lambda: reference.decode(chunk)))
        injected.append(seconds(lambda: inject(reference, rmap, chunk, errors)))
    say("one unit injected / plain decode, reference", _ratio(injected, plain), "")
    snapshots.clear()
    errors.clear()
    _whole(reference, levels, chunk, weights)
    mapped = sum(path.stat().st_size for path in files)
    say("peak memory beyond the model files", (_peak_bytes() - mapped) / 2**30, "at most 1.5", " GiB")
    say("  of it Python and its libraries, torch the most", libraries / 2**30, "", " GiB")


def _peak_bytes() -> int:
    """Most memory that this process has had at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _whole(reference: Session, levels: list[Session], chunk: chunks.Chunk, weights: frozenset[str]) -> None:
    """A chunk of a scan (reference, two levels twice, units) against the plain decodes it needs."""
    lockstep = Lockstep(
        reference,
        ("a", "b"),
        dict(enumerate(levels)),
        THREADS,
        DecodeProgress(Logged()),
        weights,
        (False, False),
        State(),
    )
    lockstep.map_streams(chunk)
    stats = lockstep.new_stats()

    def measured() -> None:
        run = lockstep.run_chunk(chunk, "the chunk", stats)
        for i in range(len(levels)):
            lockstep.patch(run, i, range(1, UNITS + 1), stats[i])

    def plain() -> None:
        reference.decode(chunk)
        for level in levels:
            level.decode(chunk)
            level.decode(chunk)
        for _ in range(len(levels) * (UNITS + 1)):
            reference.decode(chunk)

    pairs = [(seconds(plain), seconds(measured)) for _ in range(3)]
    bound = "at most 1.15"
    say("measuring / the plain decodes it needs, SmolLM2-135M", statistics.median(b / a for a, b in pairs), bound)


def _ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios of neighbouring runs."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
