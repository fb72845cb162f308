// The kernel of an instance on sm_90, by CUTLASS's collectives. The text before this one defines
//   problem::Input, Output, Bias (void: none), scale
//   instance::Tile, Cluster, Mainloop, Epilogue, Scheduler (tags of CUTLASS), swap
// Both operands have K contiguous. With swapped operands the product is out^T = weight x^T:
// CUTLASS's M is N here, its N is M, and its output is column-major, which is the same memory.
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace tunedgemm {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;
using problem::Input;
using problem::Output;
using problem::Scale;

constexpr bool kSwap = instance::swap;
constexpr bool kStreamK = std::is_same_v<instance::Scheduler, cutlass::gemm::StreamKScheduler>;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

using Accumulator = std::conditional_t<std::is_same_v<Input, int8_t>, int32_t, float>;

// ---- epilogue: (accumulator * x_scale) * w_scale + bias, in float32 -------------------------------------------------------------

// A vector with one value per row (M) or column (N) of CUTLASS's product; its last stride is that
// of a batch. A batch's rows need not begin at multiples of 16 bytes: values per row are loaded
// singly (alignment 1).
template <class Element, bool rows>
using Vector = std::conditional_t<
    rows, fusion::Sm90ColBroadcast<0, instance::Tile, Element, float, Stride<_1, _0, int64_t>, 1>,
    fusion::Sm90RowBroadcast<0, instance::Tile, Element, float, Stride<_0, _1, int64_t>>>;
template <class Element>
using OfX = Vector<Element, !kSwap>;  // one value per row of x
template <class Element>
using OfWeight = Vector<Element, kSwap>;  // one value per row of the weight

template <template <class> class Function, class Result>
using Compute = fusion::Sm90Compute<Function, Result, float, kRound>;
using TensorScale = fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, _0>, 2>;  // the product of two

template <class Result>
using Unscaled = fusion::Sm90EVT<Compute<cutlass::epilogue::thread::Identity, Result>, fusion::Sm90AccFetch>;
template <class Result>
using ByTensor = fusion::Sm90EVT<Compute<cutlass::multiplies, Result>, TensorScale, fusion::Sm90AccFetch>;
template <class Result>
using ByRow = fusion::Sm90EVT<Compute<cutlass::multiplies, Result>, OfWeight<float>,
                              fusion::Sm90EVT<Compute<cutlass::multiplies, float>, OfX<float>, fusion::Sm90AccFetch>>;
template <class Result>
using Product = std::conditional_t<problem::scale == Scale::row, ByRow<Result>,
                                   std::conditional_t<problem::scale == Scale::tensor, ByTensor<Result>, Unscaled<Result>>>;

template <class Bias>
struct Fused {
  using Type = fusion::Sm90EVT<Compute<cutlass::plus, Output>, Product<float>, OfWeight<Bias>>;
};
template <>
struct Fused<void> {
  using Type = Product<Output>;
};
using Fusion = typename Fused<problem::Bias>::Type;

// ---- kernel ---------------------------------------------------------------------------------------------------------------------

constexpr int kAlignInput = 16 / sizeof(Input);
constexpr int kAlignOutput = 16 / sizeof(Output);
using LayoutOutput = std::conditional_t<kSwap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

// Block scales have K contiguous: one per row and 128 of K for x, one per 128 rows and 128 of K for
// the weight.
constexpr int kBlock = 128;
using BlockScales =
    cutlass::detail::Sm90BlockwiseScaleConfig<kSwap ? kBlock : 1, kSwap ? 1 : kBlock, kBlock, GMMA::Major::K, GMMA::Major::K>;
template <class Layout, class Scales>
using WithScales = std::conditional_t<problem::scale == Scale::block, cute::tuple<Layout, Scales>, Layout>;

using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, instance::Tile, instance::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, float, void, LayoutOutput, kAlignOutput, Output, LayoutOutput,
    kAlignOutput, instance::Epilogue, Fusion>::CollectiveOp;
using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Input,
    WithScales<cutlass::layout::RowMajor, decltype(BlockScales::deduce_layoutSFA())>, kAlignInput, Input,
    WithScales<cutlass::layout::ColumnMajor, decltype(BlockScales::deduce_layoutSFB())>, kAlignInput, Accumulator, instance::Tile,
    instance::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
    instance::Mainloop>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, instance::Scheduler>;
using Arguments = typename Kernel::Arguments;

// ---- arguments ------------------------------------------------------------------------------------------------------------------

template <class Element>
typename OfX<Element>::Arguments of_x(const void* values, int64_t batch) {
  return {static_cast<const Element*>(values), Element(0), {{}, {}, batch}};
}
template <class Element>
typename OfWeight<Element>::Arguments of_weight(const void* values, int64_t batch) {
  return {static_cast<const Element*>(values), Element(0), {{}, {}, batch}};
}

template <class Result>
typename Product<Result>::Arguments product_arguments(const TunedGemmCall& call) {
  if constexpr (problem::scale == Scale::row) {
    return {of_weight<float>(call.w_scale, batch_stride(call, call.n)),
            {of_x<float>(call.x_scale, batch_stride(call, call.m)), {}, {}},
            {}};
  } else if constexpr (problem::scale == Scale::tensor) {
    typename TensorScale::Arguments both{};
    both.scalar_ptrs[0] = static_cast<const float*>(call.x_scale);
    both.scalar_ptrs[1] = static_cast<const float*>(call.w_scale);
    return {both, {}, {}};
  } else {
    return {{}, {}};
  }
}

template <class Arguments, class Bias>
Arguments fusion_arguments(const TunedGemmCall& call) {
  if constexpr (std::is_void_v<Bias>) {
    return product_arguments<Output>(call);
  } else {
    return {product_arguments<float>(call), of_weight<Bias>(call.bias, batch_stride(call, call.n)), {}};
  }
}

template <class Mainloop>
typename Mainloop::Arguments mainloop_arguments(const TunedGemmCall& call, Shape<int, int, int, int> sizes) {
  const auto stride = [&](int64_t rows) { return make_stride(call.k, Int<1>{}, batch_stride(call, rows * call.k)); };
  const auto* x = static_cast<const Input*>(call.x);
  const auto* weight = static_cast<const Input*>(call.weight);
  const auto of_a = stride(kSwap ? call.n : call.m), of_b = stride(kSwap ? call.m : call.n);
  if constexpr (problem::scale == Scale::block) {
    const void *of_rows = kSwap ? call.w_scale : call.x_scale, *of_columns = kSwap ? call.x_scale : call.w_scale;
    return {kSwap ? weight : x, of_a, kSwap ? x : weight, of_b,
            static_cast<const float*>(of_rows), BlockScales::tile_atom_to_shape_SFA(sizes),
            static_cast<const float*>(of_columns), BlockScales::tile_atom_to_shape_SFB(sizes)};
  } else {
    return {kSwap ? weight : x, of_a, kSwap ? x : weight, of_b};
  }
}

inline auto output_stride(const TunedGemmCall& call) {
  const int64_t batch = batch_stride(call, call.m * call.n);
  if constexpr (kSwap) {
    return make_stride(Int<1>{}, call.n, batch);
  } else {
    return make_stride(call.n, Int<1>{}, batch);
  }
}

// Number of adjacent tiles before the next row of tiles, so that the tiles of a wave are close in
// both directions and share more of L2. Only in long grids, and only where it adds no tile.
inline int swizzle(Shape<int, int, int, int> sizes, int multiprocessors) {
  const int64_t rows = ceil_div(get<0>(sizes), size<0>(instance::Tile{})), columns = ceil_div(get<1>(sizes), size<1>(instance::Tile{}));
  if (rows * columns > 2 * multiprocessors) {
    for (int side : {8, 4, 2}) {
      if (rows % (side * size<0>(instance::Cluster{})) == 0 && columns % (side * size<1>(instance::Cluster{})) == 0) return side;
    }
  }
  return 1;
}

// *split* parts of K of each tile, in order; 1 lets stream-K split the tiles of an uneven wave
// evenly.
template <class Scheduler>
void schedule(typename Scheduler::Arguments& arguments, int side, int split) {
  if constexpr (!std::is_void_v<instance::Scheduler>) arguments.max_swizzle_size = side;
  if constexpr (kStreamK) {
    arguments.splits = split;
    arguments.reduction_mode = Scheduler::ReductionMode::Deterministic;
    arguments.decomposition_mode = split > 1 ? Scheduler::DecompositionMode::SplitK : Scheduler::DecompositionMode::StreamK;
  }
}

inline Arguments to_arguments(const TunedGemmCall& call, int multiprocessors) {
  const int m = static_cast<int>(call.m), n = static_cast<int>(call.n);
  const Shape<int, int, int, int> sizes{kSwap ? n : m, kSwap ? m : n, static_cast<int>(call.k), static_cast<int>(call.batches)};
  Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = sizes;
  arguments.mainloop = mainloop_arguments<CollectiveMainloop>(call, sizes);
  arguments.epilogue = {fusion_arguments<typename Fusion::Arguments, problem::Bias>(call), nullptr, output_stride(call),
                        static_cast<Output*>(call.out), output_stride(call)};
  arguments.hw_info.sm_count = multiprocessors;
  const int split = call.split > 1 ? static_cast<int>(call.split) : 1;
  schedule<typename Kernel::TileScheduler>(arguments.scheduler, swizzle(sizes, multiprocessors), split);
  return arguments;
}

// ---- what launch.h asks for -----------------------------------------------------------------------------------------------------

// Stream-K counts finished parts in the workspace, from 0 at each launch, and leaves the counts
// there. CUTLASS clears them by a memset on the stream, which a graph replays with the kernel.
template <bool stream_k>
struct Counters {
  explicit Counters(const Arguments&) {}
  cudaError_t clear(void*, cudaStream_t) const { return cudaSuccess; }
};
template <>
struct Counters<true> {
  Arguments arguments;
  explicit Counters(const Arguments& from) : arguments(from) {}
  cudaError_t clear(void* workspace, cudaStream_t stream) const {
    const auto status = Kernel::initialize_workspace(arguments, workspace, stream);
    return status == cutlass::Status::kSuccess ? cudaSuccess : cudaErrorInvalidValue;
  }
};

struct Prepared {
  typename Kernel::Params params;
  Counters<kStreamK> counters;
  dim3 grid;
  void* workspace;
};

inline cudaError_t set_up() { return set_up_kernel<Kernel>(); }

inline bool fits(const TunedGemmCall& call, const Arguments& arguments) {
  return (kStreamK || call.split <= 1) && Kernel::can_implement(arguments);
}

inline int64_t workspace_bytes(const TunedGemmCall& call, int multiprocessors) {
  const Arguments arguments = to_arguments(call, multiprocessors);
  return fits(call, arguments) ? static_cast<int64_t>(Kernel::get_workspace_size(arguments)) : -1;
}

inline bool prepare(const TunedGemmCall& call, int multiprocessors, void* memory) {
  const Arguments arguments = to_arguments(call, multiprocessors);
  if (!fits(call, arguments)) return false;
  const auto params = Kernel::to_underlying_arguments(arguments, call.workspace);
  new (memory) Prepared{params, Counters<kStreamK>(arguments), Kernel::get_grid_shape(params), call.workspace};
  return true;
}

inline cudaError_t launch(Prepared& prepared, cudaStream_t stream) {
  const cudaError_t cleared = prepared.counters.clear(prepared.workspace, stream);
  if (cleared != cudaSuccess) return cleared;
  return launch_kernel<Kernel, instance::Cluster>(prepared.params, prepared.grid, stream);
}

}  // namespace tunedgemm
