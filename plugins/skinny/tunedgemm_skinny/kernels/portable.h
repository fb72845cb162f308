// One set of names for CUDA, HIP and the tests' host. No includes: run-time compilers have no
// headers.
//
// A piece is 16 adjacent bytes along K, PIECE elements, as four words: `Bytes16`. Lanes of `rows`
// and `tiles` load one at a time. A matrix instruction may contract over K in any order that both
// operands share. So a lane of `tiles` passes a piece to two instructions without a shuffle; NVIDIA
// converts fp8 to fp16, which makes four. An element of mxfp4 is a byte here, two values along K.
//
// A shuffled weight has the pieces of SHUFFLED adjacent rows next to each other, then the same
// rows' next pieces along K. Block scales of x are then transposed. X_ORDER: block scales of x are
// row-major (0), or transposed with each block's scales padded to a multiple of X_ORDER, 1 or 4.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Args {
    void *x, *weight, *bias, *out, *partial, *counters, *x_scale, *w_scale;
    long long n, k;
    int m, splits;
    long long per_split;  // elements of K of each split but the last; a multiple of VEC, with SCALE 3 of a warp's step
};

struct alignas(16) Bytes16 {
    u32 word[4];
};

#define INT8 (DTYPE == 2)
#define FP8 (DTYPE == 3 || DTYPE == 4)  // e4m3fn, e4m3fnuz
#define FP4 (DTYPE == 5)                // e2m1, a scale per piece; multiplied as bfloat16
#if DTYPE <= 1
typedef u16 Element;
#define PIECE 8
#else
typedef u8 Element;
#define PIECE 16
#endif
#define LOAD (VEC * 16 / PIECE)  // bytes of a load
#ifndef X_ORDER
#define X_ORDER (SHUFFLED ? 1 : 0)
#endif
#define X_COLUMN(m) ((m) + (-(m) & (X_ORDER - 1)))  // distance of transposed scales of x, by block
#define SPREAD (SHUFFLED ? SHUFFLED : 1)  // distance of a row's pieces, in pieces
#define X_PIECES (X_WIDE ? 4 : 1)         // pieces of x per piece of the weight: bfloat16 x with an mxfp4 weight has 4
#if INT8
typedef int Sum;
#else
typedef float Sum;
#endif

#ifdef FAMILY_wgmma
#define THREADS (4 * WAVE * WARPS_N * WARPS_K)
#define EACH (64 * N_EACH)  // weight rows of a group of four warps
#define STEP (8 * PIECE)    // elements of K in a step of a group
#else
#define THREADS (WAVE * WARPS_N * WARPS_K)
#ifdef FAMILY_packed
#define EACH (16 * N_EACH)
#define HAS_GLOBAL (E2M1 == 1)  // one scale of the whole weight
#elif defined(FAMILY_tiles)
#define EACH (16 * N_EACH)  // weight rows of a warp
#define STEP (4 * PIECE)    // elements of K in a step of a warp
#else
#define EACH N_EACH
#define STEP (WAVE * PIECE)
#endif
#endif
#ifndef HAS_GLOBAL
#define HAS_GLOBAL 0
#endif
#define ROWS (EACH * WARPS_N)        // weight rows of a block: columns of the output
#define TOGETHER (ROWS % 4 ? 1 : 4)  // columns that a thread reduces and stores at once

#if defined(FAMILY_tiles) && X_SHARED && STAGES
#define X_IN_RING 1  // x comes through the ring, too
#else
#define X_IN_RING 0
#endif
#ifdef FAMILY_rows
#define PITCH ROWS
#else
#define PITCH (ROWS + 4)  // stride of a row of sums; the lanes of a warp write to different banks
#endif

struct alignas(4 * TOGETHER) Sums {
    Sum value[TOGETHER];
};

#if defined(SKINNY_HOST)  // ---------------------------------------------------------------------------------------------------------

#define KERNEL
#define DEVICE [[maybe_unused]] static inline
#define METHOD
#define UNROLLED
#define ROLLED
#define SHARED u8 *shared = host_shared()

DEVICE u32 thread() { return host_thread(); }
DEVICE u32 block_x() { return host_block_x(); }
DEVICE u32 block_y() { return host_block_y(); }
DEVICE u32 block_z() { return host_block_z(); }
DEVICE void sync_block() { host_sync_block(); }
DEVICE void sync_cluster() { host_sync_cluster(); }
DEVICE void fence() {}
DEVICE u32 atomic_add_one(u32 *counter) { return host_atomic_add_one(counter); }
DEVICE float shuffle_xor(float value, int mask) { return host_shuffle_xor(value, mask); }

template <int BYTES> DEVICE void load(void *to, const void *from) { host_load(to, from, BYTES); }
template <int BYTES> DEVICE void load_once(void *to, const void *from) { host_load(to, from, BYTES); }
template <int BYTES> DEVICE void load_fresh(void *to, const void *from) { host_load(to, from, BYTES); }
DEVICE Sums sums_of(const Sum *mine, u32 block) { return *(const Sums *)host_shared_of(mine, block); }
template <int BYTES> DEVICE void copy_async(void *shared, const void *from, bool there) { host_copy_async(shared, from, BYTES, there); }
DEVICE void commit_copies() { host_commit_copies(); }
template <int LEFT> DEVICE void await_copies() { host_await_copies(LEFT); }
template <int BYTES> DEVICE void store(void *to, const void *from) { host_store(to, from, BYTES); }

DEVICE float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }
DEVICE float multiply_add(float one, float two, float sum) { return __builtin_fmaf(one, two, sum); }

// IEEE 754 binary16; the host's compiler may lack the type.
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
    if (size < 0x38800000u) {                               // below 2^-14: a multiple of 2^-24, rounded by the addition
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
DEVICE void multiply(Sum *c, const u32 *a, const u32 *b) { host_mma(c, a, b, FP4 ? 0 : FP8 && WAVE == 32 ? 1 : DTYPE); }

DEVICE int dot4(u32 one, u32 two, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(one >> i) * (int)(signed char)(two >> i);
    return sum;
}
// OCP 8-bit floating point, e4m3; fnuz has a bias of 8, and its only NaN in place of negative zero.
DEVICE float float_of_fp8(u8 bits) {
    const u32 sign = (bits & 0x80u) << 24, exponent = bits >> 3 & 15u, fraction = bits & 7u, lower = DTYPE == 3 ? 0 : 1;
    if (lower ? bits == 0x80u : (bits & 0x7Fu) == 0x7Fu) return as_float(sign | 0x7FC00000u);
    if (exponent) return as_float(sign | (exponent + 120u - lower) << 23 | fraction << 20);
    const float tiny = (float)fraction * as_float(lower ? 0x3A800000u : 0x3B000000u);  // 2^-10 or 2^-9
    return sign ? -tiny : tiny;
}
DEVICE void floats_of_fp8(u32 word, float *to) {
    for (int i = 0; i < 4; i++) to[i] = float_of_fp8((u8)(word >> 8 * i));
}
DEVICE void halves_of_fp8(u32 word, u32 *to) {
    float wide[4];
    floats_of_fp8(word, wide);
    for (int i = 0; i < 2; i++) to[i] = half_of(wide[2 * i]) | (u32)half_of(wide[2 * i + 1]) << 16;
}

#ifdef FAMILY_wgmma
DEVICE void fence_copies() {}
DEVICE void begin_products() {}
DEVICE void commit_products() {}
DEVICE void await_products() {}
DEVICE double element_of(const u8 *tile, u32 row, u32 k) {
    const u8 *at = tile + row * 128 + (k / PIECE ^ row % 8) * 16 + k % PIECE * sizeof(Element);
#if INT8
    return (signed char)*at;
#elif FP8
    return float_of_fp8(*at);
#else
    const u32 bits = *(const u16 *)at;
    return DTYPE == 0 ? as_float(bits << 16) : float_of_half((u16)bits);
#endif
}
DEVICE void multiply_group(Sum *sum, const u8 *weight, const u8 *x, int part, bool add) {
    const u32 lane = thread() % WAVE, warp = thread() / WAVE % 4;
    for (int i = 0; i < M / 2; i++) {
        const u32 row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        double total = add ? sum[i] : 0;
        for (int k = STEP / 4 * part; k < STEP / 4 * (part + 1); k++) total += element_of(weight, row, k) * element_of(x, column, k);
        sum[i] = (Sum)total;
    }
}
#endif

#elif defined(__HIP__)  // -------------------------------------------------------------------------------------------------------------

#define DEVICE [[maybe_unused]] static inline __attribute__((device, always_inline))
#define KERNEL __attribute__((global, amdgpu_flat_work_group_size(THREADS, THREADS)))
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define SHARED u8 *shared = dynamic_shared

extern __attribute__((device, shared, aligned(16))) u8 dynamic_shared[];

DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 block_z() { return __builtin_amdgcn_workgroup_id_z(); }
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
template <int BYTES> struct Bits;
template <> struct Bits<16> { typedef Words4 type; };
template <> struct Bits<8> { typedef Words2 type; };
template <> struct Bits<4> { typedef u32 type; };
template <> struct Bits<2> { typedef u16 type; };
template <> struct Bits<1> { typedef u8 type; };

template <int BYTES> DEVICE void load(void *to, const void *from) {
    typedef typename Bits<BYTES>::type T;
    *(T *)to = *(const T *)from;
}
template <int BYTES> DEVICE void load_once(void *to, const void *from) {
    typedef typename Bits<BYTES>::type T;
    *(T *)to = __builtin_nontemporal_load((const T *)from);
}
template <int BYTES> DEVICE void load_fresh(void *to, const void *from) {
    UNROLLED for (int i = 0; i < BYTES / 4; i++)
        ((u32 *)to)[i] = __hip_atomic_load((const u32 *)from + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <int BYTES> DEVICE void store(void *to, const void *from) {
    typedef typename Bits<BYTES>::type T;
    *(T *)to = *(const T *)from;
}

DEVICE float float_of_half(u16 half) { return (float)__builtin_bit_cast(_Float16, half); }
DEVICE u16 half_of(float value) { return __builtin_bit_cast(u16, (_Float16)value); }

#define COLUMNS 16
typedef Sum Sums4 __attribute__((ext_vector_type(4)));
typedef float Floats2 __attribute__((ext_vector_type(2)));
typedef short Shorts4 __attribute__((ext_vector_type(4)));
typedef _Float16 Halves4 __attribute__((ext_vector_type(4)));
// v_mfma_..._16x16x16, for 8 bits 16x16x32. A[i][k], B[k][j]: i, j = lane % 16, k = 4 (8 bits: 8) *
// (lane / 16) + element; C[i][j]: i = 4 * (lane / 16) + element, j = lane % 16. CDNA 2 has 16x16x16
// for int8, too.
DEVICE void multiply(Sum *c, const u32 *a, const u32 *b) {
    Sums4 sums = {c[0], c[1], c[2], c[3]};
    const Words2 left = {a[0], a[1]}, right = {b[0], b[1]};
#if DTYPE == 0 || FP4
    sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts4, left), __builtin_bit_cast(Shorts4, right), sums, 0, 0, 0);
#elif DTYPE == 1
    sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves4, left), __builtin_bit_cast(Halves4, right), sums, 0, 0, 0);
#elif FP8
    sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, left), __builtin_bit_cast(long, right), sums, 0, 0, 0);
#elif defined(__gfx90a__)
    UNROLLED for (int i = 0; i < 2; i++) sums = __builtin_amdgcn_mfma_i32_16x16x16i8((int)left[i], (int)right[i], sums, 0, 0, 0);
#else
    sums = __builtin_amdgcn_mfma_i32_16x16x32_i8(__builtin_bit_cast(long, left), __builtin_bit_cast(long, right), sums, 0, 0, 0);
#endif
    UNROLLED for (int i = 0; i < 4; i++) c[i] = sums[i];
}

#if INT8 && (defined(__GFX11__) || defined(__GFX12__))
DEVICE int dot4(u32 one, u32 two, int sum) { return __builtin_amdgcn_sudot4(true, (int)one, true, (int)two, sum, false); }
#elif INT8
DEVICE int dot4(u32 one, u32 two, int sum) { return __builtin_amdgcn_sdot4((int)one, (int)two, sum, false); }
#elif FP8
DEVICE void floats_of_fp8(u32 word, float *to) {
    const Floats2 low = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, false), high = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, true);
    to[0] = low[0], to[1] = low[1], to[2] = high[0], to[3] = high[1];
}
#endif

#else  // CUDA -------------------------------------------------------------------------------------------------------------------------

#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#if CLUSTER
#define KERNEL __global__ __launch_bounds__(THREADS) __cluster_dims__(1, CLUSTER, 1)
#else
#define KERNEL __global__ __launch_bounds__(THREADS)
#endif
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define SHARED u8 *shared = dynamic_shared

extern __shared__ __align__(1024) u8 dynamic_shared[];  // alignment of the 128-byte swizzle

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void fence() { __threadfence(); }
DEVICE u32 atomic_add_one(u32 *counter) { return atomicAdd(counter, 1u); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float multiply_add(float one, float two, float sum) { return __fmaf_rn(one, two, sum); }

// Loads of operands, which are constant during the kernel: x repeatedly, through L1; the weight
// once, past it. They are volatile, to keep their order in PTX. ptxas may still sink some to their
// use, to save registers; it cannot sink the copies of a ring.
template <int BYTES> struct Loads;
template <> struct Loads<16> {
    static METHOD void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    }
    static METHOD void once(u32 *to, const void *from) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    }
};
template <> struct Loads<8> {
    static METHOD void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
    static METHOD void once(u32 *to, const void *from) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    }
};
template <> struct Loads<4> {  // adjacent loads hit L1, here and below
    static METHOD void cached(u32 *to, const void *from) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    }
    static METHOD void once(u32 *to, const void *from) { cached(to, from); }
};
template <> struct Loads<2> {
    static METHOD void cached(u32 *to, const void *from) {
        u16 half;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(from));
        *(u16 *)to = half;
    }
    static METHOD void once(u32 *to, const void *from) { cached(to, from); }
};
template <> struct Loads<1> {
    static METHOD void cached(u32 *to, const void *from) {
        u16 byte;
        asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(byte) : "l"(from));
        *(u8 *)to = (u8)byte;
    }
    static METHOD void once(u32 *to, const void *from) { cached(to, from); }
};
template <int BYTES> DEVICE void load(void *to, const void *from) { Loads<BYTES>::cached((u32 *)to, from); }
template <int BYTES> DEVICE void load_once(void *to, const void *from) { Loads<BYTES>::once((u32 *)to, from); }
// Loads from L2 of values that other multiprocessors write.
template <int BYTES> DEVICE void load_fresh(void *to, const void *from) {
    u32 *words = (u32 *)to;
    if (BYTES == 16)
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from) : "memory");
    else
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
}

// Copies global to shared memory asynchronously; zeros where not `there`. `await_copies` waits for
// this thread's copies only; a barrier must follow before other threads read them.
template <int BYTES> DEVICE void copy_async(void *shared, const void *from, bool there) {
    const u32 to = (u32)__cvta_generic_to_shared(shared), bytes = there ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" : : "r"(to), "l"(from), "r"(bytes), "n"(BYTES) : "memory");
}
#if CLUSTER
// Barrier of a cluster; afterwards each block sees the shared memory that the others wrote.
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" : : : "memory");
}
// Loads from another block's shared memory at the offset of `mine` in this one's.
DEVICE Sums sums_of(const Sum *mine, u32 block) {
    Sums found;
    u32 at, *words = (u32 *)found.value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(block));
#if ROWS % 4
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(words[0]) : "r"(at) : "memory");
#else
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(at) : "memory");
#endif
    return found;
}
#endif
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int LEFT> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }
template <int BYTES> struct Stored;
template <> struct Stored<16> { typedef uint4 type; };
template <> struct Stored<8> { typedef uint2 type; };
template <> struct Stored<4> { typedef u32 type; };
template <> struct Stored<2> { typedef u16 type; };
template <int BYTES> DEVICE void store(void *to, const void *from) {
    typedef typename Stored<BYTES>::type T;
    *(T *)to = *(const T *)from;
}

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
#if INT8
#define PRODUCT "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
#define REGISTER "+r"
#else
#define REGISTER "+f"
#if DTYPE == 0 || FP4
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
#endif
DEVICE void multiply(Sum *c, const u32 *a, const u32 *b) {
    asm(PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : REGISTER(c[0]), REGISTER(c[1]), REGISTER(c[2]), REGISTER(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE int dot4(u32 one, u32 two, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(one), "r"(two));
    return sum;
}
// Exact: fp16 represents every e4m3 number.
DEVICE void halves_of_fp8(u32 word, u32 *to) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(to[0]) : "h"((u16)word));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(to[1]) : "h"((u16)(word >> 16)));
}
DEVICE void floats_of_fp8(u32 word, float *to) {
    u32 halves[2];
    halves_of_fp8(word, halves);
    UNROLLED for (int i = 0; i < 4; i++) to[i] = float_of_half((u16)(halves[i / 2] >> 16 * (i % 2)));
}

#ifdef FAMILY_wgmma
// Makes threads' copies to shared memory visible to asynchronous matrix instructions.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory"); }
// PTX ISA, "Matrix descriptor": 128-byte swizzle, a stride of 1024 bytes per eight rows. An
// instruction takes two of a step's eight pieces.
DEVICE unsigned long long described(const u8 *tile, int part) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (unsigned long long)(((u32)__cvta_generic_to_shared(tile) & 0x3FFFFu) >> 4) + 2u * part;
}
#if INT8
#define KIND "k32.s32.s8.s8"
#define NEGATED
#elif FP8
#define KIND "k32.f32.e4m3.e4m3"
#define NEGATED ", 1, 1"
#else
#if DTYPE == 0
#define KIND "k16.f32.bf16.bf16"
#else
#define KIND "k16.f32.f16.f16"
#endif
#define NEGATED ", 1, 1, 0, 0"
#endif
#define PRODUCTS_OF(rows) "wgmma.mma_async.sync.aligned.m64n" rows KIND
#define FOUR(i) REGISTER(sum[i]), REGISTER(sum[i + 1]), REGISTER(sum[i + 2]), REGISTER(sum[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
// Issues the products of part `part` of a step: 64 weight rows, M rows of x, 32 bytes along K. They
// are added to the accumulators, or replace them.
DEVICE void multiply_group(Sum *sum, const u8 *weight, const u8 *x, int part, bool add) {
    const unsigned long long left = described(weight, part), right = described(x, part);
#if M == 8
    asm volatile("{.reg .pred add; setp.ne.b32 add, %6, 0; " PRODUCTS_OF("8") " {%0, %1, %2, %3}, %4, %5, add" NEGATED ";}"
                 : FOUR(0) : "l"(left), "l"(right), "r"((int)add));
#elif M == 16
    asm volatile("{.reg .pred add; setp.ne.b32 add, %10, 0; " PRODUCTS_OF("16") " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add" NEGATED ";}"
                 : FOUR(0), FOUR(4) : "l"(left), "l"(right), "r"((int)add));
#elif M == 32
    asm volatile("{.reg .pred add; setp.ne.b32 add, %18, 0; " PRODUCTS_OF("32")
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add" NEGATED ";}"
                 : SIXTEEN(0) : "l"(left), "l"(right), "r"((int)add));
#else
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; " PRODUCTS_OF("64")
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
                 "%27, %28, %29, %30, %31}, %32, %33, add" NEGATED ";}" : SIXTEEN(0), SIXTEEN(16) : "l"(left), "l"(right), "r"((int)add));
#endif
}
#endif

#endif  // -----------------------------------------------------------------------------------------------------------------------------

// Loads the piece at `k` of a row; ONCE for the weight. Unless WHOLE, zeros from `end` on. `k` and
// `end` are multiples of VEC.
template <bool ONCE, bool WHOLE> DEVICE Bytes16 bytes_at(const Element *row, long long k, long long end) {
    Bytes16 found = {{0u, 0u, 0u, 0u}};
    UNROLLED for (int part = 0; part < PIECE; part += VEC) {
        if (WHOLE || k + part < end) {
            Element *to = (Element *)found.word + part;
            if (ONCE)
                load_once<LOAD>(to, row + SPREAD * k + part);
            else
                load<LOAD>(to, row + k + part);
        }
    }
    return found;
}

// A copy has 4, 8 or 16 bytes. AMD has none.
#define ASYNCHRONOUS (LOAD >= 4 && COLUMNS == 8)
#if STAGES && !ASYNCHRONOUS
#error "no asynchronous copies"
#endif
#if ASYNCHRONOUS
// Starts the copy of the piece at `k` into the lane's slot, zeros from `end` on. The row's pieces
// are APART pieces from each other.
template <int APART> DEVICE void begin_bytes(u8 *slot, const Element *row, long long k, long long end) {
    UNROLLED for (int part = 0; part < PIECE; part += VEC) copy_async<LOAD>(slot + part * 16 / PIECE, row + APART * k + part, k + part < end);
}
#endif

#if STAGES
// Streams a lane's COUNT rows through its part of a ring of STAGES stages, and calls `use(weight,
// k, slot, u)` for each of the UNROLL steps of an iteration, with the lane's `k`.
//
// The block's iterations cover `begin` to `stop`. A warp starts `offset` later, a lane `skew` later
// still; a lane's elements end at `end`. Copies of an iteration start STAGES - 1 iterations before
// its use. `also(slot, k)` starts the copies that all warps of the block share, from the
// iteration's first `k`; then each iteration has a barrier.
template <int COUNT, typename Also, typename Use>
DEVICE void through_ring(u8 *ring, const Element *const *rows, long long begin, long long stop, long long offset, long long skew, long long end,
                         Also also, Use use) {
    const long long turn = WARPS_K * UNROLL * STEP;
    const int slot_bytes = UNROLL * COUNT * THREADS * 16;
    long long ahead = begin;
    int filled = 0, used = 0;
    const auto fill = [&] {
        u8 *slot = ring + filled * slot_bytes + 16 * thread();
        if (ahead + offset < stop)
            UNROLLED for (int u = 0; u < UNROLL; u++) UNROLLED for (int r = 0; r < COUNT; r++)
                begin_bytes<SPREAD>(slot + (u * COUNT + r) * (THREADS * 16), rows[r], ahead + offset + skew + u * STEP, end);
        if (ahead < stop) also(filled, ahead);
        commit_copies();
        ahead += turn;
        filled = filled == STAGES - 1 ? 0 : filled + 1;
    };
    for (int stage = 0; stage < STAGES - 1; stage++) fill();
    for (long long at = begin; at < stop; at += turn) {
#if X_IN_RING
        await_copies<STAGES - 2>();
        sync_block();  // all copies have arrived, and no thread reads the slot to fill next
        fill();
#else
        fill();
        await_copies<STAGES - 1>();
#endif
        const u8 *slot = ring + used * slot_bytes + 16 * thread();
        if (at + offset < stop)
            UNROLLED for (int u = 0; u < UNROLL; u++) {
                Bytes16 weight[COUNT];
                UNROLLED for (int r = 0; r < COUNT; r++) weight[r] = *(const Bytes16 *)(slot + (u * COUNT + r) * (THREADS * 16));
                use(weight, at + offset + skew + u * STEP, used, u);
            }
        used = used == STAGES - 1 ? 0 : used + 1;
    }
}
#endif

DEVICE int shuffle_xor(int value, int mask) { return (int)as_bits(shuffle_xor(as_float((u32)value), mask)); }

#if BATCHED
// Returns the operands of the block's product of the batch, the grid's third axis.
DEVICE Args batch_of(Args args) {
    const long long z = block_z(), sums = z * args.m * args.n;
    args.x = (Element *)args.x + z * args.m * args.k;
    args.weight = (Element *)args.weight + z * args.n * args.k;
    args.bias = (u8 *)args.bias + z * args.n * (BIAS == 3 ? 4 : 2);
    args.out = (u8 *)args.out + sums * (OUT == 2 ? 4 : 2);
    args.partial = (Sum *)args.partial + sums * args.splits;
    args.counters = (u32 *)args.counters + z * ((args.n + ROWS - 1) / ROWS);
    args.x_scale = (float *)args.x_scale + z * args.m;
    args.w_scale = (float *)args.w_scale + z * args.n;
    return args;
}
#endif

// Returns the start of a weight row.
DEVICE const Element *weight_at(const Args &args, long long row) {
    const long long within = row % SPREAD;
    return (const Element *)args.weight + (row - within) * args.k + within * PIECE;
}

DEVICE float scale_at(const void *scales, long long place) {
    u32 bits;
    load<4>(&bits, (const float *)scales + place);
    return as_float(bits);
}

// Converts elements 2i and 2i + 1 to 16 bits, exactly.
DEVICE float first_of(u32 word) { return DTYPE == 0 ? as_float(word << 16) : float_of_half((u16)word); }
DEVICE float second_of(u32 word) { return DTYPE == 0 ? as_float(word & 0xFFFF0000u) : float_of_half((u16)(word >> 16)); }

#if FP4 && COLUMNS == 8 && !defined(SKINNY_HOST)
// Returns whether any lane of the warp has the flag, the same for all lanes.
DEVICE bool any_lane(bool mine) { return __any_sync(~0u, mine); }
DEVICE u32 low_halves(u32 one, u32 two) { return __byte_perm(one, two, 0x5410); }
DEVICE u32 high_halves(u32 one, u32 two) { return __byte_perm(one, two, 0x7632); }
// Opaque to the compiler, which would merge it with left shifts; these use another pipeline than
// right ones.
DEVICE u32 two_elements_on(u32 word) {
    u32 found;
    asm("shr.u32 %0, %1, 8;" : "=r"(found) : "r"(word));
    return found;
}
// Multiplies two bfloat16 pairs; a product with a power of two is exact.
DEVICE u32 multiply_bfloats(u32 one, u32 two) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(one), "r"(two), "r"(0x80008000u));
    return product;
}
#elif FP4
#ifdef SKINNY_HOST
DEVICE bool any_lane(bool mine) {
    float lanes = mine;
    for (int mask = WAVE / 2; mask; mask /= 2) lanes += host_shuffle_xor(lanes, mask);
    return lanes > 0;
}
#else  // AMD's matrix instructions ignore the lane mask, so no lane may be masked there
DEVICE bool any_lane(bool mine) { return __builtin_amdgcn_ballot_w64(mine) != 0; }
#endif
DEVICE u32 low_halves(u32 one, u32 two) { return (one & 0xFFFFu) | two << 16; }
DEVICE u32 high_halves(u32 one, u32 two) { return one >> 16 | (two & 0xFFFF0000u); }
DEVICE u32 two_elements_on(u32 word) { return word >> 8; }
DEVICE u32 multiply_bfloats(u32 one, u32 two) {
    const float low = as_float(one << 16) * as_float(two << 16), high = as_float(one & 0xFFFF0000u) * as_float(two & 0xFFFF0000u);
    return as_bits(low) >> 16 | (as_bits(high) & 0xFFFF0000u);
}
#endif

// Rounds to nearest even; a NaN stays a NaN, though its fraction could round away.
DEVICE u16 bfloat_of(float value) {
    const u32 bits = as_bits(value);
    return value != value ? (u16)0x7FC0u : (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
