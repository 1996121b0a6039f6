"""Budgets as users write them: every form, and everything that is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import UsageError
from qres.levels import LEVELS, LevelSpec
from qres.recipes.budget import Budget, parse


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("same-as:Q4_K_M", Budget("same-as:Q4_K_M", level="Q4_K_M")),
        ("same-as:q4_k", Budget("same-as:q4_k", level="Q4_K_M")),
        ("SAME-AS:iq4-xs", Budget("SAME-AS:iq4-xs", level="IQ4_XS")),
        (" same-as : Q8_0 ", Budget("same-as : Q8_0", level="Q8_0")),
        ("4.9bpw", Budget("4.9bpw", bpw=4.9)),
        ("5 BPW", Budget("5 BPW", bpw=5.0)),
        ("5.bpw", Budget("5.bpw", bpw=5.0)),
        (".5bpw", Budget(".5bpw", bpw=0.5)),
        ("+0.10bpw", Budget("+0.10bpw", more_bpw=0.1)),
        ("+ 1 Bpw", Budget("+ 1 Bpw", more_bpw=1.0)),
        ("1.2GiB", Budget("1.2GiB", file_bytes=1_288_490_188)),  # 1.2 * 2**30 = 1288490188.8
        ("1.5 gb", Budget("1.5 gb", file_bytes=1_500_000_000)),
        ("700MB", Budget("700MB", file_bytes=700_000_000)),
        ("700 MiB", Budget("700 MiB", file_bytes=734_003_200)),
        ("3kB", Budget("3kB", file_bytes=3000)),
        ("3KiB", Budget("3KiB", file_bytes=3072)),
        ("123456B", Budget("123456B", file_bytes=123_456)),
        ("kld:0.01", Budget("kld:0.01", kld=0.01)),
        ("KLD: .5", Budget("KLD: .5", kld=0.5)),
        ("kld:1e-3", Budget("kld:1e-3", kld=0.001)),
        ("kld:2.5E-4", Budget("kld:2.5E-4", kld=0.00025)),
        ("kld:1e+2", Budget("kld:1e+2", kld=100.0)),
        ("\tkld:0.01\n", Budget("kld:0.01", kld=0.01)),
    ],
)
def test_every_form(text: str, budget: Budget) -> None:
    assert parse(text) == budget


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_level_can_be_named(level: LevelSpec) -> None:
    assert parse(f"same-as:{level.name}").level == level.name


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Q4_K_M",
        "4.9",
        "bpw",
        "+bpw",
        "-1bpw",
        "+-1bpw",
        "++1bpw",
        "4,9bpw",
        "4.9.1bpw",
        "4.9bpw!",
        "x4.9bpw",
        "1e3bpw",
        "nanbpw",
        "infbpw",
        "GiB",
        ".GiB",
        "-1GiB",
        "+1GiB",
        "1.2Gi",
        "1.2G",
        "1.2TiB",
        "1GiBB",
        "1e3MiB",
        "kld",
        "kld:",
        "kld:-0.1",
        "kld:+0.1",
        "kld:nan",
        "kld:inf",
        "kld:1e",
        "kld:e-3",
        "kld=0.01",
        "kld:0.01bpw",
        "same-as",
        "as:Q4_K_M",
        "4.9bpw 5bpw",
    ],
)
def test_what_is_no_budget_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.message == f"{text!r} is not a budget"
    for form in ("same-as:Q4_K_M", "4.9bpw", "+0.10bpw", "1.2GiB", "kld:0.01"):
        assert form in caught.value.hint


NO_LIMIT = [
    *("0bpw", "0.0bpw", "+0bpw", "0GiB", "0B", "kld:0", "kld:0e5", "kld:1e-999", "kld:1e999", f"1{400 * '0'}bpw"),
    *("1000000000000000bpw", "1000000000000000B", "kld:1e15"),
]


@pytest.mark.parametrize("text", NO_LIMIT)
def test_zero_and_numbers_beyond_all_sizes_are_no_limit(text: str) -> None:
    with pytest.raises(UsageError, match="is no limit"):
        parse(text)


def test_just_below_the_largest_number() -> None:
    assert parse("999999999999999B").file_bytes == 999_999_999_999_999


@pytest.mark.parametrize("text", ["same-as:", "same-as:Q4", "same-as:Q9_K", "same-as:Q4_K_M,Q8_0", "same-as:4.9bpw"])
def test_unknown_levels_are_refused_as_levels(text: str) -> None:
    with pytest.raises(UsageError, match="unknown level"):
        parse(text)


def test_unknown_level_is_told_what_is_close() -> None:
    with pytest.raises(UsageError, match="did you mean Q4_K_M"):
        parse("same-as:Q4")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=12) | st.from_regex(r"(kld:|\+|same-as:)?[0-9.e+-]{0,6}(bpw|[kmg]?i?b)?", fullmatch=True))
def test_any_text_is_one_limit_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except UsageError:
        return
    given_limits = [found.level, found.bpw, found.more_bpw, found.file_bytes, found.kld]
    assert sum(limit is not None for limit in given_limits) == 1
    assert found.text == text.strip()
