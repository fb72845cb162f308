"""AITER's questions about the device and its tables: ``jit.core`` and ``jit.utils.chip_info``."""

from __future__ import annotations

import logging
from typing import Any

from tunedgemm.integrations import current_device, padded_m, tuned_path
from tunedgemm.tools.launching import switched_on
from tunedgemm.tools.tables import ops

#: The project's logger, so that a level that is set on AITER's name has its effect.
logger = logging.getLogger("tunedgemm")
AITER_LOG_TUNED_CONFIG = int(switched_on("AITER_LOG_TUNED_CONFIG"))


def get_gfx() -> str:
    """Return the architecture of the present device, as ``gfx942``."""
    return current_device().gfx


def get_gfx_list() -> list[str]:
    """Return the architecture of the present device alone."""
    return [get_gfx()]


def get_cu_num() -> int:
    """Return the number of compute units of the present device."""
    return current_device().cu_num


def get_device_name() -> str:
    """Return the product's name as lower-case words joined by dashes."""
    return current_device().name


def get_padded_m(M: int, N: int, K: int, gl: int) -> int:
    """Return the M whose row may serve M at level *gl*, 0 or 1, of the look-up."""
    del K
    return padded_m(M, N, gl)


class _Configs:
    """AITER's ``AITER_CONFIGS``: ``<variable>_FILE`` is the table that tuning writes to."""

    def __getattr__(self, name: str) -> str:
        for op in ops().values():
            if name == f"{op.columns.variable}_FILE":
                return str(tuned_path(op))
        raise AttributeError(f"AITER_CONFIGS.{name}: unknown; known: {', '.join(f'{op.columns.variable}_FILE' for op in ops().values())}")


AITER_CONFIGS: Any = _Configs()
