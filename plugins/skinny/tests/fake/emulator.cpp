// The emulator: fibers that switch where threads wait for one another, warps, matrix instructions, checked memory.
#include "emulator.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

constexpr unsigned MAX_THREADS = 1024, MAX_WAVE = 64;
constexpr size_t STACK = 256 << 10, GUARD = 4096, MARGIN = 4096;

enum Meeting { NOTHING, SHUFFLE, PRODUCT, BARRIER };
const char *const MEETINGS[] = {"nothing", "a shuffle", "a matrix instruction", "a barrier"};

struct Copy {
    void *to;
    const void *from; // null: zeros
    size_t bytes;
};

struct Fiber {
    char *stack;
    ucontext_t begin;
    jmp_buf place;   // where it goes on
    bool begun;
    Meeting waits;
    std::deque<std::vector<Copy>> copies; // groups; the last is open
};

// What the lanes of a warp bring to a collective, and the result of a shuffle.
struct Warp {
    unsigned arrived;
    Meeting meeting;
    int mask, dtype;
    float values[MAX_WAVE], *c[MAX_WAVE];
    unsigned a[MAX_WAVE][4], b[MAX_WAVE][2];
};

struct Random {  // splitmix64
    uint64_t state;
    unsigned below(unsigned limit) {
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return (unsigned)((z ^ z >> 31) >> 32) % limit;
    }
};

// One of each thread of the process that launches: fibers stay where they are.
struct Machine {
    std::deque<Fiber> fibers; // they hold pointers into themselves
    Warp warps[MAX_THREADS / 32];
    std::vector<unsigned> ready;
    unsigned current, at_barrier, left, block_x, block_y, last_operand;
    std::vector<unsigned char> memory;
    unsigned char *shared;
    Launch *launch;
    Random random;
    jmp_buf home;
    Outcome outcome;

    ~Machine() {
        for (Fiber &fiber : fibers) munmap(fiber.stack, STACK);
    }
};

thread_local std::unique_ptr<Machine> machine_of_this_thread;
Machine &machine() { return *machine_of_this_thread; }

[[noreturn]] void fail(Status status, const char *format, ...) {
    Machine &m = machine();
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    char where[120];
    snprintf(where, sizeof where, "block (%u, %u), thread %u: ", m.block_x, m.block_y, m.current);
    m.outcome = {status, std::string(where) + text};
    _longjmp(m.home, 2);
}

[[noreturn]] void stuck() {
    Machine &m = machine();
    unsigned waiting = 0, first = 0;
    for (unsigned i = 0; i < m.launch->threads; i++) {
        if (m.fibers[i].waits && !waiting++) first = i;
    }
    m.current = first;
    fail(LAUNCH_FAILED, "waits for ever at %s: %u of %u threads wait, %u have returned", MEETINGS[m.fibers[first].waits], waiting,
         m.launch->threads, m.launch->threads - waiting);
}

// Goes on with a thread that can, whichever.
[[noreturn]] void next() {
    Machine &m = machine();
    if (m.ready.empty()) {
        if (!m.left) _longjmp(m.home, 1);
        stuck();
    }
    std::swap(m.ready[m.random.below((unsigned)m.ready.size())], m.ready.back());
    m.current = m.ready.back();
    m.ready.pop_back();
    Fiber &fiber = m.fibers[m.current];
    fiber.waits = NOTHING;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.begin);
    __builtin_trap();
}

void wait(Meeting meeting) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[m.current];
    fiber.waits = meeting;
    if (!_setjmp(fiber.place)) next();
}

// A thread of one block after another.
void live() {
    for (;;) {
        Launch *launch = machine().launch;
        launch->entry(launch->args);
        Machine &m = machine();
        Fiber &fiber = m.fibers[m.current];
        m.left--;
        if (!_setjmp(fiber.place)) next();
    }
}

void prepare(Fiber &fiber) {
    fiber.begun = false;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack + GUARD;
    fiber.begin.uc_stack.ss_size = STACK - GUARD;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, live, 0);
}

float half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? __builtin_nanf("") : sign * __builtin_inff();
    return sign * (exponent ? __builtin_ldexpf((float)(1024 + fraction), exponent - 25) : __builtin_ldexpf((float)fraction, -24));
}

float element(const unsigned *words, int place, int dtype) {
    const uint16_t bits = (uint16_t)(words[place / 2] >> 16 * (place % 2));
    if (dtype == 1) return half(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": element i of a lane's a, b and c.
void unpack32(const Warp &warp, float (*a)[16], float (*b)[16]) {
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, in_group = lane & 3;
        for (int i = 0; i < 8; i++) {
            const int row = group + (i & 2 ? 8 : 0), k = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][k] = element(warp.a[lane], i, warp.dtype);
        }
        for (int i = 0; i < 4; i++) b[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = element(warp.b[lane], i, warp.dtype);
    }
}

// AMD matrix instruction calculator, v_mfma_f32_16x16x16_f16 and v_mfma_f32_16x16x16_bf16_1k.
void unpack64(const Warp &warp, float (*a)[16], float (*b)[16]) {
    for (int lane = 0; lane < 64; lane++) {
        for (int i = 0; i < 4; i++) {
            a[lane % 16][4 * (lane / 16) + i] = element(warp.a[lane], i, warp.dtype);
            b[4 * (lane / 16) + i][lane % 16] = element(warp.b[lane], i, warp.dtype);
        }
    }
}

void multiply(Warp &warp, unsigned wave) {
    float a[16][16], b[16][16];
    (wave == 32 ? unpack32 : unpack64)(warp, a, b);
    for (unsigned lane = 0; lane < wave; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = wave == 32 ? (lane >> 2) + (i >= 2 ? 8 : 0) : 4 * (lane / 16) + i;
            const unsigned column = wave == 32 ? (lane & 3) * 2 + (i & 1) : lane % 16;
            double sum = warp.c[lane][i];
            for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[k][column];
            warp.c[lane][i] = (float)sum;
        }
    }
}

void shuffle(Warp &warp, unsigned wave) {
    float sent[MAX_WAVE];
    memcpy(sent, warp.values, sizeof sent);
    for (unsigned lane = 0; lane < wave; lane++) warp.values[lane] = sent[lane ^ (unsigned)warp.mask];
}

// The lane's warp, after all of its lanes have come and the last has done the work.
template <typename Bring> Warp &meet(Meeting meeting, Bring bring, void (*work)(Warp &, unsigned)) {
    Machine &m = machine();
    const unsigned wave = (unsigned)m.launch->program->wave, first = m.current / wave * wave;
    Warp &warp = m.warps[m.current / wave];
    if (warp.arrived && warp.meeting != meeting)
        fail(LAUNCH_FAILED, "meets %s while others of its warp wait at %s", MEETINGS[meeting], MEETINGS[warp.meeting]);
    warp.meeting = meeting;
    bring(warp, m.current - first);
    if (++warp.arrived < wave) {
        wait(meeting);
        return warp;
    }
    work(warp, wave);
    warp.arrived = 0;
    for (unsigned i = first; i < first + wave; i++) {
        if (i != m.current) m.ready.push_back(i);
    }
    return warp;
}

unsigned thread() { return machine().current; }
unsigned block_x() { return machine().block_x; }
unsigned block_y() { return machine().block_y; }
unsigned grid_y() { return machine().launch->grid_y; }
unsigned char *shared() { return machine().shared; }

void sync_block() {
    Machine &m = machine();
    if (++m.at_barrier < m.launch->threads) return wait(BARRIER);
    m.at_barrier = 0;
    for (unsigned i = 0; i < m.launch->threads; i++) {
        if (i != m.current) m.ready.push_back(i);
    }
}

float shuffle_xor(float value, int mask) {
    Machine &m = machine();
    const int wave = m.launch->program->wave;
    if (mask <= 0 || mask >= wave) fail(LAUNCH_FAILED, "a shuffle by %d in a warp of %d", mask, wave);
    const unsigned lane = m.current % (unsigned)wave;
    const auto bring = [&](Warp &warp, unsigned) {
        if (warp.arrived && warp.mask != mask) fail(LAUNCH_FAILED, "shuffles by %d, others of its warp by %d", mask, warp.mask);
        warp.mask = mask;
        warp.values[lane] = value;
    };
    return meet(SHUFFLE, bring, shuffle).values[lane];
}

void mma(float *c, const unsigned *a, const unsigned *b, int dtype) {
    const bool amd = machine().launch->program->wave == 64;
    const auto bring = [&](Warp &warp, unsigned lane) {
        warp.dtype = dtype;
        warp.c[lane] = c;
        memcpy(warp.a[lane], a, (amd ? 2 : 4) * sizeof *a);
        memcpy(warp.b[lane], b, 2 * sizeof *b);
    };
    meet(PRODUCT, bring, multiply);
}

Operand &operand_at(const void *address, int bytes, const char *does) {
    Machine &m = machine();
    if ((uintptr_t)address % (unsigned)bytes)
        fail(MISALIGNED_ADDRESS, "%s %d bytes at %p, which is no multiple of that", does, bytes, address);
    std::vector<Operand> &operands = m.launch->operands;
    const uintptr_t at = (uintptr_t)address;
    for (size_t turn = 0; turn < operands.size(); turn++) {
        const unsigned place = (unsigned)((m.last_operand + turn) % operands.size());
        const uintptr_t begin = (uintptr_t)operands[place].begin;
        if (at >= begin && at + (unsigned)bytes <= begin + operands[place].bytes) {
            m.last_operand = place;
            return operands[place];
        }
    }
    const Operand *nearest = nullptr;
    for (const Operand &each : operands) {
        if (!nearest || std::llabs((char *)address - each.begin) < std::llabs((char *)address - nearest->begin)) nearest = &each;
    }
    fail(ILLEGAL_ADDRESS, "%s %d bytes at %p, byte %lld of %s, which has %zu", does, bytes, address,
         (long long)((const char *)address - nearest->begin), nearest->name, nearest->bytes);
}

void load(void *to, const void *from, int bytes) {
    Operand &operand = operand_at(from, bytes, "loads");
    const size_t place = (size_t)((const char *)from - operand.begin);
    if (operand.once && !operand.seen[place]) fail(LAUNCH_FAILED, "loads byte %zu of %s, which nobody has stored", place, operand.name);
    operand.loaded += bytes;
    memcpy(to, from, (size_t)bytes);
}

void store(void *to, const void *from, int bytes) {
    Operand &operand = operand_at(to, bytes, "stores");
    const size_t place = (size_t)((char *)to - operand.begin);
    if (!operand.written) fail(ILLEGAL_ADDRESS, "stores to %s", operand.name);
    if (operand.once) {
        if (operand.seen[place]) fail(LAUNCH_FAILED, "stores byte %zu of %s a second time", place, operand.name);
        memset(&operand.seen[place], 1, (size_t)bytes);
    }
    operand.stored += bytes;
    memcpy(to, from, (size_t)bytes);
}

void copy_async(void *to, const void *from, int bytes, bool there) {
    Machine &m = machine();
    if ((uintptr_t)to % (unsigned)bytes) fail(MISALIGNED_ADDRESS, "copies %d bytes to shared memory at %p, which is no multiple of that", bytes, to);
    if (there) operand_at(from, bytes, "copies").loaded += bytes;
    memset(to, 0xFF, (size_t)bytes);
    m.fibers[m.current].copies.back().push_back({to, there ? from : nullptr, (size_t)bytes});
}

void commit_copies() { machine().fibers[machine().current].copies.emplace_back(); }

void await_copies(int groups) {
    std::deque<std::vector<Copy>> &copies = machine().fibers[machine().current].copies;
    while (copies.size() > (size_t)groups + 1) {
        for (const Copy &copy : copies.front()) {
            if (copy.from)
                memcpy(copy.to, copy.from, copy.bytes);
            else
                memset(copy.to, 0, copy.bytes);
        }
        copies.pop_front();
    }
}

unsigned atomic_add_one(unsigned *counter) {
    if (!operand_at(counter, sizeof *counter, "adds to").written) fail(ILLEGAL_ADDRESS, "adds one to an operand that is not its own");
    return (*counter)++;
}

// Runs one block; false after a failure, with its reason.
bool run_block(Machine &m) {
    const unsigned threads = m.launch->threads;
    m.memory.assign(m.launch->shared + 2 * MARGIN, 0xFF);
    m.shared = m.memory.data() + (MARGIN - (uintptr_t)m.memory.data() % 16);
    for (Warp &warp : m.warps) warp.arrived = 0;
    m.ready.resize(threads);
    std::iota(m.ready.begin(), m.ready.end(), 0u);
    m.at_barrier = 0;
    m.left = threads;
    for (unsigned i = 0; i < threads; i++) {
        m.fibers[i].waits = NOTHING;
        m.fibers[i].copies.assign(1, {});
    }
    const int came = _setjmp(m.home);
    if (!came) next();
    return came == 1;
}

// Shared memory lies between margins that keep their bytes.
bool kept_to_itself(const Machine &m) {
    const unsigned char *begin = m.memory.data(), *end = begin + m.memory.size();
    for (const unsigned char *at = begin; at < end; at++) {
        if (*at != 0xFF && (at < m.shared || at >= m.shared + m.launch->shared)) return false;
    }
    return true;
}

Outcome run_grid(Machine &m) {
    std::vector<unsigned> blocks(m.launch->grid_x * m.launch->grid_y);
    std::iota(blocks.begin(), blocks.end(), 0u);
    for (size_t i = blocks.size(); i > 1; i--) std::swap(blocks[i - 1], blocks[m.random.below((unsigned)i)]);
    for (unsigned block : blocks) {
        m.block_x = block % m.launch->grid_x;
        m.block_y = block / m.launch->grid_x;
        if (!run_block(m)) {
            for (Fiber &fiber : m.fibers) prepare(fiber);
            return m.outcome;
        }
        if (!kept_to_itself(m)) return {ILLEGAL_ADDRESS, "a block writes beside its shared memory"};
    }
    return {SUCCESS, ""};
}

} // namespace

const HostTable EMULATOR = {thread, block_x, block_y, grid_y, shared, sync_block, shuffle_xor, mma, atomic_add_one, load, store,
                            copy_async, commit_copies, await_copies};

Outcome emulate(Launch &launch) {
    if (!machine_of_this_thread) machine_of_this_thread = std::make_unique<Machine>();
    Machine &m = machine();
    m.launch = &launch;
    m.last_operand = 0;
    m.random.state = launch.seed;
    while (m.fibers.size() < launch.threads) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) return {OUT_OF_RESOURCES, "no memory for the stacks of so many threads"};
        mprotect(stack, GUARD, PROT_NONE);
        m.fibers.emplace_back();
        m.fibers.back().stack = (char *)stack;
        prepare(m.fibers.back());
    }
    return run_grid(m);
}
