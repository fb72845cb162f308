"""Candidates: the backends' solutions for a shape, and those with a split bias."""

from __future__ import annotations

import attrs
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.tuner.candidates import candidates, refusal
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options

CPU = Device("cpu-avx2", 4)
PLAIN = Shape("a16w16", 4, 32, 64)
BIASED = attrs.evolve(PLAIN, epilogue="bias")
NAMES = tuple(f"k{number}" for number in range(9))


def names(shape: Shape, most: int = 0, **answers) -> list[str]:
    backend = fake_backend("mine", **{"solutions": NAMES, **answers})
    return [solution.kernel_name for solution in candidates(shape, CPU, backend, most)]


def no_bias(shape: Shape, device: Device) -> Unsupported | None:
    return Unsupported("takes no bias") if shape.bias else None


def test_a_bias_is_split_off_the_best_guesses():
    """After a backend's own list come its first four for the shape without a bias.

    Without a bias nothing is split.
    """
    assert names(BIASED) == [*NAMES, "k0+add", "k1+add", "k2+add", "k3+add"]
    assert names(PLAIN) == [*NAMES]
    assert names(attrs.evolve(BIASED, scale="tensor")) == [*NAMES]


def test_torchs_own_routes_are_not_split():
    """Torch adds the bias afterwards by another route."""
    found = candidates(BIASED, CPU, Registry(()).get("torch"))
    assert [solution for solution in found if solution.kernel_name.endswith("+add")] == []
    assert Solution("torch", "mm_add") in found


def test_a_quarter_of_few_candidates_have_a_split_bias():
    """Where few of each backend are wanted, no more than that are tried, and its first guess stays
    the first.
    """
    assert names(BIASED, 8) == [*NAMES[:6], "k0+add", "k1+add"]
    assert names(BIASED, 1) == ["k0"]
    assert names(PLAIN, 8) == [*NAMES[:8]]


def test_a_backend_without_bias_takes_part():
    """Kernels that take no bias are offered with an add after them, as many as are wanted.

    The backend refuses nothing then.
    """
    assert names(BIASED, supports=no_bias) == ["k0+add", "k1+add", "k2+add", "k3+add"]
    assert names(BIASED, 3, supports=no_bias) == ["k0+add", "k1+add", "k2+add"]
    backend = fake_backend("mine", supports=lambda *_: Unsupported("nothing at all"))
    assert candidates(BIASED, CPU, backend) == () and refusal(BIASED, CPU, backend) == "nothing at all"


def test_a_bias_of_another_dtype_asks_for_the_product_in_float32():
    """The guesses are those for a float32 output."""

    def solutions(shape: Shape, device: Device) -> list[str]:
        return [f"to_{shape.outdtype}"]

    assert names(attrs.evolve(BIASED, bias_dtype="fp32"), solutions=solutions) == ["to_bf16", "to_fp32+add"]


def test_a_split_bias_is_verified_and_timed_as_any_other():
    """A session lists it, finds a right sum right and one of a wrong product wrong, and times it."""

    def call(solution, shape, *operands):
        out = exact(solution, shape, *operands)
        return out * 1.5 if solution.kernel_name == "off" else out

    registry = fake_registry(fake_backend("mine", solutions=("good", "off"), supports=no_bias, call=call))
    session = Session("a16w16", -1, Options(libtype="mine"), registry)
    good, off = Solution("mine", "good+add"), Solution("mine", "off+add")
    assert session.solutions("mine", BIASED) == (good, off)
    session.open(BIASED)
    assert session.check(BIASED, good).status == "ok" and session.check(BIASED, off).status == "wrong"
    assert len(session.sample(BIASED, (good,), 2)[good].us) == 2
