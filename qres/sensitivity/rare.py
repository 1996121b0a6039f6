"""Stub: being written."""

from collections.abc import Mapping

from qres.sensitivity.ops import Op

OPS: Mapping[str, Op] = {}
