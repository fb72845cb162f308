"""Check each rule of the emulator: the minimum of waits passes, and one less fails."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytestmark = pytest.mark.nightly

LANE = np.arange(64, dtype=np.uint32)
PRODUCT = "v_mfma_f32_16x16x16_bf16 a[0:3], v[10:11], v[12:13], a[0:3]"
WIDE = "v_mfma_f32_32x32x8_bf16 a[0:15], v[10:11], v[12:13], a[0:15]"
STORE = "buffer_store_dwordx4 v[20:23], v0, s[4:7], {} offen"
# First instruction, second instruction, wait states between them on gfx942 and on gfx950 (ISA
# guides; LLVM's hazard recogniser).
WAIT_STATES = {
    "a vector's scalar to memory": ("v_readfirstlane_b32 s8, v0", "buffer_load_dword v1, v0, s[4:7], s8 offen", 5, 5),
    "a vector's scalar to a vector": ("v_readfirstlane_b32 s8, v0", "v_add_u32_e32 v1, s8, v2", 2, 2),
    "a comparison to a selection": ("v_cmp_lt_u32_e32 vcc, v0, v2", "v_cndmask_b32_e32 v1, v2, v3, vcc", 2, 2),
    "a vector's scalar to the number of a lane": ("v_readfirstlane_b32 s8, v0", "v_readlane_b32 s9, v2, s8", 4, 4),
    "a vector to reading a lane": ("v_mov_b32_e32 v1, v2", "v_readfirstlane_b32 s9, v1", 1, 1),
    "a vector to DPP": ("v_mov_b32_e32 v1, v2", "v_mov_b32_dpp v3, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 2, 2),
    "EXEC to DPP": ("v_cmpx_lt_u32_e64 s[8:9], v0, v2", "v_mov_b32_dpp v3, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 5, 5),
    "EXEC to reading a lane": ("v_cmpx_lt_u32_e64 s[8:9], v0, v2", "v_readfirstlane_b32 s9, v1", 4, 4),
    "EXEC to a product": ("v_cmpx_lt_u32_e64 s[8:9], v0, v2", PRODUCT, 4, 4),
    "a reciprocal to a vector": ("v_rcp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v2", 1, 1),
    "a reciprocal to another": ("v_rcp_f32_e32 v1, v2", "v_rcp_f32_e32 v3, v1", 0, 0),
    "a part of a register": ("v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD", "v_mov_b32_e32 v4, v1", 1, 1),
    "a vector to a product": ("v_mov_b32_e32 v10, v2", PRODUCT, 2, 2),
    "a vector to a sum": ("v_accvgpr_write_b32 a2, v2", PRODUCT, 2, 2),
    "M0 to a copy to LDS": ("s_mov_b32 m0, 0", "buffer_load_dword v0, s[4:7], 0 offen lds", 1, 1),
    "a product to its own chain": (PRODUCT, PRODUCT, 0, 0),
    "a product to a part of its sum": (PRODUCT, "v_mfma_f32_16x16x16_bf16 a[2:5], v[10:11], v[12:13], a[2:5]", 5, 6),
    "a product to a chain of another kind": (PRODUCT, "v_mfma_f32_16x16x16_f16 a[0:3], v[10:11], v[12:13], a[0:3]", 5, 6),
    "a product to a factor": (PRODUCT, "v_mfma_f32_16x16x16_bf16 a[8:11], a[0:1], v[12:13], a[8:11]", 7, 8),
    "a product to a vector": (PRODUCT, "v_accvgpr_read_b32 v1, a3", 7, 8),
    "a wide product to a vector": (WIDE, "v_accvgpr_read_b32 v1, a3", 11, 12),
    "a product to a store": (PRODUCT, "buffer_store_dwordx4 a[0:3], v0, s[4:7], 0 offen", 7, 8),
    "a product to LDS": (PRODUCT, "ds_write_b128 v0, a[0:3]", 7, 8),
    "a product, overwritten": (PRODUCT, "v_accvgpr_write_b32 a1, 0", 7, 8),
    "a product, overwritten by a load": (PRODUCT, "buffer_load_dword a1, v0, s[4:7], 0 offen", 7, 8),
    "an addend, overwritten": ("v_mfma_f32_16x16x16_bf16 a[8:11], v[10:11], v[12:13], a[0:3]", "v_accvgpr_write_b32 a1, 0", 3, 3),
    "a wide addend, overwritten": ("v_mfma_f32_32x32x8_bf16 a[16:31], v[10:11], v[12:13], a[0:15]", "v_accvgpr_write_b32 a1, 0", 7, 7),
    "a factor, overwritten": (PRODUCT, "v_mov_b32_e32 v10, 0", 0, 0),
    "a wide store's data": (STORE.format(0), "v_mov_b32_e32 v22, 0", 2, 2),
    "a wide store's data with a scalar offset": (STORE.format("s10"), "v_mov_b32_e32 v22, 0", 1, 1),
    "a narrow store's data": ("buffer_store_dwordx2 v[20:21], v0, s[4:7], 0 offen", "v_mov_b32_e32 v21, 0", 0, 0),
}


def _registers(gcn, memory):
    """Return the registers that the instructions above may read."""
    base = memory.place("buffer", np.zeros(1024, np.uint32))
    vectors = {f"v{at}": 0 for at in range(32)} | {f"a{at}": 0 for at in range(32)}
    scalars = {"s4": base & 0xFFFFFFFF, "s5": base >> 32, "s6": 4096, "s7": 0x20000, "s8": 0, "s9": 0, "s10": 0}
    return vectors | scalars | {"v0": 16 * LANE, "v2": 0xFFFFFFFF, "vcc": 0}


def _between(first, second, states):
    nops, left = [], states
    while left > 0:
        nops.append(f"s_nop {min(left, 8) - 1}")
        left -= 8
    return "\n ".join([first, *nops, second])


def test_wait_states_are_those_of_the_tables(gcn, failing):
    """A pair runs with the table's wait states and fails with one less."""

    def check(gfx, name):
        first, second, *states = WAIT_STATES[name]
        needed = states[gfx == "gfx950"]

        def run(text):
            memory = gcn.Memory()
            gcn.Bench(text, gfx=gfx, memory=memory, lds=1024).give(_registers(gcn, memory)).run()

        run(_between(first, second, needed))
        if needed:
            with pytest.raises(gcn.Fault, match=f"{needed} wait states are needed|wants one wait state") as caught:
                run(_between(first, second, needed - 1))
            assert caught.value.rule == "wait states"

    assert not failing(check, itertools.product(["gfx942", "gfx950"], WAIT_STATES))


def test_exchanges_of_lanes_wait_for_a_vector_on_gfx950(gcn):
    """v_permlane32_swap needs two wait states after a vector write."""
    first, second = "v_mov_b32_e32 v1, v2", "v_permlane32_swap_b32_e32 v1, v3"
    gcn.Bench(_between(first, second, 2), gfx="gfx950").give({"v2": 0, "v3": 0}).run()
    with pytest.raises(gcn.Fault, match="2 wait states"):
        gcn.Bench(_between(first, second, 1), gfx="gfx950").give({"v2": 0, "v3": 0}).run()


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


HANDOVER = """
 .amdgcn_target "amdgcn-amd-amdhsa--gfx942"
handover:
 s_load_dwordx4 s[4:7], s[0:1], 0x0
 v_lshlrev_b32_e32 v1, 2, v0
 v_mov_b32_e32 v2, 7
 s_lshl_b32 s9, s2, 9
 v_add_u32_e32 v1, s9, v1
 s_waitcnt lgkmcnt(0)
 global_store_dword v1, v2, s[4:5]{store}
 {publish}
 s_barrier
 v_readfirstlane_b32 s12, v0
 s_cmp_lg_u32 s12, 0
 s_cbranch_scc1 end
 v_mov_b32_e32 v3, 0
 v_mov_b32_e32 v4, 1
 s_mov_b64 s[10:11], exec
 s_mov_b64 exec, 1
 global_atomic_inc v5, v3, v4, s[6:7] sc0
 s_waitcnt vmcnt(0)
 v_readfirstlane_b32 s8, v5
 s_mov_b64 exec, s[10:11]
 s_cmp_eq_u32 s8, 1
 s_cbranch_scc0 end
 {refresh}
 v_xor_b32_e32 v1, 0x200, v1
 global_load_dword v6, v1, s[4:5] offset:256{load}
 s_waitcnt vmcnt(0)
end:
 s_endpgm
 .amdhsa_kernel handover
 .amdhsa_user_sgpr_kernarg_segment_ptr 1
 .amdhsa_user_sgpr_count 2
 .end_amdhsa_kernel
"""
HANDOVERS = {
    "written back and refreshed": ("", "buffer_wbl2 sc1\n s_waitcnt vmcnt(0)", "buffer_inv sc1\n s_waitcnt vmcnt(0)", "", ""),
    "written through, read through": (" sc1", "s_waitcnt vmcnt(0)", "", " sc1", ""),
    "not written back": ("", "s_waitcnt vmcnt(0)", "buffer_inv sc1\n s_waitcnt vmcnt(0)", "", "no buffer_wbl2 sc1 followed"),
    "not refreshed": (" sc1", "s_waitcnt vmcnt(0)", "", "", "nor was buffer_inv sc1 waited for"),
    "refresh not waited for": (" sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc1", "", "nor was buffer_inv sc1 waited for"),
    "not waited for": (" sc1", "", "buffer_inv sc1\n s_waitcnt vmcnt(0)", "", "nothing orders this load"),
}


def test_workgroups_hand_over_through_memory_that_is_made_visible(gcn, failing):
    """A workgroup reads another's writes only after they are published and counted."""

    def check(order, name):
        store, publish, refresh, load, message = HANDOVERS[name]
        text = HANDOVER.format(store=store, publish=publish, refresh=refresh, load=load)
        memory = gcn.Memory()
        data, counter = memory.place("data", 1024), memory.place("counter", np.zeros(1, np.uint32))
        run = lambda: gcn.launch(  # noqa: E731
            gcn.kernels_of(text)["handover"], (2,), (128,), gcn.arguments(("Q", data), ("Q", counter)), memory, gcn.Rules(order=order)
        )
        if not message:
            run()
            assert memory.read("counter", np.uint32).tolist() == [0]
            assert set(memory.read("data", np.uint32)) == {7}
        else:
            with pytest.raises(gcn.Fault, match=message):
                run()

    assert not failing(check, itertools.product(["up", "down"], HANDOVERS))


def test_workgroups_that_do_not_count_are_not_ordered(gcn):
    """Reading another workgroup's writes without synchronization fails."""
    text = HANDOVER.format(store=" sc1", publish="s_waitcnt vmcnt(0)", refresh="buffer_inv sc1\n s_waitcnt vmcnt(0)", load=" sc1")
    text = text.replace("global_atomic_inc v5, v3, v4, s[6:7] sc0", "global_load_dword v5, v3, s[6:7] sc1")
    text = text.replace("s_cbranch_scc0 end", "s_cmp_eq_u32 s2, 1\n s_cbranch_scc0 end")
    memory = gcn.Memory()
    given = gcn.arguments(("Q", memory.place("data", 1024)), ("Q", memory.place("counter", np.ones(1, np.uint32))))
    with pytest.raises(gcn.Fault, match="nothing orders this load"):
        gcn.launch(gcn.kernels_of(text)["handover"], (2,), (128,), given, memory)


def test_faults_name_kernel_workgroup_wave_and_line(gcn):
    """A fault names kernel, workgroup, wave and line."""
    with pytest.raises(gcn.Fault, match=r"undefined: probe, workgroup \(0, 0, 0\), wave 0, line 5: v_mov_b32_e32 v1, v99: v99 was never"):
        gcn.Bench(" s_nop 0\n v_mov_b32_e32 v1, v99").run()


def test_loops_without_end_and_barriers_not_reached_are_faults(gcn):
    """Endless loops and unreached barriers fail."""
    with pytest.raises(gcn.Fault, match="has not ended"):
        gcn.Bench("again:\n s_branch again", rules=gcn.Rules(slice=1000, limit=5000)).run()
    with pytest.raises(gcn.Fault, match="never reach"):
        bench = gcn.Bench("s_cmp_eq_u32 s1, 0\n s_cbranch_scc1 end\n s_barrier\nend:", waves=2)
        bench.give({"s1": 0}, 0).give({"s1": 1}, 1).run()


STRANGE = [
    ("v_unheard_of v1, v2", "unsupported"), ("v_mov_b32_e32 v1, v2 unheard:1", "unsupported"), ("v_mov_b32_e32 s1, v2", "operand"),
    ("s_mov_b64 s1, 0", "operand"), ("v_add_u32_e32 v1, v2", "operand"), ("s_nop 16", "operand"), ("s_branch nowhere", "syntax"),
    ("s_waitcnt vmcnt(64)", "operand"), ("s_waitcnt unheard(0)", "syntax"), ("buffer_load_dwordx4 v[0:2], v0, s[4:7], 0 offen", "operand"),
    ("v_mfma_f32_16x16x16_bf16 a[0:2], v[10:11], v[12:13], a[0:2]", "operand"), ("v_mov_b32_e32 v[, v2", "syntax"),
    ("v_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]", "unsupported"), ("s_load_dwordx2 s4, s[0:1], 0x0", "operand"),
]  # fmt: skip


def test_unknown_instructions_are_refused_before_the_run(gcn, failing):
    """Unknown instructions, operands and modifiers are rejected before the launch."""

    def check(text, rule):
        with pytest.raises(gcn.Fault) as caught:
            gcn.Bench(text)
        assert caught.value.rule == rule

    assert not failing(check, STRANGE)


def test_registers_beyond_the_descriptor_are_refused(gcn):
    """Registers beyond those of the descriptor fail."""
    text = """
 .amdgcn_target "amdgcn-amd-amdhsa--gfx942"
k:
 {}
 s_endpgm
 .amdhsa_kernel k
 .amdhsa_next_free_vgpr 20
 .amdhsa_accum_offset 16
 .amdhsa_next_free_sgpr 10
 .end_amdhsa_kernel
"""
    for line in ("v_mov_b32_e32 v15, 0", "v_accvgpr_write_b32 a3, 0", "s_mov_b32 s9, 0", "s_mov_b64 vcc, 0"):
        gcn.kernels_of(text.format(line))
    for line in ("v_mov_b32_e32 v16, 0", "v_accvgpr_write_b32 a4, 0", "s_mov_b32 s10, 0"):
        with pytest.raises(gcn.Fault, match="asks for"):
            gcn.kernels_of(text.format(line))
