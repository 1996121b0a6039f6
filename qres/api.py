"""The public interface: what `from qres import ...` gives. Everything else may change from version to version.

Each function raises a `QresError` for what a user can cause, with a message, a hint and an exit code; each takes a
`Listener`, and without one logs to the logger `qres`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qres.cpus import CPUS
from qres.errors import InputError, NativeError, QresError, UnsupportedError, UsageError
from qres.events import Listener, Logged
from qres.gguf import inspection, model_file
from qres.gguf.inspection import Inspection
from qres.levels import LevelSpec
from qres.pipeline import run
from qres.pipeline.options import ScanOptions
from qres.recipes import verify as verifying
from qres.recipes.ask import RecipeOptions, ask, original_of
from qres.recipes.build import build as build_file
from qres.recipes.refine import RefineOptions
from qres.recipes.verify import VerifyOptions
from qres.records.as_json import load, to_json
from qres.records.recipe import Built, Recipe, Verification
from qres.records.result import Result
from qres.report.html import render_html
from qres.report.markdown import render_markdown

__all__ = [
    "InputError",
    "Inspection",
    "Listener",
    "NativeError",
    "QresError",
    "Recipe",
    "RecipeOptions",
    "RefineOptions",
    "Result",
    "ScanOptions",
    "UnsupportedError",
    "UsageError",
    "VerifyOptions",
    "build",
    "inspect",
    "load",
    "recipe",
    "render_html",
    "render_markdown",
    "scan",
    "to_json",
    "verify",
]


def scan(options: ScanOptions, listener: Listener | None = None) -> Result:
    """Measure quant levels against a 16-bit model.

    Args:
        options: The model, the levels or files, the text, and how to run.
        listener: Hears of progress.

    Returns:
        The whole result; `to_json`, `render_html` and `render_markdown` make texts of it. Nothing is written but the
        levels in the cache, and with `options.out` the state of the unfinished scan and the recipes.

    Raises:
        UsageError: unknown level, options that do not go together.
        InputError: a file or text that cannot be used.
        UnsupportedError: a model whose output cannot be measured.
        NativeError: llama.cpp failed or died.
    """
    return run.scan(options, listener or Logged())


def inspect(file: Path, *, values: bool = False, threads: int = CPUS, listener: Listener | None = None) -> Inspection:
    """Say what a GGUF is, what it can be used for and where its bits go; the model is not loaded.

    Args:
        file: Of a split model, any shard. A damaged file is read as far as that is possible.
        values: Read all tensor data, too: NaN, infinities, what does not fit 16-bit float.
        threads: For reading it.
        listener: Hears of progress, in MiB.

    Raises:
        InputError: a file that is missing, unreadable or no GGUF.
    """
    return inspection.inspect_file(file, values=values, threads=threads, listener=listener or Logged())


def recipe(result: Result, options: RecipeOptions, listener: Listener | None = None) -> Recipe:
    """Choose a type for every tensor: the best file within a budget, from what a scan predicted.

    Args:
        result: Of a scan of the model.
        options: The budget, and what else is wished.
        listener: Hears of progress; only refining takes long.

    Raises:
        UsageError: a budget that nothing meets, a pin without tensors, an unknown level or type.
        InputError: a file that cannot be used.
        UnsupportedError: no recipe can be made from this result.
    """
    return ask(result, options, listener or Logged()).recipe


def build(
    model: Path,
    plan: Recipe,
    target: Path,
    *,
    imatrix: Path | None = None,
    threads: int = CPUS,
    force: bool = False,
    listener: Listener | None = None,
) -> Built:
    """Make the file of a recipe, and check the type of every tensor in it.

    Args:
        model: The 16-bit model that was scanned.
        plan: What to make.
        target: The file.
        imatrix: The importance matrix that the model was scanned with.
        threads: For llama.cpp's quantizer.
        force: Replace a file that is there.
        listener: Hears of progress.

    Raises:
        InputError: another model, a target that exists or cannot be written, or no room.
        UsageError: an importance matrix too many, or one that is missing.
        NativeError: llama.cpp would not make, or did not make, what was planned.
    """
    original = original_of(plan, model, imatrix, threads)
    return build_file(original, plan, target, listener or Logged(), force=force)


def verify(
    model: Path,
    built: Path,
    plan: Recipe,
    options: VerifyOptions,
    *,
    levels: Sequence[LevelSpec] | None = None,
    imatrix: Path | None = None,
    listener: Listener | None = None,
) -> Verification:
    """Measure a built recipe against its prediction and against levels, on text that did not choose it.

    Args:
        model: The 16-bit model.
        built: The file that `build` made.
        plan: Its recipe.
        options: The text, and how to run.
        levels: To compare with; None for the level of equal size and the next one up.
        imatrix: The importance matrix that the model was scanned with.
        listener: Hears of progress.

    Raises:
        InputError: another model or another file, or no text that took no part.
        NativeError: llama.cpp failed.
    """
    original = original_of(plan, model, imatrix, options.threads)
    made = model_file.read(built)
    verifying.require_built(plan, original.reference, made)
    (found,) = verifying.verify(original, [(plan, made)], levels, options, listener or Logged())
    return found
