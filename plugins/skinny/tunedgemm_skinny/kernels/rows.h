// Family `rows`, for few rows of x: each warp multiplies N_EACH weight rows with all M rows of x,
// by fused multiply-adds, for int8 by dot products of four.
//
// A step is a piece per lane; UNROLL steps are adjacent. The weight comes through a ring of STAGES
// stages in shared memory, filled by asynchronous copies. With STAGES 0 it comes through registers,
// with the loads of UNROLL steps at once. x comes from L1, or with X_SHARED from shared memory.

// Work of a warp: its weight rows and its part of K.
struct Work {
    const Element *x, *shared_x, *rows[N_EACH];
    long long begin, end, k, length;  // range of the split; length of a row of x in global and in shared memory
    int m;
};

template <bool WHOLE> DEVICE Bytes16 x_at(const Work &work, int row, long long k) {
#if X_SHARED
    Bytes16 found = {{0u, 0u, 0u, 0u}};
    if (WHOLE || k < work.end) found = *(const Bytes16 *)(work.shared_x + row * work.length + (k - work.begin));
    return found;
#else
    return bytes_at<false, WHOLE>(work.x + (row < work.m ? row : 0) * work.k, k, work.end);
#endif
}

// Multiplies one step at the lane's `k`.
template <bool WHOLE> DEVICE void multiply_step(const Work &work, const Bytes16 *weight, long long k, Sum (*sum)[N_EACH]) {
    UNROLLED for (int m = 0; m < M; m++) {
        const Bytes16 x = x_at<WHOLE>(work, m, k);
        UNROLLED for (int i = 0; i < 4; i++) {
#if INT8
            UNROLLED for (int r = 0; r < N_EACH; r++) sum[m][r] = dot4(weight[r].word[i], x.word[i], sum[m][r]);
#elif FP8
            float values[4], others[4];
            floats_of_fp8(x.word[i], values);
            UNROLLED for (int r = 0; r < N_EACH; r++) {
                floats_of_fp8(weight[r].word[i], others);
                UNROLLED for (int j = 0; j < 4; j++) sum[m][r] = multiply_add(others[j], values[j], sum[m][r]);
            }
#else
            const float one = first_of(x.word[i]), two = second_of(x.word[i]);
            UNROLLED for (int r = 0; r < N_EACH; r++) {
                sum[m][r] = multiply_add(first_of(weight[r].word[i]), one, sum[m][r]);
                sum[m][r] = multiply_add(second_of(weight[r].word[i]), two, sum[m][r]);
            }
#endif
        }
    }
}

// Multiplies STEPS steps from the lane's `k` on, through registers.
template <int STEPS, bool WHOLE> DEVICE void advance(const Work &work, long long k, Sum (*sum)[N_EACH]) {
    Bytes16 weight[STEPS][N_EACH];
    UNROLLED for (int u = 0; u < STEPS; u++)
        UNROLLED for (int r = 0; r < N_EACH; r++) weight[u][r] = bytes_at<true, WHOLE>(work.rows[r], k + u * STEP, work.end);
    UNROLLED for (int u = 0; u < STEPS; u++) multiply_step<WHOLE>(work, weight[u], k + u * STEP, sum);
}

// Reduces the sums of a warp's lanes: each step halves a lane's values while it has several, then
// adds them.
DEVICE void gather(Sum *values, u32 lane, Sum *to) {
    u32 place = 0, mask = WAVE / 2, others = 0;
    UNROLLED for (int half = N_EACH / 2; half >= 1; half /= 2, mask /= 2) {
        const bool upper = lane & mask;
        UNROLLED for (int i = 0; i < half; i++) {
            const Sum kept = upper ? values[i + half] : values[i], sent = upper ? values[i] : values[i + half];
            values[i] = kept + shuffle_xor(sent, (int)mask);
        }
        place += upper ? half : 0;
    }
    for (; mask >= 1; mask /= 2) {
        values[0] += shuffle_xor(values[0], (int)mask);
        others |= mask;
    }
    if (!(lane & others)) to[place] = values[0];
}

extern "C" KERNEL void skinny(Args args) {
    SHARED;
#if BATCHED
    args = batch_of(args);
#endif
    const u32 lane = thread() % WAVE, warp = thread() / WAVE, along_k = warp % WARPS_K, along_n = warp / WARPS_K;
    const long long first = (long long)block_x() * ROWS + along_n * N_EACH, limit = (block_y() + 1) * args.per_split;
    Sum *sums = (Sum *)shared;  // reuses the memory of x and the ring
    Element *shared_x = (Element *)shared;
    Work work = {(const Element *)args.x, shared_x, {}, block_y() * args.per_split, limit < args.k ? limit : args.k, args.k,
                 (args.per_split + PIECE - 1) / PIECE * PIECE, args.m};
    UNROLLED for (int r = 0; r < N_EACH; r++)  // beyond the last row repeat it; its sums are dropped
        work.rows[r] = weight_at(args, first + r < args.n ? first + r : args.n - 1);

#if X_SHARED
    for (long long place = (long long)PIECE * thread(); place < M * work.length; place += PIECE * THREADS) {
        const long long row = place / work.length, k = work.begin + place % work.length;
        *(Bytes16 *)(shared_x + place) = bytes_at<false, false>(work.x + (row < args.m ? row : 0) * args.k, k, work.end);
    }
    sync_block();
#endif

    Sum sum[M][N_EACH];
    UNROLLED for (int m = 0; m < M; m++) UNROLLED for (int r = 0; r < N_EACH; r++) sum[m][r] = 0;
    const long long span = UNROLL * STEP;
#if STAGES
    u8 *const ring = (u8 *)(shared_x + (X_SHARED ? M * work.length : 0));
    through_ring<N_EACH>(ring, work.rows, work.begin, work.end, along_k * span, PIECE * lane, work.end, [](int, long long) {},
                         [&](const Bytes16 *weight, long long k, int, int) { multiply_step<false>(work, weight, k, sum); });
#else
    for (long long k = work.begin + along_k * span; k < work.end; k += WARPS_K * span) {
        if (k + span <= work.end)
            advance<UNROLL, true>(work, k + PIECE * lane, sum);
        else
            for (long long tail = k; tail < work.end; tail += STEP) advance<1, false>(work, tail + PIECE * lane, sum);
    }
#endif
    if (X_SHARED || STAGES) sync_block();
    UNROLLED for (int m = 0; m < M; m++) gather(sum[m], lane, sums + (along_k * M + m) * PITCH + along_n * N_EACH);
    finish(args, sums);
}
