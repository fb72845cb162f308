// The kernel of an instance on sm_80, sm_86 and sm_89, by CUTLASS's multistage kernels. The text
// before this one defines
//   problem::Input, Output, Bias (void: none), scale
//   instance::Tile, Warp (shapes of CUTLASS), stages
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
// The visitors use names from the header above.
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"

namespace tunedgemm {

using namespace cute;
namespace fusion = cutlass::epilogue::threadblock;
using instance::Tile;
using instance::Warp;
using problem::Input;
using problem::Output;
using problem::Scale;

constexpr bool kInteger = std::is_same_v<Input, int8_t>;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
constexpr int kAlignInput = 16 / sizeof(Input);
constexpr int kAlignOutput = 16 / sizeof(Output);

using Accumulator = std::conditional_t<kInteger, int32_t, float>;

// ---- epilogue: (accumulator * x_scale) * w_scale + bias, in float32 -------------------------------------------------------------

using Threads = fusion::OutputTileThreadLayout<Tile, Warp, Output, kAlignOutput, 1>;
template <class Element>
using OfWeight = fusion::VisitorRowBroadcast<Threads, Element, Stride<_0, _1, int64_t>>;  // one value per row of the weight
using OfX = fusion::VisitorColBroadcast<Threads, float, Stride<_1, _0, int64_t>>;         // one value per row of x
using OfTensor = fusion::VisitorScalarBroadcast<float, Stride<_0, _0, _0>, 2>;           // the product of two
using Store = fusion::VisitorAuxStore<Threads, Output, kRound, Stride<int64_t, _1, int64_t>>;
template <template <class> class Function>
using Compute = fusion::VisitorCompute<Function, float, float, kRound>;

using Unscaled = fusion::Sm80EVT<Compute<cutlass::epilogue::thread::Identity>, fusion::VisitorAccFetch>;
using ByTensor = fusion::Sm80EVT<Compute<cutlass::multiplies>, OfTensor, fusion::VisitorAccFetch>;
using ByRow = fusion::Sm80EVT<Compute<cutlass::multiplies>, OfWeight<float>,
                              fusion::Sm80EVT<Compute<cutlass::multiplies>, OfX, fusion::VisitorAccFetch>>;
using Product =
    std::conditional_t<problem::scale == Scale::row, ByRow, std::conditional_t<problem::scale == Scale::tensor, ByTensor, Unscaled>>;

template <class Bias>
struct Fused {
  using Type = fusion::Sm80EVT<Compute<cutlass::plus>, Product, OfWeight<Bias>>;
};
template <>
struct Fused<void> {
  using Type = Product;
};
using Sum = typename Fused<problem::Bias>::Type;
using Fusion = fusion::Sm80EVT<Store, Sum>;

// ---- kernel ---------------------------------------------------------------------------------------------------------------------

using Instruction = cutlass::gemm::GemmShape<16, 8, kInteger ? 32 : 16>;
using Operator = std::conditional_t<kInteger, cutlass::arch::OpMultiplyAddSaturate, cutlass::arch::OpMultiplyAdd>;
// Up to 8 rows of tiles are adjacent, so that blocks of a wave share what they read.
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    Input, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignInput, Input, cutlass::layout::ColumnMajor,
    cutlass::ComplexTransform::kNone, kAlignInput, Output, cutlass::layout::RowMajor, kAlignOutput, Accumulator, float,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, Warp, Instruction, Fusion, Swizzle, instance::stages, Operator>::GemmKernel;

// ---- arguments ------------------------------------------------------------------------------------------------------------------

template <class Element>
typename OfWeight<Element>::Arguments of_weight(const TunedGemmCall& call, const void* values) {
  return {static_cast<const Element*>(values), Element(0), {{}, {}, batch_stride(call, call.n)}};
}

template <class Arguments>
Arguments product_arguments(const TunedGemmCall& call) {
  if constexpr (problem::scale == Scale::row) {
    typename OfX::Arguments rows{static_cast<const float*>(call.x_scale), 0.0f, {{}, {}, batch_stride(call, call.m)}};
    return {of_weight<float>(call, call.w_scale), {rows, {}, {}}, {}};
  } else if constexpr (problem::scale == Scale::tensor) {
    typename OfTensor::Arguments both{};
    both.scalar_ptrs[0] = static_cast<const float*>(call.x_scale);
    both.scalar_ptrs[1] = static_cast<const float*>(call.w_scale);
    return {both, {}, {}};
  } else {
    return {{}, {}};
  }
}

template <class Arguments, class Bias>
Arguments sum_arguments(const TunedGemmCall& call) {
  if constexpr (std::is_void_v<Bias>) {
    return product_arguments<Arguments>(call);
  } else {
    return {product_arguments<typename Product::Arguments>(call), of_weight<Bias>(call, call.bias), {}};
  }
}

inline typename Kernel::Arguments to_arguments(const TunedGemmCall& call) {
  const int m = static_cast<int>(call.m), n = static_cast<int>(call.n), k = static_cast<int>(call.k);
  const typename Fusion::Arguments epilogue{
      sum_arguments<typename Sum::Arguments, problem::Bias>(call),
      {static_cast<Output*>(call.out), {call.n, {}, batch_stride(call, call.m * call.n)}}};
  return {cutlass::gemm::GemmUniversalMode::kBatched, {m, n, k}, static_cast<int>(call.batches), epilogue, call.x, call.weight,
          nullptr, nullptr, call.m * call.k, call.n * call.k, 0, 0, call.k, call.k, 0, 0};
}

// ---- what launch.h asks for -----------------------------------------------------------------------------------------------------

struct Prepared {
  typename Kernel::Params params;
  dim3 grid;
};

constexpr int kShared = sizeof(typename Kernel::SharedStorage);

inline cudaError_t set_up() {
  return cudaFuncSetAttribute(cutlass::Kernel2<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
}

inline int64_t workspace_bytes(const TunedGemmCall& call, int) {
  return call.split <= 1 && Kernel::can_implement(to_arguments(call)) == cutlass::Status::kSuccess ? 0 : -1;
}

inline bool prepare(const TunedGemmCall& call, int multiprocessors, void* memory) {
  const uintptr_t rows = reinterpret_cast<uintptr_t>(call.bias) | reinterpret_cast<uintptr_t>(call.w_scale);
  if ((problem::scale != Scale::tensor && rows % 16 != 0) || workspace_bytes(call, multiprocessors) < 0) return false;  // vector loads
  auto* prepared = new (memory) Prepared{typename Kernel::Params(to_arguments(call), multiprocessors, 1), {}};
  prepared->grid = prepared->params.get_grid_dims();
  return prepared->grid.y <= 65535 && prepared->grid.z <= 65535;
}

inline cudaError_t launch(Prepared& prepared, cudaStream_t stream) {
  void* parameters[] = {&prepared.params};
  const auto* kernel = reinterpret_cast<const void*>(cutlass::Kernel2<Kernel>);
  return cudaLaunchKernel(kernel, prepared.grid, dim3(Kernel::kThreadCount), parameters, kShared, stream);
}

}  // namespace tunedgemm
