"""The environment variables that the core reads at run time, read once and again only by `reload`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import attrs

from tunedgemm.errors import UserError
from tunedgemm.libtypes import BUILTIN, UNTUNED

#: AITER's variables for online tuning: of every op, and of the one op beside it alone.
ONLINE, ONLINE_MOE, MOE = "HIP_ONLINE_TUNING", "AITER_ONLINE_TUNE", "fmoe"

#: The longest that a call waits for online tuning, in seconds.
ONLINE_SECONDS = 30.0


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() in ("1", "true", "yes", "on")


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds above 0.

    Raises:
        UserError: the variable is none.
    """
    text = environment.get(name, "").strip()
    try:
        found = float(text or default)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise UserError(f"{name} must be a number of seconds above 0 (got {text!r})")
    return found


@attrs.frozen
class Settings:
    """What the environment asks of dispatch.

    Attributes:
        capture: ``AITER_TUNE_GEMM``: note every shape that is met.
        log_choices: ``AITER_LOG_TUNED_CONFIG``: say once per shape what was chosen and why.
        untuned: ``TUNEDGEMM_FALLBACK``, a comma list of the libtypes that may answer untuned calls, in order.
        online: ``HIP_ONLINE_TUNING``: tune a shape that no row serves at its first call.
        online_moe: ``AITER_ONLINE_TUNE``: the same for the op fmoe alone.
        online_seconds: ``TUNEDGEMM_ONLINE_SECONDS``: the longest that a call waits for that.
        online_libtype: ``TUNEDGEMM_ONLINE_LIBTYPE``: what ``--libtype`` is then.
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
            UserError: one that is a number is none.
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
        """The same for looking on: shapes that are looked at are no shapes of a workload, and are neither captured nor tuned."""
        return attrs.evolve(self, capture=False, online=False, online_moe=False)

    def tunes_online(self, op: str) -> bool:
        """Whether shapes of an op are tuned at their first call."""
        return self.online or (self.online_moe and op == MOE)
