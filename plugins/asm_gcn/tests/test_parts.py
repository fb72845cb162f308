"""Test where the lanes of generated kernels read and write, and how the loop is interleaved."""

import itertools

from tunedgemm_asm_gcn import loop, prologue
from tunedgemm_asm_gcn.frame import frame_of
from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.registers import M0, Reg
from tunedgemm_asm_gcn.space import CONFIGS
from tunedgemm_asm_gcn.stream import Op, op, weave

TILES = [config for config in CONFIGS if not config.split]
#: Lanes of the lower half of a wave whose 16 bytes LDS gives at once to `ds_read_b128`, as first
#: and last of neighbours; the upper half has the same. With 32 banks they are eight, with 64 banks
#: sixteen (Triton, pull request 11365, for MI300 and MI350).
READ_AT_ONCE = {
    32: (((0, 3), (20, 23)), ((4, 7), (16, 19)), ((8, 11), (28, 31)), ((12, 15), (24, 27))),
    64: (((0, 3), (12, 15), (20, 27)), ((4, 11), (16, 19), (28, 31))),
}


def run(ops, lanes, scalars):
    """Execute a part's integer instructions; return vector registers by lane, and scalars."""
    values = {("v", 0): list(lanes), **{("s", index): value for index, value in scalars.items()}}
    n = len(lanes)

    def of(operand):
        found = values[operand.units[0]] if isinstance(operand, Reg) else operand
        return found if isinstance(found, list) else [found] * n

    doing = {
        "v_lshrrev_b32": lambda by, x: x >> by, "v_lshlrev_b32": lambda by, x: x << by, "v_and_b32": lambda x, y: x & y,
        "v_xor_b32": lambda x, y: x ^ y, "v_add_u32": lambda x, y: x + y, "v_mov_b32": lambda x: x, "v_mul_lo_u32": lambda x, y: x * y,
        "v_lshl_add_u32": lambda x, by, y: (x << by) + y, "s_mul_i32": lambda x, y: x * y, "s_add_u32": lambda x, y: x + y,
        "s_lshl_b32": lambda x, by: x << by,
    }  # fmt: skip
    for item in ops:
        results = [doing[item.name.removesuffix("_e32")](*given) for given in zip(*(of(one) for one in item.of), strict=True)]
        values[item.to[0].units[0]] = results if item.to[0].file == "v" else results[0]
    return values


def banks(config, lanes, addresses):
    """Return the LDS banks of 16 bytes at each lane's address."""
    return [addresses[lane] // 4 % config.target.lds_banks + word for lane in lanes for word in range(4)]


def placed(config, part, lanes, **scalars):
    """Return the registers after a part of the prologue."""
    f = frame_of(config)
    stride = 2 * 8192
    known = {f.argument(name).index: stride for name in ("stride_a", "stride_b")}
    known |= {getattr(f, name).index: value for name, value in scalars.items() if name != "wave"} | {f.wave.index: scalars.get("wave", 0)}
    return f, run(part(f), lanes, known)


def test_reads_of_lds_meet_all_banks(failing):
    """Lanes that LDS serves at once read every bank once."""

    def check(config):
        for wave in range(4):
            f, values = placed(config, prologue.place_reads, range(64), wave_m=wave % config.waves_m, wave_n=wave // config.waves_m)
            for address in [half for pair in (*f.read_a, *f.read_b) for half in (pair[0], pair[1])]:
                addresses = values[address.units[0]]
                assert max(addresses) < config.lds_bytes
                for group, half in itertools.product(READ_AT_ONCE[config.target.lds_banks], (0, 32)):
                    met = banks(config, [half + lane for first, last in group for lane in range(first, last + 1)], addresses)
                    assert sorted(met) == list(range(config.target.lds_banks))

    assert not failing(check, itertools.product(TILES))


def ends(f, step):
    """Return for each load of a step: LDS address of the first lane, lane offsets, first row in
    LDS.
    """
    config = f.config
    offsets = [(f.offset_a[one], 0) for one in range(config.loads_a)] + [(f.offset_b[one], config.tile_m) for one in range(config.loads_b)]
    if config.target.direct:
        at = [item.of[1] for item in loop.load(f, step) if item.to == (M0,)]
    else:
        at = [int(item.mods.partition(":")[2] or 0) for item in loop.write_lds(f, step)]
    return [(one, offset, first) for one, (offset, first) in zip(at, offsets, strict=True)]


def test_lds_reads_return_the_written_values(failing):
    """Each lane reads the row and the 16 bytes of K that it multiplies."""

    def check(config):
        f, loads = placed(config, prologue.place_loads, range(256))
        written = {}
        if config.target.direct:
            where = [lane * 16 for lane in range(256)]  # of a wave M0, and 16 bytes for each lane behind it
        else:
            where = loads[f.write.units[0]]
            for group in range(32):
                met = banks(config, range(8 * group, 8 * group + 8), where)
                assert len(set(met)) == len(met)
        for step in range(config.buffers):
            for at, offset, first in ends(f, step):
                for lane in range(256):
                    row, byte = divmod(loads[offset.units[0]][lane], 2 * 8192)
                    written[where[lane] + at] = (step, first + row, byte)
        assert len(written) == config.lds_bytes // 16
        for wave in range(4):
            at = {"wave_m": wave % config.waves_m, "wave_n": wave // config.waves_m}
            f, values = placed(config, prologue.place_reads, range(64), **at)
            for reads, first, blocks, index in (
                (f.read_a, 0, config.blocks_m, at["wave_m"]),
                (f.read_b, config.tile_m, config.blocks_n, at["wave_n"]),
            ):
                for step, half in itertools.product(range(len(reads)), range(2)):
                    for block, lane in itertools.product(range(blocks), range(64)):
                        found = written[values[reads[step][half].units[0]][lane] + block * 2048]
                        assert found == (step, first + (index * blocks + block) * 16 + lane % 16, 16 * (4 * half + lane // 16))

    assert not failing(check, itertools.product(TILES))


def test_products_of_a_step_cover_the_tile_once(failing):
    """Each accumulator gets every 32 elements of a half once."""

    def check(config):
        f = frame_of(config)
        parts = 32 // config.target.depth
        for half in range(2):
            made = loop.products(f, 1, half)
            assert len(made) == config.blocks * parts
            for m in range(config.blocks_m):
                for n in range(config.blocks_n):
                    own = [item for item in made if item.to == (f.accumulators_of(m, n),)]
                    assert len(own) == parts
                    assert all(item.of[2] == f.accumulators_of(m, n) for item in own)
                    assert {item.of[1].units for item in own} == {
                        f.blocks_a[half].fours()[m][4 // parts * p : 4 // parts * (p + 1)].units for p in range(parts)
                    }

    assert not failing(check, itertools.product(TILES))


def test_neighbouring_products_add_to_different_sums(failing):
    """Consecutive MFMAs write different accumulators."""

    def check(config):
        made = loop.products(frame_of(config), 0, 0)
        assert not [one for one, other in itertools.pairwise(made) if one.to == other.to]

    assert not failing(check, itertools.product(TILES))


def test_weaving_keeps_order_and_spreads():
    """Interleaving keeps the order of tracks and spreads them evenly."""
    main = [op("v_mfma", (), index) for index in range(32)]
    beside = [op("s_mov_b32", (), index) for index in range(16)]
    woven = weave(main, (0, 1, beside))
    assert [item for item in woven if item.name == "v_mfma"] == main
    assert [item for item in woven if item.name != "v_mfma"] == beside
    assert max(len(run) for run in "".join("m" if item.name == "v_mfma" else "b" for item in woven).split("m")) == 1
    early = weave(main, (0, 0.5, beside))
    assert all(item.name == "v_mfma" for item in early[-16:])
    assert early[-17] == beside[-1]


def test_the_first_of_two_tracks_goes_first():
    """Where tracks meet, the earlier track goes first."""
    main = [op("v_mfma", (), index) for index in range(8)]
    before, barrier, after = ([op(name, (), index) for index in range(count)] for name, count in (("b", 3), ("s_barrier", 1), ("a", 5)))
    woven = weave(main, (0, 0.5, before), (0.5, 0.5, barrier), (0.5, 1, after))
    assert [item for item in woven if item.name != "v_mfma"] == [*before, *barrier, *after]
    assert [item.name for item in woven].index("s_barrier") == 4 + 3


def test_loads_are_wide():
    """Loads and LDS accesses have 16 bytes per lane."""
    for config in TILES:
        f = frame_of(config)
        names = {item.name for item in loop.step(f, 0) if isinstance(item, Op) and item.unit in ("vmem", "lds")}
        assert names <= {"buffer_load_dwordx4", "ds_read_b128", "ds_write_b128"}


def test_a_shuffled_weight_is_loaded_in_its_order():
    """A wave loads 1 KiB of a shuffled weight without gaps."""
    config = KernelConfig("gfx942", 64, 128, 1, 2, shuffled=True)
    f, values = placed(config, prologue.place_shuffled, range(64), wave_n=3)
    block = 16 * 2 * 8192
    for one in range(config.blocks_n):
        assert values[f.offset_b[one].units[0]] == [(3 * config.blocks_n + one) * block + 16 * lane for lane in range(64)]
