"""Which kernels are asked for, as vLLM's pydantic checks it: its types are no texts."""

from collections.abc import Callable
from typing import Any, Literal

from vllm import FORM

config: Callable[[type], Any]
try:
    from pydantic.dataclasses import dataclass

    config = dataclass(config={"extra": "forbid"})
except ImportError:  # tests of the check need it
    from dataclasses import dataclass as config

LinearBackend = Literal["auto", "cutlass", "flashinfer_cudnn", "flashinfer_cutedsl", "triton"]


@config
class KernelConfig:
    """The choices: 0.20 has none of linear kernels, 0.33 one for each quantisation."""

    moe_backend: str = "auto"
    if FORM >= (0, 25):
        linear_backend: LinearBackend = "auto"
    if FORM >= (0, 33):
        linear_backend_per_quant: dict[str, LinearBackend] | None = None
