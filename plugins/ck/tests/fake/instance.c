/* The op of a source's first line, computed in host memory, in order, in double.
 *
 * Macros select the op: X_TYPE, W_TYPE, OUT_TYPE, BIAS_TYPE (numbers below), SCALE (0 none,
 * 1 tensor, 2 row, 3 block), FP4 (groups of 32 share an e8m0 scale), SHUFFLED (rows whose 16-byte
 * pieces are adjacent; 0 for a plain weight), TRANSPOSED (scales of x).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "call.h"

enum { NONE, BF16, FP16, FP32, INT8, E4M3FN, E4M3FNUZ, FP4X2 };

static double of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static double fp8(uint8_t byte, int fnuz) {
  int exponent = byte >> 3 & 15, fraction = byte & 7, bias = fnuz ? 8 : 7;
  double value = exponent ? ldexp(1 + fraction / 8.0, exponent - bias) : ldexp(fraction / 8.0, 1 - bias);
  if (fnuz ? byte == 0x80 : (byte & 0x7f) == 0x7f) return NAN;
  return byte & 0x80 ? -value : value;
}

static double fp4(uint8_t nibble) {
  static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return nibble & 8 ? -values[nibble & 7] : values[nibble & 7];
}

static double read(const void *base, int type, int64_t at) {
  switch (type) {
    case BF16: return of_bits((uint32_t)((const uint16_t *)base)[at] << 16);
    case FP16: return (double)((const _Float16 *)base)[at];
    case FP32: return ((const float *)base)[at];
    case INT8: return ((const int8_t *)base)[at];
    case E4M3FN: return fp8(((const uint8_t *)base)[at], 0);
    case E4M3FNUZ: return fp8(((const uint8_t *)base)[at], 1);
    case FP4X2: return fp4(((const uint8_t *)base)[at / 2] >> (at % 2 * 4) & 15);
  }
  return NAN;
}

static void write(void *base, int type, int64_t at, double value) {
  float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, 4);
  if (type == FP32) ((float *)base)[at] = single;
  if (type == FP16) ((_Float16 *)base)[at] = (_Float16)single;
  if (type == BF16) ((uint16_t *)base)[at] = isnan(single) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Index of element (n, k) of a weight. */
static int64_t place(int64_t n, int64_t k, int64_t depth) {
  int64_t pack = W_TYPE == FP4X2 ? 32 : W_TYPE == BF16 || W_TYPE == FP16 ? 8 : 16;
  if (!SHUFFLED) return n * depth + k;
  return n / SHUFFLED * SHUFFLED * depth + k / pack * SHUFFLED * pack + n % SHUFFLED * pack + k % pack;
}

/* The e8m0 scale of a row and a group of 32; with a shuffled weight in the order of AITER's
 * shuffle_scale. */
static double e8m0(const void *scales, int64_t row, int64_t group, int64_t groups) {
  int64_t wide = (groups + 7) / 8, at = row * groups + group;
  if (SHUFFLED) {
    int64_t blocks = row / 32 * wide + group / 8;
    at = (((blocks * 4 + group % 4) * 16 + row % 16) * 2 + group % 8 / 4) * 2 + row % 32 / 16;
  }
  return ldexp(1.0, ((const uint8_t *)scales)[at] - 127);
}

static double product(const TunedGemmCall *c, int64_t b, int64_t m, int64_t n) {
  const float *xs = c->x_scale, *ws = c->w_scale;
  int64_t blocks = (c->k + 127) / 128;
  double sum = 0;
  for (int64_t k = 0; k < c->k; k++) {
    double x = read(c->x, X_TYPE, (b * c->m + m) * c->k + k), w = read(c->weight, W_TYPE, b * c->n * c->k + place(n, k, c->k));
    if (FP4) w *= e8m0(c->w_scale, n, k / 32, c->k / 32);
    if (FP4 && X_TYPE == FP4X2) x *= e8m0(c->x_scale, m, k / 32, c->k / 32);
    if (!FP4 && SCALE == 3) x *= (double)xs[TRANSPOSED ? k / 128 * c->m + m : m * blocks + k / 128] * ws[n / 128 * blocks + k / 128];
    sum += x * w;
  }
  if (SCALE == 1) sum *= (double)xs[0] * ws[0];
  if (SCALE == 2) sum *= (double)xs[b * c->m + m] * ws[b * c->n + n];
  return BIAS_TYPE ? sum + read(c->bias, BIAS_TYPE, b * c->n + n) : sum;
}

int64_t tunedgemm_workspace(const TunedGemmCall *call) { return call->split > 1 ? call->split * 64 : 0; }

int tunedgemm_launch(const TunedGemmCall *call, void *stream) {
  (void)stream;
  if (tunedgemm_workspace(call)) {
    if (!call->workspace) return 1;
    memset(call->workspace, 0xff, (size_t)tunedgemm_workspace(call));
  }
  for (int64_t b = 0; b < call->batches; b++)
    for (int64_t m = 0; m < call->m; m++)
      for (int64_t n = 0; n < call->n; n++) write(call->out, OUT_TYPE, (b * call->m + m) * call->n + n, product(call, b, m, n));
  return 0;
}
