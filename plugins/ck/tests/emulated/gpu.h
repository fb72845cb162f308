// The part of CUDA's dialect that moe_kernels.h uses, on the host: the threads of a block are
// contexts that switch at each barrier.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
using cudaStream_t = void*;
using cudaError_t = int;
inline int cudaGetLastError() { return 0; }
using std::max;

inline dim3 threadIdx, blockIdx, gridDim;

class Block {
 public:
  // Runs all threads of a block from barrier to barrier, in order.
  static void run(unsigned threads, const std::function<void()>& body) {
    static std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 15));
    contexts.resize(threads);
    done.assign(threads, false);
    work = body;
    for (unsigned i = 0; i < threads; i++) {
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = stacks[i].data();
      contexts[i].uc_stack.ss_size = stacks[i].size();
      contexts[i].uc_link = &scheduler;
      makecontext(&contexts[i], enter, 0);
    }
    for (bool some = true; some;) {
      some = false;
      for (current = 0; current < threads; current++) {
        if (done[current]) continue;
        some = true;
        threadIdx = dim3(current, 0, 0);
        swapcontext(&scheduler, &contexts[current]);
      }
    }
  }
  static void wait() {
    const unsigned mine = current;
    swapcontext(&contexts[mine], &scheduler);
  }

 private:
  static void enter() {
    work();
    done[current] = true;
  }
  static inline std::vector<ucontext_t> contexts;
  static inline std::vector<bool> done;
  static inline std::function<void()> work;
  static inline ucontext_t scheduler;
  static inline unsigned current = 0;
};

inline void __syncthreads() { Block::wait(); }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int distance) {
  static uint32_t lanes[1024];
  const unsigned mine = threadIdx.x;
  lanes[mine] = value;
  Block::wait();
  const uint32_t other = lanes[mine ^ distance];
  Block::wait();
  return other;
}

template <class Body>
void emulate(dim3 grid, unsigned threads, Body body) {
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx = dim3(x, y, 0);
      Block::run(threads, body);
    }
}
