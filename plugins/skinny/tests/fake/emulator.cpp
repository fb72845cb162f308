// Emulator: fibers that switch where threads wait and after atomic operations; warps; matrix
// instructions; checked memory.
#include "emulator.h"

#include <algorithm>
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

constexpr unsigned MAX_WAVE = 64, MAX_BLOCKS = 4, MAX_THREADS = 512; // at a time; one block at least
constexpr int TRIES = 4;
constexpr size_t STACK = 256 << 10, GUARD = 4096, MARGIN = 4096;

enum Meeting { NOTHING, SHUFFLE, PRODUCT, BARRIER, CLUSTER_BARRIER };
const char *const MEETINGS[] = {"nothing", "a shuffle", "a matrix instruction", "a barrier", "a barrier of the cluster"};

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

// Arguments of a warp's lanes to a collective, and the result of a shuffle.
struct Warp {
    unsigned arrived;
    Meeting meeting;
    int mask, dtype;
    float values[MAX_WAVE];
    void *c[MAX_WAVE];
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

// A running block; its threads are the fibers from its slot times their number on.
struct Block {
    unsigned x, y, z, at_barrier, at_cluster, left; // of a cluster: its first block counts
    std::vector<Warp> warps;
    std::vector<unsigned char> memory;
    unsigned char *shared;
};

// One per launching thread of the process; fibers do not move.
struct Machine {
    std::deque<Fiber> fibers; // they hold pointers into themselves
    std::vector<Block> blocks;
    std::vector<unsigned> ready, ahead; // fibers, blocks
    std::vector<unsigned> eager;        // of each fiber, drawn at each barrier
    unsigned current, last_operand;
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
unsigned cluster() { return (unsigned)std::max(1, machine_of_this_thread->launch->program->cluster); }
Block &block() { return machine().blocks[machine().current / machine().launch->threads]; }
unsigned thread() { return machine().current % machine().launch->threads; }

[[noreturn]] void fail(Status status, const char *format, ...) {
    Machine &m = machine();
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    char where[120];
    snprintf(where, sizeof where, "block (%u, %u, %u), thread %u: ", block().x, block().y, block().z, thread());
    m.outcome = {status, std::string(where) + text};
    _longjmp(m.home, 2);
}

[[noreturn]] void stuck() {
    Machine &m = machine();
    const unsigned threads = m.launch->threads;
    m.current = 0;
    while (!m.fibers[m.current].waits) m.current++;
    unsigned waiting = 0;
    for (unsigned i = m.current / threads * threads, end = i + threads; i < end; i++) waiting += m.fibers[i].waits != NOTHING;
    fail(LAUNCH_FAILED, "waits forever at %s: %u of %u threads wait, %u have returned", MEETINGS[m.fibers[m.current].waits], waiting, threads,
         threads - waiting);
}

// Resumes a ready thread: the most eager of a few drawn ones, so that some threads fall far behind.
[[noreturn]] void next() {
    Machine &m = machine();
    if (m.ready.empty()) {
        for (const Block &each : m.blocks) {
            if (each.left) stuck();
        }
        _longjmp(m.home, 1);
    }
    size_t chosen = m.random.below((unsigned)m.ready.size());
    for (int turn = 1; turn < TRIES; turn++) {
        const size_t other = m.random.below((unsigned)m.ready.size());
        if (m.eager[m.ready[other]] > m.eager[m.ready[chosen]]) chosen = other;
    }
    m.current = m.ready[chosen];
    m.ready[chosen] = m.ready.back();
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

// Yields to other threads, as a GPU may at any time.
void pause() {
    Machine &m = machine();
    m.ready.push_back(m.current);
    if (!_setjmp(m.fibers[m.current].place)) next();
}

// Puts a block of the grid into a slot.
void begin_block(unsigned place, unsigned number) {
    Machine &m = machine();
    Block &at = m.blocks[place];
    const unsigned threads = m.launch->threads;
    at.x = number % m.launch->grid_x;
    at.y = number / m.launch->grid_x % m.launch->grid_y;
    at.z = number / m.launch->grid_x / m.launch->grid_y;
    at.at_barrier = at.at_cluster = 0;
    at.left = threads;
    at.warps.assign(threads / (unsigned)m.launch->program->wave, Warp{});
    at.memory.assign(m.launch->shared + 2 * MARGIN, 0xFF);
    at.shared = at.memory.data() + (MARGIN - (uintptr_t)at.memory.data() % 16);
    for (unsigned i = place * threads; i < (place + 1) * threads; i++) {
        m.eager[i] = m.random.below(1 << 16);
        m.fibers[i].waits = NOTHING;
        m.fibers[i].copies.assign(1, {});
        m.ready.push_back(i);
    }
}

// Puts the blocks of the next cluster, maybe a single one, into the slots from this one on.
void begin_cluster(unsigned place) {
    const unsigned number = machine().ahead.back(), along_x = machine().launch->grid_x;
    machine().ahead.pop_back();
    for (unsigned i = 0; i < cluster(); i++) begin_block(place + i, number % along_x + (number / along_x * cluster() + i) * along_x);
}

// Margins around shared memory must keep their bytes.
void end_block() {
    const Block &at = block();
    const unsigned char *begin = at.memory.data(), *end = begin + at.memory.size();
    for (const unsigned char *byte = begin; byte < end; byte++) {
        if (*byte != 0xFF && (byte < at.shared || byte >= at.shared + machine().launch->shared))
            fail(ILLEGAL_ADDRESS, "the block has written outside its shared memory");
    }
    const unsigned place = machine().current / machine().launch->threads / cluster() * cluster();
    for (unsigned i = 0; i < cluster(); i++) {
        if (machine().blocks[place + i].left) return;
    }
    if (!machine().ahead.empty()) begin_cluster(place);
}

// Runs a thread of one block after another.
void live() {
    for (;;) {
        Launch *launch = machine().launch;
        launch->entry(launch->args);
        if (!--block().left) end_block();
        if (!_setjmp(machine().fibers[machine().current].place)) next();
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

// OCP 8-bit floating point specification, E4M3; the numbers of fnuz (AMD CDNA 3 ISA guide) are half
// as large.
float fp8(uint8_t bits, bool fnuz) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if (fnuz ? bits == 0x80 : (bits & 0x7F) == 0x7F) return __builtin_nanf("");
    const float size = exponent ? __builtin_ldexpf((float)(8 + fraction), exponent - 10) : __builtin_ldexpf((float)fraction, -9);
    return (bits >> 7 ? -size : size) * (fnuz ? 0.5f : 1.0f);
}

float element(const unsigned *words, int place, int dtype) {
    if (dtype >= 2) {
        const uint8_t byte = (uint8_t)(words[place / 4] >> 8 * (place % 4));
        return dtype == 2 ? (float)(int8_t)byte : fp8(byte, dtype == 4);
    }
    const uint16_t bits = (uint16_t)(words[place / 2] >> 16 * (place % 2));
    if (dtype == 1) return half(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and for "mma.m16n8k32" with
// integers: element i of a lane's a, b, c.
void unpack32(const Warp &warp, float (*a)[32], float (*b)[16]) {
    const int in_word = warp.dtype >= 2 ? 4 : 2;
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, in_group = lane & 3;
        for (int i = 0; i < 4 * in_word; i++) {
            const int word = i / in_word, row = group + (word & 1 ? 8 : 0), k = in_group * in_word + i % in_word + (word >= 2 ? 4 * in_word : 0);
            a[row][k] = element(warp.a[lane], i, warp.dtype);
        }
        for (int i = 0; i < 2 * in_word; i++)
            b[in_group * in_word + i % in_word + i / in_word * 4 * in_word][group] = element(warp.b[lane], i, warp.dtype);
    }
}

// AMD matrix instruction calculator, v_mfma_f32_16x16x16_f16, v_mfma_f32_16x16x16_bf16_1k,
// v_mfma_f32_16x16x32_fp8_fp8, v_mfma_i32_16x16x32_i8.
void unpack64(const Warp &warp, float (*a)[32], float (*b)[16]) {
    const int count = warp.dtype >= 2 ? 8 : 4;
    for (int lane = 0; lane < 64; lane++) {
        for (int i = 0; i < count; i++) {
            a[lane % 16][count * (lane / 16) + i] = element(warp.a[lane], i, warp.dtype);
            b[count * (lane / 16) + i][lane % 16] = element(warp.b[lane], i, warp.dtype);
        }
    }
}

void multiply(Warp &warp, unsigned wave) {
    const int depth = warp.dtype >= 2 ? 32 : 16;
    float a[16][32], b[32][16];
    (wave == 32 ? unpack32 : unpack64)(warp, a, b);
    for (unsigned lane = 0; lane < wave; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = wave == 32 ? (lane >> 2) + (i >= 2 ? 8 : 0) : 4 * (lane / 16) + i;
            const unsigned column = wave == 32 ? (lane & 3) * 2 + (i & 1) : lane % 16;
            double sum = 0;
            for (int k = 0; k < depth; k++) sum += (double)a[row][k] * b[k][column];
            if (warp.dtype == 2)
                ((int *)warp.c[lane])[i] += (int)sum;
            else
                ((float *)warp.c[lane])[i] = (float)(((float *)warp.c[lane])[i] + sum);
        }
    }
}

void shuffle(Warp &warp, unsigned wave) {
    float sent[MAX_WAVE];
    memcpy(sent, warp.values, sizeof sent);
    for (unsigned lane = 0; lane < wave; lane++) warp.values[lane] = sent[lane ^ (unsigned)warp.mask];
}

// Returns the lane's warp after all lanes have arrived and the last has done the work.
template <typename Bring> Warp &meet(Meeting meeting, Bring bring, void (*work)(Warp &, unsigned)) {
    Machine &m = machine();
    const unsigned wave = (unsigned)m.launch->program->wave, first = m.current / wave * wave;
    Warp &warp = block().warps[thread() / wave];
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

unsigned block_x() { return block().x; }
unsigned block_y() { return block().y; }
unsigned block_z() { return block().z; }
unsigned grid_y() { return machine().launch->grid_y; }
unsigned char *shared() { return block().shared; }

void sync_block() {
    Machine &m = machine();
    const unsigned threads = m.launch->threads, first = m.current - thread();
    if (++block().at_barrier < threads) return wait(BARRIER);
    block().at_barrier = 0;
    for (unsigned i = first; i < first + threads; i++) {
        m.eager[i] = m.random.below(1 << 16);
        if (i != m.current) m.ready.push_back(i);
    }
}

void sync_cluster() {
    Machine &m = machine();
    const unsigned place = m.current / m.launch->threads / cluster() * cluster(), first = place * m.launch->threads;
    const unsigned threads = m.launch->threads * cluster();
    if (++m.blocks[place].at_cluster < threads) return wait(CLUSTER_BARRIER);
    m.blocks[place].at_cluster = 0;
    for (unsigned i = first; i < first + threads; i++) {
        m.eager[i] = m.random.below(1 << 16);
        if (i != m.current) m.ready.push_back(i);
    }
}

const void *shared_of(const void *mine, unsigned number) {
    Machine &m = machine();
    const unsigned place = m.current / m.launch->threads / cluster() * cluster();
    if (number >= cluster()) fail(ILLEGAL_ADDRESS, "block %u of a cluster of %u", number, cluster());
    const ptrdiff_t offset = (const unsigned char *)mine - block().shared;
    if (offset < 0 || offset >= m.launch->shared) fail(ILLEGAL_ADDRESS, "byte %td of shared memory, which has %u", offset, m.launch->shared);
    if (!m.blocks[place + number].left) fail(LAUNCH_FAILED, "reads shared memory of block %u of its cluster, which has ended", number);
    return m.blocks[place + number].shared + offset;
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

void mma(void *c, const unsigned *a, const unsigned *b, int dtype) {
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
    if (operand.once && !operand.seen[place]) fail(LAUNCH_FAILED, "loads byte %zu of %s, which no thread has stored", place, operand.name);
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

void arrive(const Copy &copy) {
    if (copy.from)
        memcpy(copy.to, copy.from, copy.bytes);
    else
        memset(copy.to, 0, copy.bytes);
}

// Arrives at once, or when awaited.
void copy_async(void *to, const void *from, int bytes, bool there) {
    Machine &m = machine();
    if ((uintptr_t)to % (unsigned)bytes) fail(MISALIGNED_ADDRESS, "copies %d bytes to shared memory at %p, which is no multiple of that", bytes, to);
    if (there) operand_at(from, bytes, "copies").loaded += bytes;
    const Copy copy = {to, there ? from : nullptr, (size_t)bytes};
    if (m.random.below(2)) return arrive(copy);
    memset(to, 0xFF, (size_t)bytes);
    m.fibers[m.current].copies.back().push_back(copy);
}

void commit_copies() { machine().fibers[machine().current].copies.emplace_back(); }

void await_copies(int groups) {
    std::deque<std::vector<Copy>> &copies = machine().fibers[machine().current].copies;
    while (copies.size() > (size_t)groups + 1) {
        for (const Copy &copy : copies.front()) arrive(copy);
        copies.pop_front();
    }
}

unsigned atomic_add_one(unsigned *counter) {
    if (!operand_at(counter, sizeof *counter, "adds to").written) fail(ILLEGAL_ADDRESS, "adds one to an operand that is not its own");
    const unsigned before = (*counter)++;
    pause();
    return before;
}

Outcome run_grid(Machine &m) {
    m.ahead.resize(m.launch->grid_x * m.launch->grid_y * m.launch->grid_z / cluster());
    std::iota(m.ahead.begin(), m.ahead.end(), 0u);
    for (size_t i = m.ahead.size(); i > 1; i--) std::swap(m.ahead[i - 1], m.ahead[m.random.below((unsigned)i)]);
    m.ready.clear();
    m.eager.resize(m.fibers.size());
    for (unsigned place = 0; place < m.blocks.size(); place += cluster()) begin_cluster(place);
    const int came = _setjmp(m.home);
    if (!came) next();
    if (came == 1) return {SUCCESS, ""};
    for (Fiber &fiber : m.fibers) prepare(fiber);
    return m.outcome;
}

} // namespace

const HostTable EMULATOR = {thread, block_x, block_y, block_z, grid_y, shared, sync_block, sync_cluster, shared_of, shuffle_xor, mma, atomic_add_one, load, store,
                            copy_async, commit_copies, await_copies};

Outcome emulate(Launch &launch) {
    if (!machine_of_this_thread) machine_of_this_thread = std::make_unique<Machine>();
    Machine &m = machine();
    m.launch = &launch;
    m.last_operand = 0;
    m.random.state = launch.seed;
    const unsigned blocks = std::min({launch.grid_x * launch.grid_y * launch.grid_z, MAX_BLOCKS, MAX_THREADS / launch.threads});
    m.blocks.assign(std::max(1u, blocks / cluster()) * cluster(), Block{});
    while (m.fibers.size() < m.blocks.size() * launch.threads) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) return {OUT_OF_RESOURCES, "no memory for the stacks of so many threads"};
        mprotect(stack, GUARD, PROT_NONE);
        m.fibers.emplace_back();
        m.fibers.back().stack = (char *)stack;
        prepare(m.fibers.back());
    }
    return run_grid(m);
}
