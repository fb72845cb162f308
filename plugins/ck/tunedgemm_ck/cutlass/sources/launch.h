// The two functions that Python calls. The headers before this one define:
//   Call                                        the struct that Python fills
//   sized(call)                                 whether its sizes are valid
//   aligned_of(call)                            addresses that must be multiples of 16 bytes
//   Prepared                                    everything that a launch needs, derived from the call
//   set_up()                                    sets up a device before the first launch
//   workspace_bytes(call, multiprocessors)      or -1 where the kernel cannot serve the sizes
//   prepare(call, multiprocessors, prepared)    false where it cannot
//   launch(prepared, stream)
//
// A call whose bytes equal those of an earlier call of the thread is only a launch: a table keeps
// what was prepared (TMA descriptors, grid). Threads share only immutable state.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>

namespace tunedgemm {

constexpr int kDevices = 64;
constexpr int kSlots = 64;  // a power of two

static std::atomic<int> known[kDevices];

// Returns the multiprocessors of a device, which the first query sets up; 0 where the runtime
// failed, with its error in *error*.
inline int multiprocessors_of(int device, cudaError_t& error) {
  const bool kept = device >= 0 && device < kDevices;
  int count = kept ? known[device].load(std::memory_order_acquire) : 0;
  if (count > 0) return count;
  error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = set_up();
  if (error != cudaSuccess) {
    cudaGetLastError();  // this runtime is linked statically: no other code could clear its error
    return 0;
  }
  if (kept) known[device].store(count, std::memory_order_release);
  return count;
}

struct Slot {
  Call call;
  int device;  // + 1; 0 in an empty slot
  alignas(Prepared) unsigned char prepared[sizeof(Prepared)];
};
static_assert(std::has_unique_object_representations_v<Call>, "calls are compared as bytes");

inline unsigned slot_of(const Call& call) {
  uint64_t words[sizeof(Call) / sizeof(uint64_t)], mixed = 0;
  std::memcpy(words, &call, sizeof words);
  for (uint64_t word : words) mixed = (mixed ^ word) * 0x9E3779B97F4A7C15ull;
  return static_cast<unsigned>(mixed >> 58) & (kSlots - 1);
}

inline bool aligned(const Call& call) {
  uintptr_t all = 0;
  for (const void* address : aligned_of(call)) all |= reinterpret_cast<uintptr_t>(address);
  return (all & 15) == 0;
}

}  // namespace tunedgemm

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const tunedgemm::Call* call) {
  using namespace tunedgemm;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const int multiprocessors = error == cudaSuccess ? multiprocessors_of(device, error) : 0;
  return multiprocessors > 0 && sized(*call) ? workspace_bytes(*call, multiprocessors) : -1;
}

TUNED_GEMM_EXPORT int tunedgemm_launch(const tunedgemm::Call* call, void* stream) {
  using namespace tunedgemm;
  static thread_local Slot slots[kSlots];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return static_cast<int>(error);
  Slot& slot = slots[slot_of(*call)];
  if (slot.device != device + 1 || std::memcmp(&slot.call, call, sizeof *call) != 0) {
    const int multiprocessors = multiprocessors_of(device, error);
    if (error != cudaSuccess) return static_cast<int>(error);
    slot.device = 0;
    if (!sized(*call) || !aligned(*call)) return TUNED_GEMM_UNSUPPORTED;
    if (!prepare(*call, multiprocessors, slot.prepared)) return TUNED_GEMM_UNSUPPORTED;
    slot.call = *call;
    slot.device = device + 1;
  }
  error = launch(*std::launder(reinterpret_cast<Prepared*>(slot.prepared)), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}
