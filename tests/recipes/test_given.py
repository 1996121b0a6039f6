"""Types that someone else chose: read from files and from rules, and weighed against a level's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from scipy import optimize

from qres.errors import InputError, UsageError
from qres.gguf import model_file
from qres.gguf.difference import fingerprint
from qres.recipes import dialects, given
from qres.recipes.choices import Choices
from qres.recipes.given import Deviation, deviations
from qres.recipes.wishes import Wishes
from qres.records.recipe import Recipe
from tests import tiny
from tests.examples import recipe as ex
from tests.examples.recipe import (
    DOWN_0,
    DOWN_10,
    EMBEDDING,
    LADDER,
    NAMES,
    NORM,
    OPTIONS,
    OTHER_NORM,
    OUT_0,
    OUT_1,
    ROUTER,
    UNPREDICTED,
)

Q4, Q6 = LADDER["Q4_K_M"], LADDER["Q6_K"]
Q4_FTYPE, Q6_FTYPE, Q8_FTYPE, Q2_K_S_FTYPE = 15, 18, 7, 21
"""`enum llama_ftype`."""


@pytest.fixture(scope="module")
def choices() -> Choices:
    return Choices(ex.example())


def write(
    path: Path,
    types: Mapping[str, str],
    file_type: int | None = Q4_FTYPE,
    shapes: Mapping[str, tuple[int, ...]] = ex.SHAPES,
) -> Path:
    """A file of these tensors, all zero."""
    writer = gguf.GGUFWriter(path, "llama")
    if file_type is not None:
        writer.add_file_type(file_type)
    for name, kind in types.items():
        traits = gguf.GGMLQuantizationType[kind]
        shape = gguf.quants.quant_shape_to_byte_shape(shapes[name][::-1], traits)
        writer.add_tensor(name, np.zeros(shape, np.uint8), raw_dtype=traits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(folder: Path, text: str | bytes, name: str = "rules.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def types_of(found: Recipe) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in found.tensors}


def changed(base: Mapping[str, str], found: list[Deviation]) -> dict[str, str]:
    """The level's types with the deviations."""
    assert all(base[row.tensor] == row.stock for row in found)
    return {**base, **{row.tensor: row.type for row in found}}


# ---------------------------------------------------------------- of a GGUF

MIX = {**Q4, EMBEDDING: "Q5_1", DOWN_0: "Q5_K", OUT_1: "IQ4_NL", UNPREDICTED: "Q8_0", DOWN_10: "F16"}


def test_types_of_a_file_are_its_own(tmp_path: Path, choices: Choices) -> None:
    found, rows = given.read(choices, write(tmp_path / "theirs.gguf", MIX), Wishes())
    assert types_of(found) == MIX
    assert (found.bytes, found.budget, found.base) == (ex.data_bytes(MIX), "types of theirs.gguf", "Q4_K_M")
    assert found.predicted is not None
    assert found.predicted.raw_kld == pytest.approx(ex.loss(MIX))
    assert (found.limit_bytes, found.gap, found.notes) == (None, 0, ())
    assert changed(Q4, rows) == MIX
    assert len(rows) == 5


def test_order_in_the_file_makes_no_difference(tmp_path: Path, choices: Choices) -> None:
    backwards = dict(reversed(MIX.items()))
    found, _ = given.read(choices, write(tmp_path / "theirs.gguf", backwards), Wishes())
    assert tuple(types_of(found)) == NAMES
    assert types_of(found) == MIX


@pytest.mark.parametrize(
    ("file_type", "wanted", "level"),
    [
        (Q6_FTYPE, None, "Q6_K"),  # its own
        (Q8_FTYPE, None, "Q8_0"),
        (Q6_FTYPE, "Q5_K_M", "Q5_K_M"),  # the one that is named
        (Q2_K_S_FTYPE, None, "Q4_K_M"),  # its own is not known: the smallest measured
        (None, None, "Q4_K_M"),
        (None, "Q8_0", "Q8_0"),
        (Q4_FTYPE, "Q6_K", "Q6_K"),
    ],
)
def test_what_a_file_is_compared_with(
    tmp_path: Path, choices: Choices, file_type: int | None, wanted: str | None, level: str
) -> None:
    path = write(tmp_path / "theirs.gguf", MIX, file_type)
    found, rows = given.read(choices, path, Wishes(level=wanted))
    assert changed(LADDER[level], rows) == MIX
    assert found.base == level


def test_a_file_of_the_level_itself_does_not_deviate(tmp_path: Path, choices: Choices) -> None:
    found, rows = given.read(choices, write(tmp_path / "q6.gguf", Q6, Q6_FTYPE), Wishes())
    assert rows == []
    assert types_of(found) == Q6


def test_types_without_predictions_leave_no_prediction(tmp_path: Path, choices: Choices) -> None:
    path = write(tmp_path / "theirs.gguf", {**Q4, OUT_0: "Q2_K"})
    found, (row,) = given.read(choices, path, Wishes())
    assert found.predicted is None
    assert (row.tensor, row.type, row.kld_change, row.is_worth) == (OUT_0, "Q2_K", None, None)


def test_more_tensors_than_were_scanned_are_passed_over(tmp_path: Path, choices: Choices) -> None:
    types, shapes = {**Q4, "output.weight": "Q6_K"}, {**ex.SHAPES, "output.weight": (512, 4)}
    found, _ = given.read(choices, write(tmp_path / "theirs.gguf", types, shapes=shapes), Wishes())
    assert types_of(found) == Q4


@pytest.mark.parametrize(
    ("types", "shapes", "what"),
    [
        ({name: kind for name, kind in Q4.items() if name != DOWN_10}, {}, DOWN_10),
        ({name: kind for name, kind in Q4.items() if name != NORM}, {}, NORM),
        (Q4, {OUT_1: (512, 577)}, OUT_1),
        (Q4, {OUT_1: (512, 576, 2)}, OUT_1),
        ({**Q4, OUT_0: "F16"}, {OUT_0: (576, 512)}, OUT_0),  # the other way round: the same bytes
    ],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, choices: Choices, types: dict[str, str], shapes: dict[str, tuple[int, ...]], what: str
) -> None:
    path = write(tmp_path / "theirs.gguf", types, shapes={**ex.SHAPES, **shapes})
    with pytest.raises(InputError) as caught:
        given.read(choices, path, Wishes())
    assert caught.value.message == (
        f"theirs.gguf is not the model that was scanned: {what} is missing or has another shape"
    )
    assert "trained llama" in caught.value.hint


def test_a_type_of_a_later_llama_cpp_is_refused(tmp_path: Path, choices: Choices) -> None:
    path = write(tmp_path / "theirs.gguf", {**Q4, OUT_0: "F16"})
    data = path.read_bytes()
    at = data.index(OUT_0.encode()) + len(OUT_0) + 4 + 2 * 8
    assert data[at : at + 4] == (1).to_bytes(4, "little")
    path.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InputError, match=rf"theirs\.gguf: {OUT_0} is type 99, which this qres does not know"):
        given.read(choices, path, Wishes())


def test_a_damaged_file_is_refused(tmp_path: Path, choices: Choices) -> None:
    path = write(tmp_path / "theirs.gguf", Q4)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"theirs\.gguf is truncated"):
        given.read(choices, path, Wishes())


# ---------------------------------------------------------------- of rules


def as_file(types: Mapping[str, str]) -> str:
    return dialects.tensor_type_file(list(types.items()))


def as_line(types: Mapping[str, str]) -> str:
    return dialects.custom_q(list(types.items()))


@pytest.mark.parametrize("spell", [as_file, as_line])
def test_rules_of_both_dialects_are_the_types_they_were_made_of(
    tmp_path: Path, choices: Choices, spell: Callable[[Mapping[str, str]], str]
) -> None:
    rules = {name: kind for name, kind in MIX.items() if name not in {NORM, ROUTER, OTHER_NORM}}
    found, rows = given.read(choices, put(tmp_path, spell(rules)), Wishes())
    assert types_of(found) == MIX
    assert changed(Q4, rows) == MIX
    assert found.budget == "types of rules.txt"


def test_tensors_without_a_rule_have_the_levels_type(tmp_path: Path, choices: Choices) -> None:
    path = put(tmp_path, "# more for what matters\nffn_down=q8_0\n")
    for level in ("Q4_K_M", "Q6_K"):
        found, rows = given.read(choices, path, Wishes(level=level))
        assert types_of(found) == {**LADDER[level], DOWN_0: "Q8_0", DOWN_10: "Q8_0"}
        assert {row.tensor for row in rows} == {DOWN_0, DOWN_10}
        assert found.base == level
    assert types_of(given.read(choices, path, Wishes())[0])[OUT_0] == "Q4_K"


def test_rules_count_for_what_is_quantized_only_and_fall_back_as_the_quantizer_does(
    tmp_path: Path, choices: Choices
) -> None:
    found, _ = given.read(choices, put(tmp_path, "weight=q4_K"), Wishes())
    assert types_of(found) == {
        **dict.fromkeys((OUT_0, DOWN_0, OUT_1, DOWN_10), "Q4_K"),
        **dict.fromkeys((EMBEDDING, UNPREDICTED), "Q5_0"),  # rows of 576
        **dict.fromkeys((NORM, ROUTER, OTHER_NORM), "F32"),
    }


def test_an_unknown_level_is_refused(tmp_path: Path, choices: Choices) -> None:
    for path in (put(tmp_path, "ffn=q4_K"), write(tmp_path / "theirs.gguf", Q4)):
        with pytest.raises(UsageError, match="the result knows no level 'Q3_K_M'"):
            given.read(choices, path, Wishes(level="Q3_K_M"))


@pytest.mark.parametrize(
    "data",
    [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"ffn=q4_K\0", b"\xff\xfeffn=q4_K", bytes(range(256)), b"GGU\xff"],
    ids=["png", "NUL", "UTF-16", "all bytes", "almost"],
)
def test_what_is_neither_file_nor_rules_is_refused(tmp_path: Path, choices: Choices, data: bytes) -> None:
    with pytest.raises(InputError, match=r"junk\.bin is neither a GGUF nor a text of rules"):
        given.read(choices, put(tmp_path, data, "junk.bin"), Wishes())


def test_more_text_than_any_rules_are_is_refused(
    tmp_path: Path, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = "ffn=q4_K\n" * 10
    monkeypatch.setattr(given, "_MAX_RULES_BYTES", len(rules))
    given.read(choices, put(tmp_path, rules), Wishes())
    with pytest.raises(InputError, match="neither a GGUF nor a text of rules"):
        given.read(choices, put(tmp_path, rules + "\n"), Wishes())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mine.txt: there are no rules in it"),
        ("GGU", "mine.txt: 'GGU' is not PATTERN=TYPE"),
        ("ffn=q4_k_m", "mine.txt: 'ffn=q4_k_m': q4_k_m is no type"),
        ("ffn(=q4_K", "mine.txt: 'ffn(' is no regular expression"),
    ],
)
def test_rules_that_are_none_are_refused_with_the_file(tmp_path: Path, choices: Choices, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        given.read(choices, put(tmp_path, text, "mine.txt"), Wishes())
    assert words in caught.value.message
    assert caught.value.hint


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, choices: Choices) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.gguf: No such file"):
        given.read(choices, tmp_path / "none.gguf", Wishes())
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        given.read(choices, tmp_path, Wishes())


# ---------------------------------------------------------------- was it worth its bytes?


def marginal(held: int) -> float:
    """Predicted damage that a byte more would save in the best mix of so many bytes: the linear program's dual."""
    flat = [(k, ex.size(name, kind), loss) for k, name in enumerate(OPTIONS) for kind, loss in OPTIONS[name].items()]
    owner = np.array([[float(k == own) for k, _, _ in flat] for own in range(len(OPTIONS))])
    scale = 1e-9
    found = optimize.linprog(
        [loss / scale / 1e6 for _, _, loss in flat],
        A_ub=[[size / 1e6 for _, size, _ in flat]],
        b_ub=[held / 1e6],
        A_eq=owner,
        b_eq=np.ones(len(OPTIONS)),
        bounds=(0, 1),
        method="highs",
    )
    assert found.success
    return -float(found.ineqlin.marginals[0]) * scale


def chosen_bytes(types: Mapping[str, str]) -> int:
    return sum(ex.size(name, types[name]) for name in OPTIONS)


@pytest.mark.parametrize("types", [MIX, {**Q4, OUT_0: "Q6_K"}, {**Q4, DOWN_10: "Q8_0", DOWN_0: "Q4_0"}])
def test_a_deviation_is_weighed_at_the_price_of_bytes_in_the_best_mix(choices: Choices, types: dict[str, str]) -> None:
    raw = ex.loss(types)
    factor = ex.calibrated(raw) / raw
    price = marginal(chosen_bytes(types)) * factor
    found = {row.tensor: row for row in deviations(choices, types, "Q4_K_M")}
    assert set(found) == {name for name in NAMES if types[name] != Q4[name]}
    for name, row in found.items():
        assert (row.stock, row.type) == (Q4[name], types[name])
        assert row.bytes_added == ex.size(name, types[name]) - ex.size(name, Q4[name])
        assert row.price == pytest.approx(row.bytes_added * price, rel=1e-6)
        if name == UNPREDICTED:
            assert (row.kld_change, row.is_worth) == (None, None)
            continue
        change = (OPTIONS[name][types[name]] - OPTIONS[name][Q4[name]]) * factor
        assert row.kld_change == pytest.approx(change, rel=1e-9)
        assert row.is_worth is (change + row.bytes_added * price <= 0)


def test_a_raised_tensor_is_worth_it_where_it_saves_more_than_the_price(choices: Choices) -> None:
    (good,) = deviations(choices, {**Q4, OUT_0: "Q5_K"}, "Q4_K_M")  # saves the most per byte of all
    (bad,) = deviations(choices, {**Q4, OUT_1: "F16"}, "Q4_K_M")  # 16 bit where the damage was small
    assert good.bytes_added > 0
    assert bad.bytes_added > 0
    assert good.is_worth is True
    assert bad.is_worth is False


def test_a_lowered_tensor_is_worth_it_where_it_costs_less_than_the_price(choices: Choices) -> None:
    (good,) = deviations(choices, {**Q4, DOWN_0: "Q5_K"}, "Q4_K_M")  # the best mix of that size has it as well
    (bad,) = deviations(choices, {**Q6, EMBEDDING: "Q4_0"}, "Q6_K")
    for row in (good, bad):
        assert row.bytes_added < 0
        assert row.price < 0
        assert row.kld_change is not None
        assert row.kld_change > 0
    assert good.is_worth is True
    assert bad.is_worth is False


def test_a_better_type_of_the_same_size_is_worth_it_and_a_worse_one_is_not(choices: Choices) -> None:
    (better,) = deviations(choices, {**Q4, OUT_1: "IQ4_NL"}, "Q4_K_M")
    (worse,) = deviations(choices, {**Q4, OUT_1: "Q4_0"}, "Q4_K_M")
    assert (better.bytes_added, better.price, better.is_worth) == (0, 0, True)
    assert (worse.bytes_added, worse.price, worse.is_worth) == (0, 0, False)


def test_most_bytes_first(choices: Choices) -> None:
    rows = deviations(choices, MIX, "Q4_K_M")
    assert [row.tensor for row in rows] == [DOWN_10, EMBEDDING, DOWN_0, UNPREDICTED, OUT_1]
    assert [row.bytes_added < 0 for row in rows] == [False, True, True, False, False]


def test_types_without_predictions_are_weighed_as_they_are(choices: Choices) -> None:
    types = {**Q4, OUT_0: "Q3_K", DOWN_0: "Q5_K"}
    found = {row.tensor: row for row in deviations(choices, types, "Q4_K_M")}
    assert (found[OUT_0].kld_change, found[OUT_0].is_worth) == (None, None)
    assert found[DOWN_0].kld_change == pytest.approx(0.0015 - 0.0004)  # no sum to calibrate by
    against = {row.tensor: row for row in deviations(choices, Q4, "Q2_K")}  # the level's own are not known
    assert {name: row.is_worth for name, row in against.items()} == dict.fromkeys(
        (OUT_0, DOWN_0, OUT_1, UNPREDICTED, DOWN_10)
    )


def test_bytes_of_a_file_of_16_bit_are_worth_nothing(choices: Choices) -> None:
    half = {**Q4, **{name: "BF16" if name == DOWN_0 else "F16" for name in OPTIONS}}
    for row in deviations(choices, half, "Q4_K_M"):
        assert row.price == 0
        assert row.is_worth is True


# ---------------------------------------------------------------- which model it is


def test_fingerprint_does_not_depend_on_the_file(tmp_path: Path) -> None:
    one = fingerprint(model_file.read(write(tmp_path / "a.gguf", Q4)))
    backwards = fingerprint(model_file.read(write(tmp_path / "b.gguf", dict(reversed(Q4.items())), Q8_FTYPE)))
    assert one == backwards
    assert len(one) == 64


def test_fingerprint_does_not_depend_on_how_the_model_is_split(tmp_path: Path) -> None:
    names = list(Q4)
    whole = model_file.read(write(tmp_path / "a.gguf", Q4))
    parts = [write(tmp_path / f"{i}.gguf", {n: Q4[n] for n in names[i::2]}) for i in range(2)]
    read = [model_file.read(part) for part in parts]
    split = replace(
        read[0],
        shards=tuple(parts),
        tensors=tuple(replace(tensor, shard=i) for i, one in enumerate(read) for tensor in one.tensors),
    )
    assert fingerprint(split) == fingerprint(whole)


@pytest.mark.parametrize(
    ("types", "shapes"),
    [
        ({**Q4, OUT_0: "IQ4_NL"}, {}),  # the same bytes, all zero
        ({name if name != OUT_1 else "blk.2.attn_output.weight": kind for name, kind in Q4.items()}, {}),
        (Q4, {DOWN_10: (512, 1152)}),
        ({name: kind for name, kind in Q4.items() if name != NORM}, {}),
    ],
)
def test_fingerprint_tells_types_names_and_shapes_apart(
    tmp_path: Path, types: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> None:
    all_shapes = {**ex.SHAPES, "blk.2.attn_output.weight": ex.SHAPES[OUT_1], **shapes}
    one = model_file.read(write(tmp_path / "a.gguf", Q4))
    other = model_file.read(write(tmp_path / "b.gguf", types, shapes=all_shapes))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) != fingerprint(replace(one, architecture="qwen2"))


def test_fingerprint_tells_weights_apart_by_their_beginnings(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "a.gguf", n_layer=1)
    one = model_file.read(path)
    before = fingerprint(one)
    assert before != fingerprint(model_file.read(tiny.write_llama(tmp_path / "b.gguf", n_layer=1, seed=1)))
    data = path.read_bytes()
    up = next(tensor for tensor in one.tensors if tensor.name == "blk.0.ffn_up.weight")

    def with_another_byte(at: int) -> str:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return fingerprint(one)

    assert with_another_byte(up.offset) != before
    assert with_another_byte(up.offset + 4095) != before
    assert with_another_byte(up.offset + 4096) == before  # no more of a large tensor is read
    assert math.prod(up.shape) * 2 > 8192


def test_fingerprint_of_a_file_that_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", Q4)
    found = model_file.read(path)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*a\.gguf: No such file"):
        fingerprint(found)
