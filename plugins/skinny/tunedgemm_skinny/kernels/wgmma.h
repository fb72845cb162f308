// Family `wgmma`, for up to 64 rows of x: each group of four warps multiplies N_EACH tiles of 64
// weight rows with all of x. Hopper's asynchronous matrix instructions read both operands from
// shared memory.
//
// The weight is the left operand, as in `tiles`. A step is 128 bytes along K of each row, in the
// 128-byte swizzle of the instruction's descriptors. All threads of a block copy both operands into
// a ring of STAGES stages. A stage has the UNROLL steps of an iteration for each of the WARPS_K
// groups.

#define DEEP (WARPS_K * UNROLL)       // steps of a stage
#define WEIGHT_BYTES (ROWS * 128)     // per step
#define X_BYTES (M * 128)
#define SLOT_BYTES (DEEP * (WEIGHT_BYTES + X_BYTES))
// Eight threads copy a row's 128 bytes. Rows per thread, and steps that all threads copy at once.
#define ROWS_EACH (8 * ROWS > THREADS ? 8 * ROWS / THREADS : 1)
#define STEPS_AT_ONCE (THREADS > 8 * ROWS ? THREADS / (8 * ROWS) : 1)

#if SCALE == 3
// Scales of a step, which is a block of K: of a lane's accumulated rows of x, and of a group's
// tiles.
struct Scales {
    float x[M / 8][2], weight[N_EACH];

    METHOD Scales(const Args &args, u32 along_n, u32 lane, long long k, long long end) {
        const long long blocks = (args.k + STEP - 1) / STEP, block = k / STEP;
        UNROLLED for (int t = 0; t < N_EACH; t++) {
            const long long row = (long long)block_x() * ROWS + along_n * EACH + 64 * t;
            weight[t] = k < end ? scale_at(args.w_scale, (row < args.n ? row : args.n - 1) / 128 * blocks + block) : 0.0f;
        }
        UNROLLED for (int j = 0; j < M / 8; j++) UNROLLED for (int i = 0; i < 2; i++) {
            const int row = 8 * j + 2 * (int)(lane % 4) + i;
            x[j][i] = k < end && row < args.m ? scale_at(args.x_scale, X_ORDER ? block * X_COLUMN(args.m) + row : row * blocks + block) : 0.0f;
        }
    }
};
#endif

extern "C" KERNEL void skinny(Args args) {
    SHARED;
#if BATCHED
    args = batch_of(args);
#endif
    const u32 lane = thread() % WAVE, warp = thread() / WAVE % 4, group = thread() / (4 * WAVE), along_k = group % WARPS_K, along_n = group / WARPS_K;
    const long long begin = block_y() * args.per_split, limit = begin + args.per_split, end = limit < args.k ? limit : args.k;
    const long long turn = DEEP * STEP;
    Sum *sums = (Sum *)shared;

    // The threads of a warp copy adjacent pieces: of a row, or of eight rows of a shuffled weight.
    const u32 first = SHUFFLED ? thread() / 64 * 8 + thread() % 8 : thread() / 8, row_of = first % ROWS, step_of = first / ROWS;
    const u32 chunk = SHUFFLED ? thread() / 8 % 8 : thread() % 8, x_chunk = thread() % 8;
    const Element *rows[ROWS_EACH];  // beyond the last row repeat it; its products are dropped
    UNROLLED for (int r = 0; r < ROWS_EACH; r++) {
        const long long row = (long long)block_x() * ROWS + row_of + r * (THREADS / 8);
        rows[r] = weight_at(args, row < args.n ? row : args.n - 1);
    }

    int filled = 0, used = 0;
    const auto fill = [&](long long at) {
        u8 *const slot = shared + filled * SLOT_BYTES, *const x_slot = slot + DEEP * WEIGHT_BYTES;
        if (at < end) {
            UNROLLED for (u32 step = step_of; step < DEEP; step += STEPS_AT_ONCE) UNROLLED for (int r = 0; r < ROWS_EACH; r++) {
                const u32 row = row_of + r * (THREADS / 8);
                begin_bytes<SPREAD>(slot + step * WEIGHT_BYTES + row * 128 + (chunk ^ row % 8) * 16, rows[r], at + step * STEP + chunk * PIECE, end);
            }
            UNROLLED for (u32 place = thread() / 8; place < DEEP * M; place += THREADS / 8) {
                const u32 row = place % M, step = place / M;
                if (row < (u32)args.m)  // products with other rows are dropped
                    begin_bytes<1>(x_slot + step * X_BYTES + row * 128 + (x_chunk ^ row % 8) * 16, (const Element *)args.x + row * args.k,
                                   at + step * STEP + x_chunk * PIECE, end);
            }
        }
        commit_copies();
        filled = filled == STAGES - 1 ? 0 : filled + 1;
    };

    Sum sum[N_EACH][M / 2];
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int i = 0; i < M / 2; i++) sum[t][i] = 0;
    // Multiplies a step into the accumulators; FP8 has its own, because the instruction sums less
    // exactly than float32.
    const auto multiply = [&](const u8 *slot, u32 step, Sum (*to)[M / 2]) {
        UNROLLED for (int part = 0; part < 4; part++) UNROLLED for (int t = 0; t < N_EACH; t++)
            multiply_group(to[t], slot + step * WEIGHT_BYTES + (along_n * EACH + 64 * t) * 128, slot + DEEP * WEIGHT_BYTES + step * X_BYTES, part,
                           !FP8 || part > 0);
    };
    UNROLLED for (int stage = 0; stage < STAGES - 1; stage++) fill(begin + stage * turn);
#if SCALE == 3
    Scales scales(args, along_n, lane, begin + along_k * UNROLL * STEP, end);
#endif
    for (long long at = begin; at < end; at += turn) {
        await_copies<STAGES - 2>();
        fence_copies();
        sync_block();  // all copies have arrived, and no thread reads the slot to fill next
        const u8 *const slot = shared + used * SLOT_BYTES;
        const bool works = at + along_k * (UNROLL * STEP) < end;
#if FP8
        fill(at + (STAGES - 1) * turn);
        if (works)
            UNROLLED for (int u = 0; u < UNROLL; u++) {
                const u32 step = along_k * UNROLL + u;
                Sum made[N_EACH][M / 2];
                UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int i = 0; i < M / 2; i++) made[t][i] = 0;
                begin_products();
                multiply(slot, step, made);
                commit_products();
#if SCALE == 3
                // The next step's scales load meanwhile.
                const Scales next(args, along_n, lane, at + (u + 1 < UNROLL ? step + 1 : DEEP + along_k * UNROLL) * STEP, end);
                await_products();
                UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int i = 0; i < M / 2; i++)
                    sum[t][i] = multiply_add(made[t][i], scales.x[i / 4][i % 2] * scales.weight[t], sum[t][i]);
                scales = next;
#else
                await_products();
                UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int i = 0; i < M / 2; i++) sum[t][i] += made[t][i];
#endif
            }
#else
        if (works) {
            begin_products();
            UNROLLED for (int u = 0; u < UNROLL; u++) multiply(slot, along_k * UNROLL + u, sum);
            commit_products();
        }
        fill(at + (STAGES - 1) * turn);
        await_products();
#endif
        used = used == STAGES - 1 ? 0 : used + 1;
    }

    sync_block();  // the sums reuse the ring's memory
    UNROLLED for (int t = 0; t < N_EACH; t++) UNROLLED for (int i = 0; i < M / 2; i++) {
        const u32 row = 64 * t + 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        sums[(along_k * M + column) * PITCH + along_n * EACH + row] = sum[t][i];
    }
    finish(args, sums);
}
