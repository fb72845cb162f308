"""The fake GPUs' emulator: threads, barriers, shuffles, matrix instructions, checks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])


@both
def test_every_thread_of_every_block_runs_once(machine: Any, programs: Any) -> None:
    """Every thread of every block and split runs once, with its indices."""
    body = """
    const unsigned place = host_block_x() * 16 + thread;
    if (thread < 16 && host_block_y() == host_grid_y() - 1) put(args, place, 1000 * host_block_x() + 100 * host_grid_y() + thread);"""
    out = machine.run(programs.Tiny(machine.wave, body), programs.small(n=48, splits=3))
    assert out[0].tolist() == [1000 * block + 300 + thread for block in range(3) for thread in range(16)]


REVERSED = """
    float *shared = (float *)host_shared();
    shared[thread] = get(args.x, thread);
    {barrier}
    if (thread < 16) put(args, thread, shared[WAVE * 2 - 1 - thread]);"""


@both
def test_a_barrier_orders_the_threads(machine: Any, programs: Any) -> None:
    """All threads read after a barrier what any wrote before it, in any order."""
    program, operands = programs.Tiny(machine.wave, REVERSED.replace("{barrier}", "host_sync_block();")), programs.small()
    wanted = operands.x[0, : program.threads].flip(0)[:16].float()
    for seed in range(20):
        assert torch.equal(machine.run(program, operands, seed)[0], wanted)


@both
def test_a_missing_barrier_shows(machine: Any, programs: Any) -> None:
    """Without the barrier threads read unwritten shared memory, which is NaN."""
    program = programs.Tiny(machine.wave, REVERSED.replace("{barrier}", ""))
    assert all(machine.run(program, programs.small(), seed).isnan().any() for seed in range(20))


@both
def test_shuffles_exchange_the_values_of_a_warp(machine: Any, programs: Any) -> None:
    """Each lane gets the value of the lane of its warp whose number differs in the mask."""
    body = """
    for (int mask = 1; mask < WAVE; mask *= 2) {
        const float other = host_shuffle_xor((float)thread, mask);
        if (other != (float)(thread / WAVE * WAVE + (lane ^ mask))) put(args, 999, 0);  // beyond the output
    }
    float sum = (float)thread;
    for (int mask = WAVE / 2; mask; mask /= 2) sum += host_shuffle_xor(sum, mask);
    if (lane < 8) put(args, thread / WAVE * 8 + lane, sum);"""
    out, wave = machine.run(programs.Tiny(machine.wave, body), programs.small()), machine.wave
    assert out[0].tolist() == [wave * (wave - 1) / 2 + wave * wave * (place // 8) for place in range(16)]


#: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": the weight is A, x is B,
#: columns of B are rows of x.
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
#: v_mfma_f32_16x16x16: A[i][k] and B[k][j] are in lane i + 16 * (k / 4), D[i][j] in lane j + 16 *
#: (i / 4).
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
@pytest.mark.cases("dtype", [torch.bfloat16, torch.float16])
def test_matrix_instructions_are_products(machine: Any, programs: Any, dtype: torch.dtype) -> None:
    """Matrix instructions add A B to C with the manuals' fragments, subnormals included."""
    m, body = (8, MMA_32) if machine.wave == 32 else (16, MMA_64)
    body = body.replace("KIND", str(int(dtype is torch.float16)))
    adds, plain = (programs.Tiny(machine.wave, body.replace("START", start), m=m) for start in ("1", "0"))
    x, weight = torch.randn(m, 16).to(dtype), torch.randn(16, 16).to(dtype)
    out = machine.run(adds, programs.Case(x, weight, None, 16))
    torch.testing.assert_close(out.double(), x.double() @ weight.double().mT, rtol=1e-6, atol=1e-5)
    subnormal = torch.finfo(dtype).smallest_normal / 4
    x.zero_()[0, 3], x[1, 2] = torch.inf, subnormal
    out = machine.run(plain, programs.Case(x, weight.fill_(2.0), None, 16))
    assert out[:, 0].tolist() == [torch.inf, 2 * subnormal, *[0.0] * (m - 2)]
    assert (out == out[:, :1]).all()


STUCK = [
    ("if (thread != 5) host_sync_block();", "waits forever at a barrier"),
    ("if (lane != 5) host_shuffle_xor(1, 1);", "waits forever at a shuffle"),
    ("if (thread < WAVE) host_sync_block(); else host_shuffle_xor(1, 1);", "waits forever at a barrier"),
    ("float c[4]; unsigned a[4]; if (lane) host_mma(c, a, a, 0); else host_shuffle_xor(1, 1);", "while others of its warp wait"),
    ("host_shuffle_xor(1, lane ? 1 : 2);", "others of its warp by"),
    ("host_shuffle_xor(1, WAVE);", "a shuffle by"),
]


@both
@pytest.mark.cases(("body", "reason"), STUCK)
def test_threads_that_do_not_meet(machine: Any, programs: Any, body: str, reason: str) -> None:
    """A collective that not all threads reach fails, and the next launch is right."""
    status, message = machine.refusal(programs.Tiny(machine.wave, body), programs.small())
    assert status == machine.fake.LAUNCH_FAILED
    assert reason in message
    test_a_barrier_orders_the_threads(machine, programs)


#: Access of a kernel -> part of the error; x has 128 elements, the output 16.
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
    "if (!thread) host_load(shared, args.out, 4);": "which no thread has stored",
    "shared[4096] = 0;": "outside its shared memory",
    "shared[-1] = 0;": "outside its shared memory",
    "host_copy_async(shared + 2, args.x, 4, true);": "no multiple of that",
    "host_copy_async(shared, (char *)args.x + 256, 4, true);": "copies 4 bytes at",
}


@both
@pytest.mark.cases("body", WILD)
def test_wild_accesses(machine: Any, programs: Any, body: str) -> None:
    """Misaligned, out-of-bounds and forbidden accesses raise errors with the reason."""
    fake = machine.fake
    status, message = machine.refusal(programs.Tiny(machine.wave, f"unsigned char *shared = host_shared(); {body}"), programs.small())
    assert WILD[body] in message
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
    """Groups that are awaited have arrived, with zeros for what is not there.

    Those that are not awaited may have, or not.
    """
    operands = programs.small()
    whole, late = (programs.Tiny(machine.wave, GET_SHARED + COPIED.replace("{groups}", text)) for text in ("0", "1"))
    out = machine.run(whole, operands)[0]
    assert torch.equal(out[:4], operands.x[0, 0:8:2].float())
    assert (out[4:] == 0).all()
    there = torch.stack([machine.run(late, operands, seed)[0] for seed in range(20)])
    assert torch.equal(there.nanmean(dim=0), out)
    assert 0.3 < there.isnan().float().mean() < 0.7


@both
def test_registered_buffers_alone(machine: Any, programs: Any) -> None:
    """With registered buffers operands must be inside one, outputs inside a writable one."""
    native, operands, program = (
        machine.driver.native,
        programs.small(),
        programs.Tiny(machine.wave, "if (thread < 16) put(args, thread, 1);"),
    )
    out = torch.empty(1, programs.PER_BLOCK)
    for tensor in (operands.x, operands.weight, out):
        native.fake_register(tensor.data_ptr(), tensor.nbytes, 0)
    assert machine.status(program, operands, out) == machine.fake.ILLEGAL_ADDRESS
    assert "is in no writable buffer" in machine.driver.reason()
    native.fake_register(out.data_ptr(), out.nbytes, 1)
    assert machine.status(program, operands, out) == 0
    assert machine.status(program, attrs.evolve(operands, x=operands.x.clone()), out) == machine.fake.ILLEGAL_ADDRESS
    native.fake_forget_all()
    assert machine.status(program, attrs.evolve(operands, x=operands.x.clone()), out) == 0


@both
def test_bytes_moved(machine: Any, programs: Any) -> None:
    """The driver reports the bytes that the last launch loaded and stored."""
    machine.run(programs.Tiny(machine.wave, "if (thread < 16) put(args, thread, get(args.x, thread) + get(args.x, 0));"), programs.small())
    assert machine.driver.moved() == dict.fromkeys(machine.fake.OPERANDS, (0, 0)) | {"x": (64, 0), "out": (0, 64)}


@both
def test_threads_of_the_process_launch_at_once(machine: Any, programs: Any) -> None:
    """Eight threads launch one function, and each gets its own results."""
    program = programs.Tiny(machine.wave, REVERSED.replace("{barrier}", "host_sync_block();"))
    xs = [torch.full((1, 128), float(i), dtype=torch.bfloat16) for i in range(8)]
    base = programs.small()

    def work(x: torch.Tensor) -> bool:
        return all((machine.run(program, attrs.evolve(base, x=x), seed) == float(x[0, 0])).all() for seed in range(30))

    machine.loaded(program)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, xs))
