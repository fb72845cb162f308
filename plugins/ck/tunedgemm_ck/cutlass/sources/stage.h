// A stage of fmoe, over the product in grouped.h: its kernels, in order on the stream, and what
// launch.h asks for.
#include <array>
#include <cstdint>
#include <new>

namespace tunedgemm {

using Call = TunedGemmMoe;

struct Prepared {
  Call call;
  moe::Layout layout;
  Memory memory;
  Fill fill;
  typename Kernel::Params params;
  dim3 grid;
};

inline bool sized(const Call& call) {
  const int64_t most = INT32_MAX, wide = wide_of(call);
  return moe::countable(call) && wide <= most && wide % kAlignSum == 0 && depth_of(call) % kAlignInput == 0 && call.inter_dim % 8 == 0 &&
         call.model_dim % 8 == 0 && call.split >= 0 && call.split <= 1;
}

inline std::array<const void*, 7> aligned_of(const Call& call) {
  return {call.hidden, call.w1, call.w2, call.w1_scale, call.w2_scale, call.out, call.workspace};
}

// Returns the bytes of the workspace, -1 where the kernel cannot serve the sizes. With null
// addresses a call has offsets in their place.
inline int64_t planned(const Call& call, int multiprocessors, void* prepared) {
  const moe::Layout layout = moe::layout_of(call, problem::kind, problem::quantised);
  moe::Pieces pieces{layout.end};
  const Memory memory = memory_of(call, pieces);
  const Fill fill = fill_of(call, layout, memory);
  const Arguments arguments = to_arguments(call, fill, multiprocessors);
  if (!Kernel::can_implement(arguments)) return -1;
  if (prepared != nullptr) {
    const auto params = Kernel::to_underlying_arguments(arguments, moe::at<char>(call, memory.kernel));
    new (prepared) Prepared{call, layout, memory, fill, params, Kernel::get_grid_shape(params)};
  }
  return memory.kernel + static_cast<int64_t>(Kernel::get_workspace_size(arguments));
}

// ---- kernels --------------------------------------------------------------------------------------------------------------------

inline cudaError_t launch_product(Prepared& prepared, cudaStream_t stream) {
  return launch_kernel<Kernel, instance::Cluster>(prepared.params, prepared.grid, stream);
}

// The scales that the sums still lack.
constexpr Kind kLeft = kBlocks ? Kind::none : problem::kind;

// Templates, so that an object has only the kernels of its stage.
template <bool first>
std::enable_if_t<first, cudaError_t> launch_stage(Prepared& prepared, cudaStream_t stream) {
  using moe::at;
  const auto& [call, layout, memory, fill, params, grid] = prepared;
  const moe::Routing routing = moe::routing_of(call, layout);
  auto* tops = at<uint32_t>(call, memory.tops);
  auto *scales = at<float>(call, memory.scales), *middle_scale = at<float>(call, layout.middle_scale);
  cudaError_t error = moe::launch_route(call, layout, fill, stream);
  if (error != cudaSuccess) return error;
  const moe::Rows<problem::hidden> hidden{call.hidden, call.model_dim};
  const moe::ToPlaces places{routing.place, static_cast<int>(call.topk)};
  const moe::Quantised rows{at<char>(call, memory.rows), scales, call.model_dim, static_cast<const float*>(call.a1_scale), tops};
  error = moe::launch_quantise<problem::kind, problem::quantised>(hidden, places, call.tokens, rows, stream);
  if (error == cudaSuccess) error = launch_product(prepared, stream);
  if (error != cudaSuccess) return error;
  const moe::Activated<kSum, kLeft, problem::act, problem::gated, problem::weight_first> activated{
      fill.sums, call.inter_dim, scales, static_cast<const float*>(call.w1_scale), routing.order,
      static_cast<const int32_t*>(call.topk_ids), static_cast<const float*>(call.topk_weight)};
  const moe::Quantised middle{at<char>(call, layout.middle), middle_scale, call.inter_dim, static_cast<const float*>(call.a2_scale), tops};
  const moe::IfCounted counted{routing.offset + call.experts};
  return moe::launch_quantise<problem::kind, problem::quantised>(activated, counted, call.tokens * call.topk, middle, stream);
}

template <class Fill>
__global__ void fill_all(const int32_t* offset, int experts, Fill fill) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert < experts) fill(expert, offset[expert], offset[expert + 1] - offset[expert]);
}

template <bool first>
std::enable_if_t<!first, cudaError_t> launch_stage(Prepared& prepared, cudaStream_t stream) {
  const auto& [call, layout, memory, fill, params, grid] = prepared;
  const moe::Routing routing = moe::routing_of(call, layout);
  const int experts = static_cast<int>(call.experts);
  fill_all<<<static_cast<unsigned>(moe::up(experts, 128)), 128, 0, stream>>>(routing.offset, experts, fill);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = launch_product(prepared, stream);
  if (error != cudaSuccess) return error;
  const moe::Combined combined{
      fill.sums, call.model_dim, moe::at<float>(call, layout.middle_scale), static_cast<const float*>(call.w2_scale), routing.place,
      static_cast<const int32_t*>(call.topk_ids), static_cast<const float*>(call.topk_weight), static_cast<int>(call.topk), call.out};
  return moe::launch_combine<kSum, kLeft, problem::output, !problem::weight_first>(combined, call.tokens, stream);
}

// ---- what launch.h asks for -----------------------------------------------------------------------------------------------------

inline cudaError_t set_up() { return set_up_kernel<Kernel>(); }

inline int64_t workspace_bytes(const Call& call, int multiprocessors) { return planned(call, multiprocessors, nullptr); }

inline bool prepare(const Call& call, int multiprocessors, void* memory) { return planned(call, multiprocessors, memory) >= 0; }

inline cudaError_t launch(Prepared& prepared, cudaStream_t stream) { return launch_stage<kFirst>(prepared, stream); }

}  // namespace tunedgemm
