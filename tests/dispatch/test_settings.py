"""Settings: the environment's settings of dispatch."""

from __future__ import annotations

import pytest
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.testing.listed import listed


@listed(
    ("environment", "ops"),
    [
        ({}, ()),
        ({"HIP_ONLINE_TUNING": "0", "AITER_ONLINE_TUNE": ""}, ()),
        ({"HIP_ONLINE_TUNING": "1"}, ("a16w16", "fmoe")),
        ({"HIP_ONLINE_TUNING": "true"}, ("a16w16", "fmoe")),
        ({"TUNEDGEMM_ONLINE": "1"}, ("a16w16", "fmoe")),
        ({"TUNEDGEMM_ONLINE": "0", "HIP_ONLINE_TUNING": "1"}, ("a16w16", "fmoe")),
        ({"AITER_ONLINE_TUNE": "1"}, ("fmoe",)),
    ],
    ids=str,
)
def test_the_variables_select_the_ops(environment: dict[str, str], ops: tuple[str, ...]) -> None:
    """Off unless asked for; AITER_ONLINE_TUNE is for fmoe alone; looking on tunes nothing."""
    settings = Settings.from_environment(environment)

    assert [op for op in ("a16w16", "fmoe") if settings.tunes_online(op)] == list(ops)
    assert [op for op in ("a16w16", "fmoe") if Dispatcher(op_named(op), settings=settings).on_miss] == list(ops)
    assert not any(settings.passive.tunes_online(op) for op in ops)
    assert (settings.online_seconds, settings.online_libtype) == (30.0, "all")


@listed(
    "environment",
    [{"TUNEDGEMM_ONLINE": "background"}, {"TUNEDGEMM_ONLINE": "Background", "HIP_ONLINE_TUNING": "1", "AITER_ONLINE_TUNE": "1"}],
    ids=str,
)
def test_the_background_comes_before_the_first_call(environment: dict[str, str]) -> None:
    """The word of TUNEDGEMM_ONLINE counts for every op, whatever AITER's variables say."""
    settings = Settings.from_environment(environment)

    for dispatcher in (Dispatcher(op_named(op), settings=settings) for op in ("a16w16", "fmoe")):
        assert dispatcher.on_miss is None and dispatcher.background is not None
    assert not settings.passive.tunes_online("fmoe")


@listed("text", ["backgrund", "later", "2x"])
def test_a_bad_word_is_named_and_off_counts(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It tunes nothing; a near word is named."""
    settings = Settings.from_environment({"TUNEDGEMM_ONLINE": text})

    assert not settings.tunes_online("fmoe")
    near = "; did you mean background?" if text == "backgrund" else ""
    assert f"TUNEDGEMM_ONLINE: must be 1, 0 or background (got '{text}'){near}; off counts" in caplog.text


@listed("text", ["soon", "0", "-3", "inf", "nan"])
def test_seconds_are_a_number_above_0(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in the variable is named, and the default counts."""
    assert Settings.from_environment({"TUNEDGEMM_ONLINE_SECONDS": text}).online_seconds == 30.0
    assert f"TUNEDGEMM_ONLINE_SECONDS: must be a number of seconds above 0 (got '{text}'); 30.0 counts" in caplog.text

    settings = Settings.from_environment({"TUNEDGEMM_ONLINE_SECONDS": "2.5", "TUNEDGEMM_ONLINE_LIBTYPE": "triton,torch"})
    assert (settings.online_seconds, settings.online_libtype) == (2.5, "triton,torch")
