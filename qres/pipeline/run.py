"""A whole scan on one page: check the inputs, make the levels, measure, assemble the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from qres import files
from qres.advice import devices
from qres.errors import CrashError, InputError
from qres.events import Listener, in_mib
from qres.gguf import magnitudes
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.measure.job import REFERENCE, Job, Measured, Preflight
from qres.measure.tasks import CheckTask, MeasureTask
from qres.native import worker
from qres.pipeline import assemble, candidates, estimate, usual_recipes
from qres.pipeline.assemble import Inputs
from qres.pipeline.candidates import Candidate
from qres.pipeline.checks import check_context, given_imatrix, refuse_broken, require_places, zero_matrices
from qres.pipeline.inputs import Given, read_inputs
from qres.pipeline.job import Stamps, worker_job
from qres.pipeline.loadable_copies import with_copies
from qres.pipeline.options import ScanOptions
from qres.pipeline.tokens import hidden_tokens, tokenizer_remarks
from qres.quantize import ladder
from qres.quantize.cache import default_folder
from qres.quantize.original import Original, original, with_digest
from qres.recipes import verify
from qres.records.result import Result, Skipped
from qres.text import source
from qres.text.chunks import Plan

BUILT_IN_CHUNKS = 8
"""Of the built-in text, unless --chunks says otherwise."""
OWN_CHUNKS = 64
"""At most, of a text of the user's, unless --chunks says otherwise: a scan must end the same evening."""


def scan(options: ScanOptions, listener: Listener) -> Result:
    """Run a scan.

    Raises:
        UsageError: unknown level, options that do not go together.
        InputError: a file or text that cannot be used.
        UnsupportedError: a model whose output cannot be measured.
        NativeError: llama.cpp failed or died.
    """
    started = time.monotonic()
    plan = _plan(options)
    given = read_inputs(options.model, options.files, listener)
    for remark in given.remarks:
        listener.warn(remark)
    cache = options.cache or default_folder()
    given = with_copies(given, cache, listener)
    reference = given.reference
    check_context(options, reference)
    with_imatrix = options.imatrix is not None
    wanted = () if given.files else candidates.levels_to_make(options.levels, with_imatrix=with_imatrix)
    if wanted or options.recipe:
        candidates.require_original(reference, recipe=options.recipe and not wanted)
    names = [level.name for level in wanted or candidates.from_files(given.files)]
    require_places(options, (reference, *given.files), names)
    imatrix = given_imatrix(options, (reference, *given.files), listener)
    model = original(reference, imatrix, options.threads)
    stamps: Stamps = {path: files.stamp(path) for one in (reference, *given.files) for path in one.shards}
    flight = _preflight(options, given, plan, listener)
    told = tokenizer_remarks(given, flight.retokenized, as_ids=options.tokens is not None)
    told = (*told, *hidden_tokens(flight.hidden, flight.hidden_names))
    rank = options.rank_chunks
    needs = estimate.estimate(reference, given.files, wanted, options.n_ctx, rank, flight.own, cache / "levels")
    listener.note(str(needs))
    if needs.warning:
        listener.warn(needs.warning)
    values = _values(reference, options.threads, "checking the reference", listener)
    refuse_broken(reference, values, making=bool(wanted))
    told = (*told, *zero_matrices(reference, values))
    for remark in told:
        listener.warn(remark)
    skipped: tuple[Skipped, ...] = ()
    if wanted:
        model = with_digest(model, listener)
        levels, skipped = candidates.made(model, wanted, cache, listener)
        stamps |= {path: files.stamp(path) for one in levels for path in one.inventory.shards}
    else:
        levels = candidates.from_files(given.files, given.changes)
    rungs, no_ladder = ladder.rungs(model)
    listener.stage("comparing the files")
    shared = candidates.shared(levels, listener.step)
    measured = _measure(worker_job(options, reference, levels, flight, values, stamps, imatrix), listener)
    files.require_unchanged(stamps.values())
    inputs = Inputs(
        reference=reference,
        levels=tuple(levels),
        values=values,
        broken=_broken(measured, levels, options.threads, listener),
        shared=shared,
        memory=flight.memory,
        remarks=(*given.remarks, *told),
        skipped=(*skipped, *_no_memory(reference, flight), *no_ladder),
        ladder=rungs,
    )
    elapsed = time.monotonic() - started
    run = assemble.settings(options, measured, flight.texts, elapsed)
    result = usual_recipes.planned(assemble.result(inputs, measured, run))
    if options.recipe and options.out:
        return usual_recipes.built(result, _building(options, plan, model, cache), listener)
    return result


def _building(options: ScanOptions, plan: Plan, model: Original, cache: Path) -> usual_recipes.Building:
    """Recipes are verified on what is left of the text, and where nothing is, of the built-in one."""
    assert options.out is not None
    texts = (plan.text,) if options.tokens else (plan.text, source.built_in("report"), source.built_in("rank"))
    run = verify.VerifyOptions(
        tuple(dict.fromkeys(texts)), usual_recipes.VERIFY_CHUNKS, options.threads, options.n_gpu_layers, cache
    )
    return usual_recipes.Building(model, options.out, run)


# -- before anything is made


def _plan(options: ScanOptions) -> Plan:
    """Which texts to decode: of token ids alone, the end ranks the units."""
    own = source.own(options.text, options.tokens, special=options.special)
    rank_text = None if options.tokens else source.built_in("rank")
    chunks = options.chunks or (OWN_CHUNKS if own else BUILT_IN_CHUNKS)
    held = usual_recipes.VERIFY_CHUNKS if options.recipe else 0
    return Plan(own or source.built_in("report"), rank_text, options.n_ctx, chunks, options.rank_chunks, held)


def _contexts(reference: Inventory) -> list[int]:
    """Context lengths whose memory is reported."""
    trained = reference.n_ctx_train
    return [n for n in devices.CONTEXTS if not trained or n <= trained] or [trained]


def _preflight(options: ScanOptions, given: Given, plan: Plan, listener: Listener) -> Preflight:
    contexts = tuple(_contexts(given.reference))
    others = () if options.tokens else tuple(given.tokenizers)
    files = tuple(one.path for one in given.files)
    task = CheckTask(given.reference.path, plan, contexts, options.n_gpu_layers, options.device, others, files)
    return worker.run(task, listener)


def _no_memory(reference: Inventory, flight: Preflight) -> tuple[Skipped, ...]:
    """Contexts whose memory is not known."""
    trained = reference.n_ctx_train
    beyond = [n for n in devices.CONTEXTS if n not in flight.memory and trained and n > trained]
    rows = tuple(Skipped(f"memory at {n} tokens of context", f"the model was trained for {trained}") for n in beyond)
    return (*rows, Skipped("memory on devices", flight.no_memory)) if flight.no_memory else rows


def _values(model: Inventory, threads: int, title: str, listener: Listener) -> tuple[Magnitudes, ...]:
    """Largest magnitudes and broken values of every tensor."""
    listener.stage(title)
    return magnitudes.scan(model, in_mib(listener), threads)


def _measure(job: Job, listener: Listener) -> Measured:
    """Measure in the worker; a level that takes the process down is left out of another try."""
    while True:
        listener.stage("measuring")
        try:
            return worker.run(MeasureTask(job), listener)
        except CrashError as error:
            files.require_unchanged(stamp for model in (job.reference, *job.levels) for stamp in model.stamps)
            crashed = {**job.crashed, error.working: error.message}
            others = [level for level in job.levels if level.name not in crashed]
            if error.killed or error.working in ("", REFERENCE) or not others:
                raise
            listener.warn(f"{error.working} cannot be measured: {error.message}. Going on without it")
            job = replace(job, crashed=crashed, resume=True)


def _broken(
    measured: Measured, levels: Sequence[Candidate], threads: int, listener: Listener
) -> Mapping[str, tuple[str, ...]]:
    """Tensors with values that are not finite, of the levels whose output is not."""
    bad = {found.model for found in measured.non_finite}
    broken = {}
    for level in levels:
        if level.name in bad:
            with suppress(InputError):  # a file that has gone meanwhile was measured all the same
                values = _values(level.inventory, threads, f"checking {level.name}", listener)
                broken[level.name] = tuple(row.tensor for row in values if row.n_bad)
    return broken
