// Both stages of fmoe from the kernels of moe_kernels.h, whose launches the test turned into calls
// of emulate(), with loops in place of CUTLASS's products. Macros as in fake/moe.cpp.
using namespace tunedgemm::moe;

constexpr Type hidden = Type::HIDDEN, factors = Type::QUANTISED, output = Type::OUTPUT;
constexpr Kind kind = Kind::KIND, left = kind == Kind::block ? Kind::none : kind;
constexpr Type sum = kind == Kind::none ? factors : Type::bf16;

static float read(const void* base, int64_t at) {
  return decoded<factors>(width(factors) == 2 ? static_cast<const uint16_t*>(base)[at] : static_cast<const uint8_t*>(base)[at]);
}

// The rows of each expert times its weight, with block scales applied.
static void product(const int32_t* offset, int64_t experts, const void* rows, const float* row_scales, const void* weight,
                    const float* weight_scales, int64_t wide, int64_t depth, uint16_t* sums) {
  const int64_t blocks = up(depth, kBlock);
  for (int64_t expert = 0; expert < experts; expert++)
    for (int64_t row = offset[expert]; row < offset[expert + 1]; row++)
      for (int64_t n = 0; n < wide; n++) {
        float total = 0;
        for (int64_t k = 0; k < depth; k++) {
          float term = read(rows, row * depth + k) * read(weight, (expert * wide + n) * depth + k);
          const int64_t line = expert * up(wide, kBlock) + n / kBlock;
          if (kind == Kind::block) term *= row_scales[row * blocks + k / kBlock] * weight_scales[line * blocks + k / kBlock];
          total += term;
        }
        sums[row * wide + n] = static_cast<uint16_t>(encoded<sum>(total));
      }
}

extern "C" long needed(const TunedGemmMoe* call) { return layout_of(*call, kind, factors).end; }

extern "C" void both(const TunedGemmMoe* given) {
  const TunedGemmMoe& call = *given;
  const Layout layout = layout_of(call, kind, factors);
  const Routing routing = routing_of(call, layout);
  const int64_t pairs = call.tokens * call.topk, wide = call.inter_dim * (GATED ? 2 : 1);
  std::vector<float> scales(scales_of(kind, pairs, call.model_dim) + 1, NAN);
  std::vector<uint4> rows(pairs * call.model_dim / 8 + 1), sums(pairs * wide / 8 + 1), more(pairs * call.model_dim / 8 + 1);
  std::vector<uint32_t> tops(kTops, 0xffffffff);
  for (auto* each : {&rows, &sums, &more}) memset(each->data(), 0xff, each->size() * sizeof(uint4));
  const auto *w1_scale = static_cast<const float*>(call.w1_scale), *w2_scale = static_cast<const float*>(call.w2_scale);
  const auto *ids = static_cast<const int32_t*>(call.topk_ids);
  const auto *weight = static_cast<const float*>(call.topk_weight);
  auto* middle_scale = at<float>(call, layout.middle_scale);

  launch_route(call, layout, Nothing{}, nullptr);
  const Quantised first{rows.data(), scales.data(), call.model_dim, static_cast<const float*>(call.a1_scale), tops.data()};
  const ToPlaces places{routing.place, static_cast<int>(call.topk)};
  launch_quantise<kind, factors>(Rows<hidden>{call.hidden, call.model_dim}, places, call.tokens, first, nullptr);
  auto* halves = reinterpret_cast<uint16_t*>(sums.data());
  product(routing.offset, call.experts, rows.data(), scales.data(), call.w1, w1_scale, wide, call.model_dim, halves);
  const Activated<sum, left, Act::ACT, GATED, WEIGHT_FIRST> activated{sums.data(), call.inter_dim, scales.data(), w1_scale,
                                                                      routing.order, ids, weight};
  const Quantised second{at<char>(call, layout.middle), middle_scale, call.inter_dim, static_cast<const float*>(call.a2_scale), tops.data()};
  launch_quantise<kind, factors>(activated, IfCounted{routing.offset + call.experts}, pairs, second, nullptr);

  halves = reinterpret_cast<uint16_t*>(more.data());
  product(routing.offset, call.experts, second.rows, middle_scale, call.w2, w2_scale, call.model_dim, call.inter_dim, halves);
  const Combined combined{more.data(), call.model_dim, middle_scale, w2_scale, routing.place, ids, weight,
                          static_cast<int>(call.topk), call.out};
  launch_combine<sum, left, output, !WEIGHT_FIRST>(combined, call.tokens, nullptr);
}
