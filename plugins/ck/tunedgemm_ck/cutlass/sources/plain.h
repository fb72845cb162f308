// The call of every op except fmoe, for a kernel's header and launch.h.
#include <array>
#include <cstdint>

namespace tunedgemm {

using Call = TunedGemmCall;

inline bool sized(const Call& call) {
  constexpr int64_t most = INT32_MAX;
  return call.m > 0 && call.n > 0 && call.k > 0 && call.batches > 0 && call.m <= most && call.n <= most && call.k <= most &&
         call.batches <= most && call.split >= 0 && call.split <= most;
}

inline std::array<const void*, 4> aligned_of(const Call& call) { return {call.x, call.weight, call.out, call.workspace}; }

// The stride between products of a batch; 0 for one product.
inline int64_t batch_stride(const Call& call, int64_t elements) { return call.batches > 1 ? elements : 0; }

}  // namespace tunedgemm
