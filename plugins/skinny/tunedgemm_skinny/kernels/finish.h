// The end of every block: the sums of its warps along K, then those of the splits, then bias, rounding and the output.
//
// Splits meet in a cluster, where each block adds up its share of the columns from the shared memory of all (CLUSTER of them), or in global
// memory, where whoever comes last adds up everything. Either way they are added in their order: the same bits each time.

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

#if OUT == 2
typedef float Out;
DEVICE Out out_of(float sum) { return sum; }
#else
typedef u16 Out;
DEVICE Out out_of(float sum) { return OUT == 0 ? bfloat_of(sum) : half_of(sum); }
#endif

// Where a thread's sums lie: a row of x and TOGETHER columns, some of which the output may not have.
struct Place {
    long long row, column;
    int offset;  // in the sums of a warp
    bool there, whole;
};

DEVICE Place place_at(const Args &args, u32 chunk) {
    const u32 first = chunk * TOGETHER;
    Place found = {first / ROWS, (long long)block_x() * ROWS + first % ROWS, 0, false, false};
    found.offset = (int)(first / ROWS) * PITCH + (int)(first % ROWS);
    found.there = found.row < args.m && found.column < args.n;
    found.whole = TOGETHER == 1 || (args.n % 4 == 0 && found.column + TOGETHER <= args.n);
    return found;
}

DEVICE void put(const Args &args, const Place &place, const Sums &sums) {
    struct alignas(TOGETHER * sizeof(Out)) { Out value[TOGETHER]; } out;
    Out *to = (Out *)args.out + place.row * args.n + place.column;
    UNROLLED for (int i = 0; i < TOGETHER; i++)
        if (place.whole || place.column + i < args.n) out.value[i] = out_of(sums.value[i] + bias_at(args, place.column + i));
    if (place.whole)
        store<sizeof out>(to, &out);
    else
        UNROLLED for (int i = 0; i < TOGETHER; i++) if (place.column + i < args.n) store<sizeof(Out)>(to + i, &out.value[i]);
}

// `sums`, in shared memory: float [WARPS_K][M][PITCH], of which each warp has written its part.
DEVICE void finish(const Args &args, float *sums) {
    const u32 chunks = M * ROWS / TOGETHER;
    float *mine = (float *)args.partial + (long long)block_y() * args.m * args.n;
    sync_block();
    if (!CLUSTER || WARPS_K > 1)
        for (u32 chunk = thread(); chunk < chunks; chunk += THREADS) {
            const Place place = place_at(args, chunk);
            if (!place.there) continue;
            Sums sum = *(const Sums *)(sums + place.offset);
            UNROLLED for (int warp = 1; warp < WARPS_K; warp++) {
                const Sums other = *(const Sums *)(sums + warp * (M * PITCH) + place.offset);
                UNROLLED for (int i = 0; i < TOGETHER; i++) sum.value[i] += other.value[i];
            }
            if (CLUSTER) {
                *(Sums *)(sums + place.offset) = sum;
            } else if (args.splits == 1) {
                put(args, place, sum);
            } else {
                float *to = mine + place.row * args.n + place.column;
                if (place.whole)
                    store<sizeof sum>(to, &sum);
                else
                    UNROLLED for (int i = 0; i < TOGETHER; i++) if (place.column + i < args.n) store<4>(to + i, &sum.value[i]);
            }
        }
#if CLUSTER
    sync_cluster();
    for (u32 chunk = block_y() * THREADS + thread(); chunk < chunks; chunk += CLUSTER * THREADS) {
        const Place place = place_at(args, chunk);
        if (!place.there) continue;
        Sums parts[CLUSTER], sum = {};
        UNROLLED for (u32 split = 0; split < CLUSTER; split++) parts[split] = sums_of(sums + place.offset, split);
        UNROLLED for (int split = 0; split < CLUSTER; split++) UNROLLED for (int i = 0; i < TOGETHER; i++) sum.value[i] += parts[split].value[i];
        put(args, place, sum);
    }
    sync_cluster();  // no block ends while another reads its sums
#else
    if (args.splits == 1) return;

    u32 *arrived = (u32 *)sums;
    fence();
    sync_block();
    if (thread() == 0) *arrived = atomic_add_one((u32 *)args.counters + block_x());
    sync_block();
    if (*arrived != (u32)args.splits - 1) return;
    fence();
    for (u32 chunk = thread(); chunk < chunks; chunk += THREADS) {
        const Place place = place_at(args, chunk);
        if (!place.there) continue;
        const float *part = (const float *)args.partial + place.row * args.n + place.column;
        Sums sum = {};
        for (int split = 0; split < args.splits; split++, part += (long long)args.m * args.n) {
            Sums other = {};
            if (place.whole)
                load_fresh<sizeof other>(&other, part);
            else
                UNROLLED for (int i = 0; i < TOGETHER; i++) if (place.column + i < args.n) load_fresh<4>(&other.value[i], part + i);
            UNROLLED for (int i = 0; i < TOGETHER; i++) sum.value[i] += other.value[i];
        }
        put(args, place, sum);
    }
    const u32 none = 0;
    if (thread() == 0) store<4>((u32 *)args.counters + block_x(), &none);
#endif
}
