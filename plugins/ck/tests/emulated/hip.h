// A GPU made up of threads of the CPU: one block after the other, each of as many threads as it asks for, which meet where they wait for
// each other. Launches are written as calls of `emulated`; see test_xdl_launch.py.
#pragma once
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(threads)
#define __shared__ static

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local Index blockIdx, threadIdx;
inline Index gridDim;
inline std::barrier<>* meeting = nullptr;
inline void __syncthreads() { meeting->arrive_and_wait(); }

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t max(uint32_t one, uint32_t other) { return std::max(one, other); }

// All threads of a block take part.
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int distance) {
  static uint32_t values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  const uint32_t found = values[threadIdx.x ^ distance];
  __syncthreads();
  return found;
}

using cudaStream_t = void*;
using hipStream_t = void*;
enum cudaError_t { cudaSuccess, hipErrorUnknown };
using hipError_t = cudaError_t;
constexpr hipError_t hipSuccess = cudaSuccess;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline hipError_t hipGetLastError() { return hipSuccess; }
inline hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) { return std::memset(to, value, bytes), hipSuccess; }

template <class Kernel, class... Arguments>
void emulated(dim3 grid, unsigned threads, Kernel kernel, Arguments... arguments) {
  std::barrier<> meet(threads);
  meeting = &meet;
  gridDim = {grid.x, grid.y, grid.z};
  std::vector<std::thread> all;
  for (unsigned thread = 0; thread < threads; ++thread) all.emplace_back([=, &meet] {
    threadIdx = {thread, 0, 0};
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, 0, 0};
      kernel(arguments...);
      meet.arrive_and_wait();
    }
  });
  for (auto& thread : all) thread.join();
}
