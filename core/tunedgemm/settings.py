"""The environment variables that the core reads at run time, read once and again only by `reload`."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from tunedgemm.libtypes import BUILTIN, UNTUNED


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() in ("1", "true", "yes", "on")


@attrs.frozen
class Settings:
    """What the environment asks of dispatch.

    Attributes:
        capture: ``AITER_TUNE_GEMM``: note every shape that is met.
        log_choices: ``AITER_LOG_TUNED_CONFIG``: say once per shape what was chosen and why.
        untuned: ``TUNEDGEMM_FALLBACK``, a comma list of the libtypes that may answer untuned calls, in order.
    """

    capture: bool = False
    log_choices: bool = False
    untuned: tuple[str, ...] = UNTUNED

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables."""
        listed = environment.get("TUNEDGEMM_FALLBACK")
        names = UNTUNED if listed is None else tuple(text.strip() for text in listed.split(",") if text.strip())
        return cls(
            capture=_flag(environment, "AITER_TUNE_GEMM"),
            log_choices=_flag(environment, "AITER_LOG_TUNED_CONFIG"),
            untuned=tuple(name for name in names if name != BUILTIN),
        )
