"""Test that derived wait states are those of the ISA guides, no fewer and no more."""

import itertools

import pytest
from tunedgemm_asm_gcn.hazards import nop, with_nops
from tunedgemm_asm_gcn.kernel import stream_of
from tunedgemm_asm_gcn.registers import M0, VCC, Reg
from tunedgemm_asm_gcn.resources import TARGETS
from tunedgemm_asm_gcn.space import CONFIGS
from tunedgemm_asm_gcn.stream import Label, Op, branch, op

pytestmark = pytest.mark.nightly

SOURCE = Reg("s", 4, 4)
KINDS = list({(config.gfx, config.shuffled, config.split): config for config in CONFIGS}.values())


def v(index, count=1):
    return Reg("v", index, count)


def a(index, count=1):
    return Reg("a", index, count)


def product(to, first, second, total=None):
    return op("v_mfma_f32_16x16x16_bf16", to, first, second, to if total is None else total)


MOVE = op("v_mov_b32_e32", v(8), v(9))
COMPARE = op("v_cmp_lt_u32_e32", VCC, v(1), v(2))
FIRST = op("v_readfirstlane_b32", SOURCE[0], v(3))
TO_LDS = Op("buffer_load_dwordx4", (), (v(0), SOURCE, 0), "offen lds", reads=(M0,))
PRODUCT = product(a(0, 4), v(10, 2), v(12, 2))
STORE = op("buffer_store_dwordx4", (), v(20, 4), v(0), SOURCE, 0, mods="offen")
# Writer, reader, wait states on gfx942 and on gfx950 (ISA guides; LLVM's GCNHazardRecognizer: a
# product of four passes).
TABLE = {
    "vector register to product": (MOVE, product(a(0, 4), v(8, 2), v(12, 2)), 2, 2),
    "vector register to another product": (MOVE, PRODUCT, 0, 0),
    "vector register to vector": (MOVE, op("v_mov_b32_e32", v(1), v(8)), 0, 0),
    "vector register to lane": (MOVE, op("v_readfirstlane_b32", Reg("s", 9), v(8)), 1, 1),
    "scalar of a vector instruction to memory": (FIRST, op("buffer_load_dword", v(30), v(0), SOURCE, 0, mods="offen"), 5, 5),
    "scalar of a vector instruction to vector": (FIRST, op("v_add_u32_e32", v(30), SOURCE[0], v(0)), 2, 2),
    "scalar of a vector instruction to scalar": (FIRST, op("s_mov_b32", Reg("s", 20), SOURCE[0]), 0, 0),
    "scalar to memory": (op("s_mov_b32", SOURCE[0], 0), op("buffer_load_dword", v(30), v(0), SOURCE, 0, mods="offen"), 0, 0),
    "condition to select": (COMPARE, op("v_cndmask_b32_e32", v(5), v(6), v(7), VCC), 2, 2),
    "reciprocal to vector": (op("v_rcp_iflag_f32_e32", v(8), v(9)), op("v_mul_f32_e32", v(1), v(8), v(2)), 1, 1),
    "m0 to load into lds": (op("s_add_u32", M0, Reg("s", 20), 0), TO_LDS, 1, 1),
    "m0 to load": (op("s_add_u32", M0, Reg("s", 20), 0), op("buffer_load_dword", v(30), v(0), SOURCE, 0, mods="offen"), 0, 0),
    "product to the same sum": (PRODUCT, product(a(0, 4), v(14, 2), v(16, 2)), 0, 0),
    "product to part of a sum": (PRODUCT, product(a(2, 4), v(14, 2), v(16, 2)), 5, 6),
    "product to a larger sum": (PRODUCT, product(a(0, 16), v(14, 2), v(16, 2)), 5, 6),
    "product to operand": (PRODUCT, product(a(8, 4), a(0, 2), v(16, 2)), 7, 8),
    "product to reading": (PRODUCT, op("v_accvgpr_read_b32", v(1), a(3)), 7, 8),
    "product to overwriting": (PRODUCT, op("v_accvgpr_write_b32", a(3), 0), 7, 8),
    "product to storing": (PRODUCT, op("buffer_store_dwordx4", (), a(0, 4), v(0), SOURCE, 0, mods="offen"), 7, 8),
    "product to lds": (PRODUCT, op("ds_write_b128", (), v(0), a(0, 4)), 7, 8),
    "what a product adds to, to overwriting": (product(a(8, 4), v(10, 2), v(12, 2), a(0, 4)), op("v_accvgpr_write_b32", a(1), 0), 3, 3),
    "what a product multiplies, to overwriting": (PRODUCT, op("v_mov_b32_e32", v(10), 0), 0, 0),
    "store to overwriting": (STORE, op("v_mov_b32_e32", v(22), 0), 2, 2),
    "store to product": (STORE, product(v(20, 4), v(10, 2), v(12, 2), 0), 2, 2),
    "small store to overwriting": (op("buffer_store_dwordx2", (), v(20, 2), v(0), SOURCE, 0), op("v_mov_b32_e32", v(20), 0), 0, 0),
}  # fmt: skip


def states(stream):
    """Return the number of wait states in a stream."""
    return sum(int(item.of[0]) + 1 for item in stream if isinstance(item, Op) and item.name == "s_nop")


def test_each_row_of_the_tables(failing):
    """Each pair gets the wait states of the table, minus the instructions between."""

    def check(gfx, name):
        writer, reader, *needed = TABLE[name]
        states_needed = needed[list(TARGETS).index(gfx)]
        target = TARGETS[gfx]
        other = op("s_mov_b32", Reg("s", 90), 0)
        for between in range(3):
            made = with_nops([writer, *[other] * between, reader], target)
            assert states(made) == max(0, states_needed - between)
            assert with_nops(made, target) == made
        if states_needed:
            fewer = [writer, *[other] * (states_needed - 1), reader]
            assert with_nops(fewer, target) != fewer

    assert not failing(check, itertools.product(TARGETS, TABLE))


def test_many_wait_states_are_several_instructions():
    """One `s_nop` has at most 16 wait states."""
    assert nop(16).of == (15,)
    target = TARGETS["gfx942"]
    made = with_nops([PRODUCT, op("v_accvgpr_read_b32", v(1), a(3))], target)
    assert [item.of[0] for item in made if item.name == "s_nop"] == [6]


def test_a_later_writer_counts():
    """Only the last writer of a register counts."""
    target = TARGETS["gfx942"]
    reciprocal, read = op("v_rcp_iflag_f32_e32", v(8), v(9)), op("v_mul_f32_e32", v(1), v(8), v(2))
    assert states(with_nops([reciprocal, MOVE, read], target)) == 0
    assert states(with_nops([MOVE, reciprocal, read], target)) == 1
    assert states(with_nops([COMPARE, op("s_mov_b64", VCC, 0), op("v_cndmask_b32_e32", v(5), v(6), v(7), VCC)], target)) == 1


def test_a_sum_that_two_products_wrote_is_a_part_of_each():
    """Partly overwritten accumulators need the wait states of a part."""
    target = TARGETS["gfx942"]
    made = with_nops([PRODUCT, product(a(2, 4), v(14, 2), v(16, 2), 0), PRODUCT], target)
    assert states(made) == 5
    assert states(with_nops([PRODUCT, PRODUCT, PRODUCT], target)) == 0


def test_a_loop_is_followed():
    """Hazards across the back edge of a loop are found."""
    target, top = TARGETS["gfx950"], Label("top")
    stream = [top, op("v_accvgpr_read_b32", v(1), a(3)), PRODUCT, branch("s_cbranch_scc1", top), op("s_endpgm")]
    made = with_nops(stream, target)
    assert made[1].name == "s_nop"
    assert int(made[1].of[0]) + 1 == 8 - 1  # the branch is one
    assert with_nops(made, target) == made


def test_no_wait_state_of_a_kernel_can_be_left_out(failing):
    """A kernel has all wait states, and each is needed."""

    def check(config):
        stream, _ = stream_of(config)
        assert with_nops(stream, config.target) == [*stream]
        places = [at for at, item in enumerate(stream) if isinstance(item, Op) and item.name == "s_nop"]
        assert places
        for at in places[:: max(1, len(places) // 10)]:
            fewer = [nop(int(stream[at].of[0]))] if stream[at].of[0] else []
            changed = [*stream[:at], *fewer, *stream[at + 1 :]]
            assert with_nops(changed, config.target) != changed, at

    assert not failing(check, itertools.product(KINDS))
