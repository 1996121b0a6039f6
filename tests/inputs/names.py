"""Cases about names and metadata made to mislead: control characters, markup, templates, paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.gguf.building import Row, build, put
from tests.inputs.case import ACCEPTED, FULL, HEADER, ROOM, Build, case, full, inspect, scan, small
from tests.inputs.results import RESULT

RED = "\x1b[31mred\n\x07\x9b2J\u202eb.gguf"
"""Colour, a second line, a bell, a C1 sequence and a change of direction."""


def named(*arguments: str, **files: bytes) -> Build:
    """A command line in which RED is the name of a file, `m.gguf` that of another one."""

    def make(folder: Path) -> Sequence[str]:
        for name, data in files.items():
            put(folder, data, RED if name == "red" else "m.gguf")
        return [RED if word == "RED" else word for word in arguments]

    return make


EVIL = [
    case("evil-missing", "a model that is not there", named("scan", "RED"), "red", "does not exist"),
    case("evil-page", "a web page", named("scan", "RED", red=b"<html>"), "red", "web page"),
    case("evil-kind", "a vocabulary", named("scan", "RED", red=build(HEADER)), "red", "vocabulary"),
    case("evil-inspect", "a model to look at", named("inspect", "RED", red=full()), "Reference", "red", code=0),
    case(
        "evil-context",
        "a model of a short context",
        named("scan", "RED", "--n-ctx", "4096", red=full()),
        "red",
        "trained for 512 tokens",
    ),
    case(
        "evil-tokenizer",
        "a model without tokenizer",
        named("scan", "RED", red=full({"tokenizer.ggml.model": "none"})),
        "red",
        "tokenizer",
    ),
    case("evil-level", "a level alone", named("scan", "RED", red=small()), "red", "Q8_0 already"),
    case(
        "evil-other-model",
        "a level of another model",
        named("scan", "m.gguf", "RED", m=full(), red=small({"llama.block_count": 2})),
        "red",
    ),
    case(
        "evil-other-words",
        "a level with another tokenizer",
        named("scan", "m.gguf", "RED", m=full(), red=small({"tokenizer.ggml.pre": "x"})),
        "passed",  # the text says whether it matters: llama.cpp tokenizes it with both
        code=ACCEPTED,
    ),
    case(
        "evil-itself",
        "a model as its own level",
        named("scan", "RED", "RED", red=full()),
        "red",
        "reference itself",
        code=ACCEPTED,
    ),
    case(
        "evil-twice",
        "a level given twice",
        named("scan", "m.gguf", "RED", "RED", m=full(), red=small()),
        "red",
        "twice",
        code=ACCEPTED,
    ),
    case(
        "evil-text-missing",
        "a text that is not there",
        named("scan", "m.gguf", "--text", "RED", m=full()),
        "red",
        "cannot read",
    ),
    case(
        "evil-text",
        "a text that is none",
        named("scan", "m.gguf", "--text", "RED", m=full(), red=b"\xff"),
        "red",
        "UTF-8",
    ),
    case(
        "evil-ids",
        "ids that are none",
        named("scan", "m.gguf", "--tokens", "RED", m=full(), red=b"\xff"),
        "red",
        "token id",
    ),
    case(
        "evil-out",
        "a file as --out",
        named("scan", "m.gguf", "--out", "RED", m=full(), red=b""),
        "red",
        "cannot write",
    ),
    case("evil-result", "a result that is not there", named("report", "RED"), "red", "cannot read"),
    case(
        "evil-report-out",
        "a report over its result",
        named("report", "RED", "--out", "RED", red=RESULT.encode()),
        "red",
        "overwritten",
    ),
    case(
        "evil-option",
        "as an option",
        lambda _: ["scan", "m.gguf", f"--{RED}"],
        "No such option",
        "red",
        code=2,
    ),
    case("evil-command", "as a command", lambda _: [RED], "No such command", "red", code=2),
    case("evil-units", "as a value of --units", named("scan", "m.gguf", "--units", "RED"), "--units", "red", code=2),
]

TRICKS = {
    "html": "<script>alert(1)</script>",
    "markdown": "![x](http://x.invalid/a.svg) `a` | b **c**",
    "markup": "[bold red]x[/bold red] [link=http://x.invalid]y[/link]",
    "ansi": "\x1b]0;title\x07\x1b[2J\x9b31m",
    "direction": "a\u202egnp.exe\u2066\u200f",
    "path": "../../../../tmp/qres-escaped",
    "format": "%s%n{0}{self.__init__}${HOME}",
    "template": "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}",
    "lines": "a\nNote: b\r\nqres: c",
}
"""What names in a file are made of."""
SHOWN = {
    "html": "<script>alert(1)</script>",
    "markdown": "![x](http://x.invalid/a.svg) `a` | b **c**",
    "markup": "[bold red]x[/bold red] [link=http://x.invalid]y[/link]",
    "ansi": "\ufffd]0;title\ufffd\ufffd[2J\ufffd31m",
    "direction": "a\ufffdgnp.exe\ufffd\ufffd",
    "path": "../../../../tmp/qres-escaped",
    "format": "%s%n{0}{self.__init__}${HOME}",
    "template": "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}",
    "lines": "a\ufffdNote: b\ufffd\ufffdqres: c",
}
"""The same as a terminal gets it."""


def tricked(trick: str) -> bytes:
    """A 16-bit model with that in every text."""
    rows: list[Row] = [*FULL[:2], (f"blk.0.{trick}.weight", (64, 2), 1, 768)]
    texts = dict.fromkeys(("general.name", "tokenizer.ggml.pre", "tokenizer.chat_template", f"x.{trick}"), trick)
    return build(HEADER | texts, rows, ROOM)


HOSTILE = [
    *(
        case(
            f"terminal-{name}",
            f"{name} in the metadata",
            inspect(tricked(trick)),
            f"name {SHOWN[name]}",
            "characters, not run",
            code=0,
            without=("49", "xxxxxxxxx"),
        )
        for name, trick in TRICKS.items()
    ),
    *(
        case(
            f"architecture-{name}",
            f"{name} as architecture",
            inspect(full({"general.architecture": trick})),
            f"kind language model, {SHOWN[name]}",
            code=0,
        )
        for name, trick in TRICKS.items()
    ),
    *(
        case(
            f"tensor-{name}",
            f"{name} as the name of a tensor",
            scan(build(HEADER, [*FULL, (f"t{trick}", (64, 2), 31, 0)], ROOM)),
            f"first 't{SHOWN[name]}'",
            code=4,
        )
        for name, trick in TRICKS.items()
    ),
]

FOLDERS = {
    "m.gguf": "m",
    "M.GGUF": "M",
    "a b.gguf": "a b",
    "50%.gguf": "50%",
    "größe-模型.gguf": "größe-模型",
    "🦙.gguf": "🦙",
    ".hidden.gguf": "hidden",
    ".gguf": "model",
    "...gguf": "model",
    "x" * 200 + ".gguf": "x" * 200,
    "x" * 250 + ".gguf": "x" * 250,
    "C:\\models\\x.gguf": "Cmodelsx",
    "CON.gguf": "CON_",
    "NUL.gguf": "NUL_",
    "com1.gguf": "com1_",
    "a:b*c?d.gguf": "abcd",
    "a\nb\x1b[31m.gguf": "ab[31m",
    "tiny-00001-of-00003.gguf": "tiny",
    "-x.gguf": "-x",
    "--out.gguf": "--out",
    "$(touch pwned).gguf": "$(touch pwned)",
    "model.q4.gguf": "model.q4",
    "m\udcff.gguf": "m",
}
"""Name of a model -> folder of its reports below `reports`."""
