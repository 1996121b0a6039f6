"""result.json: what goes out comes back, and whatever else comes in is refused with its place named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest

from qres.errors import InputError
from qres.records.as_json import from_json, load, to_json
from qres.records.output import Output
from qres.records.result import SCHEMA_VERSION, Result
from tests.examples.result import example


def parse(text: str) -> Any:  # noqa: ANN401 - JSON
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def with_every_optional_float(record: Any, value: float | None) -> Any:  # noqa: ANN401 - any record, the same back
    """The record with each float field that may be None set to `value`, all the way down."""
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(record))
    for field in dataclasses.fields(record):
        old = getattr(record, field.name)
        if hints[field.name] == float | None:
            changes[field.name] = value
        elif dataclasses.is_dataclass(old):
            changes[field.name] = with_every_optional_float(old, value)
        elif isinstance(old, tuple):
            changes[field.name] = tuple(
                with_every_optional_float(item, value) if dataclasses.is_dataclass(item) else item for item in old
            )
    return dataclasses.replace(record, **changes)


def edited(**changes: object) -> str:
    """The example as JSON with fields replaced; `__` in a name goes down, `...` removes the field."""
    data = json.loads(to_json(example()))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(data)


# ---------------------------------------------------------------- there and back


def test_round_trip_is_equal() -> None:
    result = example()
    text = to_json(result)
    assert from_json(text) == result
    assert from_json(text.encode()) == result
    assert to_json(from_json(text)) == text


def test_round_trip_keeps_every_digit() -> None:
    value = 0.1 + 0.2  # 0.30000000000000004
    result = with_every_optional_float(example(), value)
    assert from_json(to_json(result)).levels[0].output.kld_mean == value
    assert from_json(to_json(with_every_optional_float(example(), 5e-324))).noise_floor.kld_mean == 5e-324


def test_round_trip_keeps_any_text() -> None:
    name = 'Größe 中文 "quoted" \\ </script> \x00\n\u2028 🎉'
    result = dataclasses.replace(example(), warnings=(name, ""))
    assert from_json(to_json(result)) == result


def test_json_is_indented_and_ends_with_a_line_end() -> None:
    text = to_json(example())
    assert text.startswith(f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "reference": {{\n    "path":')
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")


def test_json_has_every_field_by_its_name() -> None:
    data = parse(to_json(example()))
    assert list(data) == [field.name for field in dataclasses.fields(Result)]
    assert list(data["levels"][0]["output"]) == [field.name for field in dataclasses.fields(Output)]
    assert data["recipes"][0]["refinement"] is None
    assert data["levels"][0]["sensitivity"]["units"][1]["weights"] == [
        f"blk.0.attn_{name}.weight" for name in ("k", "output", "q", "v")
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_become_null(value: float) -> None:
    result = with_every_optional_float(example(), value)
    text = to_json(result)
    data = parse(text)
    assert data["levels"][0]["output"]["kld_mean"] is None
    assert data["levels"][0]["points"][3]["drift_median"] is None
    assert data["stream"][0]["f16_headroom"] is None
    assert from_json(text) == with_every_optional_float(example(), None)


def test_non_finite_required_numbers_stay_out_of_the_text() -> None:
    result = dataclasses.replace(example(), settings=dataclasses.replace(example().settings, elapsed_s=math.nan))
    assert parse(to_json(result))["settings"]["elapsed_s"] is None


def test_load_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(to_json(example()), encoding="utf-8")
    assert load(path) == example()


def test_fields_of_a_later_version_are_ignored() -> None:
    assert from_json(edited(new_field=1, settings__also_new=[2])) == example()


def test_optional_fields_may_be_absent() -> None:
    found = from_json(edited(skipped=..., warnings=...))
    assert (found.skipped, found.warnings) == ((), ())


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("version", [0, 1, 999, -1])
def test_another_schema_version_is_named(version: int) -> None:
    with pytest.raises(InputError, match=f"schema version {version}, qres reads version {SCHEMA_VERSION}") as caught:
        from_json(edited(schema_version=version))
    update = "update qres, or " if version > SCHEMA_VERSION else ""
    assert caught.value.hint == f"{update}make it again: qres scan models/trained.gguf"


def test_result_of_another_version_is_made_again_by_a_command_that_a_shell_takes() -> None:
    with pytest.raises(InputError) as caught:
        from_json('{"schema_version": 1, "reference": {"path": "my models/a.gguf"}}')
    assert caught.value.hint == "make it again: qres scan 'my models/a.gguf'"


def test_another_schema_version_is_named_whatever_else_changed() -> None:
    with pytest.raises(InputError, match="schema version 7") as caught:
        from_json('{"schema_version": 7, "levels": "renamed"}')
    assert caught.value.hint == "update qres, or make it again: qres scan MODEL"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": ...}, "missing required field `verdict`"),
        ({"schema_version": ...}, "missing required field `schema_version`"),
        ({"settings__n_ctx": ...}, r"missing required field `n_ctx` - at `\$.settings`"),
        ({"levels__1__output__tokens": ...}, r"missing required field `tokens` - at `\$.levels.*output`"),
        ({"levels__0__points__2__layer": "x"}, r"Expected `int \| null`, got `str` - at `\$.levels.*points.*layer`"),
        (
            {"levels__0__sensitivity__units__2__weights": ...},
            r"missing required field `weights` - at `\$.levels.*units",
        ),
        ({"reference__bpw": None}, r"Expected `float`, got `null` - at `\$.reference.bpw`"),
        ({"reference__bytes": 1.5}, r"Expected `int`, got `float` - at `\$.reference.bytes`"),
        ({"reference__is_16bit": 1}, r"Expected `bool`, got `int` - at `\$.reference.is_16bit`"),
        ({"levels": {}}, r"Expected `array`, got `object` - at `\$.levels`"),
        ({"schema_version": "1"}, r"Expected `int`, got `str` - at `\$.schema_version`"),
    ],
)
def test_wrong_field_is_named_with_its_path(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^not a qres result: .*{message}") as caught:
        from_json(edited(**changes))
    assert "result.json" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" \n",
        b"GGUF\x03\0\0\0",
        b"\xff\xfe\x00",
        b"{",
        b'{"schema_version": 1',
        b"# qres report\n",
        b"[]",
        b"null",
        b"12",
        b'"text"',
        b"{}",
        b'{"schema_version": NaN}',
        b'{"schema_version": 1e999}',
        b"[" * 50_000,
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^not (JSON|a qres result): ") as caught:
        from_json(data)
    assert "\n" not in str(caught.value)


def test_result_that_was_cut_is_refused() -> None:
    text = to_json(example())
    with pytest.raises(InputError, match=r"^not JSON: Input data was truncated"):
        from_json(text[: text.index(",", len(text) // 2) + 1])


def test_text_after_the_result_is_refused() -> None:
    with pytest.raises(InputError, match=r"^not JSON"):
        from_json(to_json(example()) * 2)


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(InputError, match=r"^not JSON: "):
        from_json('{"schema_version": 1, "x": ' + "[" * 50_000)


def test_load_of_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cannot read .*gone\.json: No such file or directory \(give the result"):
        load(tmp_path / "gone.json")
    with pytest.raises(InputError, match=r"^cannot read .*: Is a directory \(give the result"):
        load(tmp_path)


def test_records_are_frozen() -> None:
    for record in (example(), example().levels[0], example().verdict):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, "x")
