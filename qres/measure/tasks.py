"""What the worker process is given to do with models: each task imports what it needs there, and only there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qres.events import Listener
from qres.measure.job import Compared, ComparisonJob, Job, Measured, Preflight
from qres.text.chunks import Fresh, Plan


@dataclass(frozen=True)
class CheckTask:
    """Find out what a second tells about a scan, before anything large is made or loaded."""

    model: Path
    plan: Plan
    contexts: tuple[int, ...]
    """Context lengths whose memory is laid out, in tokens."""
    n_gpu_layers: int
    device: str
    """For the prediction, as torch names it."""
    others: tuple[Path, ...] = ()
    """Files with other tokenizers, to tokenize the same texts with."""
    files: tuple[Path, ...] = ()
    """Given levels: llama.cpp must take one of them at least."""

    def work(self, listener: Listener) -> Preflight:
        """Check, in the worker; raises as `preflight.preflight`."""
        from qres.measure.preflight import preflight

        return preflight(self.model, self.plan, self.contexts, self.n_gpu_layers, self.device, self.others, self.files)


@dataclass(frozen=True)
class RefusalsTask:
    """Ask llama.cpp which files it would load, by their tensors' names and shapes."""

    files: tuple[Path, ...]

    def work(self, listener: Listener) -> dict[Path, str]:
        """Its reason for each file that it refuses."""
        from qres.native.memory import refusal

        found = {path: refusal(path) for path in self.files}
        return {path: reason for path, reason in found.items() if reason}


@dataclass(frozen=True)
class MeasureTask:
    """Measure levels against the reference."""

    job: Job

    def work(self, listener: Listener) -> Measured:
        """Measure, in the worker; raises as `passes.measure`."""
        from qres.measure.passes import measure

        return measure(self.job, listener)


@dataclass(frozen=True)
class CompareTask:
    """Compare files with the reference on text that chose nothing."""

    job: ComparisonJob

    def work(self, listener: Listener) -> tuple[Fresh, list[Compared]]:
        """Compare, in the worker; raises as `compare.compare`."""
        from qres.measure.compare import compare

        return compare(self.job, listener)
