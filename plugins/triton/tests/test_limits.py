"""Limits: which shapes no kernel takes, and why."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import ops
from tunedgemm_triton import installed
from tunedgemm_triton.families import family_of, unsupported

MOE = ops()["fmoe"].examples


def _weight(name: str, group: int = 0, m: int = 1) -> Shape:
    """Return a shape of a weight-only format."""
    return Shape("a16wn", m, 64, 256, scale="block", extra={"w_format": name, "w_group": group})


CASES = [
    (Shape("a16w16", 1, 16, 16), "cpu-avx2", "CPU"),
    (Shape("a16w16", 1, 16, 16), "gfx906", "known"),
    (Shape("a16w16", 0, 16, 16), "sm_90", "empty"),
    (Shape("a16w16", 1, 16, 16, dtype="fp32"), "sm_90", "fp32"),
    (Shape("a16w16", 1, 16, 16, outdtype="fp8"), "sm_90", "output"),
    (Shape("a16w16", 1, 16, 16, scale="tensor"), "sm_90", "scale"),
    (Shape("a8w8", 1, 16, 32, "fp8_e4m3fnuz", "bf16", scale="row"), "sm_90", "fp8_e4m3fn,"),
    (Shape("a8w8", 1, 16, 32, "fp8_e4m3fn", "bf16", scale="row"), "gfx90a", "no fp8"),
    (Shape("a8w8", 1, 16, 1 << 17, "int8", "bf16", scale="row"), "sm_90", "K=131071"),
    (Shape("a8w8_blockscale", 1, 16, 32, "int8", "bf16", scale="block"), "sm_90", "int8"),
    (Shape("batched_bf16", 1, 16, 16, extra={"B": 1 << 16}), "sm_90", "65535"),
    (Shape("a8w8", 1, 16, 32, dtype="int8", scale="row", layout="aiter16x16"), "gfx942", "layout"),
    (MOE[0], "cpu-avx2", "CPU"),
    (MOE[0], "gfx906", "known"),
    (MOE[-1], "sm_90", "empty"),
    (MOE[10], "sm_90", "fp8_e4m3fnuz"),
    (MOE[6], "sm_80", "fp8"),
    (ops()["a16w4_blockscale"].examples[2], "sm_90", "range"),
    (attrs.evolve(ops()["a4w4_blockscale"].examples[0], layout="aiter32x16"), "sm_90", "layout"),
    (_weight("nvfp4", 16), "sm_80", "e4m3"),
    (_weight("int8_channel"), "gfx1201", "registers"),
    (attrs.evolve(_weight("int8_channel"), layout="aiter16x16"), "sm_90", "layout"),
    (_weight("int8_channel", m=0), "sm_90", "empty"),
]


def test_an_unsupported_shape_has_a_reason_and_no_solutions() -> None:
    """`supports` names the limit, and nothing is enumerated."""
    faults = []
    for shape, gfx, reason in CASES:
        device = Device(gfx, 100)
        answer, listed = unsupported(shape, device), list(family_of(shape.op).enumerate_solutions(shape, device))
        if reason not in (answer or "") or listed:
            faults.append((str(shape), gfx, str(answer)))
    assert not faults


def test_the_largest_int8_product_is_supported() -> None:
    """Sums of K=131071 products of int8 fit int32."""
    assert not unsupported(Shape("a8w8", 1, 16, (1 << 17) - 1, "int8", "bf16", scale="row"), Device("sm_90", 132))


@pytest.mark.parametrize(
    ("gfx", "version", "said"),
    [
        ("sm_107", "3.8.0", "3.9 or later for sm_107 (got 3.8.0)"), ("sm_107", "3.9.0", ""),
        ("sm_110", "3.6.0", "3.8"), ("sm_110", "3.8.0", ""),
        ("gfx1250", "3.6.0", "3.8"), ("gfx1250", "3.8.0", ""), ("gfx1250", "", ""), ("gfx1251", "3.6.0", "3.8"),
        ("gfx1154", "3.8.0", "3.9"), ("gfx1170", "3.8.0", "3.9"), ("gfx1172", "3.9.0", ""),
        ("gfx1155", "3.8.0", "3.9"), ("gfx1155", "3.9.0", ""), ("sm_122", "3.6.0", ""), ("gfx1103", "3.6.0", ""),
        ("sm_103", "3.6.0", ""), ("gfx1151", "3.6.0", ""),
    ],
)  # fmt: skip
def test_an_architecture_beyond_the_installed_triton_is_refused(monkeypatch: pytest.MonkeyPatch, gfx: str, version: str, said: str) -> None:
    """The reason names the first Triton that compiles for it."""
    monkeypatch.setattr(installed, "version", lambda: version)
    shape, device = Shape("a16w16", 16, 64, 64), Device(gfx, 64)

    answer = unsupported(shape, device)

    assert answer and said in answer and "; " in answer if said else not answer
    assert bool(list(family_of(shape.op).enumerate_solutions(shape, device))) is not bool(said)
