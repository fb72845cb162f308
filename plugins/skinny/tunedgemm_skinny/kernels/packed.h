// Family `packed`: weights of 4 bits as checkpoints store them, times x of 16 bits, on the matrix
// units; NVIDIA alone.
//
// A slice is 32 elements of K: eight per lane of a quad, for two matrix instructions. A step is
// SLICES slices, no more than share a scale. The sum of a step is scaled in fp32; values of e2m1
// are scaled before they are multiplied, which is exact in bfloat16. The next steps' loads start
// before the products of these. x of the split lies in shared memory.
//
// ORDER 0: eight codes along K of a row are a word, [N, K/8]. 1: the same transposed, [K/8, N]. 2:
// eight codes along N are a word, [K, N/8], the even ones first.
// ZEROS: 0 for codes less 8, 1 for zero points, 2 for zero points stored less 1.
// E2M1: 0 for integers, 1 for scales of e4m3 per 16 elements, 2 for scales of e8m0 per 32.
// GROUP: elements that share a scale; 0 for the whole row.

#define HALVES (2 * N_EACH)                         // weight rows of a lane
#define ADJACENT (ORDER == 0 ? 1 : ORDER == 1 ? 4 : 8)  // of them next to each other
#define SLICES (E2M1 || GROUP == 0 || GROUP >= 128 ? 4 : GROUP / 32)
#define DEPTH (32 * SLICES)  // elements of K of a step
#define COLUMN_TILES (M / 8)

#ifdef SKINNY_HOST
DEVICE u32 permute(u32 low, u32 high, u32 selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(bytes >> 8 * (selector >> 4 * i & 7u) & 255u) << 8 * i;
    return found;
}
DEVICE float low_of(u32 pair) { return DTYPE == 0 ? as_float(pair << 16) : float_of_half((u16)pair); }
DEVICE float high_of(u32 pair) { return DTYPE == 0 ? as_float(pair & 0xFFFF0000u) : float_of_half((u16)(pair >> 16)); }
DEVICE u32 pair_of(float low, float high) {
    return DTYPE == 0 ? as_bits(low) >> 16 | (as_bits(high) & 0xFFFF0000u) : half_of(low) | (u32)half_of(high) << 16;
}
DEVICE u32 less(u32 one, u32 two) { return pair_of(low_of(one) - low_of(two), high_of(one) - high_of(two)); }
DEVICE u32 times(u32 one, u32 two) { return pair_of(low_of(one) * low_of(two), high_of(one) * high_of(two)); }
DEVICE float float_of_e4m3(u32 bits) {
    const u32 exponent = bits >> 3 & 15u, fraction = bits & 7u;
    const float size = (bits & 127u) == 127u ? as_float(0x7FC00000u)
                       : exponent            ? as_float((exponent + 120u) << 23 | fraction << 20)
                                             : (float)fraction * as_float(0x3B000000u);  // 2^-9
    return bits & 128u ? -size : size;
}
#else
DEVICE u32 permute(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
#if DTYPE == 0
#define PAIR "bf16x2"
#define ONES 0x3F803F80u
#else
#define PAIR "f16x2"
#define ONES 0x3C003C00u
#endif
DEVICE u32 less(u32 one, u32 two) {  // sub.bf16x2 needs sm_90
    u32 found;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(found) : "r"(one), "r"(ONES), "r"(two ^ 0x80008000u));
    return found;
}
DEVICE u32 times(u32 one, u32 two) {
    u32 found;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(found) : "r"(one), "r"(two), "r"(0x80008000u));
    return found;
}
#if E2M1 == 1
DEVICE float float_of_e4m3(u32 bits) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)bits));
    return float_of_half((u16)halves);
}
#endif
#endif

// What a lane loads of a step.
struct Loaded {
    u32 word[HALVES * SLICES];
#if E2M1
    u32 scale[HALVES];
#else
    u16 scale[HALVES];
#endif
    u32 zeros[ZEROS ? HALVES / ADJACENT : 1];
};

// A warp's weight rows and its lane's place.
struct Work {
    const Args *args;
    u32 first, begin;        // the warp's first weight row, the split's first element of K
    u32 group, quad;         // the lane's place among eight and among four
    u32 codes;               // mask of the first code of both halves of a word
};

// Returns the weight row of a lane's half tile, from the warp's first one.
DEVICE u32 row_of(int half, u32 group) {
    return ORDER == 0 ? 8 * half + group : ORDER == 1 ? half / 4 * 32 + 4 * group + half % 4 : half / 8 * 64 + 8 * group + half % 8;
}
// Returns the first row of a lane's rows that are adjacent, one that exists.
DEVICE u32 start_of(const Work &work, int half) {
    const u32 row = work.first + row_of(half / ADJACENT * ADJACENT, work.group), last = (u32)work.args->n - ADJACENT;
    return row < last ? row : last;
}

// Offsets fit in 32 bits: a weight has fewer than 2^32 words.
DEVICE void fetch(const Work &work, u32 step, Loaded &to) {
    const Args &args = *work.args;
    const u32 n = (u32)args.n, depth = (u32)args.k, k = (u32)work.begin + step * DEPTH, groups = GROUP ? depth / (GROUP ? GROUP : 1) : 1;
    const u32 at = GROUP ? k / (GROUP ? GROUP : 1) : 0, *words = (const u32 *)args.weight;
#if ORDER == 0
    UNROLLED for (int half = 0; half < HALVES; half++)
        load_once<4 * SLICES>(to.word + half * SLICES, words + (start_of(work, half) * (depth / 8) + k / 8 + work.quad * SLICES));
#elif ORDER == 1
    UNROLLED for (int slice = 0; slice < SLICES; slice++)
        UNROLLED for (int half = 0; half < HALVES; half += 4)
            load_once<16>(to.word + slice * HALVES + half, words + ((k / 8 + 4 * slice + work.quad) * n + start_of(work, half)));
#else
    UNROLLED for (int slice = 0; slice < SLICES; slice++)
        UNROLLED for (int half = 0; half < HALVES; half += 8) UNROLLED for (int i = 0; i < 8; i++)
            load_once<4>(to.word + slice * HALVES + half + i, words + ((k + 32 * slice + 8 * work.quad + i) * (n / 8) + start_of(work, half) / 8));
#endif
#if E2M1
    UNROLLED for (int half = 0; half < HALVES; half++) {
        to.scale[half] = 0;
        const u32 row = start_of(work, half) * (depth / (E2M1 == 1 ? 16 : 32));
        load<(E2M1 == 1 ? 2 : 1)>(&to.scale[half], (const u8 *)args.w_scale + (row + (E2M1 == 1 ? k / 16 + 2 * work.quad : k / 32 + work.quad)));
    }
#else
    const u16 *scales = (const u16 *)args.w_scale;
#if ORDER == 0
    UNROLLED for (int half = 0; half < HALVES; half++) load<2>(to.scale + half, scales + (start_of(work, half) * groups + at));
#else
    UNROLLED for (int half = 0; half < HALVES; half += 4) load<8>(to.scale + half, scales + (at * n + start_of(work, half) + half % ADJACENT));
#endif
#if ZEROS
    UNROLLED for (int half = 0; half < HALVES; half += ADJACENT) {
        const u32 row = start_of(work, half) / 8;
        load<4>(to.zeros + half / ADJACENT, (const u32 *)args.x_scale + (ORDER == 0 ? row * groups + at : at * (n / 8) + row));
    }
#endif
#endif
}

// Returns a lane's zero point of a half tile in both halves of a pair, with the constant that
// `pairs_of` puts above the codes.
DEVICE u32 zero_of(const Loaded &from, int half, u32 group) {
    const u32 above = DTYPE == 0 ? 0x4300u : 0x6400u;  // 128 and 1024, whose last bit counts 1
#if ZEROS
    const int within = half % 8, place = within % 2 * 4 + within / 2;  // the even columns first
    const u32 shift = ORDER == 0 ? 4 * (group % 8) : ORDER == 1 ? 4 * (4 * (group % 2) + half % 4) : 4 * place;
    return (((from.zeros[half / ADJACENT] >> shift) + (ZEROS - 1)) & 15u | above) * 0x10001u;
#else
    return (8u | above) * 0x10001u;
#endif
}

// Converts the eight codes of a lane in a slice of a half tile to four pairs along K, with ORDER 2 of
// neighbours, else of elements 4 apart. `inner` is subtracted, of e2m1 multiplied.
DEVICE void pairs_of(const Work &work, const Loaded &from, int half, int slice, u32 inner, u32 *to) {
    const u32 above = DTYPE == 0 ? 0x43004300u : 0x64006400u;
#if ORDER == 2
    const int place = half % 2 * 4 + half % 8 / 2, first = slice * HALVES + half / 8 * 8;
    UNROLLED for (int i = 0; i < 4; i++) {
        const u32 word = permute(from.word[first + 2 * i], from.word[first + 2 * i + 1], place < 4 ? 0x5410u : 0x7632u);
        to[i] = less((word >> 4 * (place % 4) & work.codes) | above, inner);
    }
#else
    const u32 word = from.word[ORDER == 0 ? half * SLICES + slice : slice * HALVES + half];
    UNROLLED for (int i = 0; i < 4; i++) {
#if E2M1
        const int shift = 12 - 4 * i;  // the codes become the first bits of both halves
        const u32 size = shift < 6 ? word >> (6 - shift) : word << (shift - 6), value = (word << shift & 0x80008000u) | (size & 0x01C001C0u);
        to[i] = times(E2M1 == 1 ? value : times(value, 0x7E807E80u), inner);  // `value` is times 2^-126
#else
        to[i] = less((word >> 4 * i & work.codes) | above, inner);
#endif
    }
#endif
}

#if E2M1
// Returns the scale of a slice in both halves of a pair: of e4m3 times 2^118, which `factor_of`
// takes back, since 2^126 would overflow.
DEVICE u32 pair_scale(u32 scales, int slice) {
#if E2M1 == 1
    return (as_bits(float_of_e4m3(scales >> 8 * (slice / 2) & 255u) * as_float(0x7A800000u)) >> 16) * 0x10001u;
#else
    return (scales == 255u ? 0x7FFFu : scales ? scales << 7 : 0x40u) * 0x10001u;
#endif
}
#endif

DEVICE float scale_of(u16 scale) { return DTYPE == 0 ? as_float((u32)scale << 16) : float_of_half(scale); }

// Multiplies a step by x, which is in shared memory with `stride` pieces a row.
DEVICE void multiply_step(const Work &work, const Loaded &from, const Bytes16 *x, u32 stride, u32 step, Sum (*sum)[COLUMN_TILES][4]) {
    Sum part[HALVES / 2][COLUMN_TILES][4] = {};
    u32 inner[HALVES];
    if (!E2M1) UNROLLED for (int half = 0; half < HALVES; half++) inner[half] = zero_of(from, half, work.group);
    UNROLLED for (int slice = 0; slice < SLICES; slice++) {
        Bytes16 columns[COLUMN_TILES];
        UNROLLED for (int c = 0; c < COLUMN_TILES; c++) {
            const int column = 8 * c + work.group;
            columns[c] = x[(column < work.args->m ? column : 0) * stride + step * (DEPTH / 8) + 4 * slice + work.quad];
        }
        UNROLLED for (int tile = 0; tile < HALVES / 2; tile++) {
            u32 one[4], two[4];
#if E2M1
            if (slice % (E2M1 == 1 ? 2 : 4) == 0) UNROLLED for (int i = 0; i < 2; i++) inner[2 * tile + i] = pair_scale(from.scale[2 * tile + i], slice);
#endif
            pairs_of(work, from, 2 * tile, slice, inner[2 * tile], one);
            pairs_of(work, from, 2 * tile + 1, slice, inner[2 * tile + 1], two);
            UNROLLED for (int c = 0; c < COLUMN_TILES; c++) {
                Sum *to = E2M1 ? sum[tile][c] : part[tile][c];
                UNROLLED for (int i = 0; i < 4; i += 2) {
                    const u32 a[4] = {one[i], two[i], one[i + 1], two[i + 1]};
                    multiply(to, a, columns[c].word + i);
                }
            }
        }
    }
#if !E2M1
    UNROLLED for (int tile = 0; tile < HALVES / 2; tile++)
        UNROLLED for (int c = 0; c < COLUMN_TILES; c++) UNROLLED for (int i = 0; i < 4; i++)
            sum[tile][c][i] = multiply_add(part[tile][c][i], scale_of(from.scale[2 * tile + i / 2]), sum[tile][c][i]);
#endif
}

// Copies x of the split to shared memory, eight pieces of a thread at a time, of so many rows. Pairs
// are those of `pairs_of`. With ORDER 0 a lane has adjacent pieces; the pieces of a slice lie
// together.
template <u32 ROWS_EACH> DEVICE void copy_x(const Args &args, long long begin, u32 pieces, u32 stride, Bytes16 *x) {
    const u32 batch = 8, apart = THREADS, m = (u32)args.m;
    const u16 *from = (const u16 *)args.x + begin;
    for (u32 row = 0; row < m; row += ROWS_EACH)
        for (u32 piece = thread(); piece < pieces; piece += batch / ROWS_EACH * apart) {
            Bytes16 held[batch];
            UNROLLED for (u32 b = 0; b < batch; b++) {
                const u32 r = row + b % ROWS_EACH, p = piece + b / ROWS_EACH * apart;
                if (r < m && p < pieces) load<16>(held[b].word, from + r * args.k + 8 * p);
            }
            UNROLLED for (u32 b = 0; b < batch; b++) {
                const u32 r = row + b % ROWS_EACH, p = piece + b / ROWS_EACH * apart, within = p % (4 * SLICES), *word = held[b].word;
                const Bytes16 pairs = {{permute(word[0], word[2], 0x5410u), permute(word[0], word[2], 0x7632u),
                                        permute(word[1], word[3], 0x5410u), permute(word[1], word[3], 0x7632u)}};
                const u32 to = ORDER == 0 ? p - within + within % SLICES * 4 + within / SLICES : p;
                if (r < m && p < pieces) x[r * stride + to] = ORDER == 2 ? held[b] : pairs;
            }
        }
}

extern "C" KERNEL void skinny(Args args) {
    SHARED;
    const u32 lane = thread() % WAVE, warp = thread() / WAVE, along_k = warp % WARPS_K, along_n = warp / WARPS_K;
    const long long begin = block_y() * args.per_split, limit = begin + args.per_split, end = limit < args.k ? limit : args.k;
    const u32 pieces = (u32)(end - begin) / 8, stride = ((u32)args.per_split / 8 + 7) / 8 * 8 + 4;  // 64 bytes over a multiple of 128: no bank conflicts
    // The mask is no constant for the compiler, which would load it again for each use.
    const Work work = {&args, block_x() * ROWS + along_n * EACH, (u32)begin, lane / 4, lane % 4, 0x000F000Fu | (u32)(args.m >> 31)};
    const u32 steps = (u32)(end - begin) / DEPTH, turn = WARPS_K * UNROLL;
    u32 step = along_k * UNROLL;
    Loaded now[UNROLL], next[UNROLL];
    UNROLLED for (int u = 0; u < UNROLL; u++) if (step + u < steps) fetch(work, step + u, now[u]);
    Bytes16 *const x = (Bytes16 *)shared;
    if (args.m < 4)
        copy_x<1>(args, begin, pieces, stride, x);
    else
        copy_x<8>(args, begin, pieces, stride, x);
    sync_block();

    Sum sum[HALVES / 2][COLUMN_TILES][4] = {};
    ROLLED while (step < steps) {
        const u32 ahead = step + turn, after = ahead + turn;
        UNROLLED for (int u = 0; u < UNROLL; u++) if (ahead + u < steps) fetch(work, ahead + u, next[u]);
        UNROLLED for (int u = 0; u < UNROLL; u++) if (step + u < steps) multiply_step(work, now[u], x, stride, step + u, sum);
        UNROLLED for (int u = 0; u < UNROLL; u++) if (after + u < steps) fetch(work, after + u, now[u]);
        UNROLLED for (int u = 0; u < UNROLL; u++) if (ahead + u < steps) multiply_step(work, next[u], x, stride, ahead + u, sum);
        step = after;
    }

    Sum *sums = (Sum *)shared;  // reuses the memory of x
    sync_block();
    UNROLLED for (int half = 0; half < HALVES; half++)
        UNROLLED for (int c = 0; c < COLUMN_TILES; c++) UNROLLED for (int i = 0; i < 2; i++)
            sums[(along_k * M + 8 * c + 2 * work.quad + i) * PITCH + along_n * EACH + row_of(half, work.group)] = sum[half / 2][c][2 * (half % 2) + i];
    finish(args, sums);
}
