"""Cases about `qres report`: what is no result of a scan, and where a report must not go."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qres.records.as_json import to_json
from tests.examples.result import example
from tests.gguf.building import put
from tests.inputs.case import Build, case, full, typed
from tests.inputs.options import HELP

RESULT = to_json(example())


def changed(where: str, value: object) -> bytes:
    """A result with another value at a path such as `levels.0.bytes`."""
    data = json.loads(RESULT)
    *way, last = where.split(".")
    at: Any = data
    for name in way:
        at = at[int(name) if name.isdigit() else name]
    at[last] = value
    return json.dumps(data).encode()


def raw(where: str, literal: str) -> bytes:
    """The same with a number as it is written."""
    return changed(where, "@@").replace(b'"@@"', literal.encode())


def report(data: bytes | None, *arguments: str, name: str = "result.json", at: str = "") -> Build:
    """A report of a file with these bytes."""

    def make(folder: Path) -> Sequence[str]:
        if data is not None:
            put(folder, data, name)
        return ["report", at or name, *arguments]

    return make


def into_a_pipe(folder: Path) -> Sequence[str]:
    """A report into something that is no file."""
    os.mkfifo(folder / "p")
    return report(RESULT.encode(), "--format", "json", "--out", "p")(folder)


WROTE = "Give the result.json that `qres scan` wrote"
RESULTS = [
    case(
        "result-missing",
        "a result that is not there",
        report(None),
        "cannot read result.json: No such file",
    ),
    case(
        "result-folder",
        "the folder of the reports",
        report(RESULT.encode(), at="."),
        "s a directory",
        "result.json",
    ),
    case(
        "result-by-another-name",
        "a text called mine.json",
        report(b"hello", name="mine.json"),
        "mine.json",
    ),
    case("result-empty", "0 bytes", report(b""), "not JSON", WROTE),
    case("result-text", "a word", report(b"hello"), "not JSON", WROTE),
    case("result-page", "report.html by mistake", report(b"<!doctype html>"), "not JSON", WROTE),
    case("result-model", "the model by mistake", report(full()), "not JSON", WROTE),
    case("result-utf-16", "a result in UTF-16", report(RESULT.encode("utf-16")), "not JSON", WROTE),
    case(
        "result-truncated",
        "a result that is cut off",
        report(RESULT[: RESULT.rindex(",") + 1].encode()),
        "not JSON",
        "truncated",
        WROTE,
    ),
    case("result-nested", "100000 brackets", report(b"[" * 100_000), "not a qres result", WROTE),
    case("result-other", "JSON of something else", report(b'{"a": 1}'), "not a qres result", "schema_version", WROTE),
    case("result-list", "JSON of a list", report(b"[1]"), "not a qres result", WROTE),
    case("result-null", "JSON of nothing", report(b"null"), "not a qres result", WROTE),
    case(
        "result-newer",
        "of another version",
        report(changed("schema_version", 99)),
        "schema version 99",
        "Update qres, or make it again: qres scan models/trained.gguf",
    ),
    case(
        "result-huge-version",
        "a version of 400 digits",
        report(raw("schema_version", "9" * 400)),
        "schema version 999",
        "qres reads version",
        without=("9" * 300,),
    ),
    case("result-nan", "not legal JSON", report(raw("noise_floor.kld_mean", "NaN")), "not JSON", WROTE),
    case("result-infinity", "the same", report(raw("noise_floor.kld_mean", "-Infinity")), "not JSON", WROTE),
    case("result-1e400", "no double", report(raw("noise_floor.kld_mean", "1e400")), "out of range", WROTE),
    case(
        "result-10^400-bytes",
        "no integer",
        report(raw("levels.0.file.bytes", "1" + "0" * 400)),
        WROTE,
    ),
    case("result-no-bytes", "a reference of 0 bytes", report(raw("reference.bytes", "0")), WROTE),
    case("result-negative-noise", "below 0", report(raw("noise_floor.kld_mean", "-1")), WROTE),
    case("result-10^400-kld", "no double", report(raw("noise_floor.kld_mean", "1" + "0" * 400)), WROTE),
    case(
        "result-text-for-a-number",
        "text where a number belongs",
        report(changed("levels.0.file.bytes", "7")),
        "$.levels[0].file.bytes",
        "int",
        WROTE,
    ),
    case(
        "result-number-for-a-text",
        "a number where text belongs",
        report(changed("reference.name", 7)),
        "$.reference.name",
        WROTE,
    ),
    case(
        "result-field-missing",
        "a field by another name",
        report(RESULT.replace('"n_layer"', '"layers"').encode()),
        "n_layer",
        WROTE,
    ),
    case("result-surrogate", "half a character", report(RESULT.replace("trained llama", "\\ud800").encode()), WROTE),
    case(
        "report-over-itself",
        "--out is the result",
        report(RESULT.encode(), "--format", "json", "--out", "result.json"),
        "result.json is an input and would be overwritten",
        "Choose another place with --out",
    ),
    case(
        "report-over-itself-by-default",
        "the result is called report.html",
        report(RESULT.encode(), name="report.html"),
        "report.html is an input and would be overwritten",
        "Choose another place with --out",
    ),
    case(
        "report-out-empty",
        "--out of a variable that is not set",
        report(RESULT.encode(), "--format", "json", "--out", "", name="r.json"),
        "--out",
        code=2,
    ),
    case(
        "report-out-a-dash",
        "json to standard output?",
        report(RESULT.encode(), "--format", "json", "--out", "-"),
        "--out",
        code=2,
    ),
    case(
        "report-out-below-a-file",
        "--out leads through a file",
        report(RESULT.encode(), "--format", "json", "--out", "result.json/x"),
        "cannot write",
        "with --out",
    ),
    case(
        "report-out-a-pipe",
        "--out is a pipe",
        into_a_pipe,
        "p exists and is not a file",
        "Choose another place",
    ),
    case(
        "report-format",
        "--format pdf",
        report(RESULT.encode(), "--format", "pdf"),
        "--format",
        "'pdf' is not one of",
        HELP,
        code=2,
    ),
    case("report-of-two", "two results", typed("report a b"), "unexpected extra argument", "(b)", HELP, code=2),
]
