"""Recipes as records: the type of every tensor, what that is predicted to do, and what it was measured to do.

Part of a result like the other records, and a file of their own, `recipe.json`. Whatever is called `predicted` was
calculated from one backward pass; what was measured is in a `Verification` or a `Refinement`.
"""

from __future__ import annotations

from dataclasses import dataclass

RECIPE_VERSION = 1
"""Of recipe.json; raised when a field changes its meaning or goes away."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the reference."""

    name: str
    shape: tuple[int, ...]
    """In ggml order: the row length first."""
    type: str
    type_16bit: str
    """`F16` or `BF16`: what holds it at 16 bit by its own values; empty for vectors, which stay as they are."""


@dataclass(frozen=True)
class Rung:
    """What llama.cpp makes of the reference at one level, by its dry run."""

    level: str
    types: tuple[str, ...]
    """Of each of `Result.tensors`."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a recipe."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int
    predicted_kld: float | None
    """Of this tensor alone, calibrated; None where nothing was predicted for the type, 0 at 16 bit."""
    quantizable: bool
    """False for what llama.cpp copies as it is: norms, biases, routers."""
    pinned: bool = False


@dataclass(frozen=True)
class Expected:
    """What a file is predicted to do, calibrated on the levels that the scan measured."""

    kld: float
    """Nats per token."""
    low: float
    high: float
    """95 % interval of what `qres verify` measures on `INTERVAL_CHUNKS` chunks of text like the scan's."""
    raw_kld: float
    """Sum of the predictions over all tensors."""
    factor: float
    """kld / raw_kld."""


@dataclass(frozen=True)
class Selection:
    """Where the figures come from that chose the types."""

    rank_text: str
    """Predictions."""
    report_text: str
    """Calibration."""
    n_ctx: int
    chunk_digests: tuple[str, ...]
    """Of all chunks of both: verification leaves them out."""


@dataclass(frozen=True)
class Stock:
    """A level of llama.cpp beside the recipe."""

    level: str
    bytes: int
    predicted: Expected | None


@dataclass(frozen=True)
class Built:
    """A file that was made from the recipe, after its types were read back."""

    file: str
    file_bytes: int
    tensor_bytes: int
    tensors: int
    """All of the planned type."""


@dataclass(frozen=True)
class Measure:
    """One file against the reference on the verification text."""

    name: str
    bytes: int
    """Of tensor data."""
    kld: float | None
    kld_se: float | None
    """Clustered by chunk, as the others."""
    same_top: float | None
    same_top_se: float | None
    ln_ppl_ratio: float | None
    ln_ppl_ratio_se: float | None
    drift: float | None
    """Median over tokens of the drift at the last stream point; None where the stream is not mapped."""


@dataclass(frozen=True)
class Pairing:
    """The recipe against a level on the same tokens."""

    level: str
    kld_difference: float | None
    """Recipe minus level."""
    kld_difference_se: float | None


@dataclass(frozen=True)
class Verification:
    """Predicted and measured, on text that chose nothing."""

    file: str
    text: str
    n_ctx: int
    chunks: int
    tokens: int
    recipe: Measure
    levels: tuple[Measure, ...]
    pairs: tuple[Pairing, ...]
    predicted: Expected | None
    inside: bool | None
    """The measured KLD is within the predicted interval."""
    predicted_here: float | None = None
    """The first level's KLD on this text times predicted recipe over predicted level: texts differ, ratios less."""


@dataclass(frozen=True)
class Exchange:
    """Two tensors that changed their types together."""

    raised: str
    raised_from: str
    raised_to: str
    lowered: str
    """Empty where the budget had room."""
    lowered_from: str
    lowered_to: str
    predicted_change: float
    measured_change: float
    measured_change_se: float | None


@dataclass(frozen=True)
class Refinement:
    """Exchanges that were tried by measuring them, and what they gained."""

    text: str
    chunks: int
    tried: int
    kept: tuple[Exchange, ...]
    kld_before: float
    """Of the recipe with its weights rounded to their types in the reference; activations are not rounded."""
    kld_after: float
    elapsed_s: float


@dataclass(frozen=True)
class Recipe:
    """A type for every tensor of one model."""

    recipe_version: int
    qres_version: str
    model: str
    architecture: str
    fingerprint: str
    budget: str
    """As it was asked for."""
    purpose: str
    """`any`, `arm`, `cpu` or `gpu`."""
    base: str
    """The level that the file is made as, which names it in `general.file_type`."""
    tensors: tuple[PlannedTensor, ...]
    """In the order of the reference's file."""
    bytes: int
    """Of tensor data."""
    limit_bytes: int | None
    """What the budget allowed; None for a budget of KLD."""
    bpw: float
    predicted: Expected | None
    """None where a type is not among the predicted ones."""
    gap: float
    """No other choice of types is predicted to be better than this one by more than this share."""
    selection: Selection
    stock: tuple[Stock, ...]
    """The level of equal size, and the next one up."""
    imatrix: str
    """Importance matrix that the types were predicted with; empty for none."""
    imatrix_digest: str
    notes: tuple[str, ...] = ()
    """A line for each pin, and what else to know."""
    refinement: Refinement | None = None
    built: Built | None = None
    verification: Verification | None = None
    limit_is_file: bool = False
    """`limit_bytes` counts the padding of tensors: the budget was of a file."""

    @property
    def quantized(self) -> dict[str, str]:
        """Tensor -> type of what the quantizer is to be told: all but what llama.cpp copies as it is."""
        return {tensor.name: tensor.type for tensor in self.tensors if tensor.quantizable}


@dataclass(frozen=True)
class Mix:
    """The best recipe of one size."""

    bytes: int
    """Of tensor data."""
    kld: float
    """Predicted and calibrated."""


@dataclass(frozen=True)
class Recovery:
    """The cheapest ways to recover a share of a level's damage; bytes beside the level's, predicted damage."""

    level: str
    share: float
    kld: float
    """What is left of the level's predicted KLD."""
    layers: tuple[str, ...]
    """Layers to keep at 16 bit; the embedding and the head count as layers."""
    layers_bytes: int | None
    """None where even all of them do not recover that much."""
    raised_bytes: int | None
    """With any type that is not smaller than the level's."""
    free_bytes: int | None
    """With any type at all; negative where a better mix is smaller than the level."""
    ladder_bytes: int | None
    """On the straight line, in log KLD over bytes, between uniform levels; None beyond the largest."""
