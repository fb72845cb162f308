// Three machines behind one set of names: CUDA, HIP, and the host of the tests. Nothing is included: run-time compilers have no headers.
//
// A lane has eight neighbouring elements along K at a time, as four words: `Eight`. A matrix instruction contracts over K in any order,
// as long as both operands have the same, so the eight that a lane loads at once are what it gives to two instructions, unexchanged.

typedef unsigned int u32;
typedef unsigned short u16;

struct Args {
    void *x, *weight, *bias, *out, *partial, *counters;
    long long n, k;
    int m, splits;
    long long per_split;  // elements of K, a multiple of VEC
};

struct alignas(16) Eight {
    u32 word[4];
};

#define THREADS (WAVE * WARPS_N * WARPS_K)
#ifdef FAMILY_tiles
#define EACH (16 * N_EACH)  // rows of the weight that a warp has
#define STEP 32             // elements of K that a warp multiplies at once
#else
#define EACH N_EACH
#define STEP (WAVE * 8)
#endif
#define ROWS (EACH * WARPS_N)  // the same of a block: columns of the output

#if defined(SKINNY_HOST)  // ---------------------------------------------------------------------------------------------------------

#define KERNEL
#define DEVICE [[maybe_unused]] static inline
#define UNROLLED
#define SHARED unsigned char *shared = host_shared()

DEVICE u32 thread() { return host_thread(); }
DEVICE u32 block_x() { return host_block_x(); }
DEVICE u32 block_y() { return host_block_y(); }
DEVICE void sync_block() { host_sync_block(); }
DEVICE void fence() {}
DEVICE u32 atomic_add_one(u32 *counter) { return host_atomic_add_one(counter); }
DEVICE float shuffle_xor(float value, int mask) { return host_shuffle_xor(value, mask); }

template <int BYTES> DEVICE void load(void *to, const void *from) { host_load(to, from, BYTES); }
template <int BYTES> DEVICE void load_once(void *to, const void *from) { host_load(to, from, BYTES); }
DEVICE float load_fresh(const float *from) {
    float value;
    host_load(&value, from, sizeof value);
    return value;
}
template <int BYTES> DEVICE void copy_async(void *shared, const void *from, bool there) { host_copy_async(shared, from, BYTES, there); }
DEVICE void commit_copies() { host_commit_copies(); }
template <int LEFT> DEVICE void await_copies() { host_await_copies(LEFT); }
template <typename T> DEVICE void store(T *to, T value) { host_store(to, &value, sizeof value); }

DEVICE float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }
DEVICE float multiply_add(float one, float two, float sum) { return __builtin_fmaf(one, two, sum); }

// IEEE 754 binary16; the host's compiler may have no type of it.
DEVICE float float_of_half(u16 half) {
    const u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 31) return as_float(sign | 0x7F800000u | fraction << 13);
    if (exponent) return as_float(sign | (exponent + 112u) << 23 | fraction << 13);
    const float tiny = (float)fraction * as_float(0x33800000u);  // 2^-24
    return sign ? -tiny : tiny;
}
DEVICE u16 half_of(float value) {
    const u32 bits = as_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return (u16)(sign | 0x7E00u);
    if (size >= 0x477FF000u) return (u16)(sign | 0x7C00u);  // from 65520 on
    if (size < 0x38800000u) {                               // below 2^-14: a whole number of 2^-24, rounded by the addition
        const float shifted = as_float(size) + as_float(0x3F000000u);
        return (u16)(sign | (as_bits(shifted) - 0x3F000000u));
    }
    return (u16)(sign | ((size + 0xFFFu + (size >> 13 & 1u)) - 0x38000000u) >> 13);
}

#if WAVE == 32
#define COLUMNS 8
#else
#define COLUMNS 16
#endif
DEVICE void multiply(float *c, const u32 *a, const u32 *b) { host_mma(c, a, b, DTYPE); }

#elif defined(__HIP__)  // -------------------------------------------------------------------------------------------------------------

#define DEVICE [[maybe_unused]] static inline __attribute__((device, always_inline))
#define KERNEL __attribute__((global, amdgpu_flat_work_group_size(THREADS, THREADS)))
#define UNROLLED _Pragma("unroll")
#define SHARED unsigned char *shared = dynamic_shared

extern __attribute__((device, shared, aligned(16))) unsigned char dynamic_shared[];

DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEVICE u32 atomic_add_one(u32 *counter) { return __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }
DEVICE float multiply_add(float one, float two, float sum) { return __builtin_fmaf(one, two, sum); }
DEVICE float shuffle_xor(float value, int mask) {
    const int lane = (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    return as_float((u32)__builtin_amdgcn_ds_bpermute((lane ^ mask) << 2, (int)as_bits(value)));
}

typedef u32 Words4 __attribute__((ext_vector_type(4)));
typedef u32 Words2 __attribute__((ext_vector_type(2)));
template <int BYTES> struct Piece;
template <> struct Piece<16> { typedef Words4 type; };
template <> struct Piece<8> { typedef Words2 type; };
template <> struct Piece<4> { typedef u32 type; };
template <> struct Piece<2> { typedef u16 type; };

template <int BYTES> DEVICE void load(void *to, const void *from) {
    typedef typename Piece<BYTES>::type T;
    *(T *)to = *(const T *)from;
}
template <int BYTES> DEVICE void load_once(void *to, const void *from) {
    typedef typename Piece<BYTES>::type T;
    *(T *)to = __builtin_nontemporal_load((const T *)from);
}
DEVICE float load_fresh(const float *from) { return __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
template <typename T> DEVICE void store(T *to, T value) { *to = value; }

DEVICE float float_of_half(u16 half) { return (float)__builtin_bit_cast(_Float16, half); }
DEVICE u16 half_of(float value) { return __builtin_bit_cast(u16, (_Float16)value); }

#define COLUMNS 16
typedef float Floats4 __attribute__((ext_vector_type(4)));
typedef short Shorts4 __attribute__((ext_vector_type(4)));
typedef _Float16 Halves4 __attribute__((ext_vector_type(4)));
// v_mfma_f32_16x16x16: A[i][k], B[k][j]: i, j = lane % 16, k = 4 * (lane / 16) + element; C[i][j]: i = 4 * (lane / 16) + element, j = lane % 16.
DEVICE void multiply(float *c, const u32 *a, const u32 *b) {
    Floats4 sums = {c[0], c[1], c[2], c[3]};
    const Words2 left = {a[0], a[1]}, right = {b[0], b[1]};
#if DTYPE == 0
    sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts4, left), __builtin_bit_cast(Shorts4, right), sums, 0, 0, 0);
#else
    sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves4, left), __builtin_bit_cast(Halves4, right), sums, 0, 0, 0);
#endif
    UNROLLED for (int i = 0; i < 4; i++) c[i] = sums[i];
}

#else  // CUDA -------------------------------------------------------------------------------------------------------------------------

#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#define KERNEL __global__ __launch_bounds__(THREADS)
#define UNROLLED _Pragma("unroll")
#define SHARED unsigned char *shared = dynamic_shared

extern __shared__ __align__(16) unsigned char dynamic_shared[];

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void fence() { __threadfence(); }
DEVICE u32 atomic_add_one(u32 *counter) { return atomicAdd(counter, 1u); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float multiply_add(float one, float two, float sum) { return __fmaf_rn(one, two, sum); }

// What nobody writes while the kernel runs: x is read again and again, from L1; each element of the weight once, past it. They are
// volatile to stay in their order in PTX. ptxas may still sink some to their use, to save registers; the copies of a ring it cannot.
template <int BYTES> struct Loads;
template <> struct Loads<16> {
    static __device__ __forceinline__ void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    }
    static __device__ __forceinline__ void once(u32 *to, const void *from) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    }
};
template <> struct Loads<8> {
    static __device__ __forceinline__ void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
    static __device__ __forceinline__ void once(u32 *to, const void *from) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
};
template <> struct Loads<4> {  // neighbours come from L1, here and below
    static __device__ __forceinline__ void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    }
    static __device__ __forceinline__ void once(u32 *to, const void *from) { cached(to, from); }
};
template <> struct Loads<2> {
    static __device__ __forceinline__ void cached(u32 *to, const void *from) {
        u16 half;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(from));
        *(u16 *)to = half;
    }
    static __device__ __forceinline__ void once(u32 *to, const void *from) { cached(to, from); }
};
template <int BYTES> DEVICE void load(void *to, const void *from) { Loads<BYTES>::cached((u32 *)to, from); }
template <int BYTES> DEVICE void load_once(void *to, const void *from) { Loads<BYTES>::once((u32 *)to, from); }
DEVICE float load_fresh(const float *from) {  // written by other multiprocessors meanwhile: from L2
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

// From memory to shared memory past the registers; zeros where it is not `there`. A lane reads what it copied itself, so it waits for
// nobody else.
template <int BYTES> DEVICE void copy_async(void *shared, const void *from, bool there) {
    const u32 to = (u32)__cvta_generic_to_shared(shared), bytes = there ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" : : "r"(to), "l"(from), "r"(bytes), "n"(BYTES) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int LEFT> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }
template <typename T> DEVICE void store(T *to, T value) { *to = value; }

DEVICE float float_of_half(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
DEVICE u16 half_of(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

#define COLUMNS 8
DEVICE void multiply(float *c, const u32 *a, const u32 *b) {
#if DTYPE == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif  // -----------------------------------------------------------------------------------------------------------------------------

// The eight elements from `k` on of the row that begins at `row`; zeros from `end` on where it is not WHOLE. `k` and `end` are multiples of VEC.
template <bool ONCE, bool WHOLE> DEVICE Eight eight_at(const u16 *row, long long k, long long end) {
    Eight found = {{0u, 0u, 0u, 0u}};
    UNROLLED for (int piece = 0; piece < 8; piece += VEC) {
        if (WHOLE || k + piece < end) {
            u16 *to = (u16 *)found.word + piece;
            if (ONCE)
                load_once<2 * VEC>(to, row + k + piece);
            else
                load<2 * VEC>(to, row + k + piece);
        }
    }
    return found;
}

#if STAGES
#if VEC == 1 || COLUMNS == 16 && !defined(SKINNY_HOST)
#error "copies go 4, 8 or 16 bytes at a time, and AMD has none"
#endif
// The eight elements from `k` on, zeros from `end` on, on their way into a slot of the lane's own.
DEVICE void begin_eight(unsigned char *slot, const u16 *row, long long k, long long end) {
    UNROLLED for (int piece = 0; piece < 8; piece += VEC) copy_async<2 * VEC>(slot + 2 * piece, row + k + piece, k + piece < end);
}

// The COUNT rows that a lane has, through its part of a ring of STAGES slots: `use(weight, k)` for each step, `k` being the lane's own.
// A warp's part begins at `at`, what it shares ends at `stop`; a lane begins `skew` later and its elements end at `end`. Copies of a turn,
// UNROLL steps, begin STAGES - 1 turns before it is used.
template <int COUNT, typename Use>
DEVICE void through_ring(unsigned char *ring, const u16 *const *rows, long long at, long long stop, long long skew, long long end, Use use) {
    const long long turn = WARPS_K * UNROLL * STEP;
    const int slot_bytes = UNROLL * COUNT * THREADS * 16;
    long long ahead = at;
    int filled = 0, used = 0;
    const auto fill = [&] {
        unsigned char *slot = ring + filled * slot_bytes;
        if (ahead < stop)
            UNROLLED for (int u = 0; u < UNROLL; u++) UNROLLED for (int r = 0; r < COUNT; r++)
                begin_eight(slot + (u * COUNT + r) * (THREADS * 16), rows[r], ahead + skew + u * STEP, end);
        commit_copies();
        ahead += turn;
        filled = filled == STAGES - 1 ? 0 : filled + 1;
    };
    for (int stage = 0; stage < STAGES - 1; stage++) fill();
    for (; at < stop; at += turn) {
        fill();
        await_copies<STAGES - 1>();
        const unsigned char *slot = ring + used * slot_bytes;
        UNROLLED for (int u = 0; u < UNROLL; u++) {
            Eight weight[COUNT];
            UNROLLED for (int r = 0; r < COUNT; r++) weight[r] = *(const Eight *)(slot + (u * COUNT + r) * (THREADS * 16));
            use(weight, at + skew + u * STEP);
        }
        used = used == STAGES - 1 ? 0 : used + 1;
    }
}
#endif

// Elements 2i and 2i + 1 of eight, exactly.
DEVICE float first_of(u32 word) { return DTYPE == 0 ? as_float(word << 16) : float_of_half((u16)word); }
DEVICE float second_of(u32 word) { return DTYPE == 0 ? as_float(word & 0xFFFF0000u) : float_of_half((u16)(word >> 16)); }

// To the nearest, ties to even; a NaN stays one (its fraction might be rounded away).
DEVICE u16 bfloat_of(float value) {
    const u32 bits = as_bits(value);
    return value != value ? (u16)0x7FC0u : (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
