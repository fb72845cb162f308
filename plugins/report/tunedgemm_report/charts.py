"""The plots of a report as Vega-Lite specifications, for the page and for pictures alike.

A specification names its data sets, whose rows `tunedgemm_report.document` describes; the
page fills them after each filter. Colours are variables of the page's style sheet, so that both
themes and print share one drawing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tunedgemm.analysis.results import BASELINE

Spec = dict[str, Any]

#: Most shapes of a plot, those with the most time; and most layers.
MOST_SHAPES, MOST_LAYERS = 1500, 30
#: Colours of backends in the order of their rank; more backends share them. Torch is the baseline,
#: and grey.
_COLOURS, _GREY = 8, "var(--grey)"
#: More layers than this are not joined by lines.
_JOINED = 12

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

_TITLES = {
    "text": "shape", "layer": "layer", "winner": "solution", "solution": "solution", "us_text": "time", "torch_text": "torch",
    "gain_text": "speed-up", "floor_text": "floor", "point": "point", "status": "status", "count": "number", "libtype": "backend",
    "op": "op", "first_text": "first", "second_text": "second", "verdict": "verdict",
}  # fmt: skip
_OF_SHAPE = ("text", "layer", "winner", "us_text", "torch_text", "gain_text", "floor_text")


def _us(field: str) -> str:
    return f"(isValid(datum.{field}) ? format(datum.{field}, '.2f') + ' us' : 'unknown')"


def _ratio(field: str) -> str:
    return f"(isValid(datum.{field}) ? format(datum.{field}, '.3f') + 'x' : 'unknown')"


#: The texts of a shape's tooltip.
_TEXTS: list[Spec] = [
    {"calculate": _us("us") + " + (datum.noise ? ' ± ' + format(datum.noise * 100, '.1f') + ' %' : '')", "as": "us_text"},
    {"calculate": _us("torch_us"), "as": "torch_text"},
    {"calculate": _ratio("gain"), "as": "gain_text"},
    {"calculate": f"{_us('floor_us')} + (isValid(datum.over_floor) ? ', winner at ' + {_ratio('over_floor')} : '')", "as": "floor_text"},
]


def colours(libtypes: Sequence[str]) -> Spec:
    """Return the scale that gives each backend one colour in all plots."""
    others = [name for name in libtypes if name != BASELINE.partition(":")[0]]
    by_name = {name: f"var(--c{index % _COLOURS})" for index, name in enumerate(others)}
    return {"domain": list(libtypes), "range": [by_name.get(name, _GREY) for name in libtypes]}


def charts(libtypes: Sequence[str], won: Sequence[str], *, several_ops: bool = False) -> dict[str, Spec]:
    """Return the specification of each plot by its name.

    Args:
        libtypes: the backends, in the order of their colours.
        won: those that won a shape, which legends list.
        several_ops: whether names of layers need their op.
    """
    scale = {**colours(libtypes), "won": list(won)}
    named = "datum.op + ' ' + datum.layer" if several_ops else "datum.layer"
    return {
        "gain-by-m": _by_m(scale, _ratio_axis("speed-up over torch"), [_one("y")]),
        "floor-by-m": _by_m(scale, _ratio_axis("time over the floor", "over_floor"), [_one("y")]),
        "rate-by-m": _by_m(scale, _log("tflops", "TFLOP/s")),
        "gain-by-layer": _gain_by_layer(scale, named),
        "roofline": _roofline(scale),
        "won": _won(scale),
        "candidates": _candidates(scale),
        "cost": _cost(),
        "compare": _compare(),
    }


def _colour(scale: Spec, legend: bool = True) -> Spec:
    look = {
        "orient": "top",
        "title": "winner's backend",
        "titleOrient": "left",
        "symbolType": "circle",
        "columns": 6,
        "values": scale["won"],
    }
    shown = {"domain": scale["domain"], "range": scale["range"]}
    return {"field": "libtype", "type": "nominal", "scale": shown, "legend": look if legend else None}


def _words(field: str, symbol: str, colours: Mapping[str, str]) -> Spec:
    """Return the colours of a field of few words, with a legend."""
    legend = {"orient": "top", "title": None, "symbolType": symbol}
    return {"field": field, "type": "nominal", "scale": {"domain": [*colours], "range": [*colours.values()]}, "legend": legend}


def _tips(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal", "title": _TITLES[field]} for field in fields]


def _ratio_axis(title: str, field: str = "gain") -> Spec:
    axis = {"labelExpr": "format(datum.value, '.3~r') + 'x'", "title": title, "tickCount": 6, "grid": True}
    return {"field": field, "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False, "padding": 14}, "axis": axis}


def _log(field: str, title: str, form: str = "~r") -> Spec:
    axis = {"title": f"{title} (log scale)", "format": form, "labelOverlap": True, "tickCount": 6}
    return {"field": field, "type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 14}, "axis": axis}


def _names(field: str, *, lines: bool = False, **more: Any) -> Spec:
    """Return an axis of names, without ticks and line."""
    axis = {"title": None, "labelLimit": 430, "ticks": False, "domain": False, "grid": lines, "labelPadding": 6}
    return {"field": field, "type": "nominal", "axis": axis, **more}


def _one(axis: str) -> Spec:
    """Return the line at a ratio of 1."""
    return {
        "mark": {"type": "rule", "color": "var(--fg)", "strokeWidth": 1, "tooltip": None, "aria": False},
        "encoding": {axis: {"datum": 1}},
    }


def _by_m(scale: Spec, y: Spec, below: Sequence[Spec] = ()) -> Spec:
    """Return a plot of a figure by M, in which lines join the M of few layers."""
    axis = {"title": "M, rows of the batch (log scale)", "format": "d", "labelOverlap": True, "grid": False}
    x = {"field": "m", "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False, "padding": 18}, "axis": axis}
    transforms = [
        {"filter": f"isValid(datum.{y['field']}) && datum.m > 0"},
        {"calculate": "datum.op + ' ' + datum.layer", "as": "group"},
        {"joinaggregate": [{"op": "distinct", "field": "group", "as": "groups"}]},
        *_TEXTS,
    ]
    line = {
        "transform": [{"filter": f"datum.groups <= {_JOINED}"}],
        "mark": {"type": "line", "color": "var(--line)", "strokeWidth": 1, "tooltip": None, "aria": False},
        "encoding": {"x": x, "y": y, "detail": {"field": "group"}},
    }
    points = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.9},
        "encoding": {"x": x, "y": y, "color": _colour(scale), "tooltip": _tips(*_OF_SHAPE)},
    }
    layers = [*below, line, points]
    return {"width": "container", "height": 300, "data": {"name": "shapes"}, "transform": transforms, "layer": layers}


def _gain_by_layer(scale: Spec, named: str) -> Spec:
    gain = _ratio_axis("speed-up over torch")
    y = _names("group", lines=True, sort={"field": "total", "op": "max", "order": "descending"})
    sums = [{"op": "sum", "field": field, "as": field + "s"} for field in ("weight", "log")]
    transforms = [
        {"filter": "isValid(datum.gain)"},
        {"calculate": named, "as": "group"},
        {"calculate": "max(datum.calls, 1)", "as": "weight"},
        {"calculate": "datum.weight * log(datum.gain)", "as": "log"},
        {"joinaggregate": [*sums, {"op": "sum", "field": "time_us", "as": "total"}], "groupby": ["group"]},
        {"window": [{"op": "dense_rank", "as": "place"}], "sort": [{"field": "total", "order": "descending"}, {"field": "group"}]},
        {"filter": f"datum.place <= {MOST_LAYERS}"},
        {"window": [{"op": "row_number", "as": "nth"}], "groupby": ["group"]},
        {"calculate": "exp(datum.logs / datum.weights)", "as": "mean"},
        *_TEXTS,
    ]
    points = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.85},
        "encoding": {"y": y, "x": gain, "color": _colour(scale), "tooltip": _tips(*_OF_SHAPE)},
    }
    means = {
        "transform": [{"filter": "datum.nth == 1"}],
        "mark": {"type": "tick", "thickness": 2.5, "color": "var(--fg)", "size": 18, "tooltip": None, "aria": False},
        "encoding": {"y": y, "x": {**gain, "field": "mean"}},
    }
    data = {"data": {"name": "shapes"}, "transform": transforms}
    return {"width": "container", "height": {"step": 24}, **data, "layer": [_one("x"), points, means]}


def _roofline(scale: Spec) -> Spec:
    x, y = _log("intensity", "operations per byte of memory traffic", "~s"), _log("tflops", "TFLOP/s")
    tips = _tips("text", "point", *_OF_SHAPE[2:])
    roof = {
        "data": {"name": "roofs"},
        "mark": {"type": "line", "color": "var(--fg)", "strokeWidth": 1.5, "tooltip": None, "aria": False},
        "encoding": {"x": x, "y": y, "detail": {"field": "roof"}},
    }

    def points(point: str, field: str, mark: Spec, **more: Any) -> Spec:
        transforms = [{"filter": f"isValid(datum.{field})"}, {"calculate": json.dumps(point), "as": "point"}]
        encoding = {"x": x, "y": {**y, "field": field}, "tooltip": tips, **more}
        return {"transform": transforms, "mark": mark, "encoding": encoding}

    reach = {
        "transform": [{"filter": "isValid(datum.tflops) && isValid(datum.floor_tflops)"}],
        "mark": {"type": "rule", "color": "var(--line)", "strokeWidth": 1, "tooltip": None, "aria": False},
        "encoding": {"x": x, "y": y, "y2": {"field": "floor_tflops"}},
    }
    bar = {"type": "tick", "color": "var(--fg)", "thickness": 2, "size": 12, "orient": "horizontal"}
    ring = {"type": "point", "size": 70, "color": "var(--muted)", "filled": False, "strokeWidth": 1.5}
    dot = {"type": "circle", "size": 60, "opacity": 0.95}
    layers = [
        roof,
        reach,
        points("floor", "floor_tflops", bar),
        points("torch's own call", "torch_tflops", ring),
        points("winner", "tflops", dot, color=_colour(scale)),
    ]
    transforms = [{"filter": "isValid(datum.intensity)"}, *_TEXTS]
    return {"width": "container", "height": 380, "data": {"name": "shapes"}, "transform": transforms, "layer": layers}


def _bar(data: str, step: int, encoding: Spec, transforms: Sequence[Spec] = ()) -> Spec:
    mark = {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--bg)", "strokeWidth": 1}
    return {
        "width": "container",
        "height": {"step": step},
        "data": {"name": data},
        "transform": list(transforms),
        "mark": mark,
        "encoding": encoding,
    }


def _count(title: str) -> Spec:
    return {"field": "count", "type": "quantitative", "stack": "zero", "axis": {"title": title, "tickMinStep": 1, "format": "d"}}


def _won(scale: Spec) -> Spec:
    transforms: list[Spec] = [
        {"filter": "datum.libtype != ''"},
        {"aggregate": [{"op": "count", "as": "count"}], "groupby": ["op", "libtype"]},
        {"calculate": f"indexof({json.dumps(scale['domain'])}, datum.libtype)", "as": "order"},
    ]
    tips = _tips("op", "libtype", "count")
    encoding = {"x": _count("shapes won"), "y": _names("op"), "color": _colour(scale), "order": {"field": "order"}, "tooltip": tips}
    return _bar("all", 36, encoding, transforms)


def _candidates(scale: Spec) -> Spec:
    x = _log("us", "microseconds of one call")
    y = _names("libtype", lines=True, sort=scale["domain"])
    place = {"y": y, "yOffset": {"field": "jitter", "type": "quantitative", "scale": {"domain": [0, 1]}}}
    tips = _tips("solution", "us_text", "status")
    noise = {
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7, "tooltip": None, "aria": False},
        "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, **place, "color": _colour(scale, False)},
    }
    opacity = {"condition": {"test": "datum.rough", "value": 0.3}, "value": 0.9}
    points = {
        "mark": {"type": "circle", "size": 46},
        "encoding": {"x": x, **place, "color": _colour(scale, False), "opacity": opacity, "tooltip": tips},
    }
    best = {
        "transform": [{"filter": "datum.won"}],
        "mark": {"type": "point", "size": 170, "color": "var(--fg)", "strokeWidth": 1.5, "filled": False},
        "encoding": {"x": x, **place, "tooltip": tips},
    }
    rule = {"type": "rule", "color": "var(--fg)", "strokeDash": [4, 3], "tooltip": None, "aria": False}
    label = {"type": "text", "align": "left", "dx": 4, "baseline": "top", "color": "var(--muted)", "y": 2, "tooltip": None, "aria": False}
    marks = {
        "data": {"name": "marks"},
        "layer": [{"mark": rule, "encoding": {"x": x}}, {"mark": label, "encoding": {"x": x, "text": {"field": "label"}}}],
    }
    transforms = [
        {"calculate": "datum.us * (1 - datum.noise)", "as": "low"},
        {"calculate": "datum.us * (1 + datum.noise)", "as": "high"},
        {"calculate": "datum.rough ? 'screened: a rough timing' : 'ok: measured and correct'", "as": "status"},
        *_TEXTS[:1],
    ]
    layers = [marks, {"data": {"name": "strip"}, "transform": transforms, "layer": [noise, points, best]}]
    return {"width": "container", "height": {"step": 52}, "layer": layers}


def _cost() -> Spec:
    colour = _words("status", "square", {"ok": "var(--c0)", "screened": "var(--c5)", "refused or failed": "var(--c1)"})
    order = {"field": "rank"}
    tips = _tips("libtype", "status", "count")
    y = _names("libtype", sort={"field": "order"})
    return _bar("cost", 28, {"x": _count("solutions tried"), "y": y, "color": colour, "order": order, "tooltip": tips})


def _compare() -> Spec:
    colour = _words("verdict", "circle", {"faster": "var(--c2)", "equal": _GREY, "slower": "var(--c1)"})
    transforms = [
        {"filter": "isValid(datum.ratio)"},
        {"calculate": f"datum.first_winner + ', ' + {_us('first_us')}", "as": "first_text"},
        {"calculate": f"datum.second_winner + ', ' + {_us('second_us')}", "as": "second_text"},
        {"calculate": _ratio("ratio"), "as": "gain_text"},
    ]
    tips = _tips("text", "layer", "first_text", "second_text", "gain_text", "verdict")
    x, y = _log("first_us", "microseconds in the first"), _ratio_axis("speed-up of the second", "ratio")
    points = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.85},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": tips},
    }
    return {"width": "container", "height": 260, "data": {"name": "compared"}, "transform": transforms, "layer": [_one("y"), points]}
