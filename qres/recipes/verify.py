"""A built recipe against its prediction and against llama.cpp's levels, on text that chose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qres import levels
from qres.cpus import CPUS
from qres.errors import InputError
from qres.events import Listener
from qres.files import require_unchanged, stamp
from qres.gguf.difference import vector_difference
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import pair
from qres.levels import LevelSpec
from qres.measure.job import Compared, ComparisonJob
from qres.measure.tasks import CompareTask
from qres.metrics.means import paired_se
from qres.native import worker
from qres.printable import show
from qres.quantize.cache import default_folder, level_file
from qres.quantize.original import Original, with_digest
from qres.records.recipe import Expected, Measure, Pairing, Recipe, Verification
from qres.text.chunks import Fresh
from qres.text.source import Source, built_in

_GIVE = "give the file that qres build made"


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify on, and how."""

    sources: tuple[Source, ...] = field(default_factory=lambda: (built_in("report"), built_in("rank")))
    """The first that has enough unused text is taken."""
    chunks: int = 8
    threads: int = CPUS
    n_gpu_layers: int = 0
    cache: Path = field(default_factory=default_folder)
    """For the levels that are made beside it."""


def require_built(recipe: Recipe, reference: Inventory, built: Inventory) -> None:
    """Refuse a file that was not made from the recipe.

    Raises:
        InputError: another model, or a tensor of another type than planned; the first is named.
    """
    name = show(built.path.name)
    difference = pair(reference, built).problem  # the text is tokenized by the reference alone
    if difference:
        raise InputError(f"{name} is not the same model as {show(reference.path.name)}: {difference}", _GIVE)
    vector = vector_difference(reference, built)
    if vector:
        raise InputError(f"{name} was not made from {show(reference.path.name)}: {show(vector)} differs", _GIVE)
    held = {tensor.name: tensor.type for tensor in built.tensors}
    odd = next((tensor for tensor in recipe.tensors if held.get(tensor.name) != tensor.type), None)
    if odd is not None:
        is_type = held.get(odd.name, "not there")
        raise InputError(
            f"{name} is not what the recipe says: {show(odd.name)} is {is_type}, planned is {odd.type}",
            "build it again, or give the recipe that it was made from",
        )


def verify(
    original: Original,
    built: Sequence[tuple[Recipe, Inventory]],
    wanted: Sequence[LevelSpec] | None,
    options: VerifyOptions,
    listener: Listener,
) -> list[Verification]:
    """Measure files made from recipes of one scan, and levels beside them.

    Args:
        original: The 16-bit model, and the importance matrix that the levels are made with: the recipes' own.
        built: Each recipe with its file, checked by `require_built`.
        wanted: Levels to compare all of them with; None for those that each recipe names.
        options: The text, and how to run.
        listener: Hears of progress.

    Returns:
        A verification for each recipe.

    Raises:
        InputError: no text that was not used, or a level that cannot be written.
        NativeError: llama.cpp failed.
    """
    named = {stock.level: levels.LEVELS_BY_NAME[stock.level] for recipe, _ in built for stock in recipe.stock}
    rivals = {level.name: level for level in wanted} if wanted is not None else named
    reference, files = original.reference, _levels(original, list(rivals.values()), options, listener)
    inventories = [*(inventory for _, inventory in built), *files]
    selection = built[0][0].selection
    job = ComparisonJob(
        reference=reference.path,
        weights=frozenset(tensor.name for tensor in reference.tensors),
        files=tuple(inventory.path for inventory in inventories),
        sources=options.sources,
        used=selection.chunk_digests,
        chunks=options.chunks,
        n_ctx=selection.n_ctx,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
    )
    stamps = [stamp(path) for one in (reference, *inventories) for path in one.shards]
    listener.stage("verifying")
    text, found = worker.run(CompareTask(job), listener)
    require_unchanged(stamps)
    measured = {
        name: (compared, inventory)
        for name, compared, inventory in zip(rivals, found[len(built) :], files, strict=True)
    }
    rows = []
    for (recipe, inventory), compared in zip(built, found, strict=False):
        own = {stock.level for stock in recipe.stock} if wanted is None else set(rivals)
        beside = {name: one for name, one in measured.items() if name in own}
        rows.append(_verification(recipe, inventory, compared, beside, text))
    return rows


def _levels(
    original: Original, wanted: Sequence[LevelSpec], options: VerifyOptions, listener: Listener
) -> list[Inventory]:
    """The levels, from the cache or made now."""
    if not wanted:
        return []
    model = with_digest(original, listener)
    return [level_file(model, level, options.cache, listener) for level in wanted]


def _verification(
    recipe: Recipe,
    inventory: Inventory,
    compared: Compared,
    beside: dict[str, tuple[Compared, Inventory]],
    text: Fresh,
) -> Verification:
    own = _measure("recipe", inventory, compared)
    return Verification(
        file=inventory.path.name,
        text=text.name,
        n_ctx=recipe.selection.n_ctx,
        chunks=len(text.chunks),
        tokens=int(sum(compared.output.kld.counts)),
        recipe=own,
        levels=tuple(_measure(name, other, one) for name, (one, other) in beside.items()),
        pairs=tuple(_pair(name, compared, one) for name, (one, _) in beside.items()),
        predicted=recipe.predicted,
        inside=_inside(own.kld, recipe.predicted),
        predicted_here=_predicted_here(recipe, beside),
    )


def _predicted_here(recipe: Recipe, beside: dict[str, tuple[Compared, Inventory]]) -> float | None:
    for stock in recipe.stock:
        if stock.level in beside and stock.predicted and recipe.predicted:
            measured = beside[stock.level][0].output.kld.mean
            return None if measured is None else measured * recipe.predicted.kld / stock.predicted.kld
    return None


def _inside(kld: float | None, predicted: Expected | None) -> bool | None:
    return None if kld is None or predicted is None else predicted.low <= kld <= predicted.high


def _measure(name: str, inventory: Inventory, compared: Compared) -> Measure:
    out = compared.output.compute()
    return Measure(
        name=name,
        bytes=inventory.tensor_bytes,
        kld=out.kld_mean,
        kld_se=out.kld_se,
        same_top=out.same_top,
        same_top_se=out.same_top_se,
        ln_ppl_ratio=out.ln_ppl_ratio,
        ln_ppl_ratio_se=out.ln_ppl_ratio_se,
        drift=compared.drift.quantile(0.5),
    )


def _pair(level: str, recipe: Compared, other: Compared) -> Pairing:
    """Paired by chunk; not where one of them lacks positions."""
    a, b = recipe.output, other.output
    if a.kld.mean is None or b.kld.mean is None or a.kld.counts != b.kld.counts:
        return Pairing(level, None, None)
    return Pairing(level, a.kld.mean - b.kld.mean, paired_se(a.kld, b.kld))
