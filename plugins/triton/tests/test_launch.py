"""Launching: arguments without a GPU; on one right answers, graphs, threads, streams, devices and
refusals.
"""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Launcher, OutOfResources, Shape, Solution, Unsupported, device_of
from tunedgemm.testing.launching import bind_launcher, draw_operands, plain_weight
from tunedgemm.testing.sharing import fault_of_graphs, fault_of_threads
from tunedgemm.tools.launching import FORMATS
from tunedgemm.tools.tables import ops
from tunedgemm_triton import launch
from tunedgemm_triton.families import family_of, unsupported
from tunedgemm_triton.limits import batches_of
from tunedgemm_triton.plan import LaunchPlan

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

MOE = ops()["fmoe"].examples


ONE_LAUNCH = [
    Shape("a16w16", 5, 48, 256, epilogue="bias"),
    Shape("a16w16", 5, 48, 256),
    Shape("a8w8", 5, 48, 256, "int8", "bf16", scale="row", epilogue="bias"),
    Shape("batched_bf16", 5, 48, 256, extra={"B": 3}),
    Shape("a4w4_blockscale", 5, 48, 256, dtype="fp4x2", outdtype="bf16", scale="block"),
    Shape("a16w4_blockscale", 5, 48, 256, scale="block"),
    Shape("a16wn", 5, 48, 256, scale="block", extra={"w_format": "gptq_int4_zp", "w_group": 128}),
    Shape("a16wn", 5, 48, 256, scale="block", epilogue="bias", extra={"w_format": "nvfp4", "w_group": 16}),
    Shape("a16wn", 5, 48, 256, scale="block", extra={"w_format": "gptq_int4_zp_order", "w_group": 64}),
]


#: Parameters of functions of one launch that are operands of some op.
_NAMED = ("x", "weight", "x_scale", "w_scale", "w_zeros", "w_index", "w_global_scale", "bias")


class TestArguments:
    """What a call passes to Triton's C function, with a fake function that records it."""

    @pytest.fixture(autouse=True)
    def fake_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what needs a GPU: the stream and the counters."""
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
        counters = torch.zeros(1024, dtype=torch.int32)
        monkeypatch.setattr(launch, "counters_of", lambda device: lambda address: counters)
        self.counters = counters.data_ptr()

    def _call(self, shape: Shape, name: str, split_k: int = 1, **changes: Any) -> tuple[LaunchPlan, list[Any], Any, list[list[Any]]]:
        """Return plan, operands and output of a call, and the arguments of its launches."""
        family, launches = family_of(shape.op), list[list[Any]]()
        plan = family.plan_of(family.parse_name(name), split_k, shape, Device("sm_90", 132))
        functions = [
            launch.KernelFunction(lambda *given, index=index: launches.append([index, *given]), ("head",), (None,))
            for index in range(len(plan.steps))
        ]
        operands = [*map(plain_weight, ops()[shape.op].make_inputs(shape, torch.device("cpu"), 1)), *changes.get("more", ())]
        call = launch.call_of(plan, functions, shape, device_of(-1))
        return plan, operands, call(*operands), launches

    def test_one_launch_gets_its_operands_by_name(self) -> None:
        """Addresses, sizes and absent operands are where the function has its parameters."""
        for shape in ONE_LAUNCH:
            for split_k in (1, 2):
                self._check_one_launch(shape, split_k)

    def _check_one_launch(self, shape: Shape, split_k: int) -> None:
        op = shape.op
        kind = "mx" if "4_block" in op else "wn" if op == "a16wn" else "gemm"
        name = {"mx": "mx_r1_m16n32k64_g1_w4s3_d", "wn": "wn_r1_m16n32k64_g1_w4s3", "gemm": "gemm_r1_m16n32k32_g1_w4s2"}[kind]
        plan, operands, out, [[_, *given]] = self._call(shape, name, split_k)
        named = {
            name.removesuffix("?"): value.data_ptr() for name, value in zip(ops()[op].operands, operands, strict=False) if value is not None
        }
        (step,) = plan.steps
        assert given[:5] == [*step.grid, 77, "head"]
        assert given[-1] is None
        arguments = dict(zip((name for name, _ in step.values), given[5:-1], strict=True))
        expected = {name: named.get(str(value), 0) for name, value in step.values if name in _NAMED}
        assert {name: arguments[name] for name in expected} == expected
        assert arguments["out"] == out.data_ptr()
        assert out.shape == (*operands[0].shape[:-1], shape.n)
        assert (arguments["counters"] == self.counters, bool(arguments["partial"])) == (split_k > 1, split_k > 1)
        assert [arguments[name] for name in "MNK"] == [shape.m, shape.n, shape.k]
        assert arguments.get("B", 1) == batches_of(shape)

    def test_a_sequence_runs_the_steps_whose_operands_are_given(self) -> None:
        """per_Tensor finds its scales in the values where the call passes none; buffers are within
        one workspace.
        """
        shape, name = MOE[6], "moe_r1_m16g1_n32k64w4s2_n64k64w4s2"
        scale = torch.ones(1)
        for more, given in (((), (False, False)), ((scale, scale), (True, True)), ((None, scale), (False, True))):
            plan, operands, out, launches = self._call(shape, name, more=more)
            passed = dict(zip(("a1_scale", "a2_scale"), given, strict=True))
            expected = [index for index, step in enumerate(plan.steps) if not step.given or passed[step.given] is step.present]
            assert [index for index, *_ in launches] == expected
            starts = set()
            for index, *arguments in launches:
                step = plan.steps[index]
                assert tuple(arguments[:3]) == step.grid
                for (parameter, value), argument in zip(step.values, arguments[5:-1], strict=True):
                    if value in plan.buffers:
                        starts.add(argument - plan.buffers[value][0])
                    elif value == "out":
                        assert argument == out.data_ptr()
                    elif value == "hidden":
                        assert argument == operands[0].data_ptr()
                    elif isinstance(value, int):
                        assert argument == value, parameter
            assert len(starts) == 1


SHAPES = [
    Shape("a16w16", 1, 1280, 8192),
    Shape("a16w16", 3, 333, 500, outdtype="fp32", epilogue="bias"),
    Shape("a16w16", 4, 2048, 1024, dtype="fp16", epilogue="bias", bias_dtype="fp32"),
    Shape("a16w16", 16, 1280, 8192, epilogue="bias"),
    Shape("a16w16", 37, 200, 1111, outdtype="fp32"),
    Shape("a16w16", 300, 1000, 768, dtype="fp16", outdtype="fp32"),
    Shape("a16w16", 1000, 1280, 1024, epilogue="bias"),
]

_FP8 = {"dtype": "fp8_e4m3fn", "outdtype": "bf16"}
_INT8 = {"dtype": "int8", "outdtype": "bf16"}
SCALED = [
    Shape("a8w8", 1, 1280, 8192, scale="row", **_FP8),
    Shape("a8w8", 3, 2112, 7168, scale="tensor", epilogue="bias", **_FP8),
    Shape("a8w8", 16, 1280, 8192, "fp8_e4m3fn", "fp32", scale="row"),
    Shape("a8w8", 40, 1000, 4096, scale="row", epilogue="bias", **_INT8),
    Shape("a8w8", 1000, 1536, 1024, "fp8_e4m3fn", "fp16", scale="row"),
    Shape("a8w8", 300, 1280, 2048, scale="tensor", **_INT8),
    Shape("a8w8_blockscale", 1, 576, 7168, scale="block", **_FP8),
    Shape("a8w8_blockscale", 4, 2112, 7168, scale="block", **_FP8),
    Shape("a8w8_blockscale", 60, 576, 2000, scale="block", **_FP8),
    Shape("a8w8_blockscale", 777, 2112, 1104, scale="block", **_FP8),
    Shape("a8w8_bpreshuffle", 33, 1280, 4096, scale="row", layout="aiter16x16", **_FP8),
    Shape("a8w8_bpreshuffle", 300, 1280, 1056, scale="tensor", layout="aiter32x16", **_INT8),
    Shape("a8w8_blockscale_bpreshuffle", 24, 576, 7168, scale="block", layout="aiter16x16", **_FP8),
    Shape("a8w8_blockscale_bpreshuffle", 500, 2112, 1056, scale="block", layout="aiter16x16", **_FP8),
    Shape("a16w16", 48, 1280, 4096, layout="aiter16x16"),
    Shape("batched_bf16", 2, 512, 128, extra={"B": 128}),
    Shape("batched_bf16", 200, 500, 1000, epilogue="bias", extra={"B": 5}),
    Shape("batched_a8w8", 20, 500, 1024, scale="row", extra={"B": 7}, **_FP8),
    Shape("batched_a8w8", 500, 300, 1024, scale="row", epilogue="bias", extra={"B": 3}, **_INT8),
]


EXAMPLES = [shape for op in ("fmoe", "a4w4_blockscale", "a16w4_blockscale") for shape in ops()[op].examples]
#: One row and five of each weight-only format, with ragged N.
WEIGHTS = [
    Shape("a16wn", m, 264, 2176, dtype, dtype, scale="block", extra={"w_format": name, "w_group": max(form.groups)})
    for name, form in FORMATS.items()
    for m, dtype in ((1, "bf16"), (5, "fp16"))
]
#: Without quantisation, with one scale a tensor, with block scales, with mxfp4: a few tokens each.
ROUTED = [MOE[2], MOE[6], MOE[11], MOE[14]]


def _operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    return ops()[shape.op].make_inputs(shape, device.torch_device, seed)


def _bound(solution: Solution, shape: Shape, device: Device) -> Launcher:
    return bind_launcher(launch, solution, shape, device)


def _is_close(out: Any, shape: Shape, operands: tuple[Any, ...]) -> bool:
    op = ops()[shape.op]
    expected = op.reference(shape, operands).double()
    error = (out.reshape(expected.shape).double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return bool(error.max().item() < op.tolerance(shape).row_error)


def _split_solution(shape: Shape, device: Device) -> Solution:
    return next(solution for solution in family_of(shape.op).enumerate_solutions(shape, device) if solution.split_k > 1)


def _faults(shapes: list[Shape], device: Device, least: int, start: str = "") -> list[str]:
    """Launch every solution of shapes twice, or the first whose name begins with *start*; return a
    line for each that is wrong, differs, or is missing.
    """
    faults = []
    for shape in shapes:
        if unsupported(shape, device):
            continue
        operands, ran = _operands(shape, device), 0
        plain = tuple(map(plain_weight, operands))
        listed = family_of(shape.op).enumerate_solutions(shape, device)
        for solution in itertools.islice((each for each in listed if each.kernel_name.startswith(start)), 1 if start else None):
            try:
                launcher = launch.bind(solution, shape, device)
            except OutOfResources:
                continue
            if isinstance(launcher, Unsupported):
                faults.append(f"{shape}: {solution}: {launcher}")
                continue
            first, second = launcher.call(*plain), launcher.call(*plain)
            if not _is_close(first, shape, operands) or not torch.equal(first, second):
                faults.append(f"{shape}: {solution}")
            ran += 1
        if ran < least:
            faults.append(f"{shape}: {ran} solutions ran")
    return faults


SPECIALIZED = [
    *(
        (name, shape)
        for name in ("tma_r1_m64n128k128_g8_w4s3_ws", "tma_r2_m128n128k64_g8_w4s4_ws", "tma_r2_m128n256k64_g8_w4s3_ws")
        for shape in (Shape("a16w16", 1000, 1280, 1024, epilogue="bias"), Shape("a16w16", 1024, 7168, 2048))
    ),
    *(
        (name, shape)
        for name in ("tma_r2_m128n128k128_g8_w4s4_ws", "tma_r2_m128n64k128_g8_w4s3_ws")
        for shape in (
            Shape("a8w8", 2000, 2112, 7168, scale="row", **_FP8),
            Shape("a8w8_blockscale", 2000, 2112, 7168, scale="block", **_FP8),
            Shape("a8w8_blockscale", 3000, 1000, 1200, scale="block", **_FP8),
        )
    ),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU not found")
class TestOnGpu:
    """Kernels on the first GPU."""

    @pytest.fixture
    def device(self) -> Device:
        """Return the first GPU."""
        return device_of(0)

    @pytest.mark.parametrize(("shapes", "least"), [(SHAPES, 10), (SCALED, 10), (EXAMPLES, 1)], ids=["plain", "scaled", "fmoe and mxfp4"])
    def test_every_enumerated_solution_is_right_and_repeats_its_bits(self, shapes: list[Shape], least: int, device: Device) -> None:
        """Each solution matches the reference and gives equal bits twice."""
        assert not _faults([shape for shape in shapes if shape.m], device, least)

    @pytest.mark.parametrize("start", ["wn_", "wnv_"])
    def test_the_first_solution_of_a_weight_only_format_is_right(self, start: str, device: Device) -> None:
        """Vector units for one row and matrix units for five match the reference and repeat their bits."""
        assert not _faults([shape for shape in WEIGHTS if (shape.m == 1) is (start == "wnv_")], device, 1, start)

    def test_specialised_warps_and_shared_tiles_are_right_over_several_tiles(self, device: Device) -> None:
        """One and two consumers, and fewer, as many and more tiles than multiprocessors, give equal
        bits each time.
        """
        if device.gfx != "sm_90":
            pytest.skip(f"warps are specialised on sm_90 only, not on {device.gfx}")
        shared = [Shape("a16w16", m, n, 2048, epilogue="bias") for m, n in ((100, 512), (1000, 1280), (1024, 7168))]
        faults = []
        for name, shape in (*SPECIALIZED, *(("streamk_r1_m128n128k64_g8_w8s3", shape) for shape in shared)):
            operands = _operands(shape, device)
            launcher = _bound(Solution("triton", name), shape, device)
            first, second = launcher.call(*operands), launcher.call(*operands)
            if not _is_close(first, shape, operands) or not torch.equal(first, second):
                faults.append(f"{name}: {shape}")
        assert not faults

    def test_graphs_of_a_split_read_new_inputs(self, device: Device) -> None:
        """Graphs with separate pools share neither counters nor partial sums, and leave counters zero."""
        shape = Shape("a16w16", 16, 7168, 8192)
        launcher = _bound(_split_solution(shape, device), shape, device)
        assert not fault_of_graphs(launcher, [draw_operands(shape, device, seed) for seed in range(4)])

    @pytest.mark.parametrize("alone", [False, True], ids=["sorted", "alone"])
    def test_a_captured_call_serves_another_routing_at_each_replay(self, alone: bool, device: Device) -> None:
        """A graph does not hold the routing: idle experts, ids of no expert and new hidden states
        stay right.
        """
        for shape in (attrs.evolve(shape, m=min(shape.m, 8)) for shape in ROUTED if not unsupported(shape, device)):
            family = family_of("fmoe")
            listed = family.enumerate_solutions(shape, device)
            launcher = _bound(next(one for one in listed if family.parse_name(one.kernel_name).alone is alone), shape, device)
            operands = _operands(shape, device)
            launcher.call(*operands)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = launcher.call(*operands)
            for seed in range(1, 5):
                others = _operands(shape, device, seed)
                for index in (0, 3, 4):
                    operands[index].copy_(others[index])
                if seed > 2:
                    operands[4][:, 0] = 0
                    operands[4][-1, -1] = int(shape["expert"])
                graph.replay()
                torch.cuda.synchronize()
                assert _is_close(out, shape, operands), (str(shape), seed)

    @pytest.mark.parametrize("kind", ["mx, split", "moe, split", "moe, joined"])
    def test_threads_with_streams_share_a_launcher_of_a_plan(self, kind: str, device: Device) -> None:
        """Four threads call one launcher with split or joined sums on four streams: every answer
        has the bits of a lone call.
        """
        shape = Shape("a4w4_blockscale", 16, 1280, 4096, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
        shape = shape if kind == "mx, split" else attrs.evolve(MOE[2], m=2, n=2048)
        listed, joined = family_of(shape.op).enumerate_solutions(shape, device), kind == "moe, joined"
        solution = next(one for one in listed if ("_a" in one.kernel_name if joined else one.split_k > 1 and "_a" not in one.kernel_name))
        inputs = [draw_operands(shape, device, seed) for seed in range(4)]
        assert not fault_of_threads(_bound(solution, shape, device), inputs, calls=50)

    def test_given_scales_of_the_activations_are_used(self, device: Device) -> None:
        """per_Tensor takes the scales that the call passes, one or both, and else finds them in the
        values.
        """
        shape = MOE[6]
        if unsupported(shape, device):
            pytest.skip(str(unsupported(shape, device)))
        launcher, operands = _bound(Solution("triton", "auto"), shape, device), _operands(shape, device)
        one, other = (torch.tensor([value], device=device.torch_device) for value in (0.02, 0.05))
        for scales in ((one, other), (one, None), (None, other), (None, None), (one,)):
            assert _is_close(launcher.call(*operands, *scales), shape, (*operands, *scales)), scales

    def test_many_pairs_are_sorted_by_several_programs(self, device: Device) -> None:
        """The sort takes more pairs than one program reads, most of them of one expert."""
        shape = attrs.evolve(MOE[2], m=5000)
        launcher, operands = _bound(Solution("triton", "auto"), shape, device), _operands(shape, device)
        operands[4][100:4000, 0] = 5
        assert _is_close(launcher.call(*operands), shape, operands)

    def test_the_other_device_gets_its_own_launch(self) -> None:
        """A launcher of device 1 runs there while device 0 is current."""
        if torch.cuda.device_count() < 2:
            pytest.skip("second GPU not found")
        device, shape = device_of(1), Shape("a16w16", 8, 512, 1024)
        operands = _operands(shape, device)
        with torch.cuda.device(0):
            out = _bound(Solution("triton", "auto"), shape, device).call(*operands)
        assert out.device.index == 1
        assert _is_close(out, shape, operands)

    def test_a_kernel_too_large_for_the_device_raises_out_of_resources(self, device: Device) -> None:
        """`bind` raises the typed error before anything is launched."""
        with pytest.raises(OutOfResources, match="shared memory"):
            launch.bind(Solution("triton", "gemm_r1_m128n256k256_g8_w8s8"), Shape("a16w16", 4096, 4096, 4096), device)
