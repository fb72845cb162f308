"""Names, limits and lists of solutions."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm_deepgemm import deepgemm, limits, space
from tunedgemm_deepgemm.names import Kernel, parse_name

H200 = Device("sm_90", 132, "nvidia-h200")
PLAIN = Shape("a16w16", 64, 2112, 7168)
SCALED = Shape("a8w8_blockscale", 64, 2112, 7168, "fp8_e4m3fn", "bf16", scale="block")


def test_names_come_back() -> None:
    """A name determines the settings; one that is not written as `name` writes it is unknown."""
    kernels = [Kernel(block, sms, pdl, mnk) for block in (0, 64) for sms in (0, 120) for pdl in (False, True) for mnk in (False, True)]
    kernels += [attrs.evolve(kernel, rows=rows, masked=not rows) for kernel in kernels for rows in (0, 16)]
    assert [parse_name(kernel.name) for kernel in kernels] == kernels
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert parse_name("") == parse_name("native") == Kernel()
    for wrong in ("pdl_n64", "n064", "n64_", "_pdl", "s", "native_pdl", "n64pdl", "k64", "m064", "m64masked", "native "):
        with pytest.raises(PluginError, match=f"no kernel '{wrong}'"):
            parse_name(wrong)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"outdtype": "fp32"}, ""),
        ({"dtype": "fp16", "outdtype": "bf16"}, "operands must be bf16 (got fp16)"),
        ({"outdtype": "fp16"}, "output must be bf16 or fp32 (got fp16)"),
        ({"epilogue": "bias", "bias_dtype": "bf16"}, "has no bias"),
        ({"layout": "aiter16x16"}, "layout must be row"),
        ({"k": 7172}, "K must be a multiple of 8 (got 7172)"),
        ({"n": 2108}, "N must be a multiple of 8 (got 2108)"),
        ({"n": 2108, "outdtype": "fp32"}, ""),
    ],
)
def test_limits_of_bf16(changes: dict[str, object], reason: str) -> None:
    """Rows of each operand are multiples of 16 bytes."""
    assert reason in str(limits.unsupported(attrs.evolve(PLAIN, **changes), H200))
    assert bool(limits.unsupported(attrs.evolve(PLAIN, **changes), H200)) is bool(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"m": 0, "n": 8, "k": 16}, ""),
        ({"outdtype": "fp32"}, "output must be bf16 (got fp32)"),
        ({"dtype": "fp8_e4m3fnuz"}, "operands must be fp8_e4m3fn (got fp8_e4m3fnuz)"),
        ({"k": 7176}, "K must be a multiple of 16 (got 7176)"),
        ({"n": 2116}, "N must be a multiple of 8 (got 2116)"),
    ],
)
def test_limits_of_fp8(changes: dict[str, object], reason: str) -> None:
    """The kernels with scales write bf16 alone."""
    assert reason in str(limits.unsupported(attrs.evolve(SCALED, **changes), H200))
    assert bool(limits.unsupported(attrs.evolve(SCALED, **changes), H200)) is bool(reason)


def test_other_architectures_are_refused() -> None:
    """On sm_100 the library traps at scales other than powers of two."""
    for gfx in ("sm_80", "sm_100", "gfx942", "cpu-avx2"):
        assert f"architecture must be sm_90 (got {gfx})" in str(limits.unsupported(PLAIN, Device(gfx, 132)))


def test_lists_begin_with_the_librarys_choice() -> None:
    """Blocks wider than N are left out, those that the library lacks too."""
    listed = [solution.kernel_name for solution in deepgemm.solutions(PLAIN, H200)]
    assert listed == ["native", "pdl", "n64", "n128", "n32", "n96", "n192", "n256"]
    assert [s.kernel_name for s in space.enumerate_solutions("deepgemm", SCALED, H200)] == [*listed[:-1]]
    narrow = attrs.evolve(PLAIN, n=16)
    assert [s.kernel_name for s in space.enumerate_solutions("deepgemm", narrow, H200)] == ["native", "pdl", "n32"]
    assert [s.kernel_name for s in space.enumerate_solutions("deepgemm", attrs.evolve(PLAIN, m=0), H200)] == ["native"]


@pytest.mark.parametrize(
    ("changes", "order", "device", "answers"),
    [
        ({}, "m_major", H200, True),
        ({"m": 1026}, "m_major_padded", H200, True),
        ({"m": 1026}, "m_major", H200, False),
        ({}, "row", H200, False),
        ({"m": 512, "n": 65536}, "m_major", H200, False),
        ({"n": 3072}, "m_major", H200, False),
        ({}, "m_major", Device("sm_90", 132, "nvidia-h100-80gb-hbm3"), False),
        ({}, "m_major", Device("sm_90", 132, "nvidia-h200-nvl"), False),
        ({}, "m_major", Device("sm_90", 60, "nvidia-h200-mig-3g-71gb"), False),
    ],
)
def test_large_products_with_scales_in_place_get_the_librarys_choice(
    changes: dict[str, int], order: str, device: Device, answers: bool
) -> None:
    """Untuned calls are answered where the library was measured to be the fastest."""
    shape = attrs.evolve(SCALED, **{"m": 1024, "n": 7680, "k": 5120} | changes, extra={"scale_order": order} if order != "row" else {})
    assert deepgemm.heuristic_fallback(shape, device) == (Solution("deepgemm", "native") if answers else None)


def test_neighbours_differ_in_one_setting() -> None:
    """Yield served solutions one step away, none with both fewer SMs and M as a constant."""

    def near(name: str) -> list[str]:
        return [solution.kernel_name for solution in deepgemm.refine(Solution("deepgemm", name), SCALED, H200)]

    assert near("n64_s120") == ["n48_s120", "n80_s120", "n64_s128", "n64_s112"]
    assert near("n128_mnk") == ["n128", "n112_mnk", "n144_mnk"]
    assert near("pdl") == ["native", "pdl_mnk", "n16_pdl", "s128_pdl"]
    assert not list(deepgemm.refine(Solution("deepgemm", "unknown"), SCALED, H200))


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        ("n64", 2, "splitK must be at most 1 (got 2)"),
        ("s133", 0, "SMs must be at most 132 (got 133)"),
        ("n20", 0, "block N must be a multiple of 16 up to 256 (got 20)"),
        ("n272", 0, "block N must be a multiple of 16 up to 256 (got 272)"),
        ("n176", 0, "block N with block scales must be at most 128, or one of 144, 160, 192 (got 176)"),
    ],
)
def test_unfit_names_are_refused(name: str, split: int, reason: str) -> None:
    """`lacks` has the reason for a described device, too."""
    assert reason in deepgemm.lacks(Solution("deepgemm", name, split), SCALED, H200)
