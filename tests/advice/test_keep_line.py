"""What is said of the keep list: units, or the few tensors that are not the reference's."""

from __future__ import annotations

import dataclasses

import pytest

from qres.advice.keep_line import keep_line
from qres.records.files import TypeShare
from qres.records.result import Level
from qres.records.units import Keep, KeepCheck
from tests.examples.levels import changed_level
from tests.examples.result import example

MIB = 2**20
REFERENCE = example().reference
FFN = ("blk.1.ffn_down.weight", "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight")


def keep(*tensors: str, mib: float = 1.0, type: str = "F16", unit: str = "1.ffn") -> Keep:
    return Keep(unit, type, 0.01, 0.9, int(mib * MIB), None, True, "", tensors)


def said(*rows: Keep, check: KeepCheck | None = None, weights: tuple[str, ...] = FFN) -> str:
    base = example().levels[0]
    unit = dataclasses.replace(base.sensitivity.units[0], unit="1.ffn", weights=weights)
    level = changed_level(base, name="F16", units=(unit,), keep_16bit=rows, keep_check=check)
    return keep_line(REFERENCE, level, [level])


def test_c20_the_one_damaged_tensor_is_the_advice() -> None:
    assert said(keep(FFN[0])) == "Keep at 16 bit in F16: blk.1.ffn_down.weight (+1.0 MiB)."
    assert said(keep(*FFN[:2])) == "Keep at 16 bit in F16: blk.1.ffn_down.weight, blk.1.ffn_gate.weight (+1.0 MiB)."
    many = (*FFN, "blk.1.ffn_extra.weight")
    assert said(keep(*FFN), weights=many) == "Keep at 16 bit in F16: 1.ffn (3 of its 4 tensors) (+1.0 MiB)."


def test_c20_a_unit_that_is_damaged_whole_is_named() -> None:
    for rows, weights in (
        (FFN, FFN),
        (("blk.1.ffn_norm.weight", *FFN), FFN),
        ((), FFN),  # of a result of before
        (FFN, (*FFN, "blk.1.ffn_gate_inp.weight")),  # no quantizer touches the router
    ):
        assert said(keep(*rows), weights=weights) == "Keep at 16 bit in F16: 1.ffn (+1.0 MiB)."


def test_c20_what_is_at_16_bit_already_is_replaced() -> None:
    one = said(keep(FFN[0], mib=0))
    assert one == "Replace blk.1.ffn_down.weight by the reference's: it is at F16 in both, but not the same."
    norm = said(keep("blk.1.ffn_norm.weight", mib=0, type="F32"), keep(FFN[0], mib=0))
    assert norm == (
        "Replace blk.1.ffn_norm.weight, blk.1.ffn_down.weight by the reference's: they are at F32 and F16 in both, but "
        "not the same."
    )


def test_c20_what_the_list_does_is_said_once() -> None:
    check = KeepCheck(("1.ffn",), 0.1, 0.0, 1.0, MIB, recovered_se=0.01)
    proof = "without their errors the KLD falls by 100% on other text"
    free = "Replace blk.1.ffn_down.weight by the reference's: it is at F16 in both, but not the same"
    assert said(keep(FFN[0], mib=0), check=check) == f"{free}; {proof.replace('their errors', 'its error')}."
    both = said(keep(FFN[0], mib=0), keep(*FFN[1:], mib=2), check=check)
    assert both == f"{free}. Keep at 16 bit in F16: blk.1.ffn_gate.weight, blk.1.ffn_up.weight (+2.0 MiB; {proof})."


@pytest.mark.parametrize(("type", "stay"), [("Q8_0", "as in the reference"), ("Q8_0 and F16", "as in the reference")])
def test_c6_advice_is_what_the_reference_holds(type: str, stay: str) -> None:
    assert said(keep(*FFN, type=type)) == f"Keep {stay} in F16: 1.ffn (+1.0 MiB)."


def test_c6_nothing_to_keep_is_not_said_of_16_bit() -> None:
    reference = dataclasses.replace(REFERENCE, is_16bit=False)
    level = changed_level(example().levels[0], keep_16bit=())
    assert keep_line(reference, level, [level]) == (
        "Nothing in Q4_K_M needs to stay as in the reference: no unit's damage stands out of the noise."
    )


def test_c5_a_conversion_has_nothing_to_keep() -> None:
    types = (TypeShare("BF16", 30, MIB, 2 * MIB), TypeShare("F32", 9, 10, 40))
    level: Level = changed_level(example().levels[0], name="BF16", keep_16bit=(), types=types)
    assert keep_line(REFERENCE, level, [level]) == "Everything in BF16 is at 16 bit or more already."
