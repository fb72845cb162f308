"""The fake GPUs run threads, barriers, shuffles and matrix instructions as GPUs do, and refuse what would go wrong on one."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

PREAMBLE = """
struct Args {
    void *x, *weight, *bias, *out, *partial, *counters;
    long long n, k;
    int m, splits;
    long long per_split;
};
typedef unsigned short u16;
static float *out_of(const Args &args) { return (float *)args.out; }
static void put(const Args &args, int place, float value) { host_store(out_of(args) + place, &value, 4); }
static float get(const void *from, int place) {  // a bfloat16
    unsigned bits = 0;
    host_load((u16 *)&bits + 1, (const u16 *)from + place, 2);
    return __builtin_bit_cast(float, bits);
}
extern "C" void skinny(Args args) {
    const int thread = host_thread(), lane = thread % WAVE;
    (void)args, (void)lane;
"""
#: Threads of a block in warps, and rows of the weight that it has.
WARPS, PER_BLOCK = 2, 16
both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])
nvidia = pytest.mark.parametrize("machine", [32], indirect=True, ids=["nvidia"])
amd = pytest.mark.parametrize("machine", [64], indirect=True, ids=["amd"])


@attrs.frozen
class Tiny:
    """A kernel of the tests' own, with the macros of a program of the family `rows`."""

    wave: int
    body: str
    bytes_shared: int = 4096
    m: int = 1
    bias: int = 0
    per_block: int = PER_BLOCK
    out: str = "fp32"

    @property
    def threads(self) -> int:
        return self.wave * WARPS

    def source(self) -> str:
        return f"{PREAMBLE}{self.body}\n}}"

    def shared(self, per_split: int) -> int:
        return self.bytes_shared

    def defines(self) -> list[str]:
        values = {"FAMILY_rows": 1, "DTYPE": 0, "OUT": 2, "BIAS": self.bias, "M": self.m, "N_EACH": 8, "WARPS_N": WARPS, "WARPS_K": 1}
        values |= {"UNROLL": 1, "VEC": 1, "WAVE": self.wave, "X_SHARED": 0}
        return [f"-D{name}={value}" for name, value in values.items()]


def case(programs: Any, m: int = 1, n: int = PER_BLOCK, k: int = 128, splits: int = 1) -> Any:
    """Operands of small whole numbers."""
    made = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-9, 10, (rows, k), generator=made).to(torch.bfloat16) for rows in (m, n))
    return programs.Case(x, weight, None, -(-k // splits))


def refusal(machine: Any, program: Tiny, operands: Any) -> tuple[int, str]:
    """Status and reason of a launch that fails."""
    out = torch.full((operands.x.shape[0], operands.weight.shape[0]), torch.nan)
    status = machine.status(program, operands, out)
    assert status, f"{program.body} is launched"
    return status, machine.driver.reason()


@both
def test_every_thread_of_every_block_runs_once(machine: Any, programs: Any) -> None:
    """Each block has its place in the grid, each thread its number, and a block runs once for each split."""
    body = """
    const unsigned place = host_block_x() * 16 + thread;
    if (thread < 16 && host_block_y() == host_grid_y() - 1) put(args, place, 1000 * host_block_x() + 100 * host_grid_y() + thread);"""
    out = machine.run(Tiny(machine.wave, body), case(programs, n=48, splits=3))
    assert out[0].tolist() == [1000 * block + 300 + thread for block in range(3) for thread in range(16)]


REVERSED = """
    float *shared = (float *)host_shared();
    shared[thread] = get(args.x, thread);
    {barrier}
    if (thread < 16) put(args, thread, shared[WAVE * 2 - 1 - thread]);"""


@both
def test_a_barrier_orders_the_threads(machine: Any, programs: Any) -> None:
    """What any thread wrote before a barrier all read after it, in whatever order they run."""
    program, operands = Tiny(machine.wave, REVERSED.replace("{barrier}", "host_sync_block();")), case(programs)
    wanted = operands.x[0, : program.threads].flip(0)[:16].float()
    for seed in range(20):
        assert torch.equal(machine.run(program, operands, seed)[0], wanted)


@both
def test_a_missing_barrier_shows(machine: Any, programs: Any) -> None:
    """Without the barrier threads read what nobody has written: shared memory begins as NaN."""
    program = Tiny(machine.wave, REVERSED.replace("{barrier}", ""))
    assert all(machine.run(program, case(programs), seed).isnan().any() for seed in range(20))


@both
def test_shuffles_exchange_the_values_of_a_warp(machine: Any, programs: Any) -> None:
    """Each lane gets the value of the lane whose number differs in the mask, in its own warp."""
    body = """
    for (int mask = 1; mask < WAVE; mask *= 2) {
        const float other = host_shuffle_xor((float)thread, mask);
        if (other != (float)(thread / WAVE * WAVE + (lane ^ mask))) put(args, 999, 0);  // beyond the output
    }
    float sum = (float)thread;
    for (int mask = WAVE / 2; mask; mask /= 2) sum += host_shuffle_xor(sum, mask);
    if (lane < 8) put(args, thread / WAVE * 8 + lane, sum);"""
    out, wave = machine.run(Tiny(machine.wave, body), case(programs)), machine.wave
    assert out[0].tolist() == [wave * (wave - 1) / 2 + wave * wave * (place // 8) for place in range(16)]


#: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": the weight is A, x is B, columns of B are rows of x.
MMA_32 = """
    const int group = lane >> 2, id = lane % 4;
    u16 a[8], b[4];
    for (int i = 0; i < 8; i++) {
        const int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8, column = id * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        host_load(&a[i], (const u16 *)args.weight + row * 16 + column, 2);
    }
    for (int i = 0; i < 4; i++) {
        const int row = id * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        host_load(&b[i], (const u16 *)args.x + group * 16 + row, 2);
    }
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = i * START;
    host_mma(c, (const unsigned *)a, (const unsigned *)b, KIND);
    if (thread >= WAVE) return;
    for (int i = 0; i < 4; i++) {
        const int row = i < 2 ? group : group + 8, column = id * 2 + (i & 1);
        put(args, column * 16 + row, c[i] - i * START);
    }"""
#: v_mfma_f32_16x16x16: A[i][k] and B[k][j] lie in lane i + 16 * (k / 4), D[i][j] in lane j + 16 * (i / 4).
MMA_64 = """
    u16 a[4] = {}, b[4] = {};
    for (int i = 0; i < 16; i++) for (int k = 0; k < 16; k++) {
        if (lane == i + 16 * (k / 4)) host_load(&a[k % 4], (const u16 *)args.weight + i * 16 + k, 2);
        if (lane == i + 16 * (k / 4)) host_load(&b[k % 4], (const u16 *)args.x + i * 16 + k, 2);
    }
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = i * START;
    host_mma(c, (const unsigned *)a, (const unsigned *)b, KIND);
    if (thread >= WAVE) return;
    for (int i = 0; i < 16; i++) for (int j = 0; j < 16; j++) {
        if (lane == j + 16 * (i / 4)) put(args, j * 16 + i, c[i % 4] - i % 4 * START);
    }"""


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrix_instructions_are_products(machine: Any, programs: Any, dtype: torch.dtype) -> None:
    """With fragments laid out as the manuals say the instruction adds A B to C, for both dtypes, subnormals and infinity among them."""
    m, body = (8, MMA_32) if machine.wave == 32 else (16, MMA_64)
    body = body.replace("KIND", str(int(dtype is torch.float16)))
    adds, plain = (Tiny(machine.wave, body.replace("START", start), m=m) for start in ("1", "0"))
    x, weight = torch.randn(m, 16).to(dtype), torch.randn(16, 16).to(dtype)
    out = machine.run(adds, programs.Case(x, weight, None, 16))
    torch.testing.assert_close(out.double(), x.double() @ weight.double().mT, rtol=1e-6, atol=1e-5)
    subnormal = torch.finfo(dtype).smallest_normal / 4
    x.zero_()[0, 3], x[1, 2] = torch.inf, subnormal
    out = machine.run(plain, programs.Case(x, weight.fill_(2.0), None, 16))
    assert out[:, 0].tolist() == [torch.inf, 2 * subnormal, *[0.0] * (m - 2)]
    assert (out == out[:, :1]).all()


STUCK = [
    ("if (thread != 5) host_sync_block();", "waits for ever at a barrier"),
    ("if (lane != 5) host_shuffle_xor(1, 1);", "waits for ever at a shuffle"),
    ("if (thread < WAVE) host_sync_block(); else host_shuffle_xor(1, 1);", "waits for ever at a barrier"),
    ("float c[4]; unsigned a[4]; if (lane) host_mma(c, a, a, 0); else host_shuffle_xor(1, 1);", "while others of its warp wait"),
    ("host_shuffle_xor(1, lane ? 1 : 2);", "others of its warp by"),
    ("host_shuffle_xor(1, WAVE);", "a shuffle by"),
]


@both
@pytest.mark.parametrize(("body", "reason"), STUCK, ids=[reason for _, reason in STUCK])
def test_threads_that_do_not_meet(machine: Any, programs: Any, body: str, reason: str) -> None:
    """A collective that not all threads reach fails, and the next launch is right again."""
    status, told = refusal(machine, Tiny(machine.wave, body), case(programs))
    assert status == machine.fake.LAUNCH_FAILED
    assert reason in told
    test_a_barrier_orders_the_threads(machine, programs)


#: What a kernel does -> what it is told; x has 128 elements, the output 16.
WILD = {
    "host_load(shared, (char *)args.x + 2, 4);": "no multiple of that",
    "host_load(shared, (char *)args.x + 8, 16);": "no multiple of that",
    "float f = 0; host_store((char *)args.out + 2, &f, 4);": "no multiple of that",
    "host_load(shared, (char *)args.x + 256, 2);": "loads 2 bytes at",
    "host_load(shared, (char *)args.weight - 16, 16);": "byte -16 of weight",
    "host_load(shared, nullptr, 16);": "loads 16 bytes at",
    "put(args, 16, 0);": "byte 64 of out",
    "host_store(args.x, shared, 2);": "stores to x",
    "host_atomic_add_one((unsigned *)args.counters);": "adds to 4 bytes at",
    "if (thread < 2) put(args, 3, thread);": "a second time",
    "if (!thread) host_load(shared, args.out, 4);": "which nobody has stored",
    "shared[4096] = 0;": "beside its shared memory",
    "shared[-1] = 0;": "beside its shared memory",
    "host_copy_async(shared + 2, args.x, 4, true);": "no multiple of that",
    "host_copy_async(shared, (char *)args.x + 256, 4, true);": "copies 4 bytes at",
}


@both
@pytest.mark.parametrize("body", WILD)
def test_wild_accesses(machine: Any, programs: Any, body: str) -> None:
    """Accesses that are not aligned, lie outside the operands or touch what they must not are errors that say so."""
    fake = machine.fake
    status, told = refusal(machine, Tiny(machine.wave, f"unsigned char *shared = host_shared(); {body}"), case(programs))
    assert WILD[body] in told
    misaligned = fake.MISALIGNED_ADDRESS if machine.wave == 32 else fake.LAUNCH_FAILED
    assert status in (misaligned if "multiple" in WILD[body] else fake.ILLEGAL_ADDRESS, fake.LAUNCH_FAILED)


COPIED = """
    u16 *shared = (u16 *)host_shared();
    host_copy_async(shared + 2 * thread, (u16 *)args.x + 2 * thread, 4, thread < 4);
    host_commit_copies();
    host_copy_async(shared + 512 + 2 * thread, (u16 *)args.x + 16, 4, true);
    host_commit_copies();
    host_await_copies({groups});
    if (thread < 16) put(args, thread, get_shared(shared[2 * thread]) + 0 * get_shared(shared[512 + 2 * thread]));"""
GET_SHARED = "const auto get_shared = [](u16 half) { return __builtin_bit_cast(float, (unsigned)half << 16); };"


@both
def test_asynchronous_copies_arrive_when_they_are_awaited(machine: Any, programs: Any) -> None:
    """Groups that are awaited have arrived, with zeros for what is not there; those that are not awaited may have, or not."""
    operands = case(programs)
    whole, late = (Tiny(machine.wave, GET_SHARED + COPIED.replace("{groups}", text)) for text in ("0", "1"))
    out = machine.run(whole, operands)[0]
    assert torch.equal(out[:4], operands.x[0, 0:8:2].float())
    assert (out[4:] == 0).all()
    there = torch.stack([machine.run(late, operands, seed)[0] for seed in range(20)])
    assert torch.equal(there.nanmean(dim=0), out)
    assert 0.3 < there.isnan().float().mean() < 0.7


@both
def test_registered_buffers_alone(machine: Any, programs: Any) -> None:
    """Once buffers are registered every operand must lie in one, and what is written in a writable one."""
    native, operands, program = machine.driver.native, case(programs), Tiny(machine.wave, "if (thread < 16) put(args, thread, 1);")
    out = torch.empty(1, PER_BLOCK)
    for tensor in (operands.x, operands.weight, out):
        native.fake_register(tensor.data_ptr(), tensor.nbytes, 0)
    assert machine.status(program, operands, out) == machine.fake.ILLEGAL_ADDRESS
    assert "lies in no writable buffer" in machine.driver.reason()
    native.fake_register(out.data_ptr(), out.nbytes, 1)
    assert machine.status(program, operands, out) == 0
    assert machine.status(program, attrs.evolve(operands, x=operands.x.clone()), out) == machine.fake.ILLEGAL_ADDRESS
    native.fake_forget_all()
    assert machine.status(program, attrs.evolve(operands, x=operands.x.clone()), out) == 0


@both
def test_bytes_moved(machine: Any, programs: Any) -> None:
    """The driver tells how many bytes the last launch loaded and stored."""
    machine.run(Tiny(machine.wave, "if (thread < 16) put(args, thread, get(args.x, thread) + get(args.x, 0));"), case(programs))
    assert machine.driver.moved() == dict.fromkeys(machine.fake.OPERANDS, (0, 0)) | {"x": (64, 0), "out": (0, 64)}


@both
def test_threads_of_the_process_launch_at_once(machine: Any, programs: Any) -> None:
    """Eight threads launch one function with operands of their own and get their own results."""
    program = Tiny(machine.wave, REVERSED.replace("{barrier}", "host_sync_block();"))
    xs = [torch.full((1, 128), float(i), dtype=torch.bfloat16) for i in range(8)]
    base = case(programs)

    def work(x: torch.Tensor) -> bool:
        return all((machine.run(program, attrs.evolve(base, x=x), seed) == float(x[0, 0])).all() for seed in range(30))

    machine.loaded(program)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, xs))


#: Changed arguments -> what the driver says of them; the launch is of 3 blocks, 1 split.
BAD_ARGUMENTS = {
    "3 blocks for 49 rows by 16": {"n": 49},
    "rows of x": {"m": 2},
    "a grid of": {"splits": 2},
    "leave some": {"per_split": 64},
    "below 1": {"k": 0},
    "an operand is missing": {"x": None},
    "no multiple of 16": {"weight": 4104},
}


@both
@pytest.mark.parametrize("reason", BAD_ARGUMENTS)
def test_arguments_that_do_not_fit_the_program(machine: Any, programs: Any, reason: str) -> None:
    """A launch whose arguments do not fit the program or the grid is refused before it runs."""
    fake, function = machine.fake, machine.loaded(Tiny(machine.wave, "if (thread < 16) put(args, host_block_x() * 16 + thread, 1);"))
    operands, out = case(programs, n=48), torch.empty(1, 48)
    right = {"x": operands.x.data_ptr(), "weight": operands.weight.data_ptr(), "out": out.data_ptr(), "n": 48, "k": 128, "m": 1}
    right |= {"splits": 1, "per_split": 128}
    grid = fake.Grid(3, 1, machine.wave * WARPS, 0)
    assert machine.driver.launch(function, grid, fake.Args(**right)) == 0
    assert machine.driver.launch(function, grid, fake.Args(**right | BAD_ARGUMENTS[reason])) == fake.INVALID_VALUE
    assert reason in machine.driver.reason()


@both
def test_grids_and_blocks_beyond_the_limits(machine: Any, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are too large, have too many registers or no memory are refused as a driver refuses them."""
    fake, driver = machine.fake, machine.driver
    function = machine.loaded(Tiny(machine.wave, ""))
    args, grid = fake.Args(n=1, k=1, m=1, splits=1, per_split=1), fake.Grid(1, 1, machine.wave * WARPS, 0)
    for wrong in ({"threads": 2048}, {"threads": 0}, {"blocks": 0}, {"splits": 65536}, {"shared": 1 << 20}):
        assert driver.launch(function, attrs.evolve(grid, **wrong), args) == fake.INVALID_VALUE
    monkeypatch.setenv("FAKE_REGISTERS", "1024")
    assert driver.launch(function, attrs.evolve(grid, threads=128), args) == fake.OUT_OF_RESOURCES
    monkeypatch.setenv("FAKE_LAUNCH_STATUS", "719")
    assert driver.launch(function, grid, args) == fake.LAUNCH_FAILED


@nvidia
def test_cuda_gives_much_shared_memory_only_when_asked(machine: Any, programs: Any) -> None:
    """Above 48 KiB a launch needs the attribute, which goes up to what a block of an H200 can have."""
    fake, driver = machine.fake, machine.driver
    program, out = Tiny(32, "if (thread < 16) put(args, thread, host_shared()[65535]);", bytes_shared=65536), torch.empty(1, 16)
    args = case(programs)
    function = machine.loaded(program)
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, 65535) == 0
    grid = fake.Grid(1, 1, 64, 65536)
    given = {"x": args.x.data_ptr(), "weight": args.weight.data_ptr(), "out": out.data_ptr(), "n": 16, "k": 128, "m": 1}
    full = fake.Args(**given, splits=1, per_split=128)
    assert driver.launch(function, grid, full) == fake.INVALID_VALUE
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, 65536) == 0
    assert driver.launch(function, grid, full) == 0
    assert (out == 255).all()
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, (227 << 10) + 1) == fake.INVALID_VALUE
    assert driver.call("FuncSetAttribute", function, fake.LOCAL_BYTES, 1) == fake.INVALID_VALUE


@amd
def test_hip_gives_what_there_is_unasked(machine: Any, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB need no attribute, which HIP would want a host function for; more is refused."""
    fake, driver = machine.fake, machine.driver
    program = Tiny(64, "if (thread < 16) put(args, thread, 1);", bytes_shared=65536)
    assert driver.call("FuncSetAttribute", machine.loaded(program), fake.DYNAMIC_SHARED, 65536) == 98
    assert (machine.run(program, case(programs)) == 1).all()
    more = attrs.evolve(program, bytes_shared=65537)
    assert refusal(machine, more, case(programs))[0] == fake.INVALID_VALUE
    assert driver.native.hipFuncGetAttribute(ctypes.byref(ctypes.c_int()), 77, machine.loaded(program)) == fake.INVALID_VALUE


@both
def test_functions_tell_of_themselves(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers, spills and the threads that they leave room for, as set."""
    fake, function, found = machine.fake, machine.loaded(Tiny(machine.wave, "")), ctypes.c_int()
    monkeypatch.setenv("FAKE_REGISTERS", "255")
    monkeypatch.setenv("FAKE_LOCAL_BYTES", "16")
    told = []
    for attribute in (fake.MAX_THREADS, fake.LOCAL_BYTES, fake.REGISTERS):
        assert machine.driver.call("FuncGetAttribute", ctypes.byref(found), attribute, function) == 0
        told.append(found.value)
    assert told == [256, 16, 255]
    assert machine.driver.call("FuncGetAttribute", ctypes.byref(found), 0, ctypes.c_void_p(8)) == fake.INVALID_HANDLE


@both
def test_modules(machine: Any, machines: dict[int, Any]) -> None:
    """Images that are torn, edited or of the other machine are refused, unknown functions too, and what was unloaded is gone."""
    fake, driver, module = machine.fake, machine.driver, ctypes.c_void_p()
    tiny = Tiny(machine.wave, "")
    code = machine.compiler.compile(tiny.source(), machine.options(tiny))
    other = Tiny(96 - machine.wave, "")
    foreign = machines[other.wave].compiler.compile(other.source(), machines[other.wave].options(other))
    edited = bytearray(code)
    edited[len(code) // 2] ^= 1
    torn = [b"", b"\x7fELF", code[: len(code) // 2], bytes(edited), code[:-8] + bytes(8)]
    assert {driver.call("ModuleLoadData", ctypes.byref(module), bytes(bad)) for bad in torn} == {fake.INVALID_IMAGE}
    assert driver.call("ModuleLoadData", ctypes.byref(module), foreign) == fake.NO_BINARY
    module, function = driver.load(code)
    assert driver.call("ModuleGetFunction", ctypes.byref(ctypes.c_void_p()), module, b"other") == fake.NOT_FOUND
    assert driver.call("ModuleUnload", module) == 0
    assert driver.call("ModuleUnload", module) == fake.INVALID_HANDLE
    assert driver.launch(function, fake.Grid(1, 1, 64, 0), fake.Args()) == fake.INVALID_HANDLE
    assert driver.counted("ModuleUnload") == 2


@nvidia
def test_launch_with_a_structure(machine: Any, programs: Any) -> None:
    """``cuLaunchKernelEx`` takes grid, block and shared memory in a structure."""

    class Config(ctypes.Structure):
        _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]

    function, out, operands = machine.loaded(Tiny(32, "if (thread < 16) put(args, thread, 1);")), torch.empty(1, 16), case(programs)
    given = {"x": operands.x.data_ptr(), "weight": operands.weight.data_ptr(), "out": out.data_ptr(), "n": 16, "k": 128, "m": 1}
    args = machine.fake.Args(**given, splits=1, per_split=128)
    config = Config((ctypes.c_uint * 7)(1, 1, 1, 64, 1, 1, 64))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    assert machine.driver.call("LaunchKernelEx", ctypes.byref(config), function, params, None) == 0
    assert (out == 1).all()


def test_error_texts(machines: dict[int, Any]) -> None:
    """Both drivers and both compilers have words for a status."""
    text = ctypes.c_char_p()
    assert machines[32].driver.call("GetErrorString", 700, ctypes.byref(text)) == 0
    assert text.value == b"an illegal memory access was encountered"
    assert machines[32].driver.call("GetErrorString", 12345, ctypes.byref(text)) != 0
    machines[64].driver.native.hipGetErrorString.restype = ctypes.c_char_p
    assert machines[64].driver.native.hipGetErrorString(1) == b"invalid argument"
    for wave, words in ((32, b"NVRTC_ERROR_COMPILATION"), (64, b"HIPRTC_ERROR_COMPILATION")):
        named = machines[wave].compiler.native[machines[wave].compiler.name + "GetErrorString"]
        named.restype = ctypes.c_char_p
        assert named(6) == words


@both
def test_programs_that_do_not_compile(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the source are in the log with their line; unknown options, no architecture and a wrong width of warps are errors."""
    fake, tiny = machine.fake, Tiny(machine.wave, "return 1;")
    options = machine.options(tiny)

    def log(source: str, given: list[str]) -> str:
        with pytest.raises(fake.RefusedError) as error:
            machine.compiler.compile(source, given, "some_kernel.cpp")
        return f"{error.value.args[0]}: {error.value.args[1]}"

    assert log(tiny.source(), options).startswith(f"{fake.COMPILATION}: some_kernel.cpp: In function")
    fine = Tiny(machine.wave, "").source()
    assert log(fine, [*options, "--frobnicate"]).startswith(f"{fake.INVALID_OPTION}: error: unrecognized option --frobnicate")
    assert log(fine, options[1:]).startswith(f"{fake.INVALID_OPTION}: error: no architecture")
    assert "sm_12" in log(fine, [options[0].rpartition("=")[0] + "=sm_12", *options[1:]])
    assert "width of this architecture" in log(fine, [*options[:-2], f"-DWAVE={96 - machine.wave}", options[-1]])
    assert "UNROLL" in log(fine, [option for option in options if "UNROLL" not in option])
    monkeypatch.setenv("FAKE_RTC_FAIL", "no such thing")
    assert log(fine, options).startswith(f"{fake.COMPILATION}: some_kernel.cpp(12): error: no such thing")


@both
def test_compilations_are_counted_and_last(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file counts compilations over processes, each lasts as long as asked, and the version is the one that is set."""
    tiny, counted = Tiny(machine.wave, ""), tmp_path / "count"
    monkeypatch.setenv("FAKE_RTC_COUNT", str(counted))
    monkeypatch.setenv("FAKE_RTC_SECONDS", "0.3")
    begun = time.perf_counter()
    for _ in range(2):
        machine.compiler.compile(tiny.source(), machine.options(tiny))
    assert time.perf_counter() - begun >= 0.6
    assert counted.stat().st_size == 2
    monkeypatch.setenv("FAKE_RTC_VERSION", "12.8")
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert machine.compiler.call("Version", ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == (12, 8)


@both
def test_arguments_of_another_size(machine: Any) -> None:
    """A kernel whose arguments are not what the plugin passes does not load."""
    tiny = Tiny(machine.wave, "")
    code = machine.compiler.compile(tiny.source().replace("long long per_split;", "long long per_split, more;"), machine.options(tiny))
    assert machine.driver.call("ModuleLoadData", ctypes.byref(ctypes.c_void_p()), code) == machine.fake.INVALID_IMAGE
    assert "88 bytes instead of 80" in machine.driver.reason()
