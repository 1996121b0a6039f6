"""Reports on disk: whole or not at all, and never over an input."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import filelock
import pytest

from qres.cli import output
from qres.errors import InputError
from qres.files import protect
from qres.records.as_json import load, to_json
from qres.report import html, markdown
from qres.report.markdown import Markdown
from tests.examples.result import example

RESULT = example()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fail(*_args: object, **_kwargs: object) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------- what is written


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drawing: what the renderers give is tested with them."""
    images = {"charts/a.svg": "<svg>größer</svg>", "charts/b.svg": "<svg/>"}
    monkeypatch.setattr(markdown, "render_markdown", lambda result: Markdown(f"# {result.verdict.level}\n", images))
    monkeypatch.setattr(html, "render_html", lambda result: f"<p>{result.verdict.level} größer\n")


@pytest.mark.usefixtures("_quick")
def test_reports_of_all_formats(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = output.reports(RESULT, folder, {"json", "md", "html"})
    assert paths == (folder / "report.html", folder / "report.md", folder / "result.json")
    assert paths[0].read_bytes() == "<p>Q4_K_M größer\n".encode()
    assert paths[1].read_bytes() == b"# Q4_K_M\n"
    assert load(paths[2]) == RESULT
    assert (folder / "charts" / "a.svg").read_bytes() == "<svg>größer</svg>".encode()
    assert (folder / "charts" / "b.svg").read_bytes() == b"<svg/>"
    expected = ["charts/a.svg", "charts/b.svg", "report.html", "report.md", "result.json"]
    assert files(folder) == expected  # nothing partial is left


@pytest.mark.usefixtures("_quick")
def test_reports_failed_image_leaves_no_report_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InputError, match=r"cannot write .*a\.svg"):
        output.reports(RESULT, tmp_path, {"md"})
    assert files(tmp_path) == []


def test_reports_of_one_format_write_that_file_alone(tmp_path: Path) -> None:
    assert output.reports(RESULT, tmp_path, ["json"]) == (tmp_path / "result.json",)
    assert files(tmp_path) == ["result.json"]


def test_reports_target_names_the_file(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "mine.json"
    assert output.reports(RESULT, tmp_path / "unused", {"json"}, target) == (target,)
    assert files(tmp_path) == ["sub/mine.json"]


@pytest.mark.usefixtures("_quick")
def test_reports_images_lie_beside_the_target(tmp_path: Path) -> None:
    output.reports(RESULT, tmp_path / "unused", {"md"}, tmp_path / "sub" / "mine.md")
    assert files(tmp_path) == ["sub/charts/a.svg", "sub/charts/b.svg", "sub/mine.md"]


def test_reports_have_lf_line_ends_and_utf8(tmp_path: Path) -> None:
    output.reports(RESULT, tmp_path, {"json"})
    assert (tmp_path / "result.json").read_bytes() == to_json(RESULT).encode("utf-8")


def test_reports_replace_older_ones(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("old")
    output.reports(RESULT, tmp_path, {"json"})
    assert load(tmp_path / "result.json") == RESULT


# ---------------------------------------------------------------- whole or not at all


@pytest.mark.parametrize("step", ["replace", "write_text"])
@pytest.mark.parametrize("before", [None, "old"])
def test_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: str | None
) -> None:
    path = tmp_path / "result.json"
    if before is not None:
        path.write_text(before)
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, fail)
        with pytest.raises(InputError, match=r"cannot write .*result\.json: No space left on device"):
            output.reports(RESULT, tmp_path, {"json"})
    assert files(tmp_path) == ([] if before is None else ["result.json"])
    if before is not None:
        assert path.read_text() == before


def test_interrupted_write_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            output.reports(RESULT, tmp_path, {"json"})
    assert files(tmp_path) == []


def test_final_name_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []
    replace = Path.replace

    def watch(self: Path, target: Path) -> Path:
        seen.append((target.exists(), self.read_text(encoding="utf-8")))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    output.reports(RESULT, tmp_path, {"json"})
    assert seen == [(False, to_json(RESULT))]  # complete before it gets its name


def test_target_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists and is not a file"):
        output.reports(RESULT, tmp_path, {"json"}, tmp_path)
    assert files(tmp_path) == []
    assert not [path for path in tmp_path.parent.iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize("name", ["file/report.json", "x" * 300])
def test_target_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write"):
        output.reports(RESULT, tmp_path, {"json"}, tmp_path / name)
    assert files(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


# ---------------------------------------------------------------- the output folder


def test_output_folder_is_made_before_the_work_and_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with output.output_folder(folder, []):
        assert folder.is_dir()
        assert [path.name for path in folder.iterdir()] == [".qres.lock"]
    assert list(folder.iterdir()) == []
    with output.output_folder(folder, []):  # again: it may exist
        (folder / "report.md").write_text("text")
    assert files(tmp_path) == ["a/b/report.md"]


@pytest.mark.parametrize("error", [InputError("odd"), KeyboardInterrupt(), ZeroDivisionError()])
def test_output_folder_goes_when_the_work_fails(tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "out"
    with pytest.raises(type(error)) as caught, output.output_folder(folder, []):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_output_folder_stays_when_the_work_fails_and_left_something(tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def work() -> None:
        (folder / "report.html").write_text("half of the reports")
        raise InputError("odd")

    with pytest.raises(InputError, match="odd"), output.output_folder(folder, []):
        work()
    assert files(tmp_path) == ["out/report.html"]


def test_output_folder_that_was_there_stays_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="odd"), output.output_folder(tmp_path, []):
        raise InputError("odd")
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_output_folder_with_a_file_in_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError, match=r"^cannot write to ") as caught, output.output_folder(tmp_path / name, []):
        pytest.fail("no work is done")
    assert "--out" in caught.value.hint
    assert (tmp_path / "file").read_text() == "text"


def test_output_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: filelock.FileLock, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", self.lock_file)

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with (
        pytest.raises(InputError, match=r"^cannot write to .*: Permission denied"),
        output.output_folder(tmp_path, []),
    ):
        pytest.fail("no work is done")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    with pytest.raises(InputError, match=r"^cannot write to .*: Permission denied"), output.output_folder(folder, []):
        pytest.fail("no work is done")


def test_output_folder_that_another_scan_uses(tmp_path: Path) -> None:
    with output.output_folder(tmp_path / "out", []):
        with (
            pytest.raises(InputError, match=r"another scan is writing to .*out"),
            output.output_folder(tmp_path / "out", []),
        ):
            pytest.fail("no work is done")
        assert (tmp_path / "out").is_dir()
    with output.output_folder(tmp_path / "out", []):
        """Free again."""


def test_output_folder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 5 * 2**20))
    with (
        pytest.raises(InputError, match=r"out has 5 MiB free, the reports need up to 32"),
        output.output_folder(tmp_path / "out", []),
    ):
        pytest.fail("no work is done")
    assert files(tmp_path) == []


class Usage(NamedTuple):
    """As shutil.disk_usage."""

    total: int
    used: int
    free: int


def test_rescue_keeps_a_result(tmp_path: Path) -> None:
    kept = output.rescue(RESULT, tmp_path / "new")
    assert kept is not None
    assert load(kept) == RESULT
    (tmp_path / "file").touch()
    assert output.rescue(RESULT, tmp_path / "file" / "below") is None


# ---------------------------------------------------------------- the default folder


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("SmolLM2-135M.F16.gguf", "SmolLM2-135M.F16"),
        ("a b/c:d.gguf", "cd"),
        ("모델 100%.gguf", "모델 100%"),
        ("***.gguf", "model"),
        ("..gguf", "model"),
        ("CON.gguf", "CON_"),
        ("m-00002-of-00003.gguf", "m"),
        ("m", "m"),
        ("a\nb\x1b[31m.gguf", "ab[31m"),
    ],
)
def test_default_folder_is_named_after_the_model(model: str, folder: str, tmp_path: Path) -> None:
    assert output.default_folder([Path(model)], tmp_path) == tmp_path / folder


def test_default_folder_of_another_model_of_that_name_is_left_alone(tmp_path: Path) -> None:
    def scanned(model: Path) -> Path:
        folder = output.default_folder([model], tmp_path / "reports")
        about = dataclasses.replace(RESULT.reference, path=str(model))
        output.reports(dataclasses.replace(RESULT, reference=about), folder, ["json"])
        return folder

    one, other = tmp_path / "one" / "m.gguf", tmp_path / "other" / "m.gguf"
    assert scanned(one).name == "m"
    assert scanned(other).name == "m-2"
    assert scanned(one).name == "m"
    assert scanned(other).name == "m-2"
    assert scanned(tmp_path / "one" / "m-00002-of-00002.gguf").name == "m"  # a shard is its model
    assert output.default_folder([tmp_path / "new.gguf", one], tmp_path / "reports").name == "new"


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("name", ["report.html", "report.md", "result.json"])
@pytest.mark.parametrize("how", ["same", "symlink to it", "it is a symlink", "hard link", "dotted"])
def test_inputs_are_protected(tmp_path: Path, name: str, how: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    target, other = out / name, tmp_path / "model.gguf"
    given = other
    if how == "it is a symlink":
        other.write_text("model")
        target.symlink_to(other)
    else:
        target.write_text("model")
        if how == "same":
            given = target
        elif how == "dotted":
            given = out / ".." / "out" / name
        elif how == "symlink to it":
            other.symlink_to(target)
        else:
            other.hardlink_to(target)
    inputs = [tmp_path / "something else", given]
    message = rf"{re.escape(name)} is an input and would be overwritten"
    with pytest.raises(InputError, match=message), output.output_folder(out, inputs):
        pytest.fail("no work is done")
    with pytest.raises(InputError, match=message) as caught:
        protect([out / "other", target], inputs, output.ELSEWHERE)
    assert "--out" in caught.value.hint
    assert given.read_text() == "model"


def test_inputs_of_other_names_are_no_hindrance(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("model")
    (tmp_path / "report.html").write_text("an older report, with the same text as nothing")
    (tmp_path / "result.json").symlink_to(tmp_path / "gone")
    inputs = [model, tmp_path / "missing.gguf"]
    with output.output_folder(tmp_path, inputs):
        pass
    protect([tmp_path / "report.html", tmp_path / "result.json", tmp_path / "missing.gguf"], inputs, output.ELSEWHERE)
