"""The allocator against every possible choice, against scipy's linear and integer programs, and where it gives up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from qres.recipes import allocate as allocator
from qres.recipes.allocate import Allocation, allocate

searched = settings(deadline=None, max_examples=100, derandomize=True)

Doubles = npt.NDArray[np.float64]
Item = list[tuple[float, float]]
"""Weight and value of each option."""


def split(items: Sequence[Item]) -> tuple[list[list[float]], list[list[float]]]:
    return [[w for w, _ in item] for item in items], [[v for _, v in item] for item in items]


def solve(items: Sequence[Item], limit: float) -> Allocation | None:
    return allocate(*split(items), limit)


def feasible(items: Sequence[Item], limit: Fraction) -> Iterator[tuple[Fraction, Fraction]]:
    """Value and weight of every choice within the limit, in exact arithmetic."""
    for chosen in product(*items):
        weight = sum((Fraction(w) for w, _ in chosen), Fraction())
        if weight <= limit:
            yield sum((Fraction(v) for _, v in chosen), Fraction()), weight


def require_sums(found: Allocation, items: Sequence[Item], limit: float) -> None:
    """What is said of the choice is true of it."""
    assert len(found.choice) == len(items)
    chosen = [item[k] for item, k in zip(items, found.choice, strict=True)]
    assert found.weight == pytest.approx(sum(w for w, _ in chosen), rel=1e-12, abs=1e-300)
    assert found.value == pytest.approx(sum(v for _, v in chosen), rel=1e-12, abs=1e-300)
    assert sum(w for w, _ in chosen) <= limit * (1 + 1e-11)
    assert found.price >= 0


def uneven(seed: int, n_items: int, n_options: int) -> list[Item]:
    """Bytes and damage like those of a model: sizes over two decades, damage that falls with size, unevenly."""
    random = np.random.default_rng(seed)
    items: list[Item] = []
    for _ in range(n_items):
        weights = int(10 ** random.uniform(4, 6))
        bits = np.sort(random.choice(np.arange(16, 128), n_options, replace=False)) / 8
        damage = 10 ** random.uniform(-6, -2) * 2.0 ** (-1.7 * bits + random.normal(0, 0.7, n_options))
        items.append([(int(weights * b / 8), float(d)) for b, d in zip(bits, damage, strict=True)])
    return items


def between(items: Sequence[Item], share: float) -> int:
    """A limit at this share of the way from the lightest choice to the heaviest one."""
    low, high = (sum(end(w for w, _ in item) for item in items) for end in (min, max))
    return int(low + share * (high - low))


# ---------------------------------------------------------------- against every choice

WHOLE = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), min_size=1, max_size=5
)
"""Small numbers: ties, zeros and dominated options in nearly every case."""
EIGHTHS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 400).map(lambda i: i / 8), st.integers(0, 4000).map(lambda i: i / 1024)),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=5,
)
"""Numbers whose sums are exact in floats."""


@searched
@given(WHOLE | EIGHTHS, st.floats(-0.1, 1.1))
def test_no_choice_within_the_limit_is_better(items: list[Item], share: float) -> None:
    limit = between(items, share)
    possible = list(feasible(items, Fraction(limit)))
    found = solve(items, limit)
    assert (found is None) == (not possible)
    if found is not None:
        require_sums(found, items, limit)
        assert found.weight <= limit
        assert found.value == min(value for value, _ in possible)
        assert found.gap == 0


@searched
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.floats(1e-9, 1)), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    st.floats(0, 1),
)
def test_least_bytes_for_a_limit_of_damage(items: list[Item], share: float) -> None:
    # The same turned around: what is limited are floats of all sizes, what is to be least are whole numbers.
    turned = [[(damage, float(size)) for size, damage in item] for item in items]
    low, high = (sum(end(damage for damage, _ in item) for item in turned) for end in (min, max))
    limit = low + share * (high - low)
    totals = [weight for _, weight in feasible(turned, Fraction(10**9))]
    assume(all(abs(weight - Fraction(limit)) > Fraction(limit) / 10**11 for weight in totals))  # rounding decides there
    found = solve(turned, limit)
    assert found is not None
    require_sums(found, turned, limit)
    assert found.value == min(value for value, _ in feasible(turned, Fraction(limit)))
    assert found.gap == 0


@searched
@given(WHOLE, st.floats(0, 1))
def test_options_that_another_one_beats_are_never_chosen(items: list[Item], share: float) -> None:
    found = solve(items, between(items, share))
    assert found is not None
    for item, k in zip(items, found.choice, strict=True):
        weight, value = item[k]
        assert not any((w <= weight and v < value) or (w < weight and v <= value) for w, v in item)


@searched
@given(WHOLE, st.floats(0, 1))
def test_the_same_every_time(items: list[Item], share: float) -> None:
    limit = between(items, share)
    assert solve(items, limit) == solve([list(item) for item in items], limit)


@searched
@given(WHOLE, st.floats(0, 1), st.randoms(use_true_random=False))
def test_order_of_options_and_items_does_not_change_the_value(items: list[Item], share: float, random: Random) -> None:
    limit = between(items, share)
    mixed = [list(item) for item in items]
    for item in mixed:
        random.shuffle(item)
    random.shuffle(mixed)
    before, after = solve(items, limit), solve(mixed, limit)
    assert before is not None
    assert after is not None
    assert before.value == after.value


def test_more_room_is_never_worse() -> None:
    items = uneven(3, 12, 6)
    values = []
    for share in np.linspace(0, 1, 60):
        found = solve(items, between(items, share))
        assert found is not None
        values.append(found.value)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 50


# ---------------------------------------------------------------- edges


def test_nothing_to_choose() -> None:
    assert allocate([], [], 5) == Allocation((), 0.0, 0.0, 0.0, 0.0)


def test_nothing_to_choose_and_less_than_nothing_allowed() -> None:
    assert allocate([], [], -5) is None


def test_single_options_fit_exactly_or_not_at_all() -> None:
    items: list[Item] = [[(3, 1.5)], [(4, 2.5)]]
    assert solve(items, 7) == Allocation((0, 0), 7.0, 4.0, 0.0, 0.0)
    assert solve(items, 6.999) is None


def test_limit_of_zero() -> None:
    items: list[Item] = [[(0, 3.0), (1, 0.0)], [(2, 0.0), (0, 1.0)]]
    found = solve(items, 0)
    assert found is not None
    assert found.choice == (0, 1)


def test_sums_that_only_rounding_lifts_over_the_limit_are_within_it() -> None:
    assert 0.1 + 0.2 > 0.3
    found = solve([[(0.1, 1.0), (0.0, 5.0)], [(0.2, 1.0), (0.0, 5.0)]], 0.3)
    assert found is not None
    assert found.choice == (0, 0)


def test_a_byte_over_the_limit_of_a_large_file_is_too_much() -> None:
    size = 100 * 2**30
    items: list[Item] = [[(size // 2, 1.0), (size, 0.0)], [(size // 2, 0.0)]]
    exact, less = solve(items, size + size // 2), solve(items, size + size // 2 - 1)
    assert exact is not None
    assert less is not None
    assert (exact.choice, less.choice) == ((1, 0), (0, 0))


def test_chosen_option_is_counted_in_the_order_that_was_given() -> None:
    found = solve([[(9, 0.0), (5, 4.0), (7, 2.0), (1, 6.0), (6, 9.0)]], 8)
    assert found is not None
    assert found.choice == (2,)  # sorted by weight it would be the third of four that are worth anything


def test_of_equal_options_the_first() -> None:
    found = solve([[(4, 3.0), (2, 1.0), (2, 1.0), (2, 1.0)]], 4)
    assert found is not None
    assert found.choice == (1,)


def test_of_solutions_with_equal_values_the_lightest() -> None:
    found = solve([[(0, 10), (5, 9), (20, 0)], [(0, 10), (3, 9), (20, 0)]], 5)
    assert found is not None
    assert (found.value, found.weight) == (19, 3)


def test_greedy_alone_would_be_wrong() -> None:
    # The best rate first takes 6 for 10, and nothing else fits; two of 5 for 8 each are better.
    items: list[Item] = [[(0, 10), (6, 0)], [(0, 8), (5, 0)], [(0, 8), (5, 0)]]
    found = solve(items, 10)
    assert found is not None
    assert found.choice == (0, 1, 1)


def test_options_off_the_convex_hull_are_chosen_where_they_fit() -> None:
    items: list[Item] = [[(0, 10), (4, 9), (10, 0)]]
    found = solve(items, 5)
    assert found is not None
    assert found.choice == (1,)


def test_numbers_are_plain_so_that_a_record_can_hold_them() -> None:
    found = solve(uneven(1, 8, 5), between(uneven(1, 8, 5), 0.4))
    assert found is not None
    assert {type(k) for k in found.choice} == {int}
    assert isinstance(found.value, float)
    assert (type(found.weight), type(found.price), type(found.gap)) == (float, float, float)


# ---------------------------------------------------------------- against scipy


def program(items: Sequence[Item]) -> tuple[sparse.csr_matrix, Doubles, Doubles]:
    """Over the share of each option: the matrix of one option for each item, values and weights."""
    owner = np.concatenate([np.full(len(item), i) for i, item in enumerate(items)])
    flat = np.array([one for item in items for one in item], np.float64)
    one_each = sparse.csr_matrix((np.ones(len(flat)), (owner, np.arange(len(flat)))), (len(items), len(flat)))
    return one_each, flat[:, 1], flat[:, 0]


def relaxed(items: Sequence[Item], limit: float) -> tuple[float, float]:
    """The bound by linear programming, and the price of a unit of weight."""
    one_each, values, weights = program(items)
    scale = float(values.max())
    found = optimize.linprog(
        values / scale,
        A_ub=weights[None, :] / limit,
        b_ub=[1.0],
        A_eq=one_each,
        b_eq=np.ones(len(items)),
        bounds=(0, 1),
        method="highs",
    )
    assert found.success
    return float(found.fun) * scale, -float(found.ineqlin.marginals[0]) * scale / limit


def test_realistic_size_is_solved_and_as_good_as_the_linear_bound_allows() -> None:
    items = uneven(7, 300, 10)
    limit = between(items, 0.3)
    found = solve(items, limit)
    assert found is not None
    require_sums(found, items, limit)
    bound, price = relaxed(items, limit)
    assert found.gap == 0
    assert bound * (1 - 1e-6) <= found.value <= bound * 1.001
    assert found.price == pytest.approx(price, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.05, 0.35, 0.8])
def test_price_is_the_dual_of_the_linear_program(seed: int, share: float) -> None:
    items = uneven(seed, 20, 6)
    limit = between(items, share)
    found = solve(items, limit)
    assert found is not None
    assert found.price == pytest.approx(relaxed(items, limit)[1], rel=1e-6)


def test_room_for_the_best_of_everything_has_no_price() -> None:
    items = uneven(1, 9, 5)
    found = solve(items, between(items, 1))
    assert found is not None
    assert found.price == 0
    assert found.value == pytest.approx(sum(min(v for _, v in item) for item in items))


@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_an_integer_program(seed: int) -> None:
    random = np.random.default_rng(seed)  # whole numbers: what HiGHS allows for rounding makes no difference
    items: list[Item] = []
    for _ in range(25):
        sizes, damages = np.sort(random.integers(0, 1000, (2, 7))).tolist()
        items.append(list(zip(sizes, damages[::-1], strict=True)))
    limit = between(items, 0.1 + 0.1 * seed)
    one_each, values, weights = program(items)
    best = optimize.milp(
        values,
        integrality=np.ones(len(values)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(weights[None, :], -np.inf, limit),
            optimize.LinearConstraint(one_each, 1, 1),
        ],
        options={"mip_rel_gap": 0},
    )
    assert best.success
    found = solve(items, limit)
    assert found is not None
    require_sums(found, items, limit)
    assert found.value == pytest.approx(best.fun, abs=1e-3)
    assert found.gap == 0


# ---------------------------------------------------------------- given up


@pytest.mark.parametrize("states", [1, 2, 5, 20])
def test_a_search_that_was_cut_is_valid_and_honest_about_it(monkeypatch: pytest.MonkeyPatch, states: int) -> None:
    cut = 0
    for seed in range(15):
        items = uneven(seed, 12, 6)
        limit = between(items, 0.4)
        exact = solve(items, limit)
        monkeypatch.setattr(allocator, "MAX_STATES", states)
        found = solve(items, limit)
        monkeypatch.undo()
        assert exact is not None
        assert found is not None
        require_sums(found, items, limit)
        bound, _ = relaxed(items, limit)
        assert exact.value <= found.value
        assert exact.value >= found.value * (1 - found.gap) * (1 - 1e-9)
        assert 0 <= found.gap < 1
        if found.gap:
            assert found.value * (1 - found.gap) == pytest.approx(bound, rel=1e-6)
        else:
            assert found.value == exact.value
        cut += found.gap > 0
    assert cut >= 5  # the cut does happen, else this test would show nothing


def test_what_is_kept_of_a_cut_search_is_the_promising_part(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for states in (1, 100, 200_000):
        monkeypatch.setattr(allocator, "MAX_STATES", states)
        found = [solve(uneven(seed, 40, 8), between(uneven(seed, 40, 8), 0.35)) for seed in range(12)]
        sums.append(sum(one.value for one in found if one is not None))
    none, some, all_of_it = sums
    assert all_of_it < some < none


def test_gap_of_a_search_that_was_cut_is_a_plain_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "MAX_STATES", 1)
    found = [solve(uneven(seed, 12, 6), between(uneven(seed, 12, 6), 0.4)) for seed in range(6)]
    gaps = [one.gap for one in found if one is not None and one.gap > 0]
    assert gaps
    assert {type(gap) for gap in gaps} == {float}
