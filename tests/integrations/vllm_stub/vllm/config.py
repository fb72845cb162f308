"""What vLLM's layers ask for as the configuration in effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm import FORM


@dataclass
class SchedulerConfig:
    """How requests become batches."""

    max_num_batched_tokens: int = 2048


@dataclass
class CompilationConfig:
    """How graphs are made."""

    cudagraph_capture_sizes: list[int] = field(default_factory=lambda: [1, 8, 64])


@dataclass
class KernelConfig:
    """Which kernels are asked for: 0.20 has no choice of linear ones, 0.33 one for each quantisation."""

    if FORM >= (0, 25):
        linear_backend: str = "auto"
    if FORM >= (0, 33):
        linear_backend_per_quant: dict[str, str] | None = None


@dataclass
class VllmConfig:
    """The configuration of an engine."""

    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)

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


def get_current_vllm_config() -> VllmConfig:
    """That of the innermost block."""
    return _current[-1]
