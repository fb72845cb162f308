/* Handles, layouts, descriptors and preferences: creation, attributes, destruction. */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int attribute, size; /* bytes */
    int64_t initial;
    int computed; /* 0: must keep its initial value */
} Slot;

#ifdef FAKE_CUBLASLT
static const Slot LAYOUTS[] = {
    {L_TYPE, 4, 0, 1}, {L_ORDER, 4, 0, 1}, {L_ROWS, 8, 0, 1}, {L_COLS, 8, 0, 1}, {L_LD, 8, 0, 1}, {L_BATCH, 4, 1, 1},
    {L_STRIDE, 8, 0, 1}, {7, 8, 0, 0}, {8, 4, 0, 0}, {9, 8, 0, 0}, {10, 8, 0, 0}, {11, 8, 0, 0}, {12, 4, 0, 0}, {13, 4, 0, 0},
};
static const Slot DESCS[] = {
    {D_COMPUTE, 4, 0, 1}, {D_SCALE_TYPE, 4, 0, 1}, {D_POINTER_MODE, 4, 0, 1}, {D_OP_A, 4, OP_N, 1}, {D_OP_B, 4, OP_N, 1},
    {5, 4, OP_N, 0}, {6, 4, 2, 0}, {D_EPILOGUE, 4, EPILOGUE_DEFAULT, 1}, {D_BIAS, 8, 0, 1}, {D_BIAS_STRIDE, 8, 0, 1}, {11, 8, 0, 0},
    {12, 8, 0, 0}, {13, 8, 0, 0}, {14, 8, 0, 0}, {15, 4, 0, 1}, {D_SCALE_A, 8, 0, 1}, {D_SCALE_B, 8, 0, 1}, {19, 8, 0, 0},
    {20, 8, 0, 0}, {21, 8, 0, 0}, {22, 4, -1, 0}, {23, 8, 0, 0}, {24, 8, 0, 0}, {25, 1, 0, 1}, {D_BIAS_TYPE, 4, NO_TYPE, 1},
    {D_MODE_A, 4, 0, 1}, {D_MODE_B, 4, 0, 1}, {33, 4, 0, 0}, {34, 4, 0, 0}, {35, 4, 0, 0}, {36, 8, 0, 0}, {37, 4, 0, 0},
    {38, 8, 0, 0}, {39, 8, 0, 0}, {40, 8, 0, 0}, {41, 4, 0x8000, 0},
};
static const Slot PREFERENCES[] = {
    {F_SEARCH_MODE, 4, 0, 1}, {F_MAX_WORKSPACE, 8, 0, 1}, {F_REDUCTION_MASK, 4, 7, 1}, {F_ALIGN_A, 4, 256, 1}, {6, 4, 256, 1},
    {7, 4, 256, 1}, {F_ALIGN_D, 4, 256, 1}, {F_MAX_WAVES, 4, 0, 1}, {12, 8, -1, 0}, {13, 4, 0, 0}, {14, 4, 0, 0}, {15, 4, 0, 0},
};
#else
static const Slot LAYOUTS[] = {
    {L_BATCH, 4, 1, 1}, {L_STRIDE, 8, 0, 1}, {L_TYPE, 4, 0, 1}, {L_ORDER, 4, 0, 1}, {L_ROWS, 8, 0, 1}, {L_COLS, 8, 0, 1},
    {L_LD, 8, 0, 1}, {7, 4, 0, 0}, {8, 8, 0, 0},
};
static const Slot DESCS[] = {
    {D_COMPUTE, 4, 0, 1}, {D_SCALE_TYPE, 4, 0, 1}, {D_OP_A, 4, OP_N, 1}, {D_OP_B, 4, OP_N, 1}, {D_EPILOGUE, 4, EPILOGUE_DEFAULT, 1},
    {D_BIAS, 8, 0, 1}, {D_BIAS_TYPE, 4, NO_TYPE, 1}, {D_SCALE_A, 8, 0, 1}, {D_SCALE_B, 8, 0, 1}, {7, 8, 0, 0}, {8, 8, 0, 0},
    {9, 8, 0, 0}, {10, 8, 0, 0}, {11, 8, 0, 0}, {12, 8, 0, 0}, {D_POINTER_MODE, 4, 0, 1}, {14, 8, 0, 0}, {22, 4, NO_TYPE, 0},
    {D_BIAS_STRIDE, 4, 0, 1}, {D_MODE_A, 4, 0, 1}, {D_MODE_B, 4, 0, 1}, {33, 4, 0, 1}, {100, 4, NO_TYPE, 0}, {101, 4, NO_TYPE, 0},
    {102, 4, 0, 0}, {103, 4, 0, 0}, {104, 4, 0, 1}, {105, 4, 0, 0}, {106, 8, 0, 0},
};
static const Slot PREFERENCES[] = {{F_SEARCH_MODE, 4, 0, 1}, {F_MAX_WORKSPACE, 8, 0, 1}, {2, 4, 0, 1}};
#endif

enum { MOST = 48 };
struct Object {
    Kind kind;
    Object *next;
    int64_t values[MOST]; /* in the order of the kind's slots, in the low bytes */
};

static const char *const KINDS[] = {"handle", "matrix layout", "matmul descriptor", "preference"};
static const struct {
    const Slot *slots;
    int count;
} TABLES[] = {
    {NULL, 0},
    {LAYOUTS, sizeof LAYOUTS / sizeof(Slot)},
    {DESCS, sizeof DESCS / sizeof(Slot)},
    {PREFERENCES, sizeof PREFERENCES / sizeof(Slot)},
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object *live;
static long live_count;

int lt_is(const void *pointer, Kind kind) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Object *object = live; object; object = object->next) {
        found |= object == pointer && object->kind == kind;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int place(Kind kind, int attribute) {
    for (int i = 0; i < TABLES[kind].count; i++) {
        if (TABLES[kind].slots[i].attribute == attribute) {
            return i;
        }
    }
    return -1;
}

int64_t lt_get(const Object *object, int attribute) {
    int i = place(object->kind, attribute);
    return i < 0 ? 0 : object->values[i];
}

int lt_only_computed(const Object *object, const char *what) {
    for (int i = 0; i < TABLES[object->kind].count; i++) {
        const Slot *slot = &TABLES[object->kind].slots[i];
        if (!slot->computed && object->values[i] != slot->initial) {
            return lt_refuse(NOT_SUPPORTED, "attribute %d of the %s %s is set, and nothing here computes with it", slot->attribute, what,
                             KINDS[object->kind]);
        }
    }
    return SUCCESS;
}

static int create(Object **out, Kind kind) {
    if (!out) {
        return lt_refuse(INVALID_VALUE, "no place to put the new %s", KINDS[kind]);
    }
    Object *object = calloc(1, sizeof *object);
    if (!object) {
        return lt_refuse(ALLOC_FAILED, "out of memory");
    }
    object->kind = kind;
    for (int i = 0; i < TABLES[kind].count; i++) {
        object->values[i] = TABLES[kind].slots[i].initial;
    }
    pthread_mutex_lock(&lock);
    object->next = live;
    live = object;
    live_count++;
    pthread_mutex_unlock(&lock);
    *out = object;
    return SUCCESS;
}

static int destroy(Object *gone, Kind kind) {
    if (!lt_is(gone, kind)) {
        return lt_refuse(kind == HANDLE ? NOT_INITIALIZED : INVALID_VALUE, "this is no live %s", KINDS[kind]);
    }
    pthread_mutex_lock(&lock);
    Object **link = &live;
    while (*link != gone) {
        link = &(*link)->next;
    }
    *link = gone->next;
    live_count--;
    pthread_mutex_unlock(&lock);
    free(gone);
    return SUCCESS;
}

static int set(Object *object, Kind kind, int attribute, const void *buffer, size_t size) {
    if (!lt_is(object, kind)) {
        return lt_refuse(INVALID_VALUE, "this is no live %s", KINDS[kind]);
    }
    int i = attribute < 0 ? -1 : place(kind, attribute);
    if (i < 0) {
        return lt_refuse(INVALID_VALUE, "a %s has no attribute %d", KINDS[kind], attribute);
    }
    size_t wanted = (size_t)TABLES[kind].slots[i].size;
    if (!buffer || size != wanted) {
        return lt_refuse(INVALID_VALUE, "attribute %d of a %s takes %zu bytes (got %zu%s)", attribute, KINDS[kind], wanted, size,
                         buffer ? "" : ", from nowhere");
    }
    int32_t narrow;
    int8_t byte;
    switch (size) { /* sign-extended */
    case 1: memcpy(&byte, buffer, 1); object->values[i] = byte; break;
    case 4: memcpy(&narrow, buffer, 4); object->values[i] = narrow; break;
    default: memcpy(&object->values[i], buffer, 8);
    }
    return SUCCESS;
}

static int get(const Object *object, Kind kind, int attribute, void *buffer, size_t size, size_t *written) {
    if (!lt_is(object, kind)) {
        return lt_refuse(INVALID_VALUE, "this is no live %s", KINDS[kind]);
    }
    int i = attribute < 0 ? -1 : place(kind, attribute);
    size_t wanted = i < 0 ? 0 : (size_t)TABLES[kind].slots[i].size;
    if (i < 0) {
        return lt_refuse(INVALID_VALUE, "a %s has no attribute %d", KINDS[kind], attribute);
    }
    if (size ? !buffer || size != wanted : !written) {
        return lt_refuse(INVALID_VALUE, "attribute %d of a %s gives %zu bytes (got %zu)", attribute, KINDS[kind], wanted, size);
    }
    if (size) {
        memcpy(buffer, &object->values[i], size);
    }
    if (written) {
        *written = wanted;
    }
    return SUCCESS;
}

/* Live objects of all kinds. */
EXPORT long fake_live(void) {
    pthread_mutex_lock(&lock);
    long count = live_count;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT int P(Create)(Object **handle) {
    ENTER(Create);
    return create(handle, HANDLE);
}
EXPORT int P(Destroy)(Object *handle) {
    ENTER(Destroy);
    return destroy(handle, HANDLE);
}

EXPORT int P(MatrixLayoutCreate)(Object **layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    ENTER(MatrixLayoutCreate);
    int status = create(layout, LAYOUT);
    if (!status) {
        (*layout)->values[place(LAYOUT, L_TYPE)] = type;
        (*layout)->values[place(LAYOUT, L_ROWS)] = (int64_t)rows;
        (*layout)->values[place(LAYOUT, L_COLS)] = (int64_t)cols;
        (*layout)->values[place(LAYOUT, L_LD)] = ld;
    }
    return status;
}
EXPORT int P(MatmulDescCreate)(Object **desc, int compute, int scale_type) {
    ENTER(MatmulDescCreate);
    int status = create(desc, DESC);
    if (!status) {
        (*desc)->values[place(DESC, D_COMPUTE)] = compute;
        (*desc)->values[place(DESC, D_SCALE_TYPE)] = scale_type;
    }
    return status;
}
EXPORT int P(MatmulPreferenceCreate)(Object **preference) {
    ENTER(MatmulPreferenceCreate);
    return create(preference, PREFERENCE);
}

#define ATTRIBUTES(name, kind)                                                                           \
    EXPORT int P(name##Destroy)(Object * object) {                                                       \
        ENTER(name##Destroy);                                                                            \
        return destroy(object, kind);                                                                    \
    }                                                                                                    \
    EXPORT int P(name##SetAttribute)(Object * object, int attribute, const void *buffer, size_t size) {  \
        ENTER(name##SetAttribute);                                                                       \
        return set(object, kind, attribute, buffer, size);                                               \
    }                                                                                                    \
    EXPORT int P(name##GetAttribute)(const Object *object, int attribute, void *buffer, size_t size, size_t *written) { \
        ENTER(name##GetAttribute);                                                                       \
        return get(object, kind, attribute, buffer, size, written);                                      \
    }
ATTRIBUTES(MatrixLayout, LAYOUT)
ATTRIBUTES(MatmulDesc, DESC)
ATTRIBUTES(MatmulPreference, PREFERENCE)
