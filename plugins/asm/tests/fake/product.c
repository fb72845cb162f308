/* The products: each kernel's output computed from the bytes of its arguments, in float32, over host memory.
 *
 * Only the tiles of the grid are computed. Arguments that a launcher leaves at zero, and padding, must be zero.
 */
#include "fake.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEMAPHORES 1024 /* AITER: uint32 [16, 64] */

/* A bit for each byte of the arguments that somebody read. */
typedef struct {
    const unsigned char *bytes;
    unsigned char seen[4096];
    uint64_t size;
} Reader;

static uint64_t take(Reader *reader, unsigned offset, unsigned bytes) {
    uint64_t value = 0;
    memcpy(&value, reader->bytes + offset, bytes);
    memset(reader->seen + offset, 1, bytes);
    return value;
}
static uint64_t address(Reader *reader, unsigned offset) { return take(reader, offset, 8); }
static uint32_t number(Reader *reader, unsigned offset) { return (uint32_t)take(reader, offset, 4); }
static float real(Reader *reader, unsigned offset) {
    const uint32_t bits = number(reader, offset);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static int rest_is_zero(const Reader *reader) {
    uint64_t i;
    for (i = 0; i < reader->size; i++)
        if (!reader->seen[i] && reader->bytes[i])
            return refuse(INVALID_VALUE, "byte %#llx of the arguments is set", (unsigned long long)i);
    return SUCCESS;
}

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static float bf16(const void *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return from_bits((uint32_t)bits << 16);
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value))
        return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static float fp8_value(unsigned char bits, int fnuz) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7, bias = fnuz ? 8 : 7;
    const float sign = bits & 128 ? -1.0f : 1.0f;
    if (fnuz ? bits == 128 : (bits & 127) == 127)
        return NAN;
    return sign * (exponent ? ldexpf(8.0f + mantissa, exponent - bias - 3) : ldexpf(mantissa, 1 - bias - 3));
}
static float fp8_values[2][256];
__attribute__((constructor)) static void fill_fp8(void) {
    int i;
    for (i = 0; i < 512; i++)
        fp8_values[i / 256][i % 256] = fp8_value((unsigned char)i, i / 256);
}
static float fp8(unsigned char bits, int fnuz) { return fp8_values[fnuz][bits]; }
static float fp4(unsigned nibble) {
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return nibble & 8 ? -values[nibble & 7] : values[nibble & 7];
}

/* What a kernel was told, in one form for all layouts; strides in bytes. */
typedef struct {
    uint64_t out, a, b, a_scale, b_scale, bias;
    uint64_t stride_out, stride_a, stride_b;
    uint32_t m, n, k, splits, add_bias, out_bf16;
    uint32_t scale_m, scale_k;             /* fp8 */
    uint32_t a_groups, b_groups;           /* fp4: bytes of a row of scales */
    uint64_t workspace, semaphore;
    uint32_t part, tiles_m, tiles_n;       /* OWN */
    float alpha;
} Told;

/* Where a weight's packs of 16 bytes lie: those of 16 rows side by side where it is shuffled. */
static uint64_t place(const Kernel *kernel, uint64_t row, uint64_t byte, uint64_t stride) {
    if (!kernel->shuffled)
        return row * stride + byte;
    return row / 16 * 16 * stride + byte / 16 * 256 + row % 16 * 16 + byte % 16;
}

static float scale_fp4(uint64_t scales, uint32_t groups, uint64_t row, uint64_t group) {
    const uint64_t a = row / 32, b = row / 16 % 2, c = row % 16, d = group / 8, e = group / 4 % 2, f = group % 4;
    const unsigned char bits = ((const unsigned char *)scales)[((((a * (groups / 8) + d) * 4 + f) * 16 + c) * 2 + e) * 2 + b];
    return bits == 255 ? NAN : ldexpf(1.0f, bits - 127);
}

/* The products of the values in one pack of 16 bytes of the weight, whose first is that of k; x lies at a. */
static float pack_floats(const Kernel *kernel, const unsigned char *a, const unsigned char *w, uint64_t values) {
    float total = 0.0f;
    uint64_t i;
    for (i = 0; i < values; i++)
        switch (kernel->abi) {
        case FP8: total += fp8(a[i], kernel->fnuz) * fp8(w[i], kernel->fnuz); break;
        case FP4: total += fp4(a[i / 2] >> 4 * (i % 2) & 15) * fp4(w[i / 2] >> 4 * (i % 2) & 15); break;
        default: total += bf16(a + 2 * i) * bf16(w + 2 * i);
        }
    return total;
}

/* The sum over k in [begin, end), which are wholes of packs, of one element of the output, before its bias. */
static float sum(const Kernel *kernel, const Told *t, uint64_t row, uint64_t column, uint64_t begin, uint64_t end) {
    const unsigned char *a = (const unsigned char *)t->a + row * t->stride_a, *b = (const unsigned char *)t->b;
    const uint64_t values = kernel->abi == FP4 ? 32 : kernel->abi == INT8 || kernel->abi == FP8 ? 16 : 8;
    float total = 0.0f, block = 0.0f;
    int64_t whole = 0;
    uint64_t k;
    int i;
    for (k = begin; k < end; k += values) {
        const uint64_t byte = k * 16 / values;
        const unsigned char *x = a + byte, *w = b + place(kernel, column, byte, t->stride_b);
        switch (kernel->abi) {
        case INT8:
            for (i = 0; i < 16; i++)
                whole += (int)(signed char)x[i] * (int)(signed char)w[i];
            break;
        case FP8: /* one scale for 128 of K */
            block += pack_floats(kernel, x, w, values);
            if ((k + values) % 128 == 0) {
                total += block * ((const float *)t->a_scale)[k / 128 * t->scale_m + row] * ((const float *)t->b_scale)[column / 128 * t->scale_k + k / 128];
                block = 0.0f;
            }
            break;
        case FP4: /* one scale for 32 of K */
            total += pack_floats(kernel, x, w, values) * scale_fp4(t->a_scale, t->a_groups, row, k / 32) * scale_fp4(t->b_scale, t->b_groups, column, k / 32);
            break;
        default: total += pack_floats(kernel, x, w, values);
        }
    }
    if (kernel->abi == INT8)
        return (float)whole * ((const float *)t->a_scale)[row] * ((const float *)t->b_scale)[column];
    return t->alpha * total;
}

/* float32 for scaled operands; of our own kernels as the output is; AITER's of bf16 load 2 bytes for each column whatever the output is. */
static int wide_bias(const Kernel *kernel, const Told *t) {
    return kernel->abi == INT8 || kernel->abi == FP8 || (kernel->abi == OWN && !t->out_bf16);
}

static float biased(const Kernel *kernel, const Told *t, uint64_t column) {
    if (!t->add_bias)
        return 0.0f;
    if (wide_bias(kernel, t))
        return ((const float *)t->bias)[column];
    return bf16((const unsigned char *)t->bias + 2 * column);
}

static void put(const Told *t, uint64_t row, uint64_t column, float value, int added) {
    unsigned char *at = (unsigned char *)t->out + row * t->stride_out + column * (t->out_bf16 ? 2 : 4);
    const uint16_t narrow = to_bf16(t->out_bf16 && added ? bf16(at) + value : value);
    if (t->out_bf16)
        memcpy(at, &narrow, 2);
    else
        *(float *)at = added ? *(float *)at + value : value;
}

static int check_operands(const Kernel *kernel, const Told *t, uint64_t rows) {
    const uint64_t row = kernel->abi == BF16 || kernel->abi == OWN ? 2ull * t->k : kernel->abi == FP4 ? t->k / 2 : t->k;
    const uint64_t width = (uint64_t)t->n * (t->out_bf16 ? 2 : 4);
    int status;
    if (!t->m || !t->n || !t->k || t->stride_a < row || t->stride_b < row || t->stride_out < width)
        return refuse(INVALID_VALUE, "sizes %u x %u x %u with strides %llu %llu %llu", t->m, t->n, t->k, (unsigned long long)t->stride_a, (unsigned long long)t->stride_b, (unsigned long long)t->stride_out);
    if (kernel->shuffled && t->stride_b != row)
        return refuse(INVALID_VALUE, "a shuffled weight with rows %llu bytes apart", (unsigned long long)t->stride_b);
    if ((t->a | t->b | t->out) % 16)
        return refuse(INVALID_VALUE, "an operand lies at no multiple of 16");
    if ((status = check_memory("x", t->a, (t->m - 1) * t->stride_a + row, 0)) || (status = check_memory("weight", t->b, (t->n - 1) * t->stride_b + row, 0)) ||
        (status = check_memory("out", t->out, (rows - 1) * t->stride_out + width, 1)))
        return status;
    if (t->add_bias && (status = check_memory("bias", t->bias, (uint64_t)t->n * (wide_bias(kernel, t) ? 4 : 2), 0)))
        return status;
    switch (kernel->abi) {
    case INT8:
        if ((status = check_memory("x_scale", t->a_scale, 4ull * t->m, 0)))
            return status;
        return check_memory("w_scale", t->b_scale, 4ull * t->n, 0);
    case FP8:
        if (t->scale_m != t->m || t->scale_k != (t->k + 127) / 128)
            return refuse(INVALID_VALUE, "scales of %u x %u", t->scale_m, t->scale_k);
        if ((status = check_memory("x_scale", t->a_scale, 4ull * t->scale_m * t->scale_k, 0)))
            return status;
        return check_memory("w_scale", t->b_scale, 4ull * ((t->n + 127) / 128) * t->scale_k, 0);
    case FP4:
        if (t->a_groups % 8 || t->b_groups % 8 || t->a_groups < t->k / 32 || t->b_groups < t->k / 32)
            return refuse(INVALID_VALUE, "scales %u and %u to a row", t->a_groups, t->b_groups);
        if ((status = check_memory("x_scale", t->a_scale, (t->m + 255ull) / 256 * 256 * t->a_groups, 0)))
            return status;
        return check_memory("w_scale", t->b_scale, (t->n + 255ull) / 256 * 256 * t->b_groups, 0);
    default: return SUCCESS;
    }
}

/* 0x00 D, 0x10 C, 0x20 A, 0x30 B, 0x40 alpha, 0x50 beta, strides D0 0x60 C0 0x80 A0 0xA0 B0 0xC0, M 0xE0 N 0xF0 K 0x100, then splitk 0x110,
 * is_out_b16 0x120, Bias 0x130, add_bias 0x140, semaphore 0x150; strides are bytes. */
static int read_bf16(Reader *r, Told *t) {
    t->out = address(r, 0x00);
    t->a = address(r, 0x20);
    t->b = address(r, 0x30);
    t->alpha = real(r, 0x40);
    t->stride_out = number(r, 0x60);
    t->stride_a = number(r, 0xA0);
    t->stride_b = number(r, 0xC0);
    t->m = number(r, 0xE0);
    t->n = number(r, 0xF0);
    t->k = number(r, 0x100);
    t->splits = number(r, 0x110);
    t->out_bf16 = number(r, 0x120);
    t->bias = address(r, 0x130);
    t->add_bias = number(r, 0x140);
    t->semaphore = address(r, 0x150);
    if (number(r, 0x80) != t->stride_out)
        return refuse(INVALID_VALUE, "rows of C and D have other distances");
    if (t->alpha != 1.0f || t->out_bf16 > 1 || t->add_bias > 1)
        return refuse(INVALID_VALUE, "alpha %g, is_out_b16 %u, add_bias %u", t->alpha, t->out_bf16, t->add_bias);
    if (!t->add_bias && t->bias)
        return refuse(INVALID_VALUE, "a bias that is not added");
    return r->size == 0x160 ? SUCCESS : refuse(INVALID_VALUE, "%llu bytes of arguments", (unsigned long long)r->size);
}

/* 0x00 out, 0x10 a, 0x20 b, 0x30 scale of a, 0x40 of b, 0x50 bias, 0x60 M, 0x70 N, 0x80 K, 0x90 lda, 0xA0 ldb in elements, 0xB0 ldc in
 * bytes, 0xC0 parts of K; of fp8 then the sizes of the scales, 0xD0 of M, 0xE0 of N, 0xF0 of K. */
static int read_scaled(Reader *r, Told *t, int blocks) {
    t->out = address(r, 0x00);
    t->a = address(r, 0x10);
    t->b = address(r, 0x20);
    t->a_scale = address(r, 0x30);
    t->b_scale = address(r, 0x40);
    t->bias = address(r, 0x50);
    t->m = number(r, 0x60);
    t->n = number(r, 0x70);
    t->k = number(r, 0x80);
    t->stride_a = number(r, 0x90);
    t->stride_b = number(r, 0xA0);
    t->stride_out = number(r, 0xB0);
    t->splits = number(r, 0xC0);
    t->alpha = 1.0f;
    t->out_bf16 = t->add_bias = 1;
    if (blocks) {
        t->scale_m = number(r, 0xD0);
        t->scale_k = number(r, 0xF0);
        if (number(r, 0xE0) != (t->n + 127) / 128)
            return refuse(INVALID_VALUE, "scales of other columns");
    }
    return r->size >= (blocks ? 0x100u : 0xD0u) ? SUCCESS : refuse(INVALID_VALUE, "%llu bytes of arguments", (unsigned long long)r->size);
}

/* As bf16 up to K, where strides are 4-bit values, and of the output C0 alone in elements; then 0x110 and 0x120 the scales, their strides
 * 0x130 and 0x150 in bytes, 0x170 the logarithm of the parts of K. */
static int read_fp4(Reader *r, Told *t) {
    uint32_t logarithm;
    t->out = address(r, 0x00);
    t->a = address(r, 0x20);
    t->b = address(r, 0x30);
    t->alpha = real(r, 0x40);
    t->stride_out = 2ull * number(r, 0x80);
    t->stride_a = number(r, 0xA0) / 2;
    t->stride_b = number(r, 0xC0) / 2;
    t->m = number(r, 0xE0);
    t->n = number(r, 0xF0);
    t->k = number(r, 0x100);
    t->a_scale = address(r, 0x110);
    t->b_scale = address(r, 0x120);
    t->a_groups = number(r, 0x130);
    t->b_groups = number(r, 0x150);
    logarithm = number(r, 0x170);
    t->out_bf16 = 1;
    if (t->alpha != 1.0f || logarithm > 4 || (number(r, 0xA0) | number(r, 0xC0)) % 2)
        return refuse(INVALID_VALUE, "alpha %g, 2^%u parts of K, half a byte between rows", t->alpha, logarithm);
    t->splits = 1u << logarithm;
    return r->size >= 0x174 ? SUCCESS : refuse(INVALID_VALUE, "%llu bytes of arguments", (unsigned long long)r->size);
}

/* tunedgemm-bf16: naturally aligned; see abi.py of the plugin, which this is written beside. */
static int read_own(Reader *r, Told *t) {
    t->out = address(r, 0x00);
    t->a = address(r, 0x08);
    t->b = address(r, 0x10);
    t->bias = address(r, 0x18);
    t->workspace = address(r, 0x20);
    t->semaphore = address(r, 0x28);
    t->stride_out = number(r, 0x30);
    t->stride_a = number(r, 0x34);
    t->stride_b = number(r, 0x38);
    t->m = number(r, 0x3C);
    t->n = number(r, 0x40);
    t->k = number(r, 0x44);
    t->tiles_m = number(r, 0x48);
    t->tiles_n = number(r, 0x4C);
    t->splits = number(r, 0x50);
    t->part = number(r, 0x54);
    t->out_bf16 = number(r, 0x58);
    t->add_bias = number(r, 0x5C);
    t->alpha = 1.0f;
    if (t->out_bf16 > 1 || t->add_bias > 1 || (!t->add_bias && t->bias))
        return refuse(INVALID_VALUE, "is_out_b16 %u, add_bias %u", t->out_bf16, t->add_bias);
    if (t->k % 64 || t->part % 64 || !t->part || t->n % 4)
        return refuse(INVALID_VALUE, "N=%u K=%u in parts of %u", t->n, t->k, t->part);
    return r->size == 96 ? SUCCESS : refuse(INVALID_VALUE, "%llu bytes of arguments", (unsigned long long)r->size);
}

static int read_arguments(const Kernel *kernel, const Launch *launch, Told *t) {
    Reader reader = {launch->arguments, {0}, launch->bytes};
    int status;
    memset(t, 0, sizeof *t);
    switch (kernel->abi) {
    case BF16: status = read_bf16(&reader, t); break;
    case INT8:
    case FP8: status = read_scaled(&reader, t, kernel->abi == FP8); break;
    case FP4: status = read_fp4(&reader, t); break;
    default: status = read_own(&reader, t);
    }
    if (meant("FAKE_SWAPPED", launch->name)) {
        const uint64_t a = t->a;
        t->a = t->b, t->b = a;
    }
    return status ? status : rest_is_zero(&reader);
}

/* The tile and the part of K of a workgroup. */
typedef struct {
    uint64_t row, column, begin, end, tile;
    int first;
} Work;

static int divided(const Kernel *kernel, const Launch *launch, const Told *t, uint64_t *part) {
    const uint64_t columns = (t->n + kernel->tile_n - 1) / kernel->tile_n, splits = t->splits;
    const uint64_t steps = kernel->abi == BF16 || kernel->abi == OWN ? 64 : kernel->abi == FP4 ? 256 : 128;
    if (!t->m || !t->n || !t->k || t->k % steps)
        return refuse(INVALID_VALUE, "K=%u in steps of %llu", t->k, (unsigned long long)steps);
    if ((kernel->abi == BF16 || kernel->abi == INT8 || kernel->abi == FP8) && t->n % kernel->tile_n)
        return refuse(INVALID_VALUE, "N=%u in tiles of %d", t->n, kernel->tile_n);
    if (!splits || splits > 16 || (splits > 1 && !kernel->splits))
        return refuse(INVALID_VALUE, "%llu parts of K", (unsigned long long)splits);
    if (kernel->abi != OWN && (launch->grid[1] > (t->m + kernel->tile_m - 1ull) / kernel->tile_m || launch->grid[0] > columns * (kernel->abi == INT8 || kernel->abi == FP8 ? splits : 1)))
        return refuse(INVALID_VALUE, "%u x %u workgroups are more than tiles", launch->grid[0], launch->grid[1]);
    /* Whole steps; of bf16 rounded down, the last part has the rest. */
    *part = kernel->abi == OWN ? t->part : kernel->abi == BF16 ? t->k / steps / splits * steps : ((t->k + splits - 1) / splits + steps - 1) / steps * steps;
    if (kernel->abi == INT8 || kernel->abi == FP8) {
        if (launch->grid[2] != 1 || launch->grid[0] != columns * splits || (t->k + *part - 1) / *part != splits)
            return refuse(INVALID_VALUE, "%u workgroups for %llu tiles and %llu parts of K", launch->grid[0], (unsigned long long)columns, (unsigned long long)splits);
    } else if (!*part || launch->grid[2] != (kernel->abi == FP4 ? (t->k + *part - 1) / *part : splits))
        return refuse(INVALID_VALUE, "%u workgroups for %llu parts of K", launch->grid[2], (unsigned long long)splits);
    if (kernel->abi == OWN && (launch->grid[0] > (uint64_t)t->tiles_m * t->tiles_n || t->tiles_n != columns || t->tiles_m != (t->m + kernel->tile_m - 1u) / kernel->tile_m || launch->grid[1] != 1 || (splits - 1) * *part >= t->k || splits * *part < t->k))
        return refuse(INVALID_VALUE, "%u x %u tiles, %llu parts of %llu", t->tiles_m, t->tiles_n, (unsigned long long)splits, (unsigned long long)*part);
    return SUCCESS;
}

static Work work_of(const Kernel *kernel, const Launch *launch, const Told *t, uint64_t part, const unsigned *at) {
    const int along = kernel->abi == INT8 || kernel->abi == FP8;
    const uint64_t row = kernel->abi == OWN ? at[0] / t->tiles_n : at[1], column = kernel->abi == OWN ? at[0] % t->tiles_n : along ? at[0] / t->splits : at[0];
    const uint64_t split = along ? at[0] % t->splits : at[2], begin = split * part;
    const int last = begin + part >= t->k || (kernel->abi == BF16 && split + 1 == t->splits);
    Work work = {row * kernel->tile_m, column * kernel->tile_n, begin < t->k ? begin : t->k, last ? t->k : begin + part, kernel->abi == OWN ? at[0] : at[1] * launch->grid[0] + at[0], !split};
    return work;
}

static void finish_own(const Kernel *kernel, const Told *t, const Work *w) {
    const uint64_t each = (uint64_t)kernel->tile_m * kernel->tile_n, tiles = (uint64_t)t->tiles_m * t->tiles_n;
    uint64_t row, column, split;
    for (row = w->row; row < t->m && row < w->row + kernel->tile_m; row++)
        for (column = w->column; column < t->n && column < w->column + kernel->tile_n; column++) {
            float total = 0.0f;
            for (split = 0; split < t->splits; split++)
                total += ((const float *)t->workspace)[(split * tiles + w->tile) * each + (row - w->row) * kernel->tile_n + column - w->column];
            put(t, row, column, total + biased(kernel, t, column), 0);
        }
}

static void run(const Kernel *kernel, const Told *t, const Work *w, float spoiled) {
    const int added = t->splits > 1, kept = kernel->abi == OWN && added;
    const uint64_t tiles = (uint64_t)t->tiles_m * t->tiles_n, each = (uint64_t)kernel->tile_m * kernel->tile_n;
    uint32_t *semaphore = t->semaphore ? (uint32_t *)t->semaphore + w->tile : NULL;
    uint64_t row, column;
    for (row = w->row; row < w->row + kernel->tile_m; row++)
        for (column = w->column; column < t->n && column < w->column + kernel->tile_n; column++) {
            float value;
            if (row >= t->m) { /* fp4 kernels write whole groups of 32 rows */
                if (kernel->abi == FP4 && row < (t->m + 31ull) / 32 * 32)
                    put(t, row, column, NAN, 0);
                continue;
            }
            value = sum(kernel, t, row, column, w->begin, w->end) + spoiled;
            if (kept) {
                ((float *)t->workspace)[(w->begin / t->part * tiles + w->tile) * each + (row - w->row) * kernel->tile_n + column - w->column] = value;
                continue;
            }
            /* AITER's bf16 kernels clear the output themselves: the first that comes stores, the others add. */
            put(t, row, column, value + (w->first ? biased(kernel, t, column) : 0.0f), added && (kernel->abi != BF16 || *semaphore));
        }
    if (semaphore && ++*semaphore == t->splits) {
        *semaphore = 0;
        if (kept)
            finish_own(kernel, t, w);
    }
}

static int check_semaphores(const Kernel *kernel, const Launch *launch, const Told *t) {
    const uint64_t tiles = (uint64_t)launch->grid[0] * launch->grid[1], counted = kernel->abi == BF16 || kernel->abi == OWN;
    uint64_t i;
    int status;
    if (!counted || t->splits == 1)
        return t->semaphore || t->workspace ? refuse(INVALID_VALUE, "a semaphore that nobody counts on") : SUCCESS;
    if (kernel->abi == BF16 && !kernel->splits)
        return refuse(INVALID_VALUE, "parts of K of a kernel that has none");
    if (tiles > SEMAPHORES)
        return refuse(ILLEGAL_ADDRESS, "%llu tiles for %d semaphores", (unsigned long long)tiles, SEMAPHORES);
    if ((status = check_memory("semaphore", t->semaphore, 4 * SEMAPHORES, 1)))
        return status;
    for (i = 0; i < SEMAPHORES; i++)
        if (((const uint32_t *)t->semaphore)[i])
            return refuse(LAUNCH_TIMEOUT, "semaphore %llu is %u at the start: the last part never comes", (unsigned long long)i, ((const uint32_t *)t->semaphore)[i]);
    return kernel->abi == OWN ? check_memory("workspace", t->workspace, 4ull * t->splits * tiles * kernel->tile_m * kernel->tile_n, 1) : SUCCESS;
}

int multiply(const Kernel *kernel, const Launch *launch) {
    const char *wrong = getenv("FAKE_WRONG");
    const float spoiled = wrong && *wrong && strstr(launch->name, wrong) ? 100.0f : 0.0f;
    uint64_t part = 0;
    unsigned at[3];
    Told t;
    int status;
    if ((status = read_arguments(kernel, launch, &t)) || (status = divided(kernel, launch, &t, &part)))
        return status;
    if (kernel->abi == BF16 && kernel->splits && t.splits < 2)
        return refuse(INVALID_VALUE, "a kernel that splits K with one part");
    if ((status = check_operands(kernel, &t, kernel->abi == FP4 ? (t.m + 31ull) / 32 * 32 : t.m)) || (status = check_semaphores(kernel, launch, &t)))
        return status;
    for (at[2] = 0; at[2] < launch->grid[2]; at[2]++)
        for (at[1] = 0; at[1] < launch->grid[1]; at[1]++)
            for (at[0] = 0; at[0] < launch->grid[0]; at[0]++) {
                const Work work = work_of(kernel, launch, &t, part, at);
                run(kernel, &t, &work, spoiled);
            }
    return SUCCESS;
}
