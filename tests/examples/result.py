"""A realistic Result made by code: 6 layers, 13 stream points, 2 levels, 4 recipes, with gaps, fallbacks and warnings.

The numbers hang together: ledger shares add up to 1, growth is the ratio of neighbouring drifts, tensors add up to type
shares, these and the header to the file, gap shares are KLD over the level's KLD. Recipes are chosen by qres from the
example's own predictions; what one of them was measured to do is made up. Nothing here is random, so golden files stay
the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import cache

from qres.levels import TYPE_TRAITS, fitting_type
from qres.pipeline import usual_recipes
from qres.records.devices import Deployment, DeviceAdvice
from qres.records.files import Fallback, LevelFile, TypeShare
from qres.records.output import Group, Histogram, Output
from qres.records.recipe import Built, FileTensor, Measure, Pairing, Recipe, Rung, Verification
from qres.records.result import SCHEMA_VERSION, Comparison, Level, Reference, Result, Settings, Skipped, Verdict
from qres.records.stream import Health, NoiseFloor, Point
from qres.records.units import Additivity, Keep, KeepCheck, RankCorrelation, Sensitivity, Unit
from tests.examples import sensitivity as example_sensitivity

N_LAYER = 6
BRANCHES = ("attention", "ffn")
WEIGHTS = {"attention": ("attn_q", "attn_k", "attn_v", "attn_output"), "ffn": ("ffn_gate", "ffn_up", "ffn_down")}
UNIT_BYTES_16 = {"attention": 1_769_472, "ffn": 5_308_416, "embedding": 56_623_104, "head": 56_623_104}
N_EMBD, N_VOCAB = 576, 49_152
SHAPES = {
    "attn_norm": (N_EMBD,),
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_EMBD, 192),
    "attn_v": (N_EMBD, 192),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_norm": (N_EMBD,),
    "ffn_gate": (N_EMBD, 1536),
    "ffn_up": (N_EMBD, 1536),
    "ffn_down": (1536, N_EMBD),
}
HEADER_BYTES = 1_726_464
"""Metadata and tensor table of each file."""
LADDER: dict[str, dict[str, str]] = {
    "Q2_K": {"": "Q2_K", "ffn_down": "Q3_K", "attn_v": "Q4_K"},
    "Q3_K_M": {"": "Q3_K", "ffn_down": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q4_K", "attn_output": "Q4_K"},
    "IQ4_XS": {"": "IQ4_XS", "attn_v": "Q5_K"},
    "Q4_0": {"": "Q4_0"},
    "Q4_K_M": {"": "Q4_K"},
    "Q5_K_M": {"": "Q5_K", "ffn_down": "Q6_K"},
    "Q6_K": {"": "Q6_K"},
    "Q8_0": {"": "Q8_0"},
}
"""Level -> what it asks for, by part of a layer; rows of 576 get what llama.cpp falls back to."""
REFERENCE_RATIO = (3.42, 1.21, 0.31, 0.44, 0.18, 0.29, 0.14, 0.22, 0.12, 0.24, 0.21, 0.93)


def example() -> Result:
    """Two levels of a small model; Q4_K_M is recommended, and one recipe is verified."""
    found = _planned()
    first, *others = found.recipes
    return dataclasses.replace(found, recipes=(_verified(first), *others))


@cache
def _planned() -> Result:
    """With what qres makes of the predictions."""
    return usual_recipes.planned(_scanned())


def _scanned() -> Result:
    four, eight = _level("Q4_K_M", 1.0), _level("Q8_0", 0.055)
    sensitivity = example_sensitivity.sensitivity(four)
    levels = (
        example_sensitivity.predicted(four, sensitivity, 0.0575, top=8),
        example_sensitivity.predicted(eight, sensitivity, 0.00301, top=8),
    )
    return Result(
        schema_version=SCHEMA_VERSION,
        reference=Reference(
            path="models/SmolLM2-6L-F16.gguf",
            name="SmolLM2 6L",
            architecture="llama",
            norm_placement="pre",
            n_layer=N_LAYER,
            n_embd=N_EMBD,
            n_vocab=N_VOCAB,
            n_ctx_train=8192,
            bytes=_data_bytes("F16") + HEADER_BYTES,
            bpw=_bpw("F16"),
            types=_types("F16"),
            is_16bit=True,
        ),
        settings=Settings(
            qres_version="0.1.0",
            llama_cpp="0.3.36",
            system="CPU : SSE3 = 1 | AVX2 = 1 | LLAMAFILE = 1",
            n_ctx=512,
            chunks=8,
            rank_chunks=2,
            scored_tokens=2040,
            text="built-in text, 8 chunks",
            rank_text="built-in text, 2 other chunks",
            unused_tokens=211,
            massive_tokens=9,
            threads=2,
            n_gpu_layers=0,
            units="ranked",
            elapsed_s=74.3,
            chunk_digests=tuple(f"{chunk:016x}" for chunk in range(0xA1, 0xA1 + 10)),
        ),
        noise_floor=NoiseFloor(kld_mean=1.8e-4, drift_median=4.1e-4),
        stream=_stream(),
        levels=levels,
        comparisons=(Comparison("Q4_K_M", "Q8_0", 0.05506, 0.0031),),
        deployment=_deployment(),
        device_advice=(
            DeviceAdvice("phone, 4 GB", 4096, "Q4_K_M", 0.0582, "the least KLD of the levels that fit"),
            DeviceAdvice("laptop, 16 GB", 8192, "Q8_0", 0.00314, "the least KLD of the levels that fit"),
            DeviceAdvice("watch, 64 MB", 2048, None, None, "no measured level fits"),
        ),
        assumptions=("The cache is 16 bit.", "A phone leaves half of its memory to one application."),
        verdict=Verdict(
            level="Q4_K_M",
            headline="Ship Q4_K_M: 33.5 MiB, KLD 0.0582, the same first token at 88.6 % of positions.",
            keep="Keep head and 0.ffn at 16 bit if you have 74.1 MiB more: that recovers 57 % of the damage.",
            details="Most of the damage is in the head; drift grows in layer 0 and hardly after it.",
        ),
        skipped=(
            Skipped("Q2_K", "llama.cpp could not make it: rows of 576 are not a multiple of 256"),
            Skipped("2.attention at Q4_K_M", "outside the default budget of 12 units"),
        ),
        prediction=sensitivity,
        fingerprint="5b0c" * 16,
        tensors=_tensors(),
        ladder=tuple(Rung(level, tuple(_held(level).values())) for level in LADDER),
        warnings=("Q4_K_M: 37 of 43 tensors are on a fallback type.", "Only 8 chunks: standard errors are rough."),
    )


def _level(name: str, scale: float) -> Level:
    points = _points(scale)
    units = _units(scale, points)
    kld = 0.0582 if name == "Q4_K_M" else 0.00314
    quantized = name == "Q4_K_M"
    return Level(
        name=name,
        file=LevelFile(
            path=f"models/SmolLM2-6L-{name}.gguf",
            file_type=name,
            bytes=_data_bytes(name) + HEADER_BYTES,
            bpw=_bpw(name),
            nominal_bpw=4.84 if quantized else 8.5,
            types=_types(name),
            fallback_tensors=tuple(
                Fallback(tensor, "Q4_K", held, "rows of 576 are not a multiple of 256")
                for tensor, held in _held(name).items()
                if quantized and held == "Q5_0"
            ),
            tensor_types=tuple(_held(name).values()),
        ),
        output=_output(kld, quantized),
        points=points,
        sensitivity=Sensitivity(
            units=units,
            keep_16bit=_keep(kld) if quantized else (),
            keep_check=KeepCheck(("0.ffn",), 0.0573, 0.0446, 0.222, 3_070_976) if quantized else None,
            rank_correlation=RankCorrelation(13, 0.2, 0.41, 0.55, 0.88, -0.11) if quantized else None,
            additivity=Additivity(0.0575, None, 0.0334) if quantized else None,
        ),
    )


def _tensors() -> tuple[FileTensor, ...]:
    """The reference's, in file order; its head is its embedding."""
    rows: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (N_EMBD, N_VOCAB))]
    rows += [(f"blk.{layer}.{part}.weight", shape) for layer in range(N_LAYER) for part, shape in SHAPES.items()]
    rows.append(("output_norm.weight", (N_EMBD,)))
    return tuple(FileTensor(name, shape, *(("F16", "F16") if len(shape) > 1 else ("F32", ""))) for name, shape in rows)


def _held(level: str) -> dict[str, str]:
    """Tensor -> its type in a level's file."""
    asked = LADDER.get(level, {"": level})
    types = {}
    for tensor in _tensors():
        part = tensor.name.split(".")[-2]
        wanted = asked.get(part, asked[""])
        types[tensor.name] = fitting_type(wanted, tensor.shape[0]) if tensor.type_16bit else tensor.type
    return types


def _types(level: str) -> tuple[TypeShare, ...]:
    """Of a level's file, most bytes first."""
    tensors, weights = Counter[str](), Counter[str]()
    for tensor, held in zip(_tensors(), _held(level).values(), strict=True):
        tensors[held] += 1
        weights[held] += math.prod(tensor.shape)
    shares = [
        TypeShare(held, tensors[held], weights[held], TYPE_TRAITS[held].bytes_of(weights[held])) for held in tensors
    ]
    return tuple(sorted(shares, key=lambda share: -share.bytes))


def _data_bytes(level: str) -> int:
    return sum(share.bytes for share in _types(level))


def _bpw(level: str) -> float:
    return 8 * _data_bytes(level) / sum(share.weights for share in _types(level))


def _verified(recipe: Recipe) -> Recipe:
    """Built, and measured beside its levels: a little worse than predicted, and better than the level of its size."""
    rival = recipe.stock[0].predicted
    assert recipe.predicted is not None
    assert rival is not None
    kld = 1.02 * recipe.predicted.kld
    measured = [_measure("recipe", recipe.bytes, kld)]
    for stock, known in zip(recipe.stock, (0.0597, 0.0392), strict=True):
        measured.append(_measure(stock.level, stock.bytes, known))
    own, *others = measured
    size = sum(-(-tensor.bytes // 32) * 32 for tensor in recipe.tensors) + HEADER_BYTES
    name = "SmolLM2-6L-F16-same-as-Q4_K_M.gguf"
    return dataclasses.replace(
        recipe,
        built=Built(f"reports/recipes/same-as-Q4_K_M/{name}", size, recipe.bytes, len(recipe.tensors)),
        verification=Verification(
            file=name,
            text="built-in rank text, 8 chunks",
            n_ctx=512,
            chunks=8,
            tokens=2040,
            recipe=own,
            levels=tuple(others),
            pairs=tuple(Pairing(one.name, kld - (one.kld or 0.0), 0.0019) for one in others),
            predicted=recipe.predicted,
            inside=recipe.predicted.low <= kld <= recipe.predicted.high,
            predicted_here=(others[0].kld or 0.0) * recipe.predicted.kld / rival.kld,
        ),
    )


def _measure(name: str, n_bytes: int, kld: float) -> Measure:
    return Measure(
        name=name,
        bytes=n_bytes,
        kld=kld,
        kld_se=0.07 * kld,
        same_top=1 - 0.48 * math.sqrt(kld),
        same_top_se=0.006,
        ln_ppl_ratio=0.74 * kld,
        ln_ppl_ratio_se=0.0041,
        drift=0.31 * math.sqrt(kld),
    )


def _points(scale: float) -> tuple[Point, ...]:
    drifts = [0.052 * scale * (1 + 0.35 * math.sin(j * 0.9) + 0.05 * j) for j in range(2 * N_LAYER + 1)]
    weights = [1.0 + 0.6 * math.cos(j) + (3.0 if j == 12 else 0.0) for j in range(2 * N_LAYER + 1)]
    weights[5] = -0.4
    total = sum(weights)
    points = []
    for j in range(2 * N_LAYER + 1):
        share = weights[j] / total
        local = scale * (0.061 + 0.02 * math.sin(1.7 * j))
        layer, branch = (None, "embedding") if j == 0 else ((j - 1) // 2, BRANCHES[(j - 1) % 2])
        ratio = None if j == 0 else REFERENCE_RATIO[j - 1]
        points.append(
            Point(
                index=j,
                layer=layer,
                branch=branch,
                label="embedding" if layer is None else f"{layer}.{branch}",
                weights=("token_embd.weight",)
                if layer is None
                else tuple(f"blk.{layer}.{name}.weight" for name in WEIGHTS[branch]),
                ratio_median=None if ratio is None else ratio * (1 + 0.04 * scale * math.cos(j)),
                ratio_p95=None if ratio is None else ratio * 1.7,
                reference_ratio_median=ratio,
                drift_median=drifts[j],
                drift_p95=drifts[j] * 2.1,
                drift_growth=None if j == 0 else drifts[j] / drifts[j - 1],
                cosine_median=1 - drifts[j] ** 2 / 2,
                sqnr_db=-20 * math.log10(drifts[j]),
                local_error_median=None if j == 7 else local,
                injected_error_median=None if j == 7 else local * (ratio or 1.0) / (1 + (ratio or 0.0)),
                ledger_share=share,
                generated_share=share * (0.7 if j < 6 else 0.25),
                absmax=23_650.0 if j >= 6 else 24.0 + j,
            )
        )
    return tuple(points)


def _units(scale: float, points: tuple[Point, ...]) -> tuple[Unit, ...]:
    units = [_unit("embedding", "embedding", None, "embedding", 0.0021 * scale, point=points[0], scale=scale)]
    for j, point in enumerate(points[1:], 1):
        kld = scale * 0.0009 * (1 + 2.5 / j) * (1.6 if point.branch == "ffn" else 1.0)
        kld = 0.0094 * scale if j == 2 else kld
        missing = j == 5
        units.append(
            _unit(point.label, "branch", point.layer, point.branch, None if missing else kld, point=point, scale=scale)
        )
    units.append(_unit("head", "head", None, "head", 0.0238 * scale, point=None, scale=scale))
    return tuple(units)


def _unit(
    name: str, kind: str, layer: int | None, branch: str, kld: float | None, *, point: Point | None, scale: float
) -> Unit:
    share = 0.42 if scale == 1.0 else 0.53
    return Unit(
        unit=name,
        kind=kind,
        layer=layer,
        branch=branch,
        kld=kld,
        kld_se=None if kld is None else 0.11 * kld,
        method="outside the default budget" if kld is None else ("forced" if kind == "head" else "patched"),
        injected_error=point.injected_error_median if point else None,
        local_error=point.local_error_median if point else None,
        ratio=point.ratio_median if point else None,
        drift=point.drift_median if point else None,
        weights=point.weights if point else ("output.weight",),
        bytes_at_level=round(UNIT_BYTES_16[branch] * share),
        bytes_at_16bit=UNIT_BYTES_16[branch],
    )


def _keep(kld: float) -> tuple[Keep, ...]:
    rows = (
        ("head", "F16", 0.0238, 74_608_640, 1.0, True, "half of the damage; the head is the embedding matrix too"),
        ("0.ffn", "BF16", 0.0094, 3_070_976, 0.98, True, "its output is larger than the stream it adds to"),
        ("0.attention", "F16", 0.00315, 1_026_304, 0.61, False, "the next larger level buys more per byte"),
        ("1.ffn", "F16", 0.00012, 3_070_976, None, False, "cannot be told from arithmetic noise"),
    )
    return tuple(
        Keep(unit, kind, recovered, recovered / kld, added, confidence, worth, reason)
        for unit, kind, recovered, added, confidence, worth, reason in rows
    )


def _output(kld: float, quantized: bool) -> Output:
    return Output(
        tokens=2040,
        chunks=8,
        kld_mean=kld,
        kld_se=kld * 0.07,
        kld_median=kld * 0.55,
        kld_p90=kld * 2.3,
        kld_p95=kld * 3.4,
        kld_p99=kld * 7.8,
        kld_p999=kld * 19,
        kld_max=kld * 41,
        same_top=0.886 if quantized else 0.974,
        same_top_se=0.006 if quantized else 0.003,
        ppl=19.31 if quantized else 18.52,
        ppl_reference=18.49,
        ln_ppl_ratio=math.log(19.31 / 18.49) if quantized else math.log(18.52 / 18.49),
        ln_ppl_ratio_se=0.0042 if quantized else 0.0009,
        ln_ppl_correlation=0.9921 if quantized else 0.9996,
        rms_delta_p=0.058 if quantized else 0.0131,
        mean_delta_p=-0.0041 if quantized else -0.0001,
        delta_p_p05=-0.091 if quantized else -0.019,
        delta_p_median=0.0,
        delta_p_p95=0.067 if quantized else 0.018,
        by_position=tuple(
            Group(label, 510, kld * factor, 0.886 if quantized else 0.974)
            for label, factor in (("256-319", 1.06), ("320-383", 1.01), ("384-447", 0.98), ("448-510", 0.95))
        ),
        by_confidence=(
            Group("below 50 %", 1203, kld * 1.4, 0.82 if quantized else 0.96),
            Group("50 % to 90 %", 540, kld * 0.6, 0.97 if quantized else 0.99),
            Group("90 % and more", 297, kld * 0.11, 1.0),
            Group("not finite", 0, None, None),
        ),
        kld_histogram=_histogram(kld),
        nonfinite_tokens=0,
    )


def _histogram(kld: float) -> Histogram:
    edges = tuple(10 ** (-6 + j / 4) for j in range(30))
    centre = math.log10(kld * 0.55)
    weights = [math.exp(-(((-6 + (j + 0.5) / 4) - centre) ** 2) / 0.6) for j in range(29)]
    counts = [math.floor(2040 * weight / sum(weights)) for weight in weights]
    counts[counts.index(max(counts))] += 2040 - sum(counts)
    return Histogram(edges, tuple(counts))


def _stream() -> tuple[Health, ...]:
    rows = []
    for j in range(2 * N_LAYER + 1):
        layer, branch = (None, "embedding") if j == 0 else ((j - 1) // 2, BRANCHES[(j - 1) % 2])
        absmax = 23_650.0 if j >= 6 else 24.0 + j
        rows.append(
            Health(
                index=j,
                layer=layer,
                branch=branch,
                label="embedding" if layer is None else f"{layer}.{branch}",
                norm_median=18.2 + 9.4 * j,
                mean=0.003 * j,
                variance=0.58 + 0.9 * j,
                absmax=absmax,
                kurtosis=None if j == 3 else 3.2 + 1.7 * j,
                participation=412.0 - 21 * j,
                f16_headroom=65_504 / absmax,
            )
        )
    return tuple(rows)


def _deployment() -> tuple[Deployment, ...]:
    rows = []
    devices = (("phone, 4 GB", 4 * 2**30, 2 * 2**30, 4096), ("watch, 64 MB", 64 * 2**20, 32 * 2**20, 2048))
    for device, ram, usable, n_ctx in devices:
        for level, weights in (("Q4_K_M", _data_bytes("Q4_K_M")), ("Q8_0", _data_bytes("Q8_0"))):
            cache, compute = n_ctx * 4608, 104_857_600
            needed = weights + cache + compute
            rows.append(
                Deployment(device, ram, usable, n_ctx, level, weights, cache, compute, needed, needed <= usable)
            )
    return tuple(rows)
