"""Launching on a GPU: right answers, graphs, threads, streams, devices, and refusals."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tunedgemm.plugin import Device, Launcher, OutOfResources, Shape, Solution, Unsupported, device_of
from tunedgemm.tools import ops, plain_weight

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

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


@pytest.fixture
def device() -> Device:
    """The first GPU."""
    return device_of(0)


def _operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    return ops()[shape.op].make_inputs(shape, device.torch_device, seed)


def _bound(solution: Solution, shape: Shape, device: Device) -> Launcher:
    from tunedgemm_triton import launch

    launcher = launch.bind(solution, shape, device)
    assert isinstance(launcher, Launcher), launcher
    return launcher


def _close(out: Any, shape: Shape, operands: tuple[Any, ...]) -> bool:
    op = ops()[shape.op]
    expected = op.reference(shape, operands)
    error = (out.reshape(expected.shape).double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return error.max().item() < op.tolerance(shape).row_error


def _split_solution(shape: Shape, device: Device) -> Solution:
    from tunedgemm_triton import solutions

    return next(found for found in solutions.enumerate_solutions(shape, device) if found.split_k > 1)


@pytest.mark.parametrize("shape", [*SHAPES, *SCALED], ids=str)
def test_every_enumerated_solution_is_right_and_repeats_its_bits(shape: Shape, device: Device) -> None:
    """What is enumerated binds or refuses with a reason, matches the reference, and gives equal bits twice."""
    from tunedgemm_triton import launch, limits, solutions

    if isinstance(answer := limits.supports(shape, device), Unsupported):
        pytest.skip(answer.reason)
    operands, ran = _operands(shape, device), 0
    plain = tuple(map(plain_weight, operands))
    for solution in solutions.enumerate_solutions(shape, device):
        try:
            launcher = launch.bind(solution, shape, device)
        except OutOfResources:
            continue
        assert isinstance(launcher, Launcher), launcher
        first, second = launcher.call(*plain), launcher.call(*plain)
        assert _close(first, shape, operands), solution
        assert torch.equal(first, second), solution
        ran += 1
    assert ran >= 10


SPECIALIZED = [
    *(
        (name, shape)
        for name in ("tma_r1_m64n128k128_g8_w4s3_ws", "tma_r1_m128n128k64_g8_w4s4_ws", "tma_r1_m128n256k64_g8_w4s3_ws")
        for shape in (Shape("a16w16", 1000, 1280, 1024, epilogue="bias"), Shape("a16w16", 1024, 7168, 2048))
    ),
    *(
        (name, shape)
        for name in ("tma_r1_m128n128k128_g8_w4s4_ws", "tma_r1_m128n64k128_g8_w4s3_ws")
        for shape in (
            Shape("a8w8", 2000, 2112, 7168, scale="row", **_FP8),
            Shape("a8w8_blockscale", 2000, 2112, 7168, scale="block", **_FP8),
            Shape("a8w8_blockscale", 3000, 1000, 1200, scale="block", **_FP8),
        )
    ),
]


@pytest.mark.parametrize(("name", "shape"), SPECIALIZED, ids=str)
def test_specialised_warps_are_right_over_several_tiles(device: Device, name: str, shape: Shape) -> None:
    """One and two consumers, fewer and more tiles than multiprocessors."""
    if device.gfx != "sm_90":
        pytest.skip(f"warps are specialised on sm_90 only, not on {device.gfx}")
    operands = _operands(shape, device)
    launcher = _bound(Solution("triton", name), shape, device)
    first, second = launcher.call(*operands), launcher.call(*operands)
    assert _close(first, shape, operands)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("m", "n"), [(100, 512), (1000, 1280), (1024, 7168)])
def test_shared_tiles_are_right_whatever_their_number(device: Device, m: int, n: int) -> None:
    """Fewer tiles than multiprocessors, a round and a part, several rounds: the same bits each time."""
    shape = Shape("a16w16", m, n, 2048, epilogue="bias")
    operands = _operands(shape, device)
    launcher = _bound(Solution("triton", "streamk_r1_m128n128k64_g8_w8s3"), shape, device)
    first, second = launcher.call(*operands), launcher.call(*operands)
    assert _close(first, shape, operands)
    assert torch.equal(first, second)


def test_leading_dimensions_are_kept(device: Device) -> None:
    """x [2, 3, K] gives [2, 3, N]."""
    shape = Shape("a16w16", 6, 256, 512)
    x, weight = _operands(shape, device)
    out = _bound(Solution("triton", "auto"), shape, device).call(x.view(2, 3, 512), weight)
    assert out.shape == (2, 3, 256)
    assert _close(out, shape, (x, weight))


def test_a_captured_split_reads_new_inputs_at_each_replay(device: Device) -> None:
    """Split-K leaves its counters zero inside a graph: many replays with new inputs stay right."""
    shape = Shape("a16w16", 16, 1280, 8192)
    launcher = _bound(_split_solution(shape, device), shape, device)
    x, weight = _operands(shape, device)
    graph = torch.cuda.CUDAGraph()
    launcher.call(x, weight)
    with torch.cuda.graph(graph):
        first = launcher.call(x, weight)
        second = launcher.call(x, weight)
    for seed in range(1, 5):
        x.copy_(_operands(shape, device, seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert _close(first, shape, (x, weight))
        assert torch.equal(first, second)


def test_two_graphs_of_one_split_launcher_replay_at_the_same_time(device: Device) -> None:
    """Graphs with pools of their own share no counters and no partial sums."""
    shape = Shape("a16w16", 16, 7168, 8192)
    launcher = _bound(_split_solution(shape, device), shape, device)
    runs = []
    for seed in range(2):
        operands, graph = _operands(shape, device, seed), torch.cuda.CUDAGraph()
        launcher.call(*operands)
        with torch.cuda.graph(graph):
            out = [launcher.call(*operands) for _ in range(20)][-1]
        runs.append((graph, out, operands, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, _, _, stream in runs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(_close(out, shape, operands) for _, out, operands, _ in runs)


@pytest.mark.parametrize("name", ["split", "streamk_r1_m64n128k64_g8_w4s4", "tma_r1_m128n128k64_g8_w4s3", "tma_r1_m64n128k64_g8_w4s4/3"])
def test_threads_with_streams_of_their_own_share_a_launcher(device: Device, name: str) -> None:
    """Four threads call one launcher on four streams: every answer has the bits of a lone call."""
    shape = Shape("a16w16", 32, 1280, 8192)
    kernel, _, split = name.partition("/")
    launcher = _bound(_split_solution(shape, device) if name == "split" else Solution("triton", kernel, int(split or 0)), shape, device)
    inputs = [_operands(shape, device, seed) for seed in range(4)]
    alone = [launcher.call(*operands) for operands in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(place: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [launcher.call(*inputs[place]) for _ in range(50)]
        stream.synchronize()
        wrong.extend(place for out in outs if not torch.equal(out, alone[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_other_device_gets_its_own_launch() -> None:
    """A launcher of device 1 runs there while device 0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    device, shape = device_of(1), Shape("a16w16", 8, 512, 1024)
    operands = _operands(shape, device)
    with torch.cuda.device(0):
        out = _bound(Solution("triton", "auto"), shape, device).call(*operands)
    assert out.device.index == 1
    assert _close(out, shape, operands)


def test_a_kernel_too_large_for_the_device_raises_out_of_resources(device: Device) -> None:
    """The typed error comes from bind, before anything is launched."""
    from tunedgemm_triton import launch

    with pytest.raises(OutOfResources, match="shared memory"):
        launch.bind(Solution("triton", "gemm_r1_m128n256k256_g8_w8s8"), Shape("a16w16", 4096, 4096, 4096), device)


def test_an_absent_device_and_a_foreign_name_are_refused_with_a_reason(device: Device) -> None:
    """bind answers Unsupported for a device that is only described and for a name of another day."""
    from tunedgemm_triton import launch

    shape = Shape("a16w16", 8, 512, 1024)
    absent = launch.bind(Solution("triton", "auto"), shape, Device("gfx942", 304))
    assert isinstance(absent, Unsupported)
    assert "not present" in absent.reason
    foreign = launch.bind(Solution("triton", "gemm_r0_m16n64k64_g1_w4s2"), shape, device)
    assert isinstance(foreign, Unsupported)
    assert "revision" in foreign.reason
