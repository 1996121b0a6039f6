"""The command line as a user meets it: exit codes, one line on standard error, nothing on standard output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from gguf import GGUFWriter

from qres.cli.program import main
from qres.errors import InputError, NativeError, QresError, UnsupportedError, UsageError
from qres.levels import LevelSpec
from qres.measure.job import Preflight
from qres.pipeline import candidates, demo
from qres.pipeline import run as scan_module
from qres.pipeline.options import ScanOptions
from qres.quantize import cache
from qres.records.as_json import from_json, to_json
from qres.records.result import Result
from qres.text.chunks import Texts
from tests.examples.result import example

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QRES_DEBUG", raising=False)
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are looked at with the reports; drawing them takes seconds."""
    monkeypatch.setattr("qres.report.charts.scan.to_svg", lambda *_: "<svg/>")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """`qres` with these arguments."""
    code: object = 0
    try:
        main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return Outcome(code, out, err)


def assert_refused(found: Outcome, code: int, *words: str) -> None:
    """One line that says what is wrong."""
    assert found.out == ""
    assert found.err.startswith("qres: ")
    assert found.err.count("\n") == 1
    assert found.err.endswith("\n")
    assert "Traceback" not in found.err
    for word in words:
        assert word in found.err
    assert found.code == code


def model(path: Path, n_ctx: int = 128, tokenizer: str | None = "gpt2", architecture: str = "llama") -> Path:
    """A GGUF with a believable header and one small matrix; llama.cpp could not load it."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    if tokenizer:
        writer.add_tokenizer_model(tokenizer)
        writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------- help and usage


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = run(capsys, *arguments)
    assert (found.code, found.err) == (0, "")
    for word in ("Usage", "scan", "demo", "report", "Exit codes"):
        assert word in found.out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys)
    assert found.code == 2
    assert "Usage" in found.out
    assert "scan" in found.out
    assert found.err == ""
    assert found.out.rstrip() == run(capsys, "--help").out.rstrip()  # nothing but the help


def test_scan_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "scan", "--help")
    assert (found.code, found.err) == (0, "")
    options = "--levels --text --tokens --n-ctx --chunks --rank-chunks --units --out --threads --n-gpu-layers --cache"
    for option in options.split():
        assert re.search(rf"{option}\b", found.out), option


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bogus"], ["--bogus"]),
        (["scan", "--bogus", "m.gguf"], ["--bogus"]),
        (["nope"], ["nope"]),
        (["scan"], ["model"]),
        (["report"], ["result"]),
        (["report", "a", "b"], ["b"]),
        (["report", "--format", "pdf", "a"], ["--format", "pdf", "html", "md", "json"]),
        (["scan", "m.gguf", "--n-ctx", "many"], ["--n-ctx", "integer"]),
        (["scan", "m.gguf", "--chunks", "0"], ["--chunks", "1"]),
        (["scan", "m.gguf", "--threads", "0"], ["--threads", "1"]),
        (["scan", "m.gguf", "--units", "some"], ["--units", "some", "ranked", "all"]),
        (["scan", "m.gguf", "--levels"], ["--levels"]),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert_refused(run(capsys, *arguments), 2, *words, "See qres --help.")


def test_usage_errors_leave_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "scan", "m.gguf", "--chunks", "0")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- scan


def test_scan_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run(capsys, "scan", "gone.gguf"), 3, "gone.gguf", "does not exist")


def test_scan_file_that_is_no_gguf(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 torch")
    assert_refused(run(capsys, "scan", "model.gguf"), 3, "model.gguf", "not a GGUF file", "convert_hf_to_gguf.py")


def test_scan_unsupported_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf", architecture="t5")
    assert_refused(run(capsys, "scan", "m.gguf"), 4, "encoder-decoder")


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ("Q4_K_X", ["unknown level 'Q4_K_X'", "did you mean", "Q4_K_M"]),
        ("Q4_K_M,Q9_0", ["unknown level 'Q9_0'", "did you mean", "Q8_0"]),
        ("zzz", ["unknown level 'zzz'", "Levels: "]),
        ("IQ2_XXS", ["IQ2_XXS needs an importance matrix"]),
    ],
)
def test_scan_levels_that_cannot_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, levels: str, words: list[str]
) -> None:
    model(tmp_path / "m.gguf")
    assert_refused(run(capsys, "scan", "m.gguf", "--levels", levels, "--n-ctx", "64"), 2, *words)


@pytest.mark.parametrize("levels", ["", ",", " , "])
def test_scan_without_any_level(capsys: pytest.CaptureFixture[str], tmp_path: Path, levels: str) -> None:
    model(tmp_path / "m.gguf")
    found = run(capsys, "scan", "m.gguf", "--levels", levels, "--n-ctx", "64")
    assert_refused(found, 2, "--levels names no level", "Q4_K_M")


def test_scan_makes_a_level_once_whatever_it_is_called(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Path]] = []

    def refuse(_original: object, level: LevelSpec, folder: Path, _listener: object) -> None:
        made.append((level.name, folder))
        raise NativeError("odd")

    monkeypatch.setattr(candidates, "level_file", refuse)
    monkeypatch.setattr(scan_module, "_preflight", lambda *_: Preflight(Texts((), (), "a", "b", 0), None, {}, ""))
    model(tmp_path / "m.gguf")
    names = "q4_k_m,Q8_0, Q4_K ,Q4_K_M,q8-0"
    found = run(capsys, "scan", "m.gguf", "--levels", names, "--n-ctx", "64", "--cache", "cache")
    assert [name for name, _ in made] == ["Q4_K_M", "Q8_0"]
    assert {folder for _, folder in made} == {Path("cache")}
    assert found.code == 5
    assert found.err.splitlines()[-1] == "qres: no level could be made: Q4_K_M: odd; Q8_0: odd"


def test_scan_text_with_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    found = run(capsys, "scan", "m.gguf", "--text", "a.txt", "--tokens", "b.txt")
    assert_refused(found, 2, "--text and --tokens exclude each other")


@pytest.mark.parametrize("n_ctx", ["63", "511", "30", "0", "-2"])
def test_scan_odd_or_tiny_context(capsys: pytest.CaptureFixture[str], tmp_path: Path, n_ctx: str) -> None:
    model(tmp_path / "m.gguf")
    assert_refused(run(capsys, "scan", "m.gguf", "--n-ctx", n_ctx), 2, f"--n-ctx {n_ctx} is not an even number")


def test_scan_context_beyond_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf", n_ctx=101)
    found = run(capsys, "scan", "m.gguf", "--n-ctx", "512")
    assert_refused(found, 3, "--n-ctx 512", "m.gguf", "trained for 101 tokens", "Use --n-ctx 100 or less.")


def test_scan_without_tokenizer_needs_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf", tokenizer=None)
    assert_refused(run(capsys, "scan", "m.gguf", "--n-ctx", "64"), 3, "no tokenizer", "--tokens FILE")


@pytest.mark.parametrize(
    ("option", "data", "words"),
    [
        ("--text", None, ["cannot read t.txt: No such file"]),
        ("--text", b"", ["t.txt is empty"]),
        ("--text", b"\xff\xfea\0", ["not UTF-8"]),
        ("--tokens", b"1 two 3", ["'two' is not a token id"]),
        ("--tokens", None, ["cannot read t.txt: No such file"]),
    ],
)
def test_scan_text_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, data: bytes | None, words: list[str]
) -> None:
    model(tmp_path / "m.gguf")
    if data is not None:
        (tmp_path / "t.txt").write_bytes(data)
    assert_refused(run(capsys, "scan", "m.gguf", option, "t.txt"), 3, *words)


def test_scan_candidate_of_another_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    model(tmp_path / "other.gguf", architecture="qwen2")
    found = run(capsys, "scan", "m.gguf", "other.gguf", "--n-ctx", "64")
    assert found.code == 3
    assert (
        "other.gguf: error loading model hyperparameters: key not found in model: qwen2." in found.err.splitlines()[-1]
    )


def test_scan_candidate_that_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    assert_refused(run(capsys, "scan", "m.gguf", "gone.gguf", "--n-ctx", "64"), 3, "gone.gguf")


def test_scan_never_writes_over_an_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = model(tmp_path / "result.json")  # a model by that name
    before = path.read_bytes()
    assert_refused(
        run(capsys, "scan", "result.json", "--out", "."), 3, "result.json is an input and would be overwritten"
    )
    assert path.read_bytes() == before


def test_scan_output_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    assert_refused(run(capsys, "scan", "m.gguf", "--out", "m.gguf/reports"), 3, "cannot write to", "--out")


def test_scan_that_fails_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "scan", "gone.gguf", "--out", "reports")
    assert list(tmp_path.iterdir()) == []


def test_scan_that_fails_leaves_no_folder_above_either(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "scan", "gone.gguf")  # to reports/gone
    assert list(tmp_path.iterdir()) == []


def test_scan_that_fails_keeps_what_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("older")
    run(capsys, "scan", "gone.gguf", "--out", "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    (tmp_path / "out" / "report.html").unlink()
    run(capsys, "scan", "gone.gguf", "--out", "out")
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QresError("odd", "look"), 1),
        (UsageError("odd", "look"), 2),
        (InputError("odd", "look"), 3),
        (UnsupportedError("odd", "look"), 4),
        (NativeError("odd", "look"), 5),
    ],
)
def test_every_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: QresError, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(scan_module, "scan", refuse)
    found = run(capsys, "scan", "m.gguf")
    assert_refused(found, code)
    assert found.err == "qres: odd. Look.\n"


def test_message_stays_one_line_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = "a path [bold]/x[/bold] " + "long " * 60 + "\nsecond"

    def refuse(*_: object) -> None:
        raise InputError(message)

    monkeypatch.setattr(scan_module, "scan", refuse)
    found = run(capsys, "scan", "m.gguf")
    assert found.err == f"qres: {message}\n".replace("\nsecond", " second")  # no markup, no wrapping


def test_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scan_module, "scan", interrupt)
    assert_refused(run(capsys, "scan", "m.gguf"), 130, "interrupted")
    assert not Path("reports").exists()


def test_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scan_module, "scan", stumble)
    with pytest.raises(ZeroDivisionError):
        main(["scan", "m.gguf"])


def test_debug_shows_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QRES_DEBUG", "1")
    found = run(capsys, "scan", "gone.gguf")
    assert (found.code, found.out) == (3, "")
    assert "Traceback (most recent call last)" in found.err
    assert "InputError" in found.err
    assert found.err.splitlines()[-1].startswith("qres: gone.gguf does not exist")


# ---------------------------------------------------------------- demo


def demo_options(monkeypatch: pytest.MonkeyPatch) -> list[ScanOptions]:
    """What `qres demo` scans with; nothing is scanned, and no model is made."""
    seen: list[ScanOptions] = []

    def see(options: ScanOptions, _listener: object) -> Result:
        seen.append(options)
        raise InputError("enough")

    monkeypatch.setattr(demo, "reference", lambda folder: folder / "demo-F16.gguf")
    monkeypatch.setattr(scan_module, "scan", see)
    return seen


def test_demo_is_a_small_scan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = demo_options(monkeypatch)
    assert_refused(run(capsys, "demo", "--cache", "mine", "--threads", "1"), 3, "enough")
    assert seen == [
        ScanOptions(
            model=Path("mine/demo/demo-F16.gguf"),
            levels=("Q4_K_M", "Q5_K_M"),
            chunks=4,
            rank_chunks=2,
            threads=1,
            cache=Path("mine"),
            out=Path("reports/demo-F16"),
        )
    ]


def test_demo_takes_its_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = demo_options(monkeypatch)
    run(capsys, "demo", "--levels", " Q8_0,, Q6_K ", "--chunks", "2")
    assert [(options.levels, options.chunks) for options in seen] == [(("Q8_0", "Q6_K"), 2)]
    assert_refused(run(capsys, "demo", "--chunks", "0"), 2, "--chunks", "1")
    assert len(seen) == 1


def test_demo_model_lies_in_the_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = demo_options(monkeypatch)
    monkeypatch.setenv("QRES_CACHE", str(tmp_path / "kept"))
    run(capsys, "demo")
    monkeypatch.delenv("QRES_CACHE")
    run(capsys, "demo")
    of_the_user = platformdirs.user_cache_path("qres")
    assert [options.model.parent for options in seen] == [tmp_path / "kept" / "demo", of_the_user / "demo"]
    assert [options.cache for options in seen] == [None, None]  # the scan finds the same folder itself
    assert cache.default_folder() == of_the_user


# ---------------------------------------------------------------- report


def put_result(folder: Path) -> Path:
    path = folder / "result.json"
    path.write_text(to_json(example()), encoding="utf-8")
    return path


@pytest.mark.parametrize("data", [b"", b"GGUF\x03\0\0\0", b"{}", b"[1, 2", b"\xff\xfe", b'{"schema_version": 99}'])
def test_report_on_garbage(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes) -> None:
    (tmp_path / "result.json").write_bytes(data)
    assert_refused(run(capsys, "report", "result.json"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_report_on_a_missing_file_and_on_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(run(capsys, "report", "gone.json"), 3, "cannot read gone.json: No such file or directory")
    assert_refused(run(capsys, "report", str(tmp_path)), 3, "Is a directory")


def test_report_json_on_standard_output_round_trips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    put_result(tmp_path)
    found = run(capsys, "report", "result.json", "--format", "json")
    assert (found.code, found.err) == (0, "")
    assert found.out == to_json(example())
    assert from_json(found.out) == example()


def test_report_json_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    put_result(tmp_path)
    found = run(capsys, "report", "result.json", "--format", "json", "--out", "sub/copy.json")
    assert (found.code, found.out, found.err) == (0, "sub/copy.json\n", "")
    assert (tmp_path / "sub" / "copy.json").read_text(encoding="utf-8") == to_json(example())


@pytest.mark.usefixtures("_undrawn")
def test_report_goes_beside_the_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    put_result(tmp_path / "sub")
    found = run(capsys, "report", "sub/result.json", "--format", "md")
    assert (found.code, found.out, found.err) == (0, "sub/report.md\n", "")
    assert (tmp_path / "sub" / "report.md").read_text(encoding="utf-8").startswith("# ")
    assert list((tmp_path / "sub" / "charts").glob("*.svg"))


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize(
    ("out", "path"), [("sub", "sub/report.md"), (".", "report.md"), ("sub/..", "sub/../report.md")]
)
def test_report_to_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, out: str, path: str) -> None:
    put_result(tmp_path)
    (tmp_path / "sub").mkdir()
    found = run(capsys, "report", "result.json", "--format", "md", "--out", out)
    assert (found.code, found.out, found.err) == (0, f"{path}\n", "")
    assert (tmp_path / path).read_text(encoding="utf-8").startswith("# ")
    assert list((tmp_path / path).parent.glob("charts/*.svg"))


def test_report_json_to_another_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    put_result(tmp_path)
    (tmp_path / "sub").mkdir()
    found = run(capsys, "report", "result.json", "--format", "json", "--out", "sub")
    assert (found.code, found.out, found.err) == (0, "sub/result.json\n", "")
    assert (tmp_path / "sub" / "result.json").read_text(encoding="utf-8") == to_json(example())


@pytest.mark.parametrize(
    ("format", "out"),
    [("md", "result.json"), ("html", "./result.json"), ("json", "result.json"), ("json", "."), ("md", "link.md")],
)
def test_report_never_writes_over_its_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, format: str, out: str
) -> None:
    path = put_result(tmp_path)
    (tmp_path / "link.md").symlink_to(path)
    found = run(capsys, "report", "result.json", "--format", format, "--out", out)
    assert_refused(found, 3, "is an input and would be overwritten", "Choose another place with --out.")
    assert path.read_text(encoding="utf-8") == to_json(example())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.md", "result.json"]


def test_report_never_writes_over_a_result_with_the_name_of_a_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = put_result(tmp_path).rename(tmp_path / "report.html")
    found = run(capsys, "report", "report.html")  # the default: report.html beside it
    assert_refused(found, 3, "report.html is an input and would be overwritten")
    assert path.read_text(encoding="utf-8") == to_json(example())


# ---------------------------------------------------------------- as a process


def into_a_closed_pipe(*command: str | Path) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("arguments", [["--format", "json"], ["--format", "json", "--out", "copy.json"]])
def test_report_into_a_closed_pipe_is_quiet_and_no_error(tmp_path: Path, arguments: list[str]) -> None:
    put_result(tmp_path)
    found = into_a_closed_pipe(REPO / "cli.py", "report", "result.json", *arguments)
    assert (found.returncode, found.stderr) == (0, "")
    if "--out" in arguments:
        assert (tmp_path / "copy.json").read_text(encoding="utf-8") == to_json(example())


_SCAN_WITHOUT_A_MODEL = f"""
import sys
sys.path.insert(0, {str(REPO)!r})
from qres.cli import program
from qres.pipeline import run
from qres.report.charts import scan
from tests.examples.result import example
run.scan = lambda *_: example()
scan.to_svg = lambda *_: "<svg/>"
program.main(["scan", "m.gguf", "--out", "out"])
"""


def test_scan_into_a_closed_pipe_is_quiet_and_no_error(tmp_path: Path) -> None:
    found = into_a_closed_pipe("-c", _SCAN_WITHOUT_A_MODEL)
    assert (found.returncode, found.stderr) == (0, "")
    assert (tmp_path / "out" / "result.json").read_text(encoding="utf-8") == to_json(example())


def test_help_as_a_process_loads_nothing_heavy() -> None:
    found = subprocess.run(
        [sys.executable, "-X", "importtime", REPO / "cli.py", "--help"], capture_output=True, text=True, check=True
    )
    loaded = {match.strip() for match in re.findall(r"^import time:[^|]*\|[^|]*\|(.+)$", found.stderr, re.MULTILINE)}
    assert "qres.cli.app" in loaded
    assert "Usage" in found.stdout
    heavy = {"llama_cpp", "torch", "altair", "vl_convert", "numpy", "gguf", "jinja2", "msgspec", "multiprocessing"}
    assert {name for name in loaded if name.split(".")[0] in heavy} == set()


def test_threads_beyond_the_cpus_are_not_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = demo_options(monkeypatch)
    monkeypatch.setattr("qres.cli.scan.CPUS", 2)
    error = run(capsys, "demo", "--cache", "mine", "--threads", "10000").err
    assert [options.threads for options in seen] == [2]
    assert "10000 threads were asked for, 2 CPUs are available: using 2" in error
