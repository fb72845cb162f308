"""Hold the shared state of one kernel's parts: configuration, text and named registers."""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.abi import ABI, PARAMETER, argument
from tunedgemm_asm.ptx.names import KernelConfig, Variant
from tunedgemm_asm.ptx.resources import BARRIER_BYTES, MOST_CONSUMERS, WORD_BYTES
from tunedgemm_asm.ptx.text import Text


@attrs.frozen(eq=False)
class Frame:
    """State of the generation of one kernel.

    Attributes:
        variant: the kernel's variant.
        text: the kernel's body.
        arguments: register of each numeric argument.
        shared: address of its shared memory.
        thread, lane, group: index of the thread in its CTA and its warp, and of its warpgroup,
            which is
            uniform in a warp.
        rank: index of the CTA in its cluster; "0" without one.
        end: label at the kernel's end.
    """

    variant: Variant
    text: Text
    arguments: dict[str, str]
    shared: str
    thread: str
    lane: str
    group: str
    rank: str
    end: str

    @property
    def config(self) -> KernelConfig:
        """Return the kernel's configuration."""
        return self.variant.config

    @property
    def panels(self) -> int:
        """Return the offset of the first consumer's panels, which follow the stages; a multiple of
        1024.
        """
        return self.config.stages * self.config.stage_bytes

    @property
    def scales(self) -> int:
        """Return the offset of the scales of the first stage, which follow the panels."""
        return self.panels + self.config.consumers * self.config.panels * self.config.panel_bytes

    @property
    def full(self) -> int:
        """Return the offset of the full barriers."""
        return self.scales + self.config.stages * self.config.scale_bytes

    @property
    def empty(self) -> int:
        """Return the offset of the empty barriers, which follow the full ones."""
        return self.full + self.config.stages * BARRIER_BYTES

    @property
    def words(self) -> int:
        """Return the offset of the words that follow the barriers."""
        return self.empty + self.config.stages * BARRIER_BYTES

    @property
    def turns(self) -> int:
        """Return the offset of the ping-pong barriers, one for each consumer, which follow the
        words.
        """
        return self.words + MOST_CONSUMERS * WORD_BYTES


def open_frame(variant: Variant) -> Frame:
    """Open a kernel: load its arguments and the thread's indices."""
    t = Text()
    arguments = {field.name: t.to("b32", "ld.param.u32", argument(field.name)) for field in ABI.fields if field.kind == "u32"}
    shared = t.to("b32", "mov.u32", "stages")
    thread = t.to("b32", "mov.u32", "%tid.x")
    lane = t.to("b32", "and.b32", thread, 31)
    own = t.to("b32", "shr.u32", thread, 7)
    # The shuffle shows ptxas that the value is uniform, so that it may use uniform registers.
    group = t.to("b32", "shfl.sync.idx.b32", own, 0, 31, -1)
    rank = t.to("b32", "mov.u32", "%cluster_ctarank") if variant.config.cluster > 1 else "0"
    return Frame(variant, t, arguments, shared, thread, lane, group, rank, t.label("END"))


def map_of(f: Frame, offset: int) -> str:
    """Return the generic address of a tensor map among the arguments."""
    address = f.text.to("b64", "add.s64", f.text.to("b64", "mov.b64", PARAMETER), offset)
    return f.text.to("b64", "cvta.param.u64", address)
