"""What the fuzzer found worth keeping, and its seeds, replayed without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gguf.format import fuzz_header
from tests.gguf.format.seeds import seeds

SEEDS = seeds()
CORPUS = sorted((Path(__file__).parent / "fuzz_corpus").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name[:12])
def test_corpus(path: Path) -> None:
    fuzz_header.check(path.read_bytes())


@pytest.mark.parametrize("name", SEEDS)
def test_seeds(name: str) -> None:
    fuzz_header.check(SEEDS[name])


def test_corpus_reaches_whole_files() -> None:
    assert 50 < len(CORPUS) <= 200
    assert sum(path.stat().st_size for path in CORPUS) <= 200_000
    found = [fuzz_header.check(path.read_bytes()) for path in CORPUS]
    assert any(header and not header.problems and header.tensors and header.metadata for header in found)
    assert any(header and header.problems and header.tensors for header in found)
    assert None in found
