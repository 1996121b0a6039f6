"""Split models: any part gives the whole set, and what is wrong with a set is named."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from qres.errors import InputError
from qres.gguf import difference, fallbacks, model_file
from qres.gguf.pairing import pair
from tests.gguf.building import LLAMA, ROWS, VALID, Typed, break_split, build, put, put_split, shard


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
    assert pair(single, split).problem == ""
    assert difference.tokenizer_differences(single, split) == ()
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
