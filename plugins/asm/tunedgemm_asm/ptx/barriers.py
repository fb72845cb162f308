"""Barriers: for each stage one that says that it is full, and one that says that it is empty.

The copy engine and the producer complete a full one: one arrival, which announces the bytes, and the bytes. Every warp that reads a
stage arrives at its empty barrier when its matrix instructions are done; in a cluster at those of all blocks, whose producers write
into all of them. A wait names the parity of the phase that it waits for the end of: consumers start with 0, the producer with 1, which
a new barrier passes.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.plan import BARRIER_BYTES, GROUP_THREADS

#: Warps of a warp group.
_WARPS = GROUP_THREADS // 32


@attrs.frozen
class Ring:
    """Where a producer or consumer stands in the ring, as registers: the stage and the parity that it waits for."""

    stage: str
    parity: str


def start_barriers(f: Frame) -> None:
    """One thread sets all barriers up, then everybody goes on: in a cluster its other blocks, too."""
    t, plan = f.text, f.plan
    other = t.to("pred", "setp.ne.u32", f.thread, 0)
    ready = t.label("READY")
    t.op("bra", ready, when=other)
    for stage in range(plan.stages):
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.full + stage * BARRIER_BYTES}]", 1)
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.empty + stage * BARRIER_BYTES}]", _WARPS * plan.consumers * plan.cluster)
    t.op("fence.mbarrier_init.release.cluster")  # also for the copy engine's arrivals
    t.op("fence.proxy.async.shared::cta")
    t.place(ready)
    t.op("bar.sync", 0)
    if plan.cluster > 1:
        meet_cluster(f)


def meet_cluster(f: Frame) -> None:
    """All threads of the cluster meet; the warps may have diverged. Nothing but barriers is shared, and their own fence went before."""
    f.text.op("barrier.cluster.arrive.relaxed")
    f.text.op("barrier.cluster.wait.acquire")


def meet_consumer(f: Frame) -> None:
    """The threads of the consumer meet at a barrier of its own: 1 or 2."""
    f.text.op("bar.sync", f.group, GROUP_THREADS)


def start_ring(f: Frame, parity: int) -> Ring:
    """The first stage, with a parity."""
    return Ring(f.text.to("b32", "mov.u32", 0), f.text.to("b32", "mov.u32", parity))


def next_stage(f: Frame, ring: Ring) -> None:
    """The stage after; behind the last the first, in the other phase."""
    t = f.text
    t.op("add.u32", ring.stage, ring.stage, 1)
    last = t.to("pred", "setp.eq.u32", ring.stage, f.plan.stages)
    t.op("selp.b32", ring.stage, 0, ring.stage, last)
    t.op("xor.b32", ring.parity, ring.parity, 1, when=last)


def barrier_of(f: Frame, stage: str) -> str:
    """A register to which the offset of either kind of barrier is added to get its address."""
    return f.text.to("b32", "mad.lo.u32", stage, BARRIER_BYTES, f.shared)


def wait(f: Frame, barrier: str, offset: int, parity: str) -> None:
    """Until the phase of this parity has ended."""
    t = f.text
    again, done = t.label("WAIT"), t.new("pred")
    t.place(again)
    t.op("mbarrier.try_wait.parity.shared::cta.b64", done, f"[{barrier}+{offset}]", parity)
    t.op("bra", again, when=f"!{done}")


def announce(f: Frame, barrier: str) -> None:
    """The producer's arrival at a full barrier, with the bytes that the copy engine is to bring."""
    f.text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}+{f.full}]", f.plan.stage_bytes)


def release(f: Frame, stage: str, arriving: str) -> None:
    """A warp's arrival at the empty barriers of a stage, by lanes for which *arriving* is true: one for each block of the cluster."""
    t = f.text
    barrier = barrier_of(f, stage)
    if f.plan.cluster == 1:
        t.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{barrier}+{f.empty}]", when=arriving)
        return
    theirs = t.to("b32", "mapa.shared::cluster.u32", barrier, f.lane)
    # Nothing written is released, so the scope may be the block's: that of the cluster would cost a fence of the whole GPU in each step.
    t.op("mbarrier.arrive.release.cta.shared::cluster.b64", "_", f"[{theirs}+{f.empty}]", when=arriving)
