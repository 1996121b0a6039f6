"""One option for each item, so that a sum is least while another stays within a limit: exact, and the same every time.

The multiple-choice knapsack problem. Its Lagrangian relaxation is solved by walking down the items' convex hulls, best
rate first (Sinha and Zoltners, Operations Research 27, 1979; Kellerer, Pferschy, Pisinger, Knapsack Problems, 2004,
chapter 11); that leaves a gap of at most one step. The gap then rules out every option whose reduced cost exceeds it,
and what is left is searched by dynamic programming over undominated sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qres.arrays import Doubles

Integers = npt.NDArray[np.int64]

MAX_STATES = 20_000
"""Sums kept side by side. Beyond that those with the largest reduced cost go, and `Allocation.gap` says what the best
solution could still be better by."""
_TOLERANCE = 1e-12
"""Relative difference of two sums of floats below which it is rounding."""


@dataclass(frozen=True)
class Allocation:
    """An option for each item."""

    choice: tuple[int, ...]
    weight: float
    value: float
    price: float
    """Value that one unit of weight more or less is worth at this limit."""
    gap: float
    """No solution is better by more than this share of `value`; 0 where the search was exhaustive."""


def allocate(weights: Sequence[Sequence[float]], values: Sequence[Sequence[float]], limit: float) -> Allocation | None:
    """The options with the least sum of values whose weights add up to at most the limit.

    Args:
        weights: For each item, what each of its options weighs; not negative.
        values: The same of what is to be least.
        limit: Of the sum of weights.

    Returns:
        The allocation, or None where even the lightest options exceed the limit. Of solutions with equal values the
        lightest one, and of these the one that comes first in the search, whose order does not change.
    """
    items = [_Item.of(w, v) for w, v in zip(weights, values, strict=True)]
    limit += _TOLERANCE * abs(limit)
    if sum(item.weights[0] for item in items) > limit:
        return None
    if not items:
        return Allocation((), 0.0, 0.0, 0.0, 0.0)
    price, start = _relaxed(items, limit)
    start = _improved(items, start, limit)
    best = sum(float(item.values[k]) for item, k in zip(items, start, strict=True))
    bound = sum(float((item.values + price * item.weights).min()) for item in items) - price * limit
    found, exhaustive = _search(items, price, limit, bound, best)
    chosen = start if found is None else found
    value = sum(float(item.values[k]) for item, k in zip(items, chosen, strict=True))
    gap = 0.0 if exhaustive or value <= 0 else max(0.0, (value - bound) / value)
    choice = tuple(int(item.index[k]) for item, k in zip(items, chosen, strict=True))
    weight = sum(float(item.weights[k]) for item, k in zip(items, chosen, strict=True))
    return Allocation(choice, weight, value, price, gap)


@dataclass(frozen=True)
class _Item:
    """The options of an item that no other one beats in both: heavier ones are better."""

    index: Integers
    """Where each was among all options."""
    weights: Doubles
    """What each option weighs [options], ascending."""
    values: Doubles
    """The value of each option [options], descending."""
    hull: Integers
    """Those on the lower convex hull."""

    @classmethod
    def of(cls, weights: Sequence[float], values: Sequence[float]) -> _Item:
        w, v = np.asarray(weights, np.float64), np.asarray(values, np.float64)
        order = np.lexsort((np.arange(len(w)), v, w))
        best = np.minimum.accumulate(np.concatenate([[np.inf], v[order]]))[:-1]
        kept = order[v[order] < best]
        return cls(kept, w[kept], v[kept], _hull(w[kept], v[kept]))


def _hull(weights: Doubles, values: Doubles) -> Integers:
    """The corners of the lower convex hull of points with ascending weights and descending values."""
    corners: list[int] = []
    for k in range(len(weights)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            cross = (values[b] - values[a]) * (weights[k] - weights[a])
            if cross < (values[k] - values[a]) * (weights[b] - weights[a]):
                break
            corners.pop()
        corners.append(k)
    return np.array(corners, np.int64)


def _relaxed(items: Sequence[_Item], limit: float) -> tuple[float, list[int]]:
    """The price of weight at the optimum of the relaxed problem, and a solution: best rates first, while they fit."""
    steps: list[tuple[float, int, int]] = []
    for i, item in enumerate(items):
        w, v = item.weights[item.hull], item.values[item.hull]
        rates = (v[:-1] - v[1:]) / (w[1:] - w[:-1])
        steps += [(-float(rate), i, k) for k, rate in enumerate(rates)]
    steps.sort()
    place = [0] * len(items)  # on the hull
    used = sum(float(item.weights[0]) for item in items)
    price = 0.0
    for rate, i, k in steps:
        item = items[i]
        added = float(item.weights[item.hull[k + 1]] - item.weights[item.hull[k]])
        if place[i] == k and used + added <= limit:
            place[i], used = k + 1, used + added
        elif price == 0.0:
            price = -rate  # the first step that does not fit
    return price, [int(item.hull[at]) for item, at in zip(items, place, strict=True)]


def _improved(items: Sequence[_Item], start: Sequence[int], limit: float) -> list[int]:
    """Take, while there is one, the option that lowers the sum most of those that fit, off the hulls as well."""
    place = list(start)
    used = sum(float(item.weights[k]) for item, k in zip(items, place, strict=True))
    while True:
        gains = []
        for i, item in enumerate(items):
            fitting = np.flatnonzero(item.weights <= item.weights[place[i]] + (limit - used))
            k = int(fitting[-1])  # the heaviest is the best
            gains.append((float(item.values[place[i]] - item.values[k]), -i, k))
        gain, i, k = max(gains)
        if gain <= 0:
            return place
        used += float(items[-i].weights[k] - items[-i].weights[place[-i]])
        place[-i] = k


def _search(
    items: Sequence[_Item], price: float, limit: float, bound: float, best: float
) -> tuple[list[int] | None, bool]:
    """The best solution that is no worse than `best`, or None; and whether nothing was left out.

    A solution's value is at least the relaxed bound plus the reduced costs of its options, so that a partial one whose
    reduced costs exceed the gap is given up, and of two with the same items the one that is worse in both sums.
    """
    room = best - bound + _TOLERANCE * abs(best)
    lightest = [*np.cumsum([float(item.weights[0]) for item in items][::-1])[::-1].tolist(), 0.0]
    weight, value, reduced = np.zeros(1), np.zeros(1), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []
    exhaustive = True
    for i, item in enumerate(items):
        cost = item.values + price * item.weights
        cost -= cost.min()
        options = np.flatnonzero(cost <= room)
        parent = np.repeat(np.arange(len(weight)), len(options))
        option = np.tile(options, len(weight))
        w, v = weight[parent] + item.weights[option], value[parent] + item.values[option]
        r = reduced[parent] + cost[option]
        kept = np.flatnonzero((r <= room) & (w + lightest[i + 1] <= limit))
        order = kept[np.lexsort((v[kept], w[kept]))]
        ahead = np.minimum.accumulate(np.concatenate([[np.inf], v[order]]))[:-1]
        order = order[v[order] < ahead]
        if len(order) > MAX_STATES:
            nearest = np.argsort(r[order], kind="stable")[:MAX_STATES]
            order, exhaustive = order[np.sort(nearest)], False
        if not len(order):
            return None, exhaustive
        weight, value, reduced = w[order], v[order], r[order]
        trail.append((parent[order], option[order]))
    at = int(np.lexsort((weight, value))[0])
    if value[at] > best:
        return None, exhaustive
    chosen = []
    for parents, options in reversed(trail):
        chosen.append(int(options[at]))
        at = int(parents[at])
    return chosen[::-1], exhaustive
