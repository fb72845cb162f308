"""Check the rules of the emulator that no planted mistake of a kernel breaks.

`test_gcn_run` breaks those of wait states and of memory that workgroups share.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytestmark = pytest.mark.nightly

LANE = np.arange(64, dtype=np.uint32)


def _registers(gcn, memory):
    """Return the registers that the tests' instructions may read."""
    base = memory.place("buffer", np.zeros(1024, np.uint32))
    vectors = {f"v{at}": 0 for at in range(32)} | {f"a{at}": 0 for at in range(32)}
    scalars = {"s4": base & 0xFFFFFFFF, "s5": base >> 32, "s6": 4096, "s7": 0x20000, "s8": 0, "s9": 0, "s10": 0}
    return vectors | scalars | {"v0": 16 * LANE, "v2": 0xFFFFFFFF, "vcc": 0}


LOADS = "buffer_load_dword v1, v0, s[4:7], 0 offen\n buffer_load_dword v2, v0, s[4:7], 0 offen\n"
READS = "ds_read_b32 v1, v0\n ds_read_b32 v2, v0\n"
# Waits, and whether v1 and v2 may be read afterwards.
PENDING = [
    (LOADS, "vmcnt(0)", True, True), (LOADS, "vmcnt(1)", True, False), (LOADS, "lgkmcnt(0)", False, False),
    (LOADS, "vmcnt(2)", False, False),
    (READS, "lgkmcnt(0)", True, True), (READS, "lgkmcnt(1)", True, False), (READS, "vmcnt(0)", False, False),
    (LOADS, "0xf70", True, True), (LOADS, "0xf71", True, False), (READS, "0xc07f", True, True),
    (READS.replace("ds_read_b32 v2, v0", "s_load_dword s9, s[4:5], 0x0\n ds_read_b32 v2, v0"), "lgkmcnt(1)", True, False),
]  # fmt: skip


def test_a_load_is_complete_after_its_wait(gcn, failing):
    """A loaded register may be used only after a sufficient wait."""

    def check(text, wait, first, second):
        for register, ready in ((1, first), (2, second)):
            for use in (
                f"v_mov_b32_e32 v9, v{register}",
                f"v_mov_b32_e32 v{register}, 0",
                f"buffer_load_dword v{register}, v0, s[4:7], 0 offen",
            ):
                memory = gcn.Memory()
                registers = _registers(gcn, memory) | {"v0": 0}
                bench = gcn.Bench(f"ds_write_b32 v0, v0\n {text} s_waitcnt {wait}\n {use}", lds=64, memory=memory).give(registers)
                if ready:
                    bench.run()
                    continue
                with pytest.raises(gcn.Fault, match=f"(reads|overwrites) a register of line .* v{register}, v0") as caught:
                    bench.run()
                assert caught.value.rule == "pending"

    assert not failing(check, PENDING)


def test_scalar_loads_complete_in_any_order(gcn):
    """Two scalar loads need lgkmcnt(0)."""
    for wait, ready in (("lgkmcnt(0)", True), ("lgkmcnt(1)", False)):
        memory = gcn.Memory()
        text = f"s_load_dword s20, s[4:5], 0x0\n s_load_dword s21, s[4:5], 0x4\n s_waitcnt {wait}\n s_add_u32 s22, s20, 1"
        bench = gcn.Bench(text, memory=memory).give(_registers(gcn, memory))
        if ready:
            bench.run()
        else:
            with pytest.raises(gcn.Fault, match="pending"):
                bench.run()


UNDEFINED = {
    "a vector register": "v_mov_b32_e32 v1, v99",
    "a lane of it": "s_mov_b64 exec, 1\n v_mov_b32_e32 v99, 0\n s_mov_b64 exec, 3\n v_mov_b32_e32 v1, v99",
    "a scalar register": "s_mov_b32 s8, s99",
    "SCC": "s_cselect_b32 s8, 1, 2",
    "VCC": "v_cndmask_b32_e32 v1, v0, v0, vcc",
    "LDS": "ds_read_b32 v1, v0",
    "a factor of a product": "v_mfma_f32_16x16x16_bf16 a[0:3], v[98:99], v[12:13], a[0:3]",
    "an addend": "v_mfma_f32_16x16x16_bf16 a[0:3], v[10:11], v[12:13], a[40:43]",
    "a store's data": "buffer_store_dword v99, v0, s[4:7], 0 offen",
    "memory": "global_load_dword v1, v0, s[20:21]\n s_waitcnt vmcnt(0)",
}


def test_unwritten_registers_are_not_used(gcn, failing):
    """Reading undefined registers, LDS or memory fails."""

    def check(what):
        memory = gcn.Memory()
        registers = _registers(gcn, memory) | {"v0": 4 * LANE}
        nothing = memory.place("nothing", 1024)
        registers |= {"s20": nothing & 0xFFFFFFFF, "s21": nothing >> 32}
        del registers["vcc"]
        with pytest.raises(gcn.Fault) as caught:
            gcn.Bench(UNDEFINED[what], lds=256, memory=memory).give(registers).run()
        assert caught.value.rule == "undefined"

    assert not failing(check, itertools.product(UNDEFINED))


def test_addresses_stay_inside_allocations(gcn):
    """Accesses outside allocations, unaligned or wrapped addresses fail."""
    cases = [
        ("global_load_dword v1, v0, s[4:5] offset:-4", "bounds"), ("global_load_dword v1, v0, s[4:5] offset:4000", "bounds"),
        ("s_load_dwordx2 s[20:21], s[4:5], 0xffc", "bounds"), ("ds_write_b32 v0, v0", "bounds"), ("ds_write_b64 v3, v[10:11]", "alignment"),
        ("buffer_load_dword v1, v0, s[4:7], s11 offen", "bounds"),
    ]  # fmt: skip
    for text, rule in cases:
        memory = gcn.Memory()
        registers = _registers(gcn, memory) | {"v3": 4, "s11": 4097}
        with pytest.raises(gcn.Fault) as caught:
            gcn.Bench(text, lds=512, memory=memory).give(registers).run()
        assert caught.value.rule == rule, text


WRITE, READ = "ds_write_b32 v0, v1", "ds_read_b32 v3, v2\n s_waitcnt lgkmcnt(0)"
# Two waves write 256 bytes each and read the other's; then they write again.
EXCHANGES = {
    "right": (f"{WRITE}\n s_waitcnt lgkmcnt(0)\n s_barrier\n {READ}\n s_barrier\n {WRITE}", ""),
    "no barrier": (f"{WRITE}\n s_waitcnt lgkmcnt(0)\n {READ}", "undefined|since the last barrier"),
    "no wait": (f"{WRITE}\n s_barrier\n {READ}", "did not wait for it"),
    "no second barrier": (f"{WRITE}\n s_waitcnt lgkmcnt(0)\n s_barrier\n {READ}\n {WRITE}", "since the last barrier"),
    "no wait for the read": (
        f"{WRITE}\n s_waitcnt lgkmcnt(0)\n s_barrier\n ds_read_b32 v3, v2\n s_barrier\n {WRITE}",
        "overwritten, which wave . read and did not wait for it",
    ),
}


def test_waves_exchange_through_lds_behind_a_wait_and_a_barrier(gcn, failing):
    """Waves exchange data through LDS only with waits and barriers on both sides."""

    def check(name):
        text, message = EXCHANGES[name]
        bench = gcn.Bench(text, waves=2, lds=512)
        for wave in (0, 1):
            bench.give({"v0": 256 * wave + 4 * LANE, "v1": LANE + 100 * wave, "v2": 256 * (1 - wave) + 4 * LANE}, wave)
        if not message:
            assert bench.run().vector("v3", wave=0).tolist() == [100 + lane for lane in range(64)]
            return
        with pytest.raises(gcn.Fault, match=message):
            bench.run()

    assert not failing(check, itertools.product(EXCHANGES))


def test_a_copy_to_lds_is_waited_for_as_memory(gcn):
    """A direct load to LDS is covered by vmcnt, not by lgkmcnt."""
    copy = "s_mov_b32 m0, 0\n s_nop 0\n buffer_load_dword v0, s[4:7], 0 offen lds"
    for wait, ready in (("vmcnt(0)", True), ("lgkmcnt(0)", False)):
        memory = gcn.Memory()
        registers = _registers(gcn, memory) | {"v0": 4 * LANE}
        bench = gcn.Bench(f"{copy}\n s_waitcnt {wait}\n ds_read_b32 v3, v0\n s_waitcnt lgkmcnt(0)", lds=256, memory=memory).give(registers)
        if ready:
            assert not bench.run().vector("v3").any()
        else:
            with pytest.raises(gcn.Fault):
                bench.run()


def test_loops_without_end_and_barriers_not_reached_are_faults(gcn):
    """Endless loops and unreached barriers fail."""
    with pytest.raises(gcn.Fault, match="has not ended"):
        gcn.Bench("again:\n s_branch again", rules=gcn.Rules(slice=1000, limit=5000)).run()
    with pytest.raises(gcn.Fault, match="never reach"):
        bench = gcn.Bench("s_cmp_eq_u32 s1, 0\n s_cbranch_scc1 end\n s_barrier\nend:", waves=2)
        bench.give({"s1": 0}, 0).give({"s1": 1}, 1).run()
