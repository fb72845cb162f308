"""The checks of the bring-up kit, and the `Examiner` that runs them, for tests over fakes."""

from __future__ import annotations

from tunedgemm.analysis.bring_up.examiner import Examiner

__all__ = ["Examiner"]
