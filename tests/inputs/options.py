"""Cases about options: values out of range, misspelled levels, folders that cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import put
from tests.inputs.case import ACCEPTED, Build, Case, case, full, scan, small, typed


def options(arguments: str, code: int, *words: str, without: tuple[str, ...] = ()) -> Case:
    """A scan of a good model with options."""
    return case(
        arguments.replace(" ", "_") or "none",
        arguments,
        scan(full(), *arguments.split(" ")),
        *words,
        code=code,
        without=without,
    )


def level(name: str, *words: str, code: int = 2) -> Case:
    """A scan of a good model at a level."""
    return case(f"levels-{name}", f"--levels {name!r}", scan(full(), "--levels", name), *words, code=code)


def out(name: str, made: Callable[[Path], object] | None, code: int, *words: str) -> Case:
    """A scan of a good model into something that `made` puts there."""

    def make(folder: Path) -> Sequence[str]:
        if made:
            made(folder / name)
        return [*scan(full())(folder), "--out", name]

    return case(f"out-{name[:20] or 'empty'}", f"--out {name!r}", make, *words, code=code)


def in_a_closed_folder(mode: int) -> Build:
    """A scan into a folder of a folder with these permissions."""

    def make(folder: Path) -> Sequence[str]:
        (folder / "d").mkdir(mode)
        return [*scan(full())(folder), "--out", "d/x"]

    return make


def page_as_folder(path: Path) -> None:
    """A folder where a report has to go."""
    (path / "report.html").mkdir(parents=True)


def input_in_out(folder: Path) -> Sequence[str]:
    """The text would be overwritten by a report."""
    put(folder, b"words " * 99, "report.md")
    return [*scan(full())(folder), "--text", "report.md", "--out", "."]


def linked_input(folder: Path) -> Sequence[str]:
    """The same through a link."""
    (folder / "out").mkdir()
    arguments = scan(full())(folder)
    (folder / "out" / "result.json").symlink_to(folder / "m.gguf")
    return [*arguments, "--out", "out"]


HELP = "See qres --help."
OPTIONS = [
    options("--n-ctx 63", 2, "--n-ctx 63 is not an even number of at least 32", "512"),
    options("--n-ctx 30", 2, "--n-ctx 30 is not an even number of at least 32", "512"),
    options("--n-ctx 0", 2, "--n-ctx 0 is not an even number of at least 32"),
    options("--n-ctx -2", 2, "--n-ctx -2 is not an even number of at least 32"),
    options("--n-ctx 1024", 3, "--n-ctx 1024", "trained for 512 tokens", "Use --n-ctx 512 or less"),
    options("--n-ctx 99999999999999999998", 3, "trained for 512 tokens", "Use --n-ctx 512 or less"),
    options("--n-ctx 1e3", 2, "--n-ctx", "integer", HELP),
    options("--chunks 0", 2, "--chunks", "1", HELP),
    options("--chunks many", 2, "--chunks", "integer", HELP),
    options("--rank-chunks 0", 2, "--rank-chunks", "1", HELP),
    options("--threads 0", 2, "--threads", "1", HELP),
    options("--threads -1", 2, "--threads", "1", HELP),
    options("--units some", 2, "--units", "'some' is not one of 'ranked', 'all'", HELP),
    options("--n-gpu-layers -1", 2, "--n-gpu-layers", "0", HELP),
    options("--level Q4_0", 2, "No such option: --level", "--levels"),
    options("--text a --tokens b", 2, "--text and --tokens exclude each other", "Give one of them"),
    options("--out", 2, "--out", "requires an argument", HELP),
    options("--levels Q8_0 --levels Q6_K", ACCEPTED, "passed"),
    options("--n-ctx 512 --resume", ACCEPTED, "passed"),
    level("Q4", "unknown level 'Q4'", "did you mean", "Q4_0"),
    level("q4km", "unknown level 'q4km'", "did you mean", "Q4_K_M"),
    level("Q4_K_XL", "Q4_K_XL is a publisher's mix", "qres scan MODEL FILE"),
    level("UD-Q4_K_XL", "UD-Q4_K_XL is a publisher's mix", "llama.cpp has no such level", "qres scan MODEL FILE"),
    level("q6-k-l", "q6-k-l is a publisher's mix", "qres scan MODEL FILE"),
    level("Q8_0,IQ2_M-UD", "IQ2_M-UD is a publisher's mix", "qres scan MODEL FILE"),
    level("i1-Q4_K_M", "i1-Q4_K_M is Q4_K_M made with a publisher's importance matrix", "--imatrix"),
    level("Q4_K_Z", "unknown level 'Q4_K_Z'", "did you mean", "Q4_K_M"),
    level("fp16", "unknown level 'fp16'", "did you mean", "F16"),
    level("int8", "unknown level 'int8'", "Q8_0"),
    level("Q8_0;Q4_0", "unknown level 'Q8_0;Q4_0'", "commas"),
    level("Q8_0 Q4_0", "unknown level 'Q8_0 Q4_0'", "commas"),
    level("Q8_0,Q4_9", "unknown level 'Q4_9'", "did you mean"),
    level("Q4_0_4_4", "unknown level 'Q4_0_4_4'", "Q4_0"),
    level("IQ2_XXS", "IQ2_XXS needs an importance matrix", "Give one to qres scan with --imatrix"),
    level("all", "unknown level 'all'", "Levels: Q1_0, "),
    level("Q4\x1b[31m\n", "unknown level ", "Levels: "),
    level("", "--levels names no level", "Q4_K_M"),
    level(" , ,", "--levels names no level", "Q4_K_M"),
    level(" q8_0 ,q4-k-m,Q4_K,,", "passed", code=ACCEPTED),
    case(
        "levels-with-files",
        "--levels and a file",
        lambda f: [*scan(full(), name="r.gguf")(f), *scan(small())(f)[1:], "--levels", "Q8_0"],
        "--levels and quantized files exclude each other",
        "measures the files as they are",
        code=2,
    ),
    out("", None, 2, "--out '' is not a folder", "Name one, such as --out reports/mine"),
    out(" ", None, 2, "--out ' ' is not a folder", "Name one"),
    out("-", None, 2, "--out '-' is not a folder", "Name one"),
    out("a-file", Path.touch, 3, "cannot write to a-file", "Choose another folder with --out"),
    out("m.gguf/reports", None, 3, "cannot write to m.gguf/reports", "Choose another folder with --out"),
    out(
        "x" * 300,
        None,
        3,
        "too long",
        "hoose another folder with --out",
    ),
    out("/proc/qres", None, 3, "cannot write to /proc/qres", "Choose another folder with --out"),
    out("d", page_as_folder, 3, "d/report.html exists and is not a file", "Choose another folder with --out"),
    case(
        "out-in-a-folder-to-read",
        "--out in a folder that may only be read",
        in_a_closed_folder(0o555),
        "cannot write to d/x: Permission denied",
        "Choose another folder with --out",
        not_root=True,
    ),
    case(
        "out-in-a-closed-folder",
        "--out in a folder that may not be entered",
        in_a_closed_folder(0),
        "cannot write to d/x: Permission denied",
        "Choose another folder with --out",
        not_root=True,
    ),
    case(
        "out-over-the-text",
        "the text is where a report goes",
        input_in_out,
        "report.md is an input",
        "overwritten",
        "another place with --out",
    ),
    case(
        "out-over-the-model",
        "a link to the model is where a report goes",
        linked_input,
        "out/result.json is an input",
        "another place with --out",
    ),
    case("cache-empty", "a variable that is not set", scan(full(), "--cache", ""), "--cache", code=2),
    case("no-command", "a misspelled one", typed("scna m.gguf"), "No such command 'scna'", "scan", code=2),
    case(
        "unknown-option", "an option of other programs", typed("--verbose"), "No such option: --verbose", HELP, code=2
    ),
    case("scan-of-nothing", "no model", typed("scan"), "Missing argument", "odel", HELP, code=2),
    case(
        "inspect-two",
        "one too many",
        typed("inspect a.gguf b.gguf"),
        "unexpected extra argument",
        "(b.gguf)",
        HELP,
        code=2,
    ),
    case(
        "demo-level", "a level that does not exist", typed("demo --levels Q9"), "unknown level 'Q9'", "Levels: ", code=2
    ),
    case(
        "demo-imatrix",
        "a level that needs an importance matrix",
        typed("demo --levels IQ1_S"),
        "IQ1_S needs an importance matrix",
        code=2,
    ),
    case(
        "demo-with-a-model",
        "an argument that demo does not take",
        typed("demo m.gguf"),
        "unexpected extra argument",
        "(m.gguf)",
        HELP,
        code=2,
    ),
]
