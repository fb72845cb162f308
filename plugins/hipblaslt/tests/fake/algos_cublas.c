/* cuBLASLt's algorithms: an id and attributes to read, set and check. */
#include "fake.h"

#ifdef FAKE_CUBLASLT
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { REDUCE_INPLACE = 1, REDUCE_COMPUTE = 2, REDUCE_OUTPUT = 4, SHARED_BYTES = 256 * 1024, MULTIPROCESSORS = 132, HITS = 8 };

typedef struct { int id, rows, cols; } Tile;         /* of D */
typedef struct { int id, depth, count; } Stage;      /* elements of K, buffers; 0: as many as fit */
static const Tile TILES[] = {
    {11, 32, 32}, {15, 64, 64}, {17, 64, 128}, {18, 128, 64}, {20, 128, 128}, {23, 128, 256}, {24, 256, 128},
};
static const Stage STAGES[] = {{8, 32, 2}, {9, 32, 3}, {14, 64, 2}, {15, 64, 3}, {16, 64, 4}, {21, 128, 3}, {35, 64, 0}, {36, 128, 0}};

typedef struct {
    int id, align;                   /* bytes; 0: one element */
    uint32_t tiles[8], stages[8];    /* ids, 0 at the end */
    int split_k, reductions, swizzle, options, cluster;
    uint32_t best_tile, best_stage;
    double cost_us;                  /* at its best */
} Family;
static const Family FAMILIES[] = {
    {11, 0, {11, 15, 17, 18}, {0}, 1, 7, 0, 0, 0, 15, 0, 750},
    {21, 4, {15, 17, 18, 20}, {8, 9}, 1, 6, 1, 2, 0, 18, 9, 550},
    {66, 16, {15, 17, 18, 20, 23, 24}, {14, 15, 16, 21}, 1, 6, 1, 3, 0, 18, 16, 150},
    {71, 16, {18, 20, 23, 24}, {35, 36}, 0, 6, 1, 5, 1, 18, 36, 350},
};

/* The 64 bytes of cublasLtMatmulAlgo_t. */
typedef struct {
    int32_t id, split_k;
    uint32_t tile, reduction, swizzle, option, stages;
    uint16_t inner, cluster;
    int16_t types[6];    /* computation, scale, A, B, C, D */
    uint16_t aligned[4]; /* alignment of A, B, C and D in bytes; 0: the algorithm's */
    uint32_t version;
    uint64_t check;
} Config;
_Static_assert(sizeof(Config) <= sizeof(Algo), "fits cublasLtMatmulAlgo_t");

static uint64_t check(const Config *config) { return lt_hash(config, offsetof(Config, check), 3); }

static const Family *family(int id) {
    for (size_t i = 0; i < sizeof FAMILIES / sizeof *FAMILIES; i++) {
        if (FAMILIES[i].id == id) {
            return &FAMILIES[i];
        }
    }
    return NULL;
}

static int position(const uint32_t *ids, uint32_t id) {
    for (int i = 0; ids[i]; i++) {
        if (ids[i] == id) {
            return i;
        }
    }
    return -1;
}

static int length(const uint32_t *ids) {
    int count = 0;
    while (ids[count]) {
        count++;
    }
    return count;
}

static int takes(const Family *f, int type) { return lt_is_fp8(type) ? f->id >= 66 : type == R_8I ? f->id >= 21 : 1; }

static void seal(Config *config, Algo *out) {
    config->check = check(config);
    memset(out, 0, sizeof *out);
    memcpy(out, config, sizeof *config);
}

static int opened(const Algo *algo, Config *out) {
    if (!algo) {
        return lt_refuse(INVALID_VALUE, "no algorithm");
    }
    memcpy(out, algo, sizeof *out);
    uint32_t version = (uint32_t)lt_setting("FAKE_LT_VERSION", 130100);
    if (out->check != check(out) || !family(out->id) || out->version != version) {
        return lt_refuse(INVALID_VALUE, "this algorithm (id %d) was not made by this library", out->id);
    }
    return SUCCESS;
}

/* Each attribute adds to the cost, so that single changes lead to the best: each step away from the
 * best tile and stages of the family, and from swizzle 1 and option 2. */
static double cost(const Config *c) {
    const Family *f = family(c->id);
    int tile = abs(position(f->tiles, c->tile) - position(f->tiles, f->best_tile));
    int stage = f->best_stage ? abs(position(f->stages, c->stages) - position(f->stages, f->best_stage)) : 0;
    int swizzle = f->swizzle && c->swizzle != 1, option = f->options ? abs((int)c->option - 2) : 0;
    return f->cost_us + 60 * tile + 50 * stage + 90 * swizzle + 40 * option + 120 * log2(c->split_k) + 30 * (c->cluster > 2);
}

static const Tile *tile_of(uint32_t id) {
    const Tile *tile = TILES;
    while (tile->id != (int)id) {
        tile++;
    }
    return tile;
}

static int attributes(const Family *f, const Config *c) {
    if (position(f->tiles, c->tile) < 0) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d has no tile %u", f->id, c->tile);
    }
    if (f->stages[0] ? position(f->stages, c->stages) < 0 : c->stages != 0) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d has no stages %u", f->id, c->stages);
    }
    if (c->split_k < 1 || (c->split_k > 1 && !f->split_k)) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d does not split K into %d", f->id, c->split_k);
    }
    int one = c->reduction == REDUCE_INPLACE || c->reduction == REDUCE_COMPUTE || c->reduction == REDUCE_OUTPUT;
    if (c->split_k > 1 ? !one || !(c->reduction & (uint32_t)f->reductions) : c->reduction != 0) {
        return lt_refuse(NOT_SUPPORTED, "reduction %u does not go with K in %d parts of algorithm %d", c->reduction, c->split_k, f->id);
    }
    if ((int64_t)c->swizzle > f->swizzle || (int64_t)c->option > f->options || c->inner || (c->cluster && !f->cluster)) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d has no swizzle %u, option %u, inner shape %u, cluster %u", f->id, c->swizzle, c->option,
                         c->inner, c->cluster);
    }
    if (c->cluster && c->cluster != 2 && c->cluster != 3 && c->cluster != 5 && c->cluster != 6) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d has no cluster shape %u", f->id, c->cluster);
    }
    return SUCCESS;
}

int lt_plan(const Problem *p, const Algo *algo, Plan *plan) {
    Config c;
    int status = opened(algo, &c);
    if (status) {
        return status;
    }
    const int types[6] = {p->compute, p->scale_type, p->a.type, p->b.type, p->c.type, p->d.type};
    for (int i = 0; i < 6; i++) {
        if (types[i] != c.types[i]) {
            return lt_refuse(INVALID_VALUE, "the algorithm %d was made for other types (%d, not %d)", c.id, c.types[i], types[i]);
        }
    }
    const Family *f = family(c.id);
    status = attributes(f, &c);
    if (status) {
        return status;
    }
    int bytes = lt_size(p->a.type), out = lt_size(p->d.type), align = f->align ? f->align : bytes;
    if (p->a.ld * bytes % align || p->b.ld * bytes % align || p->c.ld * out % align || p->d.ld * out % align) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d wants leading dimensions of %d bytes", f->id, align);
    }
    if (p->batch > 1 && (p->a.stride * bytes % align || p->b.stride * bytes % align || p->d.stride * out % align)) {
        return lt_refuse(NOT_SUPPORTED, "algorithm %d wants matrices of a batch %d bytes apart", f->id, align);
    }
    const Tile *tile = tile_of(c.tile);
    for (size_t i = 0; i < sizeof STAGES / sizeof *STAGES; i++) {
        if (STAGES[i].id == (int)c.stages && (tile->rows + tile->cols) * STAGES[i].depth * STAGES[i].count * bytes > SHARED_BYTES) {
            return lt_refuse(NOT_SUPPORTED, "tile %u with stages %u does not fit the shared memory", c.tile, c.stages);
        }
    }
    if (p->k / c.split_k < 16 && c.split_k > 1) {
        return lt_refuse(NOT_SUPPORTED, "K of %lld is too short for %d parts", (long long)p->k, c.split_k);
    }
    int64_t tiles = (p->m + tile->rows - 1) / tile->rows * ((p->n + tile->cols - 1) / tile->cols) * p->batch;
    int64_t partial = c.reduction == REDUCE_INPLACE ? tiles * 4 : p->m * p->n * p->batch * c.split_k * (c.reduction == REDUCE_OUTPUT ? out : 4);
    *plan = (Plan){
        .workspace = c.split_k > 1 ? (size_t)partial : 0, .align = align, .fails = c.cluster == 6,
        .waves = (float)(tiles * c.split_k) / MULTIPROCESSORS, .cost_us = cost(&c),
    };
    for (int i = 0; i < 4; i++) {
        plan->aligned[i] = c.aligned[i];
    }
    return SUCCESS;
}

/* With FAKE_LT_ALIGNED a result needs all the alignment that the preference promises. */
static void use_alignment(const Object *preference, Config *config) {
    for (int i = 0; preference && lt_setting("FAKE_LT_ALIGNED", 0) > 0 && i < 4; i++) {
        config->aligned[i] = (uint16_t)lt_get(preference, F_ALIGN_A + i);
    }
}

/* Candidates of the heuristic, best first: id, tile, stages, split K, reduction, cluster. */
static const int GUESSES[][6] = {
    {66, 20, 15, 1, 0, 0}, {66, 20, 14, 1, 0, 0}, {66, 23, 15, 1, 0, 0}, {66, 20, 15, 2, REDUCE_COMPUTE, 0}, {71, 20, 35, 1, 0, 2},
    {71, 23, 35, 1, 0, 3}, {66, 20, 15, 4, REDUCE_COMPUTE, 0}, {21, 20, 8, 1, 0, 0}, {21, 15, 8, 1, 0, 0}, {11, 17, 0, 1, 0, 0},
    {11, 18, 0, 1, 0, 0}, {11, 11, 0, 2, REDUCE_INPLACE, 0},
};

static Config made(int id, const int types[6]) {
    Config config = {.id = id, .split_k = 1, .version = (uint32_t)lt_setting("FAKE_LT_VERSION", 130100)};
    for (int i = 0; i < 6; i++) {
        config.types[i] = (int16_t)types[i];
    }
    return config;
}

static int preferred(const Object *preference, const Plan *plan, const Config *config, size_t max_workspace) {
    if (plan->workspace > max_workspace) {
        return 0;
    }
    if (!preference) {
        return 1;
    }
    for (int attribute = F_ALIGN_A; attribute <= F_ALIGN_D; attribute++) {
        if (lt_get(preference, attribute) < plan->align) {
            return 0;
        }
    }
    int32_t bits = (int32_t)lt_get(preference, F_MAX_WAVES);
    float waves;
    memcpy(&waves, &bits, 4);
    int reduced = !config->reduction || (config->reduction & (uint64_t)lt_get(preference, F_REDUCTION_MASK));
    return reduced && (waves == 0.0f || plan->waves <= waves);
}

int lt_heuristic(const Problem *p, const Object *preference, size_t max_workspace, int count, Result *results, int *returned) {
    if (preference && lt_get(preference, F_SEARCH_MODE) != 0) {
        return lt_refuse(NOT_SUPPORTED, "search mode %lld", (long long)lt_get(preference, F_SEARCH_MODE));
    }
    const int types[6] = {p->compute, p->scale_type, p->a.type, p->b.type, p->c.type, p->d.type};
    *returned = 0;
    lt_quiet(1);
    for (size_t i = 0; i < sizeof GUESSES / sizeof *GUESSES && *returned < count && *returned < HITS; i++) {
        const int *guess = GUESSES[i];
        Config config = made(guess[0], types);
        config.tile = (uint32_t)guess[1];
        config.stages = (uint32_t)guess[2];
        config.split_k = guess[3];
        config.reduction = (uint32_t)guess[4];
        config.cluster = (uint16_t)guess[5];
        use_alignment(preference, &config);
        Result result = {.state = SUCCESS};
        Plan plan;
        seal(&config, &result.algo);
        if (takes(family(config.id), p->a.type) && !lt_plan(p, &result.algo, &plan) && preferred(preference, &plan, &config, max_workspace)) {
            result.workspace = plan.workspace;
            result.waves = plan.waves;
            result.state = lt_state(*returned);
            results[(*returned)++] = result;
        }
    }
    lt_quiet(0);
    return *returned ? SUCCESS : lt_refuse(NOT_SUPPORTED, "the heuristic has no answer");
}

/* Simulated microseconds of a launch beyond the product; -1 for a foreign algorithm. */
EXPORT double fake_cost_us(const Algo *algo) {
    Config config;
    return opened(algo, &config) || position(family(config.id)->tiles, config.tile) < 0 ? -1 : cost(&config);
}

/* Types of a product; problem.c has the finer rules. */
static int typed(const int types[6]) {
    int in = types[2], out = types[5], fp8 = lt_is_fp8(in);
    int known = lt_size(in) && in != R_32I && types[3] == in && types[4] == out;
    int stored = in == R_8I ? out == R_32I : fp8 ? out == R_16BF || out == R_16F || out == R_32F : out == in || out == R_32F;
    int computed = in == R_8I ? types[0] == COMPUTE_32I && types[1] == R_32I
                              : types[1] == R_32F && (types[0] == COMPUTE_32F || (types[0] == COMPUTE_32F_TF32 && in == R_32F));
    return known && stored && computed ? SUCCESS : lt_refuse(NOT_SUPPORTED, "no algorithm for A %d, D %d, computation %d", in, out, types[0]);
}

EXPORT int cublasLtMatmulAlgoInit(const Object *handle, int compute, int scale, int a, int b, int c, int d, int id, Algo *algo) {
    ENTER(MatmulAlgoInit);
    const int types[6] = {compute, scale, a, b, c, d};
    if (!lt_is(handle, HANDLE)) {
        return lt_refuse(NOT_INITIALIZED, "this is no live handle");
    }
    if (!algo || !family(id)) {
        return lt_refuse(INVALID_VALUE, "no algorithm has the id %d", id);
    }
    int status = typed(types);
    if (!status && !takes(family(id), a)) {
        status = lt_refuse(NOT_SUPPORTED, "algorithm %d does not multiply type %d", id, a);
    }
    if (!status) {
        Config config = made(id, types);
        seal(&config, algo);
    }
    return status;
}

EXPORT int cublasLtMatmulAlgoCheck(const Object *handle, const Object *desc, const Object *a, const Object *b, const Object *c, const Object *d,
                                   const Algo *algo, Result *result) {
    ENTER(MatmulAlgoCheck);
    Problem problem;
    Plan plan;
    if (!result) {
        return lt_refuse(INVALID_VALUE, "no place to put the result");
    }
    int status = lt_problem(handle, desc, a, b, c, d, &problem);
    status = status ? status : lt_plan(&problem, algo, &plan);
    if (!status) { /* "algo field is never updated" */
        result->workspace = plan.workspace;
        result->waves = plan.waves;
    }
    result->state = status;
    return status;
}

static int give(const void *value, size_t wanted, void *buffer, size_t size, size_t *written, int array) {
    if (size ? !buffer || (array ? size % 4 : size != wanted) : !written) {
        return lt_refuse(INVALID_VALUE, "the attribute has %zu bytes (got %zu)", wanted, size);
    }
    size_t copied = size && size < wanted ? size : wanted;
    if (size) {
        memcpy(buffer, value, copied);
    }
    if (written) {
        *written = copied;
    }
    return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoCapGetAttribute(const Algo *algo, int attribute, void *buffer, size_t size, size_t *written) {
    ENTER(MatmulAlgoCapGetAttribute);
    Config config;
    int status = opened(algo, &config);
    if (status) {
        return status;
    }
    const Family *f = family(config.id);
    uint64_t flags = 0;
    int32_t align = f->align ? f->align : lt_size(config.types[2]), value = 0;
    switch (attribute) {
    case 0: value = f->split_k; break;
    case 1: value = f->reductions; break;
    case 2: value = f->swizzle; break;
    case 3: case 4: value = 1; break; /* strided batch, D apart from C */
    case 6: return give(f->tiles, 4 * (size_t)length(f->tiles), buffer, size, written, 1);
    case 7: value = f->options; break;
    case 11: value = 3; break; /* pointer modes: host, device */
    case 12: value = EPILOGUE_DEFAULT | EPILOGUE_BIAS; break;
    case 13: return give(f->stages, 4 * (size_t)length(f->stages), buffer, size, written, 1);
    case 15: return give(&flags, 8, buffer, size, written, 0);
    case 16: case 17: case 18: case 19: value = align; break;
    case 5: case 10: case 14: case 21: case 22: case 23: break;
    default: return lt_refuse(INVALID_VALUE, "no capability %d", attribute);
    }
    return give(&value, 4, buffer, size, written, 0);
}

/* Address and size of an attribute in the configuration. */
static void *field(Config *config, int attribute, size_t *size) {
    *size = 4;
    switch (attribute) {
    case 0: return &config->id;
    case 1: return &config->tile;
    case 2: return &config->split_k;
    case 3: return &config->reduction;
    case 4: return &config->swizzle;
    case 5: return &config->option;
    case 6: return &config->stages;
    case 7: *size = 2; return &config->inner;
    case 8: *size = 2; return &config->cluster;
    default: *size = 0; return NULL;
    }
}

EXPORT int cublasLtMatmulAlgoConfigSetAttribute(Algo *algo, int attribute, const void *buffer, size_t size) {
    ENTER(MatmulAlgoConfigSetAttribute);
    Config config;
    size_t wanted;
    int status = opened(algo, &config);
    if (status) {
        return status;
    }
    void *place = field(&config, attribute, &wanted);
    if (!place || !attribute || !buffer || size != wanted) {
        return lt_refuse(INVALID_VALUE, "attribute %d of an algorithm takes %zu bytes (got %zu)", attribute, attribute ? wanted : 0, size);
    }
    memcpy(place, buffer, size);
    seal(&config, algo);
    return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const Algo *algo, int attribute, void *buffer, size_t size, size_t *written) {
    ENTER(MatmulAlgoConfigGetAttribute);
    Config config;
    size_t wanted;
    int status = opened(algo, &config);
    if (status) {
        return status;
    }
    void *place = field(&config, attribute, &wanted);
    return place ? give(place, wanted, buffer, size, written, 0) : lt_refuse(INVALID_VALUE, "an algorithm has no attribute %d", attribute);
}
#endif
