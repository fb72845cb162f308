// Family `tiles`, for up to 64 rows of x: each warp multiplies N_EACH tiles of 16 weight rows with
// all of x by matrix instructions.
//
// The weight is the left operand: the instruction's long side is along N, and x fills its short
// side. A step is 64 bytes of K, a piece for each of four groups of lanes. Fragments are in memory
// order.
//
// The weight comes through a ring of STAGES stages in shared memory, filled by asynchronous copies.
// With STAGES 0 it is loaded directly, UNROLL steps at once. x comes from L1, or with X_SHARED from
// shared memory: through the ring, or without a ring all x of the split before the first step.

#define SHORT (M / COLUMNS)  // tiles along the rows of x

#if COLUMNS == 8
#define HELD 2  // rows of a tile per lane
#define LANE_ROW (lane / 4)
#define LANE_GROUP (lane % 4)
#else
#define HELD 1
#define LANE_ROW (lane % 16)
#define LANE_GROUP (lane / 16)
#endif

#if FP8 && COLUMNS == 8
#define PRODUCTS 4  // instructions per piece: NVIDIA's take fp8 as fp16, because some fp8 instructions sum less exactly
#else
#define PRODUCTS 2  // mxfp4: per word of a piece's four
#endif

#define OWN (COLUMNS == 8 ? 2 : 1)  // rows of a tile of x in a lane's accumulators
#define BLOCK_SCALES (SCALE == 3 && !FP4)
#if FP4
#define BLOCK STEP  // elements of K whose scales are loaded at once; a scale per piece
#else
#define BLOCK 128  // elements of K, and weight rows, of a block scale
#endif

// Work of a lane: its rows of the weight and of x, from its group's elements to the end.
struct Work {
    const Element *rows[N_EACH][HELD], *xs[SHORT];
    const u8 *shared_x;
    long long begin, end;
#if BLOCK_SCALES
    const float *x_scale, *w_scale;  // of the lane's first accumulated row of x; of the warp's weight rows, all in one block
    long long stop;                  // end of the split
    u32 by_row, by_block;            // stride of the scales of x by row, and by block
    int left;                        // rows of x from the lane's first one
#elif FP4
    const u8 *w_scales[N_EACH][HELD], *x_scales[SHORT];  // scales of those rows
    u32 group;                                          // the lane's piece, counted from the warp's k
#endif
};

// Scales of a block of K: the current one, and for few rows of x the next one, to hide its loads.
// For many rows they would take too many registers.
#define SCALES_AHEAD (SHORT <= 2 || FP4)
struct Scales {
#if BLOCK_SCALES
    float x[SHORT][OWN], weight;
#elif FP4
    u8 x[SHORT], weight[N_EACH][HELD];  // e8m0: 2^(value - 127); 255 is a NaN
#endif
};

#if FP4
// Start of a row's scales; that of piece `piece` is `scale_place` further. With a shuffled weight
// they have AITER's order: within 32 rows and 8 pieces, scales 4 pieces apart and 16 rows apart are
// adjacent.
DEVICE const u8 *scales_at(const void *scales, long long row, long long pieces) {
    return (const u8 *)scales + (SHUFFLED ? row / 32 * ((pieces + 7) / 8) * 256 + row % 16 * 4 + row / 16 % 2 : row * pieces);
}
DEVICE long long scale_place(long long piece) { return SHUFFLED ? piece / 8 * 256 + piece % 4 * 64 + piece / 4 % 2 * 2 : piece; }
#endif

// Loads the scales at `k`, zeros from the end on.
DEVICE void load_scales(const Work &work, Scales &scales, long long k) {
#if BLOCK_SCALES
    const bool there = k < work.stop;
    const u32 block = (u32)(k / BLOCK);
    scales.weight = there ? scale_at(work.w_scale, block) : 0.0f;
    UNROLLED for (int s = 0; s < SHORT; s++) UNROLLED for (int i = 0; i < OWN; i++)
        scales.x[s][i] = there && COLUMNS * s + i < work.left ? scale_at(work.x_scale, (u32)(COLUMNS * s + i) * work.by_row + block * work.by_block) : 0.0f;
#elif FP4
    const bool there = k < work.end;
    const long long place = scale_place((long long)((unsigned long long)k / PIECE) + work.group);
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) {
        scales.weight[t][h] = 0;
        if (there) load<1>(&scales.weight[t][h], work.w_scales[t][h] + place);
    }
    UNROLLED for (int s = 0; s < SHORT && !X_WIDE; s++) {
        scales.x[s] = 0;
        if (there) load<1>(&scales.x[s], work.x_scales[s] + place);
    }
#else
    (void)work, (void)scales, (void)k;
#endif
}

// Runs before the step at `k`, the first of a block; the next block starts at `after`.
DEVICE void next_scales(const Work &work, Scales (&scales)[2], long long k, long long after) {
    if (SCALES_AHEAD) scales[0] = scales[1];
    load_scales(work, SCALES_AHEAD ? scales[1] : scales[0], SCALES_AHEAD ? after : k);
}

// A fragment of a piece, two words per instruction.
struct Factors {
    u32 word[2 * PRODUCTS];
};

DEVICE Factors factors_of(const Bytes16 &piece) {
    Factors found;
#if FP4  // bfloat16, ordered like the others: elements i and i + 4
    UNROLLED for (int i = 0; i < 2; i++) {
        found.word[2 * i] = low_halves(piece.word[i], piece.word[i + 2]);
        found.word[2 * i + 1] = high_halves(piece.word[i], piece.word[i + 2]);
    }
#elif PRODUCTS == 4
    UNROLLED for (int i = 0; i < 4; i++) halves_of_fp8(piece.word[i], found.word + 2 * i);
#else
    UNROLLED for (int i = 0; i < 4; i++) found.word[i] = piece.word[i];
#endif
    return found;
}

#if FP4
// Both factors of eight numbers by an e8m0 scale, each as two equal bfloat16. The three bits of an
// e2m1, placed at the low exponent bits and the first fraction bit of a bfloat16, are 2^126 times
// too small. So the first factor is 2^126 times the scale. Scales above 2 exceed bfloat16: then the
// first factor is the largest, and the second has the rest. A NaN is in the second factor, too.
DEVICE u32 first_factor(u32 e8m0) { return ((e8m0 < 128 ? e8m0 : 128) + 126) * 0x00800080u; }
DEVICE u32 second_factor(u32 e8m0) { return e8m0 == 255 ? 0x7FC07FC0u : (e8m0 < 128 ? 127 : e8m0 - 1) * 0x00800080u; }

// Converts eight e2m1 numbers to bfloat16, exactly; word i has the elements i and i + 4.
DEVICE Factors factors_of(u32 word, u32 factor) {
    const u32 later = two_elements_on(word);
    Factors found;
    UNROLLED for (int i = 0; i < 4; i++) {
        const u32 low = i < 2 ? word : later;
        found.word[i] = multiply_bfloats((word << (12 - 4 * i) & 0x80008000u) | (low << (6 - 4 * (i % 2)) & 0x01C001C0u), factor);
    }
    return found;
}

DEVICE void multiply_factors(Factors &factors, u32 factor) {
    UNROLLED for (int i = 0; i < 4; i++) factors.word[i] = multiply_bfloats(factors.word[i], factor);
}
#endif

// Multiplies a part of a step: the weight's factors with `right(s)` of x.
template <typename Right> DEVICE void multiply_part(const Scales &scales, Sum (*sum)[SHORT][4], const Factors (&factors)[N_EACH][HELD], Right right_of) {
    UNROLLED for (int s = 0; s < SHORT; s++) {
        const Factors x = right_of(s);
        UNROLLED for (int t = 0; t < N_EACH; t++) {
#if BLOCK_SCALES
            Sum part[4] = {0, 0, 0, 0};
#else
            Sum *const part = sum[t][s];
#endif
            UNROLLED for (int p = 0; p < PRODUCTS; p++) {
                const u32 *left = factors[t][0].word + 2 * p;
#if HELD == 2
                const u32 *below = factors[t][1].word + 2 * p, both[4] = {left[0], below[0], left[1], below[1]};
                left = both;
#endif
                multiply(part, left, x.word + 2 * p);
            }
#if BLOCK_SCALES
            UNROLLED for (int i = 0; i < 4; i++) sum[t][s][i] = multiply_add(part[i], scales.x[s][i % OWN] * scales.weight, sum[t][s][i]);
#else
            (void)scales;
#endif
        }
    }
}

#if FP4
// Multiplies one step, as below. Scales above 2 are rare; they take a loop of short code with both
// factors.
template <typename X> DEVICE void multiply_step(const Bytes16 (*weight)[HELD], const Scales &scales, Sum (*sum)[SHORT][4], X x_of) {
    Bytes16 ws[N_EACH][HELD], xs[SHORT];
    u32 largest = 0;
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++)
        ws[t][h] = weight[t][h], largest |= scales.weight[t][h] + 127u;
    UNROLLED for (int s = 0; s < SHORT && !X_WIDE; s++) xs[s] = x_of(s, 0), largest |= scales.x[s] + 127u;
    const auto multiply_words = [&](int i, int part, bool large) {
        Factors factors[N_EACH][HELD];
        UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) {
            factors[t][h] = factors_of(ws[t][h].word[i], first_factor(scales.weight[t][h]));
            if (large) multiply_factors(factors[t][h], second_factor(scales.weight[t][h]));
        }
        multiply_part(scales, sum, factors, [&](int s) {
            if (X_WIDE) return factors_of(x_of(s, part));
            Factors x = factors_of(xs[s].word[i], first_factor(scales.x[s]));
            if (large) multiply_factors(x, second_factor(scales.x[s]));
            return x;
        });
    };
    if (!any_lane(largest > 255)) {
        UNROLLED for (int part = 0; part < 4; part++) multiply_words(part, part, false);
        return;
    }
    ROLLED for (int part = 0; part < 4; part++) {
        multiply_words(0, part, true);
        UNROLLED for (int i = 0; i < 3; i++) {  // rotate the next word to the front: registers cannot be indexed
            UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) ws[t][h].word[i] = ws[t][h].word[i + 1];
            UNROLLED for (int s = 0; s < SHORT && !X_WIDE; s++) xs[s].word[i] = xs[s].word[i + 1];
        }
    }
}
#else
// Multiplies one step by all lanes of the warp; `x_of(s, i)` is piece `i` of X_PIECES of tile `s`
// of x.
template <typename X> DEVICE void multiply_step(const Bytes16 (*weight)[HELD], const Scales &scales, Sum (*sum)[SHORT][4], X x_of) {
    Factors factors[N_EACH][HELD];
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) factors[t][h] = factors_of(weight[t][h]);
    multiply_part(scales, sum, factors, [&](int s) { return factors_of(x_of(s, 0)); });
}
#endif

// Bytes of a tile of x in a step.
#define X_STEP (X_PIECES * WAVE * 16)

// Returns piece `i` of the lane's X_PIECES of a step, of tile `s` of x.
template <bool WHOLE> DEVICE Bytes16 x_at(const Work &work, int s, long long k, int i) {
    if (!X_WIDE) return bytes_at<false, WHOLE>(work.xs[s], k, work.end);
    if (WHOLE || k < work.end) return bytes_at<false, true>(work.xs[s], X_PIECES * k + PIECE * i, 0);
    return {{0u, 0u, 0u, 0u}};
}

// Multiplies STEPS steps from `k` on, through registers; the next ones start at `after`. `ready`
// waits for the copy of x to shared memory.
template <int STEPS, bool WHOLE, typename Ready>
DEVICE void advance(const Work &work, long long k, long long after, Scales (&scales)[2], Sum (*sum)[SHORT][4], Ready ready) {
    Bytes16 weight[STEPS][N_EACH][HELD];
    UNROLLED for (int u = 0; u < STEPS; u++)
        UNROLLED for (int t = 0; t < N_EACH; t++)
            UNROLLED for (int h = 0; h < HELD; h++) weight[u][t][h] = bytes_at<true, WHOLE>(work.rows[t][h], k + u * STEP, work.end);
    ready();
    UNROLLED for (int u = 0; u < STEPS; u++) {
        if (u * STEP % BLOCK == 0) next_scales(work, scales, k + u * STEP, u * STEP + BLOCK < STEPS * STEP ? k + u * STEP + BLOCK : after);
        multiply_step(weight[u], scales[0], sum, [&](int s, int i) {
#if X_SHARED
            return *(const Bytes16 *)(work.shared_x + ((k - work.begin) / STEP + u) * (SHORT * X_STEP) + s * X_STEP + i * (WAVE * 16));
#else
            return x_at<WHOLE>(work, s, k + u * STEP, i);
#endif
        });
    }
}

#if X_SHARED && !STAGES
// Starts the copy of the split's x to shared memory: [steps of K][SHORT] tiles, in the lanes' read
// order.
DEVICE void begin_x(const Args &args, u8 *shared, long long begin, long long end) {
    const u32 pieces = (u32)((end - begin + STEP - 1) / STEP) * (SHORT * X_PIECES * WAVE);
    for (u32 piece = thread(); piece < pieces; piece += THREADS) {
        const u32 lane = piece % WAVE, i = piece / WAVE % X_PIECES, tile = piece / (WAVE * X_PIECES), row = tile % SHORT * COLUMNS + LANE_ROW;
        const long long k = X_PIECES * (begin + (long long)(tile / SHORT) * STEP + LANE_GROUP * PIECE) + PIECE * i;
        if (row >= (u32)args.m) continue;  // products with other rows are dropped
        const Element *from = (const Element *)args.x + row * X_PIECES * args.k;
#if ASYNCHRONOUS
        begin_bytes<1>(shared + piece * 16, from, k, X_PIECES * end);
#else
        *(Bytes16 *)(shared + piece * 16) = bytes_at<false, false>(from, k, X_PIECES * end);
#endif
    }
#if ASYNCHRONOUS
    commit_copies();
#endif
}
#endif

// Waits until x has arrived for all threads of the block.
DEVICE void await_x() {
#if ASYNCHRONOUS
    await_copies<0>();
#endif
    sync_block();
}

extern "C" KERNEL void skinny(Args args) {
    SHARED;
#if BATCHED
    args = batch_of(args);
#endif
    const u32 lane = thread() % WAVE, warp = thread() / WAVE, along_k = warp % WARPS_K, along_n = warp / WARPS_K;
    const long long begin = block_y() * args.per_split, limit = begin + args.per_split, end = limit < args.k ? limit : args.k;
    Sum *sums = (Sum *)shared;
    Work work;  // beyond the last row repeat it; its products are dropped
    work.begin = begin;
    work.end = end - PIECE * LANE_GROUP;
    work.shared_x = shared + 16 * lane;
    const long long first = (long long)block_x() * ROWS + along_n * EACH + LANE_ROW;
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) {
        const long long row = first + 16 * t + 8 * h;
        work.rows[t][h] = weight_at(args, row < args.n ? row : args.n - 1) + SPREAD * PIECE * LANE_GROUP;
#if FP4
        work.w_scales[t][h] = scales_at(args.w_scale, row < args.n ? row : args.n - 1, args.k / PIECE);
#endif
    }
    UNROLLED for (int s = 0; s < SHORT; s++) {
        const int row = COLUMNS * s + (int)LANE_ROW;
        work.xs[s] = (const Element *)args.x + ((row < args.m ? row : args.m - 1) * args.k + PIECE * LANE_GROUP) * X_PIECES;
#if FP4
        work.x_scales[s] = scales_at(args.x_scale, row < args.m ? row : args.m - 1, args.k / PIECE);
#endif
    }
#if FP4
    work.group = LANE_GROUP;
#endif
    const long long span = UNROLL * STEP;

    Sum sum[N_EACH][SHORT][4];
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int s = 0; s < SHORT; s++) UNROLLED for (int i = 0; i < 4; i++) sum[t][s][i] = 0;
    Scales scales[2];
#if BLOCK_SCALES
    const long long own = COLUMNS == 8 ? 2 * (lane % 4) : lane % 16, row = (long long)block_x() * ROWS + along_n * EACH;
    const u32 blocks = (u32)((args.k + BLOCK - 1) / BLOCK);
    work.by_row = X_ORDER ? 1 : blocks, work.by_block = X_ORDER ? (u32)X_COLUMN(args.m) : 1;
    work.x_scale = (const float *)args.x_scale + own * work.by_row;
    work.w_scale = (const float *)args.w_scale + (row < args.n ? row : args.n - 1) / BLOCK * blocks;
    work.stop = end;
    work.left = args.m - (int)own;
#endif
    if (SCALES_AHEAD) load_scales(work, scales[1], begin + along_k * span);
#if X_IN_RING
    // A stage of x: [WARPS_K][UNROLL][SHORT][X_PIECES] of a tile, in the lanes' read order.
    u8 *const x_ring = shared + STAGES * UNROLL * N_EACH * HELD * THREADS * 16;
    const u32 pieces = WARPS_K * UNROLL * SHORT * X_PIECES * WAVE;
    const auto begin_x = [&](int slot, long long turn) {
        UNROLLED for (u32 piece = thread(); piece < pieces; piece += THREADS) {
            const u32 i = piece / WAVE % X_PIECES, tile = piece / (WAVE * X_PIECES), row = tile % SHORT * COLUMNS + piece % WAVE / 4;
            const long long k = X_PIECES * (turn + tile / SHORT * STEP + piece % 4 * PIECE) + PIECE * i;
            if (row < (u32)args.m)  // products with other rows are dropped
                begin_bytes<1>(x_ring + ((u32)slot * pieces + piece) * 16, (const Element *)args.x + row * X_PIECES * args.k, k, X_PIECES * end);
        }
    };
    const u8 *const x_mine = x_ring + along_k * UNROLL * SHORT * X_STEP + lane * 16;
    const auto use = [&](const Bytes16 *weight, long long k, int slot, int u) {
        if (u * STEP % BLOCK == 0) next_scales(work, scales, k, u * STEP + BLOCK < span ? k + BLOCK : k - u * STEP + WARPS_K * span);
        multiply_step((const Bytes16 (*)[HELD])weight, scales[0], sum,
                      [&](int s, int i) { return *(const Bytes16 *)(x_mine + slot * pieces * 16 + (u * SHORT + s) * X_STEP + i * (WAVE * 16)); });
    };
    through_ring<N_EACH * HELD>(shared, work.rows[0], begin, end, along_k * span, 0, work.end, begin_x, use);
#elif STAGES
    const auto use = [&](const Bytes16 *weight, long long k, int, int u) {
        if (u * STEP % BLOCK == 0) next_scales(work, scales, k, u * STEP + BLOCK < span ? k + BLOCK : k - u * STEP + WARPS_K * span);
        multiply_step((const Bytes16 (*)[HELD])weight, scales[0], sum, [&](int s, int i) { return x_at<false>(work, s, k, i); });
    };
    through_ring<N_EACH * HELD>(shared, work.rows[0], begin, end, along_k * span, 0, work.end, [](int, long long) {}, use);
#else
    bool waits = X_SHARED;
    const auto ready = [&] {
        if (waits) await_x();
        waits = false;
    };
#if X_SHARED
    begin_x(args, shared, begin, end);
#endif
    for (long long k = begin + along_k * span; k < end; k += WARPS_K * span) {
        if (k + span <= end)
            advance<UNROLL, true>(work, k, k + WARPS_K * span, scales, sum, ready);
        else
            for (long long tail = k; tail < end; tail += STEP) advance<1, false>(work, tail, tail + STEP, scales, sum, ready);
    }
    ready();
#endif

    if (STAGES || X_SHARED) sync_block();  // the sums reuse the memory of the ring and x
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int s = 0; s < SHORT; s++) UNROLLED for (int i = 0; i < 4; i++) {
#if COLUMNS == 8
        const u32 row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
#else
        const u32 row = 4 * (lane / 16) + i, column = lane % 16;
#endif
        sums[(along_k * M + COLUMNS * s + column) * PITCH + along_n * EACH + 16 * t + row] = sum[t][s][i];
    }
    finish(args, sums);
}
