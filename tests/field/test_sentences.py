"""Every sentence of the answer with the condition that makes it true, in one table (C23).

Results are made from a real one by changing what sentences depend on; each answer has to be made of rows of the table,
whole, and each row's condition has to hold of the result.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from qres.advice import devices, verdict
from qres.cli.recipe_view import _against_stock
from qres.cli.scan import _may_end_otherwise
from qres.cli.terminal import show_answer
from qres.errors import CrashError, InputError, NativeError, OutOfMemoryError, UnsupportedError
from qres.pipeline.tokens import hidden_tokens
from qres.pipeline.warnings import unreached, warnings
from qres.printable import counted
from qres.records.experts import ExpertUse
from qres.records.result import Level, Result
from qres.records.units import Keep
from qres.text.chunks import Plan, texts
from qres.text.source import Source
from tests.examples.levels import changed_level
from tests.examples.result import example

EXAMPLE = example()
Holds = Callable[[Result, "re.Match[str]"], bool]


@dataclass(frozen=True)
class Sentence:
    """One sentence as a pattern, and when it is true."""

    pattern: str
    holds: Holds


def level(result: Result, name: str) -> Level:
    return next(one for one in result.levels if one.name == name)


def candidates(result: Result) -> list[Level]:
    """What can be advised at all."""
    found = [one for one in result.levels if one.output.kld_mean is not None and not one.differs and not one.is_copy]
    return sorted((one for one in found if verdict.is_smaller(one, result.reference)), key=lambda one: one.file.bytes)


def smallest_good(result: Result, found: re.Match[str]) -> bool:
    good = [one for one in candidates(result) if verdict.is_good(one)]
    return bool(good) and good[0].name == found["level"] == result.verdict.level


def least_damaged(result: Result, found: re.Match[str]) -> bool:
    rows = candidates(result)
    least = min(rows, key=lambda one: one.output.kld_mean or 0)
    return not any(map(verdict.is_good, rows)) and least.name == found["level"] == result.verdict.level


def worth(result: Result, found: re.Match[str]) -> list[Keep]:
    return [keep for keep in level(result, found["level"]).sensitivity.keep_16bit if keep.worth_it]


def failed(result: Result, found: re.Match[str]) -> bool:
    check = level(result, found["level"]).sensitivity.keep_check
    return check is not None and check.recovered_se is not None and check.recovered_share < 2 * check.recovered_se


def is_larger_and_better(result: Result, found: re.Match[str]) -> bool:
    one, other = level(result, found["level"]), level(result, found["other"])
    better = (other.output.kld_mean or 0) < (one.output.kld_mean or 0)
    return other.file.bytes > one.file.bytes and better and not worth(result, found)


L = r"(?P<level>[\w.]+(?: \(file \d\))?)"
SENTENCES = (
    Sentence(rf"Ship {L} \(.+?\): .+?\d\.", smallest_good),
    Sentence(rf"{L} is the least damaged of what was measured \(.+?\), but not good: .+?\d\.", least_damaged),
    Sentence(r"No advice: the reference itself has a perplexity .+?\.", lambda r, _: bool(absurd(r))),
    Sentence(r"No advice:(?= \w+ does not compute)", lambda r, _: all(one.differs for one in r.levels)),
    Sentence(
        rf"(?:Left out: )?{L} does not compute the same function as the reference: .+?\.",
        lambda r, m: bool(level(r, m["level"]).differs) and r.verdict.level != m["level"],
    ),
    Sentence(r"No level could be measured\.", lambda r, _: all(one.output.kld_mean is None for one in r.levels)),
    Sentence(r"Nothing to choose\.", lambda r, _: all(one.is_copy for one in r.levels)),
    Sentence(
        r"(?P<levels>[\w. ]+?) holds? the same tensors as the reference\.",
        lambda r, m: all(level(r, name).is_copy for name in m["levels"].split(" and ")),
    ),
    Sentence(r"Nothing to ship: .+? smaller than the reference \(.+?\); .+?\d\.", lambda r, _: not candidates(r)),
    # what to keep
    Sentence(r"What to keep at 16 bit is unknown: the damage does not come .+\.", lambda r, _: not r.verdict.level),
    Sentence(r"What to keep at 16 bit would be a guess: .+\.", lambda r, _: bool(absurd(r))),
    Sentence(r"What to keep is unknown\.", lambda r, _: not r.verdict.level),
    Sentence(r"What to keep is no question: nothing in it differs\.", lambda r, _: any(o.is_copy for o in r.levels)),
    Sentence(
        rf"What to keep at 16 bit in {L} is unknown: its units could not be measured\.",
        lambda r, m: not level(r, m["level"]).sensitivity.units,
    ),
    Sentence(
        rf"Nothing in {L} needs to stay at 16 bit: no unit's damage stands out of the noise\.",
        lambda r, m: not level(r, m["level"]).sensitivity.keep_16bit,
    ),
    Sentence(
        rf"Nothing in {L} is sure to be worth keeping at 16 bit: measure a larger level beside it\.",
        lambda r, m: not worth(r, m),
    ),
    Sentence(
        rf"Nothing in {L} is worth keeping at 16 bit: (?P<other>\w+) recovers more per byte\.", is_larger_and_better
    ),
    Sentence(rf"Nothing in {L} is proven worth keeping at 16 bit: the ranking names .+\.", failed),
    Sentence(
        rf"Keep at 16 bit in {L}: .+ \(\+.+ MiB.*\)\.",
        lambda r, m: any(keep.bytes_added for keep in worth(r, m)) and not failed(r, m),
    ),
    # why
    Sentence(
        r"It is the smallest measured level within 90% .+? included[;.]",
        lambda r, _: verdict.is_good(level(r, r.verdict.level or "")),
    ),
    Sentence(rf"{L} is not \(.+?\)[;.]", lambda r, m: not verdict.is_good(level(r, m["level"]))),
    Sentence(
        r"No measured level keeps 90% .+?: measure larger ones[;.]",
        lambda r, _: not any(verdict.is_good(one) for one in candidates(r)),
    ),
    Sentence(
        r"One chunk is too little to call any level good: give a longer text[;.]",
        lambda r, _: level(r, r.verdict.level or "").output.ln_ppl_ratio_se is None,
    ),
    Sentence(
        rf"(?:its KLD|The KLD of {L}) is (?P<times>[\d,]+) times the noise floor\.",
        lambda r, _: bool(r.noise_floor.kld_mean),
    ),
    Sentence(r"The figures stand as measured\. .+\.", lambda r, _: not r.verdict.level),
    Sentence(r"The notes say why\.", lambda r, _: not r.verdict.level),
    Sentence(r"Give quantized files of this reference, .+\.", lambda r, _: not candidates(r)),
)


def absurd(result: Result) -> str:
    return verdict.absurd_reference(result.reference, result.levels)


def answered(levels: Sequence[Level], floor: float | None = 1e-6, ppl: float | None = None) -> Result:
    """The example with these levels, and the answer that belongs to them."""
    if ppl is not None:
        levels = [changed_level(one, output=replace(one.output, ppl_reference=ppl)) for one in levels]
    noise = replace(EXAMPLE.noise_floor, kld_mean=floor)
    result = replace(EXAMPLE, levels=tuple(levels), noise_floor=noise)
    said = verdict.verdict(result.reference, levels, noise, absurd(result))
    return replace(result, verdict=said)


def results() -> Iterator[Result]:
    """Levels good, not good, on one chunk, not measured, of another function, copies, too large; lists of all sorts."""
    small, large = EXAMPLE.levels[0], EXAMPLE.levels[-1]
    for quality, other in itertools.product((0.5, 0.95, None), (0.5, 0.99)):
        pair = [rated(small, quality), rated(large, other)]
        yield answered(pair)
        yield answered(pair[:1])
        yield answered(pair, floor=None)
        yield answered([rated(small, quality, chunks=1)])
        yield answered([replace(pair[0], differs=("a.b is 1 in the reference, 2 in the file",)), pair[1]])
        yield answered([replace(one, differs=("in the graph, ROPE has other parameters",)) for one in pair])
        yield answered([replace(pair[0], is_copy=True), pair[1]])
        yield answered([replace(one, is_copy=True) for one in pair])
        yield answered(pair, ppl=1e5)
        yield answered([changed_level(one, bytes=2 * EXAMPLE.reference.bytes, bpw=32.0) for one in pair])
        for is_worth, share, se in itertools.product((True, False), (0.4, -0.07), (0.05, None)):
            yield answered([listed(pair[0], is_worth, share, se), pair[1]])
            yield answered([listed(pair[0], is_worth, share, se)])
        yield answered([changed_level(pair[0], keep_16bit=(), keep_check=None), pair[1]])
        yield answered([changed_level(pair[0], units=(), keep_16bit=(), keep_check=None, points=())])


def rated(one: Level, same_top: float | None, chunks: int = 8) -> Level:
    """The level where it puts so many tokens first; None for one that has no figures."""
    out = one.output
    if same_top is None:
        return changed_level(one, output=replace(out, kld_mean=None, same_top=None, ln_ppl_ratio=None))
    error = None if chunks == 1 else 0.001
    kld = 1 - same_top
    return changed_level(
        one,
        output=replace(
            out, same_top=same_top, ln_ppl_ratio=0.01, ln_ppl_ratio_se=error, kld_mean=kld, ppl_reference=9.0
        ),
    )


def listed(one: Level, is_worth: bool, share: float, se: float | None) -> Level:
    """The level with a keep list that is worth its bytes or not, checked with this outcome."""
    found = one.sensitivity
    rows = tuple(replace(row, worth_it=is_worth, bytes_added=row.bytes_added or 1024) for row in found.keep_16bit)
    assert rows
    assert found.keep_check is not None
    return changed_level(
        one, keep_16bit=rows, keep_check=replace(found.keep_check, recovered_share=share, recovered_se=se)
    )


def pieces(text: str) -> list[tuple[Sentence, re.Match[str]]]:
    """The rows that a text is made of, one behind the other; fails where nothing fits."""
    found, at = [], 0
    while at < len(text):
        fitting = [
            (row, match) for row in SENTENCES if (match := re.compile(f"{row.pattern}(?=\\s|$)").match(text, at))
        ]
        assert fitting, text[at:]
        row, match = fitting[0]
        found.append((row, match))
        at = match.end()
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


RESULTS = tuple(results())


def test_every_sentence_of_the_answer_is_true() -> None:
    used = set()
    for result in RESULTS:
        for text in (result.verdict.headline, result.verdict.keep, result.verdict.details):
            for row, match in pieces(text):
                assert row.holds(result, match), (match[0], result.verdict)
                used.add(row.pattern)
    assert {row.pattern for row in SENTENCES} == used  # no row that no result has


def test_no_mix_is_advertised_below_no_advice() -> None:
    for result in RESULTS:
        out = io.StringIO()
        with redirect_stdout(out):
            show_answer(result, (Path("a.html"), Path("a.md")))
        assert ("A mix of the size" in out.getvalue()) <= bool(result.verdict.level)


def test_devices_are_advised_what_can_be_advised() -> None:
    for result in RESULTS:
        for row in devices.device_advice(result.levels, result.deployment):
            assert row.level is None or not level(result, row.level).differs


# ---------------------------------------------------------------- sentences outside the answer


@pytest.mark.parametrize(("n", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (4096, "4,096 tokens")])
def test_one_of_a_thing_is_singular(n: int, text: str) -> None:
    assert counted(n, "token") == text


def test_a_range_of_one_chunk_is_no_range() -> None:
    plan = Plan(Source("a.txt", ids=tuple(range(96))), None, 32, 2, 1)
    found = texts(plan, list, 1000, None)
    assert (found.report_name, found.rank_name) == ("a.txt, chunks 1 to 2", "a.txt, chunk 3")
    found = texts(replace(plan, text=Source("a.txt", ids=tuple(range(64)))), list, 1000, None)
    assert (found.report_name, found.rank_name) == ("a.txt, chunk 1", "a.txt, chunk 2")


@pytest.mark.parametrize(
    ("error", "otherwise"),
    [
        (KeyboardInterrupt(), True),
        (OutOfMemoryError("out of memory"), True),
        (CrashError("killed", killed=True), True),
        (CrashError("SIGABRT"), False),
        (NativeError("llama_decode returned -1"), False),
        (InputError("the reference's own output is not finite"), False),
        (UnsupportedError("no next token"), False),
    ],
)
def test_resume_is_named_where_another_run_may_end_otherwise(error: BaseException, otherwise: bool) -> None:
    assert _may_end_otherwise(error) is otherwise


def test_what_is_predicted_is_not_said_to_be_unknown() -> None:
    recipe = next(one for one in EXAMPLE.recipes if one.predicted and one.stock)
    assert "Nothing is predicted" not in _against_stock(recipe)
    without = _against_stock(replace(recipe, predicted=None))
    assert without == "Nothing is predicted of its damage: build and verify it."
    stock = (replace(recipe.stock[0], predicted=None), *recipe.stock[1:])
    said = _against_stock(replace(recipe, stock=stock))
    assert said.startswith(f"Nothing is predicted of {stock[0].level}")


@pytest.mark.parametrize(
    ("count", "names", "said"),
    [
        (0, (), None),
        (1, ("<s>",), "1 special token of this model stands in the text as plain characters (<s>): --special parses"),
        (
            48,
            ("<a>", "<b>", "<c>", "<d>"),
            "48 special tokens of this model stand in the text as plain characters (<a>, <b>, <c> and others)",
        ),
    ],
)
def test_special_tokens_are_counted(count: int, names: tuple[str, ...], said: str | None) -> None:
    found = hidden_tokens(count, names)
    assert found == () if said is None else found[0].startswith(said)


def test_experts_are_named_where_some_were_not_reached() -> None:
    assert unreached([ExpertUse(0, 8, 0, 1, 9, 0)], 100) == ()
    assert unreached([], 100) == ()
    (one,) = unreached([ExpertUse(0, 8, 1, 1, 9, 10), ExpertUse(1, 8, 0, 1, 9, 0)], 100)
    assert one.startswith("In 1 of 2 MoE layers no token of the text reached 1 expert (10.0% of the reference's bytes)")
    assert "does to it is in no figure" in one


def test_warnings_of_a_sound_result_are_those_that_hold() -> None:
    found = warnings(EXAMPLE.settings, EXAMPLE.levels, [], [], EXAMPLE.noise_floor.kld_mean)
    for text in found:
        assert "really is" in text or "One chunk" in text or "fills one chunk" in text, text
