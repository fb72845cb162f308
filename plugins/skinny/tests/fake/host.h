// Interface of an emulated kernel. The fake compilers prepend this file to a program's text, and
// the fake drivers fill in `host_table`.
//
// A thread of a block is a fiber; it runs until it must wait for others. Global memory is accessed
// through `host_load` and `host_store` only.
#pragma once

struct HostTable {
    unsigned (*thread)(), (*block_x)(), (*block_y)(), (*block_z)(), (*grid_y)();
    unsigned char *(*shared)();
    void (*sync_block)(), (*sync_cluster)();
    const void *(*shared_of)(const void *mine, unsigned block);
    float (*shuffle_xor)(float value, int mask);
    void (*mma)(void *c, const unsigned *a, const unsigned *b, int dtype);
    unsigned (*atomic_add_one)(unsigned *counter);
    void (*load)(void *to, const void *from, int bytes);
    void (*store)(void *to, const void *from, int bytes);
    void (*copy_async)(void *shared, const void *from, int bytes, bool there);
    void (*commit_copies)();
    void (*await_copies)(int groups);
};

// Parameters of a compiled program; the fake drivers check launches against them.
struct HostProgram {
    const char *arch;
    int rows, warps; // rows of the weight and warps of a unit of a block
    int m, n_each, warps_n, warps_k, unroll, vec, wave, x_shared, out, bias, dtype, scale, batched, cluster, shuffled, x_wide, x_column;
    int packed, zeros, e2m1, group; // of a weight of 4 bits: 1, and the macros of its format
};

#ifdef SKINNY_HOST
#if defined(FAMILY_rows) + defined(FAMILY_tiles) + defined(FAMILY_wgmma) + defined(FAMILY_packed) != 1
#error "one of FAMILY_rows, FAMILY_tiles, FAMILY_wgmma and FAMILY_packed must be defined"
#endif
#if WAVE != FAKE_WAVE
#error "WAVE is not the width of this architecture's warps"
#endif
#if defined(FAMILY_wgmma)
#define HOST_ROWS 64
#define HOST_WARPS 4
#elif defined(FAMILY_tiles) || defined(FAMILY_packed)
#define HOST_ROWS 16
#define HOST_WARPS 1
#else
#define HOST_ROWS 1
#define HOST_WARPS 1
#endif
#ifndef CLUSTER
#define CLUSTER 0
#endif
#ifndef SHUFFLED
#define SHUFFLED 0
#endif
#ifndef X_WIDE
#define X_WIDE 0
#endif
#ifdef X_ORDER
#define HOST_X_COLUMN X_ORDER
#else
#define HOST_X_COLUMN 0
#endif

#ifdef FAMILY_packed
#define HOST_FORMAT 1, ZEROS, E2M1, GROUP
#else
#define HOST_FORMAT 0, 0, 0, 0
#endif

extern "C" {
extern const HostTable *host_table;
const HostTable *host_table = nullptr;
extern const HostProgram host_program;
const HostProgram host_program = {FAKE_ARCH, HOST_ROWS, HOST_WARPS, M, N_EACH, WARPS_N, WARPS_K, UNROLL, VEC, WAVE, X_SHARED, OUT, BIAS, DTYPE,
                                  SCALE, BATCHED, CLUSTER, SHUFFLED, X_WIDE, HOST_X_COLUMN, HOST_FORMAT};
}
// Always given, though only the kernels' text uses them.
static_assert(UNROLL > 0 && DTYPE >= 0 && DTYPE <= 5, "UNROLL and DTYPE");

// Threads of the block are numbered from 0; a block's index is (x, y, z) in a grid of y splits and
// z products.
inline unsigned host_thread() { return host_table->thread(); }
inline unsigned host_block_x() { return host_table->block_x(); }
inline unsigned host_block_y() { return host_table->block_y(); }
inline unsigned host_block_z() { return host_table->block_z(); }
inline unsigned host_grid_y() { return host_table->grid_y(); }
// Dynamic shared memory; bytes 0xFF when the block starts.
inline unsigned char *host_shared() { return host_table->shared(); }
// Waits for all threads of the block.
inline void host_sync_block() { host_table->sync_block(); }
// Waits for all threads of the cluster: the blocks with the same x.
inline void host_sync_cluster() { host_table->sync_cluster(); }
// Address in another block's shared memory that corresponds to `mine` in this one's.
inline const void *host_shared_of(const void *mine, unsigned block) { return host_table->shared_of(mine, block); }
// Value of lane `lane ^ mask`; all lanes of the warp take part.
inline float host_shuffle_xor(float value, int mask) { return host_table->shuffle_xor(value, mask); }
// c += a b by the warp's matrix instruction, in its own layout of registers; dtype 0 is bf16, 1
// fp16, 2 int8, whose c is int, 3 fp8 e4m3fn, 4 fp8 e4m3fnuz.
inline void host_mma(void *c, const unsigned *a, const unsigned *b, int dtype) { host_table->mma(c, a, b, dtype); }
// Returns the old value.
inline unsigned host_atomic_add_one(unsigned *counter) { return host_table->atomic_add_one(counter); }
// Both fail on addresses outside the operands, and on misaligned ones.
inline void host_load(void *to, const void *from, int bytes) { host_table->load(to, from, bytes); }
inline void host_store(void *to, const void *from, int bytes) { host_table->store(to, from, bytes); }
// Copies to shared memory in groups, like cp.async. A copy arrives at once or when its group is
// awaited; until then the bytes are 0xFF. Zeros where there is nothing to copy.
inline void host_copy_async(void *shared, const void *from, int bytes, bool there) { host_table->copy_async(shared, from, bytes, there); }
inline void host_commit_copies() { host_table->commit_copies(); }
inline void host_await_copies(int groups) { host_table->await_copies(groups); }
#endif
