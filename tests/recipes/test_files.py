"""Recipes on disk: written, read again, refused where they cannot be, and the commands in them as a shell runs them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qres.errors import InputError
from qres.recipes import dialects, files
from qres.recipes.budget import parse
from qres.recipes.choices import Choices
from qres.recipes.plan import make
from qres.recipes.wishes import Wishes
from qres.records import as_json
from qres.records.recipe import Built, Exchange, Measure, Pairing, Recipe, Refinement, Verification
from tests.examples import recipe as ex
from tests.examples.recipe import DOWN_0, EMBEDDING, NAMES, NORM, OTHER_NORM, ROUTER

FILES = ["recipe.json", "tensor-types.txt", "custom-q.txt", "commands.txt"]
MODEL = "models/trained.gguf"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make(Choices(ex.example()), parse("6bpw"), Wishes())


@pytest.fixture(scope="module")
def other() -> Recipe:
    return make(Choices(ex.example()), parse("7bpw"), Wishes())


def measured(recipe: Recipe) -> Recipe:
    """With everything that can be known of one."""
    measure = Measure("recipe", recipe.bytes, 0.004, 0.0003, 0.95, 0.004, 0.01, 0.002, None)
    return replace(
        recipe,
        refinement=Refinement(
            "text",
            4,
            7,
            (Exchange(EMBEDDING, "Q5_0", "Q5_1", DOWN_0, "Q6_K", "Q5_K", -0.001, -0.0008, None),),
            0.005,
            0.004,
            3.2,
        ),
        built=Built("out.gguf", recipe.bytes + 9000, recipe.bytes, len(NAMES)),
        verification=Verification(
            "out.gguf",
            "text",
            512,
            8,
            2040,
            measure,
            (replace(measure, name="Q4_K_M"),),
            (Pairing("Q4_K_M", -0.001, 0.0002),),
            recipe.predicted,
            True,
        ),
    )


def quantized(recipe: Recipe) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in recipe.tensors if tensor.name not in {NORM, OTHER_NORM, ROUTER}}


def retyped(recipe: Recipe, name: str, kind: str) -> Recipe:
    tensors = tuple(replace(tensor, type=kind) if tensor.name == name else tensor for tensor in recipe.tensors)
    return replace(recipe, tensors=tensors)


# ---------------------------------------------------------------- JSON


def test_a_recipe_is_read_as_it_was_written(recipe: Recipe) -> None:
    for one in (recipe, measured(recipe), replace(recipe, predicted=None, stock=())):
        assert as_json.recipe_from_json(as_json.to_json(one)) == one
        assert as_json.recipe_from_json(as_json.to_json(one).encode()) == one


def tampered(recipe: Recipe, change: Callable[[Json], object]) -> str:
    """Its JSON after something was changed in it."""
    found: Json = json.loads(as_json.to_json(recipe))
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("base"), "not a qres recipe: Object missing required field `base`"),
        (lambda r: r.update(bytes="many"), "not a qres recipe: Expected `int`, got `str` - at `$.bytes`"),
        (lambda r: r["tensors"][2].pop("type"), "missing required field `type` - at `$.tensors[2]`"),
        (lambda r: r["tensors"][2].update(quantizable=1), "at `$.tensors[2].quantizable`"),
        (lambda r: r.update(gap=None), "at `$.gap`"),
        (lambda r: r.update(recipe_version=2), "this recipe has recipe version 2, qres reads version 1"),
        (lambda r: r.update(recipe_version="1"), "not a qres recipe"),
        (lambda r: r.pop("recipe_version"), "missing required field `recipe_version`"),
        (lambda r: r["tensors"][1].update(bytes=2**63), "the number at $.tensors[1].bytes is impossible"),
        (lambda r: r["tensors"][0].update(shape=[576, -(2**70)]), "not a qres recipe"),
    ],
)
def test_what_is_no_recipe_is_refused_with_the_place(
    recipe: Recipe, change: Callable[[Json], object], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        as_json.recipe_from_json(tampered(recipe, change))
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"recipe"', "{}", b"\xff\xfe", "[" * 100_000])
def test_other_texts_are_no_recipes(text: str | bytes) -> None:
    with pytest.raises(InputError) as caught:
        as_json.recipe_from_json(text)
    assert "recipe.json" in caught.value.hint


def test_a_result_is_no_recipe_and_a_recipe_no_result(recipe: Recipe) -> None:
    with pytest.raises(InputError, match="not a qres recipe"):
        as_json.recipe_from_json(as_json.to_json(ex.example()))
    with pytest.raises(InputError, match="not a qres result"):
        as_json.from_json(as_json.to_json(recipe))


def test_fields_of_later_versions_are_passed_over(recipe: Recipe) -> None:
    assert as_json.recipe_from_json(tampered(recipe, lambda r: r.update(later=1))) == recipe


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.json: No such file"):
        as_json.load_recipe(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        as_json.load_recipe(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text(as_json.to_json(recipe)[:-20])
    with pytest.raises(InputError, match=r"broken\.json: not JSON"):
        as_json.load_recipe(broken)


# ---------------------------------------------------------------- what is planned can be


def written(recipe: Recipe, folder: Path) -> Path:
    path = folder / "recipe.json"
    path.write_text(as_json.to_json(recipe))
    return path


def test_a_recipe_that_can_be_made_is_loaded(tmp_path: Path, recipe: Recipe) -> None:
    path = written(measured(recipe), tmp_path)
    assert files.load(path) == measured(recipe)


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        (EMBEDDING, "Q4_K", "[576, 1001] cannot be Q4_K"),  # rows of 576 hold no blocks of 256
        (EMBEDDING, "IQ4_XS", "[576, 1001] cannot be IQ4_XS"),
        (DOWN_0, "Q9_K", "[1024, 576] cannot be Q9_K"),
        (DOWN_0, "q6_k", "[1024, 576] cannot be q6_k"),
        (DOWN_0, "", "[1024, 576] cannot be "),
        (DOWN_0, "Q4_0_4_4", "[1024, 576] cannot be Q4_0_4_4"),  # gone from llama.cpp
    ],
)
def test_types_that_do_not_fit_their_tensor_are_refused(
    tmp_path: Path, recipe: Recipe, name: str, kind: str, shown: str
) -> None:
    path = written(retyped(recipe, name, kind), tmp_path)
    with pytest.raises(InputError) as caught:
        files.load(path)
    assert caught.value.message == f"{path}: {name} {shown}"


@pytest.mark.parametrize("shape", [(), (577, 1001), (1,)])
def test_shapes_that_do_not_fit_their_type_are_refused(tmp_path: Path, recipe: Recipe, shape: tuple[int, ...]) -> None:
    first = replace(recipe.tensors[0], shape=shape, type="Q8_0")
    path = written(replace(recipe, tensors=(first, *recipe.tensors[1:])), tmp_path)
    with pytest.raises(InputError, match="cannot be Q8_0"):
        files.load(path)


@pytest.mark.parametrize("base", ["", "Q4_K", "q4_k_m", "Q9_K_M", "F16", "BF16", "F32", "Q4_0_4_4", "x\x1b[31m"])
def test_levels_that_nothing_is_quantized_as_are_refused(tmp_path: Path, recipe: Recipe, base: str) -> None:
    path = written(replace(recipe, base=base), tmp_path)
    with pytest.raises(InputError, match=r"is no level that llama\.cpp makes") as caught:
        files.load(path)
    assert "\x1b" not in caught.value.message


# ---------------------------------------------------------------- writing


def test_four_files_are_written(tmp_path: Path, recipe: Recipe) -> None:
    folder = tmp_path / "made" / "by it"
    paths = files.save(recipe, folder, MODEL)
    assert [path.name for path in paths] == FILES
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)  # nothing half written is left
    assert files.load(paths[0]) == recipe
    for path in paths[1:3]:
        rules = dialects.parse(path.read_text())
        assert dialects.apply(rules, NAMES) == quantized(recipe)  # nothing for what is copied
        assert len(rules) == 6
    assert paths[3].read_text().splitlines() == files.commands(recipe, folder, MODEL)
    for path in paths:
        data = path.read_bytes()
        assert data.endswith(b"\n")
        assert b"\r" not in data


def test_files_are_replaced(tmp_path: Path, recipe: Recipe, other: Recipe) -> None:
    files.save(recipe, tmp_path, MODEL)
    paths = files.save(other, tmp_path, MODEL)
    assert files.load(paths[0]) == other
    assert dialects.apply(dialects.parse(paths[1].read_text()), NAMES) == quantized(other)


def test_what_was_measured_of_the_same_types_is_kept(tmp_path: Path, recipe: Recipe) -> None:
    known = measured(recipe)
    files.update(known, tmp_path / "recipe.json")
    again = replace(recipe, budget="kld:0.01", notes=("another way to it",))
    files.save(again, tmp_path, MODEL)
    found = files.load(tmp_path / "recipe.json")
    assert found == replace(again, built=known.built, verification=known.verification)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: retyped(r, DOWN_0, "Q8_0"),
        lambda r: replace(r, fingerprint="another"),
        lambda r: replace(r, imatrix_digest="another"),
        lambda r: replace(r, tensors=r.tensors[:-1]),
    ],
)
def test_what_was_measured_of_another_file_is_dropped(
    tmp_path: Path, recipe: Recipe, change: Callable[[Recipe], Recipe]
) -> None:
    files.update(measured(recipe), tmp_path / "recipe.json")
    changed = change(recipe)
    files.save(changed, tmp_path, MODEL)
    assert files.load(tmp_path / "recipe.json") == changed


def test_what_was_measured_now_counts(tmp_path: Path, recipe: Recipe) -> None:
    files.update(measured(recipe), tmp_path / "recipe.json")
    now = measured(recipe)
    assert now.verification is not None
    now = replace(now, verification=replace(now.verification, chunks=16), built=None)
    files.save(now, tmp_path, MODEL)
    assert files.load(tmp_path / "recipe.json") == now


@pytest.mark.parametrize("text", ["", "{}", "not JSON", '{"recipe_version": 99}'])
def test_what_is_there_and_no_recipe_is_replaced(tmp_path: Path, recipe: Recipe, text: str) -> None:
    (tmp_path / "recipe.json").write_text(text)
    files.save(recipe, tmp_path, MODEL)
    assert files.load(tmp_path / "recipe.json") == recipe


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path, recipe: Recipe, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"{name} exists and is not a file") as caught:
        files.save(recipe, tmp_path, MODEL)
    assert "--out" in caught.value.hint
    assert (tmp_path / name).is_dir()


def test_a_file_in_the_place_of_the_folder_is_an_error_of_the_user(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InputError, match=r"cannot write .*taken"):
        files.save(recipe, tmp_path / "taken", MODEL)
    assert (tmp_path / "taken").read_text() == "mine"


# ---------------------------------------------------------------- commands


def spoken(line: str, folder: Path) -> list[str]:
    """The program's arguments when a shell runs the line."""
    for name in ("qres", "llama-quantize"):
        program = folder / name
        program.write_text('#!/bin/sh\nprintf "%s\\0" "$0" "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True, env=environment, text=True)
    first, *rest = done.stdout.split("\0")[:-1]
    return [Path(first).name, *rest]


@pytest.mark.parametrize("name", ["plain", "with space", "it's", 'a "b" $HOME `x` \\ &', "same-as-Q4_K_M"])
def test_commands_survive_a_shell(tmp_path: Path, recipe: Recipe, name: str) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    folder, model = tmp_path / name, f"/models/{name}/my {name.replace('/', '')}-F16.gguf"
    files.save(recipe, folder, model)
    build, file_rules, one_line = files.commands(recipe, folder, model)
    out = f"my {name}-F16-{name}.gguf"
    embedding = dialects.type_word(quantized(recipe)[EMBEDDING])
    assert spoken(build, programs) == ["qres", "build", model, str(folder / "recipe.json"), "-o", out]
    ends = [model, out, recipe.base]
    options = ["--token-embedding-type", embedding]
    assert spoken(file_rules, programs) == [
        *("llama-quantize", *options, "--tensor-type-file", str(folder / "tensor-types.txt"), *ends)
    ]
    rules = (folder / "custom-q.txt").read_text().rstrip("\n")
    assert spoken(one_line, programs) == ["llama-quantize", *options, "--custom-q", rules, *ends]
    assert shlex.split(build) == ["qres", "build", model, str(folder / "recipe.json"), "-o", out]


def test_commands_name_the_importance_matrix(tmp_path: Path, recipe: Recipe) -> None:
    with_matrix = replace(recipe, imatrix="my matrix.gguf")
    for line in files.commands(with_matrix, tmp_path, MODEL):
        words = shlex.split(line)
        assert words[words.index("--imatrix") + 1] == "my matrix.gguf"
    for line in files.commands(recipe, tmp_path, MODEL):
        assert "--imatrix" not in line


def test_the_head_has_an_option_where_there_is_one(tmp_path: Path, recipe: Recipe) -> None:
    head = replace(recipe.tensors[0], name="output.weight", type="Q6_K")
    untied = replace(recipe, tensors=(*recipe.tensors, head))
    _, file_rules, one_line = files.commands(untied, tmp_path, MODEL)
    for line in (file_rules, one_line):
        words = shlex.split(line)
        assert words[words.index("--output-tensor-type") + 1] == "q6_K"


def test_an_embedding_that_is_copied_as_it_is_has_no_option(tmp_path: Path, recipe: Recipe) -> None:
    copied = replace(recipe.tensors[0], quantizable=False)
    lines = files.commands(replace(recipe, tensors=(copied, *recipe.tensors[1:])), tmp_path, MODEL)
    assert not any("--token-embedding-type" in line for line in lines)


# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    ("budget", "purpose", "name"),
    [
        ("same-as:Q4_K_M", "any", "same-as-Q4_K_M"),
        ("kld:0.01", "any", "kld-0.01"),
        ("4.9bpw", "gpu", "4.9bpw-gpu"),
        ("Q4_K_M with 3 at 16 bit", "any", "Q4_K_M-with-3-at-16-bit"),
        ("  +0.10bpw\t", "any", "+0.10bpw"),
        ("types of a/b\\c.gguf", "any", "types-of-abc.gguf"),
        ("??", "any", "recipe"),
    ],
)
def test_folder_is_named_after_budget_and_purpose(recipe: Recipe, budget: str, purpose: str, name: str) -> None:
    found = files.default_folder(Path("reports/mine/result.json"), replace(recipe, budget=budget, purpose=purpose))
    assert found == Path("reports/mine/recipes") / name
