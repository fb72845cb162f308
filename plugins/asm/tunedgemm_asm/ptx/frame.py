"""What the parts of one kernel share: its config, its text, and registers that have a meaning throughout."""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.abi import ABI, PARAMETER, argument
from tunedgemm_asm.ptx.names import KernelConfig, Variant
from tunedgemm_asm.ptx.resources import BARRIER_BYTES, MOST_CONSUMERS, WORD_BYTES
from tunedgemm_asm.ptx.text import Text


@attrs.frozen(eq=False)
class Frame:
    """Of one kernel.

    Attributes:
        variant: what it is.
        text: its body.
        arguments: register of each number among the arguments.
        shared: address of its shared memory.
        thread, lane, group: number of the thread in its block, in its warp, and of its warp group, which is the same in all lanes.
        rank: number of the block in its cluster; "0" without one.
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
        """Its config."""
        return self.variant.config

    @property
    def panels(self) -> int:
        """Offset in shared memory of the panels of the first consumer, which follow the stages; a multiple of 1024."""
        return self.config.stages * self.config.stage_bytes

    @property
    def full(self) -> int:
        """Offset of the barriers that say that a stage is full; those that say that it is empty follow."""
        return self.panels + self.config.consumers * self.config.panels * self.config.panel_bytes

    @property
    def empty(self) -> int:
        """Offset of the others."""
        return self.full + self.config.stages * BARRIER_BYTES

    @property
    def words(self) -> int:
        """Offset of the words behind the barriers."""
        return self.empty + self.config.stages * BARRIER_BYTES

    @property
    def turns(self) -> int:
        """Offset of the barriers behind the words, one for each consumer: where they take turns."""
        return self.words + MOST_CONSUMERS * WORD_BYTES


def open_frame(variant: Variant) -> Frame:
    """The first instructions: who the thread is, and what it was told."""
    t = Text()
    arguments = {field.name: t.to("b32", "ld.param.u32", argument(field.name)) for field in ABI.fields if field.kind == "u32"}
    shared = t.to("b32", "mov.u32", "stages")
    thread = t.to("b32", "mov.u32", "%tid.x")
    lane = t.to("b32", "and.b32", thread, 31)
    own = t.to("b32", "shr.u32", thread, 7)
    # Through a shuffle, so that ptxas sees that all lanes agree: what follows from it may lie in uniform registers.
    group = t.to("b32", "shfl.sync.idx.b32", own, 0, 31, -1)
    rank = t.to("b32", "mov.u32", "%cluster_ctarank") if variant.config.cluster > 1 else "0"
    return Frame(variant, t, arguments, shared, thread, lane, group, rank, t.label("END"))


def map_of(f: Frame, offset: int) -> str:
    """The generic address of a descriptor among the arguments."""
    address = f.text.to("b64", "add.s64", f.text.to("b64", "mov.b64", PARAMETER), offset)
    return f.text.to("b64", "cvta.param.u64", address)
