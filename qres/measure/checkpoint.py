"""The state of an unfinished scan in one file: what `--resume` goes on from.

Running statistics are plain objects of numbers, lists and arrays. They are written as a tree in JSON beside the arrays
in an `.npz`, not pickled: a file that someone else put there must not be able to run anything. Floats keep every bit,
so a resumed scan ends with the same figures. Histograms are nearly empty and stored as indices and counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qres.errors import InputError
from qres.files import whole_file
from qres.measure.state import LevelStats, State
from qres.metrics.means import ChunkMean
from qres.metrics.output import OutputStats
from qres.metrics.quantiles import Quantiles
from qres.records.stream import NoiseFloor, NonFinite
from qres.residual.drift import DriftStats, HealthStats
from qres.sensitivity.prediction import PredictionSums, TensorSums

_SPARSE = 4096
"""Arrays with more entries than this are stored without their zeros."""


_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(State, LevelStats, OutputStats, ChunkMean, Quantiles, DriftStats, HealthStats),
        *(NoiseFloor, NonFinite, PredictionSums, TensorSums),
    )
}


def save(path: Path, state: State, about: Mapping[str, str]) -> None:
    """Write the state beside its final name, then rename it.

    Args:
        path: File to write.
        state: What to keep.
        about: What the scan is, to be compared by `load`.

    Raises:
        OSError: it cannot be written; an earlier state is still there.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    tree = _encode({"about": dict(about), "state": state}, arrays)
    arrays["tree"] = np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8)
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load(path: Path, about: Mapping[str, str]) -> State | None:
    """The state in a file, None where there is none.

    Raises:
        InputError: the file is damaged, or belongs to another scan; the first difference is named.
    """
    try:
        with path.open("rb") as file:
            was, state = _read(file)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile raise a dozen kinds for bytes that are not theirs
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path} cannot be read: {reason}", "remove it, or scan without --resume") from None
    different = next((key for key in about if was.get(key) != about[key]), None)
    if different is not None:
        raise InputError(
            f"the unfinished scan in {path.parent} is another one: its {different} was {was.get(different)}, "
            f"now it is {about[different]}",
            "give the same arguments, or scan without --resume",
        )
    return state


def _read(file: BinaryIO) -> tuple[dict[str, str], State]:
    """What the scan was, and its state; any exception where the bytes are not what `save` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        found = _decode(json.loads(arrays["tree"].tobytes()), arrays)
    about, state = found["about"], found["state"]
    if not isinstance(about, dict) or not isinstance(state, State):
        raise ValueError("it holds no state of a scan")
    return about, state


def _encode(value: object, arrays: dict[str, npt.NDArray[Any]]) -> object:  # noqa: PLR0911 - one per kind of value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        key = f"a{len(arrays)}"
        if value.size > _SPARSE:
            at = np.flatnonzero(value)
            arrays[key], arrays[f"{key}_at"] = value.ravel()[at], at
            return {"sparse": key, "shape": list(value.shape)}
        arrays[key] = value
        return {"array": key}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encode(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]}
    return {"class": type(value).__name__, "of": _encode(vars(value), arrays)}


def _decode(tree: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: ANN401, PLR0911 - as `_encode`
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "sparse" in tree:
        values = arrays[tree["sparse"]]
        whole = np.zeros(tree["shape"], dtype=values.dtype)
        whole.ravel()[arrays[f"{tree['sparse']}_at"]] = values
        return whole
    if "dict" in tree:
        return {_decode(key, arrays): _decode(value, arrays) for key, value in tree["dict"]}
    if "list" in tree:
        return [_decode(item, arrays) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(_decode(item, arrays) for item in tree["tuple"])
    made: Any = object.__new__(_CLASSES[tree["class"]])
    for name, value in _decode(tree["of"], arrays).items():
        object.__setattr__(made, name, value)  # frozen records too
    return made
