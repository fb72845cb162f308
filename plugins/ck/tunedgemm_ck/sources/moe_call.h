// The interface of a compiled stage of a fused mixture of experts: one struct and two functions,
// the same for both toolchains. Both stages get the same struct and run in order on one stream.
// Stage 1 writes the routing and the quantised intermediate to the workspace, where stage 2 reads
// them (moe.h has the offsets). An absent operand is null.
#pragma once
#include <cstdint>

struct TunedGemmMoe {
  const void* hidden;       // [tokens, model_dim], row-major
  const void* w1;           // [experts, 2 * inter_dim or inter_dim, model_dim], gate first
  const void* w2;           // [experts, model_dim, inter_dim]
  const void* topk_weight;  // [tokens, topk] float
  const void* topk_ids;     // [tokens, topk] int32; ids outside 0..experts-1 are ignored
  const void* w1_scale;
  const void* w2_scale;
  const void* a1_scale;     // one float, or null: computed from the values
  const void* a2_scale;
  void* out;                // [tokens, model_dim], row-major
  void* workspace;          // the larger tunedgemm_workspace of both stages, of any content before stage 1
  int64_t tokens, model_dim, inter_dim, experts, topk;
  int64_t split;            // the solution's splitK, in the unit of its family
};

#define TUNED_GEMM_EXPORT extern "C" __attribute__((visibility("default")))

// Returns 0, TUNED_GEMM_UNSUPPORTED where the stage cannot serve these sizes, or else an error of
// the vendor's runtime.
TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmMoe* call, void* stream);
// Returns the bytes of workspace for these sizes, for any addresses, even null; -1 where the stage
// cannot serve the sizes.
TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmMoe* call);

constexpr int TUNED_GEMM_UNSUPPORTED = -1;
