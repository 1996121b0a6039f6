"""Text to check with: what took part in making a recipe is left out of it, chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError
from qres.text import chunks as chunks_module
from qres.text.chunks import MIN_TOKENS, Chunk, Fresh, chunk, digest
from qres.text.source import Source

N_CTX = 32
N_VOCAB = 1000


def source(name: str, n_chunks: int, start: int = 0, rest: int = 0) -> Source:
    """Chunks of ids that are all different."""
    return Source(name, ids=tuple(start + i % 1000 for i in range(n_chunks * N_CTX + rest)))


def cut(one: Source, bos: int | None = None) -> tuple[Chunk, ...]:
    return chunk(list(one.ids or ()), N_CTX, bos, None).chunks


def untokenized(_text: bytes) -> list[int]:
    raise AssertionError("ids need no tokenizer")


def fresh(sources: Sequence[Source], used: Collection[str], limit: int, bos: int | None = None) -> Fresh:
    return chunks_module.fresh(sources, untokenized, N_VOCAB, bos, N_CTX, used, limit)


ONE, TWO = source("one", 10), source("two", 10, start=400)


def test_the_first_chunks_where_nothing_was_used() -> None:
    assert fresh([ONE, TWO], (), 4) == Fresh("one, 4 chunks", cut(ONE)[:4])


def test_used_chunks_are_left_out_wherever_they_are() -> None:
    chunks = cut(ONE)
    used = {digest(chunks[k]) for k in (0, 1, 3, 6)}
    assert fresh([ONE], used, 4) == Fresh("one, 4 chunks", tuple(chunks[k] for k in (2, 4, 5, 7)))


def test_used_chunks_are_known_by_their_content_not_by_their_place() -> None:
    moved = Source("moved", ids=cut(ONE)[3] + cut(TWO)[0] + cut(ONE)[5])
    used = [digest(one) for one in cut(ONE)]
    assert fresh([moved], used, 3).chunks == (cut(TWO)[0],)


def test_used_chunks_are_known_with_the_token_that_the_model_puts_first() -> None:
    with_bos = cut(ONE, bos=999)
    assert with_bos[0][0] == 999
    assert fresh([ONE], [digest(one) for one in with_bos[:3]], 2, bos=999).chunks == with_bos[3:5]
    assert fresh([ONE], [digest(one) for one in cut(ONE)[:3]], 2, bos=999).chunks == with_bos[:2]


def test_digest_is_the_same_for_the_same_ids_and_another_for_others() -> None:
    assert digest((1, 2, 3)) == digest((1, 2, 3))
    others = [(1, 2, 4), (1, 2), (12, 3), (1, 23), (3, 2, 1), ()]
    assert len({digest(one) for one in [(1, 2, 3), *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("used", "limit", "name", "count"),
    [
        (6, 8, "one", 4),  # half of what was asked for is enough of the preferred text
        (7, 8, "two", 8),
        (7, 6, "one", 3),
        (7, 7, "two", 7),
        (9, 2, "one", 1),
        (9, 3, "two", 3),
        (10, 1, "two", 1),
        (0, 8, "one", 8),
    ],
)
def test_the_second_text_where_less_than_half_is_left_of_the_first(
    used: int, limit: int, name: str, count: int
) -> None:
    found = fresh([ONE, TWO], [digest(one) for one in cut(ONE)[:used]], limit)
    assert found.name.startswith(f"{name}, {count} chunk")
    assert found.chunks == (cut(ONE)[used:] if name == "one" else cut(TWO))[:count]


def test_the_most_where_no_text_has_half() -> None:
    used = [digest(one) for one in (*cut(ONE)[:9], *cut(TWO)[:7])]
    assert fresh([ONE, TWO], used, 8) == Fresh("two, 3 chunks", cut(TWO)[7:])
    assert fresh([TWO, ONE], used, 8) == Fresh("two, 3 chunks", cut(TWO)[7:])


def test_of_equally_many_the_preferred_text() -> None:
    used = [digest(one) for one in (*cut(ONE)[:9], *cut(TWO)[:9])]
    assert fresh([ONE, TWO], used, 8).chunks == cut(ONE)[9:]


@pytest.mark.parametrize("sources", [(ONE,), (ONE, TWO)])
def test_when_all_was_used_another_text_is_asked_for(sources: tuple[Source, ...]) -> None:
    used = [digest(one) for text in sources for one in cut(text)]
    names = " and ".join(text.name for text in sources)
    with pytest.raises(InputError, match=f"{names}: all chunks took part in making the recipe") as caught:
        fresh(sources, used, 4)
    assert caught.value.hint == "give another with --text or --tokens"


def test_a_rest_that_fills_no_chunk_is_no_text() -> None:
    text = source("text", 2, rest=31)
    with pytest.raises(InputError, match="all chunks took part"):
        fresh([text], [digest(one) for one in cut(text)[:2]], 4)


def test_a_text_that_is_shorter_than_a_chunk_is_one_chunk() -> None:
    short = Source("short", ids=tuple(range(MIN_TOKENS + 9)))
    found = chunks_module.fresh([short], untokenized, N_VOCAB, None, 512, (), 4)
    assert found.chunks == (tuple(range(MIN_TOKENS + 8)),)
    with pytest.raises(InputError, match="all chunks took part"):
        chunks_module.fresh([short], untokenized, N_VOCAB, None, 512, [digest(found.chunks[0])], 4)


def test_a_text_that_is_too_short_and_ids_that_there_are_not_are_refused() -> None:
    with pytest.raises(InputError, match="short has 31 tokens, at least 32 are needed"):
        fresh([Source("short", ids=tuple(range(31)))], (), 4)
    with pytest.raises(InputError, match="token id 1000 is outside the model's vocabulary of 1000"):
        fresh([Source("odd", ids=(*range(900), 1000))], (), 40)


def test_a_second_text_is_not_even_read_where_the_first_is_enough() -> None:
    assert fresh([ONE, Source("broken", ids=(1,))], (), 4).name == "one, 4 chunks"


def test_of_a_long_text_enough_is_tokenized_to_pass_over_what_was_used() -> None:
    words = b"".join(b"%06d " % i for i in range(200_000))
    seen: list[int] = []

    def tokenize(text: bytes) -> list[int]:
        seen.append(len(text))
        return [int(word) % N_VOCAB for word in text.split()]

    text = Source("long", text=words)
    every = chunk([i % N_VOCAB for i in range(200_000)], N_CTX, None, None).chunks
    used = [digest(one) for one in every[:120]]  # chunks come again after 125
    found = chunks_module.fresh([text], tokenize, N_VOCAB, None, N_CTX, used, 5)
    assert found.chunks == every[120:125]
    assert max(seen) < len(words)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(1, 12))
def test_never_a_used_chunk_never_too_many_and_never_fewer_than_there_are(
    used_one: set[int], used_two: set[int], limit: int
) -> None:
    used = {digest(cut(ONE)[k]) for k in used_one} | {digest(cut(TWO)[k]) for k in used_two}
    left = [[one for one in cut(text) if digest(one) not in used][:limit] for text in (ONE, TWO)]
    if not any(left):
        with pytest.raises(InputError):
            fresh([ONE, TWO], used, limit)
        return
    found = fresh([ONE, TWO], used, limit)
    assert found.chunks in [tuple(chunks) for chunks in left]
    assert 2 * len(found.chunks) >= min(limit, 2 * max(map(len, left)))
    assert f", {len(found.chunks)} chunk" in found.name
