// Family `rows`, for few rows of x: each warp multiplies N_EACH rows of the weight with all M rows of x by fused multiply-adds.
//
// A step is WAVE * 8 elements of K. All loads of UNROLL steps are issued before the first is used; the steps of a warp lie side by side,
// so that DRAM pages are read whole. x comes from L1, or, with X_SHARED, from shared memory.

DEVICE Eight x_at(const Args &args, const u16 *shared_x, int row, long long k, long long begin, long long end) {
#if X_SHARED
    Eight found = {{0u, 0u, 0u, 0u}};
    if (k < end) found = *(const Eight *)(shared_x + row * ((args.per_split + 7) / 8 * 8) + (k - begin));
    return found;
#else
    return eight_at<false>((const u16 *)args.x + (row < args.m ? row : 0) * args.k, k, end);
#endif
}

// The sums of a warp's lanes: each step halves the values that a lane has while there are several, then adds them up.
DEVICE void gather(float *values, u32 lane, float *to) {
    u32 place = 0, mask = WAVE / 2, others = 0;
    UNROLLED for (int half = N_EACH / 2; half >= 1; half /= 2, mask /= 2) {
        const bool upper = lane & mask;
        UNROLLED for (int i = 0; i < half; i++) {
            const float kept = upper ? values[i + half] : values[i], sent = upper ? values[i] : values[i + half];
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
    const u32 lane = thread() % WAVE, warp = thread() / WAVE, along_k = warp % WARPS_K, along_n = warp / WARPS_K;
    const long long first = (long long)block_x() * ROWS + along_n * N_EACH;
    const long long begin = block_y() * args.per_split, limit = begin + args.per_split, end = limit < args.k ? limit : args.k;
    float *sums = (float *)shared;
    u16 *shared_x = (u16 *)(shared + (4 * WARPS_K * M * ROWS + 15) / 16 * 16);

#if X_SHARED
    const long long length = (args.per_split + 7) / 8 * 8;
    for (long long place = 8ll * thread(); place < M * length; place += 8 * THREADS) {
        const int row = (int)(place / length);
        const long long k = begin + place % length;
        *(Eight *)(shared_x + place) = eight_at<false>((const u16 *)args.x + (row < args.m ? row : 0) * args.k, k, end);
    }
    sync_block();
#endif

    const u16 *rows[N_EACH];  // beyond the last row the last one again: its sums go nowhere
    UNROLLED for (int r = 0; r < N_EACH; r++) rows[r] = (const u16 *)args.weight + (first + r < args.n ? first + r : args.n - 1) * args.k;

    float sum[M][N_EACH];
    UNROLLED for (int m = 0; m < M; m++) UNROLLED for (int r = 0; r < N_EACH; r++) sum[m][r] = 0.0f;

    for (long long k = begin + (long long)along_k * UNROLL * WAVE * 8 + 8 * lane; k < end; k += (long long)WARPS_K * UNROLL * WAVE * 8) {
        Eight weight[UNROLL][N_EACH];
        UNROLLED for (int u = 0; u < UNROLL; u++)
            UNROLLED for (int r = 0; r < N_EACH; r++) weight[u][r] = eight_at<true>(rows[r], k + u * WAVE * 8, end);
        UNROLLED for (int u = 0; u < UNROLL; u++) {
            UNROLLED for (int m = 0; m < M; m++) {
                const Eight x = x_at(args, shared_x, m, k + u * WAVE * 8, begin, end);
                UNROLLED for (int i = 0; i < 4; i++) {
                    const float one = first_of(x.word[i]), two = second_of(x.word[i]);
                    UNROLLED for (int r = 0; r < N_EACH; r++) {
                        sum[m][r] = __builtin_fmaf(first_of(weight[u][r].word[i]), one, sum[m][r]);
                        sum[m][r] = __builtin_fmaf(second_of(weight[u][r].word[i]), two, sum[m][r]);
                    }
                }
            }
        }
    }

    UNROLLED for (int m = 0; m < M; m++) gather(sum[m], lane, sums + (along_k * M + m) * ROWS + along_n * N_EACH);
    finish(args, sums);
}
