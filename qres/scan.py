"""A whole scan on one page: check the inputs, make the levels, measure, assemble the result."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from qres import (
    __version__,
    assemble,
    candidates,
    corpus,
    deploy,
    estimate,
    file_stamp,
    ladder,
    level_cache,
    recipes,
    tensor_values,
    verify,
)
from qres import imatrix as importance_matrix
from qres.assemble import Inputs
from qres.candidates import Candidate, Listener
from qres.errors import CrashError, InputError, UnsupportedError, UsageError
from qres.file_stamp import Stamp
from qres.gguf_cursor import show
from qres.gguf_file import Inventory
from qres.imatrix import Imatrix
from qres.job import REFERENCE, STATE_NAME, Job, Measured, Note, PredictionJob, Preflight, Progress, Stage, Working
from qres.native import worker
from qres.records import Result, Skipped
from qres.tensor_values import TensorValues


@dataclass(frozen=True)
class ScanOptions:
    """What `qres scan` was asked for."""

    model: Path
    files: tuple[Path, ...] = ()
    """Quantized files to measure; empty to make `levels` instead."""
    levels: tuple[str, ...] = ("Q4_K_M", "Q5_K_M")
    text: Path | None = None
    tokens: Path | None = None
    n_ctx: int = 512
    chunks: int | None = None
    rank_chunks: int = 4
    all_units: bool = False
    threads: int = 4
    n_gpu_layers: int = 0
    draws: int = 1
    """Label draws per chunk, for the prediction."""
    device: str = "cpu"
    """Where the prediction is computed."""
    dtype: str = "auto"
    """What it multiplies in."""
    imatrix: Path | None = None
    """Importance matrix to make levels with."""
    make_imatrix: Path | None = None
    """Where to write an importance matrix of the model."""
    recipe: bool = False
    """Build and verify recipes for the default budgets, in the folder `recipes` of `out`."""
    cache: Path | None = None
    out: Path | None = None
    """Folder for the state of an unfinished scan; None keeps none."""
    resume: bool = False


BUILT_IN_CHUNKS = 8
"""Of the built-in text, unless --chunks says otherwise."""
OWN_CHUNKS = 64
"""At most, of a text of the user's, unless --chunks says otherwise: a scan must end the same evening."""

Stamps = dict[Path, Stamp]


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
    given = candidates.given(options.model, options.files, listener.note)
    reference = given.reference
    for remark in given.remarks:
        listener.warn(remark)
    _check_context(options, reference)
    with_imatrix = options.imatrix is not None
    wanted = () if given.files else candidates.levels_to_make(options.levels, with_imatrix=with_imatrix)
    if wanted:
        candidates.require_16bit(reference)
    imatrix = _imatrix(options, (reference, *given.files), listener)
    stamps: Stamps = {path: file_stamp.stamp(path) for one in (reference, *given.files) for path in one.shards}
    cache = options.cache or level_cache.default_folder()
    flight = _preflight(options, reference, plan)
    rank = options.rank_chunks
    needs = estimate.estimate(reference, given.files, wanted, options.n_ctx, rank, flight.own, cache / "levels")
    listener.note(str(needs))
    if needs.warning:
        listener.warn(needs.warning)
    values = _values(reference, options.threads, "checking the reference", listener)
    _refuse_broken(reference, values, making=bool(wanted))
    skipped: tuple[Skipped, ...] = ()
    if wanted:
        before = tuple(stamps.values())
        levels, skipped = candidates.made(reference, wanted, cache, options.threads, listener, before, imatrix)
        stamps |= {path: file_stamp.stamp(path) for one in levels for path in one.inventory.shards}
    else:
        levels = candidates.from_files(given.files)
    rungs, no_ladder = ladder.rungs(reference, options.threads, imatrix)
    listener.stage("comparing the files", None)
    shared = candidates.shared(levels, listener.step)
    measured = _measure(_job(options, reference, levels, flight, values, stamps, imatrix), listener)
    file_stamp.require_unchanged(stamps.values())
    inputs = Inputs(
        reference=reference,
        levels=tuple(levels),
        values=values,
        broken=_broken(measured, levels, options.threads, listener),
        shared=shared,
        memory=flight.memory,
        remarks=given.remarks,
        skipped=(*skipped, *_no_memory(reference, flight), *no_ladder),
        ladder=rungs,
    )
    elapsed = time.monotonic() - started
    run = assemble.settings(options.threads, options.n_gpu_layers, options.all_units, measured, flight.texts, elapsed)
    result = recipes.planned(assemble.result(inputs, measured, run))
    if options.recipe and options.out:
        return recipes.built(result, _building(options, plan, reference, imatrix, cache), listener)
    return result


def _building(
    options: ScanOptions, plan: corpus.Plan, reference: Inventory, imatrix: Imatrix | None, cache: Path
) -> recipes.Building:
    """Recipes are verified on what is left of the text, and where nothing is, of the built-in one."""
    assert options.out is not None
    texts = (plan.text,) if options.tokens else (plan.text, corpus.built_in("report"), corpus.built_in("rank"))
    run = verify.VerifyOptions(
        tuple(dict.fromkeys(texts)), recipes.VERIFY_CHUNKS, options.threads, options.n_gpu_layers, cache
    )
    return recipes.Building(reference, imatrix, options.out, run)


# -- before anything is made


def _plan(options: ScanOptions) -> corpus.Plan:
    """Which texts to decode."""
    if options.text and options.tokens:
        raise UsageError("--text and --tokens exclude each other", "give one of them")
    if options.tokens:
        text, rank_text = corpus.read_ids(options.tokens), None
    elif options.text:
        text, rank_text = corpus.read_text(options.text), corpus.built_in("rank")
    else:
        text, rank_text = corpus.built_in("report"), corpus.built_in("rank")
    own = options.text or options.tokens
    chunks = options.chunks or (OWN_CHUNKS if own else BUILT_IN_CHUNKS)
    held = recipes.VERIFY_CHUNKS if options.recipe else 0
    return corpus.Plan(text, rank_text, options.n_ctx, chunks, options.rank_chunks, held)


def _check_context(options: ScanOptions, reference: Inventory) -> None:
    """llama.cpp aborts the process when some architectures run past their trained context."""
    if 0 < reference.n_ctx_train < corpus.MIN_TOKENS:
        raise UnsupportedError(
            f"{reference.path.name} was trained for {reference.n_ctx_train} tokens, too few to measure",
            f"at least {corpus.MIN_TOKENS} are needed",
        )
    if options.n_ctx % 2 or options.n_ctx < corpus.MIN_TOKENS:
        raise UsageError(
            f"--n-ctx {options.n_ctx} is not an even number of at least {corpus.MIN_TOKENS}", "give one, such as 512"
        )
    if reference.n_ctx_train and options.n_ctx > reference.n_ctx_train:
        raise InputError(
            f"--n-ctx {options.n_ctx}: {reference.path.name} was trained for {reference.n_ctx_train} tokens at most",
            f"use --n-ctx {reference.n_ctx_train // 2 * 2} or less",
        )
    if options.tokens is None and not _has_tokenizer(reference):
        raise InputError(f"{reference.path.name} has no tokenizer", "give token ids with --tokens FILE")


def _has_tokenizer(reference: Inventory) -> bool:
    return str(reference.metadata.get("tokenizer.ggml.model", "none")) not in {"none", "no_vocab"}


def _imatrix(options: ScanOptions, models: Sequence[Inventory], listener: Listener) -> Imatrix | None:
    """The importance matrix that was given, of this reference; and one to be made has a place."""
    given = tuple(path for path in (options.imatrix, options.text, options.tokens) if path)
    if options.make_imatrix:
        inputs = (*(path for one in models for path in one.shards), *given)
        importance_matrix.require_writable(options.make_imatrix, inputs)
    if options.imatrix is None:
        return None
    imatrix = importance_matrix.read(options.imatrix)
    without = imatrix.check(models[0])
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        listener.note(f"{show(options.imatrix.name)} has no entry for {show(without[0])}{more}: quantized without")
    return imatrix


def _contexts(reference: Inventory) -> list[int]:
    """Context lengths whose memory is reported."""
    trained = reference.n_ctx_train
    return [n for n in deploy.CONTEXTS if not trained or n <= trained] or [trained]


def _preflight(options: ScanOptions, reference: Inventory, plan: corpus.Plan) -> Preflight:
    contexts = _contexts(reference)
    run = (reference.path, plan, contexts, options.n_gpu_layers, options.device)
    return worker.run(_preflight_work, lambda _: None, *run)


def _preflight_work(  # in the worker: only there is llama.cpp loaded
    emit: Callable[[object], None],
    model: Path,
    plan: corpus.Plan,
    contexts: Sequence[int],
    n_gpu_layers: int,
    device: str,
) -> Preflight:
    from qres.preflight import preflight

    return preflight(emit, model, plan, contexts, n_gpu_layers, device)


def _no_memory(reference: Inventory, flight: Preflight) -> tuple[Skipped, ...]:
    """Contexts whose memory is not known."""
    trained = reference.n_ctx_train
    beyond = [n for n in deploy.CONTEXTS if n not in flight.memory and trained and n > trained]
    rows = tuple(Skipped(f"memory at {n} tokens of context", f"the model was trained for {trained}") for n in beyond)
    return (*rows, Skipped("memory on devices", flight.no_memory)) if flight.no_memory else rows


def _values(model: Inventory, threads: int, title: str, listener: Listener) -> tuple[TensorValues, ...]:
    """Largest magnitudes and broken values of every tensor."""
    listener.stage(title, None)
    return tensor_values.scan(model, candidates.in_mib(listener), threads)


def _refuse_broken(reference: Inventory, values: Sequence[TensorValues], *, making: bool) -> None:
    """llama.cpp quantizes no tensor that holds NaN or infinity; files that exist can still be compared."""
    broken = [row for row in values if row.n_bad]
    if broken and making:
        first = broken[0]
        raise InputError(
            f"{reference.path.name}: {first.tensor} holds {first.n_bad} values that are not finite, the first at "
            f"{first.first_bad}{f'; so do {len(broken) - 1} other tensors' if len(broken) > 1 else ''}",
            "no level can be made from it: get the model again, or convert it again",
        )


# -- measuring


def _job(
    options: ScanOptions,
    reference: Inventory,
    levels: Sequence[Candidate],
    flight: Preflight,
    values: Sequence[TensorValues],
    stamps: Stamps,
    imatrix: Imatrix | None,
) -> Job:
    return Job(
        reference=assemble.model_file(reference.path.name, reference, stamps),
        types_16bit=assemble.types_16bit(reference, values),
        bytes_16bit=assemble.bytes_16bit(reference),
        bytes_q8_0=assemble.bytes_q8_0(reference),
        levels=tuple(assemble.model_file(level.name, level.inventory, stamps) for level in levels),
        texts=flight.texts,
        n_ctx=options.n_ctx,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        all_units=options.all_units,
        prediction=PredictionJob(
            types=assemble.predicted_types(reference, [level.inventory for level in levels]),
            importance=imatrix.for_model(reference) if imatrix else {},
            imatrix=options.imatrix.name if options.imatrix else "",
            imatrix_digest=imatrix.digest if imatrix else "",
            make_imatrix=options.make_imatrix,
            draws=options.draws,
            device=options.device,
            dtype=options.dtype,
        ),
        with_noise_floor=reference.kind != "diffusion",  # halves of a chunk see another context there
        state=options.out / STATE_NAME if options.out else None,
        resume=options.resume,
        about=_about(options, reference, levels, flight.texts, stamps, imatrix),
    )


def _about(
    options: ScanOptions,
    reference: Inventory,
    levels: Sequence[Candidate],
    texts: corpus.Texts,
    stamps: Stamps,
    imatrix: Imatrix | None,
) -> Mapping[str, str]:
    """What must be the same for a scan to be gone on with: anything that a figure depends on."""

    def files(inventory: Inventory) -> str:
        # A level from the cache may have been made again: the same bytes at another time.
        known = [stamps[path] for path in inventory.shards]
        dated = inventory is reference or options.files
        return " ".join(f"{one.path.name} {one.size}{f' {one.modified_ns}' if dated else ''}" for one in known)

    ids = hashlib.sha256(repr((texts.rank, texts.report)).encode()).hexdigest()[:16]
    return {
        "reference": files(reference),
        "levels": "; ".join(f"{level.name}: {files(level.inventory)}" for level in levels),
        "text": f"{texts.report_name} and {texts.rank_name}, {ids}",
        "--n-ctx": str(options.n_ctx),
        "--units": "all" if options.all_units else "ranked",
        "--imatrix": imatrix.digest[:16] if imatrix else "none",
        "--make-imatrix": str(
            options.make_imatrix or "not given"
        ),  # written with the prediction, which is in the state
        "--draws": str(options.draws),
        "--device": f"{options.device}, {options.dtype}",
        "--threads": str(options.threads),
        "--n-gpu-layers": str(options.n_gpu_layers),
        "qres": __version__,
        "llama-cpp-python": version("llama-cpp-python"),
    }


def _measure(job: Job, listener: Listener) -> Measured:
    """Measure in the worker; a level that takes the process down is left out of another try."""
    while True:
        working = ""

        def on_event(event: Stage | Progress | Working | Note) -> None:
            nonlocal working
            if isinstance(event, Progress):
                listener.step(event.done, event.total, event.doing)
            elif isinstance(event, Note):
                listener.note(event.text)
            elif isinstance(event, Stage):
                listener.stage(event.title, None)
            else:
                working = event.model

        listener.stage("measuring", None)
        try:
            return worker.run(_measure_work, on_event, job)
        except CrashError as error:
            file_stamp.require_unchanged(stamp for model in (job.reference, *job.levels) for stamp in model.stamps)
            crashed = {**job.crashed, working: error.message}
            others = [level for level in job.levels if level.name not in crashed]
            if error.killed or working == REFERENCE or not working or not others:
                raise
            listener.warn(f"{working} cannot be measured: {error.message}. Going on without it")
            job = replace(job, crashed=crashed, resume=True)


def _measure_work(
    emit: Callable[[object], None], job: Job
) -> Measured:  # in the worker: only there is llama.cpp loaded
    from qres.measure import measure

    return measure(emit, job)


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
