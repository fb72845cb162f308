"""Synchronize producer and consumers: one full and one empty mbarrier for each stage.

The producer's arrival announces the bytes of a full barrier; TMA completes them. Where stages hold
scales, each lane of the warp that copies them arrives as well, when its copies are done. Each warp
that reads a stage arrives at its empty barrier when its wgmma instructions are done. In a cluster
it arrives in all CTAs, whose producers write into all of them. A wait names the parity of the phase
that it waits for. Consumers start with 0; the producer starts with 1, which a new barrier passes.

Ping-pong consumers (`turns`) also have a barrier each. The other consumer completes it when it has
issued the last wgmma of its tile. A parity distinguishes a phase only from the previous one, so a
consumer that waits too early would take the other's stage for its own. Once the other consumer has
waited for the last of its stages, all earlier phases are over.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import GROUP_THREADS, WARP_THREADS
from tunedgemm_asm.ptx.resources import BARRIER_BYTES

#: Warps of a warpgroup.
_WARPS = GROUP_THREADS // WARP_THREADS


@attrs.frozen
class Ring:
    """Position in the ring, as registers: the stage and the parity to wait for."""

    stage: str
    parity: str


def start_barriers(f: Frame) -> None:
    """Initialize all barriers in one thread, then synchronize the CTA or the cluster."""
    t, config = f.text, f.config
    other = t.to("pred", "setp.ne.u32", f.thread, 0)
    ready = t.label("READY")
    t.op("bra", ready, when=other)
    for stage in range(config.stages):
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.full + stage * BARRIER_BYTES}]", 1 + WARP_THREADS * config.staged)
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.empty + stage * BARRIER_BYTES}]", _WARPS * config.sharing * config.cluster)
    for number in range(config.consumers * config.turns):
        t.op("mbarrier.init.shared::cta.b64", f"[{f.shared}+{f.turns + number * BARRIER_BYTES}]", _WARPS)
    t.op("fence.mbarrier_init.release.cluster")  # also orders the arrivals of TMA
    t.op("fence.proxy.async.shared::cta")
    t.place(ready)
    t.op("bar.sync", 0)
    if config.cluster > 1:
        meet_cluster(f, "relaxed")


def meet_cluster(f: Frame, order: str) -> None:
    """Synchronize all threads of the cluster; the warps may have diverged.

    Args:
        order: ``relaxed`` after a fence, as for new barriers; ``release`` to complete a thread's
            work,
            including its arrivals at barriers of other CTAs (PTX ISA, "barrier.cluster").
    """
    f.text.op(f"barrier.cluster.arrive.{order}")
    f.text.op("barrier.cluster.wait.acquire")


def meet_consumer(f: Frame) -> None:
    """Synchronize the threads of the consumer at named barrier 1 or 2."""
    f.text.op("bar.sync", f.group, GROUP_THREADS)


def start_ring(f: Frame, parity: int) -> Ring:
    """Return the first stage with this parity."""
    return Ring(f.text.to("b32", "mov.u32", 0), f.text.to("b32", "mov.u32", parity))


def next_stage(f: Frame, ring: Ring) -> None:
    """Advance to the next stage; after the last one, wrap around and flip the parity."""
    t = f.text
    t.op("add.u32", ring.stage, ring.stage, 1)
    last = t.to("pred", "setp.eq.u32", ring.stage, f.config.stages)
    t.op("selp.b32", ring.stage, 0, ring.stage, last)
    t.op("xor.b32", ring.parity, ring.parity, 1, when=last)


def skip_stages(f: Frame, ring: Ring, count: str) -> None:
    """Advance by this many stages; an odd number of wraps flips the parity."""
    t, stages = f.text, f.config.stages
    behind = t.to("b32", "add.u32", ring.stage, count)
    rounds = t.to("b32", "div.u32", behind, stages)
    whole = t.to("b32", "mul.lo.u32", rounds, stages)
    t.op("sub.u32", ring.stage, behind, whole)
    odd = t.to("b32", "and.b32", rounds, 1)
    t.op("xor.b32", ring.parity, ring.parity, odd)


def barrier_of(f: Frame, stage: str) -> str:
    """Return a base register: adding the offset of a kind of barrier addresses the one of the
    stage.
    """
    return f.text.to("b32", "mad.lo.u32", stage, BARRIER_BYTES, f.shared)


def wait(f: Frame, barrier: str, offset: int, parity: str) -> None:
    """Wait until the phase of this parity has ended."""
    t = f.text
    again, done = t.label("WAIT"), t.new("pred")
    t.place(again)
    t.op("mbarrier.try_wait.parity.shared::cta.b64", done, f"[{barrier}+{offset}]", parity)
    t.op("bra", again, when=f"!{done}")


def announce(f: Frame, barrier: str) -> None:
    """Arrive at a full barrier as the producer, with the bytes that TMA will deliver."""
    f.text.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{barrier}+{f.full}]", f.arguments["loaded"])


def arrive_after_copies(f: Frame, barrier: str) -> None:
    """Arrive at a full barrier when the thread's asynchronous copies are done."""
    f.text.op("cp.async.mbarrier.arrive.noinc.shared::cta.b64", f"[{barrier}+{f.full}]")


def release(f: Frame, stage: str, arriving: str) -> None:
    """Arrive at the empty barriers of a stage: lanes with *arriving* set, one for each CTA of the
    cluster.
    """
    t = f.text
    barrier = barrier_of(f, stage)
    if f.config.cluster == 1:
        t.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{barrier}+{f.empty}]", when=arriving)
        return
    theirs = t.to("b32", "mapa.shared::cluster.u32", barrier, f.lane)
    # No writes are released, so CTA scope suffices; cluster scope would fence the whole GPU in each
    # step.
    t.op("mbarrier.arrive.release.cta.shared::cluster.b64", "_", f"[{theirs}+{f.empty}]", when=arriving)


@attrs.frozen
class Turn:
    """State of a ping-pong consumer, as registers: both barriers, the parity to wait for, arriving
    lanes.
    """

    own: str
    other: str
    parity: str
    arriving: str


def start_turns(f: Frame, number: str) -> Turn:
    """Return the state of the consumer *number*; the first consumer does not wait for its first
    turn.
    """
    t = f.text
    other = t.to("b32", "xor.b32", number, 1)
    own, theirs = barrier_of(f, number), barrier_of(f, other)
    return Turn(own, theirs, t.to("b32", "mov.u32", other), t.to("pred", "setp.eq.u32", f.lane, 0))


def wait_for_turn(f: Frame, turn: Turn) -> None:
    """Wait until the other consumer has issued all wgmma instructions of its tile."""
    wait(f, turn.own, f.turns, turn.parity)
    f.text.op("xor.b32", turn.parity, turn.parity, 1)


def end_turn(f: Frame, turn: Turn, left: str) -> None:
    """Arrive at the other consumer's barrier once no steps are left.

    All warps arrive, so that a parity cannot flip twice before one of them has waited. The code is
    inside the loop over steps: after it, ptxas 12.8 serializes the wgmma instructions (C7514).
    """
    last = f.text.to("pred", "setp.eq.u32", left, 0)
    arriving = f.text.to("pred", "and.pred", last, turn.arriving)
    f.text.op("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{turn.other}+{f.turns}]", when=arriving)
