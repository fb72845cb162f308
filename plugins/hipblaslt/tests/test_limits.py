"""Static limits: what is said of a shape without the library, and that the library agrees."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, supported_ops, unsupported

H200, A100, L40, B200 = Device("sm_90", 132, "nvidia-h200"), Device("sm_80", 108), Device("sm_89", 142), Device("sm_100", 148)
MI300, MI350, MI250 = Device("gfx942", 304), Device("gfx950", 256), Device("gfx90a", 104)
CPU = Device("cpu-avx512", 16)
FN = Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
FNUZ = attrs.evolve(FN, dtype="fp8_e4m3fnuz")
INT8 = attrs.evolve(FN, dtype="int8")
PLAIN = Shape("a16w16", 5, 48, 64)
SHUFFLED = attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT)
BLOCKS = attrs.evolve(FN, op="a8w8_blockscale", scale="block")
BATCH = {"extra": {"B": 3}}

TAKEN = [
    *(
        (CUBLASLT, device, shape)
        for device in (H200, A100)
        for shape in (PLAIN, INT8, attrs.evolve(PLAIN, k=8190), attrs.evolve(PLAIN, n=1))
    ),
    *((CUBLASLT, device, attrs.evolve(FN, scale="tensor")) for device in (H200, L40, B200)),
    *((CUBLASLT, H200, shape) for shape in (FN, BLOCKS)),
    (CUBLASLT, L40, attrs.evolve(FN, op="batched_a8w8", **BATCH)),
    *((HIPBLASLT, device, PLAIN) for device in (MI250, MI300, MI350)),
    *((HIPBLASLT, device, SHUFFLED) for device in (MI300, MI350)),
    *(
        (HIPBLASLT, MI300, shape)
        for shape in (FNUZ, INT8, attrs.evolve(FNUZ, n=50), attrs.evolve(FNUZ, op="a8w8_bpreshuffle", layout=SHUFFLED_LAYOUT))
    ),
    (HIPBLASLT, MI350, FN),
]
#: Refused, and what the reason says.
REFUSED = [
    (CUBLASLT, MI300, PLAIN, "cublaslt: needs an NVIDIA device (got gfx942)"),
    (HIPBLASLT, H200, PLAIN, "hipblaslt: needs an AMD device (got sm_90)"),
    (CUBLASLT, CPU, PLAIN, "(got cpu-avx512)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, m=0), "empty batch"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, m=0), "empty batch"),
    (CUBLASLT, H200, SHUFFLED, "plain [N, K] weights"),
    (HIPBLASLT, MI250, SHUFFLED, "on gfx942 and gfx950"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, layout="aiter32x16"), f"reads {SHUFFLED_LAYOUT}"),
    (HIPBLASLT, MI300, attrs.evolve(SHUFFLED, dtype="fp32", outdtype="fp32"), "16-bit floats and fp8 (got fp32)"),
    (HIPBLASLT, MI300, attrs.evolve(INT8, layout=SHUFFLED_LAYOUT), "16-bit floats and fp8 (got int8)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, dtype="fp64", outdtype="fp64"), "operands must be bf16, fp16, fp32"),
    (CUBLASLT, H200, attrs.evolve(FN, k=72), "K: 8-bit operands need a multiple of 16 (got 72)"),
    (CUBLASLT, H200, attrs.evolve(BLOCKS, k=8190), "K: 8-bit operands need a multiple of 16 (got 8190)"),
    (HIPBLASLT, MI300, attrs.evolve(FNUZ, k=8190), "K: 8-bit operands need a multiple of 16 (got 8190)"),
    (CUBLASLT, H200, attrs.evolve(INT8, k=40), "K: 8-bit operands need a multiple of 16 (got 40)"),
    (CUBLASLT, H200, attrs.evolve(FN, n=50), "N: fp8 products need a multiple of 16 (got 50)"),
    (CUBLASLT, H200, attrs.evolve(INT8, n=50), "N: int8 products need a multiple of 4 (got 50)"),
    (CUBLASLT, A100, FN, "sm_80 multiplies no fp8"),
    (CUBLASLT, H200, FNUZ, "sm_90 multiplies fp8_e4m3fn (got fp8_e4m3fnuz)"),
    (HIPBLASLT, MI300, FN, "gfx942 multiplies fp8_e4m3fnuz (got fp8_e4m3fn)"),
    (HIPBLASLT, MI350, FNUZ, "gfx950 multiplies fp8_e4m3fn (got fp8_e4m3fnuz)"),
    (HIPBLASLT, MI250, FNUZ, "gfx90a multiplies no fp8"),
    (CUBLASLT, L40, FN, "row scales need sm_90 (got sm_89)"),
    (CUBLASLT, B200, BLOCKS, "block scales need sm_90 (got sm_100)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, scale="tensor"), "scaled operands must have 8 bits (got bf16)"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, outdtype="fp16"), "bf16 operands give bf16 or fp32 (got fp16)"),
    (CUBLASLT, H200, attrs.evolve(FN, outdtype="fp8_e4m3fn"), "outdtype: must be bf16, fp16, fp32"),
    (CUBLASLT, H200, attrs.evolve(PLAIN, epilogue="bias", bias_dtype="fp64"), "bias: must be bf16, fp16, fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("abi", "device", "shape"), TAKEN, ids=lambda each: str(getattr(each, "libtype", each)))
def test_taken(abi: Abi, device: Device, shape: Shape) -> None:
    """What the library has a product for is taken, by architecture."""
    assert unsupported(shape, device, abi) is None


@pytest.mark.parametrize(("abi", "device", "shape", "reason"), REFUSED, ids=lambda each: str(getattr(each, "libtype", each)))
def test_refused(abi: Abi, device: Device, shape: Shape, reason: str) -> None:
    """What it has none for is refused with the value that is wrong and the one that would do."""
    assert reason in (unsupported(shape, device, abi) or "")


def test_ops() -> None:
    """Both have the plain, scaled and batched products; shuffled weights and scales of blocks are of one alone."""
    assert set(supported_ops(CUBLASLT)) ^ set(supported_ops(HIPBLASLT)) == {"a8w8_blockscale", "a8w8_bpreshuffle"}
    assert "a16w16" in supported_ops(CUBLASLT)


def _around() -> list[Shape]:
    sizes = [(m, n, k) for m in (1, 3) for n in (1, 4, 16, 40, 50) for k in (1, 16, 24, 40)]
    kinds: list[dict[str, Any]] = [
        {"op": "a16w16", "dtype": dtype, "outdtype": out} for dtype in ("bf16", "fp32") for out in ("bf16", "fp32")
    ]
    kinds += [{"op": "a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row"}]
    kinds += [
        {"op": "a8w8", "dtype": dtype, "outdtype": "fp32", "scale": scale}
        for dtype in ("fp8_e4m3fn", "fp8_e4m3fnuz")
        for scale in ("row", "tensor")
    ]
    kinds += [{"op": "a8w8_blockscale", "dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "block"}]
    return [Shape(m=m, n=n, k=k, **kind) for kind in kinds for m, n, k in sizes]


@pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
def test_the_library_agrees(lt: Any, over: Any) -> None:
    """What is taken binds on the library's first answer, at every small size: nothing is promised in vain."""
    taken = [shape for shape in _around() if shape.op in lt.OPS and lt.supports(shape, over.CPU)]
    refused = [shape for shape in taken if not isinstance(lt.bind(Solution(lt.abi.libtype, over.FIRST), shape, over.CPU), Launcher)]
    assert len(taken) > 80
    assert not refused
