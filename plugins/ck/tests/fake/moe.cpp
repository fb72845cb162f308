// A stage of fmoe, computed in host memory with the arithmetic of moe.h, products in double.
//
// Macros select the stage: STAGE, HIDDEN, QUANTISED, OUTPUT (of moe::Type), KIND (of moe::Kind),
// ACT (of moe::Act), GATED, WEIGHT_FIRST, SHUFFLED (rows of a weight whose 16-byte pieces are
// adjacent; 0 for a plain one).
#include <algorithm>
#include <cstring>
#include <vector>

#include "../../tunedgemm_ck/sources/moe_call.h"
#include "../../tunedgemm_ck/sources/moe.h"

using namespace tunedgemm::moe;

namespace {

constexpr Type hidden = Type::HIDDEN, factors = Type::QUANTISED, output = Type::OUTPUT;
constexpr Kind kind = Kind::KIND;

template <Type type>
float read(const void* base, int64_t at) {
  return decoded<type>(width(type) == 2 ? static_cast<const uint16_t*>(base)[at] : static_cast<const uint8_t*>(base)[at]);
}
template <Type type>
void write(void* base, int64_t at, uint32_t code) {
  if (width(type) == 2) static_cast<uint16_t*>(base)[at] = static_cast<uint16_t>(code);
  else static_cast<uint8_t*>(base)[at] = static_cast<uint8_t>(code);
}

// Index of element (n, k) of a weight.
int64_t spot(int64_t n, int64_t k, int64_t depth) {
  constexpr int64_t rows = SHUFFLED ? SHUFFLED : 1, pack = 16 / width(factors);
  return SHUFFLED ? n / rows * rows * depth + k / pack * rows * pack + n % rows * pack + k % pack : n * depth + k;
}

int64_t place_of(Kind of, int64_t row, int64_t column, int64_t columns) {
  return of == Kind::tensor ? 0 : of == Kind::row ? row : row * up(columns, kBlock) + column / kBlock;
}

// Rows [rows, columns] as stored, with their scales.
void quantise_rows(const std::vector<float>& values, int64_t rows, int64_t columns, const void* given, void* stored, float* scales) {
  std::vector<uint32_t> tops(scales_of(kind, rows, columns), 0);
  for (int64_t row = 0; row < rows && kind != Kind::none; row++)
    for (int64_t column = 0; column < columns; column++) {
      uint32_t& top = tops[place_of(kind, row, column, columns)];
      top = std::max(top, magnitude(values[row * columns + column]));
    }
  if constexpr (kind != Kind::none)
    for (size_t i = 0; i < tops.size(); i++) scales[i] = given ? *static_cast<const float*>(given) : scale_of<factors>(tops[i]);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < columns; column++) {
      const float value = values[row * columns + column];
      if constexpr (kind == Kind::none) write<factors>(stored, row * columns + column, encoded<factors>(value));
      else write<factors>(stored, row * columns + column, quantised<factors>(value, scales[place_of(kind, row, column, columns)], !given));
    }
}

// Row *row* of the activations times row *n* of an expert's weight.
double product(const void* x, const float* x_scale, int64_t row, const void* weight, const float* w_scale, int64_t expert, int64_t n,
               int64_t high, int64_t depth) {
  const int64_t blocks = up(depth, kBlock);
  double sum = 0;
  for (int64_t k = 0; k < depth; k++) {
    double term = double(read<factors>(x, row * depth + k)) * read<factors>(weight, expert * high * depth + spot(n, k, depth));
    const int64_t block = k / kBlock, line = expert * up(high, kBlock) + n / kBlock;
    if (kind == Kind::block) term *= double(x_scale[row * blocks + block]) * w_scale[line * blocks + block];
    sum += term;
  }
  if (kind == Kind::tensor) sum *= double(x_scale[0]) * w_scale[expert];
  if (kind == Kind::row) sum *= double(x_scale[row]) * w_scale[expert * high + n];
  return sum;
}

void route(const TunedGemmMoe& c, const Layout& layout) {
  const auto* ids = static_cast<const int32_t*>(c.topk_ids);
  auto *order = at<int32_t>(c, layout.order), *place = at<int32_t>(c, layout.place), *offset = at<int32_t>(c, layout.offset);
  int32_t count = 0;
  for (int64_t pair = 0; pair < c.tokens * c.topk; pair++) place[pair] = -1;
  for (int64_t expert = 0; expert < c.experts; expert++) {
    offset[expert] = count;
    for (int64_t pair = 0; pair < c.tokens * c.topk; pair++)
      if (ids[pair] == expert) order[place[pair] = count++] = static_cast<int32_t>(pair);
  }
  offset[c.experts] = count;
}

#if STAGE == 1
void compute(const TunedGemmMoe& c, const Layout& layout) {
  route(c, layout);
  const int64_t high = c.inter_dim * (GATED ? 2 : 1), rows = at<int32_t>(c, layout.offset)[c.experts];
  std::vector<float> x(c.tokens * c.model_dim), x_scale(scales_of(kind, c.tokens, c.model_dim)), middle(rows * c.inter_dim);
  for (size_t i = 0; i < x.size(); i++) x[i] = read<hidden>(c.hidden, i);
  std::vector<uint16_t> stored(x.size());
  quantise_rows(x, c.tokens, c.model_dim, c.a1_scale, stored.data(), x_scale.data());
  for (int64_t row = 0; row < rows; row++) {
    const int64_t pair = at<int32_t>(c, layout.order)[row], token = pair / c.topk, expert = static_cast<const int32_t*>(c.topk_ids)[pair];
    const float factor = WEIGHT_FIRST ? static_cast<const float*>(c.topk_weight)[pair] : 1.0f;
    const auto one = [&](int64_t n) {
      const auto* w_scale = static_cast<const float*>(c.w1_scale);
      return float(product(stored.data(), x_scale.data(), token, c.w1, w_scale, expert, n, high, c.model_dim)) * factor;
    };
    for (int64_t i = 0; i < c.inter_dim; i++)
      middle[row * c.inter_dim + i] = activated<Act::ACT, GATED>(one(i), GATED ? one(c.inter_dim + i) : 0.0f);
  }
  quantise_rows(middle, rows, c.inter_dim, c.a2_scale, at<char>(c, layout.middle), at<float>(c, layout.middle_scale));
}
#else
void compute(const TunedGemmMoe& c, const Layout& layout) {
  const auto* place = at<int32_t>(c, layout.place);
  for (int64_t token = 0; token < c.tokens; token++)
    for (int64_t n = 0; n < c.model_dim; n++) {
      float sum = 0;
      for (int64_t pair = token * c.topk; pair < (token + 1) * c.topk; pair++) {
        if (place[pair] < 0) continue;
        const int64_t expert = static_cast<const int32_t*>(c.topk_ids)[pair];
        const auto *x_scale = at<float>(c, layout.middle_scale), *w_scale = static_cast<const float*>(c.w2_scale);
        const double part = product(at<char>(c, layout.middle), x_scale, place[pair], c.w2, w_scale, expert, n, c.model_dim, c.inter_dim);
        sum += float(part) * (WEIGHT_FIRST ? 1.0f : static_cast<const float*>(c.topk_weight)[pair]);
      }
      write<output>(c.out, token * c.model_dim + n, encoded<output>(sum));
    }
}
#endif

}  // namespace

int64_t tunedgemm_workspace(const TunedGemmMoe* call) {
  return call->split > 1 || !countable(*call) ? -1 : layout_of(*call, kind, factors).end + 64 * STAGE;
}

int tunedgemm_launch(const TunedGemmMoe* call, void*) {
  const Layout layout = layout_of(*call, kind, factors);
  // Earlier contents must not matter: stage 1 overwrites all of it, stage 2 its own memory.
  const int64_t begin = STAGE == 1 ? 0 : layout.end;
  memset(at<char>(*call, begin), 0xff, layout.end + 64 * STAGE - begin);
  compute(*call, layout);
  return 0;
}
