"""Settings of dispatch from environment variables, read once and by `reload`."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from tunedgemm.backends.untuned import untuned_libtypes
from tunedgemm.libtypes import UNTUNED
from tunedgemm.process.variables import KINDS, read

#: Variables for online tuning: tunedgemm's, AITER's of every op, and AITER's of the op `MOE`; and
#: that op's name.
OWN_ONLINE, ONLINE, ONLINE_MOE, MOE = "TUNEDGEMM_ONLINE", "HIP_ONLINE_TUNING", "AITER_ONLINE_TUNE", "fmoe"
#: Word of `OWN_ONLINE` that tunes in the background, not in the call.
BACKGROUND = "background"

#: The variable that turns batch-invariant mode on.
BATCH_INVARIANT = "TUNEDGEMM_BATCH_INVARIANT"

#: Default timeout of online tuning, in seconds.
ONLINE_SECONDS: float = KINDS["TUNEDGEMM_ONLINE_SECONDS"].default


@attrs.frozen
class Settings:
    """Settings of dispatch.

    Attributes:
        capture: ``AITER_TUNE_GEMM``: capture every shape that is called.
        log_choices: ``AITER_LOG_TUNED_CONFIG``: log each shape's choice once, with the reason.
        untuned: ``TUNEDGEMM_FALLBACK``: comma-separated libtypes that may serve untuned calls, in
            order.
        online: ``TUNEDGEMM_ONLINE`` or ``HIP_ONLINE_TUNING``: tune a shape without a row at its
            first call.
        online_moe: ``AITER_ONLINE_TUNE``: the same for op fmoe only.
        background: ``TUNEDGEMM_ONLINE=background``: tune shapes without rows while they are served.
        online_seconds: ``TUNEDGEMM_ONLINE_SECONDS``: timeout of online tuning of a call, or in the
            background of all of it, in seconds.
        online_libtype: ``TUNEDGEMM_ONLINE_LIBTYPE``: the ``--libtype`` of online tuning.
        batch_invariant: ``TUNEDGEMM_BATCH_INVARIANT``: serve by one bit class for each weight, so
            that the bits of a row do not depend on M.
        verify: ``TUNEDGEMM_VERIFY``: share of the calls that torch computes, too, to compare.
        metrics: ``TUNEDGEMM_METRICS``: count calls; see `tunedgemm.dispatch.counters`.
    """

    capture: bool = False
    log_choices: bool = False
    untuned: tuple[str, ...] = UNTUNED
    online: bool = False
    online_moe: bool = False
    background: bool = False
    online_seconds: float = ONLINE_SECONDS
    online_libtype: str = "all"
    batch_invariant: bool = False
    verify: float = 0.0
    metrics: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables; warn about a bad value and use the default."""
        own = read(OWN_ONLINE, environment)
        return cls(
            capture=read("AITER_TUNE_GEMM", environment),
            log_choices=read("AITER_LOG_TUNED_CONFIG", environment),
            untuned=untuned_libtypes(environment),
            online=own is True or read(ONLINE, environment),
            online_moe=read(ONLINE_MOE, environment),
            background=own == BACKGROUND,
            online_seconds=read("TUNEDGEMM_ONLINE_SECONDS", environment),
            online_libtype=read("TUNEDGEMM_ONLINE_LIBTYPE", environment),
            batch_invariant=read(BATCH_INVARIANT, environment),
            verify=read("TUNEDGEMM_VERIFY", environment),
            metrics=read("TUNEDGEMM_METRICS", environment),
        )

    @property
    def passive(self) -> Settings:
        """Return these settings without what counts, tunes or verifies calls, to inspect shapes only."""
        return attrs.evolve(self, capture=False, online=False, online_moe=False, background=False, verify=0.0, metrics=False)

    def tunes_online(self, op: str) -> bool:
        """Check whether shapes of an op are tuned at their first call or in the background.

        None are in batch-invariant mode: a new row could change the bits of a weight.
        """
        return not self.batch_invariant and (self.online or self.background or (self.online_moe and op == MOE))

    def needs_calls(self, op: str) -> bool:
        """Check whether capture or online tuning needs calls of an op that has no row."""
        return self.capture or self.tunes_online(op)
