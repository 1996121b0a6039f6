"""Rules for other quantizers, taken apart again as llama-quantize and ik_llama.cpp do it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from gguf import GGMLQuantizationType
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qres import levels
from qres.errors import InputError
from qres.recipes import dialects
from qres.recipes.dialects import Rule
from tests.examples import recipe as example_recipe

searched = settings(deadline=None, max_examples=120, derandomize=True)

Types = Sequence[tuple[str, str]]
Spelled = list[tuple[str, str]]
"""Pattern and type, as they are spelled."""

# Letter by letter, as ggml's table of types has them (ggml.c): with a K, everything else is small.
SPELLING = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q4_0": "q4_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_K",
    "Q3_K": "q3_K",
    "Q4_K": "q4_K",
    "Q5_K": "q5_K",
    "Q6_K": "q6_K",
    "Q8_K": "q8_K",
    "IQ2_XXS": "iq2_xxs",
    "IQ3_S": "iq3_s",
    "IQ4_XS": "iq4_xs",
    "IQ4_NL": "iq4_nl",
    "IQ1_M": "iq1_m",
    "TQ1_0": "tq1_0",
    "MXFP4": "mxfp4",
}


def llama_quantize(text: str) -> Spelled:
    """Rules in a --tensor-type-file: words, cut at the first `=`; the pattern is made lower case."""
    found = []
    for word in text.split():
        pattern, separator, kind = word.partition("=")
        assert separator, f"{word!r} has no type"
        assert pattern, f"{word!r} has no pattern"
        found.append((pattern.lower(), kind))
    return found


def ik_llama(text: str) -> Spelled:
    """Rules in a --custom-q: cut at commas, then at the first `=`; letters stay as they are."""
    found = []
    for rule in text.split(","):
        pattern, separator, kind = rule.partition("=")
        assert separator, f"{rule!r} has no type"
        found.append((pattern, kind))
    return found


def quantized(rules: Spelled, names: Sequence[str]) -> dict[str, str]:
    """What each tensor gets: the type of the first pattern that is found anywhere in its name."""
    return {name: next((kind for pattern, kind in rules if re.search(pattern, name)), "none") for name in names}


def as_ggml(types: Types) -> dict[str, str]:
    return {name: SPELLING.get(kind, kind.lower()) for name, kind in types}


# ---------------------------------------------------------------- one rule for one tensor

MODEL = [
    ("token_embd.weight", "Q8_0"),
    ("output.weight", "Q6_K"),
    ("blk.1.attn_output.weight", "Q4_K"),
    ("blk.10.attn_output.weight", "IQ4_XS"),
    ("blk.11.attn_output.weight", "Q5_K"),
    ("blk.1.attn_q.weight", "BF16"),
    ("blk.1.attn_q.weight_scale", "Q3_K"),
    ("mm.blk.1.attn_q.weight", "Q2_K"),
]


def test_rules_are_anchored_and_escaped() -> None:
    assert dialects.tensor_type_file(MODEL[:3]) == (
        "^token_embd\\.weight$=q8_0\n^output\\.weight$=q6_K\n^blk\\.1\\.attn_output\\.weight$=q4_K\n"
    )
    assert dialects.custom_q(MODEL[:2]) == "^token_embd\\.weight$=q8_0,^output\\.weight$=q6_K"


def test_every_tensor_gets_its_own_type_in_both_dialects() -> None:
    names = [name for name, _ in MODEL]
    assert quantized(llama_quantize(dialects.tensor_type_file(MODEL)), names) == as_ggml(MODEL)
    assert quantized(ik_llama(dialects.custom_q(MODEL)), names) == as_ggml(MODEL)


def test_a_rule_matches_no_tensor_that_has_none() -> None:
    others = ["blk.10.attn_q.weight", "attn_output.weight", "xoutput.weight", "output.weights", "outputxweight"]
    rules = dialects.rules([("blk.1.attn_q.weight", "Q4_K"), ("output.weight", "Q6_K")])
    assert dialects.apply(rules, others) == {}
    assert len(rules) == 2


def test_letters_that_are_made_small_still_match_their_tensor() -> None:
    types = [("blk.0.attn_Q.weight", "Q4_K"), ("blk.0.attn_q_norm.weight", "Q8_0"), ("MTP.Head", "Q6_K")]
    names = [name for name, _ in types]
    assert all(rule.pattern == rule.pattern.lower() for rule in dialects.rules(types))
    assert quantized(llama_quantize(dialects.tensor_type_file(types)), names) == as_ggml(types)
    assert quantized(ik_llama(dialects.custom_q(types)), names) == as_ggml(types)


NASTY = ["a=b", "a b", "a\tb", "a,b", "a+b", "a*b", "(a|b)", "[ab]", "a{2}", "^a$", "a\\b", "a?b", "a/b", "é", "#a"]


@pytest.mark.parametrize("name", NASTY)
def test_names_with_characters_that_mean_something(name: str) -> None:
    types = [(name, "Q5_K"), ("ab", "Q8_0"), ("aaab", "Q4_0"), ("a", "Q6_K"), ("b", "Q2_K")]
    names = [one for one, _ in types]
    text = dialects.tensor_type_file(types)
    assert len(text.split()) == len(types)
    assert quantized(llama_quantize(text), names) == as_ggml(types)
    assert quantized(ik_llama(dialects.custom_q(types)), names) == as_ggml(types)


def takes(one: str, other: str) -> bool:
    """The rule of one name, whose letters in upper case, white space, `=` and commas are any, matches the other."""
    free = re.compile(r"[A-Z\s=,]")
    return len(one) == len(other) and all(
        mine == theirs or free.fullmatch(mine) for mine, theirs in zip(one, other, strict=True)
    )


NAMES = st.text("abzAZ09._-=, +*?()[]{}|^$\\/#é", min_size=1, max_size=7)
KINDS = st.sampled_from(sorted(levels.MAKEABLE))


@searched
@given(st.dictionaries(NAMES, KINDS, min_size=1, max_size=6))
def test_any_names_get_their_own_types_or_are_refused(chosen: dict[str, str]) -> None:
    types = list(chosen.items())
    pairs = [(one, other) for one in chosen for other in chosen if one != other and takes(one, other)]
    assume(all(takes(other, one) for one, other in pairs))  # the rest is the next test's
    try:
        text = dialects.tensor_type_file(types)
    except InputError:
        assert any(chosen[one] != chosen[other] for one, other in pairs)
        return
    assert quantized(llama_quantize(text), list(chosen)) == as_ggml(types)
    assert quantized(ik_llama(dialects.custom_q(types)), list(chosen)) == as_ggml(types)


def test_a_rule_that_takes_another_tensor_along_is_refused_or_comes_later() -> None:
    types = [("blk.0.attn_Q", "Q4_K"), ("blk.0.attn_v", "Q8_0")]
    try:
        text = dialects.tensor_type_file(types)
    except InputError:
        return
    assert quantized(llama_quantize(text), ["blk.0.attn_Q", "blk.0.attn_v"]) == as_ggml(types)


@pytest.mark.parametrize(("one", "other"), [("attn_Q", "attn_K"), ("a b", "a,b"), ("a=b", "aXb")])
def test_names_that_no_rule_can_tell_apart_are_refused(one: str, other: str) -> None:
    for write in (dialects.rules, dialects.tensor_type_file, dialects.custom_q):
        with pytest.raises(InputError, match=r"would match .+, too") as caught:
            write([(one, "Q4_K"), ("blk.0.ffn_up.weight", "Q4_K"), (other, "Q8_0")])
        assert other in caught.value.message
        assert "qres build" in caught.value.hint


def test_names_that_no_rule_can_tell_apart_may_have_the_same_type() -> None:
    types = [("attn_Q", "Q4_K"), ("attn_K", "Q4_K")]
    assert quantized(llama_quantize(dialects.tensor_type_file(types)), ["attn_Q", "attn_K"]) == as_ggml(types)


# ---------------------------------------------------------------- spelling


@pytest.mark.parametrize(("name", "word"), SPELLING.items())
def test_types_are_spelled_as_ggml_does(name: str, word: str) -> None:
    assert dialects.type_word(name) == word


def test_no_type_is_left_out_of_the_spelling() -> None:
    assert {dialects.type_word(kind.name) for kind in GGMLQuantizationType if kind.name.endswith("_K")} == {
        *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_K")
    }


def test_head_and_embedding_have_options_of_their_own() -> None:
    assert dialects.flags(MODEL) == ["--output-tensor-type", "q6_K", "--token-embedding-type", "q8_0"]
    assert dialects.flags([("token_embd.weight", "Q5_K")]) == ["--token-embedding-type", "q5_K"]
    assert dialects.flags([("output.weight", "F16")]) == ["--output-tensor-type", "f16"]
    assert dialects.flags([("blk.0.attn_output.weight", "F16"), ("output_norm.weight", "F32")]) == []


# ---------------------------------------------------------------- reading


@searched
@given(st.dictionaries(NAMES, KINDS, min_size=1, max_size=6))
def test_what_was_written_is_read_again(chosen: dict[str, str]) -> None:
    assume(not any(one != other and takes(one, other) for one in chosen for other in chosen))
    types = list(chosen.items())
    for text in (dialects.tensor_type_file(types), dialects.custom_q(types), f"{dialects.custom_q(types)}\n"):
        assert dialects.apply(dialects.parse(text), chosen) == chosen


def test_the_rules_of_a_level_are_read_again() -> None:
    for types in example_recipe.LADDER.values():
        pairs = list(types.items())
        assert dialects.parse(dialects.tensor_type_file(pairs)) == dialects.rules(pairs)
        assert dialects.parse(dialects.custom_q(pairs)) == dialects.rules(pairs)


def test_first_rule_that_is_found_anywhere_counts() -> None:
    rules = dialects.parse("ffn_down=q6_K,blk\\.[0-4]\\.=q5_K\nblk=iq4_xs")
    assert rules == [Rule("ffn_down", "Q6_K"), Rule("blk\\.[0-4]\\.", "Q5_K"), Rule("blk", "IQ4_XS")]
    names = ["blk.3.ffn_down.weight", "blk.3.ffn_up.weight", "blk.40.ffn_up.weight", "output.weight"]
    assert dialects.apply(rules, names) == dict(zip(names, ["Q6_K", "Q5_K", "IQ4_XS"], strict=False))


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("# all of it\nffn=q4_K\n  # and\t\nattn=Q8_0", [Rule("ffn", "Q4_K"), Rule("attn", "Q8_0")]),
        ("ffn=q4_k", [Rule("ffn", "Q4_K")]),
        ("\r\n ffn=q4_K \r\n\r\nattn=bf16\r\n", [Rule("ffn", "Q4_K"), Rule("attn", "BF16")]),
        ("ffn=q4_K,attn=q8_0,", [Rule("ffn", "Q4_K"), Rule("attn", "Q8_0")]),
        ("ffn=q4_K, attn=q8_0", [Rule("ffn", "Q4_K"), Rule("attn", "Q8_0")]),
        (",ffn=q4_K,,attn=q8_0", [Rule("ffn", "Q4_K"), Rule("attn", "Q8_0")]),
        ("ffn=q4_K attn=q8_0", [Rule("ffn", "Q4_K"), Rule("attn", "Q8_0")]),
        ("blk\\.\\d{1,2}\\.ffn=q4_K", [Rule("blk\\.\\d{1,2}\\.ffn", "Q4_K")]),
        ("ffn=q4_K\n#attn=q8_0", [Rule("ffn", "Q4_K")]),
    ],
)
def test_rules_as_people_write_them(text: str, rules: list[Rule]) -> None:
    assert dialects.parse(text) == rules


@pytest.mark.parametrize("text", ["", "\n\n", "# ffn=q4_K\n", ",,"])
def test_no_rules_at_all_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="there are no rules in it"):
        dialects.parse(text)


@pytest.mark.parametrize("word", ["q4_k_m", "q4", "q9_K", "iq4_ks", "q4_2", "q4_0_4_4", "copy", "none"])
def test_types_that_there_are_not_are_refused_by_their_word(word: str) -> None:
    with pytest.raises(InputError, match=f"'attn={word}': {word} is no type that this qres knows"):
        dialects.parse(f"ffn=q4_K\nattn={word}\n")


@pytest.mark.parametrize("pattern", ["blk.(", "[a-", "*ffn", "a{2}{3}", "(?P<x"])
def test_patterns_that_are_no_regular_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="is no regular expression") as caught:
        dialects.parse(f"{pattern}=q4_K")
    assert pattern in caught.value.message


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("hello", "hello"),
        ("ffn=q4_K\nattn", "attn"),
        ("ffn attn=q4_K", "ffn attn=q4_K"),
        ("ffn = q4_K", "ffn = q4_K"),
        ("ffn=q4_K;attn=q8_0", "ffn=q4_K;attn=q8_0"),
        ("ffn==q4_K", "ffn==q4_K"),
        ("=q4_K", "=q4_K"),
        ("ffn=", "ffn="),
        ("ffn=q4-K", "ffn=q4-K"),
        ("ffn=q4_K\n" + 100 * "x", 40 * "x"),
    ],
)
def test_what_is_no_rule_is_shown(text: str, rest: str) -> None:
    with pytest.raises(InputError) as caught:
        dialects.parse(text)
    assert caught.value.message == f"{rest!r} is not PATTERN=TYPE"


@pytest.mark.parametrize("text", [",=q4_K", "ffn=q4_K,=q8_0"])
def test_a_rule_without_a_pattern_would_be_for_every_tensor_and_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        dialects.parse(text)


def test_control_characters_do_not_get_into_the_message() -> None:
    with pytest.raises(InputError) as caught:
        dialects.parse("ffn=q4_K\n\x1b[31mred")
    assert "\x1b" not in caught.value.message
