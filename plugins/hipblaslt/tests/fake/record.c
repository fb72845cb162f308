/* Counts of calls, and the reason of the last refusal. */
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const FUNCTIONS[] = {
    PREFIX "Create", PREFIX "Destroy", PREFIX "GetVersion", PREFIX "GetGitRevision",
    PREFIX "MatrixLayoutCreate", PREFIX "MatrixLayoutDestroy", PREFIX "MatrixLayoutSetAttribute", PREFIX "MatrixLayoutGetAttribute",
    PREFIX "MatmulDescCreate", PREFIX "MatmulDescDestroy", PREFIX "MatmulDescSetAttribute", PREFIX "MatmulDescGetAttribute",
    PREFIX "MatmulPreferenceCreate", PREFIX "MatmulPreferenceDestroy", PREFIX "MatmulPreferenceSetAttribute",
    PREFIX "MatmulPreferenceGetAttribute", PREFIX "MatmulAlgoGetHeuristic", PREFIX "Matmul",
    PREFIX "MatmulAlgoInit", PREFIX "MatmulAlgoCheck", PREFIX "MatmulAlgoCapGetAttribute", PREFIX "MatmulAlgoConfigSetAttribute",
    PREFIX "MatmulAlgoConfigGetAttribute",
};
enum { FUNCTION_COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS };

static atomic_long counts[FUNCTION_COUNT];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char reason[512];
static _Thread_local const char *current = "";
static _Thread_local int quiet;

void lt_quiet(int on) { quiet = on; }

void lt_enter(const char *function) {
    current = function;
    for (int i = 0; i < FUNCTION_COUNT; i++) {
        if (!strcmp(FUNCTIONS[i], function)) {
            atomic_fetch_add(&counts[i], 1);
        }
    }
}

int lt_refuse(int status, const char *format, ...) {
    if (quiet) {
        return status;
    }
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    snprintf(reason, sizeof reason, "%s: %s", current, text);
    pthread_mutex_unlock(&lock);
    return status;
}

double lt_setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

int lt_state(int place) { return place == (int)lt_setting("FAKE_LT_REFUSED", -1) ? NOT_SUPPORTED : SUCCESS; }

uint64_t lt_hash(const void *bytes, size_t size, uint64_t seed) { /* FNV-1a */
    uint64_t hash = seed ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    }
    return hash;
}

/* Reason of the last refusal in any thread since the last reset; "" for none. */
EXPORT const char *fake_last_reason(void) {
    static _Thread_local char copy[sizeof reason];
    pthread_mutex_lock(&lock);
    memcpy(copy, reason, sizeof copy);
    pthread_mutex_unlock(&lock);
    return copy;
}

/* Calls of a function, named with or without the prefix; -1 for an unknown name. */
EXPORT long fake_calls(const char *function) {
    for (int i = 0; i < FUNCTION_COUNT; i++) {
        if (!strcmp(FUNCTIONS[i], function) || !strcmp(FUNCTIONS[i] + strlen(PREFIX), function)) {
            return atomic_load(&counts[i]);
        }
    }
    return -1;
}
