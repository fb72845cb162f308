"""The plots of a report as pictures: the page's specifications, drawn without a browser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunedgemm.plugin import UserError
from tunedgemm.tools.files import replace_file

from tunedgemm_report.charts import CONFIG, MOST_SHAPES
from tunedgemm_report.page import plots, style, vega

#: Pixels of a picture's plot, and points of each in a PNG.
_WIDTH, _SCALE = 760, 2.0
#: Steps of a candidate's place across its row, so that neighbours do not hide each other.
_GOLDEN = 0.618034
#: Plot -> a data set, and the field of it without which there is nothing to draw.
_NEEDS = {
    "gain-by-m": ("shapes", "gain"), "floor-by-m": ("shapes", "over_floor"), "rate-by-m": ("shapes", "tflops"),
    "gain-by-layer": ("shapes", "gain"), "roofline": ("shapes", "tflops"), "won": ("all", "libtype"),
    "candidates": ("strip", "us"), "cost": ("cost", "count"), "compare": ("compared", "ratio"),
}  # fmt: skip


def write_plots(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw each plot that has data as PNG and SVG, in the colours of print; return the files.

    The candidates are those of the shape with the most time over its floor.

    Raises:
        UserError: the folder or a file cannot be written, or the library is not installed.
    """
    written: list[Path] = []
    sets = data_sets(document)
    colours = dict(re.findall(r"(--[\w]+):(#[0-9a-f]+)", style().partition("[data-theme=dark]")[0]))
    for name, spec in plots(document).items():
        field, needed = _NEEDS[name]
        if not any(row[needed] for row in sets[field]):
            continue
        drawn = {**_plain({"config": {**CONFIG, "background": "white"}, **spec}, colours), "width": _WIDTH}
        drawn["datasets"] = {used: sets[used] for used in _used(spec)}
        picture = vega().vegalite_to_svg(drawn).encode(), vega().vegalite_to_png(drawn, scale=_SCALE)
        for kind, content in zip(("svg", "png"), picture, strict=True):
            written.append(_write(folder / f"{name}.{kind}", content))
    return written


def data_sets(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the data sets that the plots name, of all shapes."""
    shapes = document["shapes"]
    compared = document["compare"]["rows"] if document.get("compare") else []
    heaviest = sorted(shapes, key=lambda shape: -(shape["time_us"] or 0.0))[:MOST_SHAPES]
    tried = [shape for shape in shapes if shape["timed"]]
    chosen = max(tried, key=lambda shape: shape["lost_us"] or 0.0, default=None)
    strip, marks = ([], []) if chosen is None else (strip_rows(document, chosen), _marks(chosen))
    return {
        "shapes": heaviest,
        "all": shapes,
        "roofs": document["roof_lines"],
        "cost": document["search"]["rows"],
        "strip": strip,
        "marks": marks,
        "compared": compared[:MOST_SHAPES],
    }


def strip_rows(document: Mapping[str, Any], shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the candidates of a shape, as the page builds them."""
    columns, names = document["candidates"]["of"][shape["id"]], document["candidates"]["names"]
    return [
        {
            "solution": names[columns["name"][index]],
            "libtype": names[columns["libtype"][index]],
            "us": us,
            "noise": columns["noise"][index],
            "rough": columns["rough"][index] == "1",
            "jitter": 0.15 + 0.7 * (index * _GOLDEN % 1),
            "won": names[columns["name"][index]] == shape["winner"],
        }
        for index, us in enumerate(columns["us"])
    ]


def _marks(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"us": shape[field], "label": label} for field, label in (("torch_us", "torch"), ("floor_us", "floor")) if shape[field]]


def _used(spec: Any) -> set[str]:
    """Return the names of the data sets in a specification."""
    if isinstance(spec, list):
        return {name for part in spec for name in _used(part)}
    if not isinstance(spec, dict):
        return set()
    own = {spec["data"]["name"]} if isinstance(spec.get("data"), dict) else set()
    return own | {name for key, part in spec.items() if key != "data" for name in _used(part)}


def _plain(value: Any, colours: Mapping[str, str]) -> Any:
    """Return a specification with the colours that variables of the style sheet stand for."""
    if isinstance(value, dict):
        return {key: _plain(part, colours) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, colours) for part in value]
    if isinstance(value, str) and value.startswith("var("):
        return colours[value[4:-1]]
    return value


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, durable=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; name another folder with --plots") from error
    return path
