"""Files of small runs and the fixtures of the core's tests, which these tests share."""

from __future__ import annotations

from pathlib import Path

from tunedgemm.testing.siblings import module_at

TESTS = Path(__file__).parents[3] / "tests"
_core, _runs = module_at(TESTS / "conftest"), module_at(TESTS / "analysis" / "results" / "conftest")

own_folders, child, faulty_plugin, trial_log = _core.own_folders, _core.child, _core.faulty_plugin, _core.trial_log
log, table = _runs.log, _runs.table
TALL, TRIALS, WIDE = _runs.TALL, _runs.TRIALS, _runs.WIDE
log_lines, trial_line, with_name = _runs.log_lines, _runs.trial_line, _runs.with_name
