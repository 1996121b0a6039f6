"""The header reader against any bytes at all, guided by coverage (atheris; `pip install '.[fuzz]'`).

    H=tests.gguf.format.fuzz_header; CORPUS=tests/gguf/format/fuzz_corpus
    python -m $H seeds SEEDS                                   # small files of every sort, built by code
    python -m $H NEW SEEDS $CORPUS -runs=2200000 -rss_limit_mb=256 -timeout=5 -max_len=4096
    python -m $H -set_cover_merge=1 KEEP NEW $CORPUS           # the fewest files with all the coverage

KEEP becomes the next corpus, which test_fuzz_corpus.py reads without atheris; a file that made the reader fail goes
there, too.
"""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qres.errors import QresError
    from qres.gguf.format.header import Header


PATH = Path("fuzzed.gguf")


def check(data: bytes) -> Header | None:
    """Read the bytes as a file of that content; what is read must be true, bounded and usable.

    Returns:
        What was read; None where it is no GGUF.

    Raises:
        AssertionError: or whatever the reader fails with.
    """
    # Imported here, so that atheris can instrument it first.
    from qres.errors import QresError
    from qres.gguf.format.header import parse

    try:
        header = parse(io.BytesIO(data), len(data), PATH)
    except QresError as error:
        _check_error(error)
        return None
    _check_rows(data, header)
    _check_problems(header)
    _check_use(header)
    return header


def _check_rows(data: bytes, header: Header) -> None:
    """No more than the bytes can hold, and sizes that follow from shapes."""
    from qres import levels
    from qres.gguf.format.metadata import Digest

    n_tensors, n_values = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16))
    assert 12 * len(header.metadata) + 24 * len(header.tensors) <= len(data)
    assert sum(len(value) for value in header.metadata.values() if isinstance(value, str)) <= len(data)
    for value in header.metadata.values():
        assert not isinstance(value, Digest) or (value.length <= len(data) and value.offset <= len(data))
    if not header.problems:
        assert (len(header.metadata), len(header.tensors)) == (n_values, n_tensors)
    is_truncated = any("truncated" in problem.message for problem in header.problems)
    for tensor in header.tensors:
        if tensor.n_bytes is None:
            continue
        traits = levels.TYPES_BY_ID[tensor.type_id]
        assert tensor.n_weights == math.prod(tensor.shape)
        assert tensor.n_bytes * traits.block_size == tensor.n_weights * traits.block_bytes
        assert tensor.offset + tensor.n_bytes <= len(data) or is_truncated


def _check_problems(header: Header) -> None:
    """Few, each one line; and a strict reading refuses the file for any that is fatal."""
    from qres.errors import QresError
    from qres.gguf.format.header import raise_first

    assert len(header.problems) <= 110
    for problem in header.problems:
        assert problem.message.isprintable()
        assert len(problem.message) < 600
        assert problem.hint
    try:
        raise_first(header.problems, PATH)
    except QresError:
        assert header.problems
    else:
        assert not any(problem.fatal for problem in header.problems)


def _check_use(header: Header) -> None:
    """Whatever was read can be used everywhere."""
    from qres.errors import QresError
    from qres.gguf import fallbacks, model_file
    from qres.gguf.difference import tokenizer_differences
    from qres.gguf.format.shards import Shards
    from qres.gguf.hyperparameters import differences
    from qres.gguf.pairing import pair

    found = model_file.assemble(PATH, Shards((PATH,), (header,), header.tensors, 1, header.problems))
    _ = (found.bpw, found.types, found.is_16bit, found.tied_head, fallbacks.fallbacks(found))
    for difference in (*tokenizer_differences(found, found), *differences(found, found), pair(found, found).problem):
        assert str(difference).isprintable()
    try:
        model_file.require_language_model(found, "fuzzed")
    except QresError as error:
        _check_error(error)


def _check_error(error: QresError) -> None:
    assert str(error).isprintable()
    assert error.hint


def write_seeds(folder: Path) -> int:
    """Write the seed corpus and return how many files it has."""
    from tests.gguf.format.seeds import seeds

    folder.mkdir(parents=True, exist_ok=True)
    files = seeds()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return len(files)


def main() -> None:
    if sys.argv[1:2] == ["seeds"]:
        print(f"{write_seeds(Path(sys.argv[2]))} files")  # noqa: T201
        return
    import atheris

    with atheris.instrument_imports(include=["qres"]):
        import qres.gguf.model_file
        import qres.records.result  # noqa: F401

    # -merge=1 starts the target again, by the name it has here and through a shell.
    atheris.Setup([f"{sys.executable} -m tests.gguf.format.fuzz_header", *sys.argv[1:]], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
