"""Untuned calls: fitted choices serve where they were measured, or where the user lists libtypes."""

from pathlib import Path

import attrs
import pytest
from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, may_guess, stand_ins, unmeasured
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.libtypes import BUILTIN, UNTUNED, UNTUNED_KINDS
from tunedgemm.ops import ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

PART, H200 = Device("sm_90", 60, "nvidia-h200"), Device("sm_90", 132, "nvidia-h200")
H20, NVL = Device("sm_90", 78, "nvidia-h20"), Device("sm_90", 132, "nvidia-h100-nvl")
PCIE = Device("sm_90", 114, "nvidia-h100-pcie")
#: Architectures of AMD whose wavefronts have 32 lanes: RDNA, and gfx1250.
NARROW = [gfx for gfx, facts in ARCHITECTURES.items() if gfx.startswith("gfx") and facts.warp_size == 32]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, False),
        ("", False),
        (" , ", False),
        ("skinny", True),
        ("hipblaslt,triton,asm,skinny", True),
        ("tritn", False),
        ("tritn,skinny", True),
    ],
)
def test_a_list_of_the_user_allows_guesses_anywhere(monkeypatch, listed, expected):
    """Elsewhere the reason names the measured devices and the variable."""
    monkeypatch.delenv("TUNEDGEMM_FALLBACK", raising=False)
    if listed is not None:
        monkeypatch.setenv("TUNEDGEMM_FALLBACK", listed)
    assert may_guess(PART) is expected and may_guess(H200) and may_guess(H20)
    reason = unmeasured(PART)
    assert reason == "" if expected else "nvidia-h100-80gb-hbm3, nvidia-h200" in reason and "TUNEDGEMM_FALLBACK" in reason
    assert unmeasured(H200) == unmeasured(Device("cpu-avx2", 4)) == ""
    assert unmeasured(Device("sm_100", 148)) == "guesses were measured on no sm_100; `tunedgemm tune` measures its kernels"


@pytest.mark.parametrize(
    ("device", "m", "sizes"),
    [
        (H200, 64, []),
        (PART, 64, []),  # of which nothing is known
        (NVL, 64, [(64, 4096), (64, 4096)]),
        (NVL, 256, [(445, 4096), (311, 4096)]),  # its products take longer than reading from M = 212 on
        (PCIE, 256, [(256, 6016), (256, 6016)]),
        (H20, 1, [(1, 8704), (1, 8704)]),
        (H20, 24, [(24, 8704), (24, 8704)]),
        (H20, 32, [(319, 8704), (223, 8704)]),  # 37 rows take it as long to multiply as to read
    ],
    ids=str,
)
def test_shapes_of_measured_devices_stand_for_those_of_others(monkeypatch, device, m, sizes):
    """N grows by the units; M by arithmetic over memory where arithmetic bounds; each with an error bar."""
    monkeypatch.delenv("TUNEDGEMM_FALLBACK", raising=False)
    alike = stand_ins(Shape("a16w16", m, 4096, 2048), device)
    assert [(shape.m, shape.n) for shape, _ in alike] == sizes and all(shape.k == 2048 for shape, _ in alike)
    assert [other.name for _, other in alike] == ["nvidia-h100-80gb-hbm3", "nvidia-h200"][: len(sizes)]
    monkeypatch.setenv("TUNEDGEMM_FALLBACK", "asm")
    assert stand_ins(Shape("a16w16", m, 4096, 2048), device) == []


@pytest.mark.parametrize(("gfx", "kind"), [("sm_90", "nvidia"), ("gfx942", "amd"), ("cpu-avx2", "cpu")])
def test_libtypes_of_another_kind_are_not_loaded(gfx, kind):
    """A libtype for AMD costs an NVIDIA GPU and a CPU nothing: the registry is not asked for it."""
    asked: list[str] = []

    class Registry(dict):
        def __contains__(self, libtype):
            asked.append(libtype)
            return False

    assert list(choices(Shape("a16w16", 4, 32, 64), Device(gfx, 8), Registry(), UNTUNED)) == []
    assert asked == [libtype for libtype in UNTUNED if UNTUNED_KINDS.get(libtype, kind) == kind]
    assert ("ck" in asked) == (kind == "amd")


@pytest.fixture(scope="module")
def every_backend(as_module) -> Registry:
    """Return the backends of all plugins in this repository."""
    return as_module(Path(__file__).parents[2] / ".ci" / "backends.py").registry()


def usual(op):
    """Return the examples of an op, and plain and shuffled layers of models for few rows and many."""
    for shape in shapes_of(op):
        yield shape
        if op != "fmoe":
            yield from (attrs.evolve(shape, m=m, n=n, k=4096) for m in (1, 4, 16, 1024) for n in (64, 4096))


@pytest.mark.parametrize("op", ops())
def test_no_kernel_is_a_default_where_none_was_measured(every_backend, monkeypatch, op):
    """On RDNA and gfx1250 no backend answers an untuned call, even where the user lists all of them.

    An unmeasured skinny default was 36 times slower there (vllm-project/vllm#51511).
    """
    libtypes = [libtype for libtype in every_backend.libtypes if libtype != BUILTIN]
    monkeypatch.setenv("TUNEDGEMM_FALLBACK", ",".join(libtypes))
    shapes = dict.fromkeys(usual(op))
    answered = [
        f"{chosen}: {shape} on {gfx}"
        for gfx in NARROW
        for shape in shapes
        for chosen in choices(shape, Device(gfx, 64), every_backend, libtypes)
    ]
    assert len(shapes) > 4 and not answered


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1151", "gfx1201", "gfx1250"])
def test_explain_says_that_nothing_was_measured(every_backend, gfx):
    """An untuned call is torch's, with the reason and the remedy."""
    for op in (ops()["a16w16"], ops()["a8w8"]):
        shape = next(shape for shape in shapes_of(op.name) if shape.m == 1)
        found = Dispatcher(op, every_backend).explain(shape, Device(gfx, 64))
        assert (found.libtype, found.tuned) == ("torch", False)
        assert f"guesses were measured on no {gfx}; `tunedgemm tune` measures its kernels" in str(found)


@pytest.mark.parametrize(
    ("libtypes", "expected"),
    [(UNTUNED, ["asm", "triton"]), (("triton", "asm"), ["triton", "asm"]), (("skinny",), ["skinny"]), ((), [])],
)
def test_the_mode_asks_backends_of_one_order_of_sums(libtypes, expected):
    """The usual list has another order in batch-invariant mode; a list of the user keeps its own."""

    def backend(name):
        return fake_backend(name, invariant=lambda *_: Solution(name, "k", sum_order="k16"), heuristic="other")

    registry = fake_registry(*map(backend, ("triton", "asm", "skinny")))
    shape, cpu = Shape("a16w16", 8, 64, 64), device_of(-1)
    assert [each.libtype for each in choices(shape, cpu, registry, libtypes, invariant=True)] == expected
    assert {each.kernel_name for each in choices(shape, cpu, registry, libtypes)} <= {"other"}


def test_a_choice_without_an_order_of_sums_is_none():
    """Nothing says that its bits do not depend on M."""
    assert (
        fake_backend("mine", invariant=lambda *_: Solution("mine", "k")).invariant_fallback(Shape("a16w16", 8, 64, 64), device_of(-1))
        is None
    )
