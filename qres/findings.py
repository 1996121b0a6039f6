"""What was found to be wrong with the numbers, as records: part of a result, like `qres.records`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NonFinite:
    """Where a model's values stop being finite: the first computation whose output is not."""

    model: str
    """`reference`, or the level."""
    unit: str
    """The branch that it happens in, such as `3.ffn`; `head` behind the last one; empty when the stream was not
    mapped."""
    layer: int | None
    operation: str
    """ggml's operation, such as `MUL_MAT`."""
    label: str
    """llama.cpp's name for its output."""
    tensor: str
    """The weight that enters there; empty when there is none."""
    token: int | None
    """First position in the chunk that is affected."""
    where: str
    """Which chunk."""
    input_absmax: float | None
    """Largest finite magnitude that the weight was multiplied with."""
    broken_weights: tuple[str, ...] = ()
    """Tensors of the file that hold values that are not finite themselves."""

    @property
    def place(self) -> str:
        """Where, in words."""
        unit = self.unit or (f"layer {self.layer}" if self.layer is not None else "a place before the first layer")
        using = f" with {self.tensor}" if self.tensor else ""
        token = f"from token {self.token} of {self.where} on" if self.token is not None else f"in {self.where}"
        return f"in {unit} ({self.operation}{using}, {token})"


@dataclass(frozen=True)
class Extreme:
    """A magnitude beyond 65504, the largest 16-bit float, or beyond half of it."""

    model: str
    what: str
    """`weight`: a value of the tensor; `input`: what the tensor is multiplied with; `stream`: the residual stream."""
    layer: int | None
    name: str
    """The tensor, or the stream point."""
    absmax: float


@dataclass(frozen=True)
class SharedTensors:
    """Matrices that two files hold byte for byte alike."""

    a: str
    b: str
    tensors: int
    of: int
    bytes: int
