"""Check with nvcc, without a GPU, that sources compile and what CUTLASS gets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import attrs
import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_ck import toolchain
from tunedgemm_ck.build import Target
from tunedgemm_ck.cutlass import FAMILY
from tunedgemm_ck.cutlass.kernels import KERNELS, SM80, SM90, SM100, SM120
from tunedgemm_ck.cutlass.names import CutlassInstance, parse_name
from tunedgemm_ck.native import load_object
from tunedgemm_ck.problem import Problem

SCALED = Problem("a8w8", "sm_90", "fp8_e4m3fn", "fp16", "fp32", "row")
BLOCKS = Problem("a8w8_blockscale", "sm_90", "fp8_e4m3fn", "bf16", scale="block")
#: Kernels -> their matrix instruction in PTX. CUTLASS compiles operands that an architecture lacks
#: into a kernel without one.
INSTRUCTIONS = {
    SM80: "mma.sync.aligned.m16n8k16",
    SM90: "wgmma.mma_async.sync.aligned",
    SM100: "tcgen05.mma.cta_group",
    SM120: "mma.sync.aligned.kind::f8f6f4.m16n8k32",
}
#: The folder of headers in the environment; "" for those of the wheel.
INCLUDE = os.environ.get(toolchain.CUTLASS_INCLUDE, "")
#: Sizes of the call, all different; the last block of scales along K is partial.
M, N, K, BATCHES = 48, 384, 320, 3
#: K of block scales on architectures that need whole blocks.
K_BLOCKS = {"sm_121": 384}
#: Rows of a padded column of M-major scales, of M or one row less.
M_PADDED = 48

_MAIN = """
#include <cstdio>
using namespace tunedgemm;
template <class Vector> auto show(const char* name, const Vector& vector, int) -> decltype(vector.ptr_row, void()) {
  std::printf("%s columns %zu %lld\\n", name, size_t(vector.ptr_row), (long long)cute::get<2>(vector.dRow));
}
template <class Vector> auto show(const char* name, const Vector& vector, long) -> decltype(vector.ptr_col, void()) {
  std::printf("%s rows %zu %lld\\n", name, size_t(vector.ptr_col), (long long)cute::get<2>(vector.dCol));
}
template <class Stride> void spot(const char* name, const Stride& stride, int row, int column, int batch) {
  const auto layout = cute::make_layout(cute::make_shape(1 << 20, 1 << 20, 1 << 10), stride);
  std::printf("%s at %lld\\n", name, (long long)layout(row, column, batch));
}
template <class Mainloop> void scales(const Mainloop& mainloop) {
  if constexpr (problem::scale == Scale::block) {
    std::printf("SFA %zu\\nSFB %zu\\n", size_t(mainloop.ptr_SFA), size_t(mainloop.ptr_SFB));
    std::printf("SFA at %d\\n", int(mainloop.layout_SFA(kSwap ? 300 : 7, 319, 0)));
    std::printf("SFB at %d\\n", int(mainloop.layout_SFB(kSwap ? 7 : 300, 319, 0)));
  }
}
template <class Thread> void epilogue(const Thread& thread) {
  if constexpr (problem::scale == Scale::row) {
    show("bias", thread.op_1, 0);
    show("w_scale", thread.op_0.op_0, 0);
    show("x_scale", thread.op_0.op_1.op_0, 0);
  } else if constexpr (problem::scale == Scale::tensor) {
    std::printf("scalars %zu %zu\\n", size_t(thread.op_0.scalar_ptrs[0]), size_t(thread.op_0.scalar_ptrs[1]));
  }
}
int main() {
  const auto at = [](size_t place) { return reinterpret_cast<void*>(place); };
  const TunedGemmCall call{at(16), at(32), at(48), at(64), at(80), at(96), at(112), SIZES, 0};
  const auto arguments = to_arguments(call, 132);
  const auto& mainloop = arguments.mainloop;
  std::printf("A %zu\\nB %zu\\nD %zu\\n", size_t(mainloop.ptr_A), size_t(mainloop.ptr_B), size_t(arguments.epilogue.ptr_D));
  spot("A", mainloop.dA, 5, 9, 2);
  spot("B", mainloop.dB, 5, 9, 2);
  spot("D", arguments.epilogue.dD, kSwap ? 9 : 5, kSwap ? 5 : 9, 2);  // row 5 and column 9 of the output
  std::printf("sizes %d %d %d %d\\n", int(cute::get<0>(arguments.problem_shape)), int(cute::get<1>(arguments.problem_shape)),
              int(cute::get<2>(arguments.problem_shape)), int(cute::get<3>(arguments.problem_shape)));
  bool fits = Kernel::can_implement(arguments);
  for (int64_t m : {1, 3, 129}) {
    for (int64_t n : {STEP, 9 * STEP}) {
      for (int64_t k : {STEP, 9 * STEP}) {
        TunedGemmCall other = call;
        other.m = m, other.n = n, other.k = k;
        fits = fits && Kernel::can_implement(to_arguments(other, 132));
      }
    }
  }
  std::printf("fits %d\\n", int(fits));
  std::printf("swizzles %d %d %d\\n", swizzle({128 * 32, 128 * 64, 64, 1}, 132), swizzle({128 * 12, 128 * 28, 64, 1}, 132),
              swizzle({128 * 33, 128 * 64, 64, 1}, 132));
  scales(mainloop);
  epilogue(arguments.epilogue.thread);
}
"""


#: The same for a stage of fmoe: offsets that an expert's fill writes into the object's memory.
_GROUPED = """
#include <cstdio>
#include <cstdlib>
using namespace tunedgemm;
template <class Stride> long spot(const Stride& stride, int row, int column) {
  return cute::make_layout(cute::make_shape(1 << 20, 1 << 20, 1), stride)(row, column, 0);
}
int main() {
  TunedGemmMoe call{};
  call.w1 = reinterpret_cast<void*>(1 << 20), call.w2 = reinterpret_cast<void*>(2 << 20);
  call.w1_scale = reinterpret_cast<void*>(3 << 20), call.w2_scale = reinterpret_cast<void*>(4 << 20);
  call.tokens = 6, call.model_dim = 320, call.inter_dim = 192, call.experts = 4, call.topk = 2;
  const moe::Layout layout = moe::layout_of(call, problem::kind, problem::quantised);
  moe::Pieces pieces{layout.end};
  const Memory memory = memory_of(call, pieces);
  char* base = static_cast<char*>(std::aligned_alloc(256, memory.kernel));
  call.workspace = base;
  const Fill fill = fill_of(call, layout, memory);
  fill(2, 5, 3);
  const char *rows = base + (kFirst ? memory.rows : layout.middle), *scales = base + (kFirst ? memory.scales : layout.middle_scale);
  const char *weight = static_cast<const char*>(kFirst ? call.w1 : call.w2);
  const char *of_weight = static_cast<const char*>(kFirst ? call.w1_scale : call.w2_scale);
  std::printf("sizes %d %d %d\\n", cute::get<0>(fill.sizes[2]), cute::get<1>(fill.sizes[2]), cute::get<2>(fill.sizes[2]));
  std::printf("rows %ld\\nweight %ld\\nsums %ld\\n", long((kSwap ? fill.b : fill.a)[2] - rows), long((kSwap ? fill.a : fill.b)[2] - weight),
              long(fill.d[2] - base - memory.sums));
  std::printf("A at %ld\\nB at %ld\\n", spot(fill.of_a[2], 5, 9), spot(fill.of_b[2], 5, 9));
  std::printf("D at %ld\\n", spot(fill.of_d[2], kSwap ? 9 : 5, kSwap ? 5 : 9));  // row 5 and column 9 of the sums
  if constexpr (kBlocks) {
    const auto at = [](const float* place, const char* begin) { return long(reinterpret_cast<const char*>(place) - begin) / 4; };
    std::printf("x_scale %ld\\n", at((kSwap ? fill.scales_b : fill.scales_a)[2], scales));
    std::printf("w_scale %ld\\n", at((kSwap ? fill.scales_a : fill.scales_b)[2], of_weight));
    const int a = fill.scales_of_a[2](kSwap ? 150 : 2, 150, 0), b = fill.scales_of_b[2](kSwap ? 2 : 150, 150, 0);
    std::printf("x_scale at %d\\nw_scale at %d\\n", kSwap ? b : a, kSwap ? a : b);
  }
  const auto arguments = to_arguments(call, fill, 132);
  std::printf("groups %d %d\\n", arguments.problem_shape.groups(), int(arguments.problem_shape.problem_shapes == fill.sizes));
  std::printf("fits %d\\n", int(Kernel::can_implement(arguments)));
}
"""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up nvcc and CUTLASS's headers; skip where one is missing."""
    monkeypatch.setenv(toolchain.CUTLASS_INCLUDE, INCLUDE)
    try:
        toolchain.cuda(BLOCKS)
    except PluginError as error:
        pytest.skip(str(error))


def compiled(source: Path, made: Path, target: Target, *options: str, without: tuple[str, ...] = ()) -> str:
    """Return nvcc's output for a source with the options of a target; fail where it does not
    compile.
    """
    command = toolchain.cuda(target.problem).command(source, made, target.problem.gfx, (*target.flags, *options))
    done = subprocess.run([word for word in command if word not in without], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


def _read_arguments(instance: CutlassInstance, problem: Problem, batches: int, folder: Path) -> dict[str, str]:
    """Return what a program prints that has the instance's source without its launch."""
    target = Target(FAMILY, instance, problem, toolchain.cuda)
    text = target.source
    text = text[: text.index("// ---- what launch.h asks for")] + "}  // namespace tunedgemm\n"
    step = 128 if problem.scale == "block" and problem.gfx in K_BLOCKS else 16
    return _printed(target, text + _MAIN.replace("SIZES", f"{M}, {N}, {K}, {batches}").replace("STEP", str(step)), folder)


def _printed(target: Target, text: str, folder: Path) -> dict[str, str]:
    """Return the lines of a program by their first words, with an @ where it has an "at"."""
    source, made = folder / "arguments.cu", folder / "arguments"
    source.write_text(text, "utf-8")
    compiled(source, made, target, without=("-shared", "-O3"))
    printed = subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in printed.splitlines():
        name, _, rest = line.partition(" at ") if " at " in line else line.partition(" ")
        found[name + "@" * (" at " in line)] = rest
    return found


#: Architecture -> an instance of its kernels for fp8; that of sm_100 is one of two blocks.
KINDS = {
    "sm_90": CutlassInstance(128, 128, 128),
    "sm_100": CutlassInstance(128, 128, 128, (2, 1), "2sm"),
    "sm_121": CutlassInstance(128, 128, 128),
}
both_sides = pytest.mark.parametrize(("gfx", "swap"), [("sm_90", False), ("sm_90", True), ("sm_100", True), ("sm_121", False)])


@pytest.mark.slow
@both_sides
def test_scales_and_bias_run_along_their_side(gfx: str, swap: bool, tmp_path: Path) -> None:
    """Scales and bias have one value per row of x or of the weight, and the right batch stride."""
    problem = Problem("batched_a8w8", gfx, "fp8_e4m3fn", "bf16", "fp32", "row")
    printed = _read_arguments(attrs.evolve(KINDS[gfx], swap=swap), problem, BATCHES, tmp_path)
    assert (int(printed["A"]), int(printed["B"])) == ((32, 16) if swap else (16, 32))
    assert printed["sizes"] == (f"{N} {M} {K} {BATCHES}" if swap else f"{M} {N} {K} {BATCHES}")
    assert int(printed["A@"]) == 5 * K + 9 + 2 * K * (N if swap else M)
    assert int(printed["B@"]) == 5 * K + 9 + 2 * K * (M if swap else N)
    assert (int(printed["D"]), int(printed["D@"])) == (96, 5 * N + 9 + 2 * M * N)
    of_x, of_weight = ("columns", "rows") if swap else ("rows", "columns")
    assert printed["x_scale"] == f"{of_x} 48 {M}"
    assert printed["w_scale"] == f"{of_weight} 64 {N}"
    assert printed["bias"] == f"{of_weight} 80 {N}"
    assert printed["fits"] == "1"


@pytest.mark.slow
@both_sides
def test_block_scales_are_row_major(gfx: str, swap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block scales are row-major, with a short last block of K where the kernels have it."""
    monkeypatch.setitem(globals(), "K", K_BLOCKS.get(gfx, K))
    printed = _read_arguments(attrs.evolve(KINDS[gfx], swap=swap), attrs.evolve(BLOCKS, gfx=gfx), 1, tmp_path)
    assert (int(printed["SFA"]), int(printed["SFB"])) == ((64, 48) if swap else (48, 64))
    of_x, of_weight = 7 * 3 + 2, 300 // 128 * 3 + 2
    assert (int(printed["SFA@"]), int(printed["SFB@"])) == ((of_weight, of_x) if swap else (of_x, of_weight))
    assert printed["fits"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("m", [M, M - 1])
@both_sides
def test_block_scales_of_x_may_be_m_major(gfx: str, swap: bool, m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-major scales of x have whole columns of four rows; those of the weight stay row-major."""
    monkeypatch.setitem(globals(), "M", m)
    monkeypatch.setitem(globals(), "K", K_BLOCKS.get(gfx, K))
    problem = attrs.evolve(BLOCKS, gfx=gfx, m_major=True)
    printed = _read_arguments(attrs.evolve(KINDS[gfx], swap=swap), problem, 1, tmp_path)
    of_x, of_weight = 7 + 2 * M_PADDED, 300 // 128 * 3 + 2
    assert (int(printed["SFA@"]), int(printed["SFB@"])) == ((of_weight, of_x) if swap else (of_x, of_weight))
    assert printed["sizes"] == (f"{N} {m} {K} 1" if swap else f"{m} {N} {K} 1")
    assert printed["fits"] == "1"


@pytest.mark.slow
def test_scales_of_tensors_are_two_values(tmp_path: Path) -> None:
    """The kernel reads both scales of tensors from memory."""
    problem = Problem("a8w8", "sm_90", "fp8_e4m3fn", "fp16", scale="tensor")
    printed = _read_arguments(CutlassInstance(128, 128, 128), problem, 1, tmp_path)
    assert printed["scalars"] == "48 64"
    assert printed["swizzles"] == "8 4 1", "only where tiles divide into whole sides, and no tile is added"


def _stage(stage: int, q_type: str, q_dtype: str) -> Problem:
    """Return a stage of a gated fmoe with bf16 hidden states."""
    act = {"act": "silu", "gated": True} if stage == 1 else {}
    return Problem("fmoe", "sm_90", "bf16", "bf16", stage=stage, q_type=q_type, q_dtype=q_dtype, **act)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "swap"), [(1, False), (1, True), (2, True)])
def test_an_expert_gets_its_rows_weight_and_scales(stage: int, swap: bool, tmp_path: Path) -> None:
    """An expert's product gets its rows, its weight, its sums and their block scales."""
    target = Target(FAMILY, CutlassInstance(128, 128, 128, swap=swap), _stage(stage, "per_1x128", "fp8_e4m3fn"), toolchain.cuda)
    text = target.source
    printed = _printed(target, text[: text.index("// A stage of fmoe, over the product in grouped.h")] + _GROUPED, tmp_path)
    wide, depth = (384, 320) if stage == 1 else (320, 192)
    deep, high = -(-depth // 128), -(-wide // 128)
    assert printed["sizes"] == (f"{wide} 3 {depth}" if swap else f"3 {wide} {depth}")
    assert (int(printed["rows"]), int(printed["weight"]), int(printed["sums"])) == (5 * depth, 2 * wide * depth, 5 * wide * 2)
    assert int(printed["A@"]) == int(printed["B@"]) == 5 * depth + 9
    assert int(printed["D@"]) == 5 * wide + 9
    assert (int(printed["x_scale"]), int(printed["w_scale"])) == (5 * deep, 2 * high * deep)
    assert (int(printed["x_scale@"]), int(printed["w_scale@"])) == (2 * deep + 1, 1 * deep + 1)
    assert printed["groups"] == "4 1"
    assert printed["fits"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("128x128x64_1x1_cooperative_persistent_r1", _stage(1, "No", "bf16")),
        ("64x16x128_1x1_pingpong_persistent_swap_r1", _stage(2, "No", "bf16")),
        ("128x16x128_1x1_cooperative_persistent_swap_r1", _stage(1, "per_Token", "fp8_e4m3fn")),
        ("64x128x128_1x1_pingpong_persistent_r1", _stage(2, "per_Token", "int8")),
        ("128x16x128_1x1_cooperative_persistent_swap_r1", _stage(1, "per_1x128", "fp8_e4m3fn")),
        ("64x16x128_1x1_plain_single_swap_r1", Problem("a16w16", "sm_90", "bf16", "bf16", "fp32")),
        ("128x16x128_1x1_cooperative_streamk_swap_r1", SCALED),
        ("128x128x128_1x1_cooperative_persistent_r1", BLOCKS),
        ("128x128x128_1x1_cooperative_persistent_r1", attrs.evolve(BLOCKS, m_major=True)),
        ("128x16x128_1x1_pingpong_persistent_swap_r1", attrs.evolve(BLOCKS, m_major=True)),
        ("128x128x32_1x1_multistage_single_w2x2_s4_r1", Problem("a16w16", "sm_80", "bf16", "bf16", "bf16")),
        ("128x256x64_2x1_2sm_persistent_r1", Problem("a16w16", "sm_100", "bf16", "bf16", "fp32")),
        ("128x16x256_1x1_1sm_streamk_swap_r1", attrs.evolve(SCALED, gfx="sm_103")),
        ("128x64x128_2x1_2sm_persistent_swap_r1", attrs.evolve(BLOCKS, gfx="sm_100", m_major=True)),
        ("128x128x128_1x1_cooperative_persistent_r1", attrs.evolve(SCALED, gfx="sm_120")),
        ("64x128x128_1x1_pingpong_persistent_r1", attrs.evolve(BLOCKS, gfx="sm_121")),
    ],
)
def test_sources_compile_without_spills(name: str, problem: Problem, tmp_path: Path) -> None:
    """An object has its architecture's matrix instruction and two functions, spills no register,
    and does not serialise wgmma.
    """
    target = Target(FAMILY, parse_name(name, problem.op), problem, toolchain.cuda)
    source, made = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text(target.source, "utf-8")
    said = compiled(source, made, target, "-Xptxas=-v", "-keep", f"-keep-dir={tmp_path}")
    kernels = KERNELS[problem.gfx][problem.q_dtype or problem.dtype]
    (code,) = [each for each in tmp_path.glob("*.ptx") if INSTRUCTIONS[kernels] in each.read_text()]
    assert ("cta_group::2" in code.read_text()) == ("2sm" in name)
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert spills
    assert set(spills) == {"0"}
    assert "C7510" not in said
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(made)], capture_output=True, text=True, check=True).stdout
    kinds = dict(line.split()[:0:-1] for line in symbols.splitlines())
    assert {name for name, kind in kinds.items() if kind == "T"} == {"tunedgemm_launch", "tunedgemm_workspace"}
    assert "u" not in kinds.values(), "one for all objects of a process"
    assert load_object(made.read_bytes()).library, "it loads on a machine without a driver"
