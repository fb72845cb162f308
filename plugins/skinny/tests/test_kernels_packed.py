"""The kernels' source in the emulator with shuffled weights and with mxfp4."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

#: Magnitudes of e2m1; the fourth bit is the sign.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
#: Values that share a scale.
GROUP = 32

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])
nvidia = pytest.mark.parametrize("machine", [32], indirect=True, ids=["nvidia"])
kinds = pytest.mark.cases("wide", [False, True])
orders = pytest.mark.cases("shuffled", [0, 16])

TILES = [
    {"m": 8},
    {"m": 16, "n_each": 2, "warps_n": 2, "unroll": 2, "bias": "fp32"},
    {"m": 24, "warps_k": 4, "unroll": 4, "out": "fp32", "bias": "bf16"},
    {"m": 8, "n_each": 4, "warps_k": 2, "out": "fp16", "x_shared": True},
    {"m": 64, "warps_n": 2, "unroll": 2, "out": "fp32"},
    {"m": 16, "warps_n": 2, "unroll": 2, "x_shared": True, "out": "fp32"},
]
RINGS = [
    {"m": 8, "stages": 2},
    {"m": 16, "stages": 3, "unroll": 4, "warps_k": 2, "out": "fp32"},
    {"m": 32, "stages": 4, "n_each": 2, "warps_n": 2, "x_shared": True},
    {"m": 8, "stages": 3, "unroll": 2, "warps_k": 4, "x_shared": True, "cluster": 2},
]


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode mxfp4 [rows, k/2], low half first, with e8m0 scales [rows, k/32], to float64."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3).double())
    factors = torch.exp2(scales.double() - 127).where(scales != 255, torch.nan)
    return values * factors.repeat_interleave(GROUP, -1)


def in_order(scales: torch.Tensor) -> torch.Tensor:
    """Reorder scales [rows, k/32] like AITER, padded with a scale that would change the output."""
    rows, cols = scales.shape
    ordered = torch.full((-(-rows // 256) * 256 * (-(-cols // 8) * 8),), 200, dtype=torch.uint8)
    wide = -(-cols // 8)
    for row in range(rows):
        for col in range(cols):
            within = ((col % 4 * 16 + row % 16) * 2 + col // 4 % 2) * 2 + row // 16 % 2
            ordered[(row // 32 * wide + col // 8) * 256 + within] = scales[row, col]
    return ordered


@attrs.frozen(eq=False)
class Narrow:
    """Operands of a product with an mxfp4 weight, as bytes; x is mxfp4, or bf16 without scales."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    per_split: int
    x_plain: torch.Tensor | None
    w_plain: torch.Tensor
    shuffled: bool

    @property
    def x_scale(self) -> torch.Tensor | None:
        """Return the scales in the kernel's order."""
        return self.x_plain if self.x_plain is None or not self.shuffled else in_order(self.x_plain)

    @property
    def w_scale(self) -> torch.Tensor:
        """Return the scales in the kernel's order."""
        return in_order(self.w_plain) if self.shuffled else self.w_plain

    @property
    def splits(self) -> int:
        """Return the number of splits of K."""
        return -(-self.weight.shape[1] // self.per_split)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the products, rows of x, weight rows, and bytes of a row."""
        return 1, self.x.shape[0], *self.weight.shape

    def reference(self) -> torch.Tensor:
        """Return the product in float64, [m, n]."""
        x = self.x.double() if self.x_plain is None else decoded(self.x, self.x_plain)
        out = x @ decoded(self.weight, self.w_plain).T
        return out if self.bias is None else out + self.bias.double()


def narrow(
    programs: Any, program: Any, m: int, n: int, k: int, *, splits: int = 1, seed: int = 0, scales: tuple[int, int] = (126, 128)
) -> Narrow:
    """Make random bytes with e8m0 scales of a range whose sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, cols: int, least: int = 0, most: int = 255) -> torch.Tensor:
        return torch.randint(least, most + 1, (rows, cols), generator=generator, dtype=torch.uint8)

    x = torch.randint(-9, 10, (m, k), generator=generator).bfloat16() if program.wide else drawn(m, k // 2)
    bias = torch.randint(-99, 100, (n,), generator=generator).to(programs.DTYPES[program.bias]) if program.bias else None
    share = programs.up(-(-k // 2 // splits), 64 * program.unroll)
    x_scale = None if program.wide else drawn(m, k // GROUP, *scales)
    return Narrow(x, drawn(n, k // 2), bias, share if splits > 1 else k // 2, x_scale, drawn(n, k // GROUP, *scales), program.shuffled > 0)


def program(programs: Any, wave: int, **given: Any) -> Any:
    """Make a program of the family `tiles` for an mxfp4 weight."""
    columns = programs.COLUMNS[wave]
    return programs.Program("tiles", wave, dtype="fp4x2", vec=16, scale="block", **{**given, "m": programs.up(given["m"], columns)})


def faults(machine: Any, programs: Any, kernel: Any) -> list[str]:
    """List the faults at the edges of M, of a block, of an iteration and of splits."""
    outcomes = []
    turn = 2 * kernel.span  # values of K
    for step, k in enumerate((GROUP, turn - GROUP, turn + 3 * GROUP, 3 * turn)):
        for n in (16, kernel.per_block + 16) if kernel.shuffled else (1, kernel.per_block + 1):
            for splits in {kernel.cluster} if kernel.cluster else {1, 2 + step % 2}:
                case = narrow(programs, kernel, kernel.m - step % 3, n, k, splits=splits, seed=k + n)
                if case.splits == kernel.cluster or not kernel.cluster:  # else K is too short for so many
                    outcomes.append(machine.fault(kernel, case, seed=n))
    return [fault for fault in outcomes if fault]


@both
@kinds
@orders
@pytest.mark.cases("given", TILES)
def test_mxfp4(machine: Any, programs: Any, given: dict[str, Any], wide: bool, shuffled: int) -> None:
    """Each 32 values of K have their own scales, for both dtypes of x and both weight orders."""
    assert faults(machine, programs, program(programs, machine.wave, wide=wide, shuffled=shuffled, **given)) == []


@nvidia
@kinds
@orders
@pytest.mark.cases("given", RINGS)
def test_mxfp4_through_a_ring(machine: Any, programs: Any, given: dict[str, Any], wide: bool, shuffled: int) -> None:
    """mxfp4 through a ring, with x in it or not, and with a cluster gives the rounded sum."""
    assert faults(machine, programs, program(programs, 32, wide=wide, shuffled=shuffled, **given)) == []


@both
@kinds
def test_every_code_and_scale(machine: Any, programs: Any, wide: bool) -> None:
    """Each byte has its value with every scale up to 2^125 and with NaN.

    Float32 lacks some beyond.
    """
    kernel = program(programs, machine.wave, m=8, wide=wide, out="fp32")
    weight = torch.arange(256, dtype=torch.uint8).repeat(16).view(256, 16)  # all 256 bytes in 16 rows, each row with its scale
    for begin in range(0, 256, 16):
        scales = torch.arange(begin, begin + 16, dtype=torch.uint8)
        w_scale = scales.where((scales < 253) | (scales == 255), 252).repeat(16).view(256, 1)
        for index in (0, 5, 31):
            x, packed = torch.zeros(1, GROUP, dtype=torch.bfloat16), torch.zeros(1, GROUP // 2, dtype=torch.uint8)
            x[0, index], packed[0, index // 2] = 1, 2 << 4 * (index % 2)  # 1.0
            one = torch.full((1, 1), 127, dtype=torch.uint8)
            case = Narrow(x if wide else packed, weight, None, GROUP // 2, None if wide else one, w_scale, False)
            out, wanted = machine.run(kernel, case), case.reference().float()
            assert torch.equal(out.nan_to_num(7777.0), wanted.nan_to_num(7777.0)), (begin, index)


@both
def test_the_scale_of_x(machine: Any, programs: Any) -> None:
    """x of mxfp4 has separate scales, large ones in two factors included."""
    kernel = program(programs, machine.wave, m=16, out="fp32")
    case = narrow(programs, kernel, 16, 17, 96, seed=3)
    for least in (60, 127, 128, 129, 190):
        scaled = attrs.evolve(
            case, x_plain=(case.x_plain.int() - 126 + least).to(torch.uint8), w_plain=(case.w_plain.int() - 64).to(torch.uint8)
        )
        assert torch.equal(machine.run(kernel, scaled), scaled.reference().float()), least


@both
@pytest.mark.cases("dtype", ["bf16", "int8", "fp8_e4m3fn"])
@pytest.mark.cases("rows", [16, 32])
@pytest.mark.cases("given", [{"m": 16}, {"m": 8, "n_each": 2, "warps_n": 2, "warps_k": 2, "unroll": 4, "bias": "bf16"}])
def test_shuffled_tiles(machine: Any, programs: Any, dtype: str, rows: int, given: dict[str, Any]) -> None:
    """The family `tiles` reads weights in AITER's orders, with row scales or none, split or not."""
    given = {**given, "m": programs.up(given["m"], programs.COLUMNS[machine.wave])}
    dtype = "fp8_e4m3fnuz" if machine.wave == 64 and dtype.startswith("fp8") else dtype
    scale = "none" if dtype == "bf16" else "row"
    kernel = programs.Program("tiles", machine.wave, dtype=dtype, scale=scale, vec=8 if dtype == "bf16" else 16, shuffled=rows, **given)
    for n, k, splits in ((rows, 32, 1), (96, 3 * kernel.span, 3), (224, kernel.span + 32, 1)):
        assert machine.fault(kernel, programs.whole(kernel, kernel.m - 2, n, k, splits, seed=n)) == ""


@nvidia
@pytest.mark.cases("family", ["tiles", "wgmma"])
@pytest.mark.cases("dtype", ["fp16", "fp8_e4m3fn"])
def test_shuffled_through_a_ring(machine: Any, programs: Any, family: str, dtype: str) -> None:
    """Rings of both families read shuffled weights, with block scales or none."""
    fp8 = dtype.startswith("fp8")
    for given in ({"stages": 2}, {"stages": 3, "unroll": 2, "warps_n": 2, "warps_k": 2}):
        scale = "block" if fp8 else "none"
        kernel = programs.Program(family, 32, m=16, dtype=dtype, scale=scale, vec=16 if fp8 else 8, shuffled=16, **given)
        for n, k, splits in ((16, 128, 1), (144, 3 * kernel.span, 2), (kernel.per_block + 16, kernel.span + 64, 1)):
            assert machine.fault(kernel, programs.whole(kernel, 13, n, k, splits, seed=n)) == ""


@both
def test_a_shuffled_weight_is_read_once(machine: Any, programs: Any) -> None:
    """Each byte of a shuffled mxfp4 weight is loaded once, each scale by one lane per step."""
    kernel = program(programs, machine.wave, m=8, wide=True, shuffled=16, warps_n=2, warps_k=2)
    case = narrow(programs, kernel, 8, 64, 2048, seed=1)
    machine.run(kernel, case)
    moved = machine.driver.moved()
    assert moved["weight"][0] == 64 * 1024
    assert moved["w_scale"][0] == 64 * 64
