"""The fake GPUs' emulator refuses what breaks a kernel on a real one.

`test_kernels_emulated` shows that it computes, and that a missing barrier shows.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])


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
    """A collective that not all threads reach fails."""
    status, message = machine.refusal(programs.Tiny(machine.wave, body), programs.small())
    assert status == machine.fake.LAUNCH_FAILED
    assert reason in message


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
