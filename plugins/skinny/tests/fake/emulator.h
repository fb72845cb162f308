// Emulated GPU: runs a program's blocks in random order, several at a time, their threads as fibers
// in random order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host.h"

// Arguments of the kernels' entry, with the C ABI's sizes and offsets.
struct Args {
    void *x, *weight, *bias, *out, *partial, *counters, *x_scale, *w_scale;
    long long n, k;
    int m, splits;
    long long per_split;
};
static_assert(sizeof(Args) == 96, "eight pointers, two sizes, two ints, one size");

// CUDA's error numbers; HIP has the same.
enum Status {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_DEVICE_FUNCTION = 98,  // HIP alone
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    MISALIGNED_ADDRESS = 716,  // CUDA alone
    LAUNCH_FAILED = 719,
};

// An array in global memory of one launch.
struct Operand {
    const char *name;
    char *begin;
    size_t bytes;
    bool written;                    // by the kernel
    bool once;                       // each element at most once, and not read before
    long long loaded, stored;        // bytes
    std::vector<unsigned char> seen; // bytes that were stored, where `once`
};

struct Launch {
    const HostProgram *program;
    void (*entry)(Args);
    Args args;
    unsigned grid_x, grid_y, grid_z, threads, shared;
    unsigned seed;
    std::vector<Operand> operands;
};

struct Outcome {
    Status status;
    std::string reason;
};

extern const HostTable EMULATOR;

// Changes the launch's output, partials and counters, and its operands' counts.
Outcome emulate(Launch &launch);
