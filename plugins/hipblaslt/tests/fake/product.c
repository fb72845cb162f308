/* Product in host memory: operands as float, sums in double, one rounding. */
#include "fake.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float half(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) {
        return mantissa ? NAN : sign * INFINITY;
    }
    return sign * (exponent ? ldexpf(1024.0f + (float)mantissa, exponent - 25) : ldexpf((float)mantissa, -24));
}

/* Round to nearest even at 11 bits of mantissa, or at multiples of 2^-24 below the normal numbers. */
static uint16_t to_half(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (size >= 65520.0f) {
        return sign | 0x7c00;
    }
    if (size < 0x1p-14f) {
        return sign | (uint16_t)lrintf(size * 0x1p24f);
    }
    int exponent = ilogbf(size);
    int mantissa = (int)lrintf(ldexpf(size, 10 - exponent)); /* 1024..2048; 2048 carries into the exponent */
    return sign | (uint16_t)(((exponent + 14) << 10) + mantissa);
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value)) {
        return 0x7fc0;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* fn: bias 7, NaN 0x7f and 0xff; fnuz: bias 8, NaN 0x80; both without infinities. */
static float e4m3(uint8_t bits, int fnuz) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7, bias = fnuz ? 8 : 7;
    if (fnuz ? bits == 0x80 : (bits & 0x7f) == 0x7f) {
        return NAN;
    }
    float size = exponent ? ldexpf(8.0f + (float)mantissa, exponent - bias - 3) : ldexpf((float)mantissa, 1 - bias - 3);
    return bits >> 7 ? -size : size;
}

static double load(const void *memory, int64_t i, int type) {
    switch (type) {
    case R_16F: return half(((const uint16_t *)memory)[i]);
    case R_16BF: return from_bits((uint32_t)((const uint16_t *)memory)[i] << 16);
    case R_8I: return ((const int8_t *)memory)[i];
    case R_32I: return ((const int32_t *)memory)[i];
    case R_E4M3: return e4m3(((const uint8_t *)memory)[i], 0);
    case R_E4M3_FNUZ: return e4m3(((const uint8_t *)memory)[i], 1);
    default: return ((const float *)memory)[i];
    }
}

static void store(void *memory, int64_t i, int type, double value) {
    switch (type) {
    case R_16F: ((uint16_t *)memory)[i] = to_half((float)value); break;
    case R_16BF: ((uint16_t *)memory)[i] = to_bf16((float)value); break;
    case R_32I: ((int32_t *)memory)[i] = (int32_t)value; break;
    default: ((float *)memory)[i] = (float)value;
    }
}

/* Offset of an element: column-major, or tiles of 16 columns by 16-byte packs along the rows. */
static int64_t offset(const Matrix *x, int64_t row, int64_t col) {
    if (x->order == ORDER_COL) {
        return row + col * x->ld;
    }
    int64_t pack = 16 / lt_size(x->type);
    return col / 16 * 16 * x->ld + row / pack * 16 * pack + col % 16 * pack + row % pack;
}

/* Copy of op(A), or of op(B) transposed, as [outer][k] floats. */
static float *packed(const Matrix *x, const void *memory, int64_t batch, int64_t outer, int64_t k, int k_along_rows) {
    float table[256];
    for (int bits = 0; lt_is_fp8(x->type) && bits < 256; bits++) {
        table[bits] = e4m3((uint8_t)bits, x->type == R_E4M3_FNUZ);
    }
    float *copy = malloc((size_t)(outer * k) * sizeof *copy);
    for (int64_t i = 0; copy && i < outer; i++) {
        for (int64_t j = 0; j < k; j++) {
            int64_t at = batch * x->stride + (k_along_rows ? offset(x, j, i) : offset(x, i, j));
            copy[i * k + j] = lt_is_fp8(x->type) ? table[((const uint8_t *)memory)[at]] : (float)load(memory, at, x->type);
        }
    }
    return copy;
}

static double dot(const float *x, const float *y, int64_t count) {
    double sums[4] = {0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        for (int lane = 0; lane < 4; lane++) {
            sums[lane] += (double)x[i + lane] * y[i + lane];
        }
    }
    for (; i < count; i++) {
        sums[0] += (double)x[i] * y[i];
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* Scale of row `outer` of a packed operand in a block of K. VEC128: [k / 128][outers], outers innermost.
 * BLK128x128: [outers / 128][k / 128], K innermost, a row of K padded to a multiple of 4 (cuBLAS
 * manual, 2D block scaling). */
static double scale(const float *scales, int mode, int64_t outer, int64_t outers, int64_t block, int64_t blocks) {
    switch (mode) {
    case SCALE_OUTER_VEC: return scales[outer];
    case SCALE_VEC128: return scales[block * outers + outer];
    case SCALE_BLK128: return scales[outer / 128 * ((blocks + 3) / 4 * 4) + block];
    default: return scales ? *scales : 1.0;
    }
}

static double element(const Problem *p, const float *a, const float *b, int64_t i, int64_t j, int64_t depth) {
    int blockwise = p->mode_a == SCALE_VEC128 || p->mode_a == SCALE_BLK128;
    int64_t step = blockwise ? 128 : p->k, blocks = (p->k + step - 1) / step;
    double sum = 0;
    for (int64_t block = 0; block * step < depth; block++) {
        int64_t from = block * step, count = depth - from < step ? depth - from : step;
        sum += dot(a + i * p->k + from, b + j * p->k + from, count) * scale(p->scale_a, p->mode_a, i, p->m, block, blocks) *
               scale(p->scale_b, p->mode_b, j, p->n, block, blocks);
    }
    return sum;
}

/* Compute D; `wrong`: the last column sums half of K. */
int lt_product(const Problem *p, const Operands *operands, int wrong) {
    for (int64_t batch = 0; batch < p->batch; batch++) {
        float *a = packed(&p->a, operands->a, batch, p->m, p->k, p->a.transposed);
        float *b = packed(&p->b, operands->b, batch, p->n, p->k, !p->b.transposed);
        for (int64_t j = 0; a && b && j < p->n; j++) {
            for (int64_t i = 0; i < p->m; i++) {
                double value = operands->alpha * element(p, a, b, i, j, wrong && j == p->n - 1 ? p->k / 2 : p->k);
                if (operands->beta != 0) {
                    value += operands->beta * load(operands->c, batch * p->c.stride + offset(&p->c, i, j), p->c.type);
                }
                if (p->epilogue == EPILOGUE_BIAS) {
                    value += load(p->bias, batch * p->bias_stride + i, p->bias_type);
                }
                store(operands->d, batch * p->d.stride + offset(&p->d, i, j), p->d.type, value);
            }
        }
        free(a);
        free(b);
        if (!a || !b) {
            return lt_refuse(ALLOC_FAILED, "out of memory");
        }
    }
    return SUCCESS;
}
