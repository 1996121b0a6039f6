"""Puts together what the headers say and what the worker measured: the records of a result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from qres.advice import devices, verdict
from qres.gguf import claims, difference, fallbacks
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.gguf.names import block_number
from qres.gguf.pairing import EMBEDDING, not_executed, pair
from qres.levels import F16_MAX, LEVELS_BY_NAME
from qres.measure.job import REFERENCE, Measured, MeasuredLevel
from qres.pipeline.candidates import Candidate
from qres.pipeline.options import ScanOptions
from qres.pipeline.sizes import types_16bit
from qres.pipeline.warnings import unreached, warnings
from qres.records.experts import ExpertUse
from qres.records.files import LevelFile, SharedTensors
from qres.records.recipe import FileTensor, Rung
from qres.records.result import SCHEMA_VERSION, Level, Reference, Result, Settings, Skipped
from qres.records.stream import Extreme, NonFinite
from qres.text import chunks
from qres.text.chunks import Texts
from qres.version import __version__


@dataclass(frozen=True)
class Inputs:
    """What is known of the files beside what was measured."""

    reference: Inventory
    levels: tuple[Candidate, ...]
    values: tuple[Magnitudes, ...]
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
    copies = {level.name for level in inputs.levels if level.changes.is_copy}
    records = tuple(
        replace(
            level(inputs.reference, inventories[found.name], found, sound=found.name not in broken),
            is_copy=found.name in copies,
        )
        for found in measured.levels
    )
    about = reference(inputs.reference, measured)
    absurd = verdict.absurd_reference(about, records)
    if absurd:
        records = tuple(verdict.without_advice(record) for record in records)
    rows = devices.deployment(records, {n: one.tensor_bytes for n, one in inventories.items()}, inputs.memory)
    skipped = [*inputs.skipped, *(Skipped(name, reason) for name, reason in measured.failed.items())]
    if measured.unmapped:
        skipped.append(Skipped("residual stream, drift, units", measured.unmapped))
    skipped += [
        Skipped(f"stream, drift, units of {found.name}", found.unmatched)
        for found in measured.levels
        if found.unmatched
    ]
    floor = measured.noise_floor
    if floor.reason:
        skipped.append(Skipped("noise floor", floor.reason))
    if floor.drift_reason not in ("", floor.reason) and measured.stream:
        skipped.append(Skipped("noise floor of the drift", floor.drift_reason))
    used = _experts(inputs.reference, measured)
    non_finite = tuple(_with_weights(inputs, found) for found in measured.non_finite)
    extremes = _extremes(inputs, measured)
    return Result(
        schema_version=SCHEMA_VERSION,
        reference=about,
        settings=run,
        noise_floor=floor,
        stream=measured.stream,
        levels=records,
        comparisons=measured.comparisons,
        deployment=rows,
        device_advice=() if absurd else devices.device_advice(_advisable(about, records), rows),
        assumptions=devices.ASSUMPTIONS,
        verdict=verdict.verdict(about, records, floor, absurd),
        skipped=tuple(skipped),
        warnings=(
            *inputs.remarks,
            *warnings(run, records, non_finite, extremes, floor.kld_mean, released_in=about.released_in),
            *unreached(used, inputs.reference.tensor_bytes),
        ),
        non_finite=non_finite,
        extremes=extremes,
        shared=inputs.shared,
        prediction=measured.prediction,
        fingerprint=difference.fingerprint(inputs.reference),
        tensors=tensors(inputs.reference, inputs.values),
        ladder=inputs.ladder,
        experts=used,
    )


def _experts(reference: Inventory, measured: Measured) -> tuple[ExpertUse, ...]:
    """Which experts were reached, with the bytes of the others."""
    sizes = {tensor.name: tensor.n_bytes or 0 for tensor in reference.tensors}
    rows = []
    for one in measured.routed:
        reached = [n for n in one.counts if n]
        missing = len(one.counts) - len(reached)
        whole = sum(sizes[name] for name in one.weights)
        least, most = (min(reached), max(reached)) if reached else (0, 0)
        rows.append(
            ExpertUse(one.layer, len(one.counts), missing, least, most, whole * missing // max(len(one.counts), 1))
        )
    return tuple(rows)


def _advisable(about: Reference, records: Sequence[Level]) -> list[Level]:
    """Levels that there is a reason to ship: smaller than the reference."""
    return [record for record in records if not record.is_copy and verdict.is_smaller(record, about)]


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


def tensors(inventory: Inventory, values: Sequence[Magnitudes]) -> tuple[FileTensor, ...]:
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
        not_executed=not_executed(inventory),
        released_in=inventory.released_in,
    )


def level(reference: Inventory, inventory: Inventory, measured: MeasuredLevel, *, sound: bool = True) -> Level:
    """A level's record."""
    file = level_file(reference, inventory)
    found = Level(measured.name, file, measured.output, measured.points, measured.sensitivity, sound, measured.differs)
    return verdict.without_advice(found) if found.differs else found


def level_file(reference: Inventory, inventory: Inventory) -> LevelFile:
    """The record of a level's file."""
    known = None if claims.publishers_mix(inventory) else LEVELS_BY_NAME.get(inventory.file_type)
    types = _types(reference, inventory)
    return LevelFile(
        path=_shown(inventory.path),
        file_type=inventory.file_type,
        bytes=inventory.file_bytes,
        bpw=inventory.bpw,
        nominal_bpw=known.nominal_bpw if known else None,
        types=inventory.types,
        fallback_tensors=fallbacks.fallbacks(inventory),
        tensor_types=tuple(types.get(tensor.name, "") for tensor in reference.tensors),
        not_executed=not_executed(inventory),
    )


def _types(reference: Inventory, inventory: Inventory) -> dict[str, str]:
    """The file's type of each of the reference's tensors; none where it has not its bytes."""
    types = {tensor.name: tensor.type for tensor in inventory.tensors}
    places = pair(reference, inventory).places
    types |= {name: place.type for name, place in places.items() if place.tensors != (EMBEDDING,)}
    return types


def _shown(path: Path) -> str:
    """A path for people: bytes that are no UTF-8 become question marks instead of ending the report."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def settings(options: ScanOptions, measured: Measured, texts: Texts, elapsed_s: float) -> Settings:
    """The record of what was run."""
    return Settings(
        qres_version=__version__,
        llama_cpp=version("llama-cpp-python"),
        system=measured.system,
        n_ctx=len(texts.report[0]),
        chunks=len(texts.report),
        rank_chunks=len(texts.rank),
        scored_tokens=max(
            (level.output.tokens + level.output.nonfinite_tokens for level in measured.levels), default=0
        ),
        text=texts.report_name,
        rank_text=texts.rank_name,
        unused_tokens=texts.unused,
        massive_tokens=measured.massive_tokens,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        units="all" if options.all_units else "ranked",
        elapsed_s=round(elapsed_s, 1),
        special=options.special,
        chunk_digests=tuple(dict.fromkeys(chunks.digest(chunk) for chunk in (*texts.rank, *texts.report))),
    )
