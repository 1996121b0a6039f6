"""Texts and token ids as they come from files and standard input: what is read, what is refused and why."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError
from qres.text import source
from qres.text.source import Source, read_ids, read_text
from tests.search import searched

BOM = b"\xef\xbb\xbf"
LINES = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), min_size=1, max_size=30)
BYTES = st.one_of(
    st.binary(max_size=40),
    st.builds(bytes.__add__, st.just(BOM), st.binary(max_size=9)),
    st.text(st.sampled_from(" \t\r\n\0aé中\ufeff"), max_size=12).map(lambda text: text.encode()),
    LINES.map(lambda text: text.encode("utf-16")),
    LINES.map(lambda text: text.encode("utf-32")),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    """Write a file; the same one each time, so that a search leaves one file behind."""
    path = tmp_path_factory.mktemp("properties") / "text.txt"

    def write(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return write


def utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


@searched
@given(data=BYTES)
def test_any_bytes_are_a_text_or_refused(written: Callable[[bytes], Path], data: bytes) -> None:
    path = written(data)
    text = utf8(data)
    body = data[3:] if data.startswith(BOM) else data
    if text is None or "\0" in text or not body.strip(b" \t\n\r\f\v"):
        with pytest.raises(InputError) as caught:
            read_text(path)
        assert str(path) in caught.value.message
        assert caught.value.message.isprintable()
        assert caught.value.hint
        return
    assert read_text(path) == Source(str(path), text=body.replace(b"\r\n", b"\n"))


@searched
@given(text=LINES.filter(lambda text: not text.startswith("\ufeff") and text.encode().strip() != b""))
def test_text_is_the_same_from_any_editor(written: Callable[[bytes], Path], text: str) -> None:
    for mark in (b"", BOM):
        for end in ("\n", "\r\n"):
            assert read_text(written(mark + text.replace("\n", end).encode())).text == text.encode()


def test_byte_that_is_not_utf8_is_counted_from_the_start_of_the_file(written: Callable[[bytes], Path]) -> None:
    with pytest.raises(InputError, match=r"byte 3 is 0xff"):
        read_text(written(BOM + b"\xff"))


SEPARATORS = st.text(st.sampled_from(" ,\t\n\r\f\v"), min_size=1, max_size=3).map(lambda text: text.encode())
ID_LIST = re.compile(rb"(\xef\xbb\xbf)?[\s,]*[0-9]{1,10}([\s,]+[0-9]{1,10})*[\s,]*")
NO_DIGIT = [b"x", b"-", b"+", b"_", b".", b"\x1c", b"\xb2", b"\xff", "２".encode()]
"""What float, int or str would take, or another encoding holds a digit in."""
LIST_OF_IDS = st.lists(st.integers(0, 10**11), max_size=4).map(lambda ids: b" ".join(b"%d" % i for i in ids))
ID_BYTES = st.one_of(
    LIST_OF_IDS,
    st.binary(max_size=20),
    st.lists(st.sampled_from(b"0019 ,\n\r\t"), max_size=14).map(bytes),
    st.builds(
        lambda data, at, other: data[:at] + other + data[at:],
        st.lists(st.integers(0, 99), max_size=4).map(lambda ids: b",".join(b"%d" % i for i in ids)),
        st.integers(0, 6),
        st.sampled_from(NO_DIGIT),
    ),
)


@settings(searched, max_examples=300)
@given(data=ID_BYTES, mark=st.sampled_from([b"", BOM, BOM + BOM]))
def test_any_bytes_are_ids_or_refused(written: Callable[[bytes], Path], data: bytes, mark: bytes) -> None:
    path = written(mark + data)
    if ID_LIST.fullmatch(mark + data):
        assert read_ids(path) == Source(str(path), ids=tuple(map(int, re.findall(rb"[0-9]+", data))))
        return
    with pytest.raises(InputError) as caught:
        read_ids(path)
    assert str(path) in caught.value.message
    assert caught.value.message.isprintable()


@searched
@given(ids=st.lists(st.integers(0, 10**10 - 1), min_size=1, max_size=20), drawn=st.data())
def test_ids_are_the_same_however_they_are_set_apart(
    written: Callable[[bytes], Path], ids: list[int], drawn: st.DataObject
) -> None:
    pieces = [b"%d" % i + drawn.draw(SEPARATORS) for i in ids]
    start = drawn.draw(st.sampled_from([b"", BOM, b" ", BOM + b"\r\n"]))
    assert read_ids(written(start + b"".join(pieces))).ids == tuple(ids)


def put(folder: Path, data: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- texts


def test_text_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, "Größe\n中文\n".encode())
    assert read_text(path) == Source(str(path), text="Größe\n中文\n".encode())


def test_text_loses_its_bom(tmp_path: Path) -> None:
    assert read_text(put(tmp_path, b"\xef\xbb\xbfabc \xef\xbb\xbf")).text == b"abc \xef\xbb\xbf"


def test_text_line_ends_become_lf(tmp_path: Path) -> None:
    assert read_text(put(tmp_path, b"a\r\nb\rc\n\r\n")).text == b"a\nb\rc\n\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\r\n ", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"abc\xffdef", r"is not UTF-8 text \(byte 3 is 0xff\)"),
        ("schön".encode("latin-1"), r"is not UTF-8 text \(byte 3 is 0xf6\)"),
        ("abc".encode("utf-16"), r"is not UTF-8 text \(byte 0 is 0xff\)"),
        (b"abc\xc3", "is not UTF-8 text"),  # cut within a character
        (b"ab\0c", "holds NUL bytes at 2"),
    ],
)
def test_text_that_cannot_be_used(tmp_path: Path, data: bytes, message: str) -> None:
    path = put(tmp_path, data)
    with pytest.raises(InputError, match=message) as caught:
        read_text(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_text_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\r\nb")))
    assert read_text(Path("-")) == Source("standard input", text=b"a\nb")


def test_empty_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(InputError, match="standard input is empty"):
        read_text(Path("-"))


def test_folder_and_missing_file(tmp_path: Path) -> None:
    for read in (read_text, read_ids):
        with pytest.raises(InputError, match="is a folder"):
            read(tmp_path)
        with pytest.raises(InputError, match=r"cannot read .*gone: No such file"):
            read(tmp_path / "gone")


def test_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TEXT_BYTES", 10)
    assert read_text(put(tmp_path, b"x" * 10)).text == b"x" * 10
    with pytest.raises(InputError, match="is larger than"):
        read_text(put(tmp_path, b"x" * 11))


# ---------------------------------------------------------------- token ids


@pytest.mark.parametrize(
    "data",
    [
        b"1 2 30",
        b"1,2,30",
        b" 1, 2,\t30\n",
        b"1\r\n2\r\n30\r\n",
        b"001 02 30",
        b"1,2,30,",
        b"1, 2, 30,\n",
        b",1,,2 , 30 ,, ",
        b"\xef\xbb\xbf1 2 30",
        b"1 2 0000000030",
    ],
)
def test_ids_are_read(tmp_path: Path, data: bytes) -> None:
    path = put(tmp_path, data)
    assert read_ids(path) == Source(str(path), ids=(1, 2, 30))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no token ids"),
        (b" \n ", "holds no token ids"),
        (b",", "holds no token ids"),
        (b" , ,\n", "holds no token ids"),
        (b"\xef\xbb\xbf", "holds no token ids"),
        (b"\xef\xbb\xbf \n", "holds no token ids"),
        (b"1 \xef\xbb\xbf2", "is not a token id"),  # a byte order mark belongs at the beginning
        (b"1 2 x3", "'x3' is not a token id"),
        (b"1 -2 3", "'-2' is not a token id"),
        (b"1.5 2", "'1.5' is not a token id"),
        (b"[1, 2]", r"'\[1' is not a token id"),
        ("1 ２".encode(), "is not a token id"),  # a digit, but not an ASCII one
        (b"1 \xff\xfe", "is not a token id"),
        (b"a" * 1000, "'" + "a" * 20 + "' is not a token id"),
    ],
)
def test_ids_that_cannot_be_used(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_ids(put(tmp_path, data))


@pytest.mark.parametrize("digits", [11, 21, 4300, 5000])
def test_ids_with_an_endless_number(tmp_path: Path, digits: int) -> None:
    with pytest.raises(InputError, match=f"'{'1' * min(digits, 20)}' is not a token id"):
        read_ids(put(tmp_path, b"1 2 " + b"1" * digits))


# ---------------------------------------------------------------- the built-in texts


def built_in(part: str) -> str:
    text = source.built_in(part).text
    assert text is not None
    return text.decode("utf-8")


@pytest.mark.parametrize(("part", "least"), [("report", 30_000), ("rank", 15_000)])
def test_built_in_text_is_clean(part: str, least: int) -> None:
    text = built_in(part)
    assert len(text.encode()) >= least
    assert "\r" not in text
    assert "\0" not in text
    assert "\ufffd" not in text
    assert not text.startswith("\ufeff")
    assert text.endswith("\n")
    assert source.built_in(part).name == f"built-in {part} text"


def test_built_in_texts_are_long_enough_together() -> None:
    assert sum(len(built_in(part).encode()) for part in ("report", "rank")) >= 40 * 1024


def test_built_in_texts_share_nothing() -> None:
    def sequences(part: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", built_in(part).lower())
        assert len(words) > 2000
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    assert not sequences("report") & sequences("rank")


def test_built_in_texts_have_no_piece_in_common() -> None:
    # Words are no measure where a script has no spaces: whole pieces (blocks between blank lines) do not repeat either.
    report, rank = (built_in(part).split("\n\n") for part in ("report", "rank"))
    pieces = [piece.strip() for piece in (*report, *rank)]
    assert len(pieces) > 50
    assert len(set(pieces)) == len(pieces)
