"""Cases about `qres recipe`, `qres build` and `qres verify`: what no recipe can be made of, and what it is not for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qres.gguf import difference, model_file
from qres.levels import TYPE_TRAITS
from qres.recipes.budget import parse
from qres.recipes.choices import Choices
from qres.recipes.plan import make
from qres.recipes.wishes import Wishes
from qres.records.as_json import to_json
from qres.records.recipe import Recipe
from tests.examples.recipe import TENSORS, example
from tests.examples.result import example as older
from tests.gguf.building import Row, build, put
from tests.inputs.case import Build, case, full, small, typed
from tests.inputs.imatrix import GOOD as MATRIX_DATA

RESULT = to_json(example())
RECIPE = make(Choices(example()), parse("same-as:Q4_K_M"), Wishes())


def recipe(*options: str, result: str = RESULT) -> Build:
    """`qres recipe` on a result."""

    def run(folder: Path) -> Sequence[str]:
        put(folder, result.encode(), "result.json")
        return ["recipe", "result.json", *options]

    return run


def given(data: bytes, *options: str) -> Build:
    """`qres recipe --from` a file with these bytes."""

    def run(folder: Path) -> Sequence[str]:
        put(folder, data, "given")
        return [*recipe()(folder), "--from", "given", *options]

    return run


def rows(changes: Mapping[str, Sequence[int]] | None = None, without: str = "", kind: str = "") -> list[Row]:
    """The tensor table of the model that the example was scanned from, or of another one."""
    found: list[Row] = []
    at = 0
    for tensor in TENSORS:
        if tensor.name == without:
            continue
        shape = tuple((changes or {}).get(tensor.name, tensor.shape))
        traits = TYPE_TRAITS[kind if kind and tensor.type_16bit else tensor.type]
        found.append((tensor.name, shape, traits.id, at))
        at += -(-traits.bytes_of(math.prod(shape)) // 32) * 32
    return found


def model(table: Sequence[Row] | None = None) -> bytes:
    """A file with that table; its weights are zeros."""
    metadata = {
        "general.architecture": "llama",
        "general.name": "trained llama",
        "general.file_type": 1,
        "llama.block_count": 11,
        "llama.embedding_length": 576,
        "llama.context_length": 512,
        "llama.vocab_size": 1001,
    }
    table = rows() if table is None else table
    end = max(at + TYPE_TRAITS_BY_ID[kind].bytes_of(math.prod(shape)) for _, shape, kind, at in table)
    return build(metadata, table, end + 64)


TYPE_TRAITS_BY_ID = {traits.id: traits for traits in TYPE_TRAITS.values()}


def own(folder: Path) -> Recipe:
    """The recipe for the model in a folder: the fingerprint is that of its weights."""
    return replace(RECIPE, fingerprint=difference.fingerprint(model_file.read(folder / "m.gguf")))


def built(*options: str, weights: bytes | None = None, foreign: bool = False, **changes: object) -> Build:
    """`qres build` of a recipe for a model."""

    def run(folder: Path) -> Sequence[str]:
        put(folder, model() if weights is None else weights, "m.gguf")
        plan = RECIPE if foreign else own(folder)
        put(folder, to_json(replace(plan, **changes)).encode(), "recipe.json")  # type: ignore[arg-type]
        return ["build", "m.gguf", "recipe.json", *(options or ("-o", "out.gguf"))]

    return run


def planned(text: bytes) -> Build:
    """`qres build` of something that is no recipe."""

    def run(folder: Path) -> Sequence[str]:
        put(folder, model(), "m.gguf")
        put(folder, text, "recipe.json")
        return ["build", "m.gguf", "recipe.json", "-o", "out.gguf"]

    return run


def with_output(*options: str, name: str = "out.gguf") -> Build:
    """`qres build` into a place where something is."""

    def run(folder: Path) -> Sequence[str]:
        arguments = built(*options)(folder)
        if not (folder / name).exists():
            put(folder, b"mine", name)
        return arguments

    return run


def with_matrix(imatrix: str = "", imatrix_digest: str = "") -> Build:
    """`qres build` with an importance matrix."""

    def run(folder: Path) -> Sequence[str]:
        put(folder, MATRIX_DATA, "matrix.dat")
        return [*built(imatrix=imatrix, imatrix_digest=imatrix_digest)(folder), "--imatrix", "matrix.dat"]

    return run


def verified(data: bytes, *options: str) -> Build:
    """`qres verify` of a file with these bytes."""

    def run(folder: Path) -> Sequence[str]:
        built()(folder)
        put(folder, data, "out.gguf")
        return ["verify", "m.gguf", "out.gguf", "recipe.json", *options]

    return run


def tampered(tensor: int, **changes: object) -> bytes:
    """A recipe with another plan for one tensor."""
    tensors = list(RECIPE.tensors)
    tensors[tensor] = replace(tensors[tensor], **changes)  # type: ignore[arg-type]
    return to_json(replace(RECIPE, tensors=tuple(tensors))).encode()


def changed(**changes: object) -> bytes:
    """A recipe with other fields."""
    return json.dumps(json.loads(to_json(RECIPE)) | changes).encode()


GIVE = "Give the recipe.json that `qres recipe` wrote"
SIMULATED = "no recipe without predictions"
_UNUSED = example()
assert _UNUSED.prediction is not None
WITHOUT = to_json(replace(_UNUSED, prediction=replace(_UNUSED.prediction, used=False, reason="no gradient of X")))
RECIPES = [
    case("recipe-nothing-asked", "no budget", recipe(), "give one of --budget", code=2),
    case(
        "recipe-two-asked",
        "a budget and layers",
        recipe("--budget", "5bpw", "--keep-16bit", "1"),
        "give one of --budget",
        code=2,
    ),
    case("recipe-missing", "no such result", typed("recipe no.json --budget 5bpw"), "cannot read no.json"),
    case(
        "recipe-of-recipe",
        "a recipe by mistake",
        recipe("--budget", "5bpw", result=to_json(RECIPE)),
        "not a qres result",
    ),
    case(
        "recipe-older-result",
        "a result of an older qres",
        recipe("--budget", "5bpw", result=to_json(replace(older(), schema_version=1))),
        "this result has schema version 1, qres reads version 2",
        "Make it again: qres scan models/trained.gguf",
    ),
    case("recipe-no-prediction", "no predictions", recipe("--budget", "5bpw", result=WITHOUT), SIMULATED, code=4),
    case(
        "recipe-quantized-reference",
        "the reference was quantized",
        recipe(
            *("--budget", "5bpw"),
            result=to_json(replace(_UNUSED, reference=replace(_UNUSED.reference, is_16bit=False))),
        ),
        "was no 16-bit model",
        code=4,
    ),
    case(
        "recipe-no-ladder",
        "llama.cpp cannot quantize it",
        recipe("--budget", "5bpw", result=to_json(replace(_UNUSED, ladder=()))),
        "llama.cpp cannot quantize",
        code=4,
    ),
    case("recipe-budget-word", "a budget in words", recipe("--budget", "small"), "'small' is not a budget", code=2),
    case("recipe-budget-empty", "an empty budget", recipe("--budget", ""), "is not a budget", code=2),
    case("recipe-budget-zero", "nothing", recipe("--budget", "0bpw"), "is no limit", code=2),
    case(
        "recipe-budget-level",
        "the size of no level",
        recipe("--budget", "same-as:Q4_M"),
        "unknown level",
        "did you mean",
        code=2,
    ),
    case("recipe-too-small", "too few bits", recipe("--budget", "1bpw"), "Possible are", "bits per weight", code=2),
    case("recipe-too-small-file", "too few bytes", recipe("--budget", "10KiB"), "Possible are", "MiB", code=2),
    case("recipe-no-level", "a level that is not known", recipe("--budget", "+1bpw", "--level", "IQ4_XS"), code=2),
    case("recipe-pin-form", "a pin without a type", recipe("--budget", "6bpw", "--pin", "ffn"), "REGEX=TYPE", code=2),
    case(
        "recipe-pin-type",
        "a pin to no type",
        recipe("--budget", "6bpw", "--pin", "ffn=Q9"),
        "unknown tensor type 'Q9'",
        code=2,
    ),
    case(
        "recipe-pin-regex",
        "a pin with half a group",
        recipe("--budget", "6bpw", "--pin", "(ffn=Q4_K"),
        "is no regular expression",
        code=2,
    ),
    case(
        "recipe-pin-nothing",
        "a pin that fits no tensor",
        recipe("--budget", "6bpw", "--pin", "attn_norm=Q4_K"),
        "no tensor that is quantized",
        code=2,
    ),
    case("recipe-keep-none", "no layer", recipe("--keep-16bit", "0"), "--keep-16bit 0", code=2),
    case("recipe-keep-all", "more layers than there are", recipe("--keep-16bit", "99"), "layers below 16 bit", code=2),
    case("recipe-from-missing", "no such file", recipe("--from", "no.gguf"), "cannot read no.gguf"),
    case("recipe-from-binary", "neither model nor rules", given(b"\x89PNG\0\0"), "neither a GGUF nor"),
    case("recipe-from-text", "a text without rules", given(b"hello world"), "is not PATTERN=TYPE"),
    case("recipe-from-empty", "an empty file", given(b""), "no rules in it"),
    case("recipe-from-type", "rules for no type", given(b"ffn_down=q9_k"), "no type that this qres knows"),
    case("recipe-from-regex", "rules that are none", given(b"(ffn=q4_k"), "is no regular expression"),
    case("recipe-from-other", "a file of another model", given(full()), "is not the model that was scanned"),
    case(
        "recipe-refine-from",
        "given types to refine",
        given(b"ffn_down=q4_k", "--refine"),
        "--refine and --from exclude each other",
        code=2,
    ),
    case(
        "recipe-refine-no-model",
        "the scanned model is gone",
        recipe("--budget", "same-as:Q4_K_M", "--refine"),
        "trained.gguf",
    ),
    case(
        "recipe-refine-texts",
        "two texts",
        recipe("--budget", "same-as:Q4_K_M", "--refine", "--text", "a", "--tokens", "b"),
        "--text and --tokens exclude each other",
        code=2,
    ),
    case("recipe-out", "no folder", recipe("--budget", "same-as:Q4_K_M", "--out", "-"), "is not a folder", code=2),
    case("recipe-name-empty", "a variable that is not set", recipe("--from", ""), "--from is empty", code=2),
]
BUILDS = [
    case("build-no-model", "no such model", typed("build no.gguf recipe.json -o out.gguf"), "cannot read recipe.json"),
    case("build-text", "a text for a recipe", planned(b"hello"), "not JSON", GIVE),
    case("build-result", "a result for a recipe", planned(RESULT.encode()), "not a qres recipe", GIVE),
    case(
        "build-version",
        "a recipe of the future",
        planned(changed(recipe_version=99)),
        "recipe version 99",
    ),
    case("build-base", "a level that is none", planned(changed(base="Q4_Z")), "is no level that llama.cpp makes"),
    case("build-base-16bit", "a level that overrides nothing", planned(changed(base="F16")), "is no level"),
    case("build-type", "a type that is none", planned(tampered(2, type="Q9")), "cannot be Q9"),
    case("build-row", "a type that does not fit", planned(tampered(0, type="Q4_K")), "cannot be Q4_K"),
    case(
        "build-missing",
        "a model without a tensor",
        built(weights=model(rows(without="blk.0.ffn_down.weight"))),
        "has no tensor blk.0.ffn_down.weight",
    ),
    case(
        "build-shape",
        "a model of other shapes",
        built(weights=model(rows({"blk.0.ffn_down.weight": (512, 576)}))),
        "blk.0.ffn_down.weight has the shape",
    ),
    case("build-weights", "another model of the same shapes", built(foreign=True), "has other weights than the model"),
    case("build-other", "another model", built(weights=full(), foreign=True), "has no tensor"),
    case("build-exists", "a file that is there", with_output(), "out.gguf exists", "--force"),
    case(
        "build-onto-model",
        "onto the model",
        with_output("-o", "m.gguf", "--force", name="m.gguf"),
        "is an input and would be overwritten",
    ),
    case(
        "build-onto-recipe",
        "onto the recipe",
        with_output("-o", "recipe.json", "--force"),
        "is an input and would be overwritten",
    ),
    case("build-onto-folder", "onto a folder", with_output("-o", ".", "--force"), "is not a file"),
    case("build-no-output", "no output", built("--force"), "Missing option", code=2),
    case(
        "build-matrix-missing",
        "without its importance matrix",
        built(imatrix="m.dat", imatrix_digest="ab"),
        "made for the importance matrix m.dat",
        code=2,
    ),
    case("build-matrix-unasked", "with an importance matrix", with_matrix(), "without an importance matrix", code=2),
    case(
        "build-matrix-other",
        "with another one",
        with_matrix(imatrix="m.dat", imatrix_digest="ab"),
        "is not the importance matrix",
    ),
]
VERIFICATIONS = [
    case("verify-missing", "no such file", typed("verify m.gguf no.gguf recipe.json"), "cannot read recipe.json"),
    case("verify-other", "another model", verified(small()), "is not the same model as m.gguf"),
    case("verify-types", "a file of other types", verified(model()), "is not what the recipe says"),
    case("verify-text", "a text for a file", verified(b"hello"), "not a GGUF"),
]
