"""The kernels compile with the vendors' compilers: matrix instructions, registers, spills."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm_skinny.build import Build, build_of, options, source
from tunedgemm_skinny.limits import MAX_ROWS, unsupported, width_of
from tunedgemm_skinny.names import KernelConfig, Packed, Rows, Tiles, Wgmma
from tunedgemm_skinny.resources import PIECE, registers, shared_bytes
from tunedgemm_skinny.space import enumerate_kernels

pytestmark = pytest.mark.nightly

NVIDIA = {"sm_80": Device("sm_80", 108), "sm_90": Device("sm_90", 132), "sm_100": Device("sm_100", 148)}
AMD = {"gfx90a": Device("gfx90a", 104), "gfx942": Device("gfx942", 304)}
DEVICES = NVIDIA | AMD
#: Matrix instructions of `tiles`: PTX ISA, mma; AMD's ISA guides of CDNA 2 and 3, which spell bf16
#: differently.
INSTRUCTION = {
    "bf16": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "amd": "v_mfma_f32_16x16x16_?bf16"},
    "fp16": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "amd": "v_mfma_f32_16x16x16_?f16"},
    "int8": {"nvidia": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "amd": "v_mfma_i32_16x16x(32_?|16_?)i8"},
    "fp8_e4m3fn": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "amd": "v_mfma_f32_16x16x32_fp8_fp8"},
    "fp8_e4m3fnuz": {"amd": "v_mfma_f32_16x16x32_fp8_fp8"},
    "fp4x2": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "amd": "v_mfma_f32_16x16x16_?bf16"},
}
#: Instruction of `wgmma`, and its suffixes after M and N: PTX ISA, wgmma.mma_async.
GROUPS = "wgmma.mma_async.sync.aligned."
GROUP_KINDS = {
    "bf16": "k16.f32.bf16.bf16",
    "fp16": "k16.f32.f16.f16",
    "int8": "k32.s32.s8.s8",
    "fp8_e4m3fn": "k32.f32.e4m3.e4m3",
}
#: int8 dot product of the family `rows`.
DOT = {"nvidia": "dp4a.s32.s32", "amd": "v_dot4c?_i32_i8"}
#: Values of M, and K by the width of a load.
ROWS, DEPTHS = (1, 4, 8, 16, 64), {8: 8192, 4: 8196, 2: 8190, 1: 8191}


@pytest.fixture(scope="session")
def compiled(compilers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that compiles a build once, or skips without a compiler."""
    available = {"nvidia": compilers.nvrtc(), "amd": compilers.clang(tmp_path_factory.mktemp("clang"))}
    missing = {"nvidia": "no NVRTC: pip install nvidia-cuda-nvrtc", "amd": f"no {compilers.CLANG}"}
    codes: dict[Build, Any] = {}

    def compile_one(build: Build) -> Any:
        compiler = available[DEVICES[build.gfx].kind] or pytest.skip(missing[DEVICES[build.gfx].kind])
        if build not in codes:
            try:
                codes[build] = compiler.compile(source(build.kernel.family), options(build))
            except compilers.RefusedError as error:
                pytest.fail(f"{build}: {str(error)[:1500]}")
        return codes[build]

    return compile_one


def first(shape: Shape, gfx: str, count: int) -> list[tuple[Any, int]]:
    """List the first solutions of a shape, and the first of each family."""
    listed = list(enumerate_kernels(shape, DEVICES[gfx]))
    kinds = {type(kernel): (kernel, splits) for kernel, splits in reversed(listed)}
    return list(dict.fromkeys([*listed[:count], *kinds.values()]))


def products(code: Any, build: Build) -> int:
    """Count the matrix instructions in the code of a build."""
    return len(re.findall(INSTRUCTION[build.dtype][DEVICES[build.gfx].kind], code.text))


def check(code: Any, build: Build) -> None:
    """Check the family's matrix instructions and its spills.

    Compilers spill a few registers where that lets more warps run. Narrow loads and many rows of x
    have more addresses. The bounds are bytes per thread of solutions listed early; more would cost
    time.
    """
    usual = build.vec * width_of(build.dtype) == PIECE and build.rows < MAX_ROWS
    spilled = 48 if usual else 256
    assert (products(code, build) > 0) == (build.kernel.family == "tiles"), f"{build}: {products(code, build)} products"
    assert (GROUPS in code.text) == (build.kernel.family == "wgmma"), f"{build}: products of {GROUPS}"
    assert code.spilled <= spilled, f"{build} spills {code.spilled}"
    assert code.stack <= spilled, f"{build} has {code.stack} bytes a thread"
    assert code.shared == 0, f"{build} has static shared memory"


@pytest.mark.cases("gfx", DEVICES)
@pytest.mark.cases("m", ROWS)
def test_first_solutions(compiled: Any, gfx: str, m: int) -> None:
    """The first solutions compile and fit the architecture's registers and shared memory."""
    shape, architecture = Shape("a16w16", m, 7168, 8192), ARCHITECTURES[gfx]
    for kernel, splits in first(shape, gfx, 4):
        build = build_of(kernel, splits, shape, gfx)
        code = compiled(build)
        check(code, build)
        assert code.shared + shared_bytes(kernel, splits, shape, gfx) <= architecture.shared_bytes
        limit = 65536 if gfx in NVIDIA else 4 * 64 * 512  # per multiprocessor; per compute unit of four SIMDs, with AGPRs
        assert code.registers * kernel.warps * architecture.warp_size <= limit, f"{build} has {code.registers} registers"


@pytest.mark.cases("gfx", ["sm_80", "sm_90", "gfx90a", "gfx942"])
@pytest.mark.cases("dtypes", [("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp16"), ("fp16", "bf16", "fp32"), ("bf16", "fp16", "")])
def test_dtypes(compiled: Any, gfx: str, dtypes: tuple[str, str, str]) -> None:
    """Each dtype compiles, and `tiles` uses the input dtype's instruction."""
    dtype, outdtype, bias = dtypes
    for m in (4, 16):
        shape = Shape("a16w16", m, 4096, 4096, dtype=dtype, outdtype=outdtype, **({"epilogue": "bias", "bias_dtype": bias} if bias else {}))
        for kernel, splits in first(shape, gfx, 1):
            build = build_of(kernel, splits, shape, gfx)
            assert (build.dtype, build.outdtype, build.bias_dtype) == dtypes
            check(compiled(build), build)


@pytest.mark.cases("gfx", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.cases("vec", DEPTHS)
def test_widths_of_loads(compiled: Any, gfx: str, vec: int) -> None:
    """Loads are as wide as K allows; NVIDIA faults on misaligned ones."""
    wide = {8: r"ld\.global\.nc\S*v4\.u32|cp\.async\S* \S+ \S+ 16,", 4: r"ld\.global\.nc\S*v2\.u32|cp\.async\S* \S+ \S+ 8,"}
    for m in (2, 32):
        shape = Shape("a16w16", m, 4096, DEPTHS[vec])
        for kernel, splits in first(shape, gfx, 1):
            build = build_of(kernel, splits, shape, gfx)
            assert build.vec == vec
            check(code := compiled(build), build)
            widths = [width for width, pattern in wide.items() if re.search(pattern, code.text)]
            assert gfx in AMD or widths == [width for width in wide if width == vec], f"{build}: loads of {widths}"


#: Ops with 8-bit operands, and a batch; "fp8" stands for the architecture's dtype.
SCALED = [
    {"op": "a8w8", "dtype": "int8", "scale": "row"}, {"op": "a8w8", "dtype": "fp8", "scale": "tensor"},
    {"op": "a8w8_blockscale", "dtype": "fp8", "scale": "block"},
    {"op": "batched_a8w8", "dtype": "fp8", "scale": "row", "extra": {"B": 4}}, {"op": "batched_bf16", "dtype": "bf16", "extra": {"B": 4}},
]  # fmt: skip


@pytest.mark.cases("gfx", DEVICES)
@pytest.mark.cases("fields", SCALED)
@pytest.mark.cases("k", [7168, 7170])
def test_other_ops(compiled: Any, gfx: str, fields: dict[str, Any], k: int) -> None:
    """The first solutions of each op compile for few and many rows, with wide and narrow loads."""
    dtype = ARCHITECTURES[gfx].fp8 if fields["dtype"] == "fp8" else fields["dtype"]
    if not dtype:
        pytest.skip(f"{gfx} has no fp8")
    for m in (1, 64) if k % PIECE else (1, 16, 64):
        shape = Shape(**fields | {"dtype": dtype}, m=m, n=2112, k=k, outdtype="bf16")
        assert not unsupported(shape, DEVICES[gfx])
        for kernel, splits in first(shape, gfx, 2):
            build = build_of(kernel, splits, shape, gfx)
            code = compiled(build)
            check(code, build)
            assert shared_bytes(kernel, splits, shape, gfx) <= ARCHITECTURES[gfx].shared_bytes
            assert (dtype == "int8" and kernel.family == "rows") == bool(re.search(DOT[DEVICES[gfx].kind], code.text))


#: mxfp4, plain and shuffled, and shuffled weights of other dtypes.
PACKED = [
    {"op": "a4w4_blockscale", "dtype": "fp4x2", "scale": "block"}, {"op": "a16w4_blockscale", "dtype": "bf16", "scale": "block"},
    {"op": "a4w4_blockscale", "dtype": "fp4x2", "scale": "block", "layout": "aiter16x16"},
    {"op": "a16w4_blockscale", "dtype": "bf16", "scale": "block", "layout": "aiter16x16"}, {"op": "a16w16", "layout": "aiter16x16"},
    {"op": "a8w8_bpreshuffle", "dtype": "int8", "scale": "row", "layout": "aiter32x16"},
    {"op": "a8w8_blockscale_bpreshuffle", "dtype": "fp8", "scale": "block", "layout": "aiter16x16"},
]  # fmt: skip


@pytest.mark.cases("gfx", DEVICES)
@pytest.mark.cases("fields", PACKED)
def test_mxfp4_and_shuffled_weights(compiled: Any, gfx: str, fields: dict[str, Any]) -> None:
    """The first solutions of mxfp4 and shuffled weights compile, with few spills.

    Mxfp4 multiplies as bf16.
    """
    dtype = ARCHITECTURES[gfx].fp8 if fields.get("dtype") == "fp8" else fields.get("dtype", "bf16")
    if not dtype:
        pytest.skip(f"{gfx} has no fp8")
    for m in (1, 16, 64):
        shape = Shape(**fields | {"dtype": dtype}, m=m, n=2112, k=7168, outdtype="bf16")
        for kernel, splits in first(shape, gfx, 2):
            assert kernel.family != "rows"
            build = build_of(kernel, splits, shape, gfx)
            check(compiled(build), build)
            assert shared_bytes(kernel, splits, shape, gfx) <= ARCHITECTURES[gfx].shared_bytes


@pytest.mark.cases("gfx", AMD)
def test_no_lane_is_masked_at_a_product(compiled: Any, gfx: str) -> None:
    """No matrix instruction of AMD runs with masked lanes.

    The branch for large mxfp4 scales could mask some.
    """
    for op, dtype in (("a4w4_blockscale", "fp4x2"), ("a16w4_blockscale", "bf16")):
        shape = Shape(op, 16, 4096, 4096, dtype=dtype, outdtype="bf16", scale="block")
        masked, products = False, []
        for line in compiled(build_of(Tiles(1, 1, 1, 1), 1, shape, gfx)).text.splitlines():
            masked = (masked or "s_and_saveexec" in line) and not re.search(r"s_(or|mov)_b64 exec|s_endpgm", line)
            products += [masked] * ("v_mfma" in line)
        assert len(products) > 8
        assert not any(products), f"{op}: {sum(products)} of {len(products)} products"


def test_mxfp4_is_widened_once(compiled: Any) -> None:
    """On NVIDIA two weight values take one multiplication by their scale.

    Scales above 2 have their own loop.
    """
    shape = Shape("a16w4_blockscale", 8, 4096, 4096, dtype="bf16", outdtype="bf16", scale="block")
    build = build_of(Tiles(1, 1, 4, 1, stages=4), 1, shape, "sm_90")
    code = compiled(build)
    step, part = 2 * 16, 2 * 4  # two rows of 32 values; a part of them
    assert code.text.count("fma.rn.bf16x2") == step + 2 * part
    assert products(code, build) == 8 + 2


def test_fp8_is_converted_once(compiled: Any) -> None:
    """On NVIDIA a step converts each piece once: two instructions per four elements."""
    shape = Shape("a8w8_blockscale", 16, 4096, 4096, dtype="fp8_e4m3fn", outdtype="bf16", scale="block")
    code = compiled(build_of(Tiles(2, 1, 4, 2, stages=4), 1, shape, "sm_90"))
    pieces = 2 * (2 * 2 + 2)  # two steps: rows of two weight tiles, and two tiles of x
    assert code.text.count("cvt.rn.f16x2.e4m3x2") == 8 * pieces
    assert "e4m3.e4m3" not in code.text


@pytest.mark.slow
@pytest.mark.cases("gfx", ["sm_90", "gfx942"])
def test_the_whole_list(compiled: Any, gfx: str) -> None:
    """Every solution compiles, and the estimate of its registers is close."""
    far = []
    for m in (4, 64):
        shape = Shape("a16w16", m, 7168, 8192)
        for kernel, splits in enumerate_kernels(shape, DEVICES[gfx]):
            build = build_of(kernel, splits, shape, gfx)
            code = compiled(build)
            check(code, build)
            estimate = registers(kernel, shape, gfx)
            if not 0.4 <= code.registers / estimate <= 2.5:
                far.append(f"{kernel.name} M={m}: {code.registers} registers, estimated {estimate}")
    assert far == []


@pytest.mark.cases("gfx", ["sm_90", "gfx942"])
def test_a_large_program_of_rows_keeps_its_sums_in_registers(compiled: Any, gfx: str) -> None:
    """The most accumulators of a lane, 8 rows of x by 8 of the weight, do not spill."""
    build = Build(Rows(8, 1, 1, 1), gfx, "bf16", "bf16", "", 8, 8)
    check(compiled(build), build)


#: A shape for each instruction of Hopper.
HOPPERS = {
    dtype: Shape(op, 8, 2112, 7168, dtype=dtype, outdtype="bf16", scale=scale)
    for op, dtype, scale in (
        ("a16w16", "bf16", "none"), ("a16w16", "fp16", "none"), ("a8w8", "int8", "row"), ("a8w8_blockscale", "fp8_e4m3fn", "block"),
    )
}  # fmt: skip


@pytest.mark.cases("m", [8, 16, 32, 64])
@pytest.mark.cases("dtype", HOPPERS)
def test_wgmma_instructions(compiled: Any, dtype: str, m: int) -> None:
    """wgmma has the instruction of its dtype and M, four per tile of a step, and does not spill."""
    build = build_of(Wgmma(1, 1, 2, 2, 4), 1, attrs.evolve(HOPPERS[dtype], m=m), "sm_90")
    code = compiled(build)
    check(code, build)
    assert "--gpu-architecture=sm_90a" in options(build)
    instructions = re.findall(rf"{re.escape(GROUPS)}(\S+)", code.text)
    assert set(instructions) == {f"m64n{m}{GROUP_KINDS[dtype]}"}
    assert len(instructions) == 4 * build.kernel.unroll
    assert (code.spilled, code.stack) == (0, 0)


@pytest.mark.cases("gfx", list(NVIDIA))
@pytest.mark.cases(("name", "group"), [("ct_int4", 128), ("gptq_int4_zp", 32), ("awq_int4", 0), ("nvfp4", 16), ("mxfp4", 32)])
def test_weights_of_4_bits(compiled: Any, gfx: str, name: str, group: int) -> None:
    """The first solutions of each order of codes compile, with mma and few spills."""
    for m, dtype in ((1, "bf16"), (16, "bf16"), (8, "fp16")):
        shape = Shape("a16wn", m, 4096, 14336, dtype=dtype, outdtype=dtype, scale="block", extra={"w_format": name, "w_group": group})
        if unsupported(shape, DEVICES[gfx]):
            assert name.endswith("fp4"), shape
            continue
        for kernel, splits in first(shape, gfx, 2):
            code = compiled(build_of(kernel, splits, shape, gfx))
            assert INSTRUCTION[dtype]["nvidia"] in code.text
            assert max(code.spilled, code.stack) <= 48 and not code.shared, kernel.name
            assert abs(code.registers - registers(kernel, shape, gfx)) <= 60, kernel.name
            assert isinstance(kernel, Packed)


@pytest.mark.cases("gfx", ["sm_90", "sm_100"])
@pytest.mark.cases("kernel", [Rows(2, 4, 1, 2), Rows(1, 1, 2, 2, stages=3), Tiles(1, 2, 2, 2, 4, True), Wgmma(1, 2, 1, 1, 4)])
def test_splits_that_meet_in_a_cluster(compiled: Any, gfx: str, kernel: KernelConfig) -> None:
    """A cluster has a block per split, which read each other's shared memory.

    Other programs use atomics.
    """
    if isinstance(kernel, Wgmma) and ARCHITECTURES[gfx].matrix != "wgmma":
        pytest.skip(f"{gfx} has no wgmma")
    shape = Shape("a16w16", 8, 2112, 7168)
    for cluster, splits in ((True, 2), (True, 5), (False, 5)):
        build = build_of(attrs.evolve(kernel, cluster=cluster), splits, shape, gfx)
        code = compiled(build)
        check(code, build)
        assert re.findall(r"\.reqnctapercluster (\d+), (\d+), (\d+)", code.text) == ([("1", str(splits), "1")] if cluster else [])
        assert ("barrier.cluster.wait.acquire" in code.text) == ("ld.shared::cluster" in code.text) == cluster
        assert ("atom." in code.text) == (not cluster)
