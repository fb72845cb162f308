// The two functions that Python calls for a stage of fmoe, over the product in grouped.h. A call whose bytes are those of an earlier call
// of the thread finds its descriptors and its grid in a table, as in launch.h. All kernels of a stage follow each other on the stream.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

namespace tunedgemm {

struct Prepared {
  TunedGemmMoe call;
  moe::Layout layout;
  Memory memory;
  Fill fill;
  typename Kernel::Params params;
  dim3 grid;
};

inline bool sized(const TunedGemmMoe& call) {
  const int64_t most = INT32_MAX, wide = wide_of(call);
  return moe::countable(call) && wide <= most && wide % kAlignSum == 0 && depth_of(call) % kAlignInput == 0 && call.inter_dim % 8 == 0 &&
         call.model_dim % 8 == 0 && call.split >= 0 && call.split <= 1;
}

inline bool aligned(const TunedGemmMoe& call) {
  uintptr_t all = 0;
  for (const void* address : {call.hidden, call.w1, call.w2, call.w1_scale, call.w2_scale}) all |= reinterpret_cast<uintptr_t>(address);
  return ((all | reinterpret_cast<uintptr_t>(call.out) | reinterpret_cast<uintptr_t>(call.workspace)) & 15) == 0;
}

// A call of null addresses, which is asked for its workspace, has offsets in their place.
inline int64_t prepare(const TunedGemmMoe& call, int multiprocessors, Prepared* prepared) {
  if (!sized(call)) return -1;
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
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {size<0>(instance::Cluster{}), size<1>(instance::Cluster{}), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = prepared.grid;
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = size(instance::Cluster{}) > 1 ? 1 : 0;
  void* parameters[] = {&prepared.params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>), parameters);
}

// Which scales of the sums are still to be multiplied in.
constexpr Kind kLeft = kBlocks ? Kind::none : problem::kind;

// Templates, so that an object has the kernels of its own stage alone.
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

// ---- what Python calls ----------------------------------------------------------------------------------------------------------

constexpr int kDevices = 64;
constexpr int kSlots = 64;  // a power of two

static std::atomic<int> known[kDevices];

// Multiprocessors of a device, which is set up at the first question; 0 where the runtime failed, whose error goes to *error*.
inline int multiprocessors_of(int device, cudaError_t& error) {
  const bool kept = device >= 0 && device < kDevices;
  int count = kept ? known[device].load(std::memory_order_acquire) : 0;
  if (count > 0) return count;
  error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error != cudaSuccess) {
    cudaGetLastError();  // this runtime is linked in: nobody else could clear its error
    return 0;
  }
  if (kept) known[device].store(count, std::memory_order_release);
  return count;
}

struct Slot {
  int device;  // + 1; 0 in an empty slot
  alignas(Prepared) unsigned char prepared[sizeof(Prepared)];
};
static_assert(sizeof(TunedGemmMoe) == 11 * sizeof(void*) + 6 * sizeof(int64_t), "calls are compared as bytes");

inline unsigned slot_of(const TunedGemmMoe& call) {
  uint64_t mixed = static_cast<uint64_t>(call.tokens);
  for (const void* address : {call.hidden, call.w1, static_cast<const void*>(call.out)})
    mixed = (mixed ^ reinterpret_cast<uintptr_t>(address)) * 0x9E3779B97F4A7C15ull;
  return static_cast<unsigned>(mixed >> 58) & (kSlots - 1);
}

}  // namespace tunedgemm

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmMoe* call) {
  using namespace tunedgemm;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const int multiprocessors = error == cudaSuccess ? multiprocessors_of(device, error) : 0;
  return multiprocessors > 0 ? prepare(*call, multiprocessors, nullptr) : -1;
}

TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmMoe* call, void* stream) {
  using namespace tunedgemm;
  static thread_local Slot slots[kSlots];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return static_cast<int>(error);
  Slot& slot = slots[slot_of(*call)];
  auto* prepared = reinterpret_cast<Prepared*>(slot.prepared);
  if (slot.device != device + 1 || std::memcmp(&prepared->call, call, sizeof *call) != 0) {
    const int multiprocessors = multiprocessors_of(device, error);
    if (error != cudaSuccess) return static_cast<int>(error);
    slot.device = 0;
    if (!aligned(*call) || prepare(*call, multiprocessors, prepared) < 0) return TUNED_GEMM_UNSUPPORTED;
    slot.device = device + 1;
  }
  error = launch_stage<kFirst>(*std::launder(prepared), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}
