"""Texts and token ids: what is read, what is refused and why, and how it is cut into chunks."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError
from qres.text import chunks
from qres.text import source as source_module
from qres.text.chunks import MIN_TOKENS, Plan, Tokens, chunk, texts, tokens_of
from qres.text.source import Source, read_ids, read_text


def put(folder: Path, data: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- chunks


def test_chunks_are_consecutive_and_full() -> None:
    found = chunk(list(range(10)), 4, None, None)
    assert found.chunks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.unused == 2


def test_chunks_without_rest() -> None:
    found = chunk(list(range(8)), 4, None, None)
    assert (len(found.chunks), found.unused) == (2, 0)


def test_chunk_bos_replaces_the_first_token_of_each() -> None:
    found = chunk(list(range(10)), 4, 99, None)
    assert found.chunks == ((99, 1, 2, 3), (99, 5, 6, 7))  # replaced, not inserted: positions stay
    assert found.unused == 2


def test_chunk_bos_0_is_a_token() -> None:
    assert chunk([5, 6, 7, 8], 4, 0, None).chunks == ((0, 6, 7, 8),)


@pytest.mark.parametrize(("limit", "chunks", "unused"), [(1, 1, 9), (2, 2, 5), (3, 3, 1), (9, 3, 1), (None, 3, 1)])
def test_chunk_limit(limit: int | None, chunks: int, unused: int) -> None:
    found = chunk(list(range(13)), 4, None, limit)
    assert (len(found.chunks), found.unused) == (chunks, unused)


@pytest.mark.parametrize(("n", "size"), [(40, 40), (41, 40), (33, 32)])
def test_chunk_of_a_short_text_is_one_of_even_length(n: int, size: int) -> None:
    found = chunk(list(range(n)), 512, None, 3)
    assert [len(c) for c in found.chunks] == [size]
    assert found.unused == n - size


@settings(deadline=None)
@given(
    st.integers(MIN_TOKENS, 400), st.integers(16, 64).map(lambda n: 2 * n), st.none() | st.integers(1, 9), st.booleans()
)
def test_chunks_of_any_text(n: int, n_ctx: int, limit: int | None, with_bos: bool) -> None:
    found = chunk(list(range(n)), n_ctx, -1 if with_bos else None, limit)
    sizes = {len(c) for c in found.chunks}
    assert len(sizes) == 1
    assert sizes.pop() % 2 == 0
    assert 1 <= len(found.chunks) <= (limit or n)
    assert sum(map(len, found.chunks)) + found.unused == n
    flat = [token for c in found.chunks for token in c]
    assert all(token in {i, -1} for i, token in enumerate(flat))
    assert flat.count(-1) == (len(found.chunks) if with_bos else 0)


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
    monkeypatch.setattr(chunks, "MAX_TEXT_BYTES", 10)
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


def no_tokenizer(_text: bytes) -> list[int]:
    raise AssertionError("ids need no tokenizer")


def test_tokens_of_ids_are_those_ids() -> None:
    ids = tuple(range(MIN_TOKENS))
    assert tokens_of(Source("x", ids=ids), no_tokenizer, MIN_TOKENS) == Tokens(list(ids), MIN_TOKENS)


def test_tokens_of_ids_beyond_the_vocabulary() -> None:
    source = Source("ids.txt", ids=(*range(MIN_TOKENS), 100))
    assert len(tokens_of(source, no_tokenizer, 101).ids) == MIN_TOKENS + 1
    with pytest.raises(InputError, match=r"ids.txt: token id 100 is outside the model's vocabulary of 100"):
        tokens_of(source, no_tokenizer, 100)


def test_tokens_of_text_are_the_tokenizers() -> None:
    assert tokens_of(Source("x", text=b"ab" * 20), list, 256).ids == [97, 98] * 20


def test_tokens_of_a_text_that_is_too_short() -> None:
    assert len(tokens_of(Source("x", text=b"a" * MIN_TOKENS), list, 256).ids) == MIN_TOKENS
    with pytest.raises(InputError, match=f"x has {MIN_TOKENS - 1} tokens, at least {MIN_TOKENS}"):
        tokens_of(Source("x", text=b"a" * (MIN_TOKENS - 1)), list, 256)
    with pytest.raises(InputError, match="x has 0 tokens"):
        tokens_of(Source("x", text=b" "), lambda _: [], 256)


def test_tokens_of_a_long_text_are_those_of_its_beginning() -> None:
    """Only as much is tokenized as is needed, cut between lines, and the rest is estimated."""
    text = b"".join(b"%07d\n" % i for i in range(100_000))
    seen: list[int] = []

    def tokenize(part: bytes) -> list[int]:
        assert text.startswith(part)
        assert part.endswith(b"\n")
        seen.append(len(part))
        return list(part[::2])

    found = tokens_of(Source("x", text=text), tokenize, 256, needed=5000)
    assert len(seen) == 1
    assert seen[0] < len(text) / 4
    assert found.ids == list(text[::2])[: len(found.ids)]
    assert len(found.ids) >= 5000
    assert found.total == pytest.approx(len(text) / 2, rel=0.01)


def test_tokens_of_a_text_of_long_words_are_sought_until_there_are_enough() -> None:
    """A tokenizer that makes one token of 1000 bytes."""
    text = b"\xc3\xa4" * 500_000
    found = tokens_of(Source("x", text=text), lambda part: [1] * (len(part.decode()) // 500), 2, needed=300)
    assert 300 <= len(found.ids) <= 1000


def plan(n: int, rank: int | None, chunks: int = 8, rank_chunks: int = 4) -> Plan:
    def source(name: str, size: int) -> Source:
        return Source(name, ids=tuple(range(size)))

    return Plan(source("own", n), None if rank is None else source("rank", rank), 64, chunks, rank_chunks)


@pytest.mark.parametrize(
    ("n", "rank", "report_chunks", "rank_chunks", "unused"),
    [
        (64 * 9, 64 * 9, 8, 4, 64),
        (64 * 2 + 10, 64 * 9, 2, 4, 10),
        (64 * 9, None, 5, 4, 0),  # one text serves for both: its end ranks
        (64 * 20, None, 8, 4, 64 * 8),
        (64 * 3, None, 2, 1, 0),
        (64, None, 1, 1, 0),  # and where it fills one chunk only, that one does
        (40, 64 * 9, 1, 1, 0),  # shorter than a chunk: chunks of the other text would have another graph
    ],
)
def test_texts_are_cut_for_both_purposes(
    n: int, rank: int | None, report_chunks: int, rank_chunks: int, unused: int
) -> None:
    found = texts(plan(n, rank), no_tokenizer, 10_000, None)
    assert (len(found.report), len(found.rank), found.unused) == (report_chunks, rank_chunks, unused)
    assert found.report[0][0] == 0
    if rank is None and report_chunks > 1:
        assert not set(found.report[-1]) & set(found.rank[0])
    assert len({len(piece) for piece in (*found.report, *found.rank)}) == 1


# ---------------------------------------------------------------- the built-in texts


def built_in(part: str) -> str:
    text = source_module.built_in(part).text
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
    assert source_module.built_in(part).name == f"built-in {part} text"


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
