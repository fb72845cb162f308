/* hipBLASLt's algorithms: opaque, with the index as int32 at byte 0; all are listed after the heuristic's. */
#include "fake.h"

#ifdef FAKE_HIPBLASLT
#include <string.h>

enum {
    FIRST = 1000,  /* index of solution 0 */
    GUESSED = 12,  /* the heuristic considers solutions 0..11 */
    HITS = 8,      /* and returns at most this many */
    WRONG = 12,    /* fastest, and wrong */
    FAILS = 17,    /* fails when launched */
    WINNER = 22
};

typedef struct {
    int32_t index;
    uint32_t problem; /* signature of its problem */
    uint64_t check;   /* of index, problem, workspace and version */
} Inside;
_Static_assert(sizeof(Inside) == 16, "fills hipblasLtMatmulAlgo_t.data");

static int solutions(void) { return (int)lt_setting("FAKE_LT_SOLUTIONS", 40); }

/* Hash of types, sizes, operations, orders, epilogue and scale modes, without leading dimensions and pointers. */
static uint32_t signature(const Problem *p) {
    const int64_t parts[] = {
        p->a.type, p->d.type, p->a.order, p->a.transposed, p->b.transposed, p->m, p->n, p->k, p->batch, p->compute, p->epilogue, p->mode_a, p->mode_b,
    };
    return (uint32_t)lt_hash(parts, sizeof parts, 1);
}

static uint64_t check(const Inside *inside, size_t max_workspace) {
    const uint64_t parts[] = {(uint64_t)inside->index, inside->problem, max_workspace, (uint64_t)lt_setting("FAKE_LT_VERSION", 100200)};
    return lt_hash(parts, sizeof parts, 2);
}

static size_t workspace_of(int solution) { return solution % 5 == 4 ? 1 << 20 : 0; }

/* Two solutions of three read a tiled A; every seventh needs K in multiples of 64. */
static int fits(int solution, const Problem *p) {
    return (solution % 7 != 6 || p->k % 64 == 0) && (p->a.order == ORDER_COL || solution % 3 != 2);
}

static double cost(int solution) {
    switch (solution) {
    case WRONG: return 60;
    case FAILS: return 80;
    case WINNER: return 120;
    default: return solution < GUESSED ? 300 + 15 * ((solution * 5 + 8) % GUESSED) : 600 + 10 * (solution * 11 % 29);
    }
}

int lt_plan(const Problem *problem, const Algo *algo, Plan *plan) {
    Inside inside;
    memcpy(&inside, algo->data, sizeof inside);
    if (inside.check != check(&inside, algo->max_workspace)) {
        return lt_refuse(INVALID_VALUE, "this algorithm (index %d) was not made by this library", inside.index);
    }
    if (inside.problem != signature(problem)) {
        return lt_refuse(INVALID_VALUE, "the algorithm %d was made for another problem", inside.index);
    }
    int solution = inside.index - FIRST;
    *plan = (Plan){
        .workspace = workspace_of(solution), .align = lt_is_fp8(problem->a.type) || problem->a.type == R_8I ? 16 : lt_size(problem->a.type),
        .fails = solution == FAILS, .wrong = solution == WRONG, .waves = 1.0f, .cost_us = cost(solution),
    };
    return SUCCESS;
}

int lt_heuristic(const Problem *problem, const Object *preference, size_t max_workspace, int count, Result *results, int *returned) {
    if (preference && lt_get(preference, F_SEARCH_MODE) != 0) {
        return lt_refuse(NOT_SUPPORTED, "search mode %lld", (long long)lt_get(preference, F_SEARCH_MODE));
    }
    *returned = 0;
    for (int solution = 0; solution < solutions() && *returned < count; solution++) {
        if (solution < GUESSED && *returned == HITS) {
            continue;
        }
        if (!fits(solution, problem) || workspace_of(solution) > max_workspace) {
            continue;
        }
        int state = lt_state(*returned);
        Result *result = &results[(*returned)++];
        Inside inside = {.index = FIRST + solution, .problem = signature(problem)};
        inside.check = check(&inside, max_workspace);
        *result = (Result){.algo = {.max_workspace = max_workspace}, .workspace = workspace_of(solution), .state = state, .waves = 1.0f};
        memcpy(result->algo.data, &inside, sizeof inside);
    }
    return *returned ? SUCCESS : lt_refuse(NOT_SUPPORTED, "no solution");
}

/* Simulated microseconds of a launch beyond the product. */
EXPORT double fake_cost_us(const Algo *algo) {
    Inside inside;
    memcpy(&inside, algo->data, sizeof inside);
    return cost(inside.index - FIRST);
}
#endif
