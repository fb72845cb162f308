"""Untuned calls: fitted choices serve where they were measured, or where the user lists libtypes."""

import pytest
from tunedgemm.backends.untuned import choices, may_guess, unmeasured
from tunedgemm.device import Device
from tunedgemm.libtypes import UNTUNED, UNTUNED_KINDS
from tunedgemm.shape import Shape

H20, H200 = Device("sm_90", 78, "nvidia-h20"), Device("sm_90", 132, "nvidia-h200")


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
    assert may_guess(H20) is expected and may_guess(H200)
    reason = unmeasured(H20)
    assert reason == "" if expected else "nvidia-h100-80gb-hbm3, nvidia-h200" in reason and "TUNEDGEMM_FALLBACK" in reason
    assert unmeasured(H200) == unmeasured(Device("sm_100", 148)) == unmeasured(Device("cpu-avx2", 4)) == ""


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
