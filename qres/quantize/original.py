"""The 16-bit model that levels and recipes are made from, as it was when it was read, and with what they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qres.events import Listener, in_mib
from qres.files import Stamp, stamp
from qres.gguf.difference import content_digest
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory


@dataclass(frozen=True)
class Original:
    """What the quantizer is given besides the types; stays the same for every file that is made."""

    reference: Inventory
    imatrix: Imatrix | None
    """Checked to be of the reference."""
    threads: int
    stamps: tuple[Stamp, ...]
    """Of the reference's files before anything was made from them."""
    digest: str = ""
    """Of their content; empty until `with_digest`, since it takes reading them whole."""

    def types(self, chosen: Mapping[str, str] | None) -> Mapping[str, str]:
        """Tensor -> type for the quantizer: those chosen, and the reference's own of what is quantized in it already.

        llama.cpp would quantize such tensors again, or refuse to, unless they are given the type that they have.
        """
        return {**self.reference.quantized, **(chosen or {})}


def original(reference: Inventory, imatrix: Imatrix | None, threads: int) -> Original:
    """The model as it is now.

    Raises:
        InputError: a file of it is gone.
    """
    return Original(reference, imatrix, threads, tuple(stamp(path) for path in reference.shards))


def with_digest(model: Original, listener: Listener) -> Original:
    """The same with the digest of its content, read where it is not known yet.

    Raises:
        InputError: a file cannot be read.
    """
    if model.digest:
        return model
    listener.stage("reading the reference")
    return replace(model, digest=content_digest(model.reference.shards, in_mib(listener)))
