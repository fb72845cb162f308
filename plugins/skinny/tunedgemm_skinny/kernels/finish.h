// Epilogue of every block: reduction over warps along K, then over splits; scales, bias, rounding,
// output.
//
// Splits meet in a cluster of CLUSTER blocks, where each block reduces its share of the columns
// from the shared memory of all. Or they meet in global memory, where the last block to arrive does
// the fixup. Either way they are added in the order of K, so the bits are the same each time.

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

// Applies the scales of x and of the weight: SCALE 1 one each, 2 one per row; the global scale of e2m1
// with scales of e4m3, which `packed` divides by 2^8.
DEVICE float scaled(const Args &args, long long row, long long column, Sum sum) {
#if SCALE == 1 || SCALE == 2
    return (float)sum * scale_at(args.x_scale, SCALE == 2 ? row : 0) * scale_at(args.w_scale, SCALE == 2 ? column : 0);
#elif HAS_GLOBAL
    return (float)sum * 256.0f * scale_at(args.x_scale, 0);
#else
    return (float)sum;
#endif
}

// Position of a thread's sums: a row of x and TOGETHER columns, some of them maybe outside the
// output.
struct Place {
    long long row, column;
    int offset;  // in a warp's sums
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
        if (place.whole || place.column + i < args.n)
            out.value[i] = out_of(scaled(args, place.row, place.column + i, sums.value[i]) + bias_at(args, place.column + i));
    if (place.whole)
        store<sizeof out>(to, &out);
    else
        UNROLLED for (int i = 0; i < TOGETHER; i++) if (place.column + i < args.n) store<sizeof(Out)>(to + i, &out.value[i]);
}

// Reduces `sums` in shared memory, [WARPS_K][M][PITCH], which the warps have written.
DEVICE void finish(const Args &args, Sum *sums) {
    const u32 chunks = M * ROWS / TOGETHER;
    Sum *mine = (Sum *)args.partial + (long long)block_y() * args.m * args.n;
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
                Sum *to = mine + place.row * args.n + place.column;
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
    sync_cluster();  // a block must not end while another reads its sums
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
        const Sum *part = (const Sum *)args.partial + place.row * args.n + place.column;
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
