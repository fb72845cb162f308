// Family `tiles`, for up to 64 rows of x: each warp multiplies N_EACH tiles of 16 rows of the weight with all of x by matrix instructions.
//
// The weight is the left operand, so that the long side of the instruction lies along N and x fills its short side. A step is 32 elements
// of K: four groups of lanes with eight each, which make two instructions. Both operands go to the registers as they lie in memory: x from L1,
// the weight through a ring of STAGES slots in shared memory, filled by asynchronous copies, or directly, loads of UNROLL steps at once (STAGES 0).

#define SHORT (M / COLUMNS)  // tiles along the rows of x

#if COLUMNS == 8
#define HELD 2  // rows of a tile that a lane has
#define LANE_ROW (lane / 4)
#define LANE_GROUP (lane % 4)
#else
#define HELD 1
#define LANE_ROW (lane % 16)
#define LANE_GROUP (lane / 16)
#endif

// What a lane works on: its rows of the weight and of x, from its group's elements on, and where they end.
struct Work {
    const u16 *rows[N_EACH][HELD], *xs[SHORT];
    long long end;
};

// One step at `k`, by all lanes of the warp.
template <bool WHOLE> DEVICE void multiply_step(const Work &work, const Eight (*weight)[HELD], long long k, float (*sum)[SHORT][4]) {
    UNROLLED for (int s = 0; s < SHORT; s++) {
        const Eight x = eight_at<false, WHOLE>(work.xs[s], k, work.end);
        UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int half = 0; half < 2; half++) {
#if HELD == 2
            const u32 *low = weight[t][0].word + 2 * half, *high = weight[t][1].word + 2 * half;
            const u32 left[4] = {low[0], high[0], low[1], high[1]};
#else
            const u32 left[2] = {weight[t][0].word[2 * half], weight[t][0].word[2 * half + 1]};
#endif
            multiply(sum[t][s], left, x.word + 2 * half);
        }
    }
}

// STEPS steps from `k` on, through registers.
template <int STEPS, bool WHOLE> DEVICE void advance(const Work &work, long long k, float (*sum)[SHORT][4]) {
    Eight weight[STEPS][N_EACH][HELD];
    UNROLLED for (int u = 0; u < STEPS; u++)
        UNROLLED for (int t = 0; t < N_EACH; t++)
            UNROLLED for (int h = 0; h < HELD; h++) weight[u][t][h] = eight_at<true, WHOLE>(work.rows[t][h], k + u * STEP, work.end);
    UNROLLED for (int u = 0; u < STEPS; u++) multiply_step<WHOLE>(work, weight[u], k + u * STEP, sum);
}

extern "C" KERNEL void skinny(Args args) {
    SHARED;
    const u32 lane = thread() % WAVE, warp = thread() / WAVE, along_k = warp % WARPS_K, along_n = warp / WARPS_K;
    const long long first = (long long)block_x() * ROWS + along_n * EACH + LANE_ROW;
    const long long begin = block_y() * args.per_split, limit = begin + args.per_split, end = limit < args.k ? limit : args.k;
    float *sums = (float *)shared;
    Work work;  // beyond the last row the last one again: its products go nowhere
    work.end = end - 8 * LANE_GROUP;
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int h = 0; h < HELD; h++) {
        const long long row = first + 16 * t + 8 * h;
        work.rows[t][h] = (const u16 *)args.weight + (row < args.n ? row : args.n - 1) * args.k + 8 * LANE_GROUP;
    }
    UNROLLED for (int s = 0; s < SHORT; s++) {
        const int row = COLUMNS * s + (int)LANE_ROW;
        work.xs[s] = (const u16 *)args.x + (row < args.m ? row : args.m - 1) * args.k + 8 * LANE_GROUP;
    }

    float sum[N_EACH][SHORT][4];
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int s = 0; s < SHORT; s++) UNROLLED for (int i = 0; i < 4; i++) sum[t][s][i] = 0.0f;
    const long long span = UNROLL * STEP;
#if STAGES
    unsigned char *const ring = shared + (4 * WARPS_K * M * ROWS + 15) / 16 * 16 + 16 * thread();
    through_ring<N_EACH * HELD>(ring, work.rows[0], begin + along_k * span, end, 0, work.end, [&](const Eight *weight, long long k) {
        multiply_step<false>(work, (const Eight (*)[HELD])weight, k, sum);
    });
#else
    for (long long k = begin + along_k * span; k < end; k += WARPS_K * span) {
        if (k + span <= end)
            advance<UNROLL, true>(work, k, sum);
        else
            for (long long tail = k; tail < end; tail += STEP) advance<1, false>(work, tail, sum);
    }
#endif

    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int s = 0; s < SHORT; s++) UNROLLED for (int i = 0; i < 4; i++) {
#if COLUMNS == 8
        const u32 row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
#else
        const u32 row = 4 * (lane / 16) + i, column = lane % 16;
#endif
        sums[(along_k * M + COLUMNS * s + column) * ROWS + along_n * EACH + 16 * t + row] = sum[t][s][i];
    }
    finish(args, sums);
}
