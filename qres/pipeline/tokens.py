"""What the tokenizers of the files make of the measuring text, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qres.errors import InputError
from qres.pipeline.inputs import Given
from qres.printable import counted, show


def tokenizer_remarks(given: Given, retokenized: Mapping[Path, str], *, as_ids: bool) -> tuple[str, ...]:
    """What other tokenizers mean for the figures.

    Args:
        given: The files.
        retokenized: By file, where its tokenizer makes other ids of the measuring text; empty for the same ids.
        as_ids: Token ids were given instead of text.

    Raises:
        InputError: a tokenizer that makes other ids.
    """
    remarks = []
    for path, different in given.tokenizers.items():
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        if retokenized.get(path):
            raise InputError(
                f"{path.name} has another tokenizer than {given.reference.path.name}: {different[0]}{more}; "
                f"{retokenized[path]}",
                "their outputs cannot be compared on this text: give files made from this reference, or --tokens",
            )
        why = "token ids were given, so that no tokenizer takes part" if as_ids else "the text becomes the same tokens"
        remarks.append(
            f"{path.name}: {different[0]}{more}; {why}, and the figures hold. Programs may use it otherwise."
        )
    return tuple(remarks)


def hidden_tokens(count: int, names: Sequence[str]) -> tuple[str, ...]:
    """Special tokens of the model that are read as characters in the measuring text, and what to do about it."""
    if not count:
        return ()
    shown = ", ".join(map(show, names[:3])) + (" and others" if len(names) > 3 else "")
    stand = "stands" if count == 1 else "stand"
    return (
        f"{counted(count, 'special token')} of this model {stand} in the text as plain characters ({shown}): "
        "--special parses them, as a chat program does.",
    )
