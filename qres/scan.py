"""A whole scan on one page: check the inputs, make the levels, measure, advise, assemble the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from qres import assemble, corpus, deploy, gguf_file, level_cache, levels
from qres.advice import verdict
from qres.errors import InputError, NativeError, QresError, UnsupportedError, UsageError
from qres.gguf_file import Inventory
from qres.job import Job, Measured, Progress
from qres.native import worker
from qres.records import SCHEMA_VERSION, Result, Skipped


class Listener(Protocol):
    """Hears how a scan gets on; the command line draws it."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; `total` counts its steps where that is known."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Progress within the stage."""

    def note(self, text: str) -> None:
        """Something the user should know now."""


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
    cache: Path | None = None


DEFAULT_CHUNKS = 8
"""Chunks of the built-in text; a text of the user's is read to its end unless --chunks says otherwise."""


def scan(options: ScanOptions, listener: Listener) -> Result:
    """Run a scan.

    Raises:
        UsageError: unknown level, options that do not go together.
        InputError: a file or text that cannot be used.
        UnsupportedError: a model whose output cannot be measured.
        NativeError: llama.cpp failed or died.
    """
    started = time.monotonic()
    text, rank_text = _texts(options)
    reference = gguf_file.read(options.model)
    gguf_file.require_language_model(reference, "reference")
    _check_context(options, reference)
    warnings = _reference_warnings(reference)
    for warning in warnings:
        listener.note(warning)
    candidates, skipped = _candidates(options, reference, listener)
    measured = _measure(_job(options, reference, candidates, text, rank_text), listener)
    listener.stage("memory on devices", None)
    memory, unknown = _memory(candidates[0][1], measured.n_ctx_train)
    elapsed = time.monotonic() - started
    return _result(options, reference, candidates, measured, memory, (*skipped, *unknown), warnings, elapsed)


# -- inputs


def _texts(options: ScanOptions) -> tuple[corpus.Source, corpus.Source | None]:
    """The reporting and the ranking text; None when one text has to serve for both."""
    if options.text and options.tokens:
        raise UsageError("--text and --tokens exclude each other", "give one of them")
    if options.tokens:
        return corpus.read_ids(options.tokens), None
    if options.text:
        return corpus.read_text(options.text), corpus.built_in("rank")
    return corpus.built_in("report"), corpus.built_in("rank")


def _check_context(options: ScanOptions, reference: Inventory) -> None:
    """llama.cpp aborts the process when some architectures run past their trained context."""
    if 0 < reference.n_ctx_train < corpus.MIN_TOKENS:
        raise UnsupportedError(
            f"{reference.path.name} was trained for {reference.n_ctx_train} tokens, too few to measure"
        )
    if options.n_ctx % 2 or options.n_ctx < corpus.MIN_TOKENS:
        raise UsageError(f"--n-ctx {options.n_ctx} is not an even number of at least {corpus.MIN_TOKENS}")
    if reference.n_ctx_train and options.n_ctx > reference.n_ctx_train:
        raise InputError(
            f"--n-ctx {options.n_ctx}: {reference.path.name} was trained for {reference.n_ctx_train} tokens at most",
            f"use --n-ctx {reference.n_ctx_train // 2 * 2} or less",
        )
    if options.tokens is None and not _has_tokenizer(reference):
        raise InputError(f"{reference.path.name} has no tokenizer", "give token ids with --tokens FILE")


def _has_tokenizer(reference: Inventory) -> bool:
    return str(reference.metadata.get("tokenizer.ggml.model", "none")) not in {"none", "no_vocab"}


def _reference_warnings(reference: Inventory) -> tuple[str, ...]:
    if reference.is_16bit:
        return ()
    kind = reference.file_type or "already quantized"
    return (
        f"The reference {reference.path.name} is {kind} at {reference.bpw:.2f} bits per weight, not 16 bit: every "
        "figure compares with an already damaged model.",
    )


def _candidates(
    options: ScanOptions, reference: Inventory, listener: Listener
) -> tuple[list[tuple[str, Inventory]], tuple[Skipped, ...]]:
    """The quantized files to measure, given or made, smallest first; and what could not be made."""
    skipped: list[Skipped] = []
    if options.files:
        found = [_given(path, reference) for path in options.files]
        for name, inventory in found:
            if inventory.path.samefile(reference.path):
                listener.note(f"{name} is the reference itself: every difference will be 0")
            elif inventory.is_16bit and not reference.is_16bit:
                listener.note(f"{inventory.path.name} is 16 bit and the reference is not: give the 16-bit file first")
    else:
        found = _made(options, reference, listener, skipped)
    if not found:
        reasons = "; ".join(f"{row.what}: {row.reason}" for row in skipped)
        raise NativeError(f"no level could be made: {reasons}")
    return sorted(_unique(found), key=lambda pair: pair[1].file_bytes), tuple(skipped)


def _unique(found: Sequence[tuple[str, Inventory]]) -> list[tuple[str, Inventory]]:
    """Levels by names of their own: everything about a level is looked up by its name.

    The file type alone where it is enough, else with the file's name, its folder, or a running number.
    """
    for naming in (
        lambda name, _path, _i: name,
        lambda name, path, _i: f"{name} ({path.name})",
        lambda name, path, _i: f"{name} ({path.parent.name}/{path.name})",
        lambda name, _path, i: f"{name} (file {i + 1})",
    ):
        names = [naming(name, inventory.path.resolve(), i) for i, (name, inventory) in enumerate(found)]
        if len(set(names)) == len(names):
            break
    return [(name, inventory) for name, (_, inventory) in zip(names, found, strict=True)]


def _given(path: Path, reference: Inventory) -> tuple[str, Inventory]:
    inventory = gguf_file.read(path)
    gguf_file.require_language_model(inventory, "candidate")
    difference = gguf_file.shape_difference(reference, inventory)
    if difference:
        raise InputError(f"{path.name} is not the same model as {reference.path.name}: {difference}")
    difference = gguf_file.tokenizer_difference(reference, inventory)
    if difference:
        raise InputError(
            f"{path.name} has another tokenizer than {reference.path.name}: {difference}",
            "their outputs cannot be compared",
        )
    return inventory.file_type or path.stem, inventory


def _made(
    options: ScanOptions, reference: Inventory, listener: Listener, skipped: list[Skipped]
) -> list[tuple[str, Inventory]]:
    wanted = list(dict.fromkeys(levels.parse(name) for name in options.levels))
    if not wanted:
        raise UsageError("--levels names no level", "give some, such as Q4_K_M,Q6_K")
    for level in wanted:
        if level.needs_imatrix:
            raise UsageError(
                f"{level.name} needs an importance matrix",
                "make the file with llama-quantize --imatrix and give it to the scan",
            )
    folder = options.cache or level_cache.default_folder()
    listener.stage("reading the reference", None)
    digest = gguf_file.content_digest(
        reference.shards, lambda done, total: listener.step(done // 2**20, total // 2**20, "MiB")
    )
    found = []
    for level in wanted:
        target = level_cache.level_path(folder, reference, digest, level, version("llama-cpp-python"))
        listener.stage(f"making {level.name}", None)
        try:
            found.append((level.name, level_cache.make(reference, level, target, options.threads, listener.step)))
        except NativeError as error:  # one level that llama.cpp refuses does not end the others
            skipped.append(Skipped(level.name, str(error)))
            listener.note(f"{level.name} could not be made: {error}")
    return found


# -- measuring


def _job(
    options: ScanOptions,
    reference: Inventory,
    candidates: Sequence[tuple[str, Inventory]],
    text: corpus.Source,
    rank_text: corpus.Source | None,
) -> Job:
    chunks = options.chunks or (DEFAULT_CHUNKS if not (options.text or options.tokens) else None)
    return Job(
        reference=assemble.model_file(reference.path.name, reference),
        types_16bit=assemble.types_16bit(reference),
        bytes_16bit=assemble.bytes_16bit(reference),
        bytes_q8_0=assemble.bytes_q8_0(reference),
        levels=tuple(assemble.model_file(name, inventory) for name, inventory in candidates),
        n_ctx=options.n_ctx,
        chunks=chunks,
        rank_chunks=options.rank_chunks,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        all_units=options.all_units,
        with_noise_floor=reference.kind != "diffusion",  # halves of a chunk see another context there
        text=text,
        rank_text=rank_text,
    )


def _measure(job: Job, listener: Listener) -> Measured:
    listener.stage("measuring", None)

    def on_event(event: Progress) -> None:
        listener.step(event.done, event.total, event.doing)

    return worker.run(_measure_work, on_event, job)


def _measure_work(
    emit: Callable[[object], None], job: Job
) -> Measured:  # in the worker: only there is llama.cpp loaded
    from qres.measure import measure

    return measure(emit, job)


def _memory(model: Inventory, n_ctx_train: int) -> tuple[dict[int, tuple[int, int]], tuple[Skipped, ...]]:
    """Cache and compute memory at each context length that the model was trained for."""
    contexts = [n for n in deploy.CONTEXTS if not n_ctx_train or n <= n_ctx_train] or [n_ctx_train]
    beyond = [n for n in deploy.CONTEXTS if n not in contexts]
    skipped = tuple(
        Skipped(f"memory at {n} tokens of context", f"the model was trained for {n_ctx_train}") for n in beyond
    )
    try:
        return worker.run(_memory_work, lambda _: None, model.path, contexts), skipped
    except QresError as error:
        return {}, (*skipped, Skipped("memory on devices", str(error)))


def _memory_work(_emit: Callable[[object], None], path: Path, contexts: Sequence[int]) -> dict[int, tuple[int, int]]:
    from qres.native.memory import context_memory

    return {m.n_ctx: (m.cache_bytes, m.compute_bytes) for m in context_memory(path, contexts)}


# -- the result


def _result(
    options: ScanOptions,
    reference: Inventory,
    candidates: Sequence[tuple[str, Inventory]],
    measured: Measured,
    memory: dict[int, tuple[int, int]],
    skipped: tuple[Skipped, ...],
    warnings: tuple[str, ...],
    elapsed_s: float,
) -> Result:
    records = tuple(
        assemble.level(name, inventory, level)
        for (name, inventory), level in zip(candidates, measured.levels, strict=True)
    )
    about = assemble.reference(reference, measured)
    rows = deploy.deployment(records, {name: inventory.tensor_bytes for name, inventory in candidates}, memory)
    if measured.unmapped:
        skipped = (*skipped, Skipped("residual stream, drift, units", measured.unmapped))
    if measured.no_noise_floor:
        skipped = (*skipped, Skipped("noise floor", measured.no_noise_floor))
    return Result(
        schema_version=SCHEMA_VERSION,
        reference=about,
        settings=assemble.settings(options.threads, options.n_gpu_layers, options.all_units, measured, elapsed_s),
        noise_floor=measured.noise_floor,
        stream=measured.stream,
        levels=records,
        comparisons=measured.comparisons,
        deployment=rows,
        device_advice=deploy.device_advice(records, rows),
        assumptions=deploy.ASSUMPTIONS,
        verdict=verdict(about, records, measured.noise_floor),
        skipped=skipped,
        warnings=(*warnings, *assemble.warnings(measured, records)),
    )
