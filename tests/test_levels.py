"""Level and type facts against gguf-py's tables, an independent copy of llama.cpp's."""

from __future__ import annotations

import re
import string

import pytest
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from hypothesis import assume, given
from hypothesis import strategies as st

from qres import levels
from qres.errors import UsageError
from tests.gguf.choice_of_types import LENGTHS, MAKEABLE, bits, fitting
from tests.search import searched

# gguf-py 0.19 has Q8_1 as 40 bytes; ggml-common.h and the library itself (ggml_type_size) say 36.
GGUF_PY_IS_WRONG = {"Q8_1"}


def test_type_layouts_are_those_of_gguf_py() -> None:
    theirs = {t.name: (int(t), *size) for t, size in GGML_QUANT_SIZES.items() if t.name not in GGUF_PY_IS_WRONG}
    ours = {t.name: (t.id, t.block_size, t.block_bytes) for t in levels.TYPE_TRAITS.values()}
    assert {name: ours[name] for name in theirs} == theirs


def test_types_gguf_py_does_not_know_are_removed_or_newer() -> None:
    unknown = set(levels.TYPE_TRAITS) - {t.name for t in GGML_QUANT_SIZES}
    assert {name for name in unknown if not levels.TYPE_TRAITS[name].removed} <= {"Q2_0"}
    assert sorted(levels.TYPES_BY_ID) == list(range(43))


def test_ftype_numbers_are_those_of_gguf_py() -> None:
    for ftype in LlamaFileType:
        if ftype.name != "GUESSED":
            assert levels.name_of_ftype(int(ftype)) == ftype.name.removeprefix("MOSTLY_").removeprefix("ALL_")


def test_ftype_flag_and_unknown_numbers() -> None:
    assert levels.name_of_ftype(1024 + 15) == "Q4_K_M"  # LLAMA_FTYPE_GUESSED
    assert levels.name_of_ftype(33) == "Q4_0_4_4"
    assert levels.name_of_ftype(999) == "ftype 999"


def test_levels_are_in_order_of_size_and_consistent() -> None:
    sizes = [level.nominal_bpw for level in levels.LEVELS]
    assert sizes == sorted(sizes)
    assert len({level.ftype for level in levels.LEVELS}) == len(levels.LEVELS)
    for level in levels.LEVELS:
        traits = levels.TYPE_TRAITS[level.base]
        assert not traits.removed
        # A recipe mixes types around its base; the widest of them (IQ2_S: an IQ2_XS base) stays within a bit.
        assert -0.01 <= level.nominal_bpw - 8 * traits.block_bytes / traits.block_size < 1


def test_levels_that_need_an_imatrix() -> None:
    # As dry runs of llama_model_quantize (llama-cpp-python 0.3.36) of a model with rows of 256 say, level by level.
    need = {level.name for level in levels.LEVELS if level.needs_imatrix}
    assert need == {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"}


@pytest.mark.parametrize(
    ("text", "name"),
    [("Q4_K_M", "Q4_K_M"), ("q4_k_m", "Q4_K_M"), (" q8_0 ", "Q8_0"), ("q4-k-m", "Q4_K_M"), ("Q4_K", "Q4_K_M")],
)
def test_parse_finds_the_level(text: str, name: str) -> None:
    assert levels.parse(text).name == name


@pytest.mark.parametrize("level", levels.LEVELS, ids=lambda level: level.name)
def test_parse_knows_every_level(level: levels.LevelSpec) -> None:
    assert levels.parse(level.name.lower()) is level
    assert levels.name_of_ftype(level.ftype) == level.name


def test_parse_names_close_matches_and_the_list() -> None:
    with pytest.raises(UsageError, match="Q4_K_M") as caught:
        levels.parse("Q4_KM")
    assert "did you mean" in caught.value.message
    assert "Q6_K" in caught.value.hint
    assert "IQ2_XXS" not in caught.value.hint  # cannot be made without an importance matrix


@pytest.mark.parametrize(
    ("text", "words"), [("Q4", "did you mean Q4_K_M or Q4_0 or Q4_K_S?"), ("IQ2", "did you mean IQ2_XXS or"), ("Q", "")]
)
def test_parse_of_a_beginning_names_the_usual_levels_first(text: str, words: str) -> None:
    with pytest.raises(UsageError, match="unknown level") as caught:
        levels.parse(text)
    assert words in caught.value.message
    assert ("did you mean" in caught.value.message) == bool(words)


@pytest.mark.parametrize("text", ["Q4_K_M Q8_0", "Q4_K_M;Q8_0", "Q4_K_M\tQ8_0"])
def test_parse_of_several_levels_says_how_to_separate_them(text: str) -> None:
    with pytest.raises(UsageError, match="unknown level") as caught:
        levels.parse(text)
    assert caught.value.hint == "separate levels with commas, such as Q4_K_M,Q8_0"


def test_bytes_are_those_of_whole_blocks() -> None:
    assert levels.TYPE_TRAITS["Q4_K"].bytes_of(512) == 2 * 144
    assert levels.TYPE_TRAITS["Q8_0"].bytes_of(96) == 3 * 34
    assert levels.TYPE_TRAITS["F32"].bytes_of(5) == 20


@pytest.mark.parametrize("text", ["", "nonsense", "Q4_K_M\nx\x1b[31m"])
def test_parse_of_nonsense_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="unknown level") as caught:
        levels.parse(text)
    assert str(caught.value).isprintable()


def test_fallbacks_fit_where_their_originals_do_not() -> None:
    for name, fallback in levels.FALLBACK.items():
        assert levels.TYPE_TRAITS[fallback].block_size == 32 < levels.TYPE_TRAITS[name].block_size


@pytest.mark.parametrize(
    ("name", "row", "fitting"),
    [
        ("Q4_K", 2048, "Q4_K"),
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 576, "Q5_1"),
        ("Q6_K", 576, "Q8_0"),
        ("Q3_K", 576, "Q4_0"),
        ("IQ3_S", 576, "IQ4_NL"),
        ("Q4_K", 100, "F16"),  # not even blocks of 32
        ("Q8_0", 100, "F16"),
        ("F16", 7, "F16"),
    ],
)
def test_fitting_type(name: str, row: int, fitting: str) -> None:
    assert levels.fitting_type(name, row) == fitting


@pytest.mark.parametrize("name", ["Q4_K_M", "q4_k", "Q4_0_4_4", "type 153", ""])
def test_fitting_type_refuses_what_is_no_type(name: str) -> None:
    with pytest.raises(UsageError):
        levels.fitting_type(name, 256)


def test_fitting_type_without_a_fallback() -> None:
    with pytest.raises(UsageError, match="do not hold whole Q1_0 blocks"):
        levels.fitting_type("Q1_0", 96)


def test_type_name_of_an_unknown_id() -> None:
    assert levels.type_name(12) == "Q4_K"
    assert levels.type_name(153) == "type 153"


# ---------------------------------------------------------------- the choice of types

REMOVED = [traits.name for traits in levels.TYPE_TRAITS.values() if traits.removed]


@searched
@given(LENGTHS)
def test_fitting_type_always_fits(row: int) -> None:
    for name in MAKEABLE:
        block = levels.TYPE_TRAITS[name].block_size
        found = fitting(name, row)
        if found is None:  # only the few types whose larger blocks llama.cpp has nothing in place of
            assert name in {"Q8_K", "NVFP4", "Q1_0"}
            assert row % block
            continue
        assert row % levels.TYPE_TRAITS[found].block_size == 0
        assert levels.fitting_type(found, row) == found
        if row % block == 0:
            assert found == name
            continue
        assert bits(found) > bits(name)  # what stands in never has fewer bits
        assert found == "F16" if row % 32 else found == levels.FALLBACK[name]  # F16 where no blocks fit any more


@searched
@given(st.one_of(st.text(max_size=12), st.sampled_from([*REMOVED, *map(str.lower, MAKEABLE), *levels.LEVELS_BY_NAME])))
def test_fitting_type_takes_known_types_only(name: str) -> None:
    assume(name not in MAKEABLE)
    with pytest.raises(UsageError, match="unknown tensor type"):
        levels.fitting_type(name, 256)


# ---------------------------------------------------------------- names of levels

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NAMES = sorted({*levels.LEVELS_BY_NAME, *ALIASES})


@searched
@given(st.sampled_from(NAMES), st.data())
def test_parse_takes_a_level_in_any_spelling(name: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from([c, c.lower(), "-" if c == "_" else c])) for c in name)
    blank = st.text(st.sampled_from(" \t\n"), max_size=3)
    assert levels.parse(data.draw(blank) + spelled + data.draw(blank)).name == ALIASES.get(name, name)


NEAR_MISSES = st.builds(
    lambda name, at, old, new: name[: at % len(name)] + new + name[at % len(name) + old :],
    st.sampled_from(NAMES),
    st.integers(0, 20),
    st.integers(0, 2),
    st.text(max_size=2),
)


@searched
@given(st.one_of(st.text(), st.text(string.ascii_letters + string.digits + "_-. "), NEAR_MISSES))
def test_parse_of_any_text_is_a_level_or_a_usage_error(text: str) -> None:
    wanted = text.strip().upper().replace("-", "_")
    if wanted in NAMES:
        assert levels.parse(text).name == ALIASES.get(wanted, wanted)
        return
    with pytest.raises(UsageError) as caught:
        levels.parse(text)
    assert caught.value.message.isprintable()  # whatever was typed goes to a terminal
    assert "Q4_K_M" in caught.value.hint
    suggested = re.search(r", did you mean (.+)\?$", caught.value.message)
    assert suggested is None or set(suggested[1].split(" or ")) <= set(levels.LEVELS_BY_NAME)


KNOWN_FTYPES = {level.ftype: level.name for level in levels.LEVELS}


@searched
@given(st.one_of(st.integers(), st.integers(0, 3000)), st.one_of(st.integers(), st.integers(0, 3000)))
def test_name_of_any_ftype(ftype: int, other: int) -> None:
    found = levels.name_of_ftype(ftype)
    assert levels.name_of_ftype(ftype | 1024) == levels.name_of_ftype(ftype & ~1024) == found  # a flag, no number
    assert (levels.name_of_ftype(other) == found) == (other | 1024 == ftype | 1024)  # no two share a name
    if found.startswith("ftype "):
        assert int(found.removeprefix("ftype ")) == ftype & ~1024
        assert (ftype & ~1024) not in KNOWN_FTYPES
    elif (ftype & ~1024) in KNOWN_FTYPES:
        assert found == KNOWN_FTYPES[ftype & ~1024]
        assert levels.parse(found).ftype == ftype & ~1024
