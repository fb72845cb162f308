/* Heuristic, launch and version. */
#include "fake.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

EXPORT int P(MatmulAlgoGetHeuristic)(const Object *handle, const Object *desc, const Object *a, const Object *b, const Object *c, const Object *d,
                                     const Object *preference, int count, Result results[], int *returned) {
    ENTER(MatmulAlgoGetHeuristic);
    Problem problem;
    if (count <= 0 || !results || !returned) {
        return lt_refuse(INVALID_VALUE, "room for %d results", count);
    }
    *returned = 0;
    int status = lt_problem(handle, desc, a, b, c, d, &problem);
    if (!status && !lt_is(preference, PREFERENCE)) {
        status = lt_refuse(INVALID_VALUE, "this is no live preference");
    }
    status = status ? status : lt_only_computed(preference, "one");
    return status ? status : lt_heuristic(&problem, preference, (size_t)lt_get(preference, F_MAX_WORKSPACE), count, results, returned);
}

static double number(const void *value, int type) { return type == R_32I ? *(const int32_t *)value : *(const float *)value; }

static int same(const Matrix *x, const Matrix *y) {
    return x->type == y->type && x->ld == y->ld && x->stride == y->stride;
}

static int pointers(const Problem *p, const void *alpha, const void *beta, const Operands *operands) {
    if (!alpha || !beta || !operands->a || !operands->b || !operands->c || !operands->d) {
        return lt_refuse(INVALID_VALUE, "one of alpha, beta, A, B, C, D is null");
    }
    if (operands->c == operands->d && !same(&p->c, &p->d)) {
        return lt_refuse(INVALID_VALUE, "C and D are one matrix with two layouts");
    }
    if (p->epilogue == EPILOGUE_BIAS && !p->bias) {
        return lt_refuse(INVALID_VALUE, "the epilogue adds a bias, and there is none");
    }
    if (p->epilogue == EPILOGUE_BIAS && (uintptr_t)p->bias % (uintptr_t)lt_size(p->bias_type)) {
        return lt_refuse(INVALID_VALUE, "the bias is not aligned to its elements");
    }
    if ((p->mode_a != SCALE_SCALAR && !p->scale_a) || (p->mode_b != SCALE_SCALAR && !p->scale_b)) {
        return lt_refuse(INVALID_VALUE, "scale modes %d and %d want scales, and one is null", p->mode_a, p->mode_b);
    }
    if ((uintptr_t)p->scale_a % 4 || (uintptr_t)p->scale_b % 4) {
        return lt_refuse(INVALID_VALUE, "scales are not aligned to floats");
    }
    return SUCCESS;
}

static int aligned(const Operands *operands, const Plan *plan) {
    const void *all[] = {operands->a, operands->b, operands->c, operands->d};
    for (int i = 0; i < 4; i++) {
        int bytes = plan->aligned[i] > plan->align ? plan->aligned[i] : plan->align;
        if ((uintptr_t)all[i] % (uintptr_t)bytes) {
            return lt_refuse(NOT_SUPPORTED, "the algorithm wants %c at a multiple of %d bytes", "ABCD"[i], bytes);
        }
    }
    return SUCCESS;
}

#ifdef FAKE_CUBLASLT
enum { WORKSPACE_ALIGN = 256 }; /* cuBLAS manual, cublasLtMatmul */
#else
enum { WORKSPACE_ALIGN = 16 }; /* hipblaslt.h, hipblasLtMatmul */
#endif

static int room(const Plan *plan, const void *workspace, size_t size) {
    int align = (int)lt_setting("FAKE_LT_WORKSPACE_ALIGN", WORKSPACE_ALIGN); /* torch's CPU allocator: 64 */
    if (size < plan->workspace) {
        return lt_refuse(INVALID_VALUE, "the algorithm wants a workspace of %zu bytes (got %zu)", plan->workspace, size);
    }
    if (plan->workspace && (!workspace || (uintptr_t)workspace % (uintptr_t)align)) {
        return lt_refuse(INVALID_VALUE, "the workspace %p is null or not at a multiple of %d bytes", workspace, align);
    }
    return SUCCESS;
}

/* The whole workspace is written: a smaller one, or one shared with another call, is detected. */
static int compute(const Problem *p, const Operands *operands, const Plan *plan, void *workspace) {
    static atomic_uint_fast64_t calls;
    uint64_t mark = atomic_fetch_add(&calls, 1), found = mark;
    if (plan->workspace) {
        memset(workspace, 0xA5, plan->workspace);
        memcpy(workspace, &mark, plan->workspace < sizeof mark ? plan->workspace : sizeof mark);
    }
    int status = lt_product(p, operands, plan->wrong);
    if (plan->workspace >= sizeof mark) {
        memcpy(&found, workspace, sizeof found);
    }
    if (plan->workspace) {
        memset(workspace, 0xA5, plan->workspace < sizeof mark ? plan->workspace : sizeof mark);
    }
    if (!status && found != mark) {
        status = lt_refuse(EXECUTION_FAILED, "the workspace changed during the call");
    }
    return status;
}

EXPORT int P(Matmul)(const Object *handle, const Object *desc, const void *alpha, const void *a, const Object *a_layout, const void *b,
                     const Object *b_layout, const void *beta, const void *c, const Object *c_layout, void *d, const Object *d_layout,
                     const Algo *algo, void *workspace, size_t workspace_bytes, void *stream) {
    ENTER(Matmul);
    (void)stream;
    double start = now_us();
    Problem problem;
    Plan plan;
    Result guess;
    int found = 0;
    Operands operands = {.a = a, .b = b, .c = c, .d = d};
    int status = lt_problem(handle, desc, a_layout, b_layout, c_layout, d_layout, &problem);
    status = status ? status : pointers(&problem, alpha, beta, &operands);
    if (!status && !algo) { /* "an implicit heuristics query with default search preferences" */
        status = lt_heuristic(&problem, NULL, workspace_bytes, 1, &guess, &found);
        algo = &guess.algo;
    }
    status = status ? status : lt_plan(&problem, algo, &plan);
    status = status ? status : room(&plan, workspace, workspace_bytes);
    status = status ? status : aligned(&operands, &plan);
    if (status) {
        return status;
    }
    if (plan.fails) {
        return lt_refuse(EXECUTION_FAILED, "this algorithm fails when it is launched");
    }
    operands.alpha = number(alpha, problem.scale_type);
    operands.beta = number(beta, problem.scale_type);
    status = compute(&problem, &operands, &plan, workspace);
    /* Simulated time of the product: 20 us and 1 ns a multiplication. */
    double product = 20 + 1e-3 * (double)problem.m * (double)problem.n * (double)problem.k * (double)problem.batch;
    double scale = lt_setting("FAKE_LT_COST", 1), until = now_us() > start + product ? now_us() : start + product;
    while (scale > 0 && now_us() < until + scale * plan.cost_us) {
    }
    return status;
}

#ifdef FAKE_CUBLASLT
EXPORT size_t cublasLtGetVersion(void) {
    ENTER(GetVersion);
    return (size_t)lt_setting("FAKE_LT_VERSION", 130100);
}
#else
static int ready(const Object *handle, const void *out) {
    if (!lt_is(handle, HANDLE)) {
        return lt_refuse(NOT_INITIALIZED, "this is no live handle");
    }
    return out ? SUCCESS : lt_refuse(INVALID_VALUE, "no place to put the answer");
}

EXPORT int hipblasLtGetVersion(const Object *handle, int *version) {
    ENTER(GetVersion);
    int status = ready(handle, version);
    if (!status) {
        *version = (int)lt_setting("FAKE_LT_VERSION", 100200);
    }
    return status;
}

EXPORT int hipblasLtGetGitRevision(const Object *handle, char *revision) {
    ENTER(GetGitRevision);
    int status = ready(handle, revision);
    const char *text = getenv("FAKE_LT_REVISION");
    if (!status) {
        strcpy(revision, text && *text ? text : "fake0001");
    }
    return status;
}
#endif
