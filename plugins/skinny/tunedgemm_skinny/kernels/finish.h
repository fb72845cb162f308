// The end of every block: the sums of its warps along K, then those of the splits, then bias, rounding and the output.

DEVICE float bias_at(const Args &args, long long column) {
#if BIAS == 0
    return 0.0f;
#elif BIAS == 3
    u32 bits;
    load<4>(&bits, (const float *)args.bias + column);
    return as_float(bits);
#else
    u32 word = 0;
    load<2>(&word, (const u16 *)args.bias + column);
    return BIAS == 1 ? as_float(word << 16) : float_of_half((u16)word);
#endif
}

DEVICE void put(const Args &args, long long row, long long column, float sum) {
    const long long place = row * args.n + column;
    sum += bias_at(args, column);
#if OUT == 2
    store((float *)args.out + place, sum);
#else
    store((u16 *)args.out + place, OUT == 0 ? bfloat_of(sum) : half_of(sum));
#endif
}

// `sums`, in shared memory: float [WARPS_K][M][ROWS], of which each warp has written its part.
DEVICE void finish(const Args &args, float *sums) {
    const long long first = (long long)block_x() * ROWS;
    float *mine = (float *)args.partial + (long long)block_y() * args.m * args.n;
    sync_block();
    for (u32 place = thread(); place < M * ROWS; place += THREADS) {
        const long long row = place / ROWS, column = first + place % ROWS;
        if (row >= args.m || column >= args.n) continue;
        float sum = sums[place];
        UNROLLED for (int warp = 1; warp < WARPS_K; warp++) sum += sums[warp * (M * ROWS) + place];
        if (args.splits == 1)
            put(args, row, column, sum);
        else
            store(mine + row * args.n + column, sum);
    }
    if (args.splits == 1) return;

    // Whoever comes last adds all splits, in their order: the same bits each time.
    u32 *arrived = (u32 *)sums;
    fence();
    sync_block();
    if (thread() == 0) *arrived = atomic_add_one((u32 *)args.counters + block_x());
    sync_block();
    if (*arrived != (u32)args.splits - 1) return;
    fence();
    for (u32 place = thread(); place < M * ROWS; place += THREADS) {
        const long long row = place / ROWS, column = first + place % ROWS;
        if (row >= args.m || column >= args.n) continue;
        const float *part = (const float *)args.partial + row * args.n + column;
        float sum = 0.0f;
        for (int split = 0; split < args.splits; split++) sum += load_fresh(part + (long long)split * args.m * args.n);
        put(args, row, column, sum);
    }
    if (thread() == 0) store((u32 *)args.counters + block_x(), 0u);
}
