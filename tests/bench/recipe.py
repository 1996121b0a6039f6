"""What recipes gain and how well they are predicted, for `make bench`: built and measured beside llama.cpp's levels.

As a script it takes another model: python tests/bench_recipe.py RESULT.json [IMATRIX]. The model is the one that the
result was scanned from. The text is what the scan left of the built-in one.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qres import levels
from qres.events import Logged
from qres.gguf import imatrix, model_file
from qres.gguf.imatrix import Imatrix
from qres.pipeline.options import ScanOptions
from qres.pipeline.run import scan
from qres.quantize import cache
from qres.quantize.original import Original, original
from qres.recipes import budget, build, verify, wishes
from qres.recipes.choices import Choices
from qres.recipes.plan import make
from qres.records import as_json
from qres.records.recipe import Recipe, Verification
from qres.records.result import Result
from qres.text import source

LEVELS = ("Q4_K_M", "Q5_K_M")
BUDGETS = ("same-as:Q4_K_M", "same-as:Q5_K_M", "+0.10bpw", "+0.25bpw")
SPREAD = ("4.6bpw", "4.9bpw", "5.2bpw", "5.5bpw", "6.0bpw", "6.5bpw")
"""With those above, ten recipes between 4.5 and 6.6 bits per weight."""
CHUNKS = 8

Say = Callable[..., None]


def measure(model: Path, threads: int, say: Say) -> None:
    """Scan a model at two levels, then build and measure ten recipes."""
    options = ScanOptions(model=model, levels=LEVELS, chunks=4, rank_chunks=2, threads=threads)
    compare(scan(options, Logged()), model, None, threads, say)


def compare(result: Result, model: Path, matrix: Imatrix | None, threads: int, say: Say) -> None:
    """Build recipes from a result, and measure them together."""
    choices = Choices(result)
    started = time.perf_counter()
    plans = [make(choices, budget.parse(text), wishes.Wishes()) for text in (*BUDGETS, *SPREAD)]
    say("choosing ten recipes", time.perf_counter() - started, "", " s")
    found = _verified(original(model_file.read(model), matrix, threads), plans)
    for plan, row in zip(plans, found, strict=True):
        _say_recipe(plan, row, say)
    _say_gap(found[2], "+0.10bpw", 0.40, say)
    _say_gap(found[3], "+0.25bpw", 0.50, say)
    errors = [math.log(row.predicted.kld / row.recipe.kld) for row in found if row.predicted and row.recipe.kld]
    say("predictions within 25 % of measured, of ten", sum(0.75 <= math.exp(e) <= 1.25 for e in errors), "at least 9")
    say("measured KLD inside the predicted interval, of ten", sum(bool(row.inside) for row in found), "at least 9")


def _verified(model: Original, plans: Sequence[Recipe]) -> list[Verification]:
    sources = (source.built_in("report"), source.built_in("rank"))
    options = verify.VerifyOptions(sources, CHUNKS, model.threads, 0, cache.default_folder())
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for i, plan in enumerate(plans):
            target = Path(folder) / f"{i}.gguf"
            build.build(model, plan, target, Logged())  # raises where a type is not as planned
            made.append((plan, model_file.read(target)))
        rivals = [levels.LEVELS_BY_NAME[name] for name in LEVELS]
        return verify.verify(model, made, rivals, options, Logged())


def _say_recipe(plan: Recipe, row: Verification, say: Say) -> None:
    expected, kld = row.predicted, row.recipe.kld
    if expected is None or not kld:
        return
    interval = f"{expected.low:.5f} to {expected.high:.5f}, {'inside' if row.inside else 'outside'}"
    say(f"{plan.budget} at {plan.bpw:.2f} bpw: predicted / measured {kld:.5f}", expected.kld / kld, interval)
    same = {"same-as:Q4_K_M": (0, "at most 0.6 on a K-quant-shaped model"), "same-as:Q5_K_M": (1, "below 1")}
    if plan.budget in same:
        which, bound = same[plan.budget]
        level, pair = row.levels[which], row.pairs[which]
        spread = f", difference {pair.kld_difference:+.5f} ± {pair.kld_difference_se or 0:.5f}"
        say(f"{plan.budget}: KLD / that of {level.name} ({level.kld:.5f})", kld / (level.kld or 1), bound + spread)


def _say_gap(row: Verification, what: str, bound: float, say: Say) -> None:
    """The share of the smallest level's KLD that is gone: the gap to 16 bit, where the KLD is 0."""
    level = row.levels[0]
    if row.recipe.kld is not None and level.kld:
        say(f"{what}: gap of {level.name} closed", 1 - row.recipe.kld / level.kld, f"at least {bound}")


def main(arguments: Sequence[str]) -> None:
    """The figures for the model of a result."""
    result = as_json.load(Path(arguments[0]))
    matrix = imatrix.read(Path(arguments[1])) if len(arguments) > 1 else None

    def say(what: str, value: float, bound: str, unit: str = "") -> None:
        sys.stdout.write(f"{what:70} {value:8.3f}{unit}   {bound}\n")
        sys.stdout.flush()

    compare(result, Path(result.reference.path), matrix, 2, say)


if __name__ == "__main__":
    main(sys.argv[1:])
