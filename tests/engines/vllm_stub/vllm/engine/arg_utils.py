"""The arguments of an engine: their parser, and the configuration made of them."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import typing
from typing import Any

from vllm.config import KernelConfig, VllmConfig


@functools.lru_cache(maxsize=30)
def _compute_kwargs(cls: Any) -> dict[str, dict[str, Any]]:
    """How argparse takes each field: a type of some texts becomes its choices."""
    found = {}
    for field in dataclasses.fields(cls):
        choices = typing.get_args(field.type) if typing.get_origin(field.type) is typing.Literal else None
        found[field.name] = {"default": field.default, "choices": sorted(choices) if choices else None}
    return found


@dataclasses.dataclass
class EngineArgs:
    """What a user asks for, of which only the choices of `KernelConfig` are checked."""

    model: str = "tests"
    linear_backend: str = "auto"
    kernel_config: Any = dataclasses.field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        if isinstance(self.kernel_config, dict):
            self.kernel_config = KernelConfig(**self.kernel_config)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the options."""
        options = copy.deepcopy(_compute_kwargs(KernelConfig))["linear_backend"]
        parser.add_argument("--linear-backend", type=lambda text: text.lower().replace("-", "_"), **options)
        return parser

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """Make the configuration, by assignment, which nothing checks."""
        del usage_context, headless
        settings = copy.deepcopy(self.kernel_config)
        if self.linear_backend != "auto":
            settings.linear_backend = self.linear_backend
        return VllmConfig(kernel_config=settings)
