"""llama.cpp's reason for refusing a model -> the error with the right exit code and advice."""

from __future__ import annotations

import re
from importlib.metadata import version

from qres.errors import InputError, NativeError, QresError, UnsupportedError

_UNKNOWN = re.compile(
    r"unknown (?:model architecture|pre-tokenizer type|tokenizer|vocab type|rope scaling)|unsupported model|"
    r"invalid ggml type|is extremely large|newer than"
)
"""A name or number that this llama.cpp does not know: another one may."""
_SYSTEM = re.compile(
    r"alloc|out of memory|mmap|failed to open|failed to fit|no backends|cannot allocate|read error|no message"
)
"""The machine's or llama.cpp's own trouble: nothing is said about the file."""
_COUNT = re.compile(r"wrong number of tensors; expected (\d+), got (\d+)")
_AGAIN = "get the file again, or convert the original model again"


def load_error(name: str, reason: str) -> QresError:
    """The error for a model that llama.cpp did not load.

    Args:
        name: What the message calls the file.
        reason: llama.cpp's first error line.

    Returns:
        UnsupportedError where llama.cpp lacks something that the file names, NativeError where memory or the system
        failed, else InputError: the file is damaged, incomplete, or holds something else.
    """
    message = f"llama.cpp cannot load {name}: {reason}"
    if _UNKNOWN.search(reason):
        newer = f"it may be newer than llama-cpp-python {version('llama-cpp-python')}: update that"
        return UnsupportedError(message, f"{newer}, or convert the model again")
    if _SYSTEM.search(reason):
        return NativeError(message, "free memory, or check the disk, and try again")
    count = _COUNT.search(reason)
    if count:
        held, taken = map(int, count.groups())
        what = f"it holds {held} tensors, and the model that its header describes has {taken}"
        return InputError(f"llama.cpp cannot load {name}: {what}", _AGAIN)
    return InputError(message, _AGAIN)
