// CK's kernels of both stages in plain loops, after its headers of November 2025: rows of blocks,
// operands by token or by pair, weights in pieces of 16 bytes of 16 rows, scales, weights of the
// routing, the activation. Include gpu.h before.
#include <array>
#include <cmath>

using hipStream_t = cudaStream_t;
using hipError_t = cudaError_t;
constexpr hipError_t hipSuccess = 0, hipErrorUnknown = 999;
inline hipError_t hipGetLastError() { return hipSuccess; }
inline hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) { return std::memset(to, value, bytes), hipSuccess; }

#define TUNED_GEMM_CHECK(condition) \
  if (!(condition)) throw 1

struct StreamConfig {
  hipStream_t stream_id_;
  bool time_kernel_;
};

namespace ck {
using index_t = int32_t;
}

namespace tunedgemm::stage {

struct Same {};
struct Epilogue {};
using Element = std::conditional_t<moe::width(problem::quantised) == 2, uint16_t, uint8_t>;
using In = Element;

struct Arguments {
  const int32_t *rows, *experts, *valid;
  const Element *x, *weight;
  const float *x_scale, *w_scale, *factor;
  uint16_t* out;
  int64_t tokens, topk, m, n, k;
};

// Element (row, column) of a shuffled weight of *k* columns.
inline int64_t spot(int64_t row, int64_t column, int64_t k) {
  constexpr int64_t piece = 16 / sizeof(Element);
  return row / 16 * 16 * k + column / piece * 16 * piece + row % 16 * piece + column % piece;
}

inline float product(const Arguments& of, int64_t expert, int64_t row, int64_t token, int64_t n, int64_t high) {
  const int64_t wide = of.k / 128;
  const Element* weight = of.weight + expert * high * of.k;
  double sum = 0, part = 0;
  for (int64_t k = 0; k < of.k; ++k) {
    part += double{moe::decoded<problem::quantised>(of.x[row * of.k + k])} * moe::decoded<problem::quantised>(weight[spot(n, k, of.k)]);
    if (blocks && k % 128 == 127) {
      part *= double{of.x_scale[row * wide + k / 128]} * of.w_scale[(expert * (high / 128) + n / 128) * wide + k / 128];
    }
    if (!blocks || k % 128 == 127) sum += part, part = 0;
  }
  if (problem::kind == moe::Kind::tensor) sum *= double{of.x_scale[0]} * of.w_scale[expert];
  if (problem::kind == moe::Kind::row) sum *= double{of.x_scale[row]} * of.w_scale[expert * high + n];
  return static_cast<float>(sum * (weighted ? of.factor[token] : 1.0f));
}

struct Gemm {
  template <class Ds>
  static Arguments made(const int32_t* rows, const int32_t* experts, const int32_t* valid, const void* x, const void* weight, const Ds& ds,
                        void* out, std::array<int, 5> sizes) {
    const auto [tokens, topk, m, n, k] = sizes;
    TUNED_GEMM_CHECK(m % tile_m == 0);
    return {rows, experts, valid, static_cast<const Element*>(x), static_cast<const Element*>(weight), nullptr, nullptr,
            static_cast<const float*>(ds.back()), static_cast<uint16_t*>(out), tokens, topk, m, n, k};
  }
  // without block scales: both scales are among the operands of the epilogue
  static Arguments MakeArgument(const int32_t* rows, const int32_t* experts, const int32_t* valid, const void* x, const void* weight,
                                std::array<const void*, 3> ds, void* out, int tokens, int topk, int m, int n, int k, int stride_x,
                                int stride_w, std::array<int, 3> strides, int stride_out, int parts, Same, Same, Epilogue) {
    TUNED_GEMM_CHECK(stride_x == k && stride_w == k && stride_out == n && parts == 1 && strides[0] == 0);
    Arguments made_of = made(rows, experts, valid, x, weight, ds, out, {tokens, topk, m, n, k});
    made_of.x_scale = static_cast<const float*>(ds[0]), made_of.w_scale = static_cast<const float*>(ds[1]);
    return made_of;
  }
  static Arguments MakeArgument(const int32_t* rows, const int32_t* experts, const int32_t* valid, const void* x, const void* weight,
                                std::array<const void*, 1> ds, void* out, int tokens, int topk, int m, int n, int k, int stride_x,
                                int stride_w, std::array<int, 1> strides, int stride_out, const void* x_scale, const void* w_scale, int parts, Same, Same,
                                Epilogue) {
    TUNED_GEMM_CHECK(stride_x == k && stride_w == k && stride_out == n && parts == 1 && strides[0] == 0);
    Arguments made_of = made(rows, experts, valid, x, weight, ds, out, {tokens, topk, m, n, k});
    made_of.x_scale = static_cast<const float*>(x_scale), made_of.w_scale = static_cast<const float*>(w_scale);
    return made_of;
  }
  static bool IsSupportedArgument(const Arguments&) { return true; }
  static Gemm MakeInvoker() { return {}; }

  void Run(const Arguments& of, const StreamConfig&) const {
    constexpr moe::Type output = first ? problem::hidden : problem::output;
    TUNED_GEMM_CHECK(*of.valid <= of.m);
    for (int64_t at = 0; at < *of.valid; ++at) {
      const int64_t token = of.rows[at] & 0xffffff, pair = token * of.topk + (of.rows[at] >> 24), expert = of.experts[at / tile_m];
      for (int64_t n = 0; n < of.n && token < of.tokens; ++n) {
        if (first) {
          const float gate = product(of, expert, token, at, n, 2 * of.n), rest = product(of, expert, token, at, of.n + n, 2 * of.n);
          of.out[pair * of.n + n] = static_cast<uint16_t>(moe::encoded<output>(moe::activated<problem::act, true>(gate, rest)));
        } else {
          uint16_t& to = of.out[token * of.n + n];
          to = static_cast<uint16_t>(moe::encoded<output>(moe::decoded<output>(to) + product(of, expert, pair, at, n, of.n)));
        }
      }
    }
  }
};

}  // namespace tunedgemm::stage
