// The operations around the two products of a fused mixture of experts: routing, quantisation,
// activation, the weighted sum. They use the dialect common to nvcc and hipcc, without a warp's
// width. Nothing is added atomically and nothing needs to be cleared, so bits repeat. The
// arithmetic of one value also compiles for the host, where it is compared with the reference.
//
// A pair is a token's j-th expert, token * topk + j. Its place is the index of its row among all
// pairs, sorted by expert.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#endif

#if defined(__CUDACC__) || defined(__HIP__)
#define TUNED_GEMM_BOTH __host__ __device__ inline
#else
#define TUNED_GEMM_BOTH inline
#endif

namespace tunedgemm::moe {

enum class Kind { none, tensor, row, block, mx };  // values that share a scale: no scale, all, a row, 128 or 32 of a row
enum class Type { bf16, fp16, fp32, int8, e4m3fn, e4m3fnuz, e2m1 };
enum class Act { silu, gelu, swiglu };

constexpr int kBlock = 128;  // elements of a row that share a scale in Kind::block

TUNED_GEMM_BOTH constexpr int width(Type type) { return type == Type::fp32 ? 4 : type == Type::bf16 || type == Type::fp16 ? 2 : 1; }
TUNED_GEMM_BOTH constexpr int64_t up(int64_t value, int64_t part) { return (value + part - 1) / part; }

// ---- the workspace --------------------------------------------------------------------------------------------------------------

// Offsets in the workspace, in bytes, of what both stages use; each object's own memory begins at
// *end*.
struct Layout {
  int64_t order;         // int32 [pairs]: place -> pair
  int64_t place;         // int32 [pairs]: pair -> place, -1 for a pair beyond the experts
  int64_t offset;        // int32 [experts + 1]: first place of each expert, then the number of places
  int64_t middle;        // [pairs, inter_dim]: the intermediate by place, quantised
  int64_t middle_scale;  // float: [1], [pairs] or [pairs, ceil(inter_dim / 128)] of Kind tensor, row, block
  int64_t end;
};

TUNED_GEMM_BOTH constexpr int64_t scales_of(Kind kind, int64_t rows, int64_t columns) {
  return kind == Kind::tensor ? 1 : kind == Kind::row ? rows : kind == Kind::block ? rows * up(columns, kBlock) : 0;
}

// Allocates pieces of memory that begin at multiples of 256 bytes.
struct Pieces {
  int64_t used = 0;
  int64_t take(int64_t bytes) {
    const int64_t begin = used;
    used += up(bytes, 256) * 256;
    return begin;
  }
};

inline Layout layout_of(const TunedGemmMoe& call, Kind kind, Type quantised) {
  const int64_t pairs = call.tokens * call.topk;
  Pieces pieces;
  Layout layout{};
  layout.order = pieces.take(4 * pairs);
  layout.place = pieces.take(4 * pairs);
  layout.offset = pieces.take(4 * (call.experts + 1));
  layout.middle = pieces.take(pairs * call.inter_dim * width(quantised));
  layout.middle_scale = pieces.take(4 * scales_of(kind, pairs, call.inter_dim));
  layout.end = pieces.used;
  return layout;
}

template <class Element>
Element* at(const TunedGemmMoe& call, int64_t offset) {
  return reinterpret_cast<Element*>(static_cast<char*>(call.workspace) + offset);
}

// Whether places can be counted in 32 bits.
inline bool countable(const TunedGemmMoe& call) {
  return call.tokens > 0 && call.model_dim > 0 && call.inter_dim > 0 && call.experts > 0 && call.topk > 0 && call.tokens <= INT32_MAX &&
         call.model_dim <= INT32_MAX && call.inter_dim <= INT32_MAX / 2 && call.experts < INT32_MAX && call.topk <= call.experts &&
         call.tokens * call.topk <= INT32_MAX;
}

// ---- values ---------------------------------------------------------------------------------------------------------------------

TUNED_GEMM_BOTH float of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
TUNED_GEMM_BOTH uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
TUNED_GEMM_BOTH uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffff; }  // ordered as numbers, then infinity, then NaN
constexpr uint32_t kInfinity = 0x7f800000;

// 8-bit floats with 4 bits of exponent; "fnuz" has a bias of 8 instead of 7, and NaN in place of
// negative zero.
template <Type type>
TUNED_GEMM_BOTH float decoded(uint32_t code) {
  if constexpr (type == Type::bf16) {
    return of_bits(code << 16);
  } else if constexpr (type == Type::fp16) {
    const uint32_t sign = (code & 0x8000) << 16, rest = (code & 0x7fff) << 13;
    if ((code & 0x7c00) == 0x7c00) return of_bits(sign | rest | kInfinity);
    return of_bits(sign | bits_of(of_bits(rest) * 0x1p112f));
  } else if constexpr (type == Type::int8) {
    return static_cast<float>(static_cast<int8_t>(code));
  } else {
    if (type == Type::e4m3fnuz ? code == 0x80 : (code & 0x7f) == 0x7f) return of_bits(0x7fc00000);
    const float value = of_bits((code & 0x7f) << 20) * (type == Type::e4m3fnuz ? 0x1p119f : 0x1p120f);
    return code & 0x80 ? -value : value;
  }
}

// Rounds ties to even. 8-bit types take a value within their limits, or NaN. Adding a power of two
// whose last place is the smallest subnormal rounds subnormal values.
template <Type type>
TUNED_GEMM_BOTH uint32_t encoded(float value) {
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
  if constexpr (type == Type::bf16) {
    return size > kInfinity ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  } else if constexpr (type == Type::fp16) {
    const uint32_t sign = bits >> 16 & 0x8000;
    if (size > kInfinity) return 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;  // 65520 or more
    if (size < 0x38800000) return sign | (bits_of(of_bits(size) + 0.5f) - bits_of(0.5f));
    return sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13);
  } else if constexpr (type == Type::int8) {
    return static_cast<uint8_t>(static_cast<int8_t>(rintf(value)));
  } else {
    constexpr bool fnuz = type == Type::e4m3fnuz;
    const uint32_t sign = bits >> 24 & 0x80;
    if (size > kInfinity) return fnuz ? 0x80 : sign | 0x7f;
    constexpr float magic = fnuz ? 0x1p13f : 0x1p14f;
    constexpr uint32_t bias = (fnuz ? 119u : 120u) << 23, normal = bias + (1u << 23);
    const uint32_t small = bits_of(of_bits(size) + magic) - bits_of(magic), large = (size - bias + 0x7ffff + (size >> 20 & 1)) >> 20;
    const uint32_t code = size < normal ? small : large;
    return code == 0 && fnuz ? 0 : sign | code;
  }
}

TUNED_GEMM_BOTH constexpr float limit_of(Type type) { return type == Type::int8 ? 127.0f : type == Type::e4m3fnuz ? 240.0f : 448.0f; }

// The scale of values whose largest magnitude has these bits; 1 where that is 0 or underflows when
// divided.
template <Type type>
TUNED_GEMM_BOTH float scale_of(uint32_t top) {
  const float scale = of_bits(top) / limit_of(type);
  return scale == 0.0f ? 1.0f : scale;
}

// value / scale, saturated and rounded. If *own* and the scale is not finite, the result is 0. NaN
// is 0 in int8.
template <Type type>
TUNED_GEMM_BOTH uint32_t quantised(float value, float scale, bool own) {
  constexpr float limit = limit_of(type);
  float part = own && magnitude(scale) >= kInfinity ? 0.0f : value / scale;
  if constexpr (type == Type::int8) {
    part = rintf(part);
    if (part != part) part = 0.0f;
  }
  part = part < -limit ? -limit : part > limit ? limit : part;
  return encoded<type>(part);
}

// The activation of stage 1's product; for gated experts *rest* multiplies the gate.
template <Act act, bool gated>
TUNED_GEMM_BOTH float activated(float gate, float rest) {
  if constexpr (act == Act::swiglu) {
    static_assert(gated, "swiglu has a gate");
    constexpr float alpha = 1.702f, limit = 7.0f;
    gate = gate > limit ? limit : gate;
    rest = rest < -limit ? -limit : rest > limit ? limit : rest;
    return gate / (1.0f + expf(-alpha * gate)) * (rest + 1.0f);
  } else {
    const float value = act == Act::silu ? gate / (1.0f + expf(-gate)) : 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f));
    return gated ? value * rest : value;
  }
}

}  // namespace tunedgemm::moe
