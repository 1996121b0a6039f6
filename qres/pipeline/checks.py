"""What is refused before anything is made or measured."""

from __future__ import annotations

from collections.abc import Sequence

from qres.errors import InputError, UnsupportedError, UsageError
from qres.events import Listener
from qres.files import protect
from qres.gguf.imatrix import Imatrix, read, require_writable
from qres.gguf.imatrix_names import fitted
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.measure.job import STATE_NAME
from qres.pipeline import usual_recipes
from qres.pipeline.options import ScanOptions
from qres.printable import show
from qres.text import chunks


def check_context(options: ScanOptions, reference: Inventory) -> None:
    """llama.cpp aborts the process when some architectures run past their trained context."""
    if 0 < reference.n_ctx_train < chunks.MIN_TOKENS:
        raise UnsupportedError(
            f"{reference.path.name} was trained for {reference.n_ctx_train} tokens, too few to measure",
            f"at least {chunks.MIN_TOKENS} are needed",
        )
    if options.n_ctx % 2 or options.n_ctx < chunks.MIN_TOKENS:
        raise UsageError(
            f"--n-ctx {options.n_ctx} is not an even number of at least {chunks.MIN_TOKENS}", "give one, such as 512"
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


def require_places(options: ScanOptions, models: Sequence[Inventory], levels: Sequence[str]) -> None:
    """Nothing that a scan writes beside its reports is one of its inputs, and an importance matrix has a place.

    Args:
        options: What is asked for.
        models: The reference, then the given files.
        levels: Names of the levels that are measured.

    Raises:
        UsageError: a name for an importance matrix that is none.
        InputError: a place that cannot be written, or an input that would be overwritten.
    """
    given = (path for path in (options.imatrix, options.text, options.tokens) if path)
    inputs = (*(path for one in models for path in one.shards), *given)
    if options.make_imatrix:
        require_writable(options.make_imatrix, inputs)
    if options.out:
        recipes = usual_recipes.written(options.out, models[0].path, levels) if options.recipe else ()
        protect((options.out / STATE_NAME, *recipes), inputs, "choose another place with --out")


def given_imatrix(options: ScanOptions, models: Sequence[Inventory], listener: Listener) -> Imatrix | None:
    """The importance matrix that was given, of this reference."""
    if options.imatrix is None:
        return None
    imatrix = fitted(read(options.imatrix), models[0])
    without = imatrix.check(models[0])
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        listener.note(f"{show(options.imatrix.name)} has no entry for {show(without[0])}{more}: quantized without")
    return imatrix


def zero_matrices(reference: Inventory, values: Sequence[Magnitudes]) -> tuple[str, ...]:
    """What a reader must know of matrices that hold only zeros: they do nothing, at any type."""
    matrices = {tensor.name for tensor in reference.tensors if tensor.n_dims > 1 and tensor.n_weights}
    names = [row.tensor for row in values if row.only_zeros and row.tensor in matrices]
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    verb = "hold" if len(names) > 1 else "holds"
    return (f"{reference.path.name}: {show(names[0])}{more} {verb} only zeros. If that is not meant, get it again.",)


def refuse_broken(reference: Inventory, values: Sequence[Magnitudes], *, making: bool) -> None:
    """llama.cpp quantizes no tensor that holds NaN or infinity; files that exist can still be compared."""
    broken = [row for row in values if row.n_bad]
    if broken and making:
        first = broken[0]
        raise InputError(
            f"{reference.path.name}: {first.tensor} holds {first.n_bad} values that are not finite, the first at "
            f"{first.first_bad}{f'; so do {len(broken) - 1} other tensors' if len(broken) > 1 else ''}",
            "no level can be made from it: get the model again, or convert it again",
        )
