// The routing as CK's kernels read it: the rows of each expert, padded to whole blocks of a tile's
// rows.
namespace tunedgemm::ck_moe {

// A row is token | index among the token's experts << 24. Padding rows have the number of tokens,
// which is beyond the operands, so that CK reads zeros and writes nothing.
struct Blocks {
  int32_t* rows;     // [most * tile]
  float* weights;    // [most * tile], of the routing; 0 for padding
  int32_t* experts;  // [most]
  int32_t* valid;    // [1]: rows of the used blocks
};

// The maximum of blocks for any routing of these sizes: each hit expert leaves less than one block
// empty.
inline int64_t most_blocks(int64_t pairs, int64_t experts, int64_t tile) {
  const int64_t hit = pairs < experts ? pairs : experts;
  const int64_t most = (pairs + hit * (tile - 1)) / tile;
  return most < pairs ? most : pairs;
}

constexpr int pad_threads = 256;

// One block per expert, whose offset follows from the counts before it, so that the order of blocks
// does not matter.
__global__ void __launch_bounds__(pad_threads)
    pad(const int32_t* order, const int32_t* offset, const float* weight, Blocks blocks, int tokens, int topk, int tile) {
  __shared__ int before[pad_threads];
  const int expert = blockIdx.x, thread = threadIdx.x;
  int sum = 0;
  for (int e = thread; e < expert; e += pad_threads) sum += (offset[e + 1] - offset[e] + tile - 1) / tile;
  before[thread] = sum;
  __syncthreads();
  for (int half = pad_threads / 2; half > 0; half /= 2) {
    if (thread < half) before[thread] += before[thread + half];
    __syncthreads();
  }
  const int start = before[0], count = offset[expert + 1] - offset[expert], mine = (count + tile - 1) / tile;
  for (int i = thread; i < mine * tile; i += pad_threads) {
    const int pair = i < count ? order[offset[expert] + i] : -1;
    const int64_t at = static_cast<int64_t>(start) * tile + i;
    blocks.rows[at] = pair < 0 ? tokens : pair / topk | pair % topk << 24;
    blocks.weights[at] = pair < 0 ? 0.0f : weight[pair];
  }
  for (int i = thread; i < mine; i += pad_threads) blocks.experts[start + i] = expert;
  if (expert == static_cast<int>(gridDim.x) - 1 && thread == 0) *blocks.valid = (start + mine) * tile;
}

}  // namespace tunedgemm::ck_moe
