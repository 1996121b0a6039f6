"""The tables about the run: what the files hold, what was set, and what could not be measured."""

from __future__ import annotations

from qres.levels import F16_MAX
from qres.records.result import Level, Reference, Result
from qres.report.formatting import NA, count, fixed, mib, percent, significant
from qres.report.tables.table import Column, Table, number, table, text


def types(result: Result) -> Table:
    """What each file really holds."""
    columns = (
        Column("file", "text"),
        Column("type", "text"),
        Column("tensors"),
        Column("weights"),
        Column("MiB"),
        Column("of the file"),
    )
    files = [("reference", result.reference.types), *((level.name, level.file.types) for level in result.levels)]
    rows = []
    for name, shares in files:
        total = sum(share.bytes for share in shares)
        for share in shares:
            fraction = share.bytes / total if total else None
            rows.append(
                (
                    text(name),
                    text(share.type),
                    number(share.tensors, count(share.tensors)),
                    number(share.weights, count(share.weights)),
                    number(share.bytes, mib(share.bytes)),
                    number(fraction, percent(fraction)),
                )
            )
    note = " ".join(part for part in (_bpw_note(result), _not_executed_note(result)) if part)
    return table("types", "Tensor types in the files", columns, rows, note=note, folded=len(rows) > 16)


def fallbacks(level: Level) -> Table:
    """Tensors that did not get the type that the level asks for."""
    columns = (Column("tensor", "code"), Column("wanted", "text"), Column("got", "text"), Column("reason", "text"))
    fallbacks = level.file.fallback_tensors
    rows = ((text(row.tensor), text(row.wanted), text(row.type), text(row.reason)) for row in fallbacks)
    size = len(fallbacks)
    return table(
        f"fallbacks-{level.name}",
        f"{level.name}: tensors on a fallback type",
        columns,
        rows,
        note=f"{size} of {sum(share.tensors for share in level.file.types)} tensors could not get the level's type, "
        "so the file's bits per weight are not what its name says.",
        folded=size > 8,
    )


def non_finite(result: Result) -> Table:
    """Where values stop being finite."""
    columns = (
        Column("model", "text"),
        Column("unit", "text"),
        Column("operation", "code"),
        Column("with", "code"),
        Column("first token", "text"),
        Column("its input reaches"),
        Column("broken in the file", "code"),
    )
    rows = (
        (
            text(found.model),
            text(found.unit or (f"layer {found.layer}" if found.layer is not None else None)),
            text(found.operation),
            text(found.tensor or None),
            text(f"{NA if found.token is None else found.token}, {found.where}"),
            number(found.input_absmax, significant(found.input_absmax)),
            text(", ".join(found.broken_weights) or "none"),
        )
        for found in result.non_finite
    )
    note = (
        "The first computation whose output is not finite, on the first chunk where that happened. A broken tensor "
        "must be made or fetched again; an input beyond 65,504 overflows where a matmul is done in 16-bit float."
    )
    return table("non-finite", "Values that are not finite", columns, rows, note=note)


def extremes(result: Result) -> Table:
    """Magnitudes that 16-bit float holds barely or not at all."""
    columns = (
        Column("what", "text"),
        Column("name", "code"),
        Column("layer", "text"),
        Column("largest magnitude"),
        Column("of the F16 range"),
    )
    said = {"weight": "a weight", "input": "what it is multiplied with", "stream": "the stream"}
    rows = (
        (
            text(said.get(row.what, row.what)),
            text(row.name),
            text(None if row.layer is None else str(row.layer)),
            number(row.absmax, significant(row.absmax)),
            number(row.absmax / F16_MAX, percent(row.absmax / F16_MAX, 0)),
        )
        for row in result.extremes
    )
    note = (
        "Beyond half of 65,504, the largest 16-bit float, in the reference. What stays at 16 bit there should be BF16, "
        "which has the range of 32-bit float."
    )
    return table("extremes", "Values near or beyond 16-bit float", columns, rows, note=note)


def shared(result: Result) -> Table:
    """Matrices that two levels hold alike."""
    columns = (Column("levels", "text"), Column("identical matrices"), Column("MiB"))
    rows = (
        (
            text(f"{row.a} and {row.b}"),
            number(row.tensors, f"{count(row.tensors)} of {count(row.of)}"),
            number(row.bytes, mib(row.bytes)),
        )
        for row in result.shared
    )
    note = "Byte for byte the same in both files: whatever differs between the two levels is in the other matrices."
    return table("shared", "Matrices that two files share", columns, rows, note=note)


def experts(result: Result) -> Table:
    """Experts that the text did not reach, layer by layer; empty where it reached all."""
    columns = (
        Column("layer"),
        Column("experts"),
        Column("not reached"),
        Column("MiB of these"),
        Column("tokens of the least and the most used"),
    )
    rows = (
        (
            number(row.layer, str(row.layer)),
            number(row.experts, count(row.experts)),
            number(row.unreached, count(row.unreached)),
            number(row.unreached_bytes, mib(row.unreached_bytes)),
            number(row.most, f"{count(row.least)} to {count(row.most)}"),
        )
        for row in result.experts
        if row.unreached
    )
    note = (
        "Nothing was measured of an expert that no token was sent to. Where recipes choose types, it counts as the "
        "median of the experts that tokens reached. The least used is of those that were reached."
    )
    return table("experts", "Experts that no token reached", columns, rows, note=note, folded=True)


def skipped(result: Result) -> Table:
    """What could not be measured, and why."""
    columns = (Column("what", "text"), Column("why", "text"))
    return table(
        "skipped", "What is missing, and why", columns, ((text(row.what), text(row.reason)) for row in result.skipped)
    )


def reference(result: Result) -> Table:
    """The model that everything is compared with."""
    ref: Reference = result.reference
    pairs = (
        ("model", ref.name),
        ("file", ref.path),
        ("architecture", ref.architecture),
        ("normalization", ref.norm_placement),
        ("layers × width", f"{ref.n_layer} × {ref.n_embd}"),
        ("vocabulary", count(ref.n_vocab)),
        ("trained context", count(ref.n_ctx_train)),
        ("size", f"{mib(ref.bytes)} MiB, {fixed(ref.bpw)} bits per weight"),
        ("16 bit", _sixteen(ref)),
    )
    return _pairs("reference", "Reference", pairs)


def _sixteen(ref: Reference) -> str:
    if ref.is_16bit:
        return "yes"
    if ref.released_in:
        return f"but for what was released in {ref.released_in}, which levels keep as it is"
    return "no: levels are compared with an already quantized model"


def settings(result: Result) -> Table:
    """What was run, enough to run it again."""
    run = result.settings
    floor = result.noise_floor
    pairs = (
        ("qres", run.qres_version),
        ("llama-cpp-python", run.llama_cpp),
        ("system", run.system),
        ("text for the output", f"{run.text}{', special tokens parsed' if run.special else ''}"),
        ("text for ranking units", run.rank_text),
        ("chunks", f"{run.chunks} of {count(run.n_ctx)} tokens, {run.rank_chunks} more for ranking"),
        ("scored positions", count(run.scored_tokens)),
        ("unused tokens", count(run.unused_tokens)),
        ("massive-activation tokens", f"{count(run.massive_tokens)}, kept out of the medians"),
        ("noise floor", f"KLD {_floor(floor.kld_mean, floor.reason)}"),
        ("noise floor of the drift", _floor(floor.drift_median, floor.drift_reason)),
        ("units", "every unit" if run.units == "all" else f"{run.units}: as many as the default budget allows"),
        ("threads, GPU layers", f"{run.threads}, {run.n_gpu_layers}"),
        ("time", f"{count(round(run.elapsed_s))} s"),
    )
    return _pairs("settings", "Settings", pairs)


def _floor(value: float | None, reason: str) -> str:
    return f"none, because {reason}" if value is None and reason else significant(value)


def _pairs(name: str, title: str, pairs: tuple[tuple[str, str], ...]) -> Table:
    columns = (Column("", "text"), Column("value", "text"))
    return table(name, title, columns, ((text(key), text(value)) for key, value in pairs))


def _not_executed_note(result: Result) -> str:
    files = [("the reference", result.reference.not_executed)]
    files += [(level.name, level.file.not_executed) for level in result.levels]
    parts = [f"block {row.block} of {name} ({mib(row.bytes)} MiB)" for name, rows in files for row in rows]
    if not parts:
        return ""
    return f"Counted here but not executed, so that no figure depends on it: {', '.join(parts)}."


def _bpw_note(result: Result) -> str:
    parts = [
        f"{level.name} is {fixed(level.file.bpw)} (named {fixed(level.file.nominal_bpw)})"
        for level in result.levels
        if level.file.nominal_bpw is not None
    ]
    return f"Bits per weight, counted in the file: {', '.join(parts)}." if parts else ""
