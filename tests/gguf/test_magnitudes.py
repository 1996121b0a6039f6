"""The scan of tensor data against numpy in float64, for every type and every way of cutting a tensor into pieces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from qres.errors import InputError
from qres.gguf import magnitudes, model_file
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes, scan
from qres.levels import F16_MAX

Bits = npt.NDArray[Any]
FLOATS = {"F16": "<u2", "BF16": "<u2", "F32": "<u4", "F64": "<u8"}
QUANTIZED = sorted(kind.name for kind in quants._type_traits if kind.name not in FLOATS)


def write(path: Path, tensors: Mapping[str, tuple[str, Bits]]) -> Inventory:
    """A file of tensors given as type and raw bytes (or bits), and what it holds."""
    writer = GGUFWriter(path, "llama")
    for name, (kind, data) in tensors.items():
        raw = np.frombuffer(data.tobytes(), np.uint8) if data.size else np.zeros(0, np.uint8)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model_file.read(path)


def as_float64(kind: str, bits: Bits) -> npt.NDArray[np.float64]:
    """What the bits of a float type mean."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # a signalling NaN
        if kind == "BF16":
            bits = bits.astype("<u4") << 16
        return np.asarray(bits.view(bits.dtype.str.replace("u", "f")), np.float64)


def expected(name: str, values: npt.NDArray[np.float64]) -> Magnitudes:
    """The same by plain numpy."""
    bad = ~np.isfinite(values)
    return Magnitudes(
        tensor=name,
        absmax=float(np.abs(values[~bad]).max(initial=0.0)),
        n_nan=int(np.isnan(values).sum()),
        n_inf=int(np.isinf(values).sum()),
        first_bad=int(np.flatnonzero(bad)[0]) if bad.any() else None,
    )


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts at 1024 weights between threads, and at 512 or fewer within them."""
    monkeypatch.setattr(magnitudes, "_RANGE_WEIGHTS", 1024)
    monkeypatch.setattr(magnitudes, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(magnitudes, "_PIECE_WEIGHTS", 512)


# ---------------------------------------------------------------- floats


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("size", [1, 511, 512, 513, 1024, 1025, 5000])
@pytest.mark.usefixtures("small_pieces")
def test_random_bits(tmp_path: Path, kind: str, size: int) -> None:
    rng = np.random.default_rng([size, *kind.encode()])
    width = np.dtype(FLOATS[kind]).itemsize
    anything = rng.integers(0, 256, size * width, np.uint8).view(FLOATS[kind])
    finite = anything & np.array((1 << (8 * width - 2)) - 1, FLOATS[kind])  # the exponent's upper half is not used
    found = scan(write(tmp_path / "m.gguf", {"any": (kind, anything), "finite": (kind, finite)}), threads=3)
    assert found == (expected("any", as_float64(kind, anything)), expected("finite", as_float64(kind, finite)))
    assert found[1].first_bad is None


SPECIAL = {
    "F16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF],
    "BF16": [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF],
    "F32": [0, 1 << 31, 1, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000],
    "F64": [
        0,
        1 << 63,
        1,
        0x7FEFFFFFFFFFFFFF,
        0xFFEFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0xFFF0000000000000,
        0x7FF << 52 | 1,
    ],
}
"""Zeros of both signs, subnormals, the largest numbers, infinities, quiet and signalling NaN."""


@pytest.mark.parametrize("kind", FLOATS)
def test_special_values_one_by_one_and_together(tmp_path: Path, kind: str) -> None:
    bits = np.array(SPECIAL[kind], FLOATS[kind])
    tensors = {f"t{i}": (kind, bits[i : i + 1]) for i in range(bits.size)} | {"all": (kind, bits)}
    found = scan(write(tmp_path / "m.gguf", tensors))
    assert found == tuple(expected(name, as_float64(kind, data)) for name, (_, data) in tensors.items())
    assert found[-1].n_bad == found[-1].n_nan + found[-1].n_inf > 2


def test_the_index_of_the_first_bad_value_counts_through_the_tensor(tmp_path: Path) -> None:
    values = np.ones(10_000_000, np.float16)  # more than one piece
    values[[9_999_990, 9_999_991]] = np.inf, np.nan
    (found,) = scan(write(tmp_path / "m.gguf", {"w": ("F16", values)}), threads=2)
    assert found == Magnitudes("w", absmax=1.0, n_nan=1, n_inf=1, first_bad=9_999_990)


# ---------------------------------------------------------------- quantized


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.usefixtures("small_pieces")
def test_quantized_types_are_decoded(tmp_path: Path, kind: str, blocks: int) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng([blocks, *kind.encode()]).integers(0, 256, (blocks, block_bytes), np.uint8)
    found = scan(write(tmp_path / "m.gguf", {"w": (kind, raw)}), threads=2)
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind]).astype(np.float64).ravel()
    assert values.size == blocks * block_size
    assert found == (expected("w", values),)


def test_a_broken_scale_is_found(tmp_path: Path) -> None:
    raw = quants.quantize(np.ones((4, 64), np.float32), GGMLQuantizationType.Q8_0).reshape(8, 34)
    raw[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    (found,) = scan(write(tmp_path / "m.gguf", {"w": ("Q8_0", raw)}))
    assert (found.n_nan, found.n_inf, found.first_bad) == (32, 0, 160)
    assert found.absmax == pytest.approx(1, rel=1e-3)


# ---------------------------------------------------------------- what cannot be looked at


def test_empty_tensors_and_files(tmp_path: Path) -> None:
    tensors = {"none": ("F16", np.zeros(0, np.uint16)), "one": ("F16", np.full(1, 0x3C00, np.uint16))}
    assert scan(write(tmp_path / "m.gguf", tensors)) == (Magnitudes("none"), Magnitudes("one", absmax=1.0))
    assert scan(write(tmp_path / "empty.gguf", {})) == ()


def test_reasons_for_not_looking(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    zeros = np.zeros(512, np.uint8)
    write(path, {"ids": ("I32", zeros), "q8_k": ("Q8_K", zeros[:292]), "odd": ("I8", zeros), "new": ("I8", zeros)})
    data = bytearray(path.read_bytes())
    for name, type_id in ((b"odd", 99), (b"new", 41)):
        at = data.index(name) + 3 + 4 + 8  # behind the name, the number of dimensions and the one dimension
        data[at : at + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(data)
    found = scan(model_file.read(path))
    assert [(values.tensor, values.not_checked) for values in found] == [
        ("ids", "it holds integers"),
        ("q8_k", "gguf-py cannot decode Q8_K"),
        ("odd", "its size is unknown"),
        ("new", "gguf-py cannot decode Q1_0"),
    ]
    assert not any(values.checked or values.n_bad or values.beyond_f16 for values in found)


def test_a_truncated_file_is_looked_at_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, {"a": ("F32", np.ones(64, np.float32)), "b": ("F32", np.ones(64, np.float32))})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    found = scan(model_file.read(path, tolerant=True))
    assert found == (Magnitudes("a", 1.0), Magnitudes("b", not_checked="the file ends before it does"))


def test_a_file_that_is_cut_off_or_gone_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    found = write(path, {"a": ("F32", np.ones(1000, np.float32)), "b": ("F32", np.ones(1000, np.float32))})
    size = path.stat().st_size
    monkeypatch.setattr(magnitudes, "_file_bytes", lambda _path: size)
    with path.open("r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(InputError, match=r"m\.gguf became shorter while it was read"):
        scan(found, threads=2)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*m\.gguf: No such file"):
        scan(found)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"cannot read .*m\.gguf: No such file"):
        scan(found)


# ---------------------------------------------------------------- the rest


@pytest.mark.usefixtures("small_pieces")
def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensors: dict[str, tuple[str, Bits]] = {
        "a": ("F32", np.ones(3000, np.float32)),
        "b": ("Q8_0", np.zeros(34 * 50, np.uint8)),
    }
    scan(write(tmp_path / "m.gguf", tensors), lambda done, total: seen.append((done, total)), threads=4)
    total = 12_000 + 34 * 50
    assert seen == sorted(seen)
    assert len(seen) == 3 + 2
    assert seen[-1] == (total, total)


def test_several_files(tmp_path: Path) -> None:
    for number in (1, 2):
        writer = GGUFWriter(tmp_path / f"m-0000{number}-of-00002.gguf", "llama")
        for key, value in (("no", number - 1), ("count", 2)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(f"t{number}", np.full(64, number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = scan(model_file.read(tmp_path / "m-00002-of-00002.gguf"))
    assert [(values.tensor, values.absmax) for values in found] == [("t1", 1.0), ("t2", 2.0)]


@pytest.mark.parametrize(
    ("absmax", "near", "beyond"),
    [
        (0.0, False, False),
        (F16_MAX / 2, False, False),
        (40000.0, True, False),
        (F16_MAX, True, False),
        (np.nextafter(F16_MAX, np.inf), True, True),
    ],
)
def test_range_of_f16(absmax: float, near: bool, beyond: bool) -> None:
    values = Magnitudes("w", absmax=absmax)
    assert (values.near_f16, values.beyond_f16) == (near, beyond)
    assert np.finfo(np.float16).max == F16_MAX
