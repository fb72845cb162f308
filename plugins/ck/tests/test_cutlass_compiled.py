"""Sources with a compiler: that they compile, and where CUTLASS is told that operands, scales and the output lie, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_ck import toolchain
from tunedgemm_ck.build import Target
from tunedgemm_ck.cutlass import FAMILY
from tunedgemm_ck.cutlass.instance import CutlassInstance, parse
from tunedgemm_ck.native import loaded
from tunedgemm_ck.problem import Problem

SCALED = Problem("a8w8", "sm_90", "fp8_e4m3fn", "fp16", "fp32", "row")
BLOCKS = Problem("a8w8_blockscale", "sm_90", "fp8_e4m3fn", "bf16", scale="block")
#: The folder of the headers that the tests were started with; "" for those of the wheel.
INCLUDE = os.environ.get(toolchain.CUTLASS_INCLUDE, "")
#: Sizes of the call, all different; K has a last block of scales that is not whole.
M, N, K, BATCHES = 48, 384, 320, 3

_MAIN = """
#include <cstdio>
using namespace tunedgemm;
template <class Vector> auto told(const char* name, const Vector& vector, int) -> decltype(vector.ptr_row, void()) {
  std::printf("%s columns %zu %lld\\n", name, size_t(vector.ptr_row), (long long)cute::get<2>(vector.dRow));
}
template <class Vector> auto told(const char* name, const Vector& vector, long) -> decltype(vector.ptr_col, void()) {
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
    told("bias", thread.op_1, 0);
    told("w_scale", thread.op_0.op_0, 0);
    told("x_scale", thread.op_0.op_1.op_0, 0);
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
  std::printf("fits %d\\n", int(Kernel::can_implement(arguments)));
  std::printf("swizzles %d %d %d\\n", swizzle({128 * 32, 128 * 64, 64, 1}, 132), swizzle({128 * 12, 128 * 28, 64, 1}, 132),
              swizzle({128 * 33, 128 * 64, 64, 1}, 132));
  scales(mainloop);
  epilogue(arguments.epilogue.thread);
}
"""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc and CUTLASS's headers; skips where one of them is not there."""
    monkeypatch.setenv(toolchain.CUTLASS_INCLUDE, INCLUDE)
    try:
        toolchain.cuda(BLOCKS)
    except PluginError as error:
        pytest.skip(str(error))


def compiled(source: Path, made: Path, target: Target, *options: str, without: tuple[str, ...] = ()) -> str:
    """What nvcc says to a source with the options of a target; fails where it does not compile."""
    command = toolchain.cuda(target.problem).command(source, made, target.problem.gfx, (*target.flags, *options))
    done = subprocess.run([word for word in command if word not in without], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


def _told(instance: CutlassInstance, problem: Problem, batches: int, folder: Path) -> dict[str, str]:
    """What a program prints that has the source of the instance without its launch, which alone needs code for a GPU."""
    target = Target(FAMILY, instance, problem, toolchain.cuda)
    text = target.source
    text = text[: text.index("// ---- what launch.h asks for")]
    main = _MAIN.replace("SIZES", f"{M}, {N}, {K}, {batches}")
    source, made = folder / "arguments.cu", folder / "arguments"
    source.write_text(text + "}  // namespace tunedgemm\n" + main, "utf-8")
    compiled(source, made, target, without=("-shared", "-O3"))
    printed = subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in printed.splitlines():
        name, _, rest = line.partition(" at ") if " at " in line else line.partition(" ")
        found[name + "@" * (" at " in line)] = rest
    return found


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
def test_scales_and_bias_run_along_their_side(swap: bool, tmp_path: Path) -> None:
    """One value a row of x or of the weight, whichever side of CUTLASS's product that is, and the next product's values behind them."""
    problem = Problem("batched_a8w8", "sm_90", "int8", "bf16", "fp32", "row")
    told = _told(CutlassInstance(128, 128, 128, swap=swap), problem, BATCHES, tmp_path)
    assert (int(told["A"]), int(told["B"])) == ((32, 16) if swap else (16, 32))
    assert told["sizes"] == (f"{N} {M} {K} {BATCHES}" if swap else f"{M} {N} {K} {BATCHES}")
    assert int(told["A@"]) == 5 * K + 9 + 2 * K * (N if swap else M)
    assert int(told["B@"]) == 5 * K + 9 + 2 * K * (M if swap else N)
    assert (int(told["D"]), int(told["D@"])) == (96, 5 * N + 9 + 2 * M * N)
    of_x, of_weight = ("columns", "rows") if swap else ("rows", "columns")
    assert told["x_scale"] == f"{of_x} 48 {M}"
    assert told["w_scale"] == f"{of_weight} 64 {N}"
    assert told["bias"] == f"{of_weight} 80 {N}"
    assert told["fits"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
def test_block_scales_lie_row_by_row(swap: bool, tmp_path: Path) -> None:
    """x_scale [M, ceil(K/128)] and w_scale [ceil(N/128), ceil(K/128)], the last block of K being short."""
    told = _told(CutlassInstance(128, 128, 128, swap=swap), BLOCKS, 1, tmp_path)
    assert (int(told["SFA"]), int(told["SFB"])) == ((64, 48) if swap else (48, 64))
    of_x, of_weight = 7 * 3 + 2, 300 // 128 * 3 + 2
    assert (int(told["SFA@"]), int(told["SFB@"])) == ((of_weight, of_x) if swap else (of_x, of_weight))
    assert told["fits"] == "1"


@pytest.mark.slow
def test_scales_of_tensors_are_two_values(tmp_path: Path) -> None:
    """Both are read by the kernel."""
    problem = Problem("a8w8", "sm_90", "fp8_e4m3fn", "fp16", scale="tensor")
    told = _told(CutlassInstance(128, 128, 128), problem, 1, tmp_path)
    assert told["scalars"] == "48 64"
    assert told["swizzles"] == "8 4 1", "only where tiles divide into whole sides, and no tile is added"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("64x16x128_1x1_plain_single_swap_r1", Problem("a16w16", "sm_90", "bf16", "bf16", "fp32")),
        ("128x16x128_1x1_cooperative_streamk_swap_r1", SCALED),
        ("128x128x128_1x1_cooperative_persistent_r1", BLOCKS),
        ("128x128x32_1x1_multistage_single_w2x2_s4_r1", Problem("a16w16", "sm_80", "bf16", "bf16", "bf16")),
    ],
)
def test_sources_compile_without_spills(name: str, problem: Problem, tmp_path: Path) -> None:
    """The object exports both functions and keeps the rest to itself, the kernel spills no register, and ptxas serialises no wgmma."""
    target = Target(FAMILY, parse(name, problem.op), problem, toolchain.cuda)
    source, made = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text(target.source, "utf-8")
    said = compiled(source, made, target, "-Xptxas=-v")
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert spills
    assert set(spills) == {"0"}
    assert "C7510" not in said
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(made)], capture_output=True, text=True, check=True).stdout
    kinds = dict(line.split()[:0:-1] for line in symbols.splitlines())
    assert {name for name, kind in kinds.items() if kind == "T"} == {"tunedgemm_launch", "tunedgemm_workspace"}
    assert "u" not in kinds.values(), "one for all objects of a process"
    assert loaded(made.read_bytes()).library, "it loads on a machine without a driver"
