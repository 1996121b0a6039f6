"""How charts look on a light and on a dark page. The chart definitions name roles; this file gives them colours.

Categories are the colour-blind-safe set of Okabe and Ito (2008), darkened or lightened to keep 3:1 against the page.
"""

from __future__ import annotations

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_LIGHT = {
    "ink": "#1c2024",
    "soft": "#5a636d",
    "line": "#e3e1dc",
    "guide": "#6f7780",
    "levels": ["#0072b2", "#d55e00", "#00835f", "#b0528f", "#8a6d00", "#3b7fb8", "#5b5f66", "#7a4fb5"],
    "branches": ["#0072b2", "#d55e00", "#00835f", "#b0528f", "#8a6d00", "#5b5f66", "#7a4fb5", "#3b7fb8"],
    "heat": ["#e3edf6", "#8dbadd", "#2a78b5", "#0b2f57"],
}
_DARK = {
    "ink": "#e8eaec",
    "soft": "#a3abb4",
    "line": "#2f353b",
    "guide": "#8f98a1",
    "levels": ["#56b4e9", "#f08a3c", "#3fc79a", "#e39ac9", "#e6c84b", "#8ec7f0", "#b4bac1", "#b79be8"],
    "branches": ["#56b4e9", "#f08a3c", "#3fc79a", "#e39ac9", "#e6c84b", "#b4bac1", "#b79be8", "#8ec7f0"],
    "heat": ["#22323f", "#2f6794", "#56a8e0", "#d6eeff"],
}


def light() -> dict[str, Any]:
    """Vega-Lite config for a light page."""
    return _config(_LIGHT)


def dark() -> dict[str, Any]:
    """Vega-Lite config for a dark page."""
    return _config(_DARK)


def _config(colours: dict[str, Any]) -> dict[str, Any]:
    label = {"labelColor": colours["soft"], "titleColor": colours["soft"], "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "range": {
            "category": colours["levels"],
            "ordinal": colours["branches"],
            "heatmap": {"scheme": colours["heat"]},
        },
        "axis": {
            **label,
            "titleFontWeight": "normal",
            "gridColor": colours["line"],
            "domainColor": colours["line"],
            "tickColor": colours["line"],
            "labelPadding": 6,
            "titlePadding": 10,
        },
        "bar": {"color": colours["levels"][0]},
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False},
        "legend": {
            **label,
            "labelColor": colours["ink"],
            "titleFontWeight": "normal",
            "symbolStrokeWidth": 2,
            "symbolStrokeColor": colours["soft"],
        },
        "text": {"color": colours["ink"], "fontSize": 12},
        "style": {
            "guide": {"color": colours["guide"], "strokeWidth": 1, "strokeDash": [2, 3]},
            "guide-words": {"color": colours["soft"], "fontSize": 11, "align": "right", "baseline": "bottom"},
        },
    }
