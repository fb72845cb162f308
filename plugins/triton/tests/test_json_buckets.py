"""Which bucket answers for M, against the rule written another way."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tunedgemm_triton.jsonfiles import buckets
from tunedgemm_triton.jsonfiles.buckets import ANY, BOUNDS, BOUNDS_OF, LEGACY, NEW

#: A loaded machine takes longer than the default deadline.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROWS = st.integers(0, 40_000)
ALL_BOUNDS = st.sampled_from([BOUNDS, *BOUNDS_OF.values()])
NEW_KEYS = st.builds("M_{}_{}".format, st.sampled_from(["LEQ", "GEQ"]), st.sampled_from([*BOUNDS, 31, 320, 7]))
OLD = ["small", "medium_M32", "medium_M64", "medium_M128", "large", "xlarge", "xlarge_M512", "xlarge_M1024", "xlarge_M2048", "xlarge_M4096"]


def expected_new(keys: set[str], m: int, bounds: tuple[int, ...]) -> str | None:
    """Return the answer of the newer keys."""
    lower = [bound for bound in bounds if bound >= m and f"M_LEQ_{bound}" in keys]
    upper = [bound for bound in bounds if bound <= m and f"M_GEQ_{bound}" in keys]
    if lower:
        return f"M_LEQ_{min(lower)}"
    if upper:
        return f"M_GEQ_{max(upper)}"
    return ANY if ANY in keys else None


def expected_old(keys: set[str], m: int) -> str | None:
    """Return the answer of the older keys."""
    if m < 32:
        wanted = ["small"]
    elif m <= 32:
        wanted = ["medium_M32"]
    elif m <= 64:
        wanted = ["medium_M64"]
    elif m <= 128:
        wanted = ["medium_M128"]
    elif m <= 256:
        wanted = ["large"]
    else:
        power = 512
        while power < m:
            power *= 2
        wanted = [f"xlarge_M{power}", "xlarge"]
    for key in [*wanted, ANY]:
        if key in keys:
            return key
    return None


@PATIENT
@given(st.sets(NEW_KEYS | st.just(ANY)), ROWS, ALL_BOUNDS)
def test_newer_keys(keys: set[str], m: int, bounds: tuple[int, ...]) -> None:
    """`find` tries M_LEQ_x upwards, M_GEQ_y downwards, then any, within the limits."""
    assert buckets.find(keys, m, bounds) == expected_new(keys, m, bounds)


@PATIENT
@given(st.sets(st.sampled_from(OLD), min_size=1), st.booleans(), ROWS)
def test_older_keys(keys: set[str], catch_all: bool, m: int) -> None:
    """`find` tries small, medium, large or xlarge with its power of two, then any."""
    keys |= {ANY} if catch_all else set()
    assert buckets.find(keys, m) == expected_old(keys, m)


@PATIENT
@given(st.sets(NEW_KEYS | st.sampled_from([*OLD, ANY, "tiny", "M_LEQ_x", "M_LEQ_016", "xlarge_M0512"]), min_size=1), ALL_BOUNDS)
def test_a_dead_key_is_one_that_no_m_finds(keys: set[str], bounds: tuple[int, ...]) -> None:
    """No M reads a dead key, and some M reads every other key."""
    style = buckets.style_of(keys)
    for key in keys:
        alone = {key, ANY} if buckets.style_of({key}) == style else {key, ANY, "M_LEQ_1" if style == NEW else "small"}
        found = {buckets.find(alone, m, bounds) for m in {0, 1, *(bound + one for bound in (*bounds, 31, 16384, 32768) for one in (0, 1))}}
        assert (key in buckets.dead_keys(keys, bounds)) == (key not in found)


@PATIENT
@given(st.sets(st.integers(1, 40_000), min_size=1, max_size=12), st.sampled_from([NEW, LEGACY]), ALL_BOUNDS)
def test_what_is_written_is_found(rows: set[int], style: str, bounds: tuple[int, ...]) -> None:
    """In a file with the keys of all tested M, each M finds the key it was written under."""
    keys = {ANY, *(buckets.key_of(m, style, bounds) for m in rows)}
    assert all(buckets.find(keys, m, bounds) == buckets.key_of(m, style, bounds) for m in rows)
    assert buckets.style_of(keys) == style


@PATIENT
@given(ROWS.filter(bool), st.sampled_from([NEW, LEGACY]), ALL_BOUNDS)
def test_a_key_stands_for_rows_of_its_own(m: int, style: str, bounds: tuple[int, ...]) -> None:
    """The M that stands for a key, in `check` and in the order of a file, finds it."""
    key = buckets.key_of(m, style, bounds)
    assert buckets.find({key, ANY}, buckets.rows_of(key), bounds) == key


def test_buckets_of_the_guide() -> None:
    """AITER's guide names these buckets."""
    keys = {16: "small", 32: "medium_M32", 100: "medium_M128", 256: "large", 2048: "xlarge_M2048"}
    assert {m: buckets.key_of(m, LEGACY) for m in keys} == keys


def test_a_key_of_thousands_of_digits_is_no_bucket() -> None:
    """Keys with more digits than any M has are named as dead, not converted."""
    keys = [f"{start}{'9' * 5000}" for start in ("M_LEQ_", "M_GEQ_", "xlarge_M", "medium_M")]

    assert [*buckets.dead_keys(keys)] == keys
    assert [buckets.rows_of(key) for key in keys] == [512] * 4
