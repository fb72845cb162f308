"""The plots of a report as Vega-Lite specifications, for the page and for pictures alike.

A specification names its data sets; the page fills them after each filter. Colours are variables of
the page's style sheet, so that both themes and print share one drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunedgemm.libtypes import BUILTIN

#: Colours of backends in the order of their rank; more backends share them.
_COLOURS = 8
#: A shape's own colour: torch is the baseline, so it stays grey.
_GREY = "var(--grey)"
_TIMES = "format(datum.value, '.3~r') + 'x'"

Spec = dict[str, Any]

#: Type, grid and ground of all plots.
CONFIG: Spec = {
    "background": None,
    "font": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--grid)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8,
    },
    "legend": {
        "labelColor": "var(--fg)", "titleColor": "var(--muted)", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
    },
    "text": {"font": "system-ui, sans-serif", "fontSize": 12},
}  # fmt: skip


def colours(libtypes: Sequence[str]) -> Spec:
    """Return the scale that gives each backend one colour in all plots."""
    others = [name for name in libtypes if name != BUILTIN]
    by_name = {name: f"var(--c{index % _COLOURS})" for index, name in enumerate(others)}
    return {"domain": list(libtypes), "range": [by_name.get(name, _GREY) for name in libtypes]}


def charts(libtypes: Sequence[str], won: Sequence[str]) -> dict[str, Spec]:
    """Return the specification of each plot by its name.

    Args:
        libtypes: the backends, in the order of their colours.
        won: those that won a shape, which legends list.
    """
    scale = {**colours(libtypes), "won": list(won)}
    return {
        "gain-by-m": _gain_by_m(scale),
        "gain-by-layer": _gain_by_layer(scale),
        "roofline": _roofline(scale),
        "won": _won(scale),
        "candidates": _candidates(scale),
        "cost": _cost(),
    }


def _colour(scale: Spec, title: str | None = "winner's backend") -> Spec:
    legend = (
        None
        if title is None
        else {"orient": "top", "title": title, "titleOrient": "left", "symbolType": "circle", "columns": 6, "values": scale["won"]}
    )
    shown = {"domain": scale["domain"], "range": scale["range"]}
    return {"field": "libtype", "type": "nominal", "scale": shown, "legend": legend}


def _gain_axis(title: str = "speed-up over torch") -> Spec:
    axis = {"labelExpr": _TIMES, "title": title, "tickCount": 6}
    return {"field": "gain", "type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 14}, "axis": axis}


def _tips(*fields: str) -> list[Spec]:
    """Return the tooltip of a shape, with these fields after its name."""
    titles = {
        "text": "shape",
        "layer": "layer",
        "winner": "winner",
        "solution": "solution",
        "us_text": "time",
        "torch_text": "torch",
        "gain_text": "speed-up",
        "floor_text": "floor",
        "kind": "point",
        "calls": "calls",
        "status": "status",
        "count": "number",
        "libtype": "backend",
        "op": "op",
        "seconds": "seconds",
        "activity": "activity",
        "first_text": "first",
        "second_text": "second",
        "ratio_text": "speed-up",
    }
    return [{"field": field, "type": "nominal", "title": titles[field]} for field in fields]


_OF_SHAPE = ("text", "layer", "winner", "us_text", "torch_text", "gain_text", "floor_text")


def _m_axis() -> Spec:
    axis = {"title": "M, rows of the batch (log scale)", "format": "d", "labelOverlap": True, "grid": False}
    return {"field": "m", "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False, "padding": 18}, "axis": axis}


def _one(axis: str) -> Spec:
    """Return the line at a speed-up of 1."""
    return {"mark": {"type": "rule", "color": "var(--fg)", "strokeWidth": 1}, "encoding": {axis: {"datum": 1}}}


def _gain_by_m(scale: Spec) -> Spec:
    line = {
        "mark": {"type": "line", "color": "var(--line)", "strokeWidth": 1, "interpolate": "linear", "tooltip": None},
        "encoding": {"x": _m_axis(), "y": _gain_axis(), "detail": {"field": "group"}},
        "transform": [{"filter": "datum.joined"}],
    }
    points = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.9},
        "encoding": {"x": _m_axis(), "y": _gain_axis(), "color": _colour(scale), "tooltip": _tips(*_OF_SHAPE)},
    }
    return {"width": "container", "height": 250, "data": {"name": "gains"}, "layer": [_one("y"), line, points]}


def _gain_by_layer(scale: Spec) -> Spec:
    gain = _gain_axis("speed-up over torch; the bar is the geometric mean")
    y = {
        "field": "layer",
        "type": "nominal",
        "sort": {"field": "order", "op": "min"},
        "axis": {"title": None, "labelLimit": 230, "ticks": False, "domain": False, "grid": True, "labelPadding": 6},
    }
    points = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.85},
        "encoding": {"y": y, "x": gain, "color": _colour(scale), "tooltip": _tips(*_OF_SHAPE)},
    }
    means = {
        "transform": [{"filter": "datum.first"}],
        "mark": {"type": "tick", "thickness": 2.5, "color": "var(--fg)", "size": 18, "tooltip": None},
        "encoding": {"y": y, "x": {**gain, "field": "mean"}},
    }
    return {"width": "container", "height": {"step": 24}, "data": {"name": "layers"}, "layer": [_one("x"), points, means]}


def _roofline(scale: Spec) -> Spec:
    x = {
        "field": "intensity",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "padding": 14},
        "axis": {"title": "operations per byte of memory traffic (log scale)", "format": "~s", "labelOverlap": True, "tickCount": 6},
    }
    y = {
        "field": "tflops",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "padding": 14},
        "axis": {"title": "TFLOP/s (log scale)", "format": "~r", "labelOverlap": True, "tickCount": 6},
    }
    tips = _tips("text", "kind", "solution", "us_text", "floor_text", "gain_text")
    roof = {
        "data": {"name": "roofs"},
        "mark": {"type": "line", "color": "var(--fg)", "strokeWidth": 1.5, "tooltip": None},
        "encoding": {"x": x, "y": y, "detail": {"field": "roof"}},
    }
    reach = {
        "transform": [{"filter": "datum.kind == 'winner' && isValid(datum.floor_tflops)"}],
        "mark": {"type": "rule", "color": "var(--line)", "strokeWidth": 1, "tooltip": None},
        "encoding": {"x": x, "y": y, "y2": {"field": "floor_tflops"}},
    }
    floor = {
        "transform": [{"filter": "datum.kind == 'floor'"}],
        "mark": {"type": "tick", "color": "var(--fg)", "thickness": 2, "size": 12, "orient": "horizontal"},
        "encoding": {"x": x, "y": y, "tooltip": tips},
    }
    torch = {
        "transform": [{"filter": "datum.kind == 'torch'"}],
        "mark": {"type": "point", "size": 70, "color": "var(--muted)", "filled": False, "strokeWidth": 1.5},
        "encoding": {"x": x, "y": y, "tooltip": tips},
    }
    winner = {
        "transform": [{"filter": "datum.kind == 'winner'"}],
        "mark": {"type": "circle", "size": 60, "opacity": 0.95},
        "encoding": {"x": x, "y": y, "color": _colour(scale), "tooltip": tips},
    }
    return {"width": "container", "height": 380, "data": {"name": "points"}, "layer": [roof, reach, floor, torch, winner]}


def _won(scale: Spec) -> Spec:
    x = {"field": "count", "type": "quantitative", "stack": "zero", "axis": {"title": "shapes won", "tickMinStep": 1, "format": "d"}}
    y = {"field": "op", "type": "nominal", "axis": {"title": None, "ticks": False, "domain": False, "grid": False, "labelPadding": 6}}
    encoding = {"x": x, "y": y, "color": _colour(scale), "order": {"field": "order"}, "tooltip": _tips("op", "libtype", "count")}
    bar = {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--bg)", "strokeWidth": 1}
    return {"width": "container", "height": {"step": 36}, "data": {"name": "won"}, "mark": bar, "encoding": encoding}


def _candidates(scale: Spec) -> Spec:
    x = {
        "field": "us",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "padding": 14},
        "axis": {"title": "microseconds of one call (log scale)", "labelOverlap": True, "tickCount": 8, "format": "~r"},
    }
    y = {
        "field": "libtype",
        "type": "nominal",
        "sort": scale["domain"],
        "axis": {"title": None, "ticks": False, "domain": False, "grid": True, "labelPadding": 6},
    }
    offset = {"field": "jitter", "type": "quantitative", "scale": {"domain": [0, 1]}}
    tips = _tips("solution", "us_text", "status")
    noise = {
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7, "tooltip": None},
        "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "yOffset": offset, "color": _colour(scale, None)},
    }
    opacity = {"condition": {"test": "datum.rough", "value": 0.3}, "value": 0.9}
    points = {
        "mark": {"type": "circle", "size": 46},
        "encoding": {"x": x, "y": y, "yOffset": offset, "color": _colour(scale, None), "opacity": opacity, "tooltip": tips},
    }
    best = {
        "transform": [{"filter": "datum.won"}],
        "mark": {"type": "point", "size": 170, "color": "var(--fg)", "strokeWidth": 1.5, "filled": False},
        "encoding": {"x": x, "y": y, "yOffset": offset, "tooltip": tips},
    }
    marks = {
        "data": {"name": "marks"},
        "layer": [
            {"mark": {"type": "rule", "color": "var(--fg)", "strokeDash": [4, 3], "tooltip": None}, "encoding": {"x": x}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "baseline": "top", "color": "var(--muted)", "y": 2, "tooltip": None},
                "encoding": {"x": x, "text": {"field": "label"}},
            },
        ],
    }
    return {"width": "container", "height": {"step": 52}, "data": {"name": "strip"}, "layer": [marks, noise, points, best]}


def _cost() -> Spec:
    domain = ["ok", "screened", "refused or failed"]
    colour = {
        "field": "status",
        "type": "nominal",
        "scale": {"domain": domain, "range": ["var(--c0)", "var(--c5)", "var(--c1)"]},
        "legend": {"orient": "top", "title": None, "symbolType": "square"},
    }
    x = {"field": "count", "type": "quantitative", "stack": "zero", "axis": {"title": "solutions tried", "format": "d", "tickMinStep": 1}}
    axis = {"title": None, "ticks": False, "domain": False, "grid": False, "labelPadding": 6}
    y = {"field": "libtype", "type": "nominal", "sort": {"field": "order"}, "axis": axis}
    encoding = {"x": x, "y": y, "color": colour, "order": {"field": "rank"}, "tooltip": _tips("libtype", "status", "count")}
    bar = {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--bg)", "strokeWidth": 1}
    return {"width": "container", "height": {"step": 28}, "data": {"name": "cost"}, "mark": bar, "encoding": encoding}
