"""The document: what the page shows."""

from __future__ import annotations

import json

import attrs
import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.device import Device
from tunedgemm_report.document import document

from .conftest import TRIALS, WIDE, log_lines, trial_line, with_name


def test_the_first_screen(log):
    """Sum up gains, the floor, and who was faster."""
    made = document(read_findings([log()]))

    assert made["summary"]["gain"] == {"shapes": 2, "mean": pytest.approx(1.5**0.5, rel=1e-4), "time": pytest.approx(212 / 208, rel=1e-4)}
    assert [made["summary"][word] for word in ("faster", "equal", "slower", "without_winner", "weighted")] == [1, 1, 0, 0, False]
    assert made["summary"]["floor"]["shapes"] == 2
    assert made["devices"] == ["sm_90, 132 SMs (nvidia-h200)"]
    assert made["libtypes"] == ["asm", "triton", "torch"]


def test_a_shape_has_all_that_its_hover_shows(log):
    """List shape, solution, times, noise and floor of each shape."""
    made = document(read_findings([log()]))
    shape = next(shape for shape in made["shapes"] if shape["m"] == 64)

    assert shape["winner"] == "asm:fast splitK=2" and shape["libtype"] == "asm"
    assert (shape["us"], shape["noise"], shape["torch_us"], shape["gain"], shape["ties"]) == (8.0, 0.001, 12.0, 1.5, 1)
    assert shape["over_floor"] == pytest.approx(8.0 / shape["floor_us"], rel=1e-3)
    assert (shape["timed"], shape["failed"]) == (3, 1)
    assert shape["tflops"] == pytest.approx(2 * 64 * 2048 * 4096 / 8.0 / 1e6, rel=1e-3)


def test_unknown_ceilings_are_not_guessed(log):
    """Leave floor and roof out for a device without measured ceilings."""
    made = document(read_findings([log(log_lines(device=Device("gfx942", 304, "amd-instinct-mi300x")))]))

    assert made["roofs"] == [] and made["summary"]["floor"] is None
    assert {shape["floor_us"] for shape in made["shapes"]} == {None}
    assert made["summary"]["gain"]["shapes"] == 2


def test_failures_keep_their_reasons(log):
    """Group refused solutions by backend, status and reason."""
    made = document(read_findings([log()]))
    names = made["candidates"]["names"]
    failed = [each for strip in made["candidates"]["of"] for each in strip["failed"]]

    assert [(each["status"], names[each["libtype"]], names[each["reason"]], each["count"]) for each in failed] == [
        ("unsupported", "triton", "K must be a multiple of 96", 1)
    ]


def test_many_candidates_are_thinned(log):
    """Keep the fastest, the winner and torch, and count what is left out."""
    fast = TRIALS[WIDE][1]
    many = [attrs.evolve(with_name(fast, f"k{index:04}"), us=9.0 + index) for index in range(2000)]
    lines = [trial_line(timing) for timing in (attrs.evolve(TRIALS[WIDE][0], us=1500.3), *many)]

    made = document(read_findings([log(lines)]))
    [strip] = made["candidates"]["of"]
    names = [made["candidates"]["names"][number] for number in strip["name"]]

    assert len(names) + strip["left"] == 2001 and len(names) <= 402
    assert names[:2] == ["asm:k0000 splitK=2", "asm:k0001 splitK=2"] and "torch:native" in names
    assert strip["us"] == sorted(strip["us"]) and strip["us"][-1] == 9.0 + 1999
    assert made["shapes"][0]["timed"] == 2001


def test_fields_that_all_shapes_share_are_named_once(log):
    """Leave fields that all shapes of an op share out of their texts; sizes and dtypes always stay."""
    tail = {"scale": "row"}
    shapes = [attrs.evolve(WIDE, **tail), attrs.evolve(WIDE, m=3, **tail), attrs.evolve(WIDE, m=4, layout="aiter16x16", **tail)]
    lines = [trial_line(attrs.evolve(TRIALS[WIDE][0], shape=shape)) for shape in shapes]

    made, single = document(read_findings([log(lines)])), document(read_findings([log(lines[:1])]))

    assert made["shared"] == {"a16w16": "scale=row"}
    assert [shape["text"] for shape in made["shapes"]] == [
        "M=3 N=2048 K=4096 bf16",
        "M=4 N=2048 K=4096 bf16 layout=aiter16x16",
        "M=64 N=2048 K=4096 bf16",
    ]
    assert [(shape["text"], shape["layer"]) for shape in single["shapes"]] == [
        ("M=64 N=2048 K=4096 bf16 scale=row", "N=2048 K=4096 bf16 scale=row")
    ]


def test_control_characters_are_shown(log):
    """Escape the characters of names that hide or reverse text; markup stays text for the page to show."""
    evil = with_name(TRIALS[WIDE][1], "<script>alert(1)</script>\u202egnp\x1b[2J")
    made = document(read_findings([log([trial_line(evil)])]))

    assert made["shapes"][0]["winner"] == "asm:<script>alert(1)</script>\\u202egnp\\x1b[2J splitK=2"
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_search_cost(log):
    """Count solutions by backend and status, and add up the seconds."""
    search = document(read_findings([log()]))["search"]

    counts = {(each["libtype"], each["status"]): each["count"] for each in search["candidates"]}
    assert counts == {("asm", "ok"): 1, ("asm", "screened"): 1, ("triton", "ok"): 1, ("triton", "unsupported"): 1, ("torch", "ok"): 2}
    assert search["seconds"] == {"compile": 3.0}
    assert search["won"] == [{"libtype": "asm", "op": "a16w16", "count": 1}, {"libtype": "torch", "op": "a16w16", "count": 1}]
