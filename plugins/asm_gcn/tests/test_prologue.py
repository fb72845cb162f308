"""Run the scalar code of generated kernels on the emulator: choice of tile, bounds of operands."""

import itertools

import numpy as np
import pytest
from tunedgemm_asm_gcn import epilogue, prologue, splitk
from tunedgemm_asm_gcn.frame import frame_of
from tunedgemm_asm_gcn.hazards import with_nops
from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.waits import with_waits

PLAIN = KernelConfig("gfx942", 64, 128, 2, 2, split=True)
SHUFFLED = KernelConfig("gfx950", 64, 128, 1, 2, shuffled=True, split=True)
#: Bytes of the largest stride with which 31 bits address a tile of 128 rows.
WIDEST = (1 << 24) - 16
BASE = 0x7F12_FFFF_FF00


def ran(gcn, f, part, each):
    """Run a part of a kernel in waves with given register values."""
    stream = with_nops(with_waits(part), f.config.target)
    bench = gcn.Bench("\n".join(map(str, stream)), gfx=f.config.gfx, waves=len(each))
    for wave, values in enumerate(each):
        for reg, value in values:
            bench.give({f"s{reg.index + word}": value >> (32 * word) & 0xFFFFFFFF for word in range(reg.count)}, wave)
    return bench.run()


def scalar(bench, reg, wave=0):
    """Return the value of adjacent scalars."""
    return sum(bench.scalar(reg.index + word, wave) << (32 * word) for word in range(reg.count))


def tiles(gcn, tiles_m, tiles_n, numbers):
    """Return the tile's index and its position along M and N for each workgroup."""
    f = frame_of(PLAIN)
    known = ((f.argument("tiles_m"), tiles_m), (f.argument("tiles_n"), tiles_n))
    bench = ran(gcn, f, prologue.choose_tile(f), [(*known, (f.tile, number)) for number in numbers])
    return [tuple(scalar(bench, reg, wave) for reg in (f.tile, f.at_m, f.at_n)) for wave in range(len(numbers))]


def test_every_tile_has_one_workgroup(gcn, failing):
    """Every tile has one workgroup for any number of tiles."""

    def check(count):
        tiles_m, tiles_n = count
        found = tiles(gcn, tiles_m, tiles_n, range(tiles_m * tiles_n))
        assert sorted(tile for tile, _, _ in found) == list(range(tiles_m * tiles_n))
        assert sorted((m, n) for _, m, n in found) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]

    assert not failing(check, itertools.product([(1, 1), (1, 7), (7, 1), (3, 3), (8, 2), (9, 3), (17, 5), (11, 13)]))


def test_the_most_tiles_there_may_be(gcn, failing):
    """Divisions are exact up to `limits.MAX_TILES`."""

    def check(count):
        tiles_m, tiles_n = count
        total = tiles_m * tiles_n
        drawn = np.random.default_rng(total).integers(0, total, 24)
        numbers = [0, 1, total // 2, total - 2, total - 1, *(int(one) for one in drawn)]
        for number, (tile, m, n) in zip(numbers, tiles(gcn, tiles_m, tiles_n, numbers), strict=True):
            chiplet, turn = number % 8, number // 8
            assert tile == total // 8 * chiplet + min(total % 8, chiplet) + turn
            panel, rest = divmod(tile, 8 * tiles_n)
            rows = min(8, tiles_m - 8 * panel)
            assert (m, n) == (8 * panel + rest % rows, rest // rows)

    assert not failing(check, itertools.product([(1, (1 << 22) - 1), ((1 << 22) - 1, 1), (2047, 2049), (8, (1 << 19) - 1)]))


@pytest.mark.parametrize("config", [PLAIN, SHUFFLED], ids=lambda config: config.name)
def test_where_operands_begin_and_end(gcn, config):
    """Bases have 64 bits, and a range ends with the last row."""
    f = frame_of(config)
    m, n, k, part, at_m, at_n = 64 * 1000 + 3, 128 * 700 + 16, 1 << 22, 1 << 20, 1000, 700
    known = (
        ("m", m),
        ("n", n),
        ("k", k),
        ("k_part", part),
        ("stride_a", WIDEST),
        ("stride_b", 2 * k),
        ("a", BASE),
        ("b", BASE + (1 << 40)),
    )
    values = [*((f.argument(name), value) for name, value in known), (f.at_m, at_m), (f.at_n, at_n), (f.part, 3)]
    bench = ran(gcn, f, [*prologue.share_of_k(f), *prologue.describe_operand(f, "a"), *prologue.describe_operand(f, "b")], [values])
    assert scalar(bench, f.steps) == part // 64
    assert scalar(bench, f.from_a[0:2]) == BASE + at_m * 64 * WIDEST + 2 * 3 * part
    assert scalar(bench, f.from_a[2]) == 2 * WIDEST + 128
    within, left = (3 * part * 32, 2048) if config.shuffled else (3 * part * 2, 15 * 2 * k + 128)
    assert scalar(bench, f.from_b[0:2]) == BASE + (1 << 40) + at_n * 128 * 2 * k + within
    assert scalar(bench, f.from_b[2]) == left


def test_no_range_is_longer_than_31_bits(gcn, failing):
    """A tile's range ends before `epilogue.NOWHERE` at 2**31."""

    def check(rows):
        f = frame_of(PLAIN)
        n, stride = 128 * 4 + 4, WIDEST
        o = epilogue.output(f, 32)
        known = (("m", rows), ("n", n), ("stride_out", stride), ("out", BASE), ("bias", BASE + (1 << 32)), ("add_bias", 1))
        each = []
        for at_n in (0, 4):
            values = ((f.argument(name), value) for name, value in known)
            each.append([*values, (f.at_m, (rows - 1) // 64), (f.at_n, at_n)])
        bench = ran(gcn, f, epilogue.describe_output(o), each)
        first, last = (rows - 1) // 64 * 64, (rows - 1) % 64
        for wave, (at_n, columns) in enumerate(((0, 128), (4, 4))):
            assert scalar(bench, o.to[0:2], wave) == BASE + first * stride + at_n * 512
            assert scalar(bench, o.to[2], wave) == last * stride + 4 * columns < epilogue.NOWHERE
            assert scalar(bench, o.bias[0:2], wave) == BASE + (1 << 32) + at_n * 512
            assert scalar(bench, o.bias[2], wave) == 4 * columns

    assert not failing(check, itertools.product([1, 64, 65, 127]))


def test_parts_lie_side_by_side(gcn):
    """Partials are adjacent in a workspace above 4 GiB."""
    f = frame_of(KernelConfig("gfx942", 128, 128, 2, 2, split=True))
    known = ((f.argument("workspace"), BASE), (f.argument("tiles_m"), 32), (f.argument("tiles_n"), 32), (f.tile, 1023), (f.part, 15))
    bench = ran(gcn, f, splitk.describe_part(f, f.from_a, f.part), [known])
    assert scalar(bench, f.from_a[0:2]) == BASE + (15 * 1024 + 1023) * 128 * 128 * 4
    assert scalar(bench, f.from_a[2]) == 128 * 128 * 4
