"""Puts together what the headers say and what the worker measured: the records of a result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from qres import __version__, advice, corpus, deploy, gguf_file, levels
from qres.branch import block_number
from qres.candidates import Candidate
from qres.corpus import Texts
from qres.file_stamp import Stamp
from qres.findings import Extreme, NonFinite, SharedTensors
from qres.gguf_file import Inventory
from qres.gguf_tensor import Tensor
from qres.job import REFERENCE, Measured, MeasuredLevel, ModelFile
from qres.levels import F16_MAX
from qres.recipe_records import FileTensor, Rung
from qres.records import SCHEMA_VERSION, Level, Reference, Result, Settings, Skipped
from qres.tensor_values import TensorValues


@dataclass(frozen=True)
class Inputs:
    """What is known of the files beside what was measured."""

    reference: Inventory
    levels: tuple[Candidate, ...]
    values: tuple[TensorValues, ...]
    """Of the reference."""
    broken: Mapping[str, tuple[str, ...]]
    """Level -> its tensors with values that are not finite."""
    shared: tuple[SharedTensors, ...]
    memory: Mapping[int, tuple[int, int]]
    """Context length -> bytes of the cache, and of the compute buffers."""
    remarks: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    ladder: tuple[Rung, ...]


def result(inputs: Inputs, measured: Measured, run: Settings) -> Result:
    """Everything that a scan found."""
    inventories = {level.name: level.inventory for level in inputs.levels}
    broken = {found.model for found in measured.non_finite}
    names = [tensor.name for tensor in inputs.reference.tensors]
    records = tuple(
        level(inventories[found.name], found, names, sound=found.name not in broken) for found in measured.levels
    )
    about = reference(inputs.reference, measured)
    absurd = advice.absurd_reference(about, records)
    if absurd:
        records = tuple(advice.without_advice(record) for record in records)
    rows = deploy.deployment(records, {n: one.tensor_bytes for n, one in inventories.items()}, inputs.memory)
    skipped = [*inputs.skipped, *(Skipped(name, reason) for name, reason in measured.failed.items())]
    if measured.unmapped:
        skipped.append(Skipped("residual stream, drift, units", measured.unmapped))
    if measured.no_noise_floor:
        skipped.append(Skipped("noise floor", measured.no_noise_floor))
    non_finite = tuple(_with_weights(inputs, found) for found in measured.non_finite)
    extremes = _extremes(inputs, measured)
    return Result(
        schema_version=SCHEMA_VERSION,
        reference=about,
        settings=run,
        noise_floor=measured.noise_floor,
        stream=measured.stream,
        levels=records,
        comparisons=measured.comparisons,
        deployment=rows,
        device_advice=() if absurd else deploy.device_advice(records, rows),
        assumptions=deploy.ASSUMPTIONS,
        verdict=advice.verdict(about, records, measured.noise_floor, absurd),
        skipped=tuple(skipped),
        warnings=(*inputs.remarks, *warnings(measured, records, non_finite, extremes)),
        non_finite=non_finite,
        extremes=extremes,
        shared=inputs.shared,
        sensitivity=measured.sensitivity,
        fingerprint=gguf_file.fingerprint(inputs.reference),
        tensors=tensors(inputs.reference, inputs.values),
        ladder=inputs.ladder,
    )


def _with_weights(inputs: Inputs, found: NonFinite) -> NonFinite:
    """Beside where the values break, the tensors that are broken in the file."""
    if found.model == REFERENCE:
        return replace(found, broken_weights=tuple(row.tensor for row in inputs.values if row.n_bad))
    return replace(found, broken_weights=inputs.broken.get(found.model, ()))


def _extremes(inputs: Inputs, measured: Measured) -> tuple[Extreme, ...]:
    """Magnitudes of the reference beyond half of the largest 16-bit float, largest first."""
    half = F16_MAX / 2
    rows = [
        Extreme(REFERENCE, "weight", block_number(v.tensor), v.tensor, v.absmax) for v in inputs.values if v.near_f16
    ]
    rows += [Extreme(REFERENCE, "input", block_number(n), n, top) for n, top in measured.inputs.items() if top > half]
    rows += [
        Extreme(REFERENCE, "stream", point.layer, point.label, point.absmax)
        for point in measured.stream
        if point.absmax is not None and point.absmax > half
    ]
    return tuple(sorted(rows, key=lambda row: -row.absmax))


def model_file(name: str, inventory: Inventory, stamps: Mapping[Path, Stamp]) -> ModelFile:
    """What the worker needs to know about a model."""
    return ModelFile(
        name=name,
        path=str(inventory.path.resolve()),
        file_bytes=inventory.file_bytes,
        tensor_bytes={tensor.name: tensor.n_bytes or 0 for tensor in inventory.tensors},
        tensor_types={tensor.name: tensor.type for tensor in inventory.tensors},
        stamps=tuple(stamps[path] for path in inventory.shards),
    )


def bytes_16bit(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at 16 bit; vectors (norms, biases) stay as they are at every level."""
    return _matrix_bytes(inventory, "F16")


def bytes_q8_0(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at Q8_0."""
    return _matrix_bytes(inventory, "Q8_0")


def predicted_types(reference: Inventory, given: Sequence[Inventory]) -> dict[str, tuple[str, ...]]:
    """For each matrix, the types to predict the damage of: usual ones that fit its rows, and those of the levels."""
    held: dict[str, list[str]] = {}
    for inventory in given:
        for tensor in inventory.tensors:
            held.setdefault(tensor.name, []).append(tensor.type)
    types = {}
    for tensor in _matrices(reference):
        wanted = [levels.fitting_type(name, tensor.row) for name in levels.PREDICTED] + held.get(tensor.name, [])
        exact = {tensor.type, "F32", "F16"} if tensor.type != "BF16" else {"F32", "BF16"}
        types[tensor.name] = tuple(dict.fromkeys(name for name in wanted if name not in exact))
    return types


def _matrices(inventory: Inventory) -> list[Tensor]:
    """Tensors of two dimensions or more."""
    return [tensor for tensor in inventory.tensors if tensor.n_dims >= 2]


def _matrix_bytes(inventory: Inventory, type_name: str) -> dict[str, int]:
    return {t.name: gguf_file.bytes_at(t, type_name) for t in _matrices(inventory)}


def types_16bit(inventory: Inventory, values: Sequence[TensorValues]) -> dict[str, str]:
    """The 16-bit type that holds each matrix with room to spare.

    BF16 stays BF16; F32 and F16 become it where a weight is in the upper half of the range of F16 or beyond; anything
    else is F16.

    Args:
        inventory: The reference.
        values: Its values, tensor by tensor.
    """
    return {
        tensor.name: "BF16" if tensor.type == "BF16" or found.near_f16 else "F16"
        for tensor, found in zip(inventory.tensors, values, strict=True)
        if tensor.n_dims >= 2
    }


def tensors(inventory: Inventory, values: Sequence[TensorValues]) -> tuple[FileTensor, ...]:
    """The reference's tensors as records."""
    types = types_16bit(inventory, values)
    return tuple(FileTensor(t.name, t.shape, t.type, types.get(t.name, "")) for t in inventory.tensors)


def reference(inventory: Inventory, measured: Measured) -> Reference:
    """The reference's record."""
    return Reference(
        path=_shown(inventory.path),
        name=inventory.name,
        architecture=inventory.architecture,
        norm_placement=measured.norm_placement,
        n_layer=measured.n_layer,
        n_embd=measured.n_embd,
        n_vocab=measured.n_vocab,
        n_ctx_train=measured.n_ctx_train,
        bytes=inventory.file_bytes,
        bpw=inventory.bpw,
        types=inventory.types,
        is_16bit=inventory.is_16bit,
    )


def level(inventory: Inventory, measured: MeasuredLevel, names: Sequence[str], *, sound: bool = True) -> Level:
    """A level's record; `names` are the reference's tensors."""
    types = {tensor.name: tensor.type for tensor in inventory.tensors}
    known = levels.LEVELS_BY_NAME.get(inventory.file_type)
    return Level(
        name=measured.name,
        path=_shown(inventory.path),
        file_type=inventory.file_type,
        bytes=inventory.file_bytes,
        bpw=inventory.bpw,
        nominal_bpw=known.nominal_bpw if known else None,
        types=inventory.types,
        fallback_tensors=gguf_file.fallbacks(inventory),
        output=measured.output,
        points=measured.points,
        units=measured.units,
        keep_16bit=measured.keep_16bit,
        keep_check=measured.keep_check,
        rank_correlation=measured.rank_correlation,
        additivity=measured.additivity,
        calibration=measured.calibration,
        trust=measured.trust,
        tensor_types=tuple(types.get(name, "") for name in names),
        sound=sound,
    )


def _shown(path: Path) -> str:
    """A path for people: bytes that are no UTF-8 become question marks instead of ending the report."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def settings(
    threads: int, n_gpu_layers: int, all_units: bool, measured: Measured, texts: Texts, elapsed_s: float
) -> Settings:
    """What was run."""
    return Settings(
        qres_version=__version__,
        llama_cpp=version("llama-cpp-python"),
        system=measured.system,
        n_ctx=measured.n_ctx,
        chunks=measured.chunks,
        rank_chunks=measured.rank_chunks,
        scored_tokens=max(
            (level.output.tokens + level.output.nonfinite_tokens for level in measured.levels), default=0
        ),
        text=measured.text,
        rank_text=measured.rank_text,
        unused_tokens=measured.unused_tokens,
        massive_tokens=measured.massive_tokens,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        units="all" if all_units else "ranked",
        elapsed_s=round(elapsed_s, 1),
        chunk_digests=tuple(dict.fromkeys(corpus.digest(chunk) for chunk in (*texts.rank, *texts.report))),
    )


def warnings(
    measured: Measured, records: Sequence[Level], non_finite: Sequence[NonFinite], extremes: Sequence[Extreme]
) -> tuple[str, ...]:
    """What a reader must know before believing the figures."""
    out = [_broken_numbers(found) for found in non_finite]
    if measured.text == measured.rank_text:
        out.append(
            "The text fills one chunk only: the units were ranked on the text that reports them. Give a longer one."
        )
    if measured.chunks < 2:
        out.append("One chunk gives no standard errors: no difference between levels can be called significant.")
    lost = max((record.output.reference_nonfinite_tokens for record in records), default=0)
    if lost:
        out.append(f"{lost} positions are left out because the reference's own logits are not finite there.")
    for record in records:
        own = record.output.nonfinite_tokens - record.output.reference_nonfinite_tokens
        if own:
            out.append(f"{record.name}: {own} positions have non-finite logits and are left out.")
        if record.nominal_bpw and record.bpw > record.nominal_bpw + 0.5:
            fell = len(record.fallback_tensors)
            why = f"{fell} tensors fell back to larger types" if fell else "it mixes types in its own way"
            out.append(
                f"{record.name} really is {record.bpw:.2f} bits per weight (nominally {record.nominal_bpw:.2f}): {why}."
            )
    if extremes:
        out.append(_out_of_range(extremes))
    return tuple(out)


def _broken_numbers(found: NonFinite) -> str:
    """Where values stop being finite, and why if that is known."""
    text = f"{found.model}: values stop being finite {found.place}"
    if found.broken_weights:
        names = ", ".join(found.broken_weights[:3]) + (" and more" if len(found.broken_weights) > 3 else "")
        return f"{text}: the file holds values that are not finite in {names}."
    if found.input_absmax is not None and found.input_absmax > F16_MAX:
        return f"{text}: it is given {found.input_absmax:,.0f}, 16-bit float ends at {F16_MAX:,.0f}."
    return f"{text}; the weights themselves are finite."


def _out_of_range(extremes: Sequence[Extreme]) -> str:
    """The largest magnitude, and how many more there are."""
    worst = extremes[0]
    what = {
        "weight": f"A weight of {worst.name} is",
        "input": f"{worst.name} is given values up to",
        "stream": f"The stream reaches, at {worst.name},",
    }[worst.what]
    others = len(extremes) - 1
    more = f" {others} more magnitude{'s are' if others > 1 else ' is'} beyond half of that." if others else ""
    return (
        f"{what} {worst.absmax:,.0f}; 16-bit float ends at {F16_MAX:,.0f}.{more} Keep such layers at BF16: back ends "
        "that compute in F16 can overflow there."
    )
