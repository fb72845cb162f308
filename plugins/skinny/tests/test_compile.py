"""The kernels compile with the vendors' own compilers, to matrix instructions where they are meant and with next to nothing spilled."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_skinny.build import Build, build_of, options, source
from tunedgemm_skinny.limits import ARCHITECTURES, MAX_ROWS, supports, width_of
from tunedgemm_skinny.names import KernelConfig, Rows, Tiles, Wgmma
from tunedgemm_skinny.resources import PIECE, registers, shared_bytes
from tunedgemm_skinny.space import enumerate_kernels

pytestmark = pytest.mark.sweep

NVIDIA = {"sm_80": Device("sm_80", 108), "sm_90": Device("sm_90", 132), "sm_100": Device("sm_100", 148)}
AMD = {"gfx90a": Device("gfx90a", 104), "gfx942": Device("gfx942", 304)}
DEVICES = NVIDIA | AMD
#: What multiplies tiles: PTX ISA, mma; AMD's ISA guides of CDNA 2 and 3, whose bf16 instructions are spelt differently.
INSTRUCTION = {
    "bf16": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "amd": "v_mfma_f32_16x16x16_?bf16"},
    "fp16": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "amd": "v_mfma_f32_16x16x16_?f16"},
    "int8": {"nvidia": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "amd": "v_mfma_i32_16x16x(32_?|16_?)i8"},
    "fp8_e4m3fn": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "amd": "v_mfma_f32_16x16x32_fp8_fp8"},
    "fp8_e4m3fnuz": {"amd": "v_mfma_f32_16x16x32_fp8_fp8"},
    "fp4x2": {"nvidia": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "amd": "v_mfma_f32_16x16x16_?bf16"},
}
#: What Hopper multiplies large tiles by, after its M and N: PTX ISA, wgmma.mma_async.
GROUPS = "wgmma.mma_async.sync.aligned."
GROUP_KINDS = {
    "bf16": "k16.f32.bf16.bf16",
    "fp16": "k16.f32.f16.f16",
    "int8": "k32.s32.s8.s8",
    "fp8_e4m3fn": "k32.f32.e4m3.e4m3",
}
#: What the family of rows multiplies int8 by.
DOT = {"nvidia": "dp4a.s32.s32", "amd": "v_dot4c?_i32_i8"}
#: Rows of x of the classes of kernels, and K by the width of a load.
ROWS, DEPTHS = (1, 4, 8, 16, 64), {8: 8192, 4: 8196, 2: 8190, 1: 8191}


@pytest.fixture(scope="session")
def compilers() -> ModuleType:
    """The module with the vendors' compilers."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    spec = spec_from_file_location("tunedgemm_skinny_tests_compilers", Path(__file__).with_name("compilers.py"))
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def compiled(compilers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that compiles a build, each once; it skips the test where the compiler is missing."""
    found = {"nvidia": compilers.nvrtc(), "amd": compilers.clang(tmp_path_factory.mktemp("clang"))}
    missing = {"nvidia": "no NVRTC: pip install nvidia-cuda-nvrtc", "amd": f"no {compilers.CLANG}"}
    made: dict[Build, Any] = {}

    def compile_one(build: Build) -> Any:
        compiler = found[DEVICES[build.gfx].kind] or pytest.skip(missing[DEVICES[build.gfx].kind])
        if build not in made:
            try:
                made[build] = compiler.compile(source(build.kernel.family), options(build))
            except compilers.RefusedError as error:
                pytest.fail(f"{build}: {str(error)[:1500]}")
        return made[build]

    return compile_one


def first(shape: Shape, gfx: str, count: int) -> list[tuple[Any, int]]:
    """The first guesses for a shape, and the first of each family."""
    found = list(enumerate_kernels(shape, DEVICES[gfx]))
    kinds = {type(kernel): (kernel, splits) for kernel, splits in reversed(found)}
    return list(dict.fromkeys([*found[:count], *kinds.values()]))


def products(code: Any, build: Build) -> int:
    """How many matrix instructions are in the code of a build."""
    return len(re.findall(INSTRUCTION[build.dtype][DEVICES[build.gfx].kind], code.text))


def check(code: Any, build: Build) -> None:
    """Matrix instructions as the family has them, next to nothing spilled; a program waits for the one before it where launches overlap.

    Compilers spill a few registers where that lets more warps run; narrow loads and many rows of x have more addresses. The bounds are
    bytes a thread of what is listed early: more would show in its time.
    """
    usual = build.vec * width_of(build.dtype) == PIECE and build.rows < MAX_ROWS
    spilled = 48 if usual else 256
    assert (products(code, build) > 0) == (build.kernel.family == "tiles"), f"{build}: {products(code, build)} products"
    assert (GROUPS in code.text) == (build.kernel.family == "wgmma"), f"{build}: products of {GROUPS}"
    assert ("griddepcontrol" in code.text) == ARCHITECTURES[build.gfx].overlaps, f"{build}: griddepcontrol"
    assert code.spilled <= spilled, f"{build} spills {code.spilled}"
    assert code.stack <= spilled, f"{build} has {code.stack} bytes a thread"
    assert code.shared == 0, f"{build} has shared memory that the launch does not count"


@pytest.mark.parametrize("gfx", DEVICES)
@pytest.mark.parametrize("m", ROWS)
def test_first_guesses(compiled: Any, gfx: str, m: int) -> None:
    """The first guesses for a shape compile, keep their values in registers and fit the architecture's registers and shared memory."""
    shape, architecture = Shape("a16w16", m, 7168, 8192), ARCHITECTURES[gfx]
    for kernel, splits in first(shape, gfx, 4):
        build = build_of(kernel, splits, shape, gfx)
        code = compiled(build)
        check(code, build)
        assert code.shared + shared_bytes(kernel, splits, shape, gfx) <= architecture.shared_bytes
        limit = 65536 if gfx in NVIDIA else 4 * 64 * 512  # of a multiprocessor; of a compute unit's four SIMDs, AGPRs counted
        assert code.registers * kernel.warps * architecture.wave <= limit, f"{build} has {code.registers} registers"


@pytest.mark.parametrize("gfx", ["sm_80", "sm_90", "gfx90a", "gfx942"])
@pytest.mark.parametrize("dtypes", [("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp16"), ("fp16", "bf16", "fp32"), ("bf16", "fp16", "")])
def test_dtypes(compiled: Any, gfx: str, dtypes: tuple[str, str, str]) -> None:
    """Each dtype of input, output and bias compiles in both families, and tiles use the instruction of the input's dtype."""
    dtype, outdtype, bias = dtypes
    for m in (4, 16):
        shape = Shape("a16w16", m, 4096, 4096, dtype=dtype, outdtype=outdtype, **({"epilogue": "bias", "bias_dtype": bias} if bias else {}))
        for kernel, splits in first(shape, gfx, 1):
            build = build_of(kernel, splits, shape, gfx)
            assert (build.dtype, build.outdtype, build.bias_dtype) == dtypes
            check(compiled(build), build)


@pytest.mark.parametrize("gfx", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("vec", DEPTHS)
def test_widths_of_loads(compiled: Any, gfx: str, vec: int) -> None:
    """A K that 8 does not divide compiles to narrower loads; on NVIDIA, which faults on others, none is wider than K allows."""
    wide = {8: r"ld\.global\.nc\S*v4\.u32|cp\.async\S* \S+ \S+ 16,", 4: r"ld\.global\.nc\S*v2\.u32|cp\.async\S* \S+ \S+ 8,"}
    for m in (2, 32):
        shape = Shape("a16w16", m, 4096, DEPTHS[vec])
        for kernel, splits in first(shape, gfx, 1):
            build = build_of(kernel, splits, shape, gfx)
            assert build.vec == vec
            check(code := compiled(build), build)
            found = [width for width, pattern in wide.items() if re.search(pattern, code.text)]
            assert gfx in AMD or found == [width for width in wide if width == vec], f"{build}: loads of {found}"


#: Of the ops with 8-bit operands, and a batch; "fp8" is the architecture's own kind.
SCALED = [
    {"op": "a8w8", "dtype": "int8", "scale": "row"}, {"op": "a8w8", "dtype": "fp8", "scale": "tensor"},
    {"op": "a8w8_blockscale", "dtype": "fp8", "scale": "block"},
    {"op": "batched_a8w8", "dtype": "fp8", "scale": "row", "extra": {"B": 4}}, {"op": "batched_bf16", "dtype": "bf16", "extra": {"B": 4}},
]  # fmt: skip


@pytest.mark.parametrize("gfx", DEVICES)
@pytest.mark.parametrize("fields", SCALED, ids=lambda fields: f"{fields['op']}-{fields['dtype']}")
@pytest.mark.parametrize("k", [7168, 7170])
def test_other_ops(compiled: Any, gfx: str, fields: dict[str, Any], k: int) -> None:
    """The first guesses of each op compile for few and many rows, with whole and with narrow loads; fp8 where the architecture has it."""
    dtype = ARCHITECTURES[gfx].fp8 if fields["dtype"] == "fp8" else fields["dtype"]
    if not dtype:
        pytest.skip(f"{gfx} has no fp8")
    for m in (1, 64) if k % PIECE else (1, 16, 64):
        shape = Shape(**fields | {"dtype": dtype}, m=m, n=2112, k=k, outdtype="bf16")
        assert supports(shape, DEVICES[gfx]) is True
        for kernel, splits in first(shape, gfx, 2):
            build = build_of(kernel, splits, shape, gfx)
            code = compiled(build)
            check(code, build)
            assert shared_bytes(kernel, splits, shape, gfx) <= ARCHITECTURES[gfx].shared_bytes
            assert (dtype == "int8" and kernel.family == "rows") == bool(re.search(DOT[DEVICES[gfx].kind], code.text))


#: Of mxfp4, plain and shuffled, and shuffled weights of other dtypes.
PACKED = [
    {"op": "a4w4_blockscale", "dtype": "fp4x2", "scale": "block"}, {"op": "a16w4_blockscale", "dtype": "bf16", "scale": "block"},
    {"op": "a4w4_blockscale", "dtype": "fp4x2", "scale": "block", "layout": "aiter16x16"},
    {"op": "a16w4_blockscale", "dtype": "bf16", "scale": "block", "layout": "aiter16x16"}, {"op": "a16w16", "layout": "aiter16x16"},
    {"op": "a8w8_bpreshuffle", "dtype": "int8", "scale": "row", "layout": "aiter32x16"},
    {"op": "a8w8_blockscale_bpreshuffle", "dtype": "fp8", "scale": "block", "layout": "aiter16x16"},
]  # fmt: skip


@pytest.mark.parametrize("gfx", DEVICES)
@pytest.mark.parametrize("fields", PACKED, ids=lambda fields: f"{fields['op']}-{fields.get('layout', 'row')}")
def test_mxfp4_and_shuffled_weights(compiled: Any, gfx: str, fields: dict[str, Any]) -> None:
    """Their first guesses compile for few and many rows, next to nothing spilled; mxfp4 is multiplied as bf16."""
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


@pytest.mark.parametrize("gfx", AMD)
def test_no_lane_is_masked_at_a_product(compiled: Any, gfx: str) -> None:
    """AMD's matrix instructions work for all lanes: none lies where a branch has masked some, as that to large scales of mxfp4 might."""
    for op, dtype in (("a4w4_blockscale", "fp4x2"), ("a16w4_blockscale", "bf16")):
        shape = Shape(op, 16, 4096, 4096, dtype=dtype, outdtype="bf16", scale="block")
        masked, products = False, []
        for line in compiled(build_of(Tiles(1, 1, 1, 1), 1, shape, gfx)).text.splitlines():
            masked = (masked or "s_and_saveexec" in line) and not re.search(r"s_(or|mov)_b64 exec|s_endpgm", line)
            products += [masked] * ("v_mfma" in line)
        assert len(products) > 8
        assert not any(products), f"{op}: {sum(products)} of {len(products)} products"


def test_mxfp4_is_widened_once(compiled: Any) -> None:
    """On NVIDIA two values of the weight take one multiplication by their scale; one for scales above 2 is in a loop apart."""
    shape = Shape("a16w4_blockscale", 8, 4096, 4096, dtype="bf16", outdtype="bf16", scale="block")
    build = build_of(Tiles(1, 1, 4, 1, stages=4), 1, shape, "sm_90")
    code = compiled(build)
    step, part = 2 * 16, 2 * 4  # of two rows 32 values each; of a part of them
    assert code.text.count("fma.rn.bf16x2") == step + 2 * part
    assert products(code, build) == 8 + 2


def test_fp8_is_converted_once(compiled: Any) -> None:
    """On NVIDIA a step converts each piece of the weight and of x once, whatever the tiles: two instructions for each four elements."""
    shape = Shape("a8w8_blockscale", 16, 4096, 4096, dtype="fp8_e4m3fn", outdtype="bf16", scale="block")
    code = compiled(build_of(Tiles(2, 1, 4, 2, stages=4), 1, shape, "sm_90"))
    pieces = 2 * (2 * 2 + 2)  # of two steps: rows of two tiles of the weight, and two tiles of x
    assert code.text.count("cvt.rn.f16x2.e4m3x2") == 8 * pieces
    assert "e4m3.e4m3" not in code.text


@pytest.mark.slow
@pytest.mark.parametrize("gfx", ["sm_90", "gfx942"])
def test_the_whole_list(compiled: Any, gfx: str) -> None:
    """Every enumerated kernel for few and for many rows compiles, and the estimate of its registers is not far off."""
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


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942"])
def test_a_large_program_of_rows_keeps_its_sums_in_registers(compiled: Any, gfx: str) -> None:
    """The most sums that a lane can have, 8 rows of x by 8 of the weight, need no memory."""
    build = Build(Rows(8, 1, 1, 1), gfx, "bf16", "bf16", "", 8, 8)
    check(compiled(build), build)


#: A shape of each way to multiply on Hopper.
HOPPERS = {
    dtype: Shape(op, 8, 2112, 7168, dtype=dtype, outdtype="bf16", scale=scale)
    for op, dtype, scale in (
        ("a16w16", "bf16", "none"), ("a16w16", "fp16", "none"), ("a8w8", "int8", "row"), ("a8w8_blockscale", "fp8_e4m3fn", "block"),
    )
}  # fmt: skip


@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", HOPPERS)
def test_groups_of_warps_multiply_in_registers(compiled: Any, dtype: str, m: int) -> None:
    """wgmma has Hopper's instruction of the dtype and of so many rows of x, four for each tile of a step, and spills nothing."""
    build = build_of(Wgmma(1, 1, 2, 2, 4), 1, attrs.evolve(HOPPERS[dtype], m=m), "sm_90")
    code = compiled(build)
    check(code, build)
    assert "--gpu-architecture=sm_90a" in options(build)
    found = re.findall(rf"{re.escape(GROUPS)}(\S+)", code.text)
    assert set(found) == {f"m64n{m}{GROUP_KINDS[dtype]}"}
    assert len(found) == 4 * build.kernel.unroll
    assert (code.spilled, code.stack) == (0, 0)


@pytest.mark.parametrize("gfx", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", [Rows(2, 4, 1, 2), Rows(1, 1, 2, 2, stages=3), Tiles(1, 2, 2, 2, 4, True), Wgmma(1, 2, 1, 1, 4)])
def test_splits_that_meet_in_a_cluster(compiled: Any, gfx: str, kernel: KernelConfig) -> None:
    """A cluster has as many blocks as K has parts, which read each other's shared memory; without one there is none of that."""
    if isinstance(kernel, Wgmma) and not ARCHITECTURES[gfx].wgmma:
        pytest.skip(f"{gfx} has no wgmma")
    shape = Shape("a16w16", 8, 2112, 7168)
    for cluster, splits in ((True, 2), (True, 5), (False, 5)):
        build = build_of(attrs.evolve(kernel, cluster=cluster), splits, shape, gfx)
        code = compiled(build)
        check(code, build)
        assert re.findall(r"\.reqnctapercluster (\d+), (\d+), (\d+)", code.text) == ([("1", str(splits), "1")] if cluster else [])
        assert ("barrier.cluster.wait.acquire" in code.text) == ("ld.shared::cluster" in code.text) == cluster
        assert ("atom." in code.text) == (not cluster)


@pytest.mark.parametrize("gfx", NVIDIA)
@pytest.mark.parametrize(
    "kernel", [Rows(2, 4, 1, 2, True), Rows(1, 1, 2, 2, stages=3), Tiles(1, 2, 2, 2, 0, True), Tiles(1, 2, 2, 2, 4), Wgmma(1, 1, 1, 2)]
)
def test_what_is_touched_before_the_wait(compiled: Any, gfx: str, kernel: KernelConfig) -> None:
    """From sm_90 on a program prefetches, waits once for the program before it, lets the next begin, and only then loads and stores."""
    if isinstance(kernel, Wgmma) and not ARCHITECTURES[gfx].wgmma:
        pytest.skip(f"{gfx} has no wgmma")
    build = build_of(kernel, 3, Shape("a16w16", 8, 2112, 7168, epilogue="bias", bias_dtype="bf16"), gfx)
    found = re.findall(r"griddepcontrol\.\w+|prefetch\.\S+|(?:ld|st|atom|cp\.async)\.\S*global", compiled(build).text)
    before = found.index("griddepcontrol.wait") if ARCHITECTURES[gfx].overlaps else 0
    assert set(found[:before]) == ({"prefetch.global.L2"} if before else set())
    controls = [word for word in found if word.startswith(("griddepcontrol", "prefetch"))][before:]
    assert controls == (["griddepcontrol.wait", "griddepcontrol.launch_dependents"] if before else [])
    assert len(found) > before + 4
