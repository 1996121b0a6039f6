"""Files cut into pieces come with the command that joins them."""

from __future__ import annotations

import gzip
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError, QresError
from qres.gguf import model_file
from tests.gguf.building import ROWS, VALID, parsed, put, shard


def cut(folder: Path, names: Sequence[str]) -> list[Path]:
    size = -(-len(VALID) // len(names))
    return [put(folder, VALID[i * size : (i + 1) * size], name) for i, name in enumerate(names)]


PIECES = {
    "part1of2": ["m.gguf.part1of2", "m.gguf.part2of2"],
    "part10of11": [f"m.gguf.part{i}of11" for i in range(1, 12)],
    "part-aa": ["m.gguf.part-aa", "m.gguf.part-ab", "m.gguf.part-ac"],
    "split-a": ["m.gguf-split-a", "m.gguf-split-b"],
    "001": ["m.gguf.001", "m.gguf.002", "m.gguf.003"],
    "00": ["m.gguf.00", "m.gguf.01"],
    "aa": ["m.gguf.aa", "m.gguf.ab"],
    "partaa": ["m.gguf.partaa", "m.gguf.partab"],
    "ggufaa": ["m.ggufaa", "m.ggufab"],
    "1of2": ["m.gguf.1of2", "m.gguf.2of2"],
    "space": ["my model.gguf.part1of2", "my model.gguf.part2of2"],
}


@pytest.mark.parametrize("style", PIECES)
def test_pieces_come_with_the_command_that_joins_them(tmp_path: Path, style: str) -> None:
    paths = cut(tmp_path, PIECES[style])
    put(tmp_path, b"", "other.gguf.part1of2")
    for path in paths:
        with pytest.raises(InputError, match="is one piece of") as caught:
            model_file.read(path)
        assert "missing" not in caught.value.message
        assert all(name in caught.value.message for name in PIECES[style][:10])
    command = caught.value.hint.removeprefix("join them: ")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    whole = tmp_path / command.split(" > ")[1].strip("'")
    assert whole.read_bytes() == VALID
    with pytest.raises(InputError, match=f"{whole.name} lies beside it: give that"):
        model_file.read(paths[1])


@pytest.mark.parametrize(
    ("style", "gone", "missing"),
    [
        ("part1of2", [1], ["m.gguf.part2of2"]),
        ("part10of11", [0, 4, 10], ["m.gguf.part1of11", "m.gguf.part5of11", "m.gguf.part11of11"]),
        ("part-aa", [0], ["m.gguf.part-aa"]),
        ("part-aa", [1], ["m.gguf.part-ab"]),
        ("001", [0], ["m.gguf.001"]),
    ],
)
def test_missing_pieces_are_named(tmp_path: Path, style: str, gone: list[int], missing: list[str]) -> None:
    paths = cut(tmp_path, PIECES[style])
    for index in gone:
        paths[index].unlink()
    with pytest.raises(InputError) as caught:
        model_file.read(next(path for path in paths if path.exists()))
    assert caught.value.message.endswith(f"; missing: {', '.join(missing)}")
    assert caught.value.hint.startswith(f"get the missing pieces, then join them: cat {PIECES[style][0]} ")


def test_first_piece_has_the_whole_inventory(tmp_path: Path) -> None:
    first, _ = cut(tmp_path, PIECES["split-a"])
    found = model_file.read(first, tolerant=True)
    assert found.metadata == parsed(VALID).metadata
    assert found.problems[0].message.startswith("one piece of m.gguf")
    assert len(found.problems) >= 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.gguf.1", VALID[:-200], "truncated"),
        ("m.gguf.gz", gzip.compress(VALID), "gzip"),
        ("m.gguf.tmp", bytes(90), "zeros"),
        ("m.gguf.part", VALID[:-200], "truncated"),
        ("m.gguf.partial", VALID[:-200], "truncated"),
        ("m.gguf.download", VALID[:-200], "truncated"),
        ("m.gguf.part\N{KELVIN SIGN}\N{LATIN SMALL LETTER LONG S}", VALID[:-200], "truncated"),  # of no [a-z]
        ("m.001", bytes(90), "zeros"),
    ],
)
def test_other_endings_are_no_pieces(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model_file.read(put(tmp_path, data, name))
    assert "piece" not in str(caught.value)


def test_command_for_very_many_pieces_stays_short(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        model_file.read(put(tmp_path, b"middle", "m.gguf.part9of99999"))
    assert len(str(caught.value)) < 20_000


def test_whole_file_with_the_name_of_a_piece(tmp_path: Path) -> None:
    assert model_file.read(put(tmp_path, VALID, "m.gguf.part1of2")).problems == ()


NAME_PARTS = [
    *("m", "-00001-of-00003", "-00002-of-00003", "-00003-of-00003", "-99999-of-00000", "-00000-of-00003", ".gguf"),
    *(".part", "part", "-split-", "aa", "ab", "a", "b", "1", "2", "001", "of", "3", " (1)", ".1", ".", "-", "_"),
    *("\n", "'", "$(x)", "é", "\udcff", "\N{ARABIC-INDIC DIGIT THREE}", "\N{KELVIN SIGN}"),
]
CONTENTS = [
    *(VALID, VALID[:900], VALID[:-300], b"junk" * 9, b"", b"<html>"),
    *(shard(0, 3, []), shard(1, 3, ROWS[:2]), shard(1, 3, ROWS[:2])[:300], shard(2, 3, ROWS[2:]), shard(5, 3, ROWS)),
]


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(NAME_PARTS), min_size=1, max_size=5).map(lambda parts: "m" + "".join(parts)),
        st.sampled_from(CONTENTS),
        min_size=1,
        max_size=5,
    )
)
def test_any_names_beside_each_other(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [put(Path(folder), data, name) for name, data in files.items()]
        for path in paths:
            try:
                found = model_file.read(path, tolerant=True)
            except QresError as error:
                text = str(error)
            else:
                text = "".join(problem.message + problem.hint for problem in found.problems)
                assert all(tensor.shard < len(found.shards) for tensor in found.tensors)
            assert text.isprintable()
