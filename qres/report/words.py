"""The fixed wording: what every measure is, and how to read each figure and when it misleads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """The text beside a figure."""

    title: str
    reading: str
    misleads: str
    missing: str
    """Said in place of a figure that cannot be drawn."""


NO_STREAM = "Not drawn: the residual stream of this model was not mapped, so there are no values by layer."

FIGURES = {
    "ladder": Reading(
        "Size against damage",
        "Each point is a file: lower is closer to the reference, left is smaller. Bars are one standard error. The "
        "line between the levels is the ladder: a mix of types is worth having only below it.",
        "The KLD axis is logarithmic and belongs to this model: the same KLD can be harmless in one model and not in "
        "another.",
        "Not drawn: no level has a mean KLD above zero.",
    ),
    "recipes": Reading(
        "The best mixes beside the levels",
        "The line is the best recipe of each size, calculated; hollow marks are predicted (≈), filled ones measured. "
        "A file is worth having only where nothing to its left is lower. The distance from a level down to the line is "
        "what other types for its tensors gain at the same size.",
        "Predictions choose the recipes, so that they flatter them a little: only filled marks are evidence. Predicted "
        "and measured marks can be of different texts, which the tables name.",
        "Not drawn: nothing is predicted of mixes or levels.",
    ),
    "distribution": Reading(
        "KLD of single tokens",
        "How the positions spread over KLD, on a logarithmic axis; the dashed lines are the means. A mean far to the "
        "right of the hump comes from few positions with large damage.",
        "Equal areas are equal numbers of positions, not equal damage: nearly all of the mean sits in the right tail.",
        "Not drawn: no level has scored positions.",
    ),
    "sensitivity": Reading(
        "Damage of each unit quantized alone",
        "Measured KLD when only this unit carries the level's error and all else is exact; bars are one standard "
        "error. The higher units are the ones to keep at 16 bit, if their bytes allow.",
        "Units that were not measured are absent, not zero; the table lists them. Single damages add up only as far as "
        "the additivity table says. It is measured on the ranking text, not on the text of the output figures.",
        "Not drawn: no unit was measured.",
    ),
    "stream": Reading(
        "How much each branch writes into the stream",
        "|branch| over |stream it reads, as it goes into the add|, median over tokens. Above 1 the branch overwrites "
        "the stream rather than adding to it. Where the quantized line leaves the reference line, the branch "
        "changed its size.",
        "Size is not fragility: the rank correlation says how far this ratio orders the measured damage in this model. "
        "Nor is it influence, which is what happens when a branch is removed; that is not measured here.",
        NO_STREAM,
    ),
    "drift": Reading(
        "How far the stream drifts",
        "Distance of the quantized stream from the reference over its length, in a free run where errors accumulate. "
        "A rise means that error entered or was amplified there; a fall means that it was forgotten.",
        "Drift is a screen, KLD decides: the logits ignore some directions of the stream and react strongly to others. "
        "Massive-activation tokens are left out of the medians.",
        NO_STREAM,
    ),
    "own_error": Reading(
        "What each layer's own weights do",
        "Each branch gets the reference's stream (a forced run), so that only its own weights differ. Injected error "
        "is over the stream, local error over the branch itself.",
        "A large local error in a branch that writes little is harmless, which is why the injected error is shown "
        "first. What later layers make of the error is not in this figure.",
        NO_STREAM,
    ),
    "ledger": Reading(
        "Where the final drift comes from",
        "Each layer's part of the final drift; over all layers the parts add up to 100 %. The strong part was made by "
        "the layer's own weights, the pale part it passed on from drift below. Where a model scales or norms the "
        "stream itself, what that does to the drift is a part of its own, between the two in strength.",
        "A negative part pulls the stream back towards the reference. The parts divide the final distance, not the "
        "KLD.",
        NO_STREAM,
    ),
    "trust": Reading(
        "Predicted against patched",
        "Each point is a unit that was both predicted (across) and patched (up); both axes are logarithmic. On the "
        "dashed diagonal the two agree; above it the damage was predicted too small, below it too large. Lines are one "
        "standard error. The three units that are furthest off carry their names.",
        "Predictions are calibrated, so the points lie around the diagonal by construction: what counts is how "
        "closely. Units below the noise floor cannot agree better than noise.",
        "Not drawn: no unit was both predicted and patched.",
    ),
    "tensors": Reading(
        "Where the predicted damage sits",
        "Each cell is the tensors of one role in one layer, when the level's base type is asked for everywhere (where "
        "rows do not hold it, the type that llama.cpp takes instead); the further from the page's colour, "
        "the more KLD is predicted. A strong row is a kind of tensor to spare, a strong column a layer.",
        "Predicted, not measured, and not calibrated. The scale is logarithmic and goes from the smallest to the "
        "largest cell of this type. An empty cell has no such tensor, or no prediction.",
        "Not drawn: no level has a type that was predicted for.",
    ),
}

DEFINITIONS = (
    (
        "KLD",
        "KL(reference ‖ quantized) of the next-token distribution, in nats per token, over the second half of each "
        "chunk as llama-perplexity does. Standard errors treat each chunk as one observation (clustered), because "
        "neighbouring tokens are not independent.",
    ),
    (
        "noise floor",
        "The reference against itself, decoded in two halves and without flash attention. Below it, a value cannot be "
        "told from arithmetic noise.",
    ),
    ("same top", "Share of scored positions where both models put the same token first."),
    ("PPL change", "Perplexity of the level over that of the reference, minus one, on the scored positions."),
    ("Δp", "Change of the probability that is given to the text's real next token."),
    ("bits per weight", "8 × bytes of tensor data / weights, counted in the file, not taken from the level's name."),
    ("stream point", "The residual stream after the embedding, and after each branch has been added to it."),
    ("branch", "What one residual add adds: attention, ffn, or another kind, after its own norm and scale."),
    ("branch ratio", "|branch| / |stream that it reads, as it goes into the add|, per token, then the median."),
    ("drift", "|x quantized − x| / |x| at a stream point, free run. SQNR is −20 log10 of it."),
    ("growth", "Drift of a point over drift of the point before."),
    ("local error", "|b̂ − b| / |b|, with b̂ computed by the quantized layer on the reference's stream (forced run)."),
    ("injected error", "|b̂ − b| / |x|: the same error, over the stream that it goes into."),
    ("drift share, made here", "Part of the final drift by this point, and the part of it made by its own weights."),
    ("unit", "A branch, the embedding or the head: what can be kept at 16 bit on its own."),
    (
        "sensitivity",
        "KLD caused by quantizing one unit alone, measured: by adding the unit's error to an exact model (patched), or "
        "by computing the head with its quantized weights (forced). It is not influence, the KLD of removing a branch.",
    ),
    (
        "predicted (≈)",
        "Half the mean of (gradient · change)², with the gradients of the log probability of tokens drawn from the "
        "reference itself and the change that a type makes to what a tensor puts out: the KLD to second order, from "
        "one backward pass. Never measured, and never shown without its sign.",
    ),
    (
        "calibrated",
        "Predicted, times the level's measured KLD over the sum of its predictions: errors at different positions "
        "hang together, so that predictions alone are mostly too small.",
    ),
    ("confidence", "How often a unit stays among the first k of the list when chunks are drawn again at random."),
    ("massive activations", "A few tokens, mostly the first, whose values are thousands of times the usual ones."),
)
