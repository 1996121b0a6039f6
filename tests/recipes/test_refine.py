"""Exchanges that are measured in the reference's memory: as in a file, undone to the last bit, within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qres.arrays import Floats
from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.metrics.output import score, score_reference
from qres.native import blocks, worker
from qres.native.quantizer import quantize
from qres.native.session import Session, SessionOptions
from qres.recipes import budget, exchange, files, plan, refine, refine_work
from qres.recipes.choices import Row
from qres.recipes.exchange import Refined, RefineJob
from qres.recipes.refine import RefineOptions
from qres.recipes.wishes import Wishes
from qres.records.recipe import Recipe, Refinement
from qres.text.chunks import Chunk, digest
from qres.text.source import Source
from tests import trained
from tests.pipeline.test_run import qres
from tests.trained import SCAN_CTX, Scanned

pytestmark = pytest.mark.model

Q4_K_M = 15
"""`llama_ftype`."""
OPTIONS = SessionOptions(SCAN_CTX, 1, writable=True)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Scanned:
    return trained.scanned(tmp_path_factory)


@pytest.fixture(scope="module")
def tied(scanned: Scanned, tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """Head and embedding are one tensor: the head that was trained."""
    weights = trained.read(scanned.inventory.path)
    weights["token_embd.weight"] = weights.pop("output.weight") * 4
    return model_file.read(trained.write(tmp_path_factory.mktemp("tied") / "tied.gguf", weights))


def job(inventory: Inventory, types: Mapping[str, str], source: Source, options: Sequence[Row] = ()) -> RefineJob:
    """A job that tries nothing: only the types as they are."""
    return RefineJob(
        reference=inventory.path,
        rows=tuple(options),
        types=types,
        room=0,
        importance={},
        sources=(source,),
        used=(),
        chunks=48,
        n_ctx=SCAN_CTX,
        threads=1,
        is_file=False,
        trials=0,
    )


def rounded(
    inventory: Inventory, types: Mapping[str, str], target: Path, importance: Mapping[str, Floats] | None = None
) -> Path:
    """A 16-bit file of the values that the weights have as those types."""
    weights = trained.read(inventory.path)
    for name, kind in types.items():
        own = importance[name][0] if importance else None
        weights[name] = torch.from_numpy(blocks.round_trip(weights[name].numpy(), kind, 1, own))
    return trained.write(target, weights)


def kld(reference: Path, other: Path, chunks: Sequence[Chunk]) -> float:
    """Mean over all scored positions."""
    with Session(reference, OPTIONS) as a, Session(other, OPTIONS) as b:
        found = [score(score_reference(a.decode(chunk), chunk), b.decode(chunk)).kld for chunk in chunks]
    return float(np.concatenate(found).mean())


# -- weights overwritten in memory


SIZES = ("3.5bpw", "same-as:Q4_K_M", "same-as:Q5_K_M", "6.6bpw")


@pytest.mark.parametrize("text", SIZES)
def test_weights_in_memory_do_what_those_in_a_file_do(scanned: Scanned, tmp_path: Path, text: str) -> None:
    """Exactly what a 16-bit file of the rounded weights does, and what a built one does up to the rounding of inputs.

    The latter adds 2.8e-5 to 7.0e-5 to KLDs of 5.9e-5 to 3.2e-3.
    """
    types = plan.make(scanned.choices, budget.parse(text), Wishes()).quantized
    found = refine_work.refine(lambda _: None, job(scanned.inventory, types, scanned.held))
    assert (found.tried, found.kept, found.types, found.kld_after) == (0, [], types, found.kld_before)
    chunks = found.text.chunks
    same = rounded(scanned.inventory, types, tmp_path / "rounded.gguf")
    assert found.kld_before == pytest.approx(kld(scanned.inventory.path, same, chunks), rel=1e-9)
    quantize(scanned.inventory.path, tmp_path / "built.gguf", Q4_K_M, 1, None, None, types)
    built = kld(scanned.inventory.path, tmp_path / "built.gguf", chunks)
    assert built == pytest.approx(found.kld_before, abs=1e-4 + 0.03 * built)


def test_weights_in_memory_are_rounded_with_the_importance_matrix(scanned: Scanned, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    types = dict.fromkeys(all_exact(scanned.inventory), "Q4_K")
    length = {tensor.name: tensor.row for tensor in scanned.inventory.tensors}
    given = {name: np.exp(random.normal(0, 2, (1, length[name]))).astype(np.float32) for name in types}
    plain = job(scanned.inventory, types, scanned.held)
    found = refine_work.refine(lambda _: None, replace(plain, importance=given))
    same = rounded(scanned.inventory, types, tmp_path / "rounded.gguf", given)
    assert found.kld_before == pytest.approx(kld(scanned.inventory.path, same, found.text.chunks), rel=1e-9)
    assert found.kld_before != pytest.approx(refine_work.refine(lambda _: None, plain).kld_before, rel=1e-3)


def test_weights_in_memory_of_a_tied_head(tied: Inventory, scanned: Scanned, tmp_path: Path) -> None:
    """The embedding is read in two places, which may be two tensors in memory."""
    types = {"token_embd.weight": "Q3_K", "blk.1.ffn_up.weight": "Q4_0"}
    found = refine_work.refine(lambda _: None, job(tied, types, scanned.held))
    same = rounded(tied, types, tmp_path / "rounded.gguf")
    assert found.kld_before == pytest.approx(kld(tied.path, same, found.text.chunks), rel=1e-9)
    quantize(tied.path, tmp_path / "built.gguf", Q4_K_M, 1, None, None, {**all_exact(tied), **types})
    built = kld(tied.path, tmp_path / "built.gguf", found.text.chunks)
    assert built == pytest.approx(found.kld_before, rel=0.05)


def all_exact(inventory: Inventory) -> dict[str, str]:
    return {tensor.name: "F16" for tensor in inventory.tensors if tensor.n_dims > 1}


@pytest.mark.parametrize("is_tied", [False, True])
def test_exact_types_restore_the_logits_bit_by_bit(scanned: Scanned, tied: Inventory, is_tied: bool) -> None:
    inventory = tied if is_tied else scanned.inventory
    chunks = scanned.chunks()[:2]
    exact = all_exact(inventory)
    with Session(inventory.path, OPTIONS) as session:

        def logits() -> list[Floats]:
            return [session.decode(chunk).copy() for chunk in chunks]

        before = logits()
        model = refine_work._Rounded(session, job(inventory, exact, scanned.held), chunks)
        assert model.measure().sums == [0.0, 0.0]
        for kind in ("Q2_K", "BF16", "F32", "F16", "Q8_0"):
            for name in exact:
                model.give(name, kind)
            is_changed = kind not in ("F32", "F16")
            assert all(np.array_equal(a, b) != is_changed for a, b in zip(before, logits(), strict=True)), kind
        for name in exact:
            model.give(name, "F16")
        assert all(np.array_equal(a, b) for a, b in zip(before, logits(), strict=True))
        model.give("blk.2.attn_v.weight", "Q2_K")
        one = model.measure()
        model.give("blk.2.attn_v.weight", "Q6_K")
        model.give("blk.2.attn_v.weight", "Q2_K")  # from the exact values, not from those of Q6_K
        again = model.measure()
        assert (again.sums, again.counts) == (one.sums, one.counts)


# -- exchanges


def moved(types: Mapping[str, str], refinement: Refinement) -> dict[str, str]:
    """The types after the exchanges, each of which has to begin where the one before ended."""
    now = dict(types)
    for one in refinement.kept:
        assert now[one.raised] == one.raised_from
        now[one.raised] = one.raised_to
        if one.lowered:
            assert now[one.lowered] == one.lowered_from
            now[one.lowered] = one.lowered_to
    return now


def types_of(recipe: Recipe) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in recipe.tensors}


PINS = (("blk.0.ffn_down", "Q8_0"), (r"attn_v", "Q3_K"))
"""The first one where it does little, the second where it does harm: refining would like to change both."""


@pytest.fixture(scope="module")
def poor(scanned: Scanned) -> Recipe:
    """A recipe that can be made better: of what is not pinned, half has more than it needs and half has less."""
    wishes = Wishes(pins=PINS)
    recipe = plan.make(scanned.choices, budget.parse("5.5bpw"), wishes)
    free = [t.name for t in recipe.tensors if t.quantizable and not t.pinned and t.name.startswith("blk.")]
    types = types_of(recipe) | {name: ("Q3_K", "Q8_0")[i % 2] for i, name in enumerate(free)}
    found = plan.of_types(scanned.choices, types, "poor", "Q4_K_M", wishes)
    pinned = {tensor.name for tensor in recipe.tensors if tensor.pinned}
    return replace(
        found,
        tensors=tuple(replace(tensor, pinned=tensor.name in pinned) for tensor in found.tensors),
        limit_bytes=found.bytes,
    )


@pytest.fixture(scope="module")
def refined(scanned: Scanned, poor: Recipe) -> Recipe:
    options = RefineOptions((scanned.held,), chunks=6, trials=24, threads=1)
    listener = trained.Quiet()
    wishes = Wishes(pins=PINS)
    return refine.refine(scanned.choices, poor, wishes, scanned.inventory, None, options, listener)


def refinement_of(recipe: Recipe) -> Refinement:
    assert recipe.refinement is not None
    return recipe.refinement


def test_exchanges_that_pay_are_kept(poor: Recipe, refined: Recipe) -> None:
    found = refinement_of(refined)
    assert len(found.kept) >= 3
    assert found.tried <= 24
    assert found.kld_after < 0.9 * found.kld_before
    assert types_of(refined) == moved(types_of(poor), found)
    gained = sum(one.measured_change for one in found.kept)
    assert gained == pytest.approx(found.kld_after - found.kld_before, rel=1e-6)
    for one in found.kept:
        assert one.measured_change + (one.measured_change_se or 0) < 0


def test_exchanges_stay_within_the_budget(scanned: Scanned, poor: Recipe, refined: Recipe) -> None:
    assert refined.limit_bytes == poor.limit_bytes
    assert refined.bytes <= poor.bytes
    now, kept = types_of(poor), refinement_of(refined).kept
    for count in range(len(kept) + 1):
        part = moved(now, replace(refinement_of(refined), kept=kept[:count]))
        assert scanned.choices.bytes_of(part) <= poor.bytes


class _JobKnown(Exception):  # noqa: N818 - nothing has gone wrong
    """Ends refining where the worker would begin."""

    def __init__(self, job: RefineJob) -> None:
        super().__init__()
        self.job = job


def test_exchanges_stay_within_a_budget_of_file_bytes(scanned: Scanned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where padding takes a few bytes more than there are."""

    def know(_work: object, _on_event: object, job: RefineJob) -> Refined:
        raise _JobKnown(job)

    monkeypatch.setattr(worker, "run", know)
    file_bytes = scanned.choices.file_bytes
    options = [row for row in scanned.choices.rows if row.types]

    def fitting_but_for_padding(recipe: Recipe) -> int | None:
        """Bytes of an exchange's weights that are fewer than those that it adds to the file."""
        types = types_of(recipe)
        changes = (
            (file_bytes(types | {step.tensor: step.after for step in one.steps}) - file_bytes(types), one.bytes)
            for one in exchange.candidates(options, types, room=30_000)
        )
        return next((weights for added, weights in changes if 0 < weights < added), None)

    # Which recipes have one depends on the predictions, and these on the CPU.
    recipes = (plan.make(scanned.choices, budget.parse(f"{bpw}bpw"), Wishes()) for bpw in (4.6, 4.7, 5, 5.5, 6))
    found_in = ((recipe, fitting_but_for_padding(recipe)) for recipe in recipes)
    recipe, more = next((recipe, weights) for recipe, weights in found_in if weights is not None)
    types = types_of(recipe)
    limit = file_bytes(types) + more
    found = replace(recipe, budget=f"{limit}B", limit_bytes=limit - scanned.choices.header_bytes, limit_is_file=True)
    settings = RefineOptions((scanned.held,), 1, 1, 1)
    with pytest.raises(_JobKnown) as known:
        refine.refine(scanned.choices, found, Wishes(), scanned.inventory, None, settings, trained.Quiet())
    given = known.value.job
    for one in exchange.candidates(given.rows, given.types, given.room, is_file=given.is_file):
        assert file_bytes(types | {step.tensor: step.after for step in one.steps}) <= limit, one


def test_pins_stay(poor: Recipe, refined: Recipe) -> None:
    pinned = {tensor.name: tensor.type for tensor in poor.tensors if tensor.pinned}
    assert len(pinned) == 5
    assert {tensor.name: tensor.type for tensor in refined.tensors if tensor.pinned} == pinned
    touched = {name for one in refinement_of(refined).kept for name in (one.raised, one.lowered)}
    assert not touched & set(pinned)


def test_refining_is_better_by_a_file_of_its_types(scanned: Scanned, poor: Recipe, refined: Recipe) -> None:
    """On text that took no part: what was gained in memory is gained in the file."""
    used = set(refined.selection.chunk_digests)
    fresh = [chunk for chunk in scanned.chunks() if digest(chunk) not in used][:16]
    found = []
    for recipe in (poor, refined):
        target = scanned.folder / "exchanged.gguf"
        quantize(scanned.inventory.path, target, Q4_K_M, 1, None, None, recipe.quantized)
        found.append(kld(scanned.inventory.path, target, fresh))
    assert found[1] < 0.9 * found[0]


def test_text_of_refining_is_neither_the_scans_nor_left_for_verifying(scanned: Scanned, refined: Recipe) -> None:
    scan = scanned.result.settings.chunk_digests
    assert refined.selection.chunk_digests[: len(scan)] == scan
    added = refined.selection.chunk_digests[len(scan) :]
    assert len(added) == refinement_of(refined).chunks == 6
    every = [digest(chunk) for chunk in scanned.chunks()]
    assert list(added) == [one for one in every if one not in scan][:6]


def test_refining_what_is_best_already_keeps_it_as_good(scanned: Scanned) -> None:
    recipe = plan.make(scanned.choices, budget.parse("same-as:Q4_K_M"), Wishes())
    options = RefineOptions((scanned.held,), chunks=4, trials=8, threads=1)
    found = refine.refine(scanned.choices, recipe, Wishes(), scanned.inventory, None, options, trained.Quiet())
    about = refinement_of(found)
    assert about.kld_after <= about.kld_before
    assert found.bytes <= measured_limit(found)
    assert types_of(found) == moved(types_of(recipe), about)
    assert found.gap >= recipe.gap


def measured_limit(recipe: Recipe) -> int:
    assert recipe.limit_bytes is not None
    return recipe.limit_bytes


def test_refining_by_the_command(scanned: Scanned, tmp_path: Path) -> None:
    words = ("--budget", "5.0bpw", "--pin", "output.weight=Q6_K", "--refine", "--trials", 4, "--chunks", 3)
    done = qres(
        *("recipe", "reports/trained/result.json", *words, "--text", "held.txt", "--threads", 1, "--out", tmp_path),
        cwd=scanned.folder,
    )
    assert done.returncode == 0, done.stderr
    recipe = files.load(tmp_path / "recipe.json")
    about = refinement_of(recipe)
    assert f"Refined: {len(about.kept)} of {about.tried} exchanges kept" in done.stdout
    assert 0 < about.tried <= 4
    assert recipe.bytes <= measured_limit(recipe)
    assert types_of(recipe)["output.weight"] == "Q6_K"
    assert len(recipe.selection.chunk_digests) == len(scanned.result.settings.chunk_digests) + 3
