"""Untuned calls: fitted choices serve where they were measured, or where the user lists libtypes."""

import pytest
from tunedgemm.backends.untuned import may_guess, unmeasured
from tunedgemm.device import Device

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
