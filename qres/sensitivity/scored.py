"""The scored positions of a chunk in torch: labels drawn at them, and how two models differ there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HUGE = 1e30
"""Logits beyond this are llama.cpp's way of ruling a token out; no error is measured by them."""


def draws(logits: Tensor, count: int, chunk: int) -> list[Tensor]:
    """Labels drawn from the model's own distribution [positions], the same ones in every run."""
    generator = torch.Generator().manual_seed(chunk)
    drawn = []
    for rows in _few(logits):
        cumulative = rows.softmax(dim=1).cumsum(dim=1)
        at = torch.rand(len(rows), count, generator=generator) * cumulative[:, -1:]
        drawn.append(torch.searchsorted(cumulative, at).clamp(max=rows.shape[1] - 1))
    return list(torch.cat(drawn).unbind(1))


def _few(rows: Tensor) -> list[Tensor]:
    """A few MB of logits at a time."""
    return [rows[i : i + 16] for i in range(0, len(rows), 16)]


def kld(reference: Tensor, other: Tensor) -> float:
    """Mean KL(reference || other) over the rows; sums in float64."""
    total = 0.0
    for p, q in zip(_few(reference), _few(other), strict=True):
        a, b = p.double().log_softmax(dim=1), q.double().log_softmax(dim=1)
        terms = a.exp() * (a - b)
        total += float(terms.where(a != -torch.inf, 0.0).sum())
    return total / len(reference)


def nmse(reference: Tensor, other: Tensor) -> float:
    """Squared error over the variance of the reference; sums in float64.

    Tokens that the reference rules out are left aside; NaN where nothing else is left.
    """
    n = first = second = error = 0.0
    for a, b in zip(_few(reference), _few(other), strict=True):
        usual = a.abs() < _HUGE
        x, y = a.where(usual, 0.0).double(), b.where(usual, 0.0).double()
        n += float(usual.sum())
        first += float(x.sum())
        second += float(x.square().sum())
        error += float((x - y).square().sum())
    variance = second - first * first / n if n else 0.0
    return error / variance if variance > 0 else math.nan
