"""Memory needed against memory usable, and the level advised for each device."""

from __future__ import annotations

import dataclasses

import pytest

from qres.advice import devices
from qres.advice.devices import DEVICES, GIB, deployment, device_advice
from qres.records.devices import DeviceAdvice
from qres.records.result import Level
from tests.examples.levels import changed_level
from tests.examples.result import example

MIB = 2**20


def level(name: str, mib: int, kld: float | None, good: bool) -> Level:
    base = example().levels[1]
    output = dataclasses.replace(
        base.output, kld_mean=kld, same_top=0.95 if good else 0.5, ln_ppl_ratio=0.01, ln_ppl_ratio_se=0.0
    )
    return changed_level(base, name=name, bytes=mib * MIB, output=output)


def advise(levels: list[Level], memory: dict[int, tuple[int, int]]) -> dict[str, DeviceAdvice]:
    rows = deployment(levels, {one.name: one.file.bytes for one in levels}, memory)
    return {row.device: row for row in device_advice(levels, rows)}


def test_deployment_adds_up() -> None:
    levels = [level("Q4_K_M", 1000, 0.05, True), level("Q8_0", 1500, 0.01, True)]
    weights = {"Q4_K_M": 999 * MIB, "Q8_0": 1499 * MIB}  # what is loaded, not the size of the file
    rows = deployment(levels, weights, {2048: (100 * MIB, 50 * MIB), 4096: (200 * MIB, 60 * MIB)})
    assert len(rows) == len(DEVICES) * 2 * 2
    assert len({(row.device, row.n_ctx, row.level) for row in rows}) == len(rows)
    for row in rows:
        cache, compute = {2048: (100, 50), 4096: (200, 60)}[row.n_ctx]
        assert (row.cache_bytes, row.compute_bytes) == (cache * MIB, compute * MIB)
        assert row.weights_bytes == weights[row.level]
        assert row.needed_bytes == row.weights_bytes + row.cache_bytes + row.compute_bytes
        assert row.fits == (row.needed_bytes <= row.usable_bytes)
    usable = {row.device: (row.ram_bytes, row.usable_bytes) for row in rows}
    assert usable["phone, 6 GB"] == (6 * GIB, 3 * GIB)
    assert usable["laptop, 16 GB"] == (16 * GIB, int(11.2 * GIB))


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_deployment_fits_to_the_byte(more: int, fits: bool) -> None:
    one = level("Q4_K_M", 1, 0.05, True)
    rows = deployment([one], {"Q4_K_M": GIB}, {2048: (GIB // 2, GIB // 2 + more)})
    (row,) = (row for row in rows if row.device == "phone, 4 GB")
    assert row.usable_bytes == 2 * GIB
    assert row.fits is fits


def test_device_advice_is_the_smallest_good_level_that_fits() -> None:
    levels = [
        level("Q8_0", 5000, 0.001, True),
        level("Q2_K", 1000, 0.9, False),
        level("Q5_K_M", 2500, 0.01, True),
        level("Q4_K_M", 2000, 0.03, True),
    ]
    found = advise(levels, {4096: (10 * MIB, 10 * MIB)})
    assert list(found) == [device.name for device in DEVICES]
    small, large = found["phone, 4 GB"], found["laptop, 16 GB"]
    assert (small.level, large.level) == ("Q4_K_M", "Q4_K_M")
    assert (large.n_ctx, large.kld_mean) == (4096, 0.03)
    assert large.reason == "smallest good level that fits: needs 1.97 of 11.2 GiB usable"


def test_device_advice_without_good_level_is_the_least_damaged_that_fits() -> None:
    levels = [
        level("Q8_0", 5000, 0.001, True),
        level("Q2_K", 1000, 0.9, False),
        level("Q3_K_M", 1500, 0.3, False),
    ]
    found = advise(levels, {4096: (0, 0)})
    assert found["phone, 4 GB"].level == "Q3_K_M"
    assert found["phone, 4 GB"].reason.startswith("least damaged level that fits; none that fits is good")
    assert found["phone, 12 GB"].level == "Q8_0"


def test_device_advice_where_none_fits() -> None:
    found = advise([level("Q8_0", 9000, 0.001, True), level("Q6_K", 7000, 0.002, True)], {2048: (0, 1024 * MIB)})
    small = found["phone, 4 GB"]
    assert (small.level, small.kld_mean) == (None, None)
    assert small.reason == "no measured level fits: the smallest needs 7.84 GiB, 2.0 GiB are usable"
    assert found["laptop, 16 GB"].level == "Q6_K"


@pytest.mark.parametrize(
    ("contexts", "n_ctx"), [((2048, 4096, 8192), 4096), ((2048,), 2048), ((512, 2048), 2048), ((8192, 4096), 4096)]
)
def test_device_advice_takes_the_advice_context_or_the_longest_below(contexts: tuple[int, ...], n_ctx: int) -> None:
    found = advise([level("Q8_0", 100, 0.001, True)], dict.fromkeys(contexts, (0, 0)))
    assert {row.n_ctx for row in found.values()} == {n_ctx}


def test_device_advice_takes_the_memory_of_its_context() -> None:
    levels = [level("Q8_0", 100, 0.001, True)]
    found = advise(levels, {2048: (0, 0), 4096: (10 * GIB, 0), 8192: (0, 0)})
    assert found["phone, 12 GB"].level is None
    assert found["laptop, 16 GB"].level == "Q8_0"


def test_device_advice_without_contexts() -> None:
    one = level("Q8_0", 100, 0.001, True)
    assert advise([one], {}) == {}
    assert advise([one], {8192: (0, 0)}) == {}
    assert device_advice([], ()) == ()


def test_device_advice_leaves_out_levels_without_figures() -> None:
    found = advise([level("Q2_K", 100, None, True), level("Q8_0", 200, 0.001, True)], {4096: (0, 0)})
    assert {row.level for row in found.values()} == {"Q8_0"}
    found = advise([level("Q2_K", 100, None, True)], {4096: (0, 0)})
    assert {row.level for row in found.values()} == {None}


def test_devices_are_distinct_and_leave_something_to_the_system() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    assert all(0 < device.share < 1 for device in DEVICES)
    text = " ".join(devices.ASSUMPTIONS)
    assert "50%" in text  # the assumed shares are said, not hidden
    assert "70%" in text
    assert devices.ADVICE_CONTEXT in devices.CONTEXTS


def test_deployment_of_nothing() -> None:
    assert deployment([], {}, {2048: (1, 1)}) == ()
    assert deployment([level("Q8_0", 1, 0.1, True)], {"Q8_0": 1}, {}) == ()
