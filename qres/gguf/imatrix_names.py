"""Importance matrices of the same model laid out otherwise: entries under the names that the model's file has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import HEAD, cuts

_T = TypeVar("_T")
_SAME_INPUT = ("attn_qkv", "ffn_gate_up_exps", "ssm_in", "ssm_ba")
"""Matrices whose parts are multiplied with the same input, so that one entry serves all. MLA's are not."""


def fitted(imatrix: Imatrix, reference: Inventory) -> Imatrix:
    """The matrix with its entries under the reference's names, where these hold the same rows cut otherwise.

    An entry of MLA's projections in the other form is left out, as their inputs are others there; so is one of a head
    that the reference ties to its embedding.
    """
    names = {tensor.name for tensor in reference.tensors}
    new: dict[str, str] = {}  # the reference's name -> the entry's
    gone = {HEAD} - names
    for whole, parts in cuts((*names, *imatrix.entries)):
        serves = whole.rpartition(".")[0].rpartition(".")[2] in _SAME_INPUT
        if whole in names and whole not in imatrix.entries:
            known = [part for part in parts if part in imatrix.entries and part not in names]
            gone.update(known)
            new |= {whole: known[0]} if known and serves else {}
        elif whole in imatrix.entries and whole not in names and all(part in names for part in parts):
            gone.add(whole)
            new |= dict.fromkeys(parts, whole) if serves else {}
    if not new and not gone & imatrix.entries.keys():
        return imatrix

    def renamed(old: Mapping[str, _T]) -> dict[str, _T]:
        kept = {name: value for name, value in old.items() if name not in gone}
        return kept | {name: old[entry] for name, entry in new.items() if name not in kept}

    return replace(
        imatrix, entries=renamed(imatrix.entries), sums=renamed(imatrix.sums), counts=renamed(imatrix.counts)
    )
