"""The ladders against AITER's rules, written down here a second time from their definitions."""

from __future__ import annotations

import random

from tunedgemm.ops.padded_m import exact, padded, padded_m, tokens
from tunedgemm.testing.listed import listed


def sizes(seed: int, count: int = 3000) -> list[int]:
    """Numbers of every magnitude up to 2**20, and the neighbours of all round ones."""
    draw = random.Random(seed)
    round_ones = [1 << power for power in range(21)] + [step * draw.randint(1, 300) for step in (16, 32, 64, 128, 4096)]
    near = [number + offset for number in round_ones for offset in (-1, 0, 1)]
    return [number for number in near if number >= 0] + [int(2 ** draw.uniform(0, 20)) for _ in range(count)]


def smallest(m: int, allowed: range) -> int:
    """The first of an ascending range that is not below m."""
    return next(number for number in allowed[max(0, m // allowed.step - 1) :] if number >= m)


def fine(m: int) -> int:
    """AITER's getPaddedM at level 0: the first multiple that is not below m, of a step that grows with m."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    return smallest(m, range(0, 1 << 22, step))


def power_of_two(m: int) -> int:
    return next(1 << power for power in range(40) if 1 << power >= m)


def coarse(m: int, n: int) -> int:
    """AITER's getPaddedM at level 1."""
    return 8192 if m > 8192 and n > 4096 else power_of_two(m)


@listed(
    ("m", "n", "at_0", "at_1"),
    [
        (0, 64, 0, 1), (1, 64, 16, 1), (2, 64, 16, 2), (16, 64, 16, 16), (17, 64, 32, 32), (255, 64, 256, 256), (256, 64, 256, 256),
        (257, 64, 288, 512), (1024, 64, 1024, 1024), (1025, 64, 1088, 2048), (4096, 64, 4096, 4096), (4097, 64, 4224, 8192),
        (8192, 8192, 8192, 8192), (8193, 4096, 8320, 16384), (8193, 4097, 8320, 8192), (20000, 8192, 20096, 8192), (9000, 64, 9088, 16384),
    ],
)  # fmt: skip
def test_checked_values(m, n, at_0, at_1):
    """Values of AITER's getPaddedM that were checked by hand; a level beyond 1 leaves M alone."""
    assert (padded_m(m, n, 0), padded_m(m, n, 1), padded_m(m, n, 2)) == (at_0, at_1, m)


def test_padding_follows_its_definition():
    """Both padding levels follow the definition for thousands of M,
    with N on both sides of the clamp."""
    for m in sizes(1):
        for n in (64, 4096, 4097, 100_000):
            assert padded_m(m, n, 0) == fine(m), (m, n)
            assert padded_m(m, n, 1) == coarse(m, n), (m, n)


def test_padded_asks_as_aiter_does():
    """The rungs are AITER's, in AITER's order, each M once and under the first word that it earns."""
    for m in sizes(2):
        for n in (64, 4096, 4097):
            asked = [(m, "exact"), (fine(m), "fine"), (coarse(m, n), "coarse")]
            first = {}
            for row, word in asked:
                first.setdefault(row, word)
            assert list(padded(m, n).items()) == list(first.items()), (m, n)


def test_padding_rounds_up_except_at_the_clamp():
    """A row of a smaller M serves only M above 8192 with N above 4096."""
    for m in sizes(3):
        assert min(padded(m, 4096)) == m
        assert min(padded(m, 4097)) == min(m, 8192)


def test_exact_asks_once():
    """Batched products have no padding in AITER."""
    for m in sizes(4, 300):
        assert exact(m, 5000) == {m: "exact"}


def aiters_tokens(m: int) -> list[int]:
    """Return the token counts that AITER's get_2stage_cfgs tries:
    get_padded_M, then lower tiers, largest first."""
    tiers = (32768, 131072)
    if m < tiers[0]:
        return [1 if m <= 1 else power_of_two(m)]
    tier = max(tier for tier in tiers if m >= tier)
    return [tier, *sorted((lower for lower in tiers if lower < tier), reverse=True)]


@listed(
    ("m", "asked"),
    [
        (1, [1]), (2, [2]), (3, [4]), (1000, [1024]), (16384, [16384]), (16385, [32768]), (32767, [32768]), (32768, [32768]),
        (32769, [32768]), (65536, [32768]), (131071, [32768]), (131072, [131072, 32768]), (1 << 20, [131072, 32768]),
    ],
)  # fmt: skip
def test_checked_token_counts(m, asked):
    """Checked by hand: powers of two below 32768, tiers from there, from the upper one down."""
    assert aiters_tokens(m) == asked
    assert [row for row in tokens(m, 7168) if row != m] == [row for row in asked if row != m]


def test_tokens_ask_as_aiter_does_after_the_exact_number():
    """First the number itself, which AITER never looks up, then AITER's in its order; N does not matter."""
    for m in sizes(5):
        expected = dict.fromkeys([m, *aiters_tokens(m)])
        assert list(tokens(m, 64)) == list(expected), m
        assert tokens(m, 64) == tokens(m, 1 << 20)
        assert tokens(m, 64)[m] == "exact"
