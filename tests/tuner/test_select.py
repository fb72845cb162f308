"""Select: the fastest right one, ties to the incumbent and then by rank."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_trials
from tunedgemm.timing import Timing
from tunedgemm.tuner.select import select

SHAPE = Shape("a16w16", 16, 64, 128)
ORDER = {"asm": 0, "triton": 1, "torch": 2}


def timing(libtype: str, us: float, *, name: str = "k", status: str = "ok", noise: float = 0.001) -> Timing:
    return Timing(SHAPE, Solution(libtype, name), status, us=us, noise=noise, samples=31)


def chosen(*timings: Timing, incumbent: Solution | None = None, eligible: tuple[str, ...] = ("asm", "triton", "torch")) -> str:
    winner, _ = select(timings, incumbent, ORDER, eligible)
    return "" if winner is None else str(winner.solution)


def test_the_fastest_right_solution_wins() -> None:
    """Wrong, failed and screened ones never win, however fast."""
    assert (
        chosen(timing("torch", 10.0), timing("asm", 5.0, status="wrong"), timing("triton", 9.0), timing("asm", 1.0, status="screened"))
        == "triton:k"
    )


@pytest.mark.parametrize("us", [0.0, -1.0, float("inf")])
def test_a_row_without_a_time_never_wins(us: float) -> None:
    """Placeholders of 0, -1 and infinity are no times."""
    assert chosen(timing("asm", us), timing("torch", 10.0)) == "torch:k"


def test_ties_go_to_the_incumbent_then_by_rank() -> None:
    """Within noise or 0.5 % the table's row stays.

    Without an incumbent the earlier libtype gets it.
    """
    tied = (timing("torch", 10.0), timing("triton", 10.03), timing("asm", 10.04))

    assert chosen(*tied, incumbent=Solution("triton", "k")) == "triton:k"
    assert chosen(*tied) == "asm:k"


def test_among_ties_of_a_libtype_the_more_exact_is_taken() -> None:
    """Sums without promotion win only where they are faster than the noise, also as the first guess."""
    exact = timing("asm", 10.03, name="promoted")
    rough, near = (attrs.evolve(timing("asm", 10.0, name=name), err_ratio=off) for name, off in (("plain", 0.002), ("near", 5e-5)))
    guess = {rough.solution}

    assert select((rough, exact), None, ORDER, ("asm",), guesses=guess)[0] == exact
    assert chosen(near, exact) == "asm:near"
    assert chosen(attrs.evolve(rough, us=9.0), exact) == "asm:plain"
    assert chosen(rough, timing("triton", 10.0)) == "asm:plain"


def test_among_ties_of_a_libtype_its_first_guess_is_taken() -> None:
    """A solution as fast as the guess within noise does not replace it.

    A clearly faster one does, and a libtype of better rank precedes it.
    """
    tied = (timing("triton", 10.0, name="lucky"), timing("triton", 10.03, name="guess"))
    guesses = {Solution("triton", "guess"), Solution("torch", "k")}

    def winner(*timings: Timing) -> str:
        found, _ = select(timings, None, ORDER, ("asm", "triton", "torch"), guesses=guesses)
        assert found is not None
        return str(found.solution)

    assert winner(*tied) == "triton:guess"
    assert winner(*tied, timing("triton", 9.9, name="faster")) == "triton:faster"
    assert winner(*tied, timing("asm", 10.03), timing("torch", 10.0)) == "asm:k"


def test_noise_widens_the_tie_but_not_without_bound() -> None:
    """Two noisy timings tie at 2 %; no noise makes a tie of 5 %."""
    assert chosen(timing("torch", 10.0, noise=0.02), timing("asm", 10.2, noise=0.02)) == "asm:k"
    assert chosen(timing("torch", 10.0, noise=0.5), timing("asm", 10.5, noise=0.5)) == "torch:k"


def test_only_the_libtypes_asked_for_are_stored() -> None:
    """Torch is the baseline, and not a row where --libtype leaves it out."""
    assert chosen(timing("torch", 5.0), timing("triton", 9.0), eligible=("triton",)) == "triton:k"
    assert chosen(timing("torch", 5.0), eligible=("triton",)) == ""


def test_the_log_of_a_real_run_gives_its_rows_again(golden: Path) -> None:
    """Recorded trials of an H200 select the solutions of the table that the run wrote."""
    rows = {row.shape: row.solution for row in read_rows(golden / "rows-v1_bf16_tuned_gemm.csv", op_named("a16w16"))[0]}
    trials = read_trials(golden / "trials-v1.jsonl")
    for shape in dict.fromkeys(trial.shape for trial in trials):
        mine = [trial for trial in trials if trial.shape == shape]
        winner, _ = select(mine, Solution("torch", "native"), {"triton": 0, "torch": 1}, ("triton", "torch"))

        assert winner is not None
        assert winner.solution == rows[shape]
