/* A fake HIP runtime: the module API over host memory. It loads code objects, records launches, and computes what AITER's kernels and
 * ours would from the bytes of their arguments alone; what kind of kernel it is it reads from the symbol's name.
 *
 * FAKE_GFX: the device's architecture (gfx942). FAKE_LAUNCH_STATUS: what each launch returns. FAKE_FAULT, FAKE_HANG, FAKE_WRONG: launches
 * of kernels with this text in their names kill the process, never return, or write wrong numbers. FAKE_MISSING, FAKE_SWAPPED, FAKE_FP8:
 * such kernels are not found in their code objects, take A and B in the other order, or read the other architecture's fp8.
 */
#include "fake.h"
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
/* hip_runtime_api.h: words of the list `extra`. */
#define PARAM_BUFFER_POINTER ((void *)1)
#define PARAM_BUFFER_SIZE ((void *)2)
#define PARAM_END ((void *)3)
#define MARKER 0x4B45524E

static __thread char reason[512];
static __thread Launch last;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long loads, launches;

typedef struct {
    Function *functions;
} Module;

int refuse(int status, const char *why, ...) {
    va_list rest;
    va_start(rest, why);
    vsnprintf(reason, sizeof reason, why, rest);
    va_end(rest);
    return status;
}

EXPORT const char *fake_last_reason(void) { return reason; }
EXPORT const Launch *fake_last(void) { return &last; }
EXPORT long fake_loads(void) { return loads; }
EXPORT long fake_launches(void) { return launches; }

static void counted(long *which) {
    pthread_mutex_lock(&lock);
    ++*which;
    pthread_mutex_unlock(&lock);
}

int meant(const char *variable, const char *name) {
    const char *text = getenv(variable);
    return text && *text && strstr(name, text) != NULL;
}

EXPORT int hipModuleLoadData(Module **made, const void *image) {
    Function *found = NULL;
    const int status = made && image ? read_object(image, &found) : refuse(INVALID_VALUE, "nothing to load");
    if (status)
        return status;
    *made = calloc(1, sizeof **made);
    (*made)->functions = found;
    counted(&loads);
    return SUCCESS;
}

EXPORT int hipModuleGetFunction(Function **found, Module *module, const char *name) {
    Function *each;
    for (each = module && !meant("FAKE_MISSING", name) ? module->functions : NULL; each; each = each->next)
        if (!strcmp(each->name, name))
            return *found = each, SUCCESS;
    return refuse(NOT_FOUND, "no kernel %s", name);
}

EXPORT const char *hipGetErrorString(int status) {
    switch (status) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case INVALID_IMAGE: return "device kernel image is invalid";
    case NO_BINARY: return "no kernel image is available for execution on the device";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case LAUNCH_TIMEOUT: return "the launch timed out and was terminated";
    case LAUNCH_FAILED: return "unspecified launch failure";
    default: return "unrecognized error code";
    }
}

/* "_tn_96x64_", "_BpreShuffle_96x128E", "tunedgemm_bf16_64x64_": a tile lies behind an underscore. */
static int tile(const char *name, int *rows, int *columns) {
    const char *at;
    for (at = strchr(name, '_'); at; at = strchr(at + 1, '_'))
        if (sscanf(at, "_%dx%d", rows, columns) == 2 && !strstr(at, "_per1x32"))
            return 1;
    return 0;
}

static int read_name(const Function *function, Kernel *kernel) {
    const char *name = function->name;
    *kernel = (Kernel){0};
    kernel->fnuz = (strcmp(function->gfx, "gfx942") == 0) != meant("FAKE_FP8", name);
    kernel->shuffled = strstr(name, "bshuffle") || strstr(name, "bpreshuffle") || strstr(name, "_BpreShuffle");
    if (strstr(name, "tunedgemm_bf16_"))
        kernel->abi = OWN, kernel->splits = !!strstr(name, "_splitk");
    else if (strstr(name, "fp8gemm_bf16_blockscale"))
        kernel->abi = FP8, kernel->splits = 1;
    else if (strstr(name, "bf16gemm_"))
        kernel->abi = BF16, kernel->splits = !!strstr(name, "_splitk_clean"); /* the flag, not the word splitk alone */
    else if (strstr(name, "I8gemm_bf16_perTokenI8"))
        kernel->abi = INT8, kernel->splits = !strstr(name, "112x256");
    else if (strstr(name, "f4gemm_bf16_per1x32Fp4"))
        kernel->abi = FP4, kernel->splits = strstr(name, "256x256") || strstr(name, "128x512");
    else
        return refuse(LAUNCH_FAILED, "what %s computes is not known", name);
    return tile(name, &kernel->tile_m, &kernel->tile_n) ? SUCCESS : refuse(LAUNCH_FAILED, "%s has no tile", name);
}

static int read_extra(void **extra) {
    const void *buffer = NULL;
    const size_t *size = NULL;
    int i;
    for (i = 0; extra[i] != PARAM_END; i += 2) {
        if (i > 2)
            return refuse(INVALID_VALUE, "the list of extra arguments does not end");
        if (extra[i] == PARAM_BUFFER_POINTER)
            buffer = extra[i + 1];
        else if (extra[i] == PARAM_BUFFER_SIZE)
            size = extra[i + 1];
        else
            return refuse(INVALID_VALUE, "an unknown extra argument");
    }
    if (!buffer || !size || *size > sizeof last.arguments)
        return refuse(INVALID_VALUE, "no buffer of arguments");
    last.bytes = *size;
    memset(last.arguments, 0, sizeof last.arguments);
    memcpy(last.arguments, buffer, *size);
    return SUCCESS;
}

EXPORT int hipModuleLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, void *stream, void **params, void **extra) {
    const char *told = getenv("FAKE_LAUNCH_STATUS");
    Kernel kernel;
    int status;
    if (told && *told)
        return refuse(atoi(told), "as FAKE_LAUNCH_STATUS has it");
    if (!function || function->marker != MARKER)
        return refuse(INVALID_HANDLE, "no such function");
    if (params || !extra)
        return refuse(INVALID_VALUE, "arguments come in one buffer, as extra arguments");
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535)
        return refuse(INVALID_VALUE, "a grid of %u x %u x %u", gx, gy, gz);
    if (bx != 256 || by != 1 || bz != 1 || shared)
        return refuse(INVALID_VALUE, "a workgroup of %u x %u x %u with %u bytes of LDS", bx, by, bz, shared);
    if ((status = read_extra(extra)) || (status = read_name(function, &kernel)))
        return status;
    if (last.bytes < function->kernarg_bytes)
        return refuse(INVALID_VALUE, "%llu bytes of arguments; the kernel has %u", (unsigned long long)last.bytes, function->kernarg_bytes);
    strcpy(last.name, function->name);
    last.grid[0] = gx, last.grid[1] = gy, last.grid[2] = gz;
    last.block[0] = bx, last.block[1] = by, last.block[2] = bz;
    last.shared = shared;
    last.stream = (uintptr_t)stream;
    counted(&launches);
    if (meant("FAKE_FAULT", last.name))
        raise(SIGSEGV);
    while (meant("FAKE_HANG", last.name))
        sleep(1);
    return multiply(&kernel, &last);
}
