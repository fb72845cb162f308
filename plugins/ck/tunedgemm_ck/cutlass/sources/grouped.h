// The product of a stage of fmoe on sm_90, by CUTLASS's grouped kernels: of each expert its rows
// times its weight. The text before this one defines
//   problem::   the stage, as tunedgemm_ck.stages describes it
//   instance::Tile, Cluster, Mainloop, Epilogue (tags of CUTLASS), swap
// Only the device knows how many rows an expert has: it writes sizes, addresses and strides of each
// product into the object's own memory. Rows and sums are stored expert by expert. The kernels that
// read the sums (moe_kernels.h) apply scales of tensors and rows; the main loop applies block
// scales. With swapped operands the product is out^T = weight rows^T: CUTLASS's M is along the
// weight's rows, its N along those of the tokens, and its output is column-major, which is the same
// memory.
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace tunedgemm {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;
using moe::Kind;
using moe::Type;

template <Type type>
using Element = std::conditional_t<
    type == Type::bf16, cutlass::bfloat16_t,
    std::conditional_t<type == Type::fp16, cutlass::half_t, std::conditional_t<type == Type::int8, int8_t, cutlass::float_e4m3_t>>>;

constexpr bool kSwap = instance::swap;
constexpr bool kFirst = problem::stage == 1;
constexpr bool kBlocks = problem::kind == Kind::block;
// Sums of quantised factors, scaled later, may exceed fp16's range.
constexpr Type kSum = problem::kind == Kind::none ? problem::quantised : Type::bf16;

using Input = Element<problem::quantised>;
using Sum = Element<kSum>;
using Accumulator = std::conditional_t<std::is_same_v<Input, int8_t>, int32_t, float>;

// ---- kernel ---------------------------------------------------------------------------------------------------------------------

constexpr int kAlignInput = 16 / sizeof(Input);
constexpr int kAlignSum = 16 / sizeof(Sum);
using LayoutSum = std::conditional_t<kSwap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

// Block scales have K contiguous: one per row and 128 of K for tokens, one per 128 rows and 128 of
// K for the weight.
constexpr int kBlock = moe::kBlock;
using BlockScales =
    cutlass::detail::Sm90BlockwiseScaleConfig<kSwap ? kBlock : 1, kSwap ? 1 : kBlock, kBlock, GMMA::Major::K, GMMA::Major::K>;
using ScalesA = decltype(BlockScales::deduce_layoutSFA());
using ScalesB = decltype(BlockScales::deduce_layoutSFB());
template <class Layout, class Scales>
using WithScales = std::conditional_t<kBlocks, cute::tuple<Layout*, Scales*>, Layout*>;

using Fusion = fusion::Sm90EVT<
    fusion::Sm90Compute<cutlass::epilogue::thread::Identity, Sum, float, cutlass::FloatRoundStyle::round_to_nearest>, fusion::Sm90AccFetch>;
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, instance::Tile, instance::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, float, void, LayoutSum*, kAlignSum, Sum, LayoutSum*, kAlignSum,
    instance::Epilogue, Fusion>::CollectiveOp;
using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Input, WithScales<cutlass::layout::RowMajor, ScalesA>, kAlignInput, Input,
    WithScales<cutlass::layout::ColumnMajor, ScalesB>, kAlignInput, Accumulator, instance::Tile, instance::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
    instance::Mainloop>::CollectiveOp;
using Sizes = Shape<int, int, int>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Sizes>, CollectiveMainloop, CollectiveEpilogue>;
using Arguments = typename Kernel::Arguments;

// ---- memory ---------------------------------------------------------------------------------------------------------------------

// The operands of a stage's product: weights of each expert [wide, depth], rows [pairs, depth],
// sums [pairs, wide].
inline int64_t depth_of(const TunedGemmMoe& call) { return kFirst ? call.model_dim : call.inter_dim; }
inline int64_t wide_of(const TunedGemmMoe& call) { return kFirst ? call.inter_dim * (problem::gated ? 2 : 1) : call.model_dim; }

// Offsets in an object's own memory, in bytes from the beginning of the workspace.
struct Memory {
  int64_t tops, rows, scales, sums;                     // stage 1: quantised rows of the hidden states; sums [pairs, wide]
  int64_t sizes, a, b, d, of_a, of_b, of_d;             // by expert: sizes, addresses, strides
  int64_t scales_a, scales_b, scales_of_a, scales_of_b; // of block scales: addresses, layouts
  int64_t kernel;                                       // CUTLASS's workspace
};

inline Memory memory_of(const TunedGemmMoe& call, moe::Pieces& pieces) {
  const int64_t pairs = call.tokens * call.topk, experts = call.experts;
  Memory memory{};
  memory.tops = pieces.take(4 * moe::kTops);
  memory.rows = pieces.take(kFirst ? pairs * call.model_dim * moe::width(problem::quantised) : 0);
  memory.scales = pieces.take(kFirst ? 4 * moe::scales_of(problem::kind, pairs, call.model_dim) : 0);
  memory.sums = pieces.take(pairs * wide_of(call) * sizeof(Sum));
  memory.sizes = pieces.take(experts * sizeof(Sizes));
  for (int64_t* pointers : {&memory.a, &memory.b, &memory.d, &memory.scales_a, &memory.scales_b}) *pointers = pieces.take(experts * 8);
  memory.of_a = pieces.take(experts * sizeof(typename Kernel::InternalStrideA));
  memory.of_b = pieces.take(experts * sizeof(typename Kernel::InternalStrideB));
  memory.of_d = pieces.take(experts * sizeof(typename Kernel::InternalStrideD));
  memory.scales_of_a = pieces.take(experts * sizeof(ScalesA));
  memory.scales_of_b = pieces.take(experts * sizeof(ScalesB));
  memory.kernel = pieces.used;
  return memory;
}

// Writes what the kernel reads of an expert whose rows are known.
struct Fill {
  int depth, wide;
  const char *rows, *weight;
  const float *row_scales, *weight_scales;
  char* sums;
  Sizes* sizes;
  const char **a, **b;
  char** d;
  typename Kernel::InternalStrideA* of_a;
  typename Kernel::InternalStrideB* of_b;
  typename Kernel::InternalStrideD* of_d;
  const float **scales_a, **scales_b;
  ScalesA* scales_of_a;
  ScalesB* scales_of_b;

  __host__ __device__ void operator()(int expert, int first, int count) const {
    const char* mine = rows + int64_t(first) * depth * sizeof(Input);
    const char* its = weight + int64_t(expert) * wide * depth * sizeof(Input);
    sizes[expert] = kSwap ? Sizes{wide, count, depth} : Sizes{count, wide, depth};
    a[expert] = kSwap ? its : mine;
    b[expert] = kSwap ? mine : its;
    d[expert] = sums + int64_t(first) * wide * sizeof(Sum);
    get<0>(of_a[expert]) = depth;
    get<0>(of_b[expert]) = depth;
    get<kSwap ? 1 : 0>(of_d[expert]) = wide;
    if constexpr (kBlocks) {
      const int64_t deep = moe::up(depth, kBlock);
      const float *of_mine = row_scales + first * deep, *of_its = weight_scales + expert * moe::up(wide, kBlock) * deep;
      scales_a[expert] = kSwap ? of_its : of_mine;
      scales_b[expert] = kSwap ? of_mine : of_its;
      scales_of_a[expert] = BlockScales::tile_atom_to_shape_SFA(append<4>(sizes[expert], 1));
      scales_of_b[expert] = BlockScales::tile_atom_to_shape_SFB(append<4>(sizes[expert], 1));
    }
  }
};

inline Fill fill_of(const TunedGemmMoe& call, const moe::Layout& layout, const Memory& memory) {
  using moe::at;
  Fill fill{};
  fill.depth = static_cast<int>(depth_of(call)), fill.wide = static_cast<int>(wide_of(call));
  fill.rows = at<char>(call, kFirst ? memory.rows : layout.middle);
  fill.row_scales = at<float>(call, kFirst ? memory.scales : layout.middle_scale);
  fill.weight = static_cast<const char*>(kFirst ? call.w1 : call.w2);
  fill.weight_scales = static_cast<const float*>(kFirst ? call.w1_scale : call.w2_scale);
  fill.sums = at<char>(call, memory.sums);
  fill.sizes = at<Sizes>(call, memory.sizes);
  fill.a = at<const char*>(call, memory.a), fill.b = at<const char*>(call, memory.b), fill.d = at<char*>(call, memory.d);
  fill.of_a = at<typename Kernel::InternalStrideA>(call, memory.of_a);
  fill.of_b = at<typename Kernel::InternalStrideB>(call, memory.of_b);
  fill.of_d = at<typename Kernel::InternalStrideD>(call, memory.of_d);
  fill.scales_a = at<const float*>(call, memory.scales_a), fill.scales_b = at<const float*>(call, memory.scales_b);
  fill.scales_of_a = at<ScalesA>(call, memory.scales_of_a), fill.scales_of_b = at<ScalesB>(call, memory.scales_of_b);
  return fill;
}

// ---- arguments ------------------------------------------------------------------------------------------------------------------

template <class Mainloop>
typename Mainloop::Arguments mainloop_arguments(const Fill& fill) {
  auto **a = reinterpret_cast<const Input**>(fill.a), **b = reinterpret_cast<const Input**>(fill.b);
  if constexpr (kBlocks) {
    return {a, fill.of_a, b, fill.of_b, fill.scales_a, fill.scales_of_a, fill.scales_b, fill.scales_of_b};
  } else {
    return {a, fill.of_a, b, fill.of_b};
  }
}

inline Arguments to_arguments(const TunedGemmMoe& call, const Fill& fill, int multiprocessors) {
  Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {static_cast<int>(call.experts), fill.sizes, nullptr};
  arguments.mainloop = mainloop_arguments<CollectiveMainloop>(fill);
  arguments.epilogue.ptr_D = reinterpret_cast<Sum**>(fill.d);
  arguments.epilogue.dD = fill.of_d;
  arguments.hw_info.sm_count = multiprocessors;
  return arguments;
}

}  // namespace tunedgemm
