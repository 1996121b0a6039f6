"""Token ids of a source, and how they are cut into chunks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError
from qres.text.chunks import MIN_TOKENS, Plan, Tokens, chunk, texts, tokens_of
from qres.text.source import Source
from tests.search import searched

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


# ---------------------------------------------------------------- token ids


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
    text = b"".join(b"%06d\n" % i for i in range(100_000))
    seen: list[int] = []

    def tokenize(part: bytes) -> list[int]:
        assert text.startswith(part)
        assert part.endswith(b"\n")
        seen.append(len(part))
        return [*part[::2], 0]  # at the end of a part, another token than the whole text has there

    found = tokens_of(Source("x", text=text), tokenize, 256, needed=5000)
    assert len(seen) == 1
    assert seen[0] < len(text) / 4
    assert found.ids == list(text[::2])[: len(found.ids)]
    assert len(found.ids) >= 5000
    assert found.total == pytest.approx(len(text) / 2, rel=0.01)


def test_tokens_of_a_text_that_is_shorter_than_needed_are_all_of_it() -> None:
    assert tokens_of(Source("x", text=b"ab" * 40), lambda part: list(part[::2]), 256, needed=5000).total == 40


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
        (64 * 6, None, 3, 3, 0),  # at most half of it
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


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("chunks", "held", "reported"), [(12, 4, 8), (20, 4, 8), (9, 4, 6), (9, 1, 8), (2, 4, 2), (1, 4, 1)]
)
def test_chunks_are_held_back_for_verifying_but_at_most_a_third(chunks: int, held: int, reported: int) -> None:
    found = texts(dataclasses.replace(plan(64 * chunks, 64 * 9), held=held), no_tokenizer, 64 * 20, None)
    assert len(found.report) == reported
    assert len(found.rank) == 4  # of the other text, of which nothing is held back


def test_unused_tokens_of_a_long_text_are_reckoned_with() -> None:
    text = b"".join(b"%06d\n" % i for i in range(100_000))
    long = dataclasses.replace(plan(0, 64 * 9), text=Source("long", text=text))
    found = texts(long, lambda part: list(part[::2]), 64 * 20, None)
    assert found.unused == pytest.approx(len(text) / 2 - 8 * 64, rel=0.01)


@searched
@given(
    st.integers(2, 90),
    st.integers(2, 12) | st.integers(2, 99),
    st.none() | st.integers(0, 90),
    st.none() | st.integers(1, 9),
)
def test_chunks_are_the_text_in_equal_even_pieces(n: int, n_ctx: int, bos: int | None, limit: int | None) -> None:
    ids = list(range(n))  # all different, so that nothing can move unseen; often BOS is one of them
    found = chunk(ids, n_ctx, bos, limit)
    (size,) = {len(piece) for piece in found.chunks}
    assert size % 2 == 0
    assert size == max(k for k in range(0, len(ids) + 1, 2) if k <= n_ctx)  # the longest even one that there is
    assert size * len(found.chunks) + found.unused == len(ids)
    whole = len(ids) // size
    assert len(found.chunks) == (whole if limit is None else min(whole, limit))
    for i, piece in enumerate(found.chunks):
        own = ids[i * size : (i + 1) * size]
        assert piece[0] == (own[0] if bos is None else bos)
        assert list(piece[1:]) == own[1:]  # BOS is put into the first place and into no other
