"""The state of an unfinished scan: what comes back is what was kept, to the bit, and nothing else can come back."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from qres.errors import InputError
from qres.measure import checkpoint, summary
from qres.measure.state import LevelStats, State
from qres.metrics.means import ChunkMean
from qres.metrics.output import OutputStats, TokenScores, score, score_reference
from qres.metrics.quantiles import Quantiles
from qres.records.stream import NoiseFloor, NonFinite
from qres.residual.capture import Snapshot
from qres.residual.drift import DriftStats, HealthStats, reference_norms
from qres.sensitivity.prediction import PredictionSums, TensorSums

TOKENS, WIDTH, POINTS, VOCAB = 16, 8, 4, 40
READS = (0, 1, 2)
ABOUT = {"reference": "a.gguf 100", "levels": "Q8_0: b.gguf 50", "--n-ctx": "64"}

FOUND = NonFinite("reference", "1.ffn", 1, "MUL_MAT", "ffn_out-1", "blk.1.ffn_down.weight", 40, "chunk 2", 1e6, ("a",))


def snapshot(random: np.random.Generator, scale: float = 1.0) -> Snapshot:
    """A stream of `POINTS` points, each the one before and its branch."""
    stream = [random.normal(0, scale, (TOKENS, WIDTH)).astype(np.float32)]
    branches = [random.normal(0, scale / 4, (TOKENS, WIDTH)).astype(np.float32) for _ in range(POINTS - 1)]
    for branch in branches:
        stream.append(stream[-1] + branch)
    return Snapshot(tuple(stream), tuple(branches), {}, {})


def add_chunk(state: State, seed: int) -> None:
    """One chunk of made-up decodes, through the same methods that a scan calls."""
    random = np.random.default_rng(seed)
    ids = tuple(int(i) for i in random.integers(0, VOCAB, 2 * TOKENS))
    logits = random.normal(0, 2, (len(ids), VOCAB)).astype(np.float32)
    reference = snapshot(random)
    known = reference_norms(reference, 1)
    scored = score_reference(logits, ids)
    assert state.health is not None
    state.health.update(reference, known, READS, 1)
    for stats in (*state.rank, *state.report):
        noisy = logits + random.normal(0, 0.1, logits.shape).astype(np.float32)
        noisy[-3] = np.nan  # a position that is left out
        scores = score(scored, noisy)
        stats.output.update(scores)
        level = snapshot(random)
        errors = tuple(random.normal(0, 0.01, (TOKENS, WIDTH)).astype(np.float32) for _ in range(POINTS))
        assert stats.drift is not None
        stats.drift.update(reference, known, level, errors, READS, 1)
        for unit in (0, 2, POINTS):
            stats.units.setdefault(unit, ChunkMean()).update(scores.kld * random.random())
        stats.all_injected.update(scores.kld)
        stats.without_kept.update(scores.kld / 3)
    state.rank_done += 1


def new_state(levels: int = 2) -> State:
    def stats() -> list[LevelStats]:
        return [LevelStats(OutputStats(), DriftStats(POINTS)) for _ in range(levels)]

    return State(
        rank=stats(),
        report=stats(),
        health=HealthStats(POINTS),
        chosen={0: (2, 0, 1), 1: ()},
        n_units=3,
        noise=NoiseFloor(1.1e-9, None, (0.0, None, 2.5e-5), drift_reason="none", measured_drift=1.5),
        inputs={"blk.0.ffn_down.weight": 43_882.1875, "output.weight": 1 / 3},
        failed={1: "llama.cpp cannot load it: “why”"},
        non_finite={"reference": FOUND, "Q8_0": dataclasses.replace(FOUND, token=None, input_absmax=None)},
    )


def same(a: object, b: object) -> bool:  # noqa: PLR0911 - one per kind of value
    """Equal in type and in every bit, all the way down."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float):  # NumPy's too: they come back as Python's, which hold the same bits
        return isinstance(b, float) and np.float64(a).tobytes() == np.float64(b).tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or isinstance(a, bool | int | str):
        return a == b
    return same(vars(a), vars(b))


def there_and_back(path: Path, state: State) -> State:
    checkpoint.save(path, state, ABOUT)
    found = checkpoint.load(path, ABOUT)
    assert found is not None
    return found


def figures(state: State) -> list[object]:
    """Everything that a result takes from the statistics."""
    out: list[object] = []
    for stats in (*state.rank, *state.report):
        assert stats.drift is not None
        out.append(stats.output.compute())
        drift = stats.drift
        for quantiles in (drift.ratio, drift.drift, drift.one_minus_cosine, drift.local, drift.injected):
            out.append([quantiles.quantile(q, row) for q in (0.5, 0.95, 1.0) for row in range(POINTS)])
        out.append([(unit, mean.mean, mean.se) for unit, mean in stats.units.items()])
        out.append([stats.all_injected.mean, stats.without_kept.se, drift.share.tolist(), drift.generated.tolist()])
    assert state.health is not None
    out.append([state.health.norm.quantile(0.5, row) for row in range(POINTS)])
    out.append([state.health.sums.tolist(), state.health.absmax.tolist(), state.health.tokens, state.health.massive])
    out.append(summary.comparisons(["a", "b"], state.report))
    return out


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_state_comes_back_to_the_bit(tmp_path: Path, chunks: int) -> None:
    state = new_state()
    for seed in range(chunks):
        add_chunk(state, seed)
    found = there_and_back(tmp_path / "state.npz", state)
    assert same(state, found)
    changed = new_state()
    for seed in range(chunks):
        add_chunk(changed, seed + 100)
    assert same(changed, found) == (chunks == 0)  # the comparison can tell states apart


def test_state_that_never_began_comes_back(tmp_path: Path) -> None:
    assert same(there_and_back(tmp_path / "state.npz", State()), State())


def test_state_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    """Cut off after every chunk, a scan ends with the figures of one that was not."""
    through, cut = new_state(), new_state()
    for seed in range(4):
        add_chunk(through, seed)
        add_chunk(cut, seed)
        cut = there_and_back(tmp_path / "state.npz", cut)
    assert figures(cut) == figures(through)
    assert same(cut, through)


def test_state_loaded_twice_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    state = new_state()
    add_chunk(state, 0)
    one = there_and_back(path, state)
    before = figures(one)
    other = checkpoint.load(path, ABOUT)
    assert other is not None
    add_chunk(other, 1)
    assert figures(one) == before


def test_state_of_a_scan_without_a_map_comes_back(tmp_path: Path) -> None:
    state = State(rank=[LevelStats(OutputStats(), None)], report=[LevelStats(OutputStats(), None)])
    found = there_and_back(tmp_path / "state.npz", state)
    assert found.health is None
    assert found.noise is None
    assert found.report[0].drift is None


RANDOM = np.random.default_rng(0)


def quantiles(rows: int) -> Quantiles:
    made = Quantiles(rows)
    made.update(10 ** RANDOM.uniform(-14, 14, (rows, 50)))
    made.update(np.array([[np.inf, np.nan, 0.0]] * rows))
    return made


def chunk_mean() -> ChunkMean:
    made = ChunkMean()
    for size in (3, 0, 5):
        made.update(RANDOM.random(size))
    return made


def output_stats() -> OutputStats:
    made = OutputStats()
    n = 7
    columns = RANDOM.random((5, n))
    made.update(
        TokenScores(
            kld=columns[0], nll=columns[1], nll_reference=columns[2], same_top=columns[3] > 0.5,
            position=columns[4], confidence=columns[3], nonfinite=2,
        )
    )  # fmt: skip
    return made


def drift_stats() -> DriftStats:
    state = new_state(1)
    add_chunk(state, 5)
    assert state.rank[0].drift is not None
    return state.rank[0].drift


def health_stats() -> HealthStats:
    state = new_state(1)
    add_chunk(state, 6)
    assert state.health is not None
    return state.health


@pytest.mark.parametrize(
    "make",
    [
        lambda: quantiles(1),
        lambda: quantiles(40),  # more histogram entries than are stored one by one
        chunk_mean,
        output_stats,
        drift_stats,
        health_stats,
        lambda: NoiseFloor(None, math.inf, (0.0, -0.0, None)),
        lambda: FOUND,
        lambda: LevelStats(output_stats(), drift_stats(), {3: chunk_mean(), 0: chunk_mean()}),
    ],
    ids=["Quantiles", "Quantiles-40", "ChunkMean", "OutputStats", "DriftStats", "HealthStats", "NoiseFloor",
         "NonFinite", "LevelStats"],
)  # fmt: skip
def test_every_class_comes_back(tmp_path: Path, make: Callable[[], Any]) -> None:
    thing = make()
    found = there_and_back(tmp_path / "state.npz", State(rank=[thing]))
    assert same(found.rank[0], thing)


def test_every_class_that_a_state_holds_is_in_the_list(tmp_path: Path) -> None:
    """A class that is written but not read would make every resumed scan fail."""
    state = new_state()
    add_chunk(state, 0)
    state.prediction = PredictionSums(tensors=[TensorSums("a", 0, {"Q4_0": [[1.0]]})])
    checkpoint.save(tmp_path / "state.npz", state, ABOUT)
    with np.load(tmp_path / "state.npz") as arrays:
        tree = arrays["tree"].tobytes().decode()
    named = {part.split('"')[0] for part in tree.split('{"class": "')[1:]}
    assert named == set(checkpoint._CLASSES)


PLAIN: list[object] = [
    None, True, False, 0, -1, 2**70, "", "ünïcode \u2028 \"quoted\"", 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1,
    math.inf, -math.inf, math.nan, (), [], {}, (1, (2.5, [None, {}])), [[], [()]],
    {1: "int", -3: {0: (1,)}, "1": "text"}, {(1, 2): "pair"}, {"array": "a0", "class": "State", "dict": []},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(tmp_path: Path, value: object) -> None:
    found = there_and_back(tmp_path / "state.npz", State(failed={0: value}))  # type: ignore[dict-item]
    assert same(found.failed[0], value)


def _large(kind: str) -> npt.NDArray[Any]:
    """More entries than are stored one by one, and nearly all of them 0."""
    values = np.zeros((3, 5000), dtype=kind)
    values[0, 1], values[2, 4999], values[1, 2500] = 1, 7, 3
    return values


ARRAYS: list[npt.NDArray[Any]] = [
    np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324]),
    np.zeros((0, 4)),
    np.full((), 2.5),
    np.arange(12, dtype=np.uint32).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array([True, False]),
    _large("f8"), _large("u4"), _large("i8"), _large("f4"),
    np.asfortranarray(_large("f8")),
    np.zeros((2, 4096)),
    np.full(4097, np.nan),
    RANDOM.normal(size=(5, 4000)),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_arrays_come_back_and_can_be_added_to(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    found = there_and_back(tmp_path / "state.npz", State(rank=[array])).rank[0]  # type: ignore[list-item]
    assert isinstance(found, np.ndarray)
    assert same(found, array)
    assert found.flags.writeable
    found += found  # as the running sums do


def test_numpy_scalars_come_back_as_numbers(tmp_path: Path) -> None:
    values = [np.float32(0.1), np.float64(np.nan), np.int64(-5), np.uint32(7), np.bool_(True)]
    found = there_and_back(tmp_path / "state.npz", State(failed={0: values}))  # type: ignore[dict-item]
    assert same(found.failed[0], [float(np.float32(0.1)), math.nan, -5, 7, True])


def test_nearly_empty_histograms_take_little_room(tmp_path: Path) -> None:
    """A histogram of 30 layers is 3 MB; written after every chunk, it has to be small."""
    state = new_state()
    for seed in range(3):
        add_chunk(state, seed)
    checkpoint.save(tmp_path / "state.npz", state, ABOUT)
    whole = sum(
        q.counts.nbytes for s in (*state.rank, *state.report) if s.drift for q in (s.drift.drift, s.drift.local)
    )
    assert (tmp_path / "state.npz").stat().st_size < whole / 4


# ---------------------------------------------------------------- which scan it belongs to


def test_load_without_a_file_is_nothing(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "state.npz", ABOUT) is None


@pytest.mark.parametrize("key", list(ABOUT))
def test_load_names_the_first_difference(tmp_path: Path, key: str) -> None:
    checkpoint.save(tmp_path / "state.npz", new_state(), ABOUT)
    now = {name: value if name != key else "something else" for name, value in ABOUT.items()}
    with pytest.raises(InputError) as caught:
        checkpoint.load(tmp_path / "state.npz", now)
    assert f"its {key} was {ABOUT[key]}, now it is something else" in caught.value.message
    assert "without --resume" in caught.value.hint


def test_load_names_the_first_of_several_differences(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "state.npz", new_state(), ABOUT)
    now = {**ABOUT, "--n-ctx": "128", "levels": "Q4_K_M: c.gguf 20"}
    with pytest.raises(InputError, match=r"its levels was Q8_0: b.gguf 50, now it is Q4_K_M") as caught:
        checkpoint.load(tmp_path / "state.npz", now)
    assert "--n-ctx" not in caught.value.message


def test_load_compares_what_the_state_does_not_say(tmp_path: Path) -> None:
    """A setting that a later version compares: a state that says nothing of it is of another scan."""
    checkpoint.save(tmp_path / "state.npz", new_state(), ABOUT)
    with pytest.raises(InputError, match="its --new was None, now it is 1"):
        checkpoint.load(tmp_path / "state.npz", {**ABOUT, "--new": "1"})


# ---------------------------------------------------------------- what is no state


def write_tree(path: Path, tree: object, **arrays: Any) -> Path:  # noqa: ANN401 - numpy arrays
    """A well-made file with any tree in it."""
    np.savez(path, tree=np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8), **arrays)
    return path


def refuse(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, ABOUT)
    assert str(path) in caught.value.message
    assert "without --resume" in caught.value.hint
    return caught.value.message


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A good state."""
    state = new_state()
    add_chunk(state, 0)
    checkpoint.save(tmp_path / "state.npz", state, ABOUT)
    return tmp_path / "state.npz"


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_load_refuses_a_cut_off_state(kept: Path, share: float) -> None:
    data = kept.read_bytes()
    kept.write_bytes(data[: int(len(data) * share)])
    refuse(kept)


def test_load_refuses_an_empty_file(kept: Path) -> None:
    """What a power cut leaves of a file that was renamed before its data reached the disk."""
    kept.write_bytes(b"")
    refuse(kept)


@pytest.mark.parametrize("data", [b"not a state", b"\0" * 5000, b"PK\x03\x04" + b"\0" * 100, b"GGUF" * 50])
def test_load_refuses_foreign_bytes(kept: Path, data: bytes) -> None:
    kept.write_bytes(data)
    refuse(kept)


def test_load_refuses_changed_data(kept: Path) -> None:
    """A flipped bit within the arrays: the archive's own checksum."""
    data = bytearray(kept.read_bytes())
    with zipfile.ZipFile(kept) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    kept.write_bytes(data)
    assert "CRC" in refuse(kept)


def test_load_refuses_a_folder(tmp_path: Path) -> None:
    (tmp_path / "state.npz").mkdir()
    refuse(tmp_path / "state.npz")


def test_load_refuses_an_array_file(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(5))
    (tmp_path / "one.npy").rename(tmp_path / "state.npz")
    refuse(tmp_path / "state.npz")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_load_runs_nothing_that_is_pickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    path = tmp_path / "state.npz"
    path.write_bytes(pickle.dumps(Trap(sprung)))
    refuse(path)
    assert not sprung.exists()
    trapped = np.empty(1, dtype=object)
    trapped[0] = Trap(sprung)
    good = {"about": ABOUT, "state": {}}
    write_tree(path, good)
    with path.open("wb") as file:
        np.savez(file, tree=trapped)
    refuse(path)
    write_tree(path, {"dict": [["about", {"dict": []}], ["state", {"array": "a0"}]]}, a0=trapped)
    refuse(path)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))  # the trap itself works
    assert sprung.exists()


def tree_of(state: object) -> dict[str, object]:
    return {"dict": [["about", {"dict": [list(row) for row in ABOUT.items()]}], ["state", state]]}


EMPTY = {"class": "State", "of": {"dict": []}}


def test_load_takes_a_hand_made_state(tmp_path: Path) -> None:
    """So that what is refused below is refused for its own fault."""
    assert isinstance(checkpoint.load(write_tree(tmp_path / "state.npz", tree_of(EMPTY)), ABOUT), State)


@pytest.mark.parametrize(
    "name", ["Path", "object", "Session", "os.system", "qres.measure.checkpoint.State", "__import__", ""]
)
def test_load_makes_only_the_classes_it_knows(tmp_path: Path, name: str) -> None:
    path = write_tree(tmp_path / "state.npz", tree_of({"class": name, "of": {"dict": []}}))
    assert repr(name) in refuse(path)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        7,
        "text",
        {},
        {"dict": []},
        {"dict": [["state", EMPTY]]},
        {"dict": [["about", {"dict": []}]]},
        {"dict": [["about"]]},
        {"dict": 5},
        {"list": None},
        EMPTY,
        tree_of({"array": "a7"}),
        tree_of({"array": ["a0"]}),
        tree_of({"sparse": "a7", "shape": [3]}),
        tree_of({"sparse": "a0", "shape": [-1]}),
        tree_of({"sparse": "a0", "shape": "wide"}),
        tree_of({"class": "State"}),
        tree_of({"dict": [[{"list": []}, 1]]}),
        tree_of(None),
        tree_of({"list": []}),
        tree_of({"class": "ChunkMean", "of": {"dict": []}}),
    ],
    ids=lambda tree: json.dumps(tree)[:60],
)
def test_load_refuses_a_tree_that_is_no_state(tmp_path: Path, tree: object) -> None:
    path = write_tree(tmp_path / "state.npz", tree, a0=np.ones(2), a0_at=np.array([0, 1]))
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, ABOUT)
    assert "without --resume" in caught.value.hint


@pytest.mark.parametrize(
    "tree",
    [
        tree_of({"sparse": "a0", "shape": [1]}),  # IndexError: an index beyond the array
        tree_of({"class": "State", "of": {"list": []}}),  # AttributeError
        tree_of({"sparse": "a0", "shape": [2**50]}),  # MemoryError
        {"dict": [["about", {"list": []}], ["state", EMPTY]]},  # AttributeError, behind the try
    ],
    ids=lambda tree: json.dumps(tree)[-60:],
)
def test_load_refuses_a_made_up_tree(tmp_path: Path, tree: object) -> None:
    path = write_tree(tmp_path / "state.npz", tree, a0=np.ones(2), a0_at=np.array([0, 1]))
    with pytest.raises(InputError):
        checkpoint.load(path, ABOUT)


def test_load_refuses_a_deep_tree(tmp_path: Path) -> None:
    deep = '{"list": [' * 100_000 + "]}" * 100_000
    np.savez(tmp_path / "state.npz", tree=np.frombuffer(deep.encode(), dtype=np.uint8))
    refuse(tmp_path / "state.npz")


def unexpected(path: Path) -> str:
    """What `load` raises that is no InputError; as text, because the error itself keeps the file open."""
    try:
        checkpoint.load(path, ABOUT)
    except InputError:
        return ""
    except Exception as error:
        return repr(error)
    return ""


def test_load_refuses_a_damaged_archive(tmp_path: Path) -> None:
    """Every byte of the archive's own tables set to two other values: a state or an InputError, nothing else."""
    path = tmp_path / "state.npz"
    checkpoint.save(path, State(), ABOUT)
    good = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        start = archive.start_dir
    found = {}
    for at in (*range(60), *range(start, len(good))):
        for flip in (0xFF, 0x01):
            data = bytearray(good)
            data[at] ^= flip
            path.write_bytes(data)
            found[f"byte {at} ^ {flip}"] = unexpected(path)
    assert len(found) > 200
    assert {at: error for at, error in found.items() if error} == {}


def test_load_closes_what_it_refuses(kept: Path) -> None:
    kept.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(InputError) as caught:
        checkpoint.load(kept, ABOUT)
    still_open = [row.path for row in psutil.Process().open_files() if row.path == str(kept)]
    assert caught.value.__traceback__ is not None  # still held, and with it whatever its frames hold
    assert still_open == []


# ---------------------------------------------------------------- when it cannot be written


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_leaves_one_file(tmp_path: Path) -> None:
    for seed in range(2):
        state = new_state()
        add_chunk(state, seed)
        checkpoint.save(tmp_path / "state.npz", state, ABOUT)
        assert names(tmp_path) == ["state.npz"]
        found = checkpoint.load(tmp_path / "state.npz", ABOUT)
        assert same(found, state)  # the later one


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_save_that_fails_leaves_the_earlier_state(
    kept: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = kept.read_bytes()

    def full(file: io.BufferedWriter, **_arrays: object) -> None:
        file.write(b"PK half of it")
        file.flush()
        assert len(names(kept.parent)) == 2  # beside the earlier one, not over it
        raise error

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(type(error)):
        checkpoint.save(kept, State(), ABOUT)
    assert kept.read_bytes() == before
    assert names(kept.parent) == ["state.npz"]


def test_save_that_cannot_be_renamed_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "state.npz").mkdir()
    with pytest.raises(OSError, match="directory"):
        checkpoint.save(tmp_path / "state.npz", State(), ABOUT)
    assert names(tmp_path) == ["state.npz"]


def test_save_without_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint.save(tmp_path / "none" / "state.npz", State(), ABOUT)
