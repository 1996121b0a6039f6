"""The best type for every tensor within a budget."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qres import levels
from qres.errors import UsageError
from qres.printable import counted
from qres.recipes.allocate import Allocation, allocate
from qres.recipes.budget import Budget
from qres.recipes.choices import Choices, TensorOptions, loss_of, padded, size_of
from qres.recipes.wishes import Wishes
from qres.records.recipe import RECIPE_VERSION, Expected, PlannedTensor, Recipe, Selection, Stock
from qres.version import __version__

EQUAL_DAMAGE = 1.05
"""Types that are not fast for the purpose count as this much worse: within it, damage is called equal."""
NEAR = 1.005
"""A level counts as one of the recipe's size up to this."""


@dataclass
class OpenChoices:
    """Options as they are after the wishes, and what there is to say about them."""

    rows: list[TensorOptions]
    fixed: dict[str, str]
    """Types that are not chosen."""
    pinned: dict[str, None] = field(default_factory=dict)
    """In the order of the file."""
    notes: list[str] = field(default_factory=list)


# -- within a budget


def make(choices: Choices, budget: Budget, wishes: Wishes) -> Recipe:
    """The recipe with the least predicted KLD within a budget of bytes, or with the fewest bytes within one of KLD.

    Raises:
        UsageError: a budget that no recipe meets, with what the smallest and largest ones take; a pin without tensors.
    """
    start = base_level(choices, wishes)
    plan = open_choices(choices, wishes, start)
    fast = levels.FAST.get(wishes.purpose)
    losses = [
        [
            loss * (1.0 if fast is None or name in fast else EQUAL_DAMAGE)
            for name, loss in zip(row.types, row.costs, strict=True)
        ]
        for row in plan.rows
    ]
    if budget.kld is not None:
        pinned = [loss_of(choices.by_name[name], kind) for name, kind in plan.fixed.items()]
        if None in pinned:
            raise UsageError(
                f"{budget.text}: a pinned type has no prediction", "give a budget of bytes, or another pin"
            )
        limit = choices.raw_for(budget.kld) - sum(loss or 0.0 for loss in pinned)
        found = allocate(losses, [row.bytes for row in plan.rows], limit)
        if found is None:
            raise _impossible(choices, plan, budget)
        return _recipe(choices, plan, found, budget, wishes, None)
    limit_bytes = _limit(choices, budget, start)
    is_file = budget.file_bytes is not None
    kept = _fixed_bytes(choices, plan, is_file)
    weights = [[padded(size) if is_file else size for size in row.bytes] for row in plan.rows]
    found = allocate(weights, losses, limit_bytes - kept)
    if found is None:
        raise _impossible(choices, plan, budget)
    return _recipe(choices, plan, found, budget, wishes, limit_bytes)


def base_level(choices: Choices, wishes: Wishes) -> str:
    """The level that recipes start from.

    Raises:
        UsageError: not one that is known for this model.
    """
    if wishes.level is None:
        return choices.levels[0].name
    known = choices.types_by_level
    if wishes.level not in known:
        raise UsageError(f"the result knows no level {wishes.level!r}", f"take one of {', '.join(known)}")
    return wishes.level


def _limit(choices: Choices, budget: Budget, start: str) -> int:
    """Bytes that the budget allows: of tensor data, or of the file's padded tensors."""
    if budget.file_bytes is not None:
        return budget.file_bytes - choices.header_bytes
    if budget.bpw is not None:
        return int(budget.bpw * choices.n_weights / 8)
    known = choices.types_by_level
    wanted = budget.level or start
    if wanted not in known:
        raise UsageError(f"{budget.text}: the result does not know that level", f"take one of {', '.join(known)}")
    return choices.bytes_of(known[wanted]) + int((budget.more_bpw or 0.0) * choices.n_weights / 8)


def open_choices(choices: Choices, wishes: Wishes, start: str) -> OpenChoices:
    """Apply the pins; what cannot be chosen has the type of the level that recipes start from."""
    held = choices.types_by_level[start]
    plan = OpenChoices([], {})
    matched: list[list[str]] = [[] for _ in wishes.pins]
    for row in choices.rows:
        name = row.tensor.name
        which = next((i for i, (pattern, _) in enumerate(wishes.pins) if re.search(pattern, name)), None)
        if which is not None and row.quantizable:
            matched[which].append(name)
            plan.fixed[name] = levels.fitting_type(wishes.pins[which][1], row.tensor.shape[0])
            plan.pinned[name] = None
        elif row.types:
            plan.rows.append(row)
        else:
            plan.fixed[name] = held[name] if row.quantizable else row.tensor.type
    for (pattern, type_name), names in zip(wishes.pins, matched, strict=True):
        if not names:
            raise UsageError(
                f"--pin {pattern}={type_name}: no tensor that is quantized has such a name",
                "the names are in the report, such as blk.0.ffn_down.weight",
            )
        plan.notes.append(_pinned(pattern, type_name, [plan.fixed[name] for name in names]))
    beyond = [name for name in plan.pinned if plan.fixed[name] == "F16" != choices.by_name[name].tensor.type_16bit]
    if beyond:
        plan.notes.append(f"{beyond[0]} is pinned to F16, whose range its values may leave: BF16 holds them.")
    unknown = [name for name in plan.pinned if loss_of(choices.by_name[name], plan.fixed[name]) is None]
    if unknown:
        plan.notes.append(f"{plan.fixed[unknown[0]]} has no prediction, so that the recipe has none.")
    unreached = sum(bool(row.silent) for row in plan.rows)
    if unreached:
        plan.notes.append(
            f"{counted(unreached, 'tensor')} with experts that no token reached: types are chosen as if they were like "
            "the median of the others."
        )
    return plan


def _pinned(pattern: str, asked: str, types: Sequence[str]) -> str:
    """What a pin makes of its tensors: a type whose blocks do not fit their rows becomes another one."""
    held = Counter(types)
    if set(held) == {asked}:
        return f"{pattern} is pinned to {asked}: {counted(len(types), 'tensor')}."
    made = ", ".join(f"{name} in {counted(n, 'tensor')}" for name, n in held.most_common())
    return f"{pattern} is pinned to {asked}, whose blocks do not fit all rows: written is {made}."


def _fixed_bytes(choices: Choices, plan: OpenChoices, is_file: bool) -> int:
    sizes = (size_of(choices.by_name[name], type_name) for name, type_name in plan.fixed.items())
    return sum(padded(size) if is_file else size for size in sizes)


def _impossible(choices: Choices, plan: OpenChoices, budget: Budget) -> UsageError:
    """What the smallest and the largest recipe would take."""
    ends = []
    for pick in (min, max):
        types = plan.fixed | {row.tensor.name: row.types[row.bytes.index(pick(row.bytes))] for row in plan.rows}
        ends.append((choices.bytes_of(types), choices.file_bytes(types), choices.expected(choices.loss(types))))
    (low, low_file, low_kld), (high, high_file, high_kld) = ends
    if budget.kld is not None:
        least, most = (one.kld if one else 0.0 for one in (high_kld, low_kld))
        return UsageError(
            f"no recipe has a predicted KLD of {budget.kld:g}",
            f"possible are {least:.3g} ({_mib(high)}) to {most:.3g} ({_mib(low)})",
        )
    if budget.file_bytes is not None:
        possible = f"{_mib(low_file)} to {_mib(high_file)}"
    else:
        bits = [f"{8 * size / choices.n_weights:.2f}" for size in (low, high)]
        possible = f"{bits[0]} to {bits[1]} bits per weight, {_mib(low)} to {_mib(high)}"
    return UsageError(f"no recipe fits into {budget.text}", f"possible are {possible}")


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


# -- records


def of_types(
    choices: Choices, types: Mapping[str, str], budget: str, base: str, wishes: Wishes, plan: OpenChoices | None = None
) -> Recipe:
    """Given types as a recipe."""
    return _record(choices, types, budget, base, wishes, plan or OpenChoices([], {}), None, 0.0)


def _recipe(
    choices: Choices, plan: OpenChoices, found: Allocation, budget: Budget, wishes: Wishes, limit: int | None
) -> Recipe:
    chosen = {row.tensor.name: row.types[k] for row, k in zip(plan.rows, found.choice, strict=True)}
    types = plan.fixed | chosen
    # What types that are not fast were charged may have cost this much.
    charged = 0.0 if wishes.purpose == "any" else EQUAL_DAMAGE - 1
    record = _record(choices, types, budget.text, budget.level or "", wishes, plan, limit, found.gap + charged)
    return replace(record, limit_is_file=budget.file_bytes is not None)


def _record(
    choices: Choices,
    types: Mapping[str, str],
    budget: str,
    base: str,
    wishes: Wishes,
    plan: OpenChoices,
    limit: int | None,
    gap: float,
) -> Recipe:
    result, sensitivity = choices.result, choices.result.prediction
    expected = choices.expected(choices.loss(types))
    size = choices.bytes_of(types)
    return Recipe(
        recipe_version=RECIPE_VERSION,
        qres_version=__version__,
        model=result.reference.name,
        architecture=result.reference.architecture,
        fingerprint=result.fingerprint,
        budget=budget,
        purpose=wishes.purpose,
        base=base if base in levels.LADDER else _nearest(choices, types),  # rules count only in levels that quantize
        tensors=tuple(_planned(row, types[row.tensor.name], expected, plan) for row in choices.rows),
        bytes=size,
        limit_bytes=limit,
        bpw=8 * size / choices.n_weights,
        predicted=expected,
        gap=gap,
        selection=Selection(
            rank_text=_counted(result.settings.rank_text, result.settings.rank_chunks),
            report_text=_counted(result.settings.text, result.settings.chunks),
            n_ctx=result.settings.n_ctx,
            chunk_digests=result.settings.chunk_digests,
        ),
        stock=_stock(choices, size),
        imatrix=sensitivity.imatrix if sensitivity else "",
        imatrix_digest=sensitivity.imatrix_digest if sensitivity else "",
        notes=tuple(plan.notes),
    )


def _counted(text: str, chunks: int) -> str:
    """The text's name and how many chunks of it, unless the name says so."""
    return text if "chunks" in text else f"{text}, {chunks} chunk{'s' if chunks > 1 else ''}"


def _planned(row: TensorOptions, type_name: str, expected: Expected | None, plan: OpenChoices) -> PlannedTensor:
    loss = loss_of(row, type_name)
    factor = expected.factor if expected else 1.0
    return PlannedTensor(
        name=row.tensor.name,
        shape=row.tensor.shape,
        type=type_name,
        bytes=size_of(row, type_name),
        predicted_kld=None if loss is None else loss * factor,
        quantizable=row.quantizable,
        pinned=row.tensor.name in plan.pinned,
    )


def _nearest(choices: Choices, types: Mapping[str, str]) -> str:
    """The level that llama.cpp makes of nearest size, for `general.file_type`."""
    size = choices.bytes_of(types)
    return min(choices.stock, key=lambda row: abs(row.bytes - size)).level


def _stock(choices: Choices, size: int) -> tuple[Stock, ...]:
    """The level of equal size, which is the largest that is not larger, and the next one up."""
    rows = choices.stock
    equal = [row for row in rows if row.bytes <= size * NEAR] or rows[:1]
    # Of levels of about one size the better one is the fair rival.
    best = min(
        equal[-3:],
        key=lambda row: (row.bytes < equal[-1].bytes / NEAR, row.predicted.kld if row.predicted else math.inf),
    )
    above = [row for row in rows if row.bytes > max(size * NEAR, best.bytes)]
    return (best, *above[:1])
