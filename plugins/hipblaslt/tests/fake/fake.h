/* Test library with the interface of cuBLASLt or hipBLASLt (-DFAKE_CUBLASLT, -DFAKE_HIPBLASLT).
 *
 * It multiplies in host memory, checks each argument as strictly as public headers and manuals, and
 * keeps the reason of the last refusal. Numbers come from cublasLt.h, cublas_api.h and library_types.h
 * of CUDA 13, and from hipblaslt.h, hipblas-common.h and library_types.h of ROCm 7. They are not shared
 * with the code under test.
 */
#ifndef FAKE_LT_H
#define FAKE_LT_H

#include <stddef.h>
#include <stdint.h>

#if defined(FAKE_CUBLASLT) == defined(FAKE_HIPBLASLT)
#error "define one of FAKE_CUBLASLT and FAKE_HIPBLASLT"
#endif

#define EXPORT __attribute__((visibility("default")))

/* Same numbers in both: cudaDataType and hipDataType, cublasLtEpilogue_t, the scale modes. */
enum {
    R_32F = 0, R_16F = 2, R_8I = 3, R_32I = 10, R_16BF = 14, R_E4M3 = 28, R_E4M3_FNUZ = 1000,
    EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4,
    SCALE_SCALAR = 0, SCALE_OUTER_VEC = 3, SCALE_VEC128 = 4, SCALE_BLK128 = 5,
    ORDER_COL = 0
};

#ifdef FAKE_CUBLASLT
#define PREFIX "cublasLt"
#define P(name) cublasLt##name
enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { OP_N = 0, OP_T = 1, OP_C = 2, COMPUTE_32F = 68, COMPUTE_32F_TF32 = 77, COMPUTE_32I = 72 };
enum { L_TYPE = 0, L_ORDER = 1, L_ROWS = 2, L_COLS = 3, L_LD = 4, L_BATCH = 5, L_STRIDE = 6 };
enum {
    D_COMPUTE = 0, D_SCALE_TYPE = 1, D_POINTER_MODE = 2, D_OP_A = 3, D_OP_B = 4, D_EPILOGUE = 7, D_BIAS = 8, D_BIAS_STRIDE = 10,
    D_SCALE_A = 17, D_SCALE_B = 18, D_BIAS_TYPE = 26, D_MODE_A = 31, D_MODE_B = 32
};
enum { NO_TYPE = -1, ALGO_BYTES = 64 };
typedef struct { uint64_t data[8]; } Algo;
#else
#define PREFIX "hipblasLt"
#define P(name) hipblasLt##name
enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 2, INVALID_VALUE = 3, EXECUTION_FAILED = 5, NOT_SUPPORTED = 7 };
enum { OP_N = 111, OP_T = 112, OP_C = 113, COMPUTE_32F = 2, COMPUTE_32F_TF32 = 6, COMPUTE_32I = 9 };
enum { L_TYPE = 2, L_ORDER = 3, L_ROWS = 4, L_COLS = 5, L_LD = 6, L_BATCH = 0, L_STRIDE = 1 };
/* Computation and scale type are set at creation and have no number. */
enum {
    D_COMPUTE = -1, D_SCALE_TYPE = -2, D_POINTER_MODE = 13, D_OP_A = 0, D_OP_B = 1, D_EPILOGUE = 2, D_BIAS = 3, D_BIAS_STRIDE = 23,
    D_SCALE_A = 5, D_SCALE_B = 6, D_BIAS_TYPE = 4, D_MODE_A = 31, D_MODE_B = 32
};
enum { ORDER_COL16_4R16 = 100, ORDER_COL16_4R8 = 101 };
enum { NO_TYPE = 255, ALGO_BYTES = 24 };
typedef struct { uint8_t data[16]; size_t max_workspace; } Algo;
#endif
enum { F_SEARCH_MODE = 0, F_MAX_WORKSPACE = 1, F_REDUCTION_MASK = 3, F_ALIGN_A = 5, F_ALIGN_D = 8, F_MAX_WAVES = 9 };

typedef struct {
    Algo algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Result;

_Static_assert(sizeof(Algo) == ALGO_BYTES, "size of the algorithm");
_Static_assert(sizeof(Result) == ALGO_BYTES + 32, "size of the heuristic's result");

/* objects.c: handles and descriptors. */
typedef enum { HANDLE, LAYOUT, DESC, PREFERENCE } Kind;
typedef struct Object Object;
int lt_is(const void *pointer, Kind kind);        /* whether a pointer is a live object of a kind */
int64_t lt_get(const Object *object, int attribute);
int lt_only_computed(const Object *object, const char *what); /* refuses changed attributes that the fake ignores */

/* record.c: counts of calls and reasons of refusals. */
void lt_enter(const char *function);
int lt_refuse(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void lt_quiet(int on); /* 1: do not record this thread's refusals */
double lt_setting(const char *name, double otherwise); /* a number from the environment */
int lt_state(int place); /* status of one result of the heuristic */
uint64_t lt_hash(const void *bytes, size_t size, uint64_t seed);
#define ENTER(name) lt_enter(PREFIX #name)

/* problem.c: D[m, n] = alpha * op(A)[m, k] op(B)[k, n] + beta * C[m, n] + bias[m]; ld and strides in elements. */
typedef struct {
    int type, order, transposed;
    int64_t rows, cols, ld, stride;
} Matrix;
typedef struct {
    Matrix a, b, c, d;
    int compute, scale_type, epilogue, bias_type, mode_a, mode_b;
    int64_t m, n, k, batch, bias_stride;
    const void *bias;
    const float *scale_a, *scale_b;
} Problem;
int lt_problem(const Object *handle, const Object *desc, const Object *a, const Object *b, const Object *c, const Object *d, Problem *out);
int lt_size(int type);                        /* bytes of an element; 0 for an unknown type */
int lt_is_fp8(int type);

/* algos_cublas.c, algos_hipblas.c */
typedef struct {
    size_t workspace;   /* bytes */
    int align;          /* bytes: alignment of pointers, leading dimensions and strides */
    int aligned[4];     /* bytes: alignment of the pointers of A, B, C and D; 0: as align */
    int fails, wrong;   /* at the launch */
    float waves;
    double cost_us;
} Plan;
int lt_plan(const Problem *problem, const Algo *algo, Plan *plan); /* refuses a foreign algorithm or another problem's */
int lt_heuristic(const Problem *problem, const Object *preference, size_t max_workspace, int count, Result *results, int *returned);

/* product.c */
typedef struct { const void *a, *b, *c; void *d; double alpha, beta; } Operands;
int lt_product(const Problem *problem, const Operands *operands, int wrong);

#endif
