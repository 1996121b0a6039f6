"""Files against the reference on a text, inside the worker: what each does to the output and to the end of the stream.

Less than a scan: every file only runs freely. The files are taken a few at a time, so that memory does not grow with
their number; the reference is decoded again for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from qres.arrays import Floats
from qres.errors import QresError
from qres.events import Listener
from qres.measure.job import Compared, ComparisonJob
from qres.measure.preflight import fresh_text
from qres.metrics.output import score, score_reference
from qres.native.session import Session, SessionOptions
from qres.residual.capture import Snapshot, capture
from qres.residual.drift import norms, reference_norms
from qres.residual.map import ResidualMap
from qres.residual.trace import trace
from qres.text.chunks import Chunk, Fresh

GROUP = 3
"""Files beside the reference in memory."""


def compare(job: ComparisonJob, listener: Listener) -> tuple[Fresh, list[Compared]]:
    """Run a job.

    Returns:
        The text, and the statistics of each file.

    Raises:
        InputError: no text that was not used.
        QresError: a model that cannot be loaded or measured.
    """
    text = fresh_text(job.reference, job.sources, job.n_ctx, job.used, job.chunks)
    chunks = text.chunks
    groups = [job.files[i : i + GROUP] for i in range(0, len(job.files), GROUP)]
    total = len(chunks) * (len(groups) + len(job.files))
    found: list[Compared] = []
    done = 0
    options = SessionOptions(job.n_ctx, job.threads, job.n_gpu_layers)
    with Session(job.reference, options) as reference:
        for files in groups:
            with ExitStack() as stack:
                models = [_Model(stack.enter_context(Session(path, options))) for path in files]
                for doing in _decodes(_Model(reference), models, chunks, job):
                    done += 1
                    listener.step(done, total, doing)
                found += [model.compared for model in models]
    return text, found


@dataclass
class _Model:
    """A session, and what is found about it."""

    session: Session
    compared: Compared = field(default_factory=Compared)
    rmap: ResidualMap | None = None

    def decode(self, chunk: Chunk) -> tuple[Floats, Snapshot | None]:
        """Logits, and the stream where it is mapped."""
        if self.rmap is None:
            return self.session.decode(chunk), None
        snapshot, logits = capture(self.session, self.rmap, chunk)
        return logits, snapshot


def _decodes(reference: _Model, models: Sequence[_Model], chunks: Sequence[Chunk], job: ComparisonJob) -> Iterator[str]:
    """All chunks through all models; yields after every decode."""
    _map((reference, *models), chunks[0], job.weights)
    for chunk in chunks:
        logits, own = reference.decode(chunk)
        scored = score_reference(logits, chunk)
        known = reference_norms(own, job.threads) if own else None
        yield "reference"
        for model in models:
            logits, other = model.decode(chunk)
            model.compared.output.update(score(scored, logits))
            if own and other and known:
                drift = norms(other.stream[-1] - own.stream[-1])[known.plain] / known.stream[-1][known.plain]
                model.compared.drift.update(drift.reshape(1, -1))
            yield model.session.path.name


def _map(models: Sequence[_Model], chunk: Chunk, weights: frozenset[str]) -> None:
    """Map all streams; of those that are not mapped, only the output is compared."""
    try:
        for model in models:
            session = model.session
            model.rmap = trace(session.record(chunk), weights, session.n_embd, session.n_vocab, len(chunk))
    except QresError:
        for model in models:
            model.rmap = None
