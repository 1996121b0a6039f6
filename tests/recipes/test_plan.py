"""Recipes against every mix of types that there is, and what they say about themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from qres.errors import UsageError
from qres.levels import FAST, TYPE_TRAITS
from qres.recipes import allocate, plan
from qres.recipes.budget import parse
from qres.recipes.choices import Choices
from qres.recipes.keep_layers import keep_16bit
from qres.recipes.plan import EQUAL_DAMAGE, make
from qres.recipes.wishes import Wishes, parse_pin
from qres.records.recipe import RECIPE_VERSION, Recipe, Rung, Selection
from qres.version import __version__
from tests.examples import recipe as ex
from tests.examples.recipe import (
    DOWN_0,
    DOWN_10,
    EMBEDDING,
    HEADER_BYTES,
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

Q4 = LADDER["Q4_K_M"]
N_WEIGHTS = sum(math.prod(shape) for shape in ex.SHAPES.values())
LADDERS = ex.example().ladder
MIXES = ex.mixes()


@pytest.fixture(scope="module")
def choices() -> Choices:
    return Choices(ex.example())


def made(choices: Choices, budget: str, purpose: str = "any", level: str | None = None, **pins: str) -> Recipe:
    """With pins as TENSOR=TYPE, dots as double underscores."""
    patterns = tuple((pattern.replace("__", r"\."), kind) for pattern, kind in pins.items())
    return make(choices, parse(budget), Wishes(purpose, patterns, level))


def types_of(found: Recipe) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in found.tensors}


def require_sound(found: Recipe) -> None:
    """What a recipe says of itself is true, and a quantizer can make it."""
    types = types_of(found)
    assert tuple(types) == NAMES
    for tensor in found.tensors:
        assert tensor.shape == ex.SHAPES[tensor.name]
        assert tensor.shape[0] % TYPE_TRAITS[tensor.type].block_size == 0
        assert tensor.bytes == ex.size(tensor.name, tensor.type)
        assert tensor.quantizable == (tensor.name not in {NORM, OTHER_NORM, ROUTER})
    assert (types[NORM], types[OTHER_NORM], types[ROUTER]) == ("F32", "F32", "F32")
    assert found.bytes == ex.data_bytes(types)
    assert found.bpw == pytest.approx(8 * found.bytes / N_WEIGHTS)
    assert found.predicted is not None
    assert found.predicted.raw_kld == pytest.approx(ex.loss(types))
    assert found.predicted.kld == pytest.approx(ex.calibrated(ex.loss(types)))
    klds = {tensor.name: tensor.predicted_kld for tensor in found.tensors}
    assert sum(kld or 0 for kld in klds.values()) == pytest.approx(found.predicted.kld)
    for name, options in OPTIONS.items():
        kld = klds[name]
        assert kld is not None
        assert kld * found.predicted.raw_kld == pytest.approx(options[types[name]] * found.predicted.kld)


# ---------------------------------------------------------------- a budget of bytes


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        *((f"same-as:{name}", ex.data_bytes(LADDER[name])) for name in LADDER),
        ("4.6bpw", 4.6 * N_WEIGHTS / 8),
        ("5bpw", 5 * N_WEIGHTS / 8),
        ("5.75bpw", 5.75 * N_WEIGHTS / 8),
        ("9.9bpw", 9.9 * N_WEIGHTS / 8),
        ("16bpw", 16 * N_WEIGHTS / 8),
        ("+0.10bpw", ex.data_bytes(Q4) + 0.1 * N_WEIGHTS / 8),
        ("+0.25bpw", ex.data_bytes(Q4) + 0.25 * N_WEIGHTS / 8),
        ("+3bpw", ex.data_bytes(Q4) + 3 * N_WEIGHTS / 8),
    ],
)
def test_no_mix_within_a_budget_is_better(choices: Choices, budget: str, limit: float) -> None:
    if budget == "same-as:Q2_K":  # smaller than any mix of what was predicted
        with pytest.raises(UsageError):
            made(choices, budget)
        return
    found = made(choices, budget)
    require_sound(found)
    assert found.limit_bytes == int(limit)
    assert found.bytes <= limit
    assert found.predicted is not None
    assert found.predicted.raw_kld == pytest.approx(MIXES.least_loss(MIXES.bytes <= limit))
    assert (found.gap, found.budget, found.notes) == (0, budget, ())
    assert types_of(found)[UNPREDICTED] == "Q5_0"  # the smallest measured level's


@pytest.mark.parametrize("level", ["Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_a_recipe_of_a_levels_bytes_is_at_least_as_good_as_every_level_that_is_not_larger(
    choices: Choices, level: str
) -> None:
    found = made(choices, f"same-as:{level}", level=level)
    assert found.predicted is not None
    for types in LADDER.values():
        if ex.data_bytes(types) <= found.bytes and types is not LADDER["Q2_K"]:
            assert found.predicted.raw_kld <= ex.loss(types) * (1 + 1e-12)
    if level in {"Q4_0", "Q4_K_M"}:  # a level that does not spend its bytes well
        assert found.predicted.raw_kld < ex.loss(LADDER[level]) * 0.9


def test_every_budget_of_a_file_is_met_by_its_padded_tensors_and_its_header(choices: Choices) -> None:
    rng = np.random.default_rng(0)
    sizes = np.unique(MIXES.file_bytes)
    for budget in [*rng.choice(sizes, 25), *(rng.choice(sizes, 25) - 1), sizes[0], sizes[-1] - 1]:
        if budget < sizes[0]:
            continue
        found = made(choices, f"{budget}B")
        require_sound(found)
        types = types_of(found)
        assert ex.file_bytes(types) <= budget
        assert ex.loss(types) == pytest.approx(MIXES.least_loss(MIXES.file_bytes <= budget))
        assert found.limit_bytes == budget - HEADER_BYTES


def test_a_budget_of_a_file_counts_padding_that_one_of_data_does_not(choices: Choices) -> None:
    types = {**Q4, EMBEDDING: "Q4_0", OUT_0: "Q4_K", DOWN_0: "Q4_K", OUT_1: "Q4_K", DOWN_10: "IQ4_NL"}
    exact = ex.file_bytes(types)
    assert ex.file_bytes(types_of(made(choices, f"{exact}B"))) == exact
    with pytest.raises(UsageError, match="no recipe fits"):
        made(choices, f"{exact - 1}B")
    assert made(choices, f"{8 * ex.data_bytes(types) / N_WEIGHTS + 1e-9:.9f}bpw").bytes == ex.data_bytes(types)


def test_more_bits_are_counted_from_the_level_that_is_named(choices: Choices) -> None:
    added = int(0.5 * N_WEIGHTS / 8)
    assert made(choices, "+0.5bpw").limit_bytes == ex.data_bytes(Q4) + added
    assert made(choices, "+0.5bpw", level="Q5_K_M").limit_bytes == ex.data_bytes(LADDER["Q5_K_M"]) + added
    assert made(choices, "+0.5bpw", level="Q6_K").limit_bytes == ex.data_bytes(LADDER["Q6_K"]) + added


def test_what_was_not_predicted_has_the_type_of_the_level_that_recipes_start_from(choices: Choices) -> None:
    for level, kind in (("Q4_K_M", "Q5_0"), ("Q5_K_M", "Q5_1"), ("Q8_0", "Q8_0"), ("Q2_K", "Q4_0")):
        found = made(choices, "6bpw", level=level)
        require_sound(found)
        assert types_of(found)[UNPREDICTED] == kind
        assert found.bytes <= 6 * N_WEIGHTS / 8
    assert types_of(made(choices, "same-as:Q6_K"))[UNPREDICTED] == "Q5_0"  # of that level are the bytes only


def test_the_same_recipe_every_time(choices: Choices) -> None:
    assert made(choices, "5.1bpw") == made(Choices(ex.example()), "5.1bpw")


def test_unknown_levels_are_refused_with_the_known_ones(choices: Choices) -> None:
    with pytest.raises(UsageError, match="same-as:Q3_K_M: the result does not know that level") as caught:
        made(choices, "same-as:Q3_K_M")
    assert "Q2_K, Q4_0, Q4_K_S, Q4_K_M, Q5_K_M, Q6_K, Q8_0" in caught.value.hint
    with pytest.raises(UsageError, match="the result knows no level 'Q3_K_M'"):
        made(choices, "5bpw", level="Q3_K_M")
    with pytest.raises(UsageError, match="the result knows no level 'x'"):
        keep_16bit(choices, 1, Wishes(level="x"))


def test_a_search_that_was_cut_says_so(choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "MAX_STATES", 1)
    gaps = []
    for bpw in np.arange(4.7, 8, 0.1):
        found = made(choices, f"{bpw:.2f}bpw")
        require_sound(found)
        assert found.predicted is not None
        best = MIXES.least_loss(MIXES.bytes <= bpw * N_WEIGHTS / 8 + 1e-6)
        assert found.predicted.raw_kld * (1 - found.gap) <= best * (1 + 1e-9)
        gaps.append(found.gap)
    assert max(gaps) > 0


# ---------------------------------------------------------------- a budget of KLD


@pytest.mark.parametrize("kld", [0.0004, 0.00099, 0.0015, 0.0025, 0.004, 0.0076, 0.01, 0.02, 0.5])
def test_a_budget_of_kld_is_met_with_the_fewest_bytes(choices: Choices, kld: float) -> None:
    found = made(choices, f"kld:{kld}")
    require_sound(found)
    assert found.predicted is not None
    assert found.predicted.kld <= kld * (1 + 1e-9)
    allowed = np.array([raw == 0 or ex.calibrated(raw) <= kld * (1 + 1e-9) for raw in MIXES.losses])
    assert found.bytes == MIXES.bytes[allowed].min()
    assert (found.limit_bytes, found.gap) == (None, 0)


def test_a_tiny_budget_of_kld_takes_16_bit_for_all(choices: Choices) -> None:
    types = types_of(made(choices, "kld:1e-9"))
    assert {types[name] for name in OPTIONS} == {"F16", "BF16"}


def test_pins_count_in_a_budget_of_kld(choices: Choices) -> None:
    found = made(choices, "kld:0.01", **{DOWN_0.replace(".", "__"): "Q4_0"})
    assert found.predicted is not None
    assert found.predicted.kld <= 0.01


def test_pins_that_cost_more_than_a_budget_of_kld_are_refused(choices: Choices) -> None:
    with pytest.raises(UsageError, match=r"no recipe has a predicted KLD of 0\.002") as caught:
        made(choices, "kld:0.002", **{DOWN_0.replace(".", "__"): "Q4_0"})
    least, most = ex.calibrated(0.0066), ex.calibrated(0.02392 + 0.0030 + 0.0066 + 0.00107 + 0.00215)
    assert re.match(rf"possible are {least:.3g} \(.* MiB\) to {most:.3g} \(1.3 MiB\)", caught.value.hint)


# ---------------------------------------------------------------- impossible


def test_impossible_budget_of_bits_names_the_smallest_and_the_largest(choices: Choices) -> None:
    with pytest.raises(UsageError, match=r"no recipe fits into 4\.5bpw") as caught:
        made(choices, "4.5bpw")
    low, high = MIXES.bytes.min(), MIXES.bytes.max()
    assert caught.value.hint == (
        f"possible are {8 * low / N_WEIGHTS:.2f} to {8 * high / N_WEIGHTS:.2f} bits per weight, "
        f"{low / 2**20:.1f} MiB to {high / 2**20:.1f} MiB"
    )


def test_impossible_budget_of_a_file_names_the_sizes_of_files(choices: Choices) -> None:
    with pytest.raises(UsageError, match="no recipe fits into 1KiB") as caught:
        made(choices, "1KiB")
    low, high = MIXES.file_bytes.min(), MIXES.file_bytes.max()
    assert caught.value.hint == f"possible are {low / 2**20:.1f} MiB to {high / 2**20:.1f} MiB"


def test_the_smallest_that_is_named_is_possible_and_nothing_below_it(choices: Choices) -> None:
    low = int(MIXES.bytes.min())
    bits = 8 * low / N_WEIGHTS
    assert made(choices, f"{bits + 1e-7:.9f}bpw").bytes == low
    with pytest.raises(UsageError):
        made(choices, f"{bits - 1e-4:.9f}bpw")


def test_impossible_with_pins_says_what_is_possible_with_them(choices: Choices) -> None:
    with pytest.raises(UsageError) as caught:
        made(choices, "5bpw", token_embd="F16")
    with_pin = np.array([choice[0] == "F16" for choice in MIXES.choices])
    low = MIXES.bytes[with_pin].min()
    assert f"possible are {8 * low / N_WEIGHTS:.2f} to " in caught.value.hint


def test_pins_for_everything_that_exceed_the_budget_are_refused(choices: Choices) -> None:
    with pytest.raises(UsageError, match="no recipe fits into 5bpw"):
        made(choices, "5bpw", weight="Q8_0")


# ---------------------------------------------------------------- pins


def test_pinned_tensors_have_their_type_and_the_rest_is_the_best_beside_them(choices: Choices) -> None:
    found = made(choices, "6bpw", ffn_down="Q4_K")
    require_sound(found)
    types = types_of(found)
    assert (types[DOWN_0], types[DOWN_10]) == ("Q4_K", "Q4_K")
    assert {tensor.name for tensor in found.tensors if tensor.pinned} == {DOWN_0, DOWN_10}
    with_pins = np.array([choice[2] == choice[4] == "Q4_K" for choice in MIXES.choices])
    assert ex.loss(types) == pytest.approx(MIXES.least_loss(with_pins & (MIXES.bytes <= 6 * N_WEIGHTS / 8)))
    assert found.notes == ("ffn_down is pinned to Q4_K: 2 tensors.",)


def test_the_first_pin_that_matches_counts(choices: Choices) -> None:
    patterns = ((r"blk\.10\.", "Q5_K"), (r"blk\.1", "Q6_K"), ("weight", "Q8_0"))
    found = make(choices, parse("16bpw"), Wishes(pins=patterns))
    types = types_of(found)
    assert {name: types[name] for name in NAMES} == {
        EMBEDDING: "Q8_0",
        NORM: "F32",
        OUT_0: "Q8_0",
        ROUTER: "F32",
        DOWN_0: "Q8_0",
        OUT_1: "Q6_K",
        UNPREDICTED: "Q8_0",  # blk.1, with rows that Q6_K does not divide
        DOWN_10: "Q5_K",
        OTHER_NORM: "F32",
    }
    assert found.notes == (
        r"blk\.10\. is pinned to Q5_K: 1 tensor.",
        r"blk\.1 is pinned to Q6_K, whose blocks do not fit all rows: written is Q6_K in 1 tensor, Q8_0 in 1 tensor.",
        "weight is pinned to Q8_0: 3 tensors.",
    )


def test_pins_are_found_anywhere_in_a_name(choices: Choices) -> None:
    found = made(choices, "16bpw", **{"1": "Q8_0"})
    assert {tensor.name for tensor in found.tensors if tensor.pinned} == {OUT_1, UNPREDICTED, DOWN_10}


@pytest.mark.parametrize(("pin", "kind"), [("Q6_K", "Q8_0"), ("Q4_K", "Q5_0"), ("Q3_K", "Q4_0"), ("IQ4_XS", "IQ4_NL")])
def test_pins_fall_back_where_their_blocks_do_not_divide_the_rows(choices: Choices, pin: str, kind: str) -> None:
    found = made(choices, "16bpw", token_embd=pin)
    require_sound(found)
    assert types_of(found)[EMBEDDING] == kind


@pytest.mark.parametrize("pattern", ["norm", "ffn_gate_inp", "blk.99", "^blk$", "BLK"])
def test_a_pin_without_a_tensor_that_is_quantized_is_refused(choices: Choices, pattern: str) -> None:
    with pytest.raises(UsageError, match=rf"--pin {re.escape(pattern)}=Q8_0: no tensor that is quantized"):
        made(choices, "6bpw", **{pattern: "Q8_0"})


def test_a_pin_behind_one_that_takes_all_its_tensors_is_refused(choices: Choices) -> None:
    pins = (("ffn", "Q8_0"), ("ffn_down", "Q4_K"))
    with pytest.raises(UsageError, match="--pin ffn_down=Q4_K: no tensor"):
        make(choices, parse("9bpw"), Wishes(pins=pins))


def test_a_pin_to_a_type_that_was_not_predicted_leaves_no_prediction_and_says_so(choices: Choices) -> None:
    found = made(choices, "6bpw", **{OUT_0.replace(".", "__"): "Q3_K"})
    assert found.predicted is None
    assert found.bytes == ex.data_bytes(types_of(found)) <= 6 * N_WEIGHTS / 8
    klds = {tensor.name: tensor.predicted_kld for tensor in found.tensors}
    assert klds[OUT_0] is None
    assert klds[EMBEDDING] == pytest.approx(OPTIONS[EMBEDDING][types_of(found)[EMBEDDING]])  # no sum to calibrate by
    assert found.notes[-1] == "Q3_K has no prediction, so that the recipe has none."


def test_a_pin_to_a_range_that_is_too_small_is_noted(choices: Choices) -> None:
    notes = made(choices, "16bpw", ffn_down="F16").notes
    assert notes[1:] == (f"{DOWN_0} is pinned to F16, whose range its values may leave: BF16 holds them.",)
    assert len(made(choices, "16bpw", ffn_down="BF16").notes) == 1
    assert len(made(choices, "16bpw", attn_output="F16").notes) == 1


def test_pins_count_in_a_budget_of_bytes(choices: Choices) -> None:
    for budget in ("8bpw", f"{8 * N_WEIGHTS // 8 + HEADER_BYTES + 200}B"):
        found = made(choices, budget, token_embd="F16")
        require_sound(found)
        with_pin = np.array([choice[0] == "F16" for choice in MIXES.choices])
        assert ex.loss(types_of(found)) == pytest.approx(MIXES.least_loss(with_pin & (MIXES.bytes <= N_WEIGHTS)))


def test_pins_are_read_as_pattern_and_type() -> None:
    assert parse_pin("ffn_down=Q6_K") == ("ffn_down", "Q6_K")
    assert parse_pin("a=b=q8_0") == ("a=b", "Q8_0")
    assert parse_pin(r"blk\.[0-3]\.=bf16") == (r"blk\.[0-3]\.", "BF16")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ffn_down", "is not REGEX=TYPE"),
        ("=Q6_K", "is not REGEX=TYPE"),
        ("", "is not REGEX=TYPE"),
        ("a(=Q6_K", "'a(' is no regular expression"),
        ("a=Q9_K", "unknown tensor type 'Q9_K'"),
        ("a=", "unknown tensor type ''"),
        ("a=Q4_K_M", "unknown tensor type 'Q4_K_M'"),
        ("a=Q4_2", "unknown tensor type 'Q4_2'"),
    ],
)
def test_pins_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pin(text)
    assert words in caught.value.message


@pytest.mark.parametrize("kind", ["I8", "I32", "F64", "Q8_1", "Q8_K"])
def test_pins_to_types_that_no_quantizer_makes(kind: str) -> None:
    with pytest.raises(UsageError):
        parse_pin(f"ffn_down={kind}")


# ---------------------------------------------------------------- for a purpose


def penalized(purpose: str) -> npt.NDArray[np.float64]:
    """Damage of every mix with that of types that are not fast there 5 % larger."""
    fast = FAST[purpose]
    return np.array(
        [
            sum(OPTIONS[name][kind] * (1 if kind in fast else 1.05) for name, kind in zip(OPTIONS, choice, strict=True))
            for choice in MIXES.choices
        ]
    )


@pytest.mark.parametrize("purpose", ["arm", "cpu", "gpu"])
def test_fast_types_are_preferred_where_their_damage_is_about_equal(choices: Choices, purpose: str) -> None:
    damage = penalized(purpose)
    for bpw in np.arange(4.6, 9, 0.2):
        found = made(choices, f"{bpw:.1f}bpw", purpose=purpose)
        require_sound(found)
        assert found.purpose == purpose
        within = MIXES.bytes <= float(f"{bpw:.1f}") * N_WEIGHTS / 8
        own = sum(
            OPTIONS[name][kind] * (1 if kind in FAST[purpose] else 1.05)
            for name, kind in types_of(found).items()
            if name in OPTIONS
        )
        assert own == pytest.approx(damage[within].min())
        assert ex.loss(types_of(found)) <= EQUAL_DAMAGE * MIXES.least_loss(within) * (1 + 1e-12)


def test_for_a_gpu_types_with_tables_go_within_5_percent_only(choices: Choices) -> None:
    low = 8 * int(MIXES.bytes.min()) / N_WEIGHTS + 1e-6
    any_types, gpu = (types_of(made(choices, f"{low:.7f}bpw", purpose=purpose)) for purpose in ("any", "gpu"))
    assert (any_types[EMBEDDING], gpu[EMBEDDING]) == ("IQ4_NL", "Q4_0")  # 4.0 % worse
    assert (any_types[OUT_1], gpu[OUT_1]) == ("IQ4_NL", "Q4_K")  # 1 % worse
    assert (any_types[DOWN_10], gpu[DOWN_10]) == ("IQ4_NL", "IQ4_NL")  # Q4_K would be 7.5 % worse


def test_for_a_purpose_a_budget_of_kld_is_still_met(choices: Choices) -> None:
    for purpose in ("arm", "cpu", "gpu"):
        found = made(choices, "kld:0.02", purpose=purpose)
        require_sound(found)
        assert found.predicted is not None
        assert found.predicted.kld <= 0.02


def test_gap_for_a_purpose_says_what_the_purpose_costs(choices: Choices) -> None:
    found = made(choices, "5.2bpw", purpose="gpu")
    best = MIXES.least_loss(MIXES.bytes <= 5.2 * N_WEIGHTS / 8)
    assert ex.loss(types_of(found)) > best
    assert ex.loss(types_of(found)) * (1 - found.gap) <= best


# ---------------------------------------------------------------- layers at 16 bit


def damages(types: Mapping[str, str]) -> dict[str, float]:
    """By hand: each layer's."""
    return {
        "token_embd": OPTIONS[EMBEDDING][types[EMBEDDING]],
        "layer 0": OPTIONS[OUT_0][types[OUT_0]] + OPTIONS[DOWN_0][types[DOWN_0]],
        "layer 1": OPTIONS[OUT_1][types[OUT_1]],
        "layer 10": OPTIONS[DOWN_10][types[DOWN_10]],
    }


@pytest.mark.parametrize("level", ["Q4_K_M", "Q4_K_S", "Q8_0"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_costliest_layers_are_at_16_bit(choices: Choices, level: str, count: int) -> None:
    found = keep_16bit(choices, count, Wishes(level=level))
    damage = damages(LADDER[level])
    kept = sorted(damage, key=lambda layer: -damage[layer])[:count]
    layers = {EMBEDDING: "token_embd", OUT_0: "layer 0", DOWN_0: "layer 0", OUT_1: "layer 1", DOWN_10: "layer 10"}
    expected = {
        name: ("BF16" if name == DOWN_0 else "F16") if layers.get(name) in kept else kind
        for name, kind in LADDER[level].items()
    }
    assert types_of(found) == expected
    assert found.notes == (f"At 16 bit: {', '.join(kept)}.",)
    assert (found.budget, found.base) == (f"{level} with {count} at 16 bit", level)
    assert (found.limit_bytes, found.gap) == (None, 0)
    assert found.predicted is not None
    assert found.predicted.raw_kld == pytest.approx(sum(damage.values()) - sum(damage[layer] for layer in kept))


def test_layers_are_kept_in_the_smallest_measured_level_unless_one_is_named(choices: Choices) -> None:
    assert keep_16bit(choices, 1, Wishes()) == keep_16bit(choices, 1, Wishes(level="Q4_K_M"))


@pytest.mark.parametrize("count", [-1, 0, 5, 1000])
def test_more_layers_than_there_are_cannot_be_kept(choices: Choices, count: int) -> None:
    with pytest.raises(UsageError, match=rf"--keep-16bit {count}: Q4_K_M has 4 layers below 16 bit"):
        keep_16bit(choices, count, Wishes())


def test_layers_that_are_at_16_bit_already_are_not_kept_again() -> None:
    full = {**Q4, EMBEDDING: "F16", DOWN_10: "F32"}
    found = Choices(replace(ex.example(), levels=(ex.level("Q4_K_M", 0.0076, full),)))
    assert keep_16bit(found, 2, Wishes()).notes == ("At 16 bit: layer 0, layer 1.",)
    with pytest.raises(UsageError, match="has 2 layers"):
        keep_16bit(found, 3, Wishes())


def test_layers_of_a_level_without_predictions_cannot_be_ranked(choices: Choices) -> None:
    with pytest.raises(UsageError, match=rf"Q2_K gives {re.escape(OUT_0)} a type without a prediction"):
        keep_16bit(choices, 1, Wishes(level="Q2_K"))


def test_pinned_tensors_stay_in_a_layer_that_is_kept(choices: Choices) -> None:
    found = keep_16bit(choices, 2, Wishes(pins=((r"blk\.0\.attn", "Q5_K"),)))
    types = types_of(found)
    # Without what is pinned, layer 0 has the 0.0004 of its other matrix: behind layer 10 and layer 1.
    assert found.notes == (r"blk\.0\.attn is pinned to Q5_K: 1 tensor.", "At 16 bit: layer 10, layer 1.")
    assert (types[OUT_0], types[DOWN_0], types[DOWN_10], types[OUT_1]) == ("Q5_K", "Q6_K", "F16", "F16")
    assert {tensor.name for tensor in found.tensors if tensor.pinned} == {OUT_0}


# ---------------------------------------------------------------- what is said beside the types


def test_a_recipe_says_what_it_is_for_and_where_it_comes_from(choices: Choices) -> None:
    found = made(choices, "same-as:Q4_K_M")
    assert (found.recipe_version, found.qres_version) == (RECIPE_VERSION, __version__)
    assert (found.model, found.architecture, found.fingerprint) == ("trained llama", "llama", "f1d0")
    assert (found.purpose, found.imatrix, found.imatrix_digest) == ("any", "", "")
    assert found.selection == Selection("built-in rank text, 4 chunks", "held.txt, 128 chunks", 128, ("5d7e", "90ab"))
    assert (found.refinement, found.built, found.verification) == (None, None, None)


def test_texts_that_do_not_say_how_many_chunks_they_are_get_their_number() -> None:
    result = ex.example()
    settings = replace(result.settings, text="mine.txt", chunks=1, rank_text="other.txt", rank_chunks=2)
    selection = made(Choices(replace(result, settings=settings)), "5bpw").selection
    assert (selection.rank_text, selection.report_text) == ("other.txt, 2 chunks", "mine.txt, 1 chunk")


def test_a_recipe_names_its_importance_matrix() -> None:
    result = ex.example()
    assert result.prediction is not None
    sensitivity = replace(result.prediction, imatrix="m.gguf", imatrix_digest="12ab")
    found = made(Choices(replace(result, prediction=sensitivity)), "5bpw")
    assert (found.imatrix, found.imatrix_digest) == ("m.gguf", "12ab")


@pytest.mark.parametrize(
    ("budget", "base"),
    [
        ("same-as:Q4_K_M", "Q4_K_M"),
        ("same-as:Q6_K", "Q6_K"),
        ("same-as:Q4_K_S", "Q4_K_S"),  # of one size with Q4_0
        ("6.0bpw", "Q4_K_M"),
        ("6.5bpw", "Q5_K_M"),
        ("7.05bpw", "Q6_K"),
        ("16bpw", "Q8_0"),
        ("kld:0.00099", "Q6_K"),
    ],
)
def test_the_file_is_made_as_the_level_of_its_size(choices: Choices, budget: str, base: str) -> None:
    assert made(choices, budget).base == base


def test_a_file_is_never_made_as_a_level_that_takes_no_rules() -> None:
    half = ex.level("F16", 1e-6, {**Q4, **dict.fromkeys(OPTIONS, "F16")}, kld_se=1e-7)
    found = made(Choices(replace(ex.example(), levels=(*ex.example().levels, half))), "same-as:F16")
    assert found.base == "Q8_0"


@pytest.mark.parametrize(
    ("bpw", "levels"),
    [
        (6.02, ("Q4_K_M", "Q5_K_M")),  # 6.017 bits
        (6.01, ("Q4_K_M", "Q5_K_M")),  # near enough
        (5.9, ("Q4_K_S", "Q4_K_M")),  # of two of one size the better one
        (6.52, ("Q5_K_M", "Q6_K")),
        (8.6, ("Q8_0",)),
        (15.0, ("Q8_0",)),
        (4.6, ("Q2_K", "Q4_0")),
    ],
)
def test_beside_a_recipe_is_the_level_of_its_size_and_the_next_one_up(
    choices: Choices, bpw: float, levels: tuple[str, ...]
) -> None:
    found = plan._stock(choices, int(bpw * N_WEIGHTS / 8))
    assert tuple(row.level for row in found) == levels
    for row in found:
        assert row.bytes == ex.data_bytes(LADDER[row.level])
        if row.level != "Q2_K":
            assert row.predicted is not None
            assert row.predicted.kld == pytest.approx(ex.calibrated(ex.loss(LADDER[row.level])))


def test_of_levels_of_about_one_size_the_better_one_is_beside_a_recipe() -> None:
    worse = {**LADDER["Q4_0"], UNPREDICTED: "Q5_1"}  # 0.3 % larger than Q4_K_S
    ladder = tuple(replace(one, types=tuple(worse.values())) if one.level == "Q4_0" else one for one in LADDERS)
    found = Choices(replace(ex.example(), ladder=ladder))
    for size in (ex.data_bytes(worse), ex.data_bytes(LADDER["Q4_K_S"])):
        assert [row.level for row in plan._stock(found, size)] == ["Q4_K_S", "Q4_K_M"]


def test_a_much_smaller_level_is_not_of_a_recipes_size_even_if_it_is_better() -> None:
    worse = {**Q4, DOWN_0: "Q5_K", UNPREDICTED: "F16"}  # 1.1 % larger than Q4_K_M
    ladder = (Rung("Q5_K_S", tuple(worse.values())), *LADDERS)
    found = plan._stock(Choices(replace(ex.example(), ladder=ladder)), ex.data_bytes(worse))
    assert [row.level for row in found] == ["Q5_K_S", "Q5_K_M"]


def test_a_level_without_prediction_is_no_rival_where_there_is_another_of_its_size() -> None:
    unknown = {**LADDER["Q4_K_S"], OUT_0: "Q4_0"}  # the same bytes
    ladder = (Rung("Q3_K_L", tuple(unknown.values())), *LADDERS)
    found = plan._stock(Choices(replace(ex.example(), ladder=ladder)), ex.data_bytes(unknown))
    assert [row.level for row in found] == ["Q4_K_S", "Q4_K_M"]


def test_levels_beside_a_recipe_that_is_smaller_than_all(choices: Choices) -> None:
    assert [row.level for row in plan._stock(choices, 1)] == ["Q2_K", "Q4_0"]


def test_stock_has_the_usual_levels_smallest_first() -> None:
    result = replace(ex.example(), levels=(*ex.example().levels, ex.level("mine", 0.1, LADDER["Q4_0"])))
    found = list(Choices(result).stock)
    assert [row.level for row in found] == ["Q2_K", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    assert found[0].predicted is None


def test_what_the_quantizer_is_told_leaves_out_what_it_copies(choices: Choices) -> None:
    found = made(choices, "6bpw")
    told = found.quantized
    assert list(told) == [name for name in NAMES if name not in {NORM, ROUTER, OTHER_NORM}]
    assert told.items() <= types_of(found).items()
