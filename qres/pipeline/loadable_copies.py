"""Files whose layout llama.cpp does not take for their architecture, measured from a copy with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from qres.events import Listener, in_mib
from qres.gguf import model_file
from qres.gguf.difference import content_digest
from qres.gguf.inventory import Inventory
from qres.gguf.relaying import can_cut, write_cut
from qres.measure.tasks import RefusalsTask
from qres.native import worker
from qres.pipeline.inputs import Given
from qres.printable import show


def with_copies(given: Given, cache: Path, listener: Listener) -> Given:
    """The same files; in the place of one that llama.cpp refuses for its layout, a copy in the layout of another one.

    Raises:
        InputError: a copy cannot be written.
        UnsupportedError: a tensor of a type that cannot be cut.
    """
    partners = _partners(given)
    if not partners:
        return given
    refused = worker.run(RefusalsTask(tuple(partners)), listener)
    copies = {}
    remarks = list(given.remarks)
    for one in (given.reference, *given.files):
        if one.path in refused and one.path in partners:
            copies[one.path] = _copy(one, partners[one.path], cache, listener)
            remarks.append(
                f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}) does not take the layout of "
                f"{show(one.path.name)}: measured is a copy with the same weights in other tensors, "
                f"{show(copies[one.path].path)}."
            )
            listener.warn(remarks[-1])
    return replace(
        given,
        reference=copies.get(given.reference.path, given.reference),
        files=tuple(copies.get(one.path, one) for one in given.files),
        remarks=tuple(remarks),
        tokenizers={copies[path].path if path in copies else path: said for path, said in given.tokenizers.items()},
    )


def _partners(given: Given) -> Mapping[Path, Inventory]:
    """By file that could be cut, the one to cut it like."""
    pairs = [(one, given.reference) for one in given.files] + [(given.reference, one) for one in given.files]
    return {one.path: other for one, other in reversed(pairs) if can_cut(one, other)}


def _copy(inventory: Inventory, other: Inventory, cache: Path, listener: Listener) -> Inventory:
    """The copy, made once and kept by the content of the file and the shapes of the other."""
    listener.stage("reading files")
    digest = content_digest(inventory.path, in_mib(listener))[:24]
    target = cache / "other-layout" / digest / inventory.path.name
    if not target.exists():
        write_cut(inventory, other, target)
    return model_file.read(target)
