"""Texts from the field: chat turns, whose special tokens are characters unless they are parsed (C18)."""

from __future__ import annotations

from pathlib import Path

import pytest

from qres.native.memory import layout
from qres.native.vocabulary import Vocabulary
from tests import tiny
from tests.field.test_pairs import scan
from tests.pipeline.test_run import qres

pytestmark = pytest.mark.model

BOS = 257
"""`<s>` of the tiny llama, its one special token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    tiny.write_llama(folder / "T.gguf", change=tiny.predictive)
    tiny.write_llama(folder / "bos.gguf", change=tiny.predictive, bos=True)
    turns = "".join(f"<s>user\nthe {i} of them <s>there\nthis is what it says to {i}\n" for i in range(24))
    (folder / "chat.txt").write_text(turns)
    (folder / "plain.txt").write_text(turns.replace("<s>", "- "))
    return folder


def test_c18_special_tokens_that_are_read_as_characters_are_counted(folder: Path) -> None:
    done, found = scan(folder, "T.gguf", "--levels", "Q8_0", "--text", "chat.txt")
    assert done.returncode == 0, done.stderr
    said = "48 special tokens of this model stand in the text as plain characters (<s>): --special parses them"
    assert said in done.stderr
    assert any(said in warning for warning in found["warnings"])
    parsed, other = scan(folder, "T.gguf", "--levels", "Q8_0", "--text", "chat.txt", "--special")
    assert parsed.returncode == 0, parsed.stderr
    assert "special token" not in parsed.stderr
    assert (found["settings"]["special"], other["settings"]["special"]) == (False, True)
    assert found["levels"][0]["output"]["ppl"] != other["levels"][0]["output"]["ppl"]
    assert "special tokens parsed" in (folder / "out" / "report.md").read_text()


def test_c18_a_text_without_them_is_left_in_peace(folder: Path) -> None:
    done, _ = scan(folder, "T.gguf", "--levels", "Q8_0", "--text", "plain.txt")
    assert "special token" not in done.stderr
    done, _ = scan(folder, "T.gguf", "--levels", "Q8_0")
    assert "special token" not in done.stderr


@pytest.mark.parametrize("model", ["T", "bos"])
def test_c18_ids(folder: Path, model: str) -> None:
    with layout(folder / f"{model}.gguf") as laid_out:
        words = Vocabulary(laid_out, model)
        begin = [BOS] if model == "bos" else []
        assert words.tokenize(b"<s>a<s>") == [*begin, *map(ord, "<s>a<s>")]
        assert words.tokenize(b"<s>a<s>", special=True) == [BOS, ord("a"), BOS]  # one BOS, whoever put it there
        assert words.tokenize(b"a<s>", special=True) == [*begin, ord("a"), BOS]
        assert words.hidden(b"a<s>b<s>") == (2, ("<s>",))
        assert words.hidden(b"<s>ab<s>") == (2, ("<s>",))
        assert words.hidden(b"a < s > <s") == (0, ())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "ids.txt"), "token ids are taken as they are"),
        ((), "the built-in text has no special tokens"),
    ],
)
def test_c18_special_without_a_text_is_a_slip(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    (folder / "ids.txt").write_text(" ".join(map(str, range(200))))
    done = qres("scan", "T.gguf", *arguments, "--special", cwd=folder)
    assert done.returncode == 2
    assert "--special is about a text of yours" in done.stderr
    assert said in done.stderr
