"""A recipe made better by measuring: exchanges of types between tensors, tried in the reference's memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qres.cpus import CPUS
from qres.events import Listener
from qres.files import require_unchanged
from qres.native import worker
from qres.quantize.original import Original
from qres.recipes import plan
from qres.recipes.choices import Choices, padded
from qres.recipes.exchange import Refined, RefineJob, Trial
from qres.recipes.wishes import Wishes
from qres.records.recipe import Exchange, Recipe, Refinement
from qres.text.chunks import digest
from qres.text.source import Source, built_in


@dataclass(frozen=True)
class RefineOptions:
    """What to refine on, and for how long."""

    sources: tuple[Source, ...] = field(default_factory=lambda: (built_in("rank"), built_in("report")))
    """The first that has enough unused text is taken."""
    chunks: int = 4
    trials: int = 40
    """Exchanges that are tried at most."""
    threads: int = CPUS


def refine(
    choices: Choices,
    found: Recipe,
    wishes: Wishes,
    original: Original,
    options: RefineOptions,
    listener: Listener,
) -> Recipe:
    """The recipe after the exchanges that paid, which are noted in it; the text they were measured on chose it now.

    Args:
        choices: Of the model.
        found: What to begin with.
        wishes: What it was made with: pins stay.
        original: The model, which the recipe is for, and the recipe's own importance matrix.
        options: Text and limits.
        listener: Hears of progress.

    Raises:
        InputError: no text left that took no part in the recipe, or the model cannot be read.
        NativeError: llama.cpp failed.
    """
    reference, imatrix = original.reference, original.imatrix
    pinned = {tensor.name for tensor in found.tensors if tensor.pinned}
    held = sum(padded(tensor.bytes) if found.limit_is_file else tensor.bytes for tensor in found.tensors)
    free = 0 if found.limit_bytes is None else found.limit_bytes - held
    job = RefineJob(
        reference=reference.path,
        rows=tuple(row for row in choices.rows if row.types and row.tensor.name not in pinned),
        types=found.quantized,
        room=max(0, free),
        is_file=found.limit_is_file,
        importance=imatrix.for_model(reference) if imatrix else {},
        sources=options.sources,
        used=found.selection.chunk_digests,
        chunks=options.chunks,
        n_ctx=found.selection.n_ctx,
        threads=options.threads,
        trials=options.trials,
    )
    listener.stage("refining")
    result = worker.run(_RefineTask(job), listener)
    require_unchanged(original.stamps)
    types = {tensor.name: tensor.type for tensor in found.tensors} | result.types
    changed = plan.of_types(choices, types, found.budget, found.base, wishes)
    tensors = tuple(replace(tensor, pinned=tensor.name in pinned) for tensor in changed.tensors)
    best = found.predicted.raw_kld if found.predicted else 0.0
    raw = changed.predicted.raw_kld if changed.predicted else 0.0
    return replace(
        changed,
        tensors=tensors,
        limit_bytes=found.limit_bytes,
        limit_is_file=found.limit_is_file,
        gap=max(found.gap, (raw - best) / raw if raw else 0.0),
        notes=found.notes,
        selection=replace(
            found.selection,
            chunk_digests=(*found.selection.chunk_digests, *map(digest, result.text.chunks)),
        ),
        refinement=_record(result),
    )


def _record(result: Refined) -> Refinement:
    return Refinement(
        text=result.text.name,
        chunks=len(result.text.chunks),
        tried=result.tried,
        kept=tuple(_exchange(trial) for trial in result.kept),
        kld_before=result.kld_before,
        kld_after=result.kld_after,
        elapsed_s=result.elapsed_s,
    )


def _exchange(trial: Trial) -> Exchange:
    up, down = trial.proposal.up, trial.proposal.down
    return Exchange(
        raised=up.tensor,
        raised_from=up.before,
        raised_to=up.after,
        lowered=down.tensor if down else "",
        lowered_from=down.before if down else "",
        lowered_to=down.after if down else "",
        predicted_change=trial.proposal.loss,
        measured_change=trial.change,
        measured_change_se=trial.change_se,
    )


@dataclass(frozen=True)
class _RefineTask:
    """Try exchanges in the worker: only there is llama.cpp loaded."""

    job: RefineJob

    def work(self, listener: Listener) -> Refined:
        from qres.recipes import refine_work

        return refine_work.refine(self.job, listener)
