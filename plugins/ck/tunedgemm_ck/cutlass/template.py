"""Render the source of an instance's shared object.

The text is the cache key; only CUTLASS's headers are outside of it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tunedgemm_ck.build import MOE_CALL
from tunedgemm_ck.cutlass.kernels import KERNELS, SM90, SM100, SM120
from tunedgemm_ck.cutlass.names import CutlassInstance
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.stages import render_constants

_SOURCES = Path(__file__).with_name("sources")

_TYPES = {
    "bf16": "cutlass::bfloat16_t",
    "fp16": "cutlass::half_t",
    "fp32": "float",
    "int8": "int8_t",
    "fp8_e4m3fn": "cutlass::float_e4m3_t",
    "": "void",
}
#: Kernels -> main loop without and with block scales, but for the schedule. On sm_90 fp8 sums are
#: promoted to float32 at every fourth instruction, unless an instance is fast: CUTLASS's "fast
#: accumulation" keeps them in the narrower tensor core accumulators.
_MAINLOOPS = {
    SM90: ("KernelTmaWarpSpecialized{}", "KernelTmaWarpSpecialized{}FP8BlockScaledAccum"),
    SM100: ("KernelTmaWarpSpecialized{}Sm100", "KernelTmaWarpSpecializedBlockwise{}Sm100"),
    SM120: ("KernelTmaWarpSpecialized{}", "KernelTmaWarpSpecializedBlockwise{}Sm120"),
}
#: Schedule -> its part of the main loop's tag, and of the epilogue's.
_SCHEDULES = {
    "cooperative": ("Cooperative", "Cooperative"),
    "pingpong": ("Pingpong", ""),
    "plain": ("", ""),
    "1sm": ("1Sm", "1Sm"),
    "2sm": ("2Sm", "2Sm"),
}
#: (main loop, epilogue) for a stage of fmoe, whose operands are arrays of addresses.
_GROUPED = {
    "cooperative": ("KernelPtrArrayTmaWarpSpecializedCooperative", "PtrArrayTmaWarpSpecializedCooperative"),
    "pingpong": ("KernelPtrArrayTmaWarpSpecializedPingpong", "PtrArrayTmaWarpSpecializedPingpong"),
}
#: Columns of tiles for which CUTLASS has one instruction only when compiled with extended shapes.
#: Otherwise it issues several of 32 or 16 columns, which takes twice as long.
_FURTHER = (80, 160, 224)
#: Blackwell needs other texts in ``hopper.h``, and so do M-major scales of x. Other sources keep
#: theirs, the key of objects that users have compiled.
_BLACKWELL = {
    "    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, instance::Tile, instance::Cluster,": (
        "    instance::Arch, cutlass::arch::OpClassTensorOp, instance::MmaTile, instance::Cluster,"
    ),
    "    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Input,": "    instance::Arch, cutlass::arch::OpClassTensorOp, Input,",
    "kAlignInput, Accumulator, instance::Tile,": "kAlignInput, Accumulator, instance::MmaTile,",
    "void schedule(typename Scheduler::Arguments& arguments, int side, int split) {": (
        "void schedule(typename Scheduler::Arguments& arguments, int side, int split) {\n  using Modes = typename Scheduler::Params;"
    ),
    "Scheduler::ReductionMode::": "Modes::ReductionMode::",
    "split > 1 ? Scheduler::DecompositionMode::SplitK : Scheduler::DecompositionMode::StreamK": (
        "split > 1 ? Modes::DecompositionMode::SplitK : Modes::DecompositionMode::StreamK"
    ),
}
#: CUTLASS loads M-major scales by vectors of 16 bytes, on sm_90 by TMA.
_M_MAJOR = {
    "GMMA::Major::K, GMMA::Major::K>;": "kSwap ? GMMA::Major::K : GMMA::Major::MN, kSwap ? GMMA::Major::MN : GMMA::Major::K>;",
    "BlockScales::tile_atom_to_shape_SFA(sizes)": "BlockScales::tile_atom_to_shape_SFA(padded(sizes))",
    "BlockScales::tile_atom_to_shape_SFB(sizes)": "BlockScales::tile_atom_to_shape_SFB(padded(sizes))",
    "template <class Mainloop>\ntypename Mainloop::Arguments mainloop_arguments": """// Sizes with the rows of x in whole columns of scales.
inline Shape<int, int, int, int> padded(Shape<int, int, int, int> sizes) {
  auto& rows = get<kSwap ? 1 : 0>(sizes);
  rows = ceil_div(rows, 4) * 4;
  return sizes;
}

template <class Mainloop>
typename Mainloop::Arguments mainloop_arguments""",
}
_SCHEDULERS = {"persistent": "cutlass::gemm::PersistentScheduler", "streamk": "cutlass::gemm::StreamKScheduler", "single": "void"}


def render(instance: CutlassInstance, problem: Problem) -> str:
    """Return the source: what depends on instance and problem, then the common sources."""
    if problem.stage:
        return _grouped(instance, problem)
    target, includes = (_multistage, _AMPERE) if instance.schedule == "multistage" else (_hopper, _HOPPER)
    headers = "".join(f'#include "{name}"\n' for name in ("call.h", *includes))
    bodies = ("plain.h", "ampere.h") if instance.schedule == "multistage" else ("plain.h", "cluster.h", "hopper.h")
    comment = f"// {instance.name}: {problem}\n"
    blackwell = KERNELS[problem.gfx][problem.dtype] in (SM100, SM120)
    sources = _changed(_sources(*bodies, "launch.h"), blackwell, problem.m_major)
    return comment + headers + _problem(problem) + target(instance, problem) + sources


def flags(instance: CutlassInstance, problem: Problem) -> tuple[str, ...]:
    """Return nvcc's options in addition to those of the toolchain."""
    del problem
    further = ("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",) if instance.tile_n in _FURTHER else ()
    return ("-DNDEBUG", "--expt-relaxed-constexpr", *further)


_HOPPER = (
    "cute/tensor.hpp",
    "cutlass/epilogue/dispatch_policy.hpp",
    "cutlass/gemm/dispatch_policy.hpp",
    "cutlass/gemm/kernel/tile_scheduler.hpp",
    "cutlass/numeric_types.h",
)
_AMPERE = ("cutlass/gemm_coord.h", "cutlass/numeric_types.h")


def _problem(problem: Problem) -> str:
    return f"""
namespace tunedgemm::problem {{
enum class Scale {{ none, tensor, row, block }};
using Input = {_TYPES[problem.dtype]};
using Output = {_TYPES[problem.outdtype]};
using Bias = {_TYPES[problem.bias_dtype]};
constexpr Scale scale = Scale::{problem.scale};
}}  // namespace tunedgemm::problem
"""


def _hopper(instance: CutlassInstance, problem: Problem) -> str:
    kernels, (mainloop, epilogue) = KERNELS[problem.gfx][problem.dtype], _SCHEDULES[instance.schedule]
    mainloop = _MAINLOOPS[kernels][problem.scale == "block"].format(mainloop) + "FP8FastAccum" * instance.fast
    tile = instance.tile_m, instance.tile_n, instance.tile_k
    pair = (tile[0] * (2 if instance.schedule == "2sm" else 1), *tile[1:])
    blackwell = f"using Arch = cutlass::arch::{kernels.arch};\nusing MmaTile = {_shape(*pair)};\n" if kernels != SM90 else ""
    return f"""
namespace tunedgemm::instance {{
{blackwell}using Tile = {_shape(*tile)};
using Cluster = {_shape(*instance.cluster, 1)};
using Mainloop = cutlass::gemm::{mainloop};
using Epilogue = cutlass::epilogue::TmaWarpSpecialized{epilogue};
using Scheduler = {_SCHEDULERS[instance.scheduler]};
constexpr bool swap = {str(instance.swap).lower()};
}}  // namespace tunedgemm::instance

"""


def _grouped(instance: CutlassInstance, problem: Problem) -> str:
    """Return the source of a stage of fmoe."""
    mainloop, epilogue = _GROUPED[instance.schedule]
    mainloop += "FP8BlockScaledAccum" if problem.q_type == "per_1x128" else ""
    headers = "".join(f'#include "{name}"\n' for name in _HOPPER if "tile_scheduler" not in name)
    return f"""// {instance.name}: {problem}
{MOE_CALL}{headers}{render_constants(problem)}
namespace tunedgemm::instance {{
using Tile = {_shape(instance.tile_m, instance.tile_n, instance.tile_k)};
using Cluster = {_shape(*instance.cluster, 1)};
using Mainloop = cutlass::gemm::{mainloop};
using Epilogue = cutlass::epilogue::{epilogue};
constexpr bool swap = {str(instance.swap).lower()};
}}  // namespace tunedgemm::instance

""" + _sources("cluster.h", "grouped.h", "stage.h", "launch.h")


def _multistage(instance: CutlassInstance, problem: Problem) -> str:
    del problem
    m, n, k = instance.tile_m, instance.tile_n, instance.tile_k
    return f"""
namespace tunedgemm::instance {{
using Tile = cutlass::gemm::GemmShape<{m}, {n}, {k}>;
using Warp = cutlass::gemm::GemmShape<{m // instance.warps[0]}, {n // instance.warps[1]}, {k}>;
constexpr int stages = {instance.stages};
}}  // namespace tunedgemm::instance

"""


def _shape(*sizes: int) -> str:
    return f"cute::Shape<{', '.join(f'cute::Int<{size}>' for size in sizes)}>"


@functools.cache
def _changed(sources: str, blackwell: bool, m_major: bool) -> str:
    """Return the sources with the texts of Blackwell and of M-major scales of x, where asked for."""
    for before, after in ((_BLACKWELL if blackwell else {}) | (_M_MAJOR if m_major else {})).items():
        if sources.count(before) != 1:
            raise AssertionError(f"hopper.h must have {before!r} once (got {sources.count(before)})")
        sources = sources.replace(before, after)
    return sources


@functools.cache
def _sources(*names: str) -> str:
    return "".join((_SOURCES / name).read_text("utf-8") + "\n" for name in names)
