"""The kernels' source in the emulator with 8-bit operands, scales and batches."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])
nvidia = pytest.mark.parametrize("machine", [32], indirect=True, ids=["nvidia"])
families = pytest.mark.cases("family", ["rows", "tiles"])
#: 8-bit dtypes by the width of a warp.
BYTES = {32: ("int8", "fp8_e4m3fn"), 64: ("int8", "fp8_e4m3fn", "fp8_e4m3fnuz")}
dtypes = pytest.mark.cases("dtype", BYTES[64])

#: Programs of 8-bit operands; in `tiles` m counts the instruction's columns.
PROGRAMS: list[tuple[str, dict[str, Any]]] = [
    ("tiles", {"scale": "tensor", "vec": 16}),
    ("tiles", {"scale": "row", "m": 4, "n_each": 4, "vec": 16, "out": "fp32"}),
    ("tiles", {"scale": "row", "m": 2, "n_each": 2, "warps_n": 2, "unroll": 4, "vec": 8, "bias": "fp16"}),
    ("tiles", {"scale": "row", "warps_k": 8, "unroll": 2, "vec": 4, "bias": "fp32", "out": "fp16"}),
    ("tiles", {"scale": "tensor", "m": 3, "n_each": 2, "warps_n": 2, "warps_k": 4, "vec": 1, "out": "fp32", "bias": "bf16"}),
    ("tiles", {"scale": "row", "vec": 2, "unroll": 8}),
    ("tiles", {"scale": "row", "vec": 8, "m": 2, "warps_k": 2, "unroll": 2, "x_shared": True}),
    ("rows", {"scale": "tensor", "vec": 16, "m": 4, "n_each": 4, "warps_k": 2}),
    ("rows", {"scale": "row", "vec": 1, "m": 3, "n_each": 2, "warps_n": 2, "unroll": 2, "bias": "fp32"}),
    ("rows", {"scale": "row", "vec": 8, "m": 8, "n_each": 8, "out": "fp32"}),
    ("rows", {"scale": "row", "vec": 4, "m": 2, "warps_k": 4, "x_shared": True, "bias": "bf16"}),
]
RINGS: list[tuple[str, dict[str, Any]]] = [
    ("tiles", {"scale": "row", "vec": 16, "m": 2, "n_each": 2, "warps_k": 2, "unroll": 2, "stages": 2}),
    ("tiles", {"scale": "tensor", "vec": 4, "warps_n": 4, "stages": 3}),
    ("tiles", {"scale": "row", "vec": 8, "m": 2, "warps_k": 2, "unroll": 2, "stages": 3, "x_shared": True}),
    ("tiles", {"scale": "row", "vec": 16, "n_each": 2, "warps_k": 2, "cluster": 3, "out": "fp32"}),
    ("tiles", {"scale": "row", "vec": 16, "m": 2, "warps_n": 2, "stages": 2, "x_shared": True, "cluster": 4, "batched": True}),
    ("rows", {"scale": "row", "vec": 4, "m": 3, "n_each": 2, "warps_k": 2, "cluster": 2, "bias": "fp32"}),
    ("rows", {"scale": "row", "vec": 8, "m": 2, "warps_k": 4, "unroll": 4, "stages": 4, "x_shared": True}),
    ("rows", {"scale": "row", "vec": 4, "m": 3, "n_each": 2, "warps_n": 2, "stages": 3}),
    ("wgmma", {"scale": "tensor", "vec": 16, "m": 8, "stages": 2}),
    ("wgmma", {"scale": "row", "vec": 4, "m": 16, "n_each": 2, "unroll": 2, "stages": 3, "out": "fp32", "bias": "bf16"}),
    ("wgmma", {"scale": "row", "vec": 8, "m": 8, "warps_n": 2, "warps_k": 2, "stages": 2, "cluster": 3, "batched": True}),
]
BLOCKS: list[dict[str, Any]] = [
    {"vec": 16},
    {"vec": 16, "m": 4, "n_each": 4, "unroll": 2, "out": "fp32"},
    {"vec": 8, "m": 2, "n_each": 2, "warps_n": 2, "unroll": 4},
    {"vec": 4, "warps_k": 8, "unroll": 1, "out": "fp16"},
    {"vec": 16, "m": 2, "warps_k": 2, "unroll": 2, "x_shared": True},
    {"vec": 16, "m": 1, "warps_k": 2, "unroll": 1, "cluster": 2, "out": "fp32"},
    {"vec": 8, "m": 2, "warps_n": 2, "unroll": 4, "cluster": 3, "x_shared": True},
    {"vec": 1, "m": 8, "n_each": 2, "warps_n": 2, "warps_k": 2, "unroll": 8},
]


def program(programs: Any, wave: int, family: str, **given: Any) -> Any:
    """Make a program; in the family `tiles` *m* counts the instruction's columns, up to 64 rows."""
    if family == "tiles":
        given["m"] = min(programs.COLUMNS[wave] * given.get("m", 1), 64)
    return programs.Program(family, wave, **given)


def faults(machine: Any, programs: Any, kernel: Any) -> list[str]:
    """List the faults at the edges of M, of a block, of an iteration and of splits."""
    ks = sorted({kernel.vec, kernel.span - kernel.vec, kernel.span + kernel.vec, 2 * kernel.span + 3 * kernel.vec, 3 * kernel.span})
    ms = [kernel.m] if kernel.family == "rows" else [kernel.m, kernel.m - programs.COLUMNS[kernel.wave] + 1, kernel.m - 3]
    outcomes = []
    for turn, k in enumerate(k for k in ks if k > 0):
        for n in (1, kernel.per_block + 1, 2 * kernel.per_block - 1):
            for splits in {kernel.cluster} if kernel.cluster else {1, min(1 + (turn + n) % 4, k // kernel.vec)}:
                case = programs.whole(kernel, ms[(turn + n) % len(ms)], n, k, splits, seed=k + n)
                if case.splits == kernel.cluster or not kernel.cluster:  # else K is too short for so many
                    outcomes.append(machine.fault(kernel, case, seed=n))
    return [fault for fault in outcomes if fault]


@both
@dtypes
@pytest.mark.cases(("family", "given"), PROGRAMS)
def test_scales_of_tensors_and_rows(machine: Any, programs: Any, dtype: str, family: str, given: dict[str, Any]) -> None:
    """Both families give the rounded, scaled sum with bias at every edge."""
    if dtype not in BYTES[machine.wave]:
        pytest.skip(f"the fake GPU has no {dtype}")
    assert faults(machine, programs, program(programs, machine.wave, family, dtype=dtype, **given)) == []


@nvidia
@pytest.mark.cases("dtype", BYTES[32])
@pytest.mark.cases(("family", "given"), RINGS)
def test_rings_and_clusters(machine: Any, programs: Any, dtype: str, family: str, given: dict[str, Any]) -> None:
    """An 8-bit weight through a ring, and splits in clusters, give the rounded sum."""
    assert faults(machine, programs, program(programs, 32, family, dtype=dtype, **given)) == []


@both
@pytest.mark.cases("given", BLOCKS)
@pytest.mark.cases("stages", [0, 2, 3])
def test_scales_of_blocks(machine: Any, programs: Any, given: dict[str, Any], stages: int) -> None:
    """Each 128 of K has its own scales, in every iteration and warp, with and without a ring."""
    if (machine.wave == 64 and "cluster" in given) or (stages and (machine.wave == 64 or given["vec"] < 4)):
        pytest.skip("AMD has no clusters and rings, and a ring needs copies of 4 bytes")
    kernel = program(programs, machine.wave, "tiles", dtype=BYTES[machine.wave][-1], scale="block", stages=stages, **given)
    assert faults(machine, programs, kernel) == []


@both
@pytest.mark.cases("x_column", [1, 4])
@pytest.mark.cases("given", BLOCKS[1:3])
def test_m_major_scales_of_blocks(machine: Any, programs: Any, given: dict[str, Any], x_column: int) -> None:
    """Scales of x may be M-major, padded or not."""
    kernel = program(programs, machine.wave, "tiles", dtype=BYTES[machine.wave][-1], scale="block", x_column=x_column, **given)
    assert faults(machine, programs, kernel) == []


@nvidia
@pytest.mark.cases("x_column", [1, 4])
def test_m_major_scales_of_blocks_in_wgmma(machine: Any, programs: Any, x_column: int) -> None:
    """The family `wgmma` takes M-major scales of x, padded or not."""
    kernel = program(programs, 32, "wgmma", dtype="fp8_e4m3fn", scale="block", m=16, vec=8, stages=2, x_column=x_column)
    assert faults(machine, programs, kernel) == []


@nvidia
@pytest.mark.cases(
    "given",
    [
        {"m": 8, "vec": 16, "stages": 2},
        {"m": 16, "vec": 8, "n_each": 2, "warps_n": 2, "stages": 3, "unroll": 2, "out": "fp32"},
        {"m": 8, "vec": 4, "warps_k": 2, "stages": 2, "cluster": 2},
    ],
)
def test_scales_of_blocks_in_wgmma(machine: Any, programs: Any, given: dict[str, Any]) -> None:
    """The family `wgmma` scales each 128 of K by its own scales."""
    assert faults(machine, programs, program(programs, 32, "wgmma", dtype="fp8_e4m3fn", scale="block", **given)) == []


@both
@pytest.mark.cases(("n", "k"), [(2112, 512), (300, 1000), (129, 129), (128, 128), (16, 2048), (250, 77)])
def test_blocks_with_tails(machine: Any, programs: Any, n: int, k: int) -> None:
    """N and K need not be multiples of 128 with block scales."""
    vec = next(vec for vec in (16, 8, 4, 2, 1) if k % vec == 0)
    for each, warps in ((1, 4), (4, 1), (2, 2)):
        kernel = program(programs, machine.wave, "tiles", dtype="fp8_e4m3fn", scale="block", vec=vec, n_each=each, warps_n=warps, unroll=2)
        assert machine.fault(kernel, programs.whole(kernel, 1, n, k, splits=2 if k > 256 else 1, seed=n)) == ""


@both
@pytest.mark.cases("m", range(1, 65, 7))
def test_numbers_of_rows(machine: Any, programs: Any, m: int) -> None:
    """Every row of x has its own scale, for M that fill an instruction and that do not."""
    for dtype, scale in (("int8", "row"), ("fp8_e4m3fn", "row"), ("fp8_e4m3fn", "block")):
        kernel = programs.Program(
            "tiles", machine.wave, m=programs.up(m, programs.COLUMNS[machine.wave]), n_each=2, warps_k=2, vec=8, dtype=dtype, scale=scale
        )
        assert machine.fault(kernel, programs.whole(kernel, m, 37, 264, splits=2, seed=m)) == ""


@both
@families
@pytest.mark.cases("dtype", ["bf16", "fp16", "int8", "fp8_e4m3fn"])
def test_batches(machine: Any, programs: Any, family: str, dtype: str) -> None:
    """Each product of a batch has its own operands, scales, bias, partials and counters."""
    width = 8 if dtype in programs.INPUTS[:2] else 16
    for vec, stages, bias in ((width, 0, "fp32"), (width, 2 if machine.wave == 32 else 0, "bf16"), (1, 0, "")):
        kernel = program(
            programs, machine.wave, family, dtype=dtype, vec=vec, bias=bias, out="fp32", warps_k=2, n_each=2, batched=True, stages=stages,
            scale="none" if width == 8 else "row",
        )  # fmt: skip
        rows, span = kernel.per_block, kernel.span
        for n, k, splits in ((rows, span, 1), (2 * rows + 3, span + vec, 3), (5, 3 * vec, 1)):
            assert machine.fault(kernel, programs.whole(kernel, kernel.m, n, k, splits, seed=n)) == ""


@nvidia
def test_batches_of_wgmma(machine: Any, programs: Any) -> None:
    """The family `wgmma` serves batches."""
    for cluster in (0, 2):
        kernel = programs.Program("wgmma", 32, m=16, warps_k=2, stages=2, batched=True, cluster=cluster, out="fp32", bias="bf16")
        for n, k, splits in ((kernel.per_block + 3, 2 * kernel.span + 8, cluster or 1), (5, 2 * kernel.span, cluster or 2)):
            assert machine.fault(kernel, programs.whole(kernel, 13, n, k, splits, seed=n)) == ""


@both
@families
@pytest.mark.cases("splits", [1, 3])
def test_int8_sums_are_exact(machine: Any, programs: Any, family: str, splits: int) -> None:
    """int8 sums stay int32 over warps and splits, so they are exact beyond float32's integers."""
    kernel = program(programs, machine.wave, family, dtype="int8", scale="tensor", vec=16, warps_k=2, out="fp32", bias="fp32")
    k = 3 * kernel.span + 16
    x, weight = torch.full((kernel.m, k), -127, dtype=torch.int8), torch.full((20, k), 127, dtype=torch.int8)
    x[:, 5], weight[:, 5] = 3, torch.arange(20)
    exact = x.double() @ weight.double().mT
    per_split, one = programs.split(kernel, k, splits), torch.ones(1)
    case = programs.Case(x, weight, -exact[0].float(), per_split, one, one)
    assert torch.equal(machine.run(kernel, case).double(), exact.float().double() - exact[0].float().double())
    case = programs.Case(
        torch.full((kernel.m, k), -128, dtype=torch.int8), torch.full((20, k), -128, dtype=torch.int8), torch.zeros(20), per_split, one, one
    )
    assert (machine.run(kernel, case) == k * 2**14).all()


@both
@dtypes
@families
def test_every_byte(machine: Any, programs: Any, family: str, dtype: str) -> None:
    """Each of the 256 fp8 bytes has torch's value, zeros, subnormals and NaNs included."""
    if dtype not in BYTES[machine.wave]:
        pytest.skip(f"the fake GPU has no {dtype}")
    if dtype == "int8":
        pytest.skip("int8 products are tested as whole numbers")
    kernel = program(programs, machine.wave, family, dtype=dtype, scale="tensor", vec=16, out="fp32")
    weight, x = torch.zeros(256, 16, dtype=torch.uint8), torch.zeros(kernel.m, 16).to(programs.DTYPES[dtype])
    weight[:, 7], x[:, 7] = torch.arange(256), 0.5
    case = programs.Case(x, weight.view(programs.DTYPES[dtype]), None, 16, torch.ones(1), torch.ones(1))
    out, wanted = machine.run(kernel, case), case.weight.float()[:, 7] * 0.5
    assert torch.equal(out.isnan(), wanted.isnan().expand(out.shape))
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num().expand(out.shape))
    assert wanted.isnan().sum() == (1 if dtype == "fp8_e4m3fnuz" else 2)


@both
@pytest.mark.cases(("family", "scale"), [("rows", "row"), ("tiles", "row"), ("tiles", "block")])
@pytest.mark.cases("splits", [1, 3])
def test_nan(machine: Any, programs: Any, family: str, scale: str, splits: int) -> None:
    """A NaN or an infinite scale reaches only the outputs of its row."""
    kernel = program(
        programs,
        machine.wave,
        family,
        dtype="fp8_e4m3fn",
        scale=scale,
        vec=8,
        n_each=2,
        out="fp32",
        **({"m": 4} if family == "rows" else {}),
    )
    case = programs.whole(kernel, kernel.m, 21, 520, splits)
    for operand in (case.x, case.weight):
        operand.copy_((operand.float().abs() + 1).to(operand.dtype))
    case.weight.view(torch.uint8)[3, 519], case.weight.view(torch.uint8)[20, 0] = 0x7F, 0xFF
    case.x.view(torch.uint8)[1, 300] = 0xFF
    case.x_scale[2], case.x_scale[3] = torch.nan, torch.inf
    out, wanted = machine.run(kernel, case), case.reference().float()
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
    assert out[0].isnan().sum() == 2


@both
@pytest.mark.cases("scale", ["row", "block"])
def test_normal_numbers(machine: Any, programs: Any, scale: str) -> None:
    """Normal fp8 numbers have the error of float32 sums: products are exact."""
    kernel = program(programs, machine.wave, "tiles", dtype="fp8_e4m3fn", scale=scale, vec=8, warps_k=4, unroll=2, out="fp32")
    case, generator = programs.whole(kernel, kernel.m, 50, 3000, 2), torch.Generator().manual_seed(4)
    x, weight = ((torch.randn(operand.shape, generator=generator) * 20).to(operand.dtype) for operand in (case.x, case.weight))
    scales = (torch.rand(operand.shape, generator=generator) + 0.5 for operand in (case.x_scale, case.w_scale))
    case = programs.Case(x, weight, None, case.per_split, *scales)
    sizes = attrs.evolve(case, x=x.float().abs().to(x.dtype), weight=weight.float().abs().to(weight.dtype)).reference()
    assert ((machine.run(kernel, case).double() - case.reference()).abs() <= 2.0**-20 * sizes).all()


@both
@pytest.mark.cases("scale", ["row", "block"])
def test_a_row_has_the_same_bits_in_any_order(machine: Any, programs: Any, scale: str) -> None:
    """Any order of blocks and threads, and any other rows of x, give the same bits."""
    kernel = program(programs, machine.wave, "tiles", dtype="fp8_e4m3fn", scale=scale, vec=16, warps_k=4, unroll=2, out="fp32")
    case = programs.whole(kernel, kernel.m, 40, 2048, 5)
    case = attrs.evolve(case, x_scale=torch.rand(case.x_scale.shape) + 0.1, w_scale=torch.rand(case.w_scale.shape) + 0.1)
    first = machine.run(kernel, case)
    assert all(torch.equal(machine.run(kernel, case, seed), first) for seed in range(2, 8))
    others = attrs.evolve(case, x=torch.cat([case.x[:1], case.x.view(torch.uint8)[1:].flip(1).view(case.x.dtype)]))
    assert torch.equal(machine.run(kernel, others)[0], first[0])


@both
def test_the_weight_is_read_once(machine: Any, programs: Any) -> None:
    """Each weight byte is loaded once, and scales once per block of K by each summing lane."""
    for scale in ("row", "block"):
        kernel = program(programs, machine.wave, "tiles", dtype="fp8_e4m3fn", scale=scale, vec=16, n_each=2, warps_n=2, warps_k=2, unroll=2)
        case = programs.whole(kernel, kernel.m, 2 * kernel.per_block, 2048, splits=2)
        assert machine.fault(kernel, case) == ""
        moved = machine.driver.moved()
        assert moved["weight"] == (case.weight.nbytes, 0)
        blocks, own = 2 * 2 * 16, 2 if machine.wave == 32 else 1
        assert scale == "row" or moved["x_scale"][0] <= 4 * blocks * machine.wave * own


@both
@pytest.mark.cases("seed", range(16))
def test_random_programs(machine: Any, programs: Any, seed: int) -> None:
    """Random programs of 8-bit operands are right for random sizes, splits and orders."""
    chosen = random.Random(programs.seed_of("bytes", seed, machine.wave))
    kernel = programs.drawn(chosen, machine.wave)
    scale = chosen.choice(["tensor", "row"] if kernel.family == "rows" else ["tensor", "row", "block", "block"])
    dtype = chosen.choice([dtype for dtype in BYTES[machine.wave] if scale != "block" or dtype != "int8"])
    vec = chosen.choice([16, 8, 4] if kernel.stages else [16, 16, 8, 4, 2, 1])
    kernel = attrs.evolve(kernel, dtype=dtype, scale=scale, vec=vec, batched=scale == "row" and chosen.random() < 0.5)
    for _ in range(3):
        m = kernel.m if kernel.family == "rows" else chosen.randint(1, kernel.m)
        n, k = chosen.randint(1, 2 * kernel.per_block + 5), kernel.vec * chosen.randint(1, min(3 * kernel.span, 4096) // kernel.vec)
        case = programs.whole(kernel, m, n, k, chosen.choice([1, 1, 2, 3, min(16, k // kernel.vec)]), chosen.randint(0, 999))
        assert machine.fault(kernel, case, chosen.randint(0, 999)) == ""
