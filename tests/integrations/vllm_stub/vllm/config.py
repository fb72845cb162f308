"""What vLLM's layers ask for as the configuration in effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class VllmConfig:
    """The configuration of an engine; nothing of it matters here."""


@contextlib.contextmanager
def set_current_vllm_config(config: VllmConfig) -> Iterator[None]:
    """A block in which a configuration is in effect."""
    del config
    yield
