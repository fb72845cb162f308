"""Barriers: for each stage one that says that it is full, and one that says that it is empty.

The copy engine and the producer complete a full one: one arrival, which announces the bytes, and the bytes. Every warp that reads a
stage arrives at its empty barrier when its matrix instructions are done; in a cluster at those of all blocks, whose producers write
into all of them. A wait names the parity of the phase that it waits for the end of: consumers start with 0, the producer with 1, which
a new barrier passes.

Consumers that take turns have a barrier each, too, which the other completes when it issued the last product of its tile. A parity tells
a phase from the one before alone, so nobody may wait for a full barrier before the phase before has ended: a consumer that came early
would take the other's stage for its own. Once the other waited for the last of its stages, all before are past.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import GROUP_THREADS
from tunedgemm_asm.ptx.resources import BARRIER_BYTES

#: Warps of a warp group.
_WARPS = GROUP_THREADS // 32


@attrs.frozen
class Ring:
    """Where a producer or consumer stands in the ring, as registers: the stage and the parity that it waits for."""

    stage: str
    parity: str


def start_barriers(f: Frame) -> None:
    """One thread sets all barriers up, then everybody goes on: in a cluster its other blocks, too."""
    t, config = f.text, f.config
    other = t.to("pred", "setp.ne.u32", f.thread, 0)
    ready = t.label("READY")
    t.op("bra", ready, when=other)
    for stage in range(config.stages):
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.full + stage * BARRIER_BYTES}]", 1)
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.empty + stage * BARRIER_BYTES}]", _WARPS * config.sharing * config.cluster)
    for number in range(config.consumers * config.turns):
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.turns + number * BARRIER_BYTES}]", _WARPS)
    t.op("fence.mbarrier_init.release.cluster")  # also for the copy engine's arrivals
    t.op("fence.proxy.async.shared::cta")
    t.place(ready)
    t.op("bar.sync", 0)
    if config.cluster > 1:
        meet_cluster(f, "relaxed")


def meet_cluster(f: Frame, order: str) -> None:
    """All threads of the cluster meet; the warps may have diverged.

    Args:
        order: ``relaxed``, where a fence went before, as that of new barriers; or ``release``: what a thread has done, its arrivals at
            barriers of other blocks with it, is done before they go on (PTX ISA, "barrier.cluster").
    """
    f.text.op(f"barrier.cluster.arrive.{order}")
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
    last = t.to("pred", "setp.eq.u32", ring.stage, f.config.stages)
    t.op("selp.b32", ring.stage, 0, ring.stage, last)
    t.op("xor.b32", ring.parity, ring.parity, 1, when=last)


def skip_stages(f: Frame, ring: Ring, count: str) -> None:
    """So many stages on: the phase is another where an odd number of rounds ends."""
    t, stages = f.text, f.config.stages
    behind = t.to("b32", "add.u32", ring.stage, count)
    rounds = t.to("b32", "div.u32", behind, stages)
    whole = t.to("b32", "mul.lo.u32", rounds, stages)
    t.op("sub.u32", ring.stage, behind, whole)
    odd = t.to("b32", "and.b32", rounds, 1)
    t.op("xor.b32", ring.parity, ring.parity, odd)


def barrier_of(f: Frame, stage: str) -> str:
    """A register to which the offset of a kind of barrier is added to get the address of its stage's, or its consumer's."""
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
    f.text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}+{f.full}]", f.config.stage_bytes)


def release(f: Frame, stage: str, arriving: str) -> None:
    """A warp's arrival at the empty barriers of a stage, by lanes for which *arriving* is true: one for each block of the cluster."""
    t = f.text
    barrier = barrier_of(f, stage)
    if f.config.cluster == 1:
        t.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{barrier}+{f.empty}]", when=arriving)
        return
    theirs = t.to("b32", "mapa.shared::cluster.u32", barrier, f.lane)
    # Nothing written is released, so the scope may be the block's: that of the cluster would cost a fence of the whole GPU in each step.
    t.op("mbarrier.arrive.release.cta.shared::cluster.b64", "_", f"[{theirs}+{f.empty}]", when=arriving)


@attrs.frozen
class Turn:
    """What a consumer knows of turns, as registers: its own barrier and the other's, the parity that it waits for, who arrives."""

    own: str
    other: str
    parity: str
    arriving: str


def start_turns(f: Frame, number: str) -> Turn:
    """Of the consumer of a number: the first need not wait for its first turn, so its parity starts as the producer's does."""
    t = f.text
    other = t.to("b32", "xor.b32", number, 1)
    own, theirs = barrier_of(f, number), barrier_of(f, other)
    return Turn(own, theirs, t.to("b32", "mov.u32", other), t.to("pred", "setp.eq.u32", f.lane, 0))


def wait_for_turn(f: Frame, turn: Turn) -> None:
    """Until the other consumer issued all products of its tile."""
    wait(f, turn.own, f.turns, turn.parity)
    f.text.op("xor.b32", turn.parity, turn.parity, 1)


def end_turn(f: Frame, turn: Turn, left: str) -> None:
    """A warp's arrival at the other's barrier, where no steps are left. Of all warps: a parity may not turn twice before one waited for it.

    In the loop over the steps: behind it, ptxas 12.8 makes products wait for each other (C7514).
    """
    last = f.text.to("pred", "setp.eq.u32", left, 0)
    arriving = f.text.to("pred", "and.pred", last, turn.arriving)
    f.text.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{turn.other}+{f.turns}]", when=arriving)
