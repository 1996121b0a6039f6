"""C10: no command writes over what it reads, whatever name leads there: every command, every input, every spelling."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qres.cli.output import output_folder
from qres.errors import InputError
from qres.files import protect, write_text
from qres.gguf import imatrix
from qres.recipes.choices import Choices
from qres.recipes.dialects import tensor_type_file
from qres.records.as_json import to_json
from tests.examples.result import example
from tests.gguf.building import put_split
from tests.inputs.case import Outcome, Sandbox, assert_refused, full, run, sandbox, small
from tests.inputs.recipes import RECIPE


def same(target: Path, given: Path) -> str:
    return str(target)


def dotted(target: Path, given: Path) -> str:
    (given.parent / "x").mkdir(exist_ok=True)
    return f"./x/../{target.name}"


def absolute(target: Path, given: Path) -> str:
    return str(target.absolute())


def by_folder(target: Path, given: Path) -> str:
    Path("y").symlink_to(".")
    return f"y/{target.name}"


def _other(target: Path, link: Callable[[Path, Path], None]) -> str:
    """The input by a second name, which is the one that is given; what is written stays at the first."""
    second = Path(f"second-{target.name}")
    link(target, second)
    return str(second)


def symlink(target: Path, given: Path) -> str:
    return _other(target, lambda one, two: two.symlink_to(one.absolute()))


def hard_link(target: Path, given: Path) -> str:
    return _other(target, os.link)


HOW = [same, dotted, absolute, by_folder, symlink, hard_link]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A folder with an input of each kind, which is the current one."""
    found = sandbox(tmp_path, monkeypatch)
    Path("m.gguf").write_bytes(full())
    Path("q.gguf").write_bytes(small())
    Path("b.gguf").write_bytes(small())
    Path("t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    Path("i.txt").write_text("1 2 3 4 5 " * 60)
    Path("im.gguf").write_bytes(b"GGUF, or not: nothing is read before it is kept")
    Path("r.json").write_text(to_json(example()))
    Path("recipe.json").write_text(to_json(RECIPE))
    types = Choices(example()).types_by_level["Q4_K_M"]
    Path("from.txt").write_text(tensor_type_file(list(types.items())))
    return found


def digests() -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path().iterdir() if p.is_file()}


def refused(*arguments: str) -> None:
    before = digests()
    found: Outcome = run(arguments)
    assert_refused(found, 3, ["is an input and would be overwritten"])
    assert digests() == before
    assert not list(Path().rglob("*.partial"))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", ["m.gguf", "im.gguf", "recipe.json"])
def test_build(place: Sandbox, how: Callable[[Path, Path], str], given: str) -> None:
    out = how(Path(given), Path(given))
    refused("build", "m.gguf", "recipe.json", "--imatrix", "im.gguf", "-o", out, "--force")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", ["m.gguf", "b.gguf", "t.txt", "i.txt", "im.gguf"])
def test_verify_keeps_its_measures_in_the_recipe_alone(
    place: Sandbox, how: Callable[[Path, Path], str], given: str
) -> None:
    text = ["--tokens", given] if given == "i.txt" else ["--text", given if given == "t.txt" else "t.txt"]
    refused("verify", "m.gguf", "b.gguf", how(Path(given), Path(given)), *text, "--imatrix", "im.gguf")


@pytest.mark.parametrize("name", ["recipe.json", "tensor-types.txt", "custom-q.txt", "commands.txt"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", ["result", "--from", "--text", "--tokens", "--model", "--imatrix"])
def test_recipe(place: Sandbox, how: Callable[[Path, Path], str], given: str, name: str) -> None:
    source = {"result": "r.json", "--from": "from.txt", "--text": "t.txt", "--tokens": "i.txt", "--model": "m.gguf"}
    Path(source.get(given, "im.gguf")).replace(name)
    spelled = how(Path(name), Path(name))
    if given == "result":
        refused("recipe", spelled, "--budget", "5bpw", "--out", ".")
    elif given == "--from":
        refused("recipe", "r.json", "--from", spelled, "--out", ".")
    else:
        refused("recipe", "r.json", "--budget", "5bpw", "--refine", given, spelled, "--out", ".")


def test_recipe_in_its_default_folder(place: Sandbox) -> None:
    folder = Path("recipes/types-of-tensor-types.txt")
    folder.mkdir(parents=True)
    given = Path("from.txt").rename(folder / "tensor-types.txt")
    before = given.read_bytes()
    found = run(["recipe", "r.json", "--from", str(given), "--level", "Q4_K_M"])
    assert_refused(found, 3, ["is an input and would be overwritten"])
    assert given.read_bytes() == before
    assert list(folder.iterdir()) == [given]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("format", "name"), [("html", "report.html"), ("md", "report.md"), ("json", "result.json")])
def test_report(place: Sandbox, how: Callable[[Path, Path], str], format: str, name: str) -> None:
    Path("r.json").rename(name)
    refused("report", how(Path(name), Path(name)), "--format", format, "--out", ".")


def test_report_keeps_a_result_among_its_charts(place: Sandbox) -> None:
    Path("charts").mkdir()
    given = Path("r.json").rename("charts/drift-light.svg")
    before = given.read_bytes()
    assert_refused(run(["report", str(given), "--format", "md", "--out", "."]), 3, ["would be overwritten"])
    assert given.read_bytes() == before


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["report.html", "report.md", "result.json", ".qres-state.npz", ".qres.lock"])
@pytest.mark.parametrize("given", ["model", "file", "--text", "--tokens", "--imatrix"])
def test_scan(place: Sandbox, how: Callable[[Path, Path], str], given: str, name: str) -> None:
    from qres.measure.job import STATE_NAME

    name = STATE_NAME if "state" in name else name
    source = {"model": "m.gguf", "file": "q.gguf", "--text": "t.txt", "--tokens": "i.txt", "--imatrix": "im.gguf"}
    Path(source[given]).replace(name)
    spelled = how(Path(name), Path(name))
    more = {"model": [spelled], "file": ["m.gguf", spelled]}.get(given, ["m.gguf", given, spelled])
    refused("scan", *more, "--out", ".")


@pytest.mark.parametrize("given", ["m.gguf", "q.gguf", "t.gguf", "i.gguf", "im.gguf"])
@pytest.mark.parametrize("how", HOW)
def test_make_imatrix(place: Sandbox, how: Callable[[Path, Path], str], given: str) -> None:
    Path("t.txt").rename("t.gguf")
    Path("i.txt").rename("i.gguf")
    out = how(Path(given), Path(given))
    text = ["--tokens", "i.gguf"] if given == "i.gguf" else ["--text", "t.gguf"]
    refused("scan", "m.gguf", "q.gguf", *text, "--imatrix", "im.gguf", "--make-imatrix", out, "--out", "new")


@pytest.mark.parametrize("name", ["m-same-as-Q4_K_M.gguf", "recipe.json"])
def test_scan_with_recipes(place: Sandbox, name: str) -> None:
    folder = Path("out/recipes/same-as-Q4_K_M")
    folder.mkdir(parents=True)
    given = Path("t.txt").rename(folder / name)
    before = given.read_bytes()
    found = run(["scan", "m.gguf", "--recipe", "--text", str(given), "--levels", "Q4_K_M", "--out", "out"])
    assert_refused(found, 3, ["is an input and would be overwritten"])
    assert given.read_bytes() == before
    other = run(["scan", "m.gguf", "--recipe", "--text", str(given), "--levels", "Q8_0", "--out", "out"])
    assert "all checks are passed" in other.err  # those recipes go elsewhere


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_every_shard_is_an_input(tmp_path: Path, shard: int) -> None:
    paths = put_split(tmp_path)
    for given in paths:
        with pytest.raises(InputError, match="is an input and would be overwritten"):
            protect([paths[shard]], [None, given], "")
    protect([tmp_path / "new.gguf"], paths, "")


def test_a_loop_of_links_is_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").symlink_to(tmp_path / "a.gguf")
    with pytest.raises(InputError, match=r"cannot write .*a\.gguf"):
        write_text(tmp_path / "a.gguf", "", "")
    with pytest.raises(InputError, match=r"a\.gguf"):
        imatrix.write(tmp_path / "a.gguf", {}, {}, dataset="", chunks=1, chunk_size=1)
    protect([tmp_path / "a.gguf"], [tmp_path / "a.gguf"], "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


@pytest.mark.parametrize("command", ["scan", "inspect"])
@pytest.mark.parametrize("kind", ["broken", "loop"])
def test_a_link_that_leads_nowhere(place: Sandbox, command: str, kind: str) -> None:
    Path("link.gguf").symlink_to("gone.gguf" if kind == "broken" else "link.gguf")
    assert_refused(run([command, "link.gguf"]), 3, ["link.gguf"])


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs Linux's /proc")
def test_a_folder_that_takes_no_files_is_not_said_to_be_in_use() -> None:
    with pytest.raises(InputError, match="cannot write to /proc"), output_folder(Path("/proc"), []):
        pytest.fail("no work is done")
