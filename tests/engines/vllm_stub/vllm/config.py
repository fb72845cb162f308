"""What vLLM's layers ask for as the configuration in effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm import FORM
from vllm.kernel_config import KernelConfig


@dataclass
class SchedulerConfig:
    """How requests become batches."""

    max_num_batched_tokens: int = 2048


@dataclass
class CompilationConfig:
    """How graphs are made."""

    cudagraph_capture_sizes: list[int] = field(default_factory=lambda: [1, 8, 64])


@dataclass
class LoadConfig:
    """Where weights are loaded from."""

    load_format: str = "auto"


@dataclass
class VllmConfig:
    """The configuration of an engine."""

    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)

    if FORM >= (0, 33):

        def compute_hash(self, include_version: bool = True) -> str:
            """The key of compiled graphs."""
            return "0123456789" if include_version else "9876543210"
    else:

        def compute_hash(self) -> str:
            """The key of compiled graphs."""
            return "0123456789"


_current: list[VllmConfig] = []


@contextlib.contextmanager
def set_current_vllm_config(config: VllmConfig) -> Iterator[None]:
    """A block in which a configuration is in effect."""
    _current.append(config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """That of the innermost block, None outside of them."""
    return _current[-1] if _current else None


def get_current_vllm_config() -> VllmConfig:
    """That of the innermost block."""
    return _current[-1]
