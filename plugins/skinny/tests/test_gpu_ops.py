"""Solutions of every op on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, fault_of
from tunedgemm.testing.sharing import differing_calls, fault_of_graphs
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm.tools.tables import ops
from tunedgemm_skinny import skinny
from tunedgemm_skinny.names import KernelConfig, Rows, Tiles
from tunedgemm_skinny.resources import unfit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: "fp8" stands for the device's dtype.
INT8 = {"op": "a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row"}
FP8 = INT8 | {"dtype": "fp8"}
BLOCKS = {"op": "a8w8_blockscale", "dtype": "fp8", "outdtype": "bf16", "scale": "block"}
A4W4 = {"op": "a4w4_blockscale", "dtype": "fp4x2", "outdtype": "bf16", "scale": "block", "layout": "aiter16x16"}
A16W4 = A4W4 | {"op": "a16w4_blockscale", "dtype": "bf16", "layout": "row"}
CODES = {"op": "a16wn", "scale": "block"}
BATCH = {"op": "batched_bf16", "extra": {"B": 16}}
BIAS = {"epilogue": "bias", "bias_dtype": "fp32"}
SHAPES: list[dict[str, Any]] = [
    {"op": "a16w16", "m": 4, "n": 1280, "k": 8192, "epilogue": "bias"},
    {"op": "a16w16", "m": 1, "n": 7168, "k": 2048},
    {"op": "a16w16", "m": 33, "n": 333, "k": 501},
    {"op": "a16w16", "m": 64, "n": 1280, "k": 8192},
    {**FP8, "m": 1, "n": 1280, "k": 8192},
    {**FP8, "m": 64, "n": 1280, "k": 8192, **BIAS},
    {**FP8, "m": 5, "n": 333, "k": 501, "outdtype": "fp32"},
    {**FP8, "m": 4, "n": 7168, "k": 2048, "scale": "tensor"},
    {**FP8, "m": 33, "n": 130, "k": 1028, "outdtype": "fp16"},
    {**INT8, "m": 1, "n": 7168, "k": 2048},
    {**INT8, "m": 33, "n": 333, "k": 501, **BIAS},
    {**INT8, "m": 8, "n": 1280, "k": 8192, "scale": "tensor"},
    {**BLOCKS, "m": 1, "n": 2112, "k": 7168},
    {**BLOCKS, "m": 16, "n": 2112, "k": 7168},
    {**BLOCKS, "m": 64, "n": 1536, "k": 7168},
    {**BLOCKS, "m": 3, "n": 250, "k": 1001, "outdtype": "fp32"},
    {**BLOCKS, "m": 8, "n": 7168, "k": 2304},
    {**BATCH, "m": 1, "n": 512, "k": 128},
    {**BATCH, "m": 16, "n": 130, "k": 1001, "epilogue": "bias"},
    {**BATCH, "m": 64, "n": 128, "k": 512, "dtype": "fp16"},
    {**FP8, "op": "batched_a8w8", "m": 4, "n": 512, "k": 2048, "extra": {"B": 16}, **BIAS},
    {**INT8, "op": "batched_a8w8", "m": 31, "n": 77, "k": 99, "extra": {"B": 5}},
    {**A4W4, "m": 1, "n": 1280, "k": 8192},
    {**A4W4, "m": 16, "n": 2112, "k": 7168, "layout": "row", "epilogue": "bias"},
    {**A4W4, "m": 64, "n": 7168, "k": 2048},
    {**A4W4, "m": 5, "n": 333, "k": 480, "layout": "row", "outdtype": "fp32"},
    {**A16W4, "m": 1, "n": 7168, "k": 2048},
    {**A16W4, "m": 16, "n": 1280, "k": 8192, "layout": "aiter16x16"},
    {**A16W4, "m": 64, "n": 130, "k": 7168, "outdtype": "fp32", **BIAS},
    {"op": "a16w16", "m": 1, "n": 1280, "k": 8192, "layout": "aiter16x16"},
    {"op": "a16w16", "m": 33, "n": 2112, "k": 7168, "layout": "aiter16x16", "dtype": "fp16"},
    {**FP8, "op": "a8w8_bpreshuffle", "m": 16, "n": 1280, "k": 8192, "layout": "aiter16x16"},
    {**INT8, "op": "a8w8_bpreshuffle", "m": 3, "n": 96, "k": 1024, "layout": "aiter32x16", **BIAS},
    {**BLOCKS, "op": "a8w8_blockscale_bpreshuffle", "m": 1, "n": 2112, "k": 7168, "layout": "aiter16x16"},
    {**BLOCKS, "op": "a8w8_blockscale_bpreshuffle", "m": 64, "n": 1536, "k": 7168, "layout": "aiter16x16"},
    {**CODES, "m": 1, "n": 1280, "k": 8192, "extra": {"w_format": "gptq_int4_zp", "w_group": 64}},
    {**CODES, "m": 16, "n": 328, "k": 2048, "dtype": "fp16", "extra": {"w_format": "awq_int4", "w_group": 128}, **BIAS},
    {**CODES, "m": 5, "n": 333, "k": 1024, "extra": {"w_format": "ct_int4", "w_group": 32}},
    {**CODES, "m": 9, "n": 333, "k": 1024, "outdtype": "fp32", "extra": {"w_format": "nvfp4", "w_group": 16}},
    {**CODES, "m": 2, "n": 264, "k": 640, "extra": {"w_format": "mxfp4", "w_group": 32}},
]  # fmt: skip
#: Kernels with splits, one for each way to load and to reduce.
KERNELS: list[tuple[KernelConfig, int]] = [
    (Tiles(1, 1, 4, 2), 0), (Tiles(2, 2, 2, 1), 3), (Tiles(1, 1, 4, 2, stages=4), 0), (Tiles(1, 2, 2, 1, stages=3), 4),
    (Rows(2, 4, 1, 4), 0),
    (Rows(4, 1, 4, 2, stages=4), 2),
]  # fmt: skip


def shape_of(fields: dict[str, Any], device: Device) -> Shape:
    """Make a shape with the device's fp8; skip where it has none."""
    fp8 = ARCHITECTURES[device.gfx].fp8
    if fields.get("dtype") == "fp8" and not fp8:
        pytest.skip(f"{device.gfx} has no fp8")
    return Shape(**fields | ({"dtype": fp8} if fields.get("dtype") == "fp8" else {}))


def operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    """Make random operands on a device."""
    return ops()[shape.op].make_inputs(shape, device.torch_device, seed)


def bound(solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Bind a solution."""
    return bind_launcher(skinny, solution, shape, device)


@pytest.mark.cases("fields", SHAPES)
def test_every_enumerated_solution_is_right_and_repeats_its_bits(fields: dict[str, Any], device: Device) -> None:
    """Every solution of each op binds, matches the reference, and gives equal bits twice."""
    shape = shape_of(fields, device)
    given = operands(shape, device)
    for solution in skinny.solutions(shape, device):
        launcher = bound(solution, shape, device)
        assert not fault_of(shape, launcher.call(*given), given), solution
        assert not differing_calls(launcher, given, 1), solution


@pytest.mark.cases(("kernel", "splits"), KERNELS)
@pytest.mark.cases("fields", [FP8, INT8, BLOCKS, {**FP8, "op": "batched_a8w8", "extra": {"B": 3}}])
def test_whole_numbers_are_exact(kernel: KernelConfig, splits: int, fields: dict[str, Any], device: Device) -> None:
    """Whole numbers scaled by powers of two are exact, so every wrong element or scale shows."""
    for m, n, k in ((1, 37, 2048), (8, 130, 2056), (7, 300, 4100)):
        shape = shape_of({**fields, "m": m, "n": n, "k": k, "outdtype": "fp32"}, device)
        if unfit(kernel, splits or 1, shape, device.gfx):
            continue
        launcher, made = bound(Solution("skinny", kernel.name, splits), shape, device), torch.Generator("cuda").manual_seed(k)
        given = [
            torch.randint(-9, 10, operand.shape, generator=made, device="cuda").to(operand.dtype)
            if place < 2
            else 2.0 ** torch.randint(-1, 2, operand.shape, generator=made, device="cuda")
            for place, operand in enumerate(operands(shape, device))
        ]
        wanted = ops()[shape.op].reference(shape, tuple(given))
        assert torch.equal(launcher.call(*given).reshape(wanted.shape), wanted.float()), shape


def test_int8_sums_are_exact(device: Device) -> None:
    """int8 sums stay int32 until they are scaled, so they are exact."""
    shape = Shape("a8w8", 2, 48, 8192, dtype="int8", outdtype="fp32", scale="tensor")
    x, weight = (torch.full((rows, shape.k), -128, dtype=torch.int8, device="cuda") for rows in (shape.m, shape.n))
    x[:, 7], one = 1, torch.ones(1, device="cuda")
    for kernel, splits in KERNELS:
        if not unfit(kernel, splits or 1, shape, device.gfx):
            out = bound(Solution("skinny", kernel.name, splits), shape, device).call(x, weight, one, one)
            assert (out == float((shape.k - 1) * 2**14 - 128)).all(), kernel.name


@pytest.mark.cases("fields", [FP8, INT8, BLOCKS])
def test_a_call_with_a_slice_is_right(fields: dict[str, Any], device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a strided x at an odd address is served by the table's solution, and right."""
    shape = shape_of({**fields, "m": 4, "n": 130, "k": 2048}, device)
    x, *rest = operands(shape, device)
    sliced = torch.zeros(4, 3001, dtype=torch.uint8, device="cuda").view(x.dtype)[:, 3 : 3 + shape.k]
    sliced.copy_(x)
    columns, solution = ops()[shape.op].columns, Solution("skinny", Tiles(1, 1, 4, 2).name)
    row = dict.fromkeys(columns.values, 0) | {"gfx": device.gfx, "cu_num": device.cu_num, **columns.format(shape)}
    row |= {"libtype": solution.libtype, "kernelName": solution.kernel_name, "splitK": 0, "us": 1.0}
    path = tmp_path / "tuned.csv"
    path.write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
    monkeypatch.setenv(columns.variable, str(path))
    gemm = tunedgemm.TunedGemm()
    assert gemm.of(shape.op).explain(shape).offer.solution.kernel_name == solution.kernel_name
    assert not fault_of(shape, getattr(gemm, f"gemm_{shape.op}")(sliced, *rest), (x, *rest))


def test_captured_launches_read_new_scales_at_each_replay(device: Device) -> None:
    """A captured split reads new operands at each replay and resets its counters."""
    shape = shape_of({**BLOCKS, "m": 4, "n": 2112, "k": 7168}, device)
    launcher = bound(Solution("skinny", Tiles(1, 1, 2, 2).name, 4), shape, device)
    assert not fault_of_graphs(launcher, [operands(shape, device, seed) for seed in range(4)])


def test_few_rows_have_the_bits_of_many(device: Device) -> None:
    """A row has the same bits alone as among others, with block scales."""
    shape = shape_of({**BLOCKS, "m": 8, "n": 300, "k": 2048}, device)
    x, weight, x_scale, w_scale = operands(shape, device)
    solution = Solution("skinny", Tiles(1, 2, 2, 2).name, 2)
    among = bound(solution, shape, device).call(x, weight, x_scale, w_scale)
    alone = bound(solution, attrs.evolve(shape, m=1), device).call(x[:1].contiguous(), weight, x_scale[:1].contiguous(), w_scale)
    assert torch.equal(alone, among[:1])
