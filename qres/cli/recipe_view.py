"""Recipes on the terminal: what was chosen, what it is predicted to do, and what it was measured to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from qres.cli.terminal import answer_console, text_table
from qres.printable import plain, plain_record
from qres.recipes.given import Deviation
from qres.records.recipe import Built, Expected, Recipe, Refinement, Verification
from qres.report.formatting import PREDICTED, change, fixed, mib, percent, plus_minus, significant, versus

MOST = 30
"""Rows of a table of tensors on the terminal; recipe.json has all."""


def show_recipe(
    recipe: Recipe, deviations: Sequence[Deviation], paths: Sequence[Path], commands: Sequence[str]
) -> None:
    """The recipe beside the levels of its size, and how to make the file."""
    console = answer_console()
    recipe = plain_record(recipe)
    size = f"{mib(recipe.bytes)} MiB, {fixed(recipe.bpw)} bits per weight"
    console.print(Text(f"{recipe.budget}: {size}, predicted KLD {_expected(recipe.predicted)}.", style="bold"))
    console.print(Text(_against_stock(recipe)))
    for note in recipe.notes:
        console.print(Text(note))
    if recipe.refinement:
        console.print(Text(_refined(recipe.refinement)))
    console.print()
    weights = sum(math.prod(tensor.shape) for tensor in recipe.tensors)
    rows = [("this recipe", mib(recipe.bytes), fixed(recipe.bpw), _expected(recipe.predicted))]
    rows += [
        (one.level, mib(one.bytes), fixed(8 * one.bytes / weights), _expected(one.predicted)) for one in recipe.stock
    ]
    console.print(text_table(("", "MiB", "bits/weight", "predicted KLD (95 %)"), rows, right=(1, 2)))
    console.print()
    console.print(Text(f"Types: {_types(recipe)}"))
    if deviations:
        console.print()
        _show_deviations(deviations)
    console.print()
    console.print(Text(plain(f"Written: {paths[0]} (also {', '.join(path.name for path in paths[1:])})")))
    console.print(Text("Make the file with one of:"))
    for command in commands:
        console.print(Text(f"  {plain(command)}"))


def show_built(recipe: Recipe, built: Built) -> None:
    """Print where the built file is, how large it is, and what to do next."""
    console = answer_console()
    console.print(
        Text(
            plain(
                f"{built.file}: {mib(built.file_bytes)} MiB, all {built.tensors} tensors of the planned types, "
                f"{built.tensor_bytes:,} bytes as planned."
            ),
            style="bold",
        )
    )
    console.print(Text(f"Predicted KLD {_expected(recipe.predicted)}. Measure it with qres verify."))


def show_verification(recipe: Recipe, found: Verification, path: Path) -> None:
    """Predicted and measured side by side, and against levels."""
    console = answer_console()
    own = found.recipe
    console.print(Text(_verdict(found), style="bold"))
    if found.predicted_here is not None and found.levels and own.kld is not None:
        here = f"{PREDICTED}{significant(found.predicted_here)}, {own.kld / found.predicted_here - 1:+.0%}"
        console.print(Text(f"From what {found.levels[0].name} does on this text, {here} (texts differ)."))
    for pair, level in zip(found.pairs, found.levels, strict=True):
        if pair.kld_difference is not None and level.kld and own.kld is not None:
            difference = f"{pair.kld_difference:+.4f}"
            spread = f" ± {pair.kld_difference_se:.4f}" if pair.kld_difference_se is not None else ""
            size = f"{(own.bytes - level.bytes) / 2**20:+,.1f} MiB"
            kld = f"KLD {difference}{spread}, {versus(own.kld / level.kld)}"
            console.print(Text(f"Against {pair.level} ({size}): {kld}, on the same tokens."))
    console.print()
    titles = ("", "MiB", "KLD ± SE", "same top", "PPL change", "drift at the end")
    rows = [
        (
            "this recipe" if one is own else one.name,
            mib(one.bytes),
            plus_minus(one.kld, one.kld_se),
            percent(one.same_top),
            change(one.ln_ppl_ratio, one.ln_ppl_ratio_se),
            percent(one.drift),
        )
        for one in (own, *found.levels)
    ]
    console.print(text_table(titles, rows, right=(1, 2, 3, 4, 5)))
    console.print()
    console.print(Text(f"Text: {plain(found.text)}, none of which chose the recipe. Kept in {plain(str(path))}."))


def _verdict(found: Verification) -> str:
    own, predicted = found.recipe, found.predicted
    if own.kld is None:
        return "No KLD was measured: at no position of the text is it finite."
    measured = f"Measured KLD {plus_minus(own.kld, own.kld_se)}"
    if predicted is None or found.inside is None:
        return f"{measured}; nothing was predicted."
    held = "inside the interval" if found.inside else "OUTSIDE the interval"
    return f"{measured}, predicted {_expected(predicted)}: {held}, measured is {own.kld / predicted.kld - 1:+.0%}."


def _expected(found: Expected | None) -> str:
    if found is None:
        return "unknown"
    return f"{PREDICTED}{significant(found.kld)} ({significant(found.low)} to {significant(found.high)})"


def _against_stock(recipe: Recipe) -> str:
    stock, own = recipe.stock[0], recipe.predicted
    if own is None:
        return "Nothing is predicted of its damage: build and verify it."
    if stock.predicted is None:
        return f"Nothing is predicted of {stock.level}, which is nearest in size: build and verify it to compare."
    size = (recipe.bytes - stock.bytes) / 2**20
    beside = "is as large" if abs(size) < 0.05 else f"is {abs(size):.1f} MiB {'smaller' if size > 0 else 'larger'}"
    return f"That is {versus(own.kld / stock.predicted.kld)} than {stock.level}, which {beside}."


def _refined(found: Refinement) -> str:
    gained = f"measured KLD {significant(found.kld_before)} to {significant(found.kld_after)}"
    return (
        f"Refined: {len(found.kept)} of {found.tried} exchanges kept, {gained} ({found.text}; {found.elapsed_s:.0f} s)."
    )


def _types(recipe: Recipe) -> str:
    held = Counter(recipe.quantized.values())
    return ", ".join(f"{name} {count}" for name, count in held.most_common())


def _show_deviations(deviations: Sequence[Deviation]) -> None:
    console = answer_console()
    worth = [row for row in deviations if row.is_worth]
    known = [row for row in deviations if row.is_worth is not None]
    console.print(
        Text(
            f"{len(deviations)} tensors deviate from the level; of {len(known)} with predictions, {len(worth)} were "
            "worth it.",
            style="bold",
        )
    )
    rows = [
        (
            plain(row.tensor),
            row.stock,
            row.type,
            f"{row.bytes_added / 2**20:+.2f}",
            "n/a" if row.kld_change is None else f"{row.kld_change:+.1e}",
            f"{row.price:.1e}",
            {True: "yes", False: "no", None: "n/a"}[row.is_worth],
        )
        for row in deviations[:MOST]
    ]
    titles = ("tensor", "level", "here", "MiB", "predicted change", "those bytes' price", "worth it")
    console.print(text_table(titles, rows, right=(3, 4, 5)))
    if len(deviations) > MOST:
        console.print(Text(f"and {len(deviations) - MOST} more"))
