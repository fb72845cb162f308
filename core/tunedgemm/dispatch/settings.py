"""Read the environment variables of dispatch: once, and again only by `reload`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import attrs

from tunedgemm.errors import UserError
from tunedgemm.libtypes import BUILTIN, UNTUNED
from tunedgemm.process.variables import ON

#: AITER's variables for online tuning: of every op, and of the op `MOE` alone.
ONLINE, ONLINE_MOE, MOE = "HIP_ONLINE_TUNING", "AITER_ONLINE_TUNE", "fmoe"

#: The longest that a call waits for online tuning, in seconds.
ONLINE_SECONDS = 30.0


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() in ON


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """Read a number of seconds above 0.

    Raises:
        UserError: the variable holds something else.
    """
    text = environment.get(name, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{name}: must be a number of seconds above 0 (got {text!r})")
    return seconds


@attrs.frozen
class Settings:
    """Settings of dispatch.

    Attributes:
        capture: ``AITER_TUNE_GEMM``: capture every shape that is called.
        log_choices: ``AITER_LOG_TUNED_CONFIG``: log each shape's choice once, with the reason.
        untuned: ``TUNEDGEMM_FALLBACK``, a comma list of the libtypes that may answer untuned calls,
            in order.
        online: ``HIP_ONLINE_TUNING``: tune a shape without a row at its first call.
        online_moe: ``AITER_ONLINE_TUNE``: the same for the op fmoe alone.
        online_seconds: ``TUNEDGEMM_ONLINE_SECONDS``: the longest that a call waits for that.
        online_libtype: ``TUNEDGEMM_ONLINE_LIBTYPE``: the ``--libtype`` of online tuning.
    """

    capture: bool = False
    log_choices: bool = False
    untuned: tuple[str, ...] = UNTUNED
    online: bool = False
    online_moe: bool = False
    online_seconds: float = ONLINE_SECONDS
    online_libtype: str = "all"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            UserError: one that must be a number is not.
        """
        listed = environment.get("TUNEDGEMM_FALLBACK")
        names = UNTUNED if listed is None else tuple(text.strip() for text in listed.split(",") if text.strip())
        return cls(
            capture=_flag(environment, "AITER_TUNE_GEMM"),
            log_choices=_flag(environment, "AITER_LOG_TUNED_CONFIG"),
            untuned=tuple(name for name in names if name != BUILTIN),
            online=_flag(environment, ONLINE),
            online_moe=_flag(environment, ONLINE_MOE),
            online_seconds=_seconds(environment, "TUNEDGEMM_ONLINE_SECONDS", ONLINE_SECONDS),
            online_libtype=environment.get("TUNEDGEMM_ONLINE_LIBTYPE", "").strip() or "all",
        )

    @property
    def passive(self) -> Settings:
        """Return these settings without capture and online tuning, to examine a shape only."""
        return attrs.evolve(self, capture=False, online=False, online_moe=False)

    def tunes_online(self, op: str) -> bool:
        """Check whether shapes of an op are tuned at their first call."""
        return self.online or (self.online_moe and op == MOE)
