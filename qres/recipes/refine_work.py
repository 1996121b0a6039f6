"""Exchanges measured inside the worker: the reference with its weights rounded to a recipe's types, and changed again.

The weights are overwritten where llama.cpp holds them, so that no file is made for a trial. What is not measured is the
rounding of activations that llama.cpp does in front of quantized matrices, which is about the same for all types.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qres.events import Listener
from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.measure.preflight import fresh_text
from qres.metrics.means import ChunkMean, paired_se
from qres.metrics.output import Scored, score, score_reference
from qres.native import blocks
from qres.native.session import Session, SessionOptions
from qres.recipes.exchange import Refined, RefineJob, Step, Trial, proposals
from qres.text.chunks import Chunk

Floats = npt.NDArray[np.float32]

PATIENCE = 10
"""Trials in a row without a gain that end it."""


def refine(job: RefineJob, listener: Listener) -> Refined:
    """Try exchanges while they pay.

    Raises:
        InputError: no text left.
        NativeError: llama.cpp failed.
    """
    started = time.monotonic()
    text = fresh_text(job.reference, job.sources, job.n_ctx, job.used, job.chunks)
    with Session(job.reference, SessionOptions(job.n_ctx, job.threads, writable=True)) as session:
        model = _Rounded(session, job, text.chunks)
        for done, (name, kind) in enumerate(job.types.items()):
            listener.step(done, len(job.types), f"rounding {name}")
            model.give(name, kind)
        before = model.measure()
        found = Refined(dict(job.types), before.mean or 0.0, before.mean or 0.0)
        _search(job, model, before, found, listener)
    found.text = text
    found.elapsed_s = round(time.monotonic() - started, 1)
    return found


def _search(job: RefineJob, model: _Rounded, before: ChunkMean, found: Refined, listener: Listener) -> None:
    room, failures = job.room, 0
    failed: Counter[Step] = Counter()
    seen: set[tuple[Step, ...]] = set()
    queue = proposals(job.rows, found.types, room, is_file=job.is_file)
    while found.tried < job.trials and failures < PATIENCE:
        left = [one for one in queue if one.steps not in seen]
        if not left:
            break
        # A step that took part in failures is half as promising after each: others have not been looked at yet.
        one = max(left, key=lambda one: one.hope * 0.5 ** sum(failed[step] for step in one.steps))
        seen.add(one.steps)
        for step in one.steps:
            model.give(step.tensor, step.after)
        after = model.measure()
        found.tried += 1
        change, se = (after.mean or 0.0) - (before.mean or 0.0), paired_se(after, before)
        if change + (se or 0.0) < 0:  # by more than its standard error
            found.kept.append(Trial(one, change, se))
            found.types |= {step.tensor: step.after for step in one.steps}
            before, room, failures = after, room - one.bytes, 0
            queue = proposals(job.rows, found.types, room, is_file=job.is_file)
        else:
            failures += 1
            failed.update(one.steps)
            for step in one.steps:
                model.give(step.tensor, step.before)
        listener.step(found.tried, job.trials, f"exchanges, {len(found.kept)} kept")
    found.kld_after = before.mean or 0.0


class _Rounded:
    """The reference with its weights rounded to types."""

    def __init__(self, session: Session, job: RefineJob, chunks: Sequence[Chunk]) -> None:
        inventory = model_file.read(job.reference)
        self._session, self._job, self._chunks = session, job, chunks
        self._inventory: Inventory = inventory
        self._tensors = {tensor.name: tensor for tensor in inventory.tensors}
        self._places = session.find_weights(chunks[0], frozenset(self._tensors))
        self._known: list[Scored] = [score_reference(session.decode(chunk), chunk) for chunk in chunks]

    def give(self, name: str, kind: str) -> None:
        """Round a tensor to a type, from its exact values."""
        tensor = self._tensors[name]
        exact = self._exact(name)
        importance = self._job.importance.get(name)
        made = exact
        if kind not in ("F32", tensor.type):
            made = np.concatenate(
                [
                    blocks.round_trip(part, kind, self._job.threads, None if importance is None else importance[i])
                    for i, part in enumerate(exact)
                ]
            )
        data = blocks.quantize(made.reshape(-1, tensor.row), tensor.type, self._job.threads).reshape(-1)
        for address in self._places.get(name, ()):
            self._session.overwrite(address, data)

    def _exact(self, name: str) -> Floats:
        """The file's values [matrices, rows, weights per row]."""
        tensor = self._tensors[name]
        path = self._inventory.shards[tensor.shard]
        raw = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.n_bytes or 0,))
        height = tensor.shape[1] if len(tensor.shape) > 1 else 1
        values = blocks.dequantize(
            np.asarray(raw).reshape(tensor.n_weights // tensor.row, -1), tensor.type, tensor.row, self._job.threads
        )
        return values.reshape(-1, height, tensor.row)

    def measure(self) -> ChunkMean:
        """KLD against the exact reference."""
        found = ChunkMean()
        for chunk, known in zip(self._chunks, self._known, strict=True):
            found.update(score(known, self._session.decode(chunk)).kld)
        return found
