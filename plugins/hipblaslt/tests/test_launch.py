"""Launches of every op, dtype, bias, scale and layout against the op's reference, and refusals."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Launcher, LaunchError, Shape, Solution
from tunedgemm_hipblaslt import launch
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT

both = pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
nvidia = pytest.mark.parametrize("lt", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
fp8 = pytest.mark.parametrize(("lt", "dtype"), [("cublaslt", "fp8_e4m3fn"), ("hipblaslt", "fp8_e4m3fnuz")], indirect=["lt"])
PLAIN = Shape("a16w16", 4, 48, 64)
#: Solutions of the fake hipBLASLt: correct, failing launch, unlisted.
RIGHT, FAILS, UNLISTED = "sol1003_v100200_fake0001", "sol1017_v100200_fake0001", "sol9999_v100200_fake0001"
#: Solution of the fake cuBLASLt with K split in two.
SPLIT = "id66_tile20_stages15_reduce2_swizzle0_option0_inner0_cluster0"
FAILING = {"hipblaslt": FAILS, "cublaslt": "id71_tile20_stages35_reduce0_swizzle0_option0_inner0_cluster6"}


def _float_shapes() -> list[Shape]:
    shapes = []
    for dtype, outdtype in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")):
        for bias in ("", "bf16", "fp16", "fp32"):
            shapes.append(Shape("a16w16", 5, 48, 64, dtype=dtype, outdtype=outdtype, epilogue="bias" if bias else "none", bias_dtype=bias))
    return shapes


def _quantised_shapes(fp8: str) -> list[Shape]:
    shapes = []
    for outdtype in ("bf16", "fp16", "fp32"):
        for bias in ("", "bf16", "fp32"):
            fields = {"outdtype": outdtype, "epilogue": "bias" if bias else "none", "bias_dtype": bias}
            shapes += [
                Shape("a8w8", 5, 48, 64, dtype=dtype, scale=scale, **fields) for dtype in (fp8, "int8") for scale in ("row", "tensor")
            ]
            shapes += [Shape("a16w16", 5, 48, 64, dtype=fp8, scale=scale, **fields) for scale in ("none", "tensor")]
    return shapes


def _batched_shapes(fp8: str) -> list[Shape]:
    shapes = []
    for bias in ("none", "bias"):
        shapes += [Shape("batched_bf16", 5, 48, 64, dtype=x, outdtype=x, epilogue=bias, extra={"B": 3}) for x in ("bf16", "fp16")]
        shapes += [
            Shape("batched_a8w8", 5, 48, 64, dtype=x, outdtype="bf16", scale="row", epilogue=bias, extra={"B": 3}) for x in ("int8", fp8)
        ]
        shapes += [
            Shape("batched_a8w8", 5, 48, 64, dtype=x, outdtype="fp16", scale="row", epilogue=bias, extra={"B": 1}) for x in ("int8", fp8)
        ]
    return shapes


def _shuffled_shapes(fp8: str) -> list[Shape]:
    fields = {"layout": SHUFFLED_LAYOUT}
    shapes = [
        Shape("a16w16", 5, 48, 128, dtype=x, outdtype=x, epilogue=bias, **fields) for x in ("bf16", "fp16") for bias in ("none", "bias")
    ]
    shapes += [
        Shape("a8w8_bpreshuffle", 5, 48, 128, dtype=fp8, outdtype="bf16", scale=scale, epilogue=bias, **fields)
        for scale in ("row", "tensor")
        for bias in ("none", "bias")
    ]
    return shapes


#: Edge sizes: M, N or K of 1, K not a multiple of 16, odd rows.
EDGES = [
    Shape("a16w16", *sizes, epilogue=bias)
    for sizes in ((1, 1, 1), (1, 48, 64), (4, 1, 64), (4, 48, 1), (3, 33, 7), (1, 16, 8190), (2, 24, 8190))
    for bias in ("none", "bias")
]
BLOCKS = [
    Shape("a8w8_blockscale", m, n, k, dtype="fp8_e4m3fn", outdtype=out, scale="block")
    for m, n, k, out in ((5, 144, 272, "bf16"), (4, 128, 128, "fp16"), (1, 16, 640, "fp32"), (8, 272, 512, "bf16"), (3, 64, 64, "bf16"))
]
#: The same with M-major scales; one of K has a single block, one of M needs no padding.
BLOCKS += [
    attrs.evolve(shape, m=m, extra={"scale_order": order})
    for shape, m in ((BLOCKS[0], 5), (BLOCKS[1], 4), (BLOCKS[2], 1), (BLOCKS[3], 8), (BLOCKS[3], 61))
    for order in ("m_major", "m_major_padded")
]
CASES = {
    "cublaslt": [*_float_shapes(), *_quantised_shapes("fp8_e4m3fn"), *_batched_shapes("fp8_e4m3fn"), *BLOCKS, *EDGES],
    "hipblaslt": [
        *_float_shapes(),
        *_quantised_shapes("fp8_e4m3fnuz"),
        *_batched_shapes("fp8_e4m3fnuz"),
        *_shuffled_shapes("fp8_e4m3fnuz"),
        *EDGES,
    ],
}


def sample_solutions(lt: Any, harness: Any, shape: Shape) -> list[Solution]:
    """Return the library's first answer, and a listed solution of each kind."""
    kinds: dict[Any, Solution] = {}
    for solution in lt.solutions(shape, harness.CPU):
        if "sol1012" not in solution.kernel_name:  # computes wrong numbers
            kinds.setdefault((solution.kernel_name.rsplit("_", 1)[-1] in ("fast", "after"), solution.split_k > 1), solution)
    return [Solution(lt.hooks.abi.libtype, harness.FIRST), *kinds.values()]


def find_faults(lt: Any, harness: Any, shape: Shape) -> list[str]:
    """Return what is wrong with a shape's support and with a sample of its solutions."""
    if (answer := lt.refusal(shape, harness.CPU)) is not None:
        return [f"{shape}: {answer}"]
    case, faults = harness.cached_case(shape), []
    for solution in sample_solutions(lt, harness, shape):
        launcher = lt.bind(solution, shape, harness.CPU)
        fault = case.launch_fault(launcher) if isinstance(launcher, Launcher) else launcher.reason
        faults += [f"{shape}: {solution}: {fault}"] if fault else []
    return faults


@both
def test_kinds(lt: Any, harness: Any) -> None:
    """Each op, dtype, bias, scale and layout is supported and right."""
    faults = [fault for shape in CASES[lt.hooks.abi.libtype] for fault in find_faults(lt, harness, shape)]
    assert not faults


def test_ocp_fp8_on_mi350(harness: Any, fake_library: Any) -> None:
    """On a gfx950 hipBLASLt multiplies OCP fp8, shuffled or not."""
    lt = harness.make_backend(fake_library("hipblaslt"), "hipblaslt", harness.MI350)
    shapes = [*_quantised_shapes("fp8_e4m3fn"), *_shuffled_shapes("fp8_e4m3fn")]
    faults = [fault for shape in shapes for fault in find_faults(lt, harness, shape)]
    assert not faults


@fp8
def test_forms_of_row_scales(lt: Any, harness: Any, dtype: str) -> None:
    """Row scales may be [M], [M, 1] and [1, N], and may have the leading dimensions of x."""
    shape = Shape("a8w8", 6, 48, 64, dtype=dtype, outdtype="bf16", scale="row")
    case = harness.make_case(shape)
    x, weight, x_scale, w_scale = case.operands
    launcher = harness.bind(lt, harness.FIRST, shape)
    assert not case.output_fault(launcher.call(x, weight, x_scale.view(6), w_scale.view(1, 48)))
    out = launcher.call(x.view(2, 3, 64), weight, x_scale.view(2, 3, 1), w_scale)
    assert out.shape == (2, 3, 48)
    assert not case.output_fault(out)


@fp8
def test_scales_of_fp8_in_a16w16(lt: Any, harness: Any, dtype: str) -> None:
    """x, weight and output take a scale in any float dtype, the output's after the bias."""
    plain = Shape("a16w16", 5, 48, 64, dtype=dtype, outdtype="fp32", scale="tensor")
    for shape in (plain, attrs.evolve(plain, epilogue="bias", bias_dtype="fp32")):
        x, weight, *rest = harness.make_case(attrs.evolve(shape, scale="none")).operands
        bias = rest[0] if rest else None
        launcher, product = harness.bind(lt, harness.FIRST, shape), x.double() @ weight.double().T
        for kind in (torch.float32, torch.bfloat16):
            a, b, c = (torch.tensor([scale]).to(kind) for scale in (0.5, 3.0, 0.25))
            for scales, out_scale in (((a, b), 1), ((a, b, c), 0.25)):
                expected = (product * 1.5 + (0 if bias is None else bias.double())) * out_scale
                torch.testing.assert_close(launcher.call(x, weight, bias, *scales).double(), expected, rtol=1e-5, atol=1e-4)


@nvidia
def test_the_workspace_is_as_stated(lt: Any, harness: Any) -> None:
    """A launcher states its workspace and uses that much."""
    shape = attrs.evolve(PLAIN, k=512)
    launcher = harness.bind(lt, SPLIT, shape, split_k=2)
    assert launcher.workspace_bytes == 2 * 4 * 48 * 4, "two parts of D in float32"
    assert harness.bind(lt, harness.FIRST, shape).workspace_bytes == 0
    assert not harness.make_case(shape).launch_fault(launcher)


def test_the_workspace_limit_of_cublaslt(harness: Any, fake_library: Any) -> None:
    """A configuration beyond the limit does not bind and names both numbers; others bind."""
    shape = attrs.evolve(PLAIN, k=512)
    for limit, binds in ((1535, False), (1536, True)):
        lt = harness.make_backend(fake_library("cublaslt"), "cublaslt", abi=attrs.evolve(CUBLASLT, workspace=limit))
        if binds:
            harness.bind(lt, SPLIT, shape, split_k=2)
        else:
            assert harness.refusal(lt, SPLIT, shape, split_k=2) == "workspace: the limit is 1535 bytes (got 1536)"
        assert not harness.make_case(shape).launch_fault(harness.bind(lt, harness.FIRST, shape))
        assert (SPLIT in [solution.kernel_name for solution in lt.solutions(shape, harness.CPU)]) == binds


@amd
def test_the_workspace_limit_of_hipblaslt(harness: Any, fake_library: Any, lt: Any) -> None:
    """An index beyond the limit is not listed for the shape."""
    name = "sol1004_v100200_fake0001"  # needs 1 MiB
    assert harness.bind(lt, name, PLAIN).workspace_bytes == 1 << 20
    small = harness.make_backend(fake_library("hipblaslt"), "hipblaslt", abi=attrs.evolve(HIPBLASLT, workspace=(1 << 20) - 1))
    assert "does not list algorithm 1004" in harness.refusal(small, name, PLAIN)


@amd
def test_indices_of_other_builds(lt: Any, harness: Any) -> None:
    """An index of another version or revision is refused, with both builds and the remedy."""
    for build, text in (("v100100_fake0001", "100100 (fake0001)"), ("v100200_0a1b2c3d", "100200 (0a1b2c3d)")):
        reason = harness.refusal(lt, f"sol1003_{build}", PLAIN)
        assert f"belongs to hipBLASLt {text} (got 100200 (fake0001)); tune again with --stale" in reason


@amd
def test_unlisted_indices(lt: Any, harness: Any) -> None:
    """An index that the library does not list for exactly this shape is refused."""
    for name in (UNLISTED, "sol1008_v100200_fake0001", "sol1_v100200_fake0001"):
        assert "does not list algorithm" in harness.refusal(lt, name, PLAIN)
    harness.bind(lt, "sol1006_v100200_fake0001", PLAIN)
    assert "does not list algorithm 1006" in harness.refusal(lt, "sol1006_v100200_fake0001", attrs.evolve(PLAIN, k=72))


def test_foreign_names(backends: dict[str, Any], harness: Any) -> None:
    """Names of the other library, of AITER or of no form are refused with the accepted forms."""
    cases = [
        ("cublaslt", RIGHT, "an algorithm of hipBLASLt"),
        ("hipblaslt", SPLIT, "a configuration of cuBLASLt"),
        *(("cublaslt", name, "not a name of an Lt library") for name in ("native", "id66", "id66_tile18", "heuristic_slow")),
        ("cublaslt", "Cijk_Alik_Bljk_BBS_BH_MT16x16x3", "an algorithm of hipBLASLt"),
        *(("hipblaslt", name, "not a name of an Lt library") for name in ("sol12", "hipb_mm")),
    ]
    faults = [(name, reason) for libtype, name, reason in cases if reason not in harness.refusal(backends[libtype], name, PLAIN)]
    assert not faults


@nvidia
def test_refused_configurations(lt: Any, harness: Any) -> None:
    """Each attribute of a name reaches the library, whose refusal is the reason."""
    name = "id66_tile18_stages15_reduce0_swizzle0_option0_inner0_cluster0"
    cases = [
        (name.replace("id66", "id12"), 1),  # no such algorithm
        (name.replace("tile18", "tile99"), 1),
        (name.replace("stages15", "stages99"), 1),
        (name.replace("reduce0", "reduce2"), 1),  # a reduction without a split
        (name, 2),  # a split without a reduction
        (name.replace("swizzle0", "swizzle2"), 1),
        (name.replace("option0", "option4"), 1),
        (name.replace("inner0", "inner1"), 1),
        (name.replace("cluster0", "cluster2"), 1),
    ]
    faults = [case for case in cases if "cublasLtMatmulAlgo" not in harness.refusal(lt, case[0], PLAIN, case[1])]
    assert not faults
    for wide in (SPLIT.replace("tile20", f"tile{1 << 40}"), SPLIT.replace("cluster0", "cluster70000")):
        assert "kernelName: value out of range" in harness.refusal(lt, wide, PLAIN, split_k=2)


@both
def test_a_failing_launch(lt: Any, harness: Any) -> None:
    """A failing launch raises LaunchError with the status's name, and the next launch is right."""
    launcher = harness.bind(lt, FAILING[lt.hooks.abi.libtype], PLAIN)
    with pytest.raises(LaunchError, match=f"{lt.hooks.abi.prefix}Matmul: EXECUTION_FAILED"):
        launcher.call(*harness.make_case(PLAIN).operands)
    assert not harness.make_case(PLAIN).launch_fault(harness.bind(lt, harness.FIRST, PLAIN))


@both
def test_misaligned_operands(lt: Any, harness: Any) -> None:
    """The library refuses operands that are not at a multiple of 16 bytes."""
    shape = Shape("a8w8", 4, 48, 64, dtype="int8", outdtype="bf16", scale="tensor")
    x, *rest = harness.make_case(shape).operands
    with pytest.raises(LaunchError, match="NOT_SUPPORTED"):
        harness.bind(lt, harness.FIRST, shape).call(harness.padded(x, 8), *rest)


@amd
def test_a_library_without_an_algorithm(lt: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a result the first answer is refused."""
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "0")
    assert harness.refusal(lt, harness.FIRST, attrs.evolve(PLAIN, n=56)) == "hipblaslt: no algorithm for this shape"


@nvidia
def test_m_major_scales_are_not_copied(lt: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads the caller's M-major scales if M or their padding is a multiple of 4."""
    addresses, faults = [], []
    make_launch = launch.launch_of
    monkeypatch.setattr(launch, "launch_of", lambda *made: _noting(make_launch(*made), addresses))
    for m, order, shared in ((8, "m_major", True), (61, "m_major_padded", True), (61, "m_major", False), (8, "row", False)):
        shape = attrs.evolve(BLOCKS[3], m=m, extra={} if order == "row" else {"scale_order": order})
        case = harness.make_case(shape)
        fault = case.launch_fault(harness.bind(lt, harness.FIRST, shape))
        faults += [f"{shape}: {fault}"] if fault else []
        faults += [f"{shape}: copied: {shared}"] if (addresses[-1] == case.operands[2].data_ptr()) is not shared else []
    assert not faults


@nvidia
def test_padding_outside_the_memory_is_not_read(lt: Any, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded scales whose memory ends with their last number are copied."""
    addresses: list[int] = []
    make_launch = launch.launch_of
    monkeypatch.setattr(launch, "launch_of", lambda *made: _noting(make_launch(*made), addresses))
    shape = attrs.evolve(BLOCKS[3], m=61, extra={"scale_order": "m_major_padded"})
    case = harness.make_case(shape)
    x, weight, x_scale, w_scale = case.operands
    short = torch.empty_strided(x_scale.shape, x_scale.stride()).copy_(x_scale)
    out = harness.bind(lt, harness.FIRST, shape).call(x, weight, short, w_scale)
    assert not case.output_fault(out) and addresses[-1] != short.data_ptr()


def _noting(inner: Any, addresses: list[int]) -> Any:
    """Return the launch that also notes the address of x's scales, its last argument."""

    def noted(*arguments: int) -> int:
        addresses.append(arguments[-1])
        return int(inner(*arguments))

    return noted
