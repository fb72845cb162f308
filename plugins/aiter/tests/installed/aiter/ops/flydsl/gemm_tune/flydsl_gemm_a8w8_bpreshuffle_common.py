"""Stand for AITER's lists of FlyDSL's 8-bit kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class kernelInstance:
    tile_m: int
    tile_n: int
    tile_k: int

    @property
    def name(self) -> str:
        return f"flydsl_bpreshuflle_{self.tile_m}x{self.tile_n}x{self.tile_k}_F8_F8_B16_0x3x0x1_default"


@dataclass(frozen=True)
class Pipeline:
    name: str
    kernels_list: dict[int, Any]
    fits: Callable[[Any, int, int, int], bool]
    q_dtypes_w: tuple[str, ...]


def kernel_fits_shape(ki: kernelInstance, M: int, N: int, K: int) -> bool:
    return N % ki.tile_n == 0 and K % ki.tile_k == 0


kernels_list = {i: kernelInstance(16, n, k) for i, (n, k) in enumerate(((16, 32), (64, 64), (128, 128)))}
PIPELINES = (Pipeline("preshuffle", kernels_list, kernel_fits_shape, ("fp8", "int8")),)
