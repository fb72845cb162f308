// The launch of a stage. Stage 1: routing, quantisation of hidden states, CK's product and
// activation in 16 bits, quantisation of those. Stage 2: CK's product, which adds the rows of a
// token's pairs to the output atomically. The intermediate is stored by pair, as CK's kernels
// expect, not by place.
namespace tunedgemm::stage {

namespace problem = tunedgemm::problem;
using moe::at;
static_assert(first == (problem::stage == 1) && weighted == (first == problem::weight_first) && problem::gated == first);

// Offsets of an object's own memory, in bytes from the beginning of the workspace.
struct Own {
  int64_t hidden, hidden_scale;           // stage 1: the hidden states, quantised
  int64_t raw;                            // stage 1: the intermediate before quantisation
  int64_t tops;                           // of moe::Quantised
  int64_t rows, weights, experts, valid;  // of ck_moe::Blocks
  int64_t end;
};

inline Own own_of(const TunedGemmMoe& call, const moe::Layout& shared) {
  const int64_t pairs = call.tokens * call.topk, most = ck_moe::most_blocks(pairs, call.experts, tile_m);
  const bool quantises = scaled && first;
  moe::Pieces pieces{shared.end};
  Own own{};
  own.hidden = pieces.take(quantises ? call.tokens * call.model_dim : 0);
  own.hidden_scale = pieces.take(quantises ? 4 * moe::scales_of(problem::kind, call.tokens, call.model_dim) : 0);
  own.raw = pieces.take(quantises ? 2 * pairs * call.inter_dim : 0);
  own.tops = pieces.take(quantises ? 4 * moe::kTops : 0);
  own.rows = pieces.take(4 * most * tile_m);
  own.weights = pieces.take(4 * most * tile_m);
  own.experts = pieces.take(4 * most);
  own.valid = pieces.take(4);
  own.end = pieces.used;
  return own;
}

// The intermediate as CK's stage 1 writes it: a pair beyond the experts has no values and counts as
// zeros.
struct Raw {
  moe::Rows<problem::hidden> rows;
  const int32_t* place;
  __device__ void load(int64_t row, int64_t column, float (&values)[moe::kVector]) const {
    if (place[row] >= 0) return rows.load(row, column, values);
    for (float& value : values) value = 0.0f;
  }
};

// The operands of CK's kernel; x_scale and w_scale are null without scales.
struct Operands {
  const void *x, *weight;
  const void *x_scale, *w_scale;
  ck_moe::Blocks blocks;
  void* out;
};

template <typename Op>
auto argument_of(const TunedGemmMoe& call, const Operands& on) {
  const auto size = [](int64_t value) { return static_cast<ck::index_t>(value); };
  const ck::index_t tokens = size(call.tokens), topk = size(call.topk);
  const ck::index_t m = size(ck_moe::most_blocks(call.tokens * call.topk, call.experts, tile_m) * tile_m);
  const ck::index_t n = size(first ? call.inter_dim : call.model_dim), k = size(first ? call.model_dim : call.inter_dim);
  const auto& [rows, weights, experts, valid] = on.blocks;
  if constexpr (blocks) {
    const std::array<const void*, 1> ds{weights};
    return Op::MakeArgument(rows, experts, valid, on.x, on.weight, ds, on.out, tokens, topk, m, n, k, k, k, {0}, n, on.x_scale, on.w_scale,
                            1, Same{}, Same{}, Epilogue{});
  } else {
    const std::array<const void*, 3> ds{on.x_scale, on.w_scale, weights};
    return Op::MakeArgument(rows, experts, valid, on.x, on.weight, ds, on.out, tokens, topk, m, n, k, k, k, {0, 0, 0}, n, 1, Same{}, Same{},
                            Epilogue{});
  }
}

// Queries the device's properties once per set of sizes, since that takes longer than a launch. CK
// counts elements and bytes of an operand in 32 bits, also the elements of all experts' weights
// together, tokens in 24 bits and a token's experts in 7.
inline bool supported(const TunedGemmMoe& call) {
  thread_local int64_t known[6] = {-1, -1, -1, -1, -1, -1};
  const int64_t sizes[6] = {call.tokens, call.model_dim, call.inter_dim, call.experts, call.topk, call.split};
  bool same = true;
  for (int i = 0; i < 6; ++i) same = same && known[i] == sizes[i];
  if (same) return true;
  const int64_t pairs = call.tokens * call.topk, weight = call.model_dim * call.inter_dim * (first ? 2 : 1);
  constexpr int64_t most = int64_t{1} << 31, size = sizeof(In);
  const bool counted = moe::countable(call) && pairs < 1 << 24 && call.topk < 128 && call.split == 0 && call.experts * weight < most &&
                       weight * size < most && 2 * call.tokens * call.model_dim < most && 2 * (pairs + call.topk) * call.inter_dim < most;
  if (!counted || !Gemm::IsSupportedArgument(argument_of<Gemm>(call, Operands{}))) return false;
  for (int i = 0; i < 6; ++i) known[i] = sizes[i];
  return true;
}

// Keeps each row's index.
template <class Values>
hipError_t quantise(const Values& values, int64_t rows, const moe::Quantised& out, hipStream_t stream) {
  if constexpr (scaled) return moe::launch_quantise<problem::kind, problem::quantised>(values, moe::Itself{}, rows, out, stream);
  return hipSuccess;
}

inline hipError_t launch(const TunedGemmMoe& call, hipStream_t stream) {
  const auto shared = moe::layout_of(call, problem::kind, problem::quantised);
  const Own own = own_of(call, shared);
  const int64_t pairs = call.tokens * call.topk;
  const ck_moe::Blocks padded{at<int32_t>(call, own.rows), at<float>(call, own.weights), at<int32_t>(call, own.experts),
                              at<int32_t>(call, own.valid)};
  const moe::Quantised middle{at<char>(call, shared.middle), at<float>(call, shared.middle_scale), call.inter_dim,
                              static_cast<const float*>(call.a2_scale), at<uint32_t>(call, own.tops)};
  Operands on{middle.rows, call.w2, scaled ? middle.scales : nullptr, scaled ? call.w2_scale : nullptr, padded, call.out};
  hipError_t error = hipSuccess;
  if constexpr (first) {
    error = moe::launch_route(call, shared, moe::Nothing{}, stream);
    const moe::Quantised hidden{at<char>(call, own.hidden), at<float>(call, own.hidden_scale), call.model_dim,
                                static_cast<const float*>(call.a1_scale), at<uint32_t>(call, own.tops)};
    if (error == hipSuccess) error = quantise(moe::Rows<problem::hidden>{call.hidden, call.model_dim}, call.tokens, hidden, stream);
    on = {scaled ? hidden.rows : call.hidden, call.w1, scaled ? hidden.scales : nullptr, scaled ? call.w1_scale : nullptr, padded,
          scaled ? at<char>(call, own.raw) : middle.rows};
  } else {
    error = hipMemsetAsync(call.out, 0, 2 * call.tokens * call.model_dim, stream);
  }
  if (error != hipSuccess) return error;
  ck_moe::pad<<<static_cast<unsigned>(call.experts), ck_moe::pad_threads, 0, stream>>>(
      at<int32_t>(call, shared.order), at<int32_t>(call, shared.offset), static_cast<const float*>(call.topk_weight), padded,
      static_cast<int>(call.tokens), static_cast<int>(call.topk), tile_m);
  Gemm::MakeInvoker().Run(argument_of<Gemm>(call, on), StreamConfig{stream, false});
  if constexpr (first) {
    error = quantise(Raw{{at<char>(call, own.raw), call.inter_dim}, at<int32_t>(call, shared.place)}, pairs, middle, stream);
  }
  return error == hipSuccess ? hipGetLastError() : error;
}

}  // namespace tunedgemm::stage

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmMoe* call) {
  using namespace tunedgemm;
  return stage::supported(*call) ? stage::own_of(*call, moe::layout_of(*call, problem::kind, problem::quantised)).end : -1;
}

TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmMoe* call, void* stream) try {
  return tunedgemm::stage::supported(*call) ? static_cast<int>(tunedgemm::stage::launch(*call, static_cast<hipStream_t>(stream)))
                                             : TUNED_GEMM_UNSUPPORTED;
} catch (...) {  // CK throws where a launch fails
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? static_cast<int>(hipErrorUnknown) : static_cast<int>(error);
}
