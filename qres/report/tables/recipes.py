"""Tables about recipes: what a mix of types is predicted and measured to do, and what 16 bit is worth."""

from __future__ import annotations

import math
from collections import Counter

from qres.records.recipe import Expected, Measure, Recipe, Recovery, Stock
from qres.records.result import Result
from qres.report.formatting import (
    NA,
    PREDICTED,
    change,
    count,
    fixed,
    mib,
    percent,
    plus_minus,
    predicted,
    significant,
    versus,
)
from qres.report.tables.table import Cell, Column, Table, number, table, text

_MAIN = 3
"""Types that are named of a recipe."""


def answer(result: Result) -> str:
    """The best that can be said of the recipes: measured where there is a measurement."""
    measured = [(recipe, found) for recipe in result.recipes if (found := recipe.verification) and found.recipe.kld]
    if measured:
        recipe, found = measured[0]
        rival = next((level for level in found.levels if level.kld), None)
        size = f"{recipe.budget} ({mib(recipe.bytes)} MiB): measured KLD {significant(found.recipe.kld)}"
        if rival is None or not rival.kld or found.recipe.kld is None:
            return f"{size} on {found.text}."
        beside = f"{rival.name} has {significant(rival.kld)} with {mib(rival.bytes)} MiB"
        less = versus(found.recipe.kld / rival.kld)
        return f"{size}, {beside}: {less}, on text that did not choose it ({found.text})."
    first = result.recipes[0]
    rival_stock = _rival(first)
    if first.predicted is None or rival_stock is None or rival_stock.predicted is None:
        return "Not all of this has predictions: build and verify the recipes to know what they do."
    less = versus(first.predicted.kld / rival_stock.predicted.kld)
    return (
        f"{first.budget} ({mib(first.bytes)} MiB): predicted KLD {predicted(first.predicted.kld)} where "
        f"{rival_stock.level} has {predicted(rival_stock.predicted.kld)}, {PREDICTED}{less}. "
        "Nothing of this is measured yet: qres build makes the file, qres verify measures it on other text; qres scan "
        "--recipe does both."
    )


def short(result: Result) -> str:
    """One line for the terminal: the best mix of the size of a measured level; empty where there is none."""
    for recipe in result.recipes:
        rival, found = _rival(recipe), recipe.verification
        if rival is None or not recipe.budget.startswith("same-as:"):
            continue
        level = next((one for one in found.levels if one.name == rival.level), None) if found else None
        if found and level and recipe.built and found.recipe.kld is not None and level.kld is not None:
            kld = f"measured KLD {significant(found.recipe.kld)} where {level.name} has {significant(level.kld)}"
            return f"A mix of the size of {level.name} was built: {kld} (other text than above): {recipe.built.file}"
        if recipe.predicted and rival.predicted and recipe.predicted.kld < rival.predicted.kld:
            kld = f"KLD {predicted(recipe.predicted.kld)} where {rival.level} has {predicted(rival.predicted.kld)}"
            return f"A mix of the size of {rival.level} is predicted to have {kld}: qres recipe makes it."
    return ""


def recipes(result: Result) -> Table:
    """The recipes for the usual budgets, as predicted."""
    columns = (
        Column("budget", "code"),
        Column("MiB"),
        Column("bits/weight"),
        Column("predicted KLD", "predicted"),
        Column("predicted 95 % interval", "predicted"),
        Column("level up to its size", "text"),
        Column("its MiB"),
        Column("its predicted KLD", "predicted"),
        Column("predicted less", "predicted"),
        Column("most tensors", "text"),
    )
    rows = (_recipe(recipe) for recipe in result.recipes)
    first = result.recipes[0].selection if result.recipes else None
    texts = f"Types chosen on {first.rank_text}; calibrated on {first.report_text}. " if first else ""
    note = (
        f"{texts}All types are in result.json; qres recipe writes them for llama-quantize and others, for any budget. "
        "The interval is of what eight chunks of such a text measure."
    )
    return table("recipes", "Best types within a budget", columns, rows, note=note)


def _recipe(recipe: Recipe) -> tuple[Cell, ...]:
    rival, own = _rival(recipe), recipe.predicted
    beside = rival.predicted if rival else None
    share = None if own is None or beside is None else 1 - own.kld / beside.kld
    held = Counter(recipe.quantized.values())
    return (
        text(recipe.budget),
        number(recipe.bytes, mib(recipe.bytes)),
        number(recipe.bpw, fixed(recipe.bpw)),
        _kld(own),
        number(
            own.low if own else None,
            f"{PREDICTED}{significant(own.low)} to {PREDICTED}{significant(own.high)}" if own else NA,
        ),
        text(rival.level if rival else None),
        number(rival.bytes if rival else None, mib(rival.bytes if rival else None)),
        _kld(beside),
        number(share, NA if share is None else f"{PREDICTED}{percent(share)}"),
        text(", ".join(f"{name} {n}" for name, n in held.most_common(_MAIN)) + (", …" if len(held) > _MAIN else "")),
    )


def _rival(recipe: Recipe) -> Stock | None:
    """The level that the recipe has to be better than."""
    return recipe.stock[0] if recipe.stock else None


def _kld(found: Expected | None) -> Cell:
    return number(found.kld if found else None, predicted(found.kld if found else None))


def verified(result: Result) -> Table:
    """Recipes and levels measured on text that chose neither."""
    columns = (
        Column("file", "code"),
        Column("MiB"),
        Column("measured KLD ± SE"),
        Column("predicted KLD", "predicted"),
        Column("inside the interval", "text"),
        Column("same top"),
        Column("PPL change"),
        Column("drift at the end"),
        Column("KLD against the level ± SE"),
    )
    rows: list[tuple[Cell, ...]] = []
    seen: set[str] = set()
    for recipe in result.recipes:
        found = recipe.verification
        if found is None:
            continue
        pair = found.pairs[0] if found.pairs else None
        versus = NA if pair is None else f"{plus_minus(pair.kld_difference, pair.kld_difference_se)} ({pair.level})"
        inside = {True: "yes", False: "no", None: NA}[found.inside]
        rows.append(_measured(recipe.budget, found.recipe, _kld(found.predicted), inside, versus))
        for level in found.levels:
            if level.name not in seen:
                seen.add(level.name)
                rows.append(_measured(level.name, level, number(None, NA), NA, NA))
    texts = {recipe.verification.text for recipe in result.recipes if recipe.verification}
    note = (
        f"Text: {'; '.join(sorted(texts))}. It neither chose types nor calibrated predictions. Differences are "
        "paired: recipe minus level, on the same tokens."
    )
    return table("verified", "Built and measured", columns, rows, note=note)


def _measured(name: str, found: Measure, guess: Cell, inside: str, versus: str) -> tuple[Cell, ...]:
    return (
        text(name),
        number(found.bytes, mib(found.bytes)),
        number(found.kld, plus_minus(found.kld, found.kld_se)),
        guess,
        text(inside),
        number(found.same_top, percent(found.same_top)),
        number(found.ln_ppl_ratio, change(found.ln_ppl_ratio, found.ln_ppl_ratio_se)),
        number(found.drift, percent(found.drift)),
        text(versus),
    )


def levels(result: Result) -> Table:
    """What llama.cpp's usual levels are predicted to do, measured or not."""
    measured = {level.name: level.output.kld_mean for level in result.levels}
    columns = (
        Column("level", "text"),
        Column("MiB"),
        Column("bits/weight"),
        Column("predicted KLD", "predicted"),
        Column("measured KLD"),
    )
    weights = sum(math.prod(tensor.shape) for tensor in result.tensors)
    rows = (_level(stock, weights, measured.get(stock.level)) for stock in result.stock)
    note = "Types and sizes by llama.cpp's own dry run; predictions calibrated on the levels that were measured."
    return table("all-levels", "All usual levels, predicted", columns, rows, note=note, folded=True)


def _level(stock: Stock, weights: int, measured: float | None) -> tuple[Cell, ...]:
    bits = 8 * stock.bytes / weights if weights else None
    return (
        text(stock.level),
        number(stock.bytes, mib(stock.bytes)),
        number(bits, fixed(bits)),
        _kld(stock.predicted),
        number(measured, significant(measured)),
    )


def sixteen_answer(result: Result) -> str:
    """Whether 16 bit is ever the cheapest way, with the figure that says so.

    Only of levels that have larger ones: beyond the largest, 16 bit is all there is.
    """
    rows = [row for row in result.recoveries if row.layers_bytes is not None and row.raised_bytes is not None]
    if not rows:
        return "No set of layers at 16 bit recovers a tenth of the damage of any level."
    rows = [row for row in rows if row.ladder_bytes is not None] or rows
    worth = [row for row in rows if (row.layers_bytes or 0) <= (row.raised_bytes or 0)]
    if worth:
        first = worth[0]
        what = f"{percent(first.share, 0)} of the damage of {first.level}"
        return (
            f"Sometimes: to recover {what}, nothing is cheaper than 16 bit for {_layers(first)} (predicted, "
            f"{mib(first.layers_bytes)} MiB)."
        )
    row = next((row for row in rows if row.share == 0.25), rows[0])
    times = (row.layers_bytes or 0) / row.raised_bytes if row.raised_bytes else 0.0
    less = f", {times:,.0f} times less" if times >= 1.5 else ""
    ladder = f"; the next levels up take {mib(row.ladder_bytes)} MiB" if row.ladder_bytes is not None else ""
    return (
        f"No: to recover {percent(row.share, 0)} of the damage of {row.level}, whole layers at 16 bit take "
        f"{mib(row.layers_bytes)} MiB ({_layers(row)}), larger types where they count {mib(row.raised_bytes)} MiB{less}"
        f"{ladder}. Predicted; the table has every level and share."
    )


def recoveries(result: Result) -> Table:
    """The cheapest ways to recover shares of a level's damage."""
    columns = (
        Column("level", "text"),
        Column("recover"),
        Column("predicted KLD left", "predicted"),
        Column("layers at 16 bit, MiB"),
        Column("which", "text"),
        Column("larger types, MiB"),
        Column("any types, MiB"),
        Column("larger levels, MiB"),
    )
    rows = (
        (
            text(row.level),
            number(row.share, percent(row.share, 0)),
            number(row.kld, predicted(row.kld)),
            _added(row.layers_bytes),
            text(_layers(row) if row.layers else NA),
            _added(row.raised_bytes),
            _added(row.free_bytes),
            _added(row.ladder_bytes),
        )
        for row in result.recoveries
    )
    note = (
        "What each way adds to the level's size, the cheapest choice of its kind by predictions. Larger types: each "
        "tensor keeps its type or gets a larger one. Any types: some may become smaller, too; below zero the better "
        "file is also smaller. Larger levels: on the straight line, in log KLD over bytes, between llama.cpp's levels; "
        "there are no files between them."
    )
    return table("recoveries", "The cheapest ways to recover damage", columns, rows, note=note)


def _added(n_bytes: int | None) -> Cell:
    if n_bytes is None:
        return number(None, NA)
    return number(n_bytes, f"{'+' if n_bytes >= 0 else ''}{mib(n_bytes)}")


def _layers(row: Recovery) -> str:
    names = [name.removeprefix("layer ") for name in row.layers]
    if len(names) > 8:
        return f"{count(len(names))} layers"
    return ", ".join(names)
