"""Render the sources of CK Tile's instances: one shared object each.

A source includes CK Tile's headers and exports the functions of ``call.h``.
"""

from __future__ import annotations

from tunedgemm_ck.problem import Problem
from tunedgemm_ck.tile.names import TileInstance
from tunedgemm_ck.xdl.template import INLINED, has_ocp

_TYPES = {"bf16": "ck_tile::bf16_t", "fp16": "ck_tile::half_t"}

#: Elements of K, and rows of the weight, that share a scale.
_BLOCK = 128

_QUANT = "ck_tile/ops/gemm_quant/pipeline/gemm_abquant_pipeline_ag_bg_cr_"

_HEAD = """\
// {name}
// {problem}
#include "call.h"

#include <cstdint>
#include <hip/hip_runtime.h>
#include <tuple>

#if !__has_include("{header}")
#error "CK Tile's {header} is missing: Composable Kernel of {since} or later has it"
#endif
#include "ck_tile/core.hpp"
#include "ck_tile/host/kernel_launch.hpp"
#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/gemm.hpp"
#include "ck_tile/ops/{family}.hpp"

namespace {{

using Row = ck_tile::tensor_layout::gemm::RowMajor;
using Col = ck_tile::tensor_layout::gemm::ColumnMajor;
using In = ck_tile::fp8_t;
using Out = {outdtype};
using Same = ck_tile::element_wise::PassThrough;
// The argument after the transposition of sums: older versions expect how sums are stored, newer
// ones the number of wave groups.
struct Once {{
  constexpr operator ck_tile::memory_operation_enum() const {{ return ck_tile::memory_operation_enum::set; }}
  constexpr operator ck_tile::index_t() const {{ return 1; }}
}};
constexpr auto scheduler = ck_tile::GemmPipelineScheduler::{scheduler};
using Tile = ck_tile::TileGemmShape<ck_tile::sequence<{tile}>, ck_tile::sequence<{warps}>, ck_tile::sequence<{warp_tile}>>;
"""

#: CK Tile throws where a launch fails.
_CAUGHT = """\
} catch (...) {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? static_cast<int>(hipErrorUnknown) : static_cast<int>(error);
}
"""

_FLATMM = """
using Partitioner = ck_tile::GemmSpatiallyLocalTilePartitioner<Tile, {of.group_num}, {of.m01}>;
using Traits = ck_tile::TileGemmTraits<{pad}, Row, Col, Row, {of.wave_groups}>;
using Loop = ck_tile::BaseFlatmmPipelineAGmemBGmemCRegV1<ck_tile::GemmPipelineProblem<In, In, float, Tile, Traits>>;
using Universal = ck_tile::TileGemmUniversalTraits<
    {pad}, {double_buffer}, Row, Col, Row, {transpose_c}, {sparse}, {persistent}, {of.wave_groups}, true>;
using Epilogue = ck_tile::CShuffleEpilogue<ck_tile::CShuffleEpilogueProblem<
    In, In, ck_tile::tuple<>, float, Out, ck_tile::tuple<>, Row, Same, Partitioner::MPerBlock, Partitioner::NPerBlock,
    {of.warps[0]}, {of.warps[1]}, {warp_tile}, {transpose_c}, Once{{}}>>;
using Scale = ck_tile::FlatmmScalePointer<1>;  // one a row

// Calls act with the kernel and its arguments for these sizes: the number of steps along K is a
// template parameter.
template <typename Act>
int with_kernel(const TunedGemmCall& call, const Act& act) {{
  using Size = ck_tile::index_t;
  const auto m = static_cast<Size>(call.m), n = static_cast<Size>(call.n), k = static_cast<Size>(call.k);
  ck_tile::ScaleFlatmmHostArgs<Scale, Scale> args(
      call.x, call.weight, {{}}, call.out, 1, m, n, k, k, k, {{}}, n, Scale(static_cast<const float*>(call.x_scale), m),
      Scale(static_cast<const float*>(call.w_scale), n));
  const auto steps = Partitioner::GetLoopNum((k + {of.tile[2]} - 1) / {of.tile[2]} * {of.tile[2]});
  int result = TUNED_GEMM_UNSUPPORTED;
  const auto run = [&](const auto hot, const auto tail) {{
    using Problem = ck_tile::FlatmmPipelineProblem<
        In, In, float, Tile, Universal, scheduler, ck_tile::remove_cvref_t<decltype(hot)>::value,
        ck_tile::remove_cvref_t<decltype(tail)>::value>;
    using Kernel = ck_tile::FlatmmKernel<Partitioner, ck_tile::FlatmmPipelineAGmemBGmemCRegV1<Problem>, Epilogue>;
    const auto arguments = Kernel::MakeKernelArgs(args);
    if (Kernel::IsSupportedArgument(arguments)) result = act(Kernel{{}}, arguments, Kernel::GridSize(arguments));
    return 0.f;
  }};
  Loop::TailHandler(run, Loop::BlockHasHotloop(steps), Loop::GetBlockLoopTailNum(steps));
  return result;
}}

}}  // namespace

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmCall* call) {{
  return with_kernel(*call, [](auto, const auto&, const dim3&) {{ return 0; }});
}}

TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmCall* call, void* stream) try {{
  return with_kernel(*call, [&](auto kernel, const auto& arguments, const dim3& grid) {{
    const ck_tile::stream_config config{{static_cast<hipStream_t>(stream)}};
    ck_tile::launch_kernel(config, ck_tile::make_kernel<{of.blocks}>(kernel, grid, decltype(kernel)::BlockSize(), 0, arguments));
    return 0;
  }});
"""

_BLOCKSCALE = """
constexpr bool eight_waves = {eight_waves};
// The call has the scales of x {given} and the kernel reads them {wanted}.
constexpr bool transposed = {transposed};
using ScaleLayout = {scale_layout};
using Partitioner = ck_tile::GemmTile1DPartitioner<Tile>;
using Epilogue = ck_tile::CShuffleEpilogue<ck_tile::CShuffleEpilogueProblem<
    In, In, ck_tile::tuple<>, float, Out, ck_tile::tuple<>, Row, Same, Partitioner::MPerBlock, Partitioner::NPerBlock,
    {of.warps[0]}, {warps_nk}, {warp_tile}, {transpose_c}, Once{{}}>>;

__global__ void transpose(const float* from, float* to, int rows, int columns) {{
  const int64_t all = int64_t{{rows}} * columns;
  for (int64_t i = int64_t{{blockIdx.x}} * blockDim.x + threadIdx.x; i < all; i += int64_t{{gridDim.x}} * blockDim.x)
    to[(i % columns) * rows + i / columns] = from[i];
}}

ck_tile::QuantGemmHostArgs arguments_of(const TunedGemmCall& call) {{
  const auto groups = [](int64_t size) {{ return static_cast<ck_tile::index_t>((size + {block} - 1) / {block}); }};
  ck_tile::QuantGemmHostArgs args;
  args.a_ptr = call.x;
  args.b_ptr = call.weight;
  args.aq_ptr = transposed ? call.workspace : call.x_scale;
  args.bq_ptr = call.w_scale;
  args.c_ptr = call.out;
  args.k_batch = 1 << call.split;
  args.M = static_cast<ck_tile::index_t>(call.m);
  args.N = static_cast<ck_tile::index_t>(call.n);
  args.K = static_cast<ck_tile::index_t>(call.k);
  args.QK_A = args.QK_B = groups(call.k);
  args.stride_A = args.stride_B = args.K;
  args.stride_C = args.N;
  args.stride_AQ = std::is_same_v<ScaleLayout, Row> ? args.QK_A : args.M;
  args.stride_BQ = args.QK_B;
  return args;
}}

template <bool PadN, bool PadK, typename Act>
int with_kernel(const TunedGemmCall& call, const Act& act) {{
  constexpr auto mode = ck_tile::QuantType::ABQuantGrouped;
  using Traits = ck_tile::TileGemmQuantTraits<
      true, PadN, PadK, false, false, {shuffled}, Row, Col, Row, mode, ScaleLayout, Col, {transpose_c}, {shuffled}>;
  using Base = ck_tile::GemmPipelineProblemBase<In, In, float, Tile, Traits, In>;
  using Loop = std::conditional_t<
      eight_waves, ck_tile::BaseGemmPipelineAgBgCrCompV3<Base>, ck_tile::BaseWeightPreshufflePipelineAGmemBGmemCRegV2<Base>>;
  const auto args = arguments_of(call);
  const auto steps = Partitioner::GetLoopNum((args.K + {of.tile[2]} - 1) / {of.tile[2]} * {of.tile[2]});
  int result = TUNED_GEMM_UNSUPPORTED;
  const auto run = [&](const auto hot, const auto tail) {{
    using Problem = ck_tile::GemmABQuantPipelineProblem<
        In, float, In, float, float, Tile, Traits, ck_tile::QuantGroupShape<ck_tile::sequence<1, 1, {block}>>,
        ck_tile::QuantGroupShape<ck_tile::sequence<1, {block}, {block}>>, {transpose_c}, In, scheduler,
        ck_tile::remove_cvref_t<decltype(hot)>::value, ck_tile::remove_cvref_t<decltype(tail)>::value>;
    using Kernel = ck_tile::QuantGemmKernel<Partitioner, ck_tile::{pipeline}<Problem>, Epilogue, mode>;
    const auto arguments = Kernel::MakeKernelArgs(args);
    if (Kernel::IsSupportedArgument(arguments)) result = act(Kernel{{}}, arguments, Kernel::GridSize(args.M, args.N, args.k_batch));
  }};
  Loop::TailHandler(run, Loop::BlockHasHotloop(steps), Loop::GetBlockLoopTailNum(steps));
  return result;
}}

template <typename Act>
int padded(const TunedGemmCall& call, const Act& act) {{
  if (call.n % {block}) return call.k % {block} ? with_kernel<true, true>(call, act) : with_kernel<true, false>(call, act);
  return call.k % {block} ? with_kernel<false, true>(call, act) : with_kernel<false, false>(call, act);
}}

}}  // namespace

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmCall* call) {{
  const int known = padded(*call, [](auto, const auto&, const dim3&) {{ return 0; }});
  return known || !transposed ? known : static_cast<int64_t>(sizeof(float)) * call->m * ((call->k + {block} - 1) / {block});
}}

TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmCall* call, void* stream) try {{
  return padded(*call, [&](auto kernel, const auto& arguments, const dim3& grid) -> int {{
    const auto queue = static_cast<hipStream_t>(stream);
    if constexpr (transposed) {{
      const int groups = static_cast<int>((call->k + {block} - 1) / {block}), rows = static_cast<int>(call->m);
      transpose<<<256, 256, 0, queue>>>(
          static_cast<const float*>(call->x_scale), static_cast<float*>(call->workspace), {transpose_sizes});
    }}
    if (call->split > 0) {{  // the parts of K add to the output
      const hipError_t error = hipMemsetAsync(call->out, 0, sizeof(Out) * call->m * call->n, queue);
      if (error != hipSuccess) return static_cast<int>(error);
    }}
    ck_tile::launch_kernel(
        ck_tile::stream_config{{queue}},
        ck_tile::make_kernel<{of.blocks}, ck_tile::kernel_attr<eight_waves>>(kernel, grid, decltype(kernel)::BlockSize(), 0, arguments));
    return 0;
  }});
"""


def render(instance: TileInstance, problem: Problem) -> str:
    """Return the source of an instance's shared object for a problem, the same in every process."""
    scaled = problem.op != "a8w8_bpreshuffle"
    header = "ck_tile/ops/flatmm/kernel/flatmm_kernel.hpp"
    if scaled:
        header = _QUANT + ("eight_waves.hpp" if instance.eight_waves else "v3.hpp")
    head = _HEAD.format(
        name=instance.name,
        problem=f"{problem.op} {problem.dtype} -> {problem.outdtype}, {problem.layout}, {problem.gfx}",
        header=header,
        since="2026" if scaled else "September 2025",
        family="gemm_quant" if scaled else "flatmm",
        outdtype=_TYPES[problem.outdtype],
        scheduler=instance.scheduler.capitalize(),
        tile=_numbers(instance.tile),
        warps=_numbers(instance.warps),
        warp_tile=_numbers(instance.warp_tile),
    )
    return head + (_blockscale(instance, problem) if scaled else _flatmm(instance)) + _CAUGHT


def flags(instance: TileInstance, problem: Problem) -> tuple[str, ...]:
    """Return hipcc's flags for this library: the kind of fp8, and bfloat16's rounding to nearest."""
    del instance
    return (f"-DCK_TILE_USE_OCP_FP8={has_ocp(problem.gfx)}", "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0", *INLINED)


def _numbers(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _word(switch: bool) -> str:
    return str(bool(switch)).lower()


def _flatmm(of: TileInstance) -> str:
    """Return the body of a product with a shuffled weight and scales per row."""
    return _FLATMM.format(
        of=of,
        pad=", ".join(map(_word, of.pad)),
        double_buffer=_word(of.double_buffer),
        transpose_c=_word(of.transpose_c),
        sparse=_word(of.sparse),
        persistent=_word(of.persistent),
        warp_tile=_numbers(of.warp_tile),
    )


def _blockscale(of: TileInstance, problem: Problem) -> str:
    """Return the body of a product with block scales."""
    shuffled = problem.op == "a8w8_blockscale_bpreshuffle"
    by_columns = of.eight_waves and not of.row_major_scales
    pipeline = "ABQuantGemmPipelineAgBgCrCompV3"
    if of.eight_waves:
        pipeline = "ABQuantGemmPipelineAgBgCrEightWaves"
    elif shuffled:
        pipeline = "WPABQuantBPipelineAgBgCrV2"
    return _BLOCKSCALE.format(
        of=of,
        eight_waves=_word(of.eight_waves),
        given="column by column" if shuffled else "row by row",
        wanted="column by column" if by_columns else "row by row",
        transposed=_word(shuffled != by_columns),
        transpose_sizes="groups, rows" if shuffled else "rows, groups",
        scale_layout="Col" if by_columns else "Row",
        warps_nk=of.warps[1] * of.warps[2],
        warp_tile=_numbers(of.warp_tile),
        transpose_c=_word(of.transpose_c),
        shuffled=_word(shuffled),
        pipeline=pipeline,
        block=_BLOCK,
    )
