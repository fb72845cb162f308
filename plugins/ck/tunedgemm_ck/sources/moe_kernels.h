// The kernels around the two products; moe.h has their arithmetic. A thread processes 8 adjacent
// values, so rows are multiples of 8 and begin at multiples of 16 bytes (8 where they are
// quantised).
namespace tunedgemm::moe {

#if defined(__HIP__)
using Stream = hipStream_t;
using Error = hipError_t;
inline Error launched() { return hipGetLastError(); }
__device__ inline uint32_t beside(uint32_t value, int distance) { return __shfl_xor(value, distance); }
#else
using Stream = cudaStream_t;
using Error = cudaError_t;
inline Error launched() { return cudaGetLastError(); }
__device__ inline uint32_t beside(uint32_t value, int distance) { return __shfl_xor_sync(0xffffffffu, value, distance); }
#endif

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kTops = 256;  // partial maxima of one largest magnitude

template <Type type>
__device__ inline void load(const void* base, int64_t at, float (&values)[kVector]) {
  if constexpr (type == Type::fp32) {
    const auto* parts = reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
    const float4 low = parts[0], high = parts[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const uint4 part = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + at);
    const uint32_t words[4] = {part.x, part.y, part.z, part.w};
    for (int i = 0; i < kVector; i++) values[i] = decoded<type>(words[i / 2] >> 16 * (i % 2) & 0xffff);
  }
}

template <Type type>
__device__ inline void store(void* base, int64_t at, const uint32_t (&codes)[kVector]) {
  if constexpr (width(type) == 2) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + at) =
        make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, codes[4] | codes[5] << 16, codes[6] | codes[7] << 16);
  } else {
    const auto word = [&](int i) { return (codes[i] & 255) | (codes[i + 1] & 255) << 8 | (codes[i + 2] & 255) << 16 | codes[i + 3] << 24; };
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(base) + at) = make_uint2(word(0), word(4));
  }
}

__device__ inline uint32_t top_of(const float (&values)[kVector]) {
  uint32_t top = 0;
  for (int i = 0; i < kVector; i++) top = max(top, magnitude(values[i]));
  return top;
}

// Returns the largest value of a block's threads to all of them.
__device__ inline uint32_t top_of_block(uint32_t top) {
  __shared__ uint32_t tops[kThreads];
  tops[threadIdx.x] = top;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) tops[threadIdx.x] = max(tops[threadIdx.x], tops[threadIdx.x + half]);
  }
  __syncthreads();
  return tops[0];
}

// ---- routing --------------------------------------------------------------------------------------------------------------------

struct Routing {
  int32_t *order, *place, *offset;
};

inline Routing routing_of(const TunedGemmMoe& call, const Layout& layout) {
  return {at<int32_t>(call, layout.order), at<int32_t>(call, layout.place), at<int32_t>(call, layout.offset)};
}

// Called by one thread once an expert's rows are known: (expert, first place, rows).
struct Nothing {
  __device__ void operator()(int, int, int) const {}
};

// A stable counting sort. The block of an expert counts the pairs of smaller experts and its own,
// then assigns places to its own. One more block marks the pairs beyond the experts. Each thread
// has a run of pairs, so that threads in order have pairs in order.
template <class Finish>
__global__ void __launch_bounds__(kThreads) route(const int32_t* ids, int64_t pairs, int experts, Routing routing, Finish finish) {
  __shared__ int sums[2][kThreads];
  const int expert = blockIdx.x, thread = threadIdx.x;
  const int64_t step = up(pairs, kThreads), begin = thread * step, end = begin + step < pairs ? begin + step : pairs;
  const auto known = [&](int id) { return id >= 0 && id < experts; };
  const auto mine = [&](int id) { return expert < experts ? id == expert : !known(id); };
  int less = 0, equal = 0;
  for (int64_t pair = begin; pair < end; pair++) {
    const int id = ids[pair];
    less += known(id) && id < expert;
    equal += mine(id);
  }
  sums[0][thread] = less, sums[1][thread] = equal;
  for (int distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    less = thread >= distance ? sums[0][thread - distance] : 0;
    const int before = thread >= distance ? sums[1][thread - distance] : 0;
    __syncthreads();
    sums[0][thread] += less, sums[1][thread] += before;
  }
  __syncthreads();
  const int first = sums[0][kThreads - 1], rows = sums[1][kThreads - 1];
  int place = first + sums[1][thread] - equal;
  for (int64_t pair = begin; pair < end && equal > 0; pair++) {  // most threads have none
    if (!mine(ids[pair])) continue;
    if (expert < experts) routing.order[place] = static_cast<int>(pair);
    routing.place[pair] = expert < experts ? place++ : -1;
  }
  if (thread == 0) {
    routing.offset[expert] = first;
    if (expert < experts) finish(expert, first, rows);
  }
}

template <class Finish>
Error launch_route(const TunedGemmMoe& call, const Layout& layout, Finish finish, Stream stream) {
  const int experts = static_cast<int>(call.experts);
  route<<<experts + 1, kThreads, 0, stream>>>(static_cast<const int32_t*>(call.topk_ids), call.tokens * call.topk, experts,
                                              routing_of(call, layout), finish);
  return launched();
}

// ---- quantisation ---------------------------------------------------------------------------------------------------------------

// Inputs of the quantisation: the values of a matrix,
template <Type type>
struct Rows {
  const void* base;
  int64_t columns;
  __device__ void load(int64_t row, int64_t column, float (&values)[kVector]) const {
    moe::load<type>(base, row * columns + column, values);
  }
};

// or the activation of stage 1's product [places, rows of w1], which applies all scales except
// those of blocks.
template <Type sum, Kind kind, Act act, bool gated, bool weighted>
struct Activated {
  const void* product;
  int64_t inter;
  const float *x_scale, *w_scale;
  const int32_t *order, *ids;
  const float* weight;
  __device__ void load(int64_t row, int64_t column, float (&values)[kVector]) const {
    const int64_t wide = gated ? 2 * inter : inter;
    const int pair = order[row], expert = ids[pair];
    float factor = weighted ? weight[pair] : 1.0f;
    if constexpr (kind == Kind::tensor) factor *= x_scale[0] * w_scale[expert];
    if constexpr (kind == Kind::row) factor *= x_scale[row];
    float rest[kVector];
    half(row * wide, expert * wide, column, factor, values);
    if constexpr (gated) half(row * wide, expert * wide, inter + column, factor, rest);
    for (int i = 0; i < kVector; i++) values[i] = activated<act, gated>(values[i], gated ? rest[i] : 0.0f);
  }
  __device__ void half(int64_t row, int64_t scales, int64_t column, float factor, float (&values)[kVector]) const {
    moe::load<sum>(product, row + column, values);
    float scale[kVector];
    if constexpr (kind == Kind::row) moe::load<Type::fp32>(w_scale, scales + column, scale);
    for (int i = 0; i < kVector; i++) values[i] *= kind == Kind::row ? factor * scale[i] : factor;
  }
};

// Destinations of a row: the places of a token's pairs,
struct ToPlaces {
  const int32_t* place;
  int topk;
  __device__ bool has(int64_t) const { return true; }
  __device__ int copies() const { return topk; }
  __device__ int64_t to(int64_t row, int copy) const { return place[row * topk + copy]; }
};
// its own index, if below the count on the device,
struct IfCounted {
  const int32_t* count;
  __device__ bool has(int64_t row) const { return row < *count; }
  __device__ int copies() const { return 1; }
  __device__ int64_t to(int64_t row, int) const { return row; }
};
// or its own index in any case.
struct Itself {
  __device__ bool has(int64_t) const { return true; }
  __device__ int copies() const { return 1; }
  __device__ int64_t to(int64_t row, int) const { return row; }
};

struct Quantised {
  void* rows;
  float* scales;
  int64_t columns;
  const float* given;  // the scale of all values, or null
  uint32_t* tops;      // [kTops], for Kind::tensor without a given scale
};

template <class Values, class Where>
__global__ void __launch_bounds__(kThreads) find_top(Values values, Where where, int64_t rows, Quantised out) {
  uint32_t top = 0;
  for (int64_t row = blockIdx.x; row < rows && where.has(row); row += gridDim.x) {
    for (int64_t column = threadIdx.x * kVector; column < out.columns; column += kThreads * kVector) {
      float part[kVector];
      values.load(row, column, part);
      top = max(top, top_of(part));
    }
  }
  top = top_of_block(top);
  if (threadIdx.x == 0) out.tops[blockIdx.x] = top;
}

// One block per row. Values are read twice, once for the scale; the second read hits the cache.
// Kind::none does not divide.
template <Kind kind, Type target, class Values, class Where>
__global__ void __launch_bounds__(kThreads) quantise(Values values, Where where, Quantised out) {
  const int64_t row = blockIdx.x, blocks = up(out.columns, kBlock);
  if (!where.has(row)) return;
  float part[kVector], scale = 1.0f;
  if constexpr (kind == Kind::tensor) {
    static_assert(kTops == kThreads, "a thread has a part");
    scale = out.given != nullptr ? *out.given : scale_of<target>(top_of_block(out.tops[threadIdx.x]));
    if (row == 0 && threadIdx.x == 0) out.scales[0] = scale;
  }
  if constexpr (kind == Kind::row) {
    uint32_t top = 0;
    for (int64_t column = threadIdx.x * kVector; column < out.columns; column += kThreads * kVector) {
      values.load(row, column, part);
      top = max(top, top_of(part));
    }
    scale = scale_of<target>(top_of_block(top));
    for (int copy = threadIdx.x; copy < where.copies(); copy += kThreads) {
      const int64_t to = where.to(row, copy);
      if (to >= 0) out.scales[to] = scale;
    }
  }
  // All threads have the same number of iterations: those of a block of scales exchange values.
  for (int64_t first = 0; first < out.columns; first += kThreads * kVector) {
    const int64_t column = first + threadIdx.x * kVector;
    const bool inside = column < out.columns;
    uint32_t codes[kVector], top = 0;
    if (inside) values.load(row, column, part);
    if constexpr (kind == Kind::block) {
      top = inside ? top_of(part) : 0;
      for (int distance = kBlock / kVector / 2; distance > 0; distance /= 2) top = max(top, beside(top, distance));
      scale = scale_of<target>(top);
    }
    if (!inside) continue;
    for (int i = 0; i < kVector; i++) {
      if constexpr (kind == Kind::none) {
        codes[i] = encoded<target>(part[i]);
      } else {
        codes[i] = quantised<target>(part[i], scale, kind != Kind::tensor || out.given == nullptr);
      }
    }
    for (int copy = 0; copy < where.copies(); copy++) {
      const int64_t to = where.to(row, copy);
      if (to < 0) continue;
      store<target>(out.rows, to * out.columns + column, codes);
      if (kind == Kind::block && column % kBlock == 0) out.scales[to * blocks + column / kBlock] = scale;
    }
  }
}

// At most *rows* rows, of which *where* selects some.
template <Kind kind, Type target, class Values, class Where>
Error launch_quantise(Values values, Where where, int64_t rows, Quantised out, Stream stream) {
  if constexpr (kind == Kind::tensor) {
    if (out.given == nullptr) find_top<<<kTops, kThreads, 0, stream>>>(values, where, rows, out);
  }
  quantise<kind, target><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(values, where, out);
  return launched();
}

// ---- the weighted sum -----------------------------------------------------------------------------------------------------------

struct Combined {
  const void* product;  // [places, columns] of stage 2
  int64_t columns;
  const float *x_scale, *w_scale;
  const int32_t *place, *ids;
  const float* weight;
  int topk;
  void* out;
};

// out[t] = the sum over a token's pairs, in order, in float32, of the values at their places; 0
// without pairs.
template <Type sum, Kind kind, Type output, bool weighted>
__global__ void __launch_bounds__(kThreads) combine(Combined from) {
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kVector;
  if (column >= from.columns) return;
  float total[kVector] = {};
  for (int64_t pair = token * from.topk; pair < (token + 1) * from.topk; pair++) {
    const int64_t place = from.place[pair];
    if (place < 0) continue;
    float factor = weighted ? from.weight[pair] : 1.0f, part[kVector], scale[kVector];
    if constexpr (kind == Kind::tensor) factor *= from.x_scale[0] * from.w_scale[from.ids[pair]];
    if constexpr (kind == Kind::row) {
      factor *= from.x_scale[place];
      load<Type::fp32>(from.w_scale, from.ids[pair] * from.columns + column, scale);
    }
    load<sum>(from.product, place * from.columns + column, part);
    for (int i = 0; i < kVector; i++) total[i] += part[i] * (kind == Kind::row ? factor * scale[i] : factor);
  }
  uint32_t codes[kVector];
  for (int i = 0; i < kVector; i++) codes[i] = encoded<output>(total[i]);
  store<output>(from.out, token * from.columns + column, codes);
}

template <Type sum, Kind kind, Type output, bool weighted>
Error launch_combine(const Combined& from, int64_t tokens, Stream stream) {
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(up(from.columns, kThreads * kVector)));
  combine<sum, kind, output, weighted><<<grid, kThreads, 0, stream>>>(from);
  return launched();
}

}  // namespace tunedgemm::moe
