"""Test that derived waits are long enough, and no longer."""

import itertools

import attrs
import pytest
from tunedgemm_asm_gcn.kernel import stream_of
from tunedgemm_asm_gcn.registers import M0, Reg
from tunedgemm_asm_gcn.space import CONFIGS
from tunedgemm_asm_gcn.stream import Label, Op, branch, op
from tunedgemm_asm_gcn.waits import MOST, wait, with_waits

pytestmark = pytest.mark.nightly

SOURCE = Reg("s", 4, 4)
PART = Reg("lds", 0)
#: One kernel of each kind: where loads go, whether the weight is shuffled, whether K is split.
KINDS = list({(config.gfx, config.shuffled, config.split): config for config in CONFIGS}.values())


def v(index, count=1):
    return Reg("v", index, count)


def load(to):
    return op("buffer_load_dwordx4", v(to, 4), v(0), SOURCE, 0, mods="offen")


def load_lds():
    return Op("buffer_load_dwordx4", (), (v(0), SOURCE, 0), "offen lds", reads=(M0,), writes=(PART,))


def read(to):
    return Op("ds_read_b128", (v(to, 4),), (v(0),), reads=(PART,))


def write(of):
    return Op("ds_write_b128", (), (v(0), v(of, 4)), writes=(PART,))


def use(of, to=2000):
    return op("v_mov_b32_e32", v(to), v(of))


def waits(stream):
    """Return each wait and the instruction after it."""
    made = with_waits(stream)
    assert with_waits(made) == made
    return [(item.mods, made[at + 1].name) for at, item in enumerate(made) if isinstance(item, Op) and item.name == "s_waitcnt"]


def test_a_use_waits_for_its_load_alone():
    """A use leaves younger loads in flight."""
    assert waits([load(8), load(12), load(16), use(12)]) == [("vmcnt(1)", "v_mov_b32_e32")]
    assert waits([load(8), use(20), use(11)]) == [("vmcnt(0)", "v_mov_b32_e32")]


def test_a_wait_is_made_once():
    """Arrived registers are not waited for again."""
    assert waits([load(8), load(12), use(12), use(8), use(13)]) == [("vmcnt(0)", "v_mov_b32_e32")]


def test_registers_that_a_load_will_write_are_not_overwritten():
    """Overwriting a register that a load will write waits."""
    assert waits([load(8), use(30, to=11)]) == [("vmcnt(0)", "v_mov_b32_e32")]
    assert waits([load(8), use(30, to=12)]) == []


def test_stores_count_as_younger():
    """Loads and stores are counted together."""
    store = op("buffer_store_dwordx2", (), v(40, 2), v(0), SOURCE, 0, mods="offen")
    assert waits([load(8), store, store, use(8)]) == [("vmcnt(2)", "v_mov_b32_e32")]


def test_counters_have_ends():
    """Counts above the limit of a counter wait for the limit."""
    assert waits([load(8), *[load(12 + 4 * one) for one in range(80)], use(8)]) == [(f"vmcnt({MOST['vmcnt']})", "v_mov_b32_e32")]
    assert waits([read(8), *[read(12 + 4 * one) for one in range(20)], use(8)]) == [(f"lgkmcnt({MOST['lgkmcnt']})", "v_mov_b32_e32")]


def test_lds_and_memory_are_counted_apart():
    """One wait covers both counters."""
    assert waits([load(8), read(12), op("v_add_u32_e32", v(1), v(8), v(12))]) == [("vmcnt(0) lgkmcnt(0)", "v_add_u32_e32")]


def test_scalar_loads_end_in_any_order():
    """A pending scalar load needs a count of zero."""
    scalar = op("s_load_dword", Reg("s", 20), Reg("s", 0, 2), 0)
    other = op("s_load_dword", Reg("s", 21), Reg("s", 0, 2), 4)
    assert waits([scalar, other, op("s_mov_b32", Reg("s", 30), Reg("s", 20))]) == [("lgkmcnt(0)", "s_mov_b32")]
    assert waits([read(8), scalar, use(8)]) == [("lgkmcnt(0)", "v_mov_b32_e32")]


def test_a_barrier_completes_lds_accesses():
    """A barrier waits for LDS reads and writes."""
    assert waits([write(8), op("s_barrier")]) == [("lgkmcnt(0)", "s_barrier")]
    assert waits([read(8), op("s_barrier"), use(8)]) == [("lgkmcnt(0)", "s_barrier")]


def test_a_barrier_waits_for_loads_into_the_part_of_lds_that_it_publishes():
    """A barrier waits only for loads into the part of LDS that it publishes."""
    other = attrs.evolve(load_lds(), writes=(Reg("lds", 1),))
    barrier = Op("s_barrier", reads=(PART,))
    assert waits([load_lds(), load_lds(), other, load(8), barrier]) == [("vmcnt(2)", "s_barrier")]
    assert waits([load_lds(), op("s_barrier")]) == []


def test_loads_into_lds_do_not_wait_for_each_other():
    """Loads into the same part of LDS do not wait for each other."""
    assert waits([load_lds(), load_lds(), write(8), read(12)]) == []


def test_a_wave_does_not_end_before_its_loads_into_lds():
    """A wave waits for its loads into LDS before it ends."""
    assert waits([load_lds(), load(8), op("s_endpgm")]) == [("vmcnt(1)", "s_endpgm")]
    assert waits([load(8), op("s_endpgm")]) == []


def test_a_loop_is_followed_until_nothing_changes():
    """Loads of one pass of a loop are waited for in the next."""
    top = Label("top")
    stream = [load(8), load(12), load(16), top, use(8), load(8), branch("s_cbranch_scc1", top), op("s_endpgm")]
    assert waits(stream) == [("vmcnt(0)", "v_mov_b32_e32")]
    stream = [load(8), load(12), top, use(8), load(8), use(12), load(12), branch("s_cbranch_scc1", top), op("s_endpgm")]
    assert waits(stream) == [("vmcnt(1)", "v_mov_b32_e32")] * 2


def test_joining_paths_wait_for_either():
    """A register pending on one of two paths is waited for."""
    on = Label("on")
    stream = [branch("s_cbranch_scc1", on), load(8), load(12), on, use(8)]
    assert waits(stream) == [("vmcnt(1)", "v_mov_b32_e32")]


def test_existing_waits_are_known():
    """Existing waits are not repeated."""
    assert waits([load(8), wait(vmcnt=0), use(8)]) == [("vmcnt(0)", "v_mov_b32_e32")]


def test_no_wait_of_a_kernel_can_be_left_out_or_shortened(failing):
    """A kernel has all waits, and each is as long as needed."""

    def check(config):
        stream, _ = stream_of(config)
        assert with_waits(stream) == [*stream]
        derived = [at for at, item in enumerate(stream) if isinstance(item, Op) and item.name == "s_waitcnt"]
        assert len(derived) > 10
        for at in derived[:: max(1, len(derived) // 12)]:
            behind = [item.name for item in stream[at + 1 : at + 3] if isinstance(item, Op)]
            if stream[at].mods == "vmcnt(0)" and behind in (["s_barrier", behind[-1]], ["s_waitcnt", "s_barrier"]):
                continue  # the one that publishes stores, which nothing in the stream uses
            for longer in longer_waits(stream[at]):
                changed = [*stream[:at], *([longer] if longer.mods else []), *stream[at + 1 :]]
                assert with_waits(changed) != changed, f"{at}: {stream[at].mods} could be {longer.mods!r}"

    assert not failing(check, itertools.product(KINDS))


def longer_waits(item):
    """Yield the wait with one count raised by one, or omitted at its limit."""
    counts = {name: int(count.rstrip(")")) for name, _, count in (word.partition("(") for word in item.mods.split())}
    for name, count in counts.items():
        raised = counts | {name: count + 1}
        yield wait(**{each: value for each, value in raised.items() if value <= MOST[each]})
