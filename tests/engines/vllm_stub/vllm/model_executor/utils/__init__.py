"""Whether the weight cache hands over weights that are repacked already (0.33)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm import FORM

if FORM >= (0, 33):
    _repacked: list[bool] = []

    @contextlib.contextmanager
    def weights_already_processed() -> Iterator[None]:
        """A block in which weights arrive repacked."""
        _repacked.append(True)
        try:
            yield
        finally:
            _repacked.pop()

    def is_weights_pre_processed() -> bool:
        """Whether such a block is open."""
        return bool(_repacked)
