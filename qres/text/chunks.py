"""Sources to chunks of token ids. Knows no model: the tokenizer is passed in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from qres.errors import InputError
from qres.printable import counted
from qres.text.source import Source

MIN_TOKENS = 32
"""A text shorter than this has fewer than 16 scored positions: no figure from it would mean anything."""


Chunk = tuple[int, ...]

Tokenize = Callable[..., list[int]]
"""Text to token ids; called with `special=True` where special tokens in the text are to be parsed."""


@dataclass(frozen=True)
class Chunks:
    """Token ids in pieces that are decoded on their own."""

    chunks: tuple[Chunk, ...]
    unused: int
    """Tokens at the end that fill no chunk, or that the limit left out."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of a source, or of as much of its beginning as is needed."""

    ids: list[int]
    total: int
    """Tokens of the whole source; an estimate by bytes where only the beginning was tokenized."""


def tokens_of(source: Source, tokenize: Tokenize, n_vocab: int, needed: int | None = None) -> Tokens:
    """Token ids of a source.

    Args:
        source: Text or ids.
        tokenize: The model's tokenizer.
        n_vocab: Ids are below this.
        needed: Tokens that are enough: the rest of a text of 100 MB would cost the tokenizer a minute and gigabytes.

    Raises:
        InputError: fewer than MIN_TOKENS, or an id the model does not have.
    """
    if source.ids is not None:
        found = Tokens(list(source.ids), len(source.ids))
    else:
        found = _tokenized(source.text or b"", partial(tokenize, special=True) if source.special else tokenize, needed)
    if len(found.ids) < MIN_TOKENS:
        instead = "a longer text with --text" if source.ids is None else "more ids with --tokens"
        raise InputError(
            f"{source.name} has {counted(len(found.ids), 'token')}, at least {MIN_TOKENS} are needed", f"give {instead}"
        )
    high = max(found.ids)
    if high >= n_vocab:
        raise InputError(
            f"{source.name}: token id {high} is outside the model's vocabulary of {n_vocab}",
            "give ids that this model's own tokenizer made",
        )
    return found


def _tokenized(text: bytes, tokenize: Tokenize, needed: int | None) -> Tokens:
    size = len(text) if needed is None else needed * 16 + _SPARE_BYTES
    while True:
        part = _beginning(text, size)
        ids = tokenize(part)
        if len(part) == len(text):
            return Tokens(ids, len(ids))
        if needed is not None and len(ids) > needed + _SPARE_TOKENS:  # the last ones could differ in the whole text
            ids = ids[: -_SPARE_TOKENS // 2]
            return Tokens(ids, round(len(ids) / len(part) * len(text)))
        size *= 4


_SPARE_BYTES = 1 << 16
_SPARE_TOKENS = 256


def _beginning(text: bytes, size: int) -> bytes:
    """About `size` bytes of UTF-8 text, cut after a line or a word where there is one."""
    if size >= len(text):
        return text
    part = text[:size]
    cut = max(part.rfind(b"\n"), part.rfind(b" ")) + 1
    return part[:cut] if cut > size // 2 else part.decode("utf-8", errors="ignore").encode()


def chunk(ids: list[int], n_ctx: int, bos: int | None, limit: int | None) -> Chunks:
    """Cut token ids into chunks as llama-perplexity does: consecutive, full, BOS in the first place of each.

    A text shorter than one chunk becomes a single shorter one.

    Args:
        ids: Token ids of the whole text.
        n_ctx: Tokens per chunk.
        bos: Token that replaces the first of each chunk when the model adds one, else None.
        limit: At most this many chunks.
    """
    size = min(n_ctx, len(ids)) // 2 * 2  # even: the noise floor decodes a chunk in two equal halves
    starts = range(0, len(ids) - size + 1, size)[:limit]
    chunks = [ids[start : start + size] for start in starts]
    if bos is not None:
        chunks = [[bos, *piece[1:]] for piece in chunks]
    return Chunks(tuple(tuple(piece) for piece in chunks), len(ids) - len(chunks) * size)


def digest(chunk: Chunk) -> str:
    """A short name of a chunk by its content."""
    return hashlib.sha256(repr(tuple(chunk)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Texts:
    """What a scan decodes."""

    rank: tuple[Chunk, ...]
    """Chunks that rank the units."""
    report: tuple[Chunk, ...]
    """Chunks that give the figures; the same single one where the text has only one."""
    rank_name: str
    report_name: str
    unused: int
    """Tokens of the reporting text that are not decoded."""


@dataclass(frozen=True)
class Plan:
    """Which texts to cut into chunks, and how many of them."""

    text: Source
    rank_text: Source | None
    """None: the end of `text` ranks and its beginning reports."""
    n_ctx: int
    chunks: int
    rank_chunks: int
    held: int = 0
    """Chunks at the end of `text` that are left for verifying, at most a third of it."""


def texts(plan: Plan, tokenize: Tokenize, n_vocab: int, bos: int | None) -> Texts:
    """Tokenize and cut the texts of a scan.

    Raises:
        InputError: a text that is too short, or ids the model does not have.
    """

    def cut(source: Source, limit: int) -> Chunks:
        held = plan.held if source is plan.text else 0
        tokens = tokens_of(source, tokenize, n_vocab, (limit + held) * plan.n_ctx)
        every = len(chunk(tokens.ids, plan.n_ctx, bos, limit + held).chunks)
        limit = min(limit, max(1, every - min(held, every // 3)))
        found = chunk(tokens.ids, plan.n_ctx, bos, limit)
        return Chunks(found.chunks, found.unused + tokens.total - len(tokens.ids))

    if plan.rank_text is not None:
        report, rank = cut(plan.text, plan.chunks), cut(plan.rank_text, plan.rank_chunks)
        if len(rank.chunks[0]) == len(report.chunks[0]):
            return Texts(rank.chunks, report.chunks, plan.rank_text.name, plan.text.name, report.unused)
        # One map serves chunks of one length: a text shorter than a chunk has to rank itself.
    every = cut(plan.text, plan.chunks + plan.rank_chunks)
    n = len(every.chunks)
    if n == 1:
        return Texts(every.chunks, every.chunks, plan.text.name, plan.text.name, every.unused)
    split = min(n - min(plan.rank_chunks, n // 2), plan.chunks)
    report_name, rank_name = (f"{plan.text.name}, {_range(a, b)}" for a, b in ((1, split), (split + 1, n)))
    return Texts(every.chunks[split:], every.chunks[:split], rank_name, report_name, every.unused)


def _range(first: int, last: int) -> str:
    return f"chunk {first}" if first == last else f"chunks {first} to {last}"


@dataclass(frozen=True)
class Fresh:
    """Chunks that took no part in what is to be checked with them."""

    name: str
    """Name of the source, and how many chunks of it."""
    chunks: tuple[Chunk, ...]


def fresh(
    sources: Sequence[Source],
    tokenize: Tokenize,
    n_vocab: int,
    bos: int | None,
    n_ctx: int,
    used: Collection[str],
    limit: int,
) -> Fresh:
    """The first chunks that are not among the used ones: of the first source that has half of the limit, else the most.

    Args:
        sources: Texts or ids, the preferred one first.
        tokenize: The model's tokenizer.
        n_vocab: Ids are below this.
        bos: As for `chunk`.
        n_ctx: Tokens per chunk.
        used: Digests of chunks to leave out.
        limit: At most this many.

    Raises:
        InputError: a text that is too short, or all of which was used.
    """
    best = Fresh("", ())
    for source in sources:
        tokens = tokens_of(source, tokenize, n_vocab, (limit + len(used)) * n_ctx)
        found = [one for one in chunk(tokens.ids, n_ctx, bos, None).chunks if digest(one) not in used][:limit]
        if len(found) > len(best.chunks):
            best = Fresh(f"{source.name}, {len(found)} chunk{'s' if len(found) > 1 else ''}", tuple(found))
        if 2 * len(best.chunks) >= limit:
            return best
    if not best.chunks:
        names = " and ".join(source.name for source in sources)
        raise InputError(f"{names}: all chunks took part in making the recipe", "give another with --text or --tokens")
    return best
