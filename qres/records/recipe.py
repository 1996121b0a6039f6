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
    """Name of the tensor."""
    shape: tuple[int, ...]
    """In ggml's order: the row length first."""
    type: str
    """Type in the reference."""
    type_16bit: str
    """`F16` or `BF16`: what holds it at 16 bit by its type and values; its own type where the reference holds it below
    16 bit; empty for vectors, which stay as they are."""


@dataclass(frozen=True)
class Rung:
    """What llama.cpp makes of the reference at one level, by its dry run."""

    level: str
    """Name of the level."""
    types: tuple[str, ...]
    """Type of each of the result's `tensors`."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a recipe."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """In ggml's order: the row length first."""
    type: str
    """Type that it gets."""
    bytes: int
    """What it takes as this type."""
    predicted_kld: float | None
    """Of this tensor alone, calibrated with the file's factor; None where the type has no prediction, 0 at 16 bit."""
    quantizable: bool
    """False for what llama.cpp copies as it is: norms, biases, routers."""
    pinned: bool = False
    """A pin gave it its type."""


@dataclass(frozen=True)
class Expected:
    """What a file is predicted to do, calibrated on the levels that the scan measured."""

    kld: float
    """Predicted mean KLD, nats per token."""
    low: float
    """Lower end of the 95 % interval of what `qres verify` measures on 8 chunks of text like the scan's."""
    high: float
    """Upper end of that interval."""
    raw_kld: float
    """Sum of the predictions over all tensors, not calibrated."""
    factor: float
    """`kld` / `raw_kld`."""


@dataclass(frozen=True)
class Selection:
    """Where the figures come from that chose the types."""

    rank_text: str
    """Text of the predictions."""
    report_text: str
    """Text of the calibration."""
    n_ctx: int
    """Tokens per chunk."""
    chunk_digests: tuple[str, ...]
    """Short digests of all chunks of both, and of those that `--refine` measured on: verification leaves them out."""


@dataclass(frozen=True)
class Stock:
    """A level of llama.cpp beside recipes."""

    level: str
    """Name of the level."""
    bytes: int
    """Bytes of tensor data."""
    predicted: Expected | None
    """What is predicted of it; None where it has a type without a prediction."""


@dataclass(frozen=True)
class Built:
    """A file that was made from a recipe, after its types were read back."""

    file: str
    """Path of the file."""
    file_bytes: int
    """Size of the file."""
    tensor_bytes: int
    """Bytes of tensor data."""
    tensors: int
    """Tensors in it, all of the planned type."""


@dataclass(frozen=True)
class Measure:
    """One file against the reference on the verification text."""

    name: str
    """`recipe`, or the level."""
    bytes: int
    """Bytes of tensor data."""
    kld: float | None
    """Mean KLD, nats per token."""
    kld_se: float | None
    """Standard error of `kld`, clustered by chunk as all `_se` here; None below two chunks."""
    same_top: float | None
    """Share of positions where both models put the same token first."""
    same_top_se: float | None
    """Standard error of `same_top`."""
    ln_ppl_ratio: float | None
    """ln(perplexity / perplexity of the reference)."""
    ln_ppl_ratio_se: float | None
    """Standard error of `ln_ppl_ratio`."""
    drift: float | None
    """Median over tokens of the drift at the last stream point; None when the stream was not mapped."""


@dataclass(frozen=True)
class Pairing:
    """The recipe against a level on the same tokens."""

    level: str
    """Name of the level."""
    kld_difference: float | None
    """Mean KLD of the recipe minus that of the level; None when non-finite positions make the tokens differ."""
    kld_difference_se: float | None
    """Standard error of the paired difference."""


@dataclass(frozen=True)
class Verification:
    """Predicted and measured, on text that chose nothing."""

    file: str
    """Name of the file."""
    text: str
    """Name of the text, and how many of its chunks."""
    n_ctx: int
    """Tokens per chunk."""
    chunks: int
    """Chunks that were measured on."""
    tokens: int
    """Scored positions."""
    recipe: Measure
    """The recipe's file."""
    levels: tuple[Measure, ...]
    """Levels on the same chunks."""
    pairs: tuple[Pairing, ...]
    """The recipe against each of them."""
    predicted: Expected | None
    """What the recipe was predicted to do."""
    inside: bool | None
    """The measured KLD is within the predicted interval; None where one of them is missing."""
    predicted_here: float | None = None
    """What the prediction is on this text: measured KLD of the first level with a prediction, times predicted recipe
    over predicted level. Texts differ, these ratios less."""


@dataclass(frozen=True)
class Exchange:
    """Two tensors that changed their types together."""

    raised: str
    """Tensor that got a larger type."""
    raised_from: str
    """Its type before."""
    raised_to: str
    """Its type after."""
    lowered: str
    """Tensor that paid for it; empty where the budget had room."""
    lowered_from: str
    """Its type before; empty where the budget had room."""
    lowered_to: str
    """Its type after; empty where the budget had room."""
    predicted_change: float
    """Change of the KLD that was predicted, not calibrated."""
    measured_change: float
    """Change of the KLD that was measured."""
    measured_change_se: float | None
    """Standard error of `measured_change`, clustered by chunk."""


@dataclass(frozen=True)
class Refinement:
    """Exchanges that were tried by measuring them, and what they gained."""

    text: str
    """Name of the text, and how many of its chunks."""
    chunks: int
    """Chunks that were measured on."""
    tried: int
    """Exchanges that were measured."""
    kept: tuple[Exchange, ...]
    """Those that lowered the KLD by more than the standard error of its change."""
    kld_before: float
    """KLD of the recipe with its weights rounded to their types in the reference; activations are not rounded."""
    kld_after: float
    """The same after the exchanges."""
    elapsed_s: float
    """Seconds that it took."""


@dataclass(frozen=True)
class Recipe:
    """A type for every tensor of one model."""

    recipe_version: int
    """Version of the format, raised when a field changes its meaning or goes away."""
    qres_version: str
    """Version of qres."""
    model: str
    """Name of the reference."""
    architecture: str
    """Architecture of the reference."""
    fingerprint: str
    """Fingerprint of the reference, as in `Result`."""
    budget: str
    """As it was asked for, such as `same-as:Q4_K_M`."""
    purpose: str
    """`any`, `arm`, `cpu` or `gpu`: whose fast types were preferred."""
    base: str
    """The level that the file is made as, which names it in `general.file_type`."""
    tensors: tuple[PlannedTensor, ...]
    """In the order of the reference's file."""
    bytes: int
    """Bytes of tensor data."""
    limit_bytes: int | None
    """What the budget allowed; None for a budget of KLD, and where types were given."""
    bpw: float
    """8 * `bytes` / weights."""
    predicted: Expected | None
    """What the file is predicted to do; None where it has a type without a prediction."""
    gap: float
    """No other choice is predicted to be better by more than this share; 0 when the search was exhaustive."""
    selection: Selection
    """The texts that the choice rests on."""
    stock: tuple[Stock, ...]
    """The level of its size (the largest that is not larger by more than 0.5 %; of several of about that size the one
    predicted to be the best), and the next one up where there is one."""
    imatrix: str
    """File whose importance matrix the types were predicted with; empty for none."""
    imatrix_digest: str
    """SHA-256 of the importance matrix's entries; empty for none."""
    notes: tuple[str, ...] = ()
    """A line for each pin, and what else to know."""
    refinement: Refinement | None = None
    """Exchanges that were measured; None without `--refine`."""
    built: Built | None = None
    """The file that was made; None before."""
    verification: Verification | None = None
    """What was measured of it; None before."""
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
    """Bytes of tensor data."""
    kld: float
    """Predicted and calibrated."""


@dataclass(frozen=True)
class Recovery:
    """The cheapest ways to recover a share of the damage of a level.

    Damage is predicted; bytes are what is added to the level's tensor data.
    """

    level: str
    """Name of the level."""
    share: float
    """0.10, 0.25 or 0.50 of its predicted KLD."""
    kld: float
    """What is left of the level's predicted KLD, calibrated."""
    layers: tuple[str, ...]
    """The cheapest set of layers to keep at 16 bit, such as `layer 3`; the embedding and the head count as layers, by
    the names of their tensors."""
    layers_bytes: int | None
    """Bytes that these layers add; None where even all layers do not recover that much."""
    raised_bytes: int | None
    """Bytes added with any type for each tensor that is not smaller than the level's; None where that does not recover
    that much."""
    free_bytes: int | None
    """Bytes added with any type at all; negative where a better mix is smaller than the level."""
    ladder_bytes: int | None
    """Bytes added on the straight line, in log KLD over bytes, from the level through better and larger ones; None
    beyond the largest."""
