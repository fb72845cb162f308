"""Stage 7, store: every trial at once to the trial log, every winner at once to the table."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from tunedgemm.csvfile import Row, key_shape, upsert
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops.op import Op
from tunedgemm.registry import Backend
from tunedgemm.timing import Timing

_PROFILE = (
    "gfx", "cu_num", "M", "N", "K", "bias", "dtype", "outdtype", "libtype", "solidx", "splitK", "kernelName",
    "status", "us", "noise", "samples", "err_ratio", "row_error", "tflops", "bw", "detail",
)  # fmt: skip


@attrs.frozen
class Store:
    """Where a run writes.

    Attributes:
        op, device: what is tuned, and on what.
        table: the tuned CSV.
        trials: the trial log, JSON lines.
        profile: AITER's ``--profile_file``: a CSV of every candidate, or None.
        sort: order the table by its key.
    """

    op: Op
    device: Device
    table: Path
    trials: Path
    profile: Path | None = None
    sort: bool = True

    def open(self) -> None:
        """Fail before anything is measured where nothing could be kept.

        Raises:
            TableError: a folder cannot be written.
        """
        for path in filter(None, (self.table, self.trials, self.profile)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=path.parent), path.open("a") if path.exists() else contextlib.nullcontext():
                    pass
            except OSError as error:
                raise TableError(f"cannot write {path}: {error.strerror}; choose another place with -o (or -o2)") from error

    def log(self, timings: Iterable[Timing]) -> None:
        """Append trials to the log, and to the profile where one is asked for."""
        timings = list(timings)
        with self.trials.open("a") as file:
            file.writelines(timing.to_json() + "\n" for timing in timings)
        if self.profile is not None:
            import pandas as pd

            fresh = not self.profile.exists() or self.profile.stat().st_size == 0
            frame = pd.DataFrame(list(map(self._profile_row, timings)), columns=list(_PROFILE))
            frame.to_csv(self.profile, mode="a", header=fresh, index=False)

    def put(self, winner: Timing, backend: Backend) -> None:
        """Fold a winner into the table, under its lock."""
        row = Row(
            shape=key_shape(winner.shape),
            gfx=self.device.gfx,
            cu_num=self.device.cu_num,
            device=self.device.name,
            solution=winner.solution,
            us=winner.us,
            err_ratio=winner.err_ratio,
            libver=backend.library_version(self.device),
        )
        upsert(self.table, self.op, [row], sort=self.sort)

    def _profile_row(self, timing: Timing) -> dict[str, object]:
        shape, solution, us = timing.shape, timing.solution, timing.us
        columns = {name: text for name, text in self.op.columns.format(shape).items() if name in _PROFILE}
        return {
            **columns, "gfx": self.device.gfx, "cu_num": self.device.cu_num, "libtype": solution.libtype, "solidx": solution.solidx,
            "splitK": solution.split_k, "kernelName": solution.kernel_name, "status": timing.status, "us": round(us, 4),
            "noise": round(timing.noise, 4), "samples": timing.samples, "err_ratio": round(timing.err_ratio, 4),
            "row_error": f"{timing.row_error:.3e}", "tflops": round(self.op.flops(shape) / us / 1e6, 2) if us else 0,
            "bw": round(self.op.bytes_moved(shape) / us / 1e3, 2) if us else 0, "detail": timing.detail,
        }  # fmt: skip
