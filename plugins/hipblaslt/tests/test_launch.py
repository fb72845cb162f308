"""Launches: every op, dtype, bias, scale and layout of both libraries against the op's reference, and what is refused instead."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Launcher, LaunchError, Shape, Solution, Unsupported
from tunedgemm.testing.shapes import shapes_of
from tunedgemm_hipblaslt import launch, limits
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT

both = pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
nvidia = pytest.mark.parametrize("lt", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
PLAIN = Shape("a16w16", 4, 48, 64)
#: A solution of the fake hipBLASLt that runs and is right, one that fails, and one that is not there.
RIGHT, FAILS, NOWHERE = "sol1003_v100200_fake0001", "sol1017_v100200_fake0001", "sol9999_v100200_fake0001"
#: One of the fake cuBLASLt with K in two parts.
SPLIT = "id66_tile20_stages15_reduce2_swizzle0_option0_inner0_cluster0"


def _floats() -> list[Shape]:
    made = []
    for dtype, outdtype in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")):
        for bias in ("", "bf16", "fp16", "fp32"):
            made.append(Shape("a16w16", 5, 48, 64, dtype=dtype, outdtype=outdtype, epilogue="bias" if bias else "none", bias_dtype=bias))
    return made


def _quantised(fp8: str) -> list[Shape]:
    made = []
    for outdtype in ("bf16", "fp16", "fp32"):
        for bias in ("", "bf16", "fp32"):
            fields = {"outdtype": outdtype, "epilogue": "bias" if bias else "none", "bias_dtype": bias}
            made += [Shape("a8w8", 5, 48, 64, dtype=dtype, scale=scale, **fields) for dtype in (fp8, "int8") for scale in ("row", "tensor")]
            made += [Shape("a16w16", 5, 48, 64, dtype=fp8, scale=scale, **fields) for scale in ("none", "tensor")]
    return made


def _batched(fp8: str) -> list[Shape]:
    made = []
    for bias in ("none", "bias"):
        made += [Shape("batched_bf16", 5, 48, 64, dtype=x, outdtype=x, epilogue=bias, extra={"B": 3}) for x in ("bf16", "fp16")]
        made += [
            Shape("batched_a8w8", 5, 48, 64, dtype=x, outdtype="bf16", scale="row", epilogue=bias, extra={"B": 3}) for x in ("int8", fp8)
        ]
        made += [
            Shape("batched_a8w8", 5, 48, 64, dtype=x, outdtype="fp16", scale="row", epilogue=bias, extra={"B": 1}) for x in ("int8", fp8)
        ]
    return made


def _shuffled(fp8: str) -> list[Shape]:
    fields = {"layout": limits.SHUFFLED_LAYOUT}
    made = [
        Shape("a16w16", 5, 48, 128, dtype=x, outdtype=x, epilogue=bias, **fields) for x in ("bf16", "fp16") for bias in ("none", "bias")
    ]
    made += [
        Shape("a8w8_bpreshuffle", 5, 48, 128, dtype=fp8, outdtype="bf16", scale=scale, epilogue=bias, **fields)
        for scale in ("row", "tensor")
        for bias in ("none", "bias")
    ]
    return made


#: Sizes at the edges: N or K of 1, M of 1, K that is no multiple of 16, odd rows.
EDGES = [
    Shape("a16w16", *sizes, epilogue=bias)
    for sizes in ((1, 1, 1), (1, 48, 64), (4, 1, 64), (4, 48, 1), (3, 33, 7), (1, 16, 8190), (2, 24, 8190))
    for bias in ("none", "bias")
]
BLOCKS = [
    Shape("a8w8_blockscale", m, n, k, dtype="fp8_e4m3fn", outdtype=out, scale="block")
    for m, n, k, out in ((5, 144, 272, "bf16"), (4, 128, 128, "fp16"), (1, 16, 640, "fp32"), (8, 272, 512, "bf16"), (3, 64, 64, "bf16"))
]
CASES = {
    "cublaslt": [*_floats(), *_quantised("fp8_e4m3fn"), *_batched("fp8_e4m3fn"), *BLOCKS, *EDGES],
    "hipblaslt": [*_floats(), *_quantised("fp8_e4m3fnuz"), *_batched("fp8_e4m3fnuz"), *_shuffled("fp8_e4m3fnuz"), *EDGES],
}
MODELS = [(abi.libtype, shape) for abi in (CUBLASLT, HIPBLASLT) for op in limits.supported_ops(abi) for shape in shapes_of(op)]


def several(lt: Any, over: Any, shape: Shape) -> list[Solution]:
    """The library's first answer and, of all that it lists, the first of each kind of ending and of split."""
    kinds: dict[Any, Solution] = {}
    for solution in lt.enumerate_solutions(shape, over.CPU):
        if "sol1012" not in solution.kernel_name:  # it is wrong
            kinds.setdefault((solution.kernel_name.rsplit("_", 1)[-1] in ("fast", "after"), solution.split_k > 1), solution)
    return [Solution(lt.abi.libtype, over.FIRST), *kinds.values()]


def wrongs(lt: Any, over: Any, shape: Shape) -> list[str]:
    """What is wrong with several solutions of a supported shape."""
    case, found = over.case(shape), []
    for solution in several(lt, over, shape):
        answer = lt.bind(solution, shape, over.CPU)
        fault = case.launched(answer) if isinstance(answer, Launcher) else answer.reason
        found += [f"{solution}: {fault}"] if fault else []
    return found


@pytest.mark.parametrize(
    ("lt", "shape"), [(libtype, shape) for libtype, shapes in CASES.items() for shape in shapes], indirect=["lt"], ids=str
)
def test_kinds(lt: Any, over: Any, shape: Shape) -> None:
    """Each op, dtype, bias, scale and layout is supported and right, at small and at awkward sizes."""
    assert lt.supports(shape, over.CPU) is True
    assert not wrongs(lt, over, shape)


@pytest.mark.parametrize(("lt", "shape"), MODELS, indirect=["lt"], ids=str)
def test_shapes_of_models(lt: Any, over: Any, shape: Shape) -> None:
    """The conformance suite's shapes are right, or refused with a reason."""
    answer = lt.supports(shape, over.CPU)
    if isinstance(answer, Unsupported):
        assert answer.reason
        assert isinstance(lt.bind(Solution(lt.abi.libtype, over.FIRST), shape, over.CPU), Unsupported)
    else:
        assert not wrongs(lt, over, shape)


@pytest.mark.parametrize("shape", [*_quantised("fp8_e4m3fn"), *_shuffled("fp8_e4m3fn")], ids=str)
def test_the_standard_fp8_of_mi350(over: Any, fake_library: Any, shape: Shape) -> None:
    """On a gfx950 hipBLASLt multiplies the standard fp8, shuffled or not."""
    lt = mi350(over, fake_library)
    assert lt.supports(shape, over.CPU) is True
    assert not wrongs(lt, over, shape)


@functools.cache
def mi350(over: Any, fake_library: Any) -> Any:
    return over.backend(fake_library("hipblaslt"), "hipblaslt", over.MI350)


@both
def test_leading_dimensions_are_kept(lt: Any, over: Any) -> None:
    """x in several dimensions gives an output in as many."""
    shape = Shape("a16w16", 12, 48, 64, epilogue="bias")
    case = over.case(shape)
    launcher = over.bound(lt, over.FIRST, shape)
    for sizes in ((12,), (3, 4), (1, 12), (2, 3, 2)):
        out = launcher.call(case.plain[0].view(*sizes, 64), *case.plain[1:])
        assert out.shape == (*sizes, 48)
        assert not case.wrong(out)


@pytest.mark.parametrize(("lt", "dtype"), [("cublaslt", "fp8_e4m3fn"), ("hipblaslt", "fp8_e4m3fnuz")], indirect=["lt"])
def test_scales_in_the_forms_that_ops_take(lt: Any, over: Any, dtype: str) -> None:
    """Scales by row may be [M], [M, 1] and [1, N]; leading dimensions of x are kept with them."""
    shape = Shape("a8w8", 6, 48, 64, dtype=dtype, outdtype="bf16", scale="row")
    case = over.case(shape)
    x, weight, x_scale, w_scale = case.plain
    launcher = over.bound(lt, over.FIRST, shape)
    assert not case.wrong(launcher.call(x, weight, x_scale.view(6), w_scale.view(1, 48)))
    out = launcher.call(x.view(2, 3, 64), weight, x_scale.view(2, 3, 1), w_scale)
    assert out.shape == (2, 3, 48)
    assert not case.wrong(out)


@pytest.mark.parametrize(("lt", "dtype"), [("cublaslt", "fp8_e4m3fn"), ("hipblaslt", "fp8_e4m3fnuz")], indirect=["lt"])
@pytest.mark.parametrize("bias", ["none", "bias"])
def test_factors_of_fp8_in_a16w16(lt: Any, over: Any, dtype: str, bias: str) -> None:
    """One factor each of x and weight in any float, and one of the output, which comes last and scales the bias, too."""
    shape = Shape(
        "a16w16", 5, 48, 64, dtype=dtype, outdtype="fp32", scale="tensor", epilogue=bias, bias_dtype="fp32" if bias == "bias" else ""
    )
    x, weight, *rest = over.case(attrs.evolve(shape, scale="none")).plain
    added = rest[0] if rest else None
    scales = torch.tensor([0.5]), torch.tensor([3.0]), torch.tensor([0.25])
    launcher, plain = over.bound(lt, over.FIRST, shape), x.double() @ weight.double().T
    for kind in (torch.float32, torch.bfloat16):
        a, b, c = (scale.to(kind) for scale in scales)
        for given, factor, last in (((a, b), 1.5, 1), ((a, b, c), 1.5, 0.25)):
            wanted = (plain * factor + (0 if added is None else added.double())) * last
            torch.testing.assert_close(launcher.call(x, weight, added, *given).double(), wanted, rtol=1e-5, atol=1e-4)


@nvidia
def test_a_bias_after_the_product(lt: Any, over: Any) -> None:
    """The ending `after` adds the bias in a second step; the same row is one step without it."""
    shape = Shape("a16w16", 5, 48, 64, epilogue="bias")
    case = over.case(shape)
    assert not case.launched(over.bound(lt, f"{over.FIRST}_after", shape))
    assert launch.make_problem(shape, bias_after=True).bias_dtype == ""
    assert launch.make_problem(shape).bias_dtype == "bf16"


@both
def test_one_launcher_serves_many_operands(lt: Any, over: Any) -> None:
    """Nothing of one call is left in the next: other operands, other addresses, other biases."""
    shape = Shape("a16w16", 5, 48, 64, epilogue="bias")
    launcher = over.bound(lt, over.FIRST, shape)
    for seed in range(4):
        assert not over.case(shape, seed).launched(launcher)


@nvidia
def test_scratch_is_asked_for_and_enough(lt: Any, over: Any) -> None:
    """A launcher says what scratch it takes, and takes that much."""
    shape = Shape("a16w16", 4, 48, 512)
    launcher = over.bound(lt, SPLIT, shape, split_k=2)
    assert launcher.workspace_bytes == 2 * 4 * 48 * 4, "two parts of D in float32"
    assert over.bound(lt, over.FIRST, shape).workspace_bytes == 0
    case = over.case(shape)
    assert not case.launched(launcher)


def test_more_scratch_than_the_limit_is_refused(over: Any, fake_library: Any) -> None:
    """A configuration that wants more scratch than there is does not bind, and says how much; others do."""
    shape = Shape("a16w16", 4, 48, 512)
    for limit, binds in ((1535, False), (1536, True)):
        lt = over.backend(fake_library("cublaslt"), "cublaslt", abi=attrs.evolve(CUBLASLT, workspace=limit))
        if binds:
            over.bound(lt, SPLIT, shape, split_k=2)
        else:
            assert over.refused(lt, SPLIT, shape, split_k=2) == "workspace: the limit is 1535 bytes (got 1536)"
        assert not over.case(shape).launched(over.bound(lt, over.FIRST, shape))
        assert (SPLIT in [found.kernel_name for found in lt.enumerate_solutions(shape, over.CPU)]) == binds


@amd
def test_numbers_that_want_too_much_scratch_are_not_answers(over: Any, fake_library: Any, lt: Any) -> None:
    """hipBLASLt is asked within the limit, so a number that wants more is not found for the shape."""
    name = "sol1004_v100200_fake0001"  # wants 1 MiB
    assert over.bound(lt, name, PLAIN).workspace_bytes == 1 << 20
    small = over.backend(fake_library("hipblaslt"), "hipblaslt", abi=attrs.evolve(HIPBLASLT, workspace=(1 << 20) - 1))
    assert "does not list algorithm 1004" in over.refused(small, name, PLAIN)


@amd
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sol1003_v100100_fake0001", "hipBLASLt 100100 (fake0001) (got 100200 (fake0001))"),
        ("sol1003_v100200_0a1b2c3d", "hipBLASLt 100200 (0a1b2c3d) (got 100200 (fake0001))"),
    ],
)
def test_rows_of_other_builds(lt: Any, over: Any, name: str, reason: str) -> None:
    """A number of another version or revision is never launched; the reason says what to do."""
    found = over.refused(lt, name, PLAIN)
    assert reason in found
    assert "--stale" in found


@amd
@pytest.mark.parametrize("name", [NOWHERE, "sol1008_v100200_fake0001", "sol1_v100200_fake0001"])
def test_numbers_that_are_not_among_the_answers(lt: Any, over: Any, name: str) -> None:
    """A number that the library does not list for the shape is refused, however plausible."""
    assert "does not list algorithm" in over.refused(lt, name, PLAIN)


@amd
def test_a_number_counts_for_its_shape(lt: Any, over: Any) -> None:
    """A number that fits one K and not another is refused for that one."""
    over.bound(lt, "sol1006_v100200_fake0001", PLAIN)
    assert "does not list algorithm 1006" in over.refused(lt, "sol1006_v100200_fake0001", attrs.evolve(PLAIN, k=72))


@pytest.mark.parametrize(
    ("lt", "name", "reason"),
    [
        ("cublaslt", RIGHT, "an index of hipBLASLt"),
        ("hipblaslt", SPLIT, "a configuration of cuBLASLt"),
        *(("cublaslt", name, "not a name of an Lt library") for name in ("", "native", "id66", "id66_tile18", "heuristic_slow")),
        # AITER's rows of libtype hipblaslt name the kernel of rocBLAS's generator
        *(
            ("hipblaslt", name, "not a name of an Lt library")
            for name in ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x256", "sol12", "hipb_mm")
        ),
    ],
    indirect=["lt"],
)
def test_foreign_names(lt: Any, over: Any, name: str, reason: str) -> None:
    """A name of the other library, of AITER's or of nobody is refused, and told what a name looks like."""
    assert reason in over.refused(lt, name, PLAIN)


@nvidia
@pytest.mark.parametrize(
    ("name", "split_k"),
    [
        ("id12_tile18_stages15_reduce0_swizzle0_option0_inner0_cluster0", 1),  # no such algorithm
        ("id66_tile99_stages15_reduce0_swizzle0_option0_inner0_cluster0", 1),
        ("id66_tile18_stages99_reduce0_swizzle0_option0_inner0_cluster0", 1),
        ("id66_tile18_stages15_reduce2_swizzle0_option0_inner0_cluster0", 1),  # a reduction of one part
        ("id66_tile18_stages15_reduce0_swizzle0_option0_inner0_cluster0", 2),  # two parts and no reduction
        ("id66_tile18_stages15_reduce0_swizzle2_option0_inner0_cluster0", 1),
        ("id66_tile18_stages15_reduce0_swizzle0_option4_inner0_cluster0", 1),
        ("id66_tile18_stages15_reduce0_swizzle0_option0_inner1_cluster0", 1),
        ("id66_tile18_stages15_reduce0_swizzle0_option0_inner0_cluster2", 1),
    ],
)
def test_configurations_that_the_library_refuses(lt: Any, over: Any, name: str, split_k: int) -> None:
    """Each attribute of a name reaches the library, whose refusal is the reason."""
    assert "cublasLtMatmulAlgo" in over.refused(lt, name, PLAIN, split_k)


@nvidia
def test_a_number_beyond_32_bits_is_refused(lt: Any, over: Any) -> None:
    """A name whose numbers no attribute holds is refused like any other."""
    for name in (SPLIT.replace("tile20", f"tile{1 << 40}"), SPLIT.replace("cluster0", "cluster70000")):
        assert over.refused(lt, name, PLAIN, split_k=2)


@pytest.mark.parametrize(
    ("lt", "name"), [("hipblaslt", FAILS), ("cublaslt", "id71_tile20_stages35_reduce0_swizzle0_option0_inner0_cluster6")], indirect=["lt"]
)
def test_a_launch_that_fails_says_so(lt: Any, over: Any, name: str) -> None:
    """What the library refuses at the launch raises LaunchError with its status by name."""
    launcher = over.bound(lt, name, PLAIN)
    with pytest.raises(LaunchError, match=f"{lt.abi.prefix}Matmul: EXECUTION_FAILED"):
        launcher.call(*over.case(PLAIN).plain)
    assert not over.case(PLAIN).launched(over.bound(lt, over.FIRST, PLAIN)), "the next one is right"


@both
def test_operands_at_odd_addresses_are_refused_by_the_library(lt: Any, over: Any) -> None:
    """A launcher needs the 16 bytes of alignment that the core gives it; without them nothing is written."""
    shape = Shape("a8w8", 4, 48, 64, dtype="int8", outdtype="bf16", scale="tensor")
    x, *rest = over.case(shape).plain
    buffer = torch.zeros(x.numel() + 72, dtype=torch.int8)
    moved = buffer[-buffer.data_ptr() % 64 + 8 :][: x.numel()].view(x.shape).copy_(x)
    with pytest.raises(LaunchError, match="NOT_SUPPORTED"):
        over.bound(lt, over.FIRST, shape).call(moved, *rest)


@both
def test_more_than_two_to_the_31_elements(lt: Any, over: Any) -> None:
    """Sizes whose product does not fit 32 bits bind: strides and leading dimensions are 64 bits wide."""
    for shape in (Shape("a16w16", 1 << 20, 4096, 64), Shape("batched_bf16", 4096, 4096, 64, extra={"B": 512})):
        assert lt.bind(Solution(lt.abi.libtype, over.FIRST), shape, over.CPU)


@both
def test_absent_and_unsupported(lt: Any, over: Any) -> None:
    """A described device is told to be absent; an unsupported shape keeps the reason of `supports`."""
    heuristic = Solution(lt.abi.libtype, over.FIRST)
    absent = attrs.evolve(over.HOSTS[lt.abi.libtype], index=-1)
    assert "device: not present" in lt.bind(heuristic, PLAIN, absent).reason
    empty = attrs.evolve(PLAIN, m=0)
    assert lt.bind(heuristic, empty, over.CPU) == lt.supports(empty, over.CPU)


@pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
def test_a_library_that_knows_no_algorithm(lt: Any, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any answer the first answer is refused, not guessed."""
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "0")
    assert over.refused(lt, over.FIRST, attrs.evolve(PLAIN, n=56)) == "hipblaslt: no algorithm for this shape"
