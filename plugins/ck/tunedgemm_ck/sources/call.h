// The interface of a compiled instance: one struct and two functions, the same for every op and
// both toolchains. A field without an operand is null or 0.
#pragma once
#include <cstdint>

struct TunedGemmCall {
  const void* x;        // [m, k], row-major
  const void* weight;   // [n, k], row-major, or in the layout of the problem
  const void* x_scale;
  const void* w_scale;
  const void* bias;     // [n], of a batch [batches, n]
  void* out;            // [m, n], row-major
  void* workspace;      // tunedgemm_workspace bytes, of any content
  int64_t m, n, k;
  int64_t batches;      // consecutive products; 1 for an op without a batch
  int64_t split;        // the solution's splitK, in the unit of its family
};

#define TUNED_GEMM_EXPORT extern "C" __attribute__((visibility("default")))

// Returns 0, TUNED_GEMM_UNSUPPORTED where the instance cannot serve these sizes, or else an error
// of the vendor's runtime.
TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmCall* call, void* stream);
// Returns the bytes of workspace for these sizes, for any addresses, even null; -1 where the
// instance cannot serve the sizes.
TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmCall* call);

constexpr int TUNED_GEMM_UNSUPPORTED = -1;
