/* The fake HIP runtime: what its parts share. Constants are written from notes on AITER's launchers and from AMD's documents, none from
 * the plugin; HIP's statuses are those of hip_runtime_api.h.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    LAUNCH_FAILED = 719,
};

/* A kernel of a loaded code object. */
typedef struct Function {
    uint32_t marker;
    char gfx[16], name[256];
    uint32_t kernarg_bytes;
    struct Function *next;
} Function;

/* What a launch was given: its arguments as bytes. */
typedef struct {
    char name[256];
    unsigned grid[3], block[3], shared;
    uint64_t stream, bytes;
    unsigned char arguments[4096];
} Launch;

/* What a kernel's name says of it. */
typedef struct {
    enum { BF16, INT8, FP8, FP4, OWN } abi;
    int tile_m, tile_n, shuffled, splits;
    int fnuz; /* fp8 e4m3 of gfx942, not the OCP one */
} Kernel;

/* object.c: the kernels of a code object, or a status. */
int read_object(const unsigned char *image, Function **found);
/* hip.c: notes why, and gives the status back. */
int refuse(int status, const char *why, ...);
/* hip.c: whether a variable's text is in a kernel's name. */
int meant(const char *variable, const char *name);
/* memory.c: whether the bytes can be read, and written, and lie in one of the buffers that the test named, if it named some. */
int check_memory(const char *what, uint64_t address, uint64_t bytes, int written);
/* product.c: the kernel's work from its arguments alone. */
int multiply(const Kernel *kernel, const Launch *launch);
