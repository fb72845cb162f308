// Fake drivers of CUDA and HIP: modules are shared libraries; a launch is emulated before it
// returns.
//
// A refusal has a reason (`fake_last_reason`, per thread). FAKE_SHARED_BYTES is the most shared
// memory of a block. FAKE_REGISTERS and FAKE_LOCAL_BYTES are a function's attributes. With
// FAKE_LAUNCH_STATUS every launch returns that status, without emulation.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <map>
#include <mutex>
#include <set>
#include <unistd.h>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#ifdef FAKE_HIP
constexpr bool AMD = true;
#else
constexpr bool AMD = false;
#endif

// cuda.h: CUfunction_attribute; hip_runtime_api.h: hipFunction_attribute has the same numbers.
enum Attribute { MAX_THREADS = 0, SHARED_BYTES = 1, LOCAL_BYTES = 3, REGISTERS = 4, DYNAMIC_SHARED = 8 };
constexpr int UNASKED = 48 << 10, REGISTERS_OF_AN_SM = 64 << 10;

struct Module;
struct Function {
    const HostProgram *program;
    void (*entry)(Args);
    int allowed; // bytes of dynamic shared memory
};
struct Module {
    void *library;
    Function function;
};

std::mutex lock;
std::set<Module *> modules;
std::set<const void *> functions;
std::map<std::string, long> calls;
std::atomic<unsigned> seed{1};
thread_local std::string reason;
thread_local long long loaded[8], stored[8];

int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

constexpr int FP4 = 5; // the dtype of mxfp4

int shared_limit() { return setting("FAKE_SHARED_BYTES", AMD ? 64 << 10 : 227 << 10); }

int refuse(Status status, const char *format, ...) {
    char text[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    reason = text;
    // HIP has no error number for a misaligned address.
    return AMD && status == MISALIGNED_ADDRESS ? LAUNCH_FAILED : status;
}

void enter(const char *function) {
    std::lock_guard<std::mutex> held(lock);
    calls[function]++;
}

uint64_t checksum(const std::vector<char> &bytes) { // FNV-1a, as the fake compilers write it
    uint64_t sum = 0xCBF29CE484222325u;
    for (char byte : bytes) sum = (sum ^ (unsigned char)byte) * 0x100000001B3u;
    return sum;
}

// Returns the image at an address, up to the end that it states; empty where memory ends earlier.
// It is read through a file, which cannot crash.
bool image_at(const void *address, FILE *file, std::vector<char> *image) {
    Elf64_Ehdr header;
    const auto copied = [&](size_t bytes) { return ftruncate(fileno(file), 0) == 0 && pwrite(fileno(file), address, bytes, 0) == (ssize_t)bytes; };
    if (!copied(sizeof header) || pread(fileno(file), &header, sizeof header, 0) != sizeof header || memcmp(header.e_ident, ELFMAG, SELFMAG)) return false;
    const size_t size = header.e_shoff + (size_t)header.e_shentsize * header.e_shnum;
    uint64_t sum;
    if (size > 64 << 20 || !copied(size + sizeof sum)) return false;
    image->resize(size);
    return pread(fileno(file), image->data(), size, 0) == (ssize_t)size && pread(fileno(file), &sum, sizeof sum, (off_t)size) == sizeof sum &&
           sum == checksum(*image);
}

int load(Module **made, const void *bytes) {
    if (!made || !bytes) return refuse(INVALID_VALUE, "a null pointer");
    const char *folder = getenv("TMPDIR");
    std::string path = std::string(folder && *folder ? folder : "/tmp") + "/fake-module-XXXXXX";
    const int handle = mkstemp(path.data());
    FILE *file = handle < 0 ? nullptr : fdopen(handle, "r+b");
    if (!file) return refuse(OUT_OF_RESOURCES, "no temporary file");
    std::vector<char> image;
    const bool whole = image_at(bytes, file, &image);
    fclose(file);
    void *library = whole ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path.c_str());
    if (!library) return refuse(INVALID_IMAGE, "%s", whole ? dlerror() : "the image is not what a compiler made");
    const auto *program = (const HostProgram *)dlsym(library, "host_program");
    const auto *args_bytes = (const unsigned *)dlsym(library, "host_args_bytes");
    auto **table = (const HostTable **)dlsym(library, "host_table");
    if (!program || !args_bytes || !table) return refuse(INVALID_IMAGE, "the image is not of this emulator");
    if ((program->arch[0] == 'g') != AMD) return refuse(NO_BINARY, "code for %s", program->arch);
    if (*args_bytes != sizeof(Args)) return refuse(INVALID_IMAGE, "the kernel takes %u bytes instead of %zu", *args_bytes, sizeof(Args));
    *table = &EMULATOR;
    *made = new Module{library, {program, nullptr, AMD ? shared_limit() : UNASKED}};
    std::lock_guard<std::mutex> held(lock);
    modules.insert(*made);
    return SUCCESS;
}

int unload(Module *module) {
    std::lock_guard<std::mutex> held(lock);
    if (!modules.erase(module)) return refuse(INVALID_HANDLE, "no such module");
    functions.erase(&module->function);
    dlclose(module->library);
    delete module;
    return SUCCESS;
}

int find(Function **found, Module *module, const char *name) {
    std::lock_guard<std::mutex> held(lock);
    if (!modules.count(module)) return refuse(INVALID_HANDLE, "no such module");
    void *entry = dlsym(module->library, name);
    if (!entry) return refuse(NOT_FOUND, "no function %s", name);
    module->function.entry = (void (*)(Args))entry;
    functions.insert(&module->function);
    *found = &module->function;
    return SUCCESS;
}

bool known(const void *function) {
    std::lock_guard<std::mutex> held(lock);
    return functions.count(function);
}

int get(int *value, int attribute, Function *function) {
    if (!value || !known(function)) return refuse(INVALID_HANDLE, "no such function");
    const int registers = setting("FAKE_REGISTERS", 32);
    switch (attribute) {
    case MAX_THREADS: *value = registers * 1024 > REGISTERS_OF_AN_SM ? REGISTERS_OF_AN_SM / registers / 32 * 32 : 1024; break;
    case SHARED_BYTES: *value = 0; break;
    case LOCAL_BYTES: *value = setting("FAKE_LOCAL_BYTES", 0); break;
    case REGISTERS: *value = registers; break;
    case DYNAMIC_SHARED: *value = function->allowed; break;
    default: return refuse(INVALID_VALUE, "no attribute %d", attribute);
    }
    return SUCCESS;
}

// Finds the operands of a launch.
int find_operands(Launch &launch) {
    const Args &a = launch.args;
    const HostProgram &p = *launch.program;
    const size_t m = (size_t)a.m, n = (size_t)a.n, k = (size_t)a.k, splits = (size_t)a.splits, element = p.out == 2 ? 4 : 2;
    const size_t batches = launch.grid_z, width = p.dtype >= 2 ? 1 : 2, blocks = (k + 127) / 128;
    // Bytes of scales: float32; mxfp4 e8m0 per 16 bytes, with a shuffled weight padded to multiples
    // of 256 rows and 8.
    const auto scales = [&](size_t rows, size_t by_block) {
        if (p.dtype == FP4) return p.shuffled ? (rows + 255) / 256 * 256 * ((k / 16 + 7) / 8 * 8) : rows * (k / 16);
        return 4 * (p.scale == 1 ? 1 : p.scale == 2 ? batches * rows : p.scale == 3 ? by_block * blocks : 0);
    };
    // Of a packed weight: e4m3 per 16 or e8m0 per 32, else 16 bits a group; then zero points of 4
    // bits, or the global scale.
    const size_t groups = p.group ? k / p.group : 1, packed_scales = p.e2m1 ? n * k / (p.e2m1 == 1 ? 16 : 32) : 2 * n * groups;
    const size_t others = p.zeros ? (n + 7) / 8 * groups * 4 : p.e2m1 == 1 ? 4 : 0;
    const auto operand = [](const char *name, void *at, size_t bytes, bool written, bool once) {
        return Operand{name, (char *)at, at ? bytes : 0, written, once, 0, 0, std::vector<unsigned char>(once && at ? bytes : 0)};
    };
    launch.operands = {
        operand("x", a.x, batches * m * k * width * (p.x_wide ? 4 : 1), false, false),
        operand("weight", a.weight, p.packed ? n * k / 2 : batches * n * k * width, false, false),
        operand("bias", a.bias, p.bias ? batches * n * (p.bias == 3 ? 4 : 2) : 0, false, false),
        operand("out", a.out, batches * m * n * element, true, true),
        operand("partial", a.partial, splits > 1 ? batches * splits * m * n * 4 : 0, true, true),
        operand("counters", a.counters, splits > 1 ? batches * launch.grid_x * 4 : 0, true, false),
        // The last block of padded scales ends without its padding.
        operand("x_scale", a.x_scale, p.packed ? others : p.x_wide ? 0 : scales(m, m) + (p.x_column ? 4 * (-m & (size_t)(p.x_column - 1)) * (blocks - 1) : 0), false, false),
        operand("w_scale", a.w_scale, p.packed ? packed_scales : scales(n, (n + 127) / 128), false, false),
    };
    for (const Operand &each : launch.operands) {
        if ((uintptr_t)each.begin % 16) return refuse(INVALID_VALUE, "%s at %p is no multiple of 16", each.name, (void *)each.begin);
    }
    return SUCCESS;
}

// Kernels trust their arguments, so arguments that do not fit the program are refused here.
int check(const Launch &launch) {
    const Args &a = launch.args;
    const HostProgram &p = *launch.program;
    const long long per_block = (long long)p.rows * p.n_each * p.warps_n;
    if (a.m < 1 || a.n < 1 || a.k < 1 || a.splits < 1 || a.per_split < 1) return refuse(INVALID_VALUE, "sizes below 1");
    if (p.rows > 1 ? a.m > p.m : a.m != p.m) return refuse(INVALID_VALUE, "%d rows of x for a program of %d", a.m, p.m);
    if (launch.threads != (unsigned)(p.wave * p.warps * p.warps_n * p.warps_k)) return refuse(INVALID_VALUE, "%u threads for %d warps", launch.threads, p.warps * p.warps_n * p.warps_k);
    if (launch.grid_x != (a.n + per_block - 1) / per_block) return refuse(INVALID_VALUE, "%u blocks for %lld rows by %lld", launch.grid_x, a.n, per_block);
    if (launch.grid_y != (unsigned)a.splits) return refuse(INVALID_VALUE, "a grid of %u for %d splits", launch.grid_y, a.splits);
    if (a.per_split % p.vec || a.k % p.vec) return refuse(INVALID_VALUE, "%lld of %lld elements a split in loads of %d", a.per_split, a.k, p.vec);
    if (a.per_split * a.splits < a.k) return refuse(INVALID_VALUE, "%d splits of %lld elements leave some of %lld", a.splits, a.per_split, a.k);
    if (!a.x || !a.weight || !a.out || (p.bias && !a.bias)) return refuse(INVALID_VALUE, "an operand is missing");
    if (p.scale && ((!a.x_scale && !p.x_wide) || !a.w_scale)) return refuse(INVALID_VALUE, "a scale is missing");
    if (p.shuffled && (a.n % p.shuffled || a.k % (p.dtype >= 2 ? 16 : 8))) return refuse(INVALID_VALUE, "%lld x %lld cannot be shuffled", a.n, a.k);
    if (p.scale == 3 && p.dtype != FP4 && !p.packed && a.splits > 1 && a.per_split % (p.unroll > 1 ? 128 : 64))
        return refuse(INVALID_VALUE, "splits of %lld elements cut what has one scale", a.per_split);
    if (!p.batched && launch.grid_z != 1) return refuse(INVALID_VALUE, "%u products for a program of one", launch.grid_z);
    if (p.cluster && a.splits != p.cluster) return refuse(INVALID_VALUE, "%d splits for a cluster of %d", a.splits, p.cluster);
    if (a.splits > 1 && !p.cluster && (!a.partial || !a.counters)) return refuse(INVALID_VALUE, "%d splits without partial sums or counters", a.splits);
    return SUCCESS;
}

int launch_grid(Function *function, const unsigned *grid, const unsigned *block, unsigned shared, void **params, void **extra) {
    if (const int status = setting("FAKE_LAUNCH_STATUS", 0)) return refuse((Status)status, "as FAKE_LAUNCH_STATUS has it");
    if (!known(function)) return refuse(INVALID_HANDLE, "no such function");
    if (!params || !params[0] || extra) return refuse(INVALID_VALUE, "the arguments are one structure, given by its address");
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7FFFFFFF || grid[1] > 65535 || grid[2] > 65535) return refuse(INVALID_VALUE, "a grid of %u x %u x %u", grid[0], grid[1], grid[2]);
    if (!block[0] || block[0] > 1024 || block[1] != 1 || block[2] != 1) return refuse(INVALID_VALUE, "a block of %u x %u x %u", block[0], block[1], block[2]);
    if ((long long)shared > function->allowed) return refuse(INVALID_VALUE, "%u bytes of shared memory; %d are allowed", shared, function->allowed);
    int threads = 0;
    get(&threads, MAX_THREADS, function);
    if (block[0] > (unsigned)threads) return refuse(OUT_OF_RESOURCES, "%u threads with so many registers", block[0]);
    Launch launch = {function->program, function->entry, *(const Args *)params[0], grid[0], grid[1], grid[2], block[0], shared, seed, {}};
    if (const int status = check(launch)) return status;
    if (const int status = find_operands(launch)) return status;
    const Outcome outcome = emulate(launch);
    for (size_t i = 0; i < launch.operands.size(); i++) {
        loaded[i] = launch.operands[i].loaded;
        stored[i] = launch.operands[i].stored;
    }
    return outcome.status ? refuse(outcome.status, "%s", outcome.reason.c_str()) : SUCCESS;
}

const char *text(int status) {
    switch (status) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case INVALID_DEVICE_FUNCTION: return "invalid device function";
    case INVALID_IMAGE: return "device kernel image is invalid";
    case NO_BINARY: return "no kernel image is available for execution on the device";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case OUT_OF_RESOURCES: return "too many resources requested for launch";
    case MISALIGNED_ADDRESS: return "misaligned address";
    case LAUNCH_FAILED: return "unspecified launch failure";
    default: return nullptr;
    }
}

} // namespace

// Functions for the tests: order of threads and blocks, counted calls, bytes moved.

EXPORT void fake_seed(unsigned value) { seed = value; }
EXPORT long fake_calls(const char *function) {
    std::lock_guard<std::mutex> held(lock);
    return calls[function];
}
EXPORT void fake_reset() {
    std::lock_guard<std::mutex> held(lock);
    calls.clear();
    seed = 1;
}
EXPORT const char *fake_last_reason() { return reason.c_str(); }
// Operands in the order of the arguments' pointers.
EXPORT long long fake_loaded(int operand) { return loaded[operand]; }
EXPORT long long fake_stored(int operand) { return stored[operand]; }

#ifdef FAKE_HIP

EXPORT int hipModuleLoadData(Module **made, const void *bytes) { return enter(__func__), load(made, bytes); }
EXPORT int hipModuleUnload(Module *module) { return enter(__func__), unload(module); }
EXPORT int hipModuleGetFunction(Function **found, Module *module, const char *name) { return enter(__func__), find(found, module, name); }
EXPORT int hipFuncGetAttribute(int *value, int attribute, Function *function) { return enter(__func__), get(value, attribute, function); }
// It takes the address of a host function; a module has none.
EXPORT int hipFuncSetAttribute(const void *, int, int) { return enter(__func__), refuse(INVALID_DEVICE_FUNCTION, "no host function"); }
EXPORT int hipModuleLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                 void *, void **params, void **extra) {
    enter(__func__);
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    return launch_grid(function, grid, block, shared, params, extra);
}
EXPORT const char *hipGetErrorString(int status) { return text(status) ? text(status) : "unknown error"; }

#else

// cuda.h: CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
};

EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
EXPORT int cuModuleLoadData(Module **made, const void *bytes) { return enter(__func__), load(made, bytes); }
EXPORT int cuModuleUnload(Module *module) { return enter(__func__), unload(module); }
EXPORT int cuModuleGetFunction(Function **found, Module *module, const char *name) { return enter(__func__), find(found, module, name); }
EXPORT int cuFuncGetAttribute(int *value, int attribute, Function *function) { return enter(__func__), get(value, attribute, function); }
EXPORT int cuFuncSetAttribute(Function *function, int attribute, int value) {
    enter(__func__);
    if (!known(function)) return refuse(INVALID_HANDLE, "no such function");
    if (attribute != DYNAMIC_SHARED) return refuse(INVALID_VALUE, "attribute %d cannot be set", attribute);
    if (value < 0 || value > shared_limit()) return refuse(INVALID_VALUE, "%d bytes of shared memory; a block has %d", value, shared_limit());
    function->allowed = value;
    return SUCCESS;
}
EXPORT int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *,
                          void **params, void **extra) {
    enter(__func__);
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    return launch_grid(function, grid, block, shared, params, extra);
}
EXPORT int cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **params, void **extra) {
    enter(__func__);
    return config ? launch_grid(function, config->grid, config->block, config->shared, params, extra) : refuse(INVALID_VALUE, "no launch");
}
EXPORT int cuGetErrorString(int status, const char **found) { return (*found = text(status)) ? SUCCESS : INVALID_VALUE; }

#endif
