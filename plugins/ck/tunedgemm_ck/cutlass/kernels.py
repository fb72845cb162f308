"""Describe CUTLASS's kernels of each architecture, and which ones multiply which operands where."""

from __future__ import annotations

import attrs

from tunedgemm_ck.cutlass.names import CLUSTERS, TENSOR_MEMORY, CutlassInstance


@attrs.frozen
class Kernels:
    """Kernels of one of CUTLASS's architectures.

    Attributes:
        arch: the architecture's tag in CUTLASS.
        schedules, clusters, swaps: values of these parameters of an instance.
        depths: bytes along K that a tile may have.
        tile_m: maximum of an instance's.
        step_n: step of an instance's tile_n.
        slots: minimum stages of the ring in shared memory.
        whole_grid: whether the grid of persistent blocks has all tiles: a block that is done takes
            over one that has not started.
        whole_blocks: whether products with block scales need N and K in whole blocks.
    """

    arch: str
    schedules: tuple[str, ...]
    depths: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...] = CLUSTERS[:1]
    swaps: tuple[bool, ...] = (False, True)
    tile_m: int = 256
    step_n: int = 16
    slots: int = 3
    whole_grid: bool = False
    whole_blocks: bool = False

    def lack(self, instance: CutlassInstance) -> str:
        """Return what of an instance they do not have, or an empty text."""
        if instance.schedule not in self.schedules:
            return f"schedule {instance.schedule}"
        if instance.cluster not in self.clusters:
            return "clusters"
        if instance.tile_m > self.tile_m or instance.tile_n % self.step_n:
            return f"a tile of {instance.tile_m} x {instance.tile_n}"
        return ""


#: Multistage kernels: mma.sync, without 8-bit floats. They run on all later architectures.
SM80 = Kernels("Sm80", ("multistage",), (64, 128), swaps=(False,))
#: wgmma, which no later architecture has.
SM90 = Kernels("Sm90", ("cooperative", "pingpong", "plain"), (128, 256), CLUSTERS)
#: tcgen05.mma, whose sums are in tensor memory.
SM100 = Kernels("Sm100", TENSOR_MEMORY, (128, 256), CLUSTERS, tile_m=128, whole_grid=True)
#: mma.sync of 8-bit floats. CUTLASS has no wider operands here; its epilogue stores 32 columns.
SM120 = Kernels("Sm120", ("cooperative", "pingpong"), (128,), tile_m=128, step_n=32, slots=2, whole_grid=True, whole_blocks=True)

_FLOATS, _FP8 = ("bf16", "fp16"), ("fp8_e4m3fn",)
_EVERYWHERE = dict.fromkeys((*_FLOATS, "int8"), SM80)
#: Architecture -> dtype of operands -> the kernels that multiply them. CUTLASS compiles int8 for
#: sm_103, whose tcgen05.mma does not have it, into a kernel that only traps.
KERNELS = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89"), _EVERYWHERE),
    "sm_90": dict.fromkeys((*_FLOATS, "int8", *_FP8), SM90),
    **dict.fromkeys(("sm_100", "sm_110"), dict.fromkeys((*_FLOATS, "int8", *_FP8), SM100)),
    "sm_103": _EVERYWHERE | dict.fromkeys((*_FLOATS, *_FP8), SM100),
    **dict.fromkeys(("sm_120", "sm_121"), _EVERYWHERE | dict.fromkeys(_FP8, SM120)),
}
