"""benchmarks/engine_start.py: its plan of starts, its figures of logs, and its summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_start.py"

LOG = """\
(EngineCore pid=1) INFO Model loading took 14.98 GiB memory and 17.301000 seconds
DeepGEMM warmup:  50%|#####     | 855/1711 [00:30<00:30]\rDeepGEMM warmup: 100%|##########| 1711/1711 [00:58<00:00, 29.1it/s]
(EngineCore pid=1) INFO torch.compile took 21.50 s in total
(EngineCore pid=1) INFO tunedgemm: 4.81 s of start-up: imports 0.40, our kernels 2.90
(EngineCore pid=1) INFO Graph capturing finished in 3 secs, took 0.52 GiB
(EngineCore pid=1) INFO init engine (profile, create kv cache, warmup model) took 41.20 s (compilation: 21.50 s)
"""


def test_arms_change_gpus(as_module: Callable[[Path], ModuleType]) -> None:
    """Each GPU starts one engine of a wave, and the other arm in the next."""
    script = as_module(SCRIPT)
    arguments = script.parsed(["model", "--gpus", "0", "1", "2", "3", "--rounds", "2"])
    first, second = ({gpu: arm for gpu, _, arm in wave} for wave in script.waves(arguments))
    assert sorted(first) == sorted(second) == ["0", "1", "2", "3"]
    assert all(first[gpu] != second[gpu] for gpu in first)
    one = script.parsed(["model", "--rounds", "1"])
    assert [[arm for _, _, arm in wave] for wave in script.waves(one)] == [["alone"], ["tunedgemm"]]


def test_figures_are_those_of_the_log(as_module: Callable[[Path], ModuleType]) -> None:
    """The log's own seconds, DeepGEMM's kernels and the plugin's phases are read."""
    assert as_module(SCRIPT).figures_of(LOG) == {
        "loading, s": 17.301, "compilation, s": 21.5, "graphs, s": 3.0, "init engine, s": 41.2, "DeepGEMM kernels": 1711.0,
        "plugin, s": 4.81, "phases": "imports 0.40, our kernels 2.90",
    }  # fmt: skip
    assert as_module(SCRIPT).figures_of("") == {}


def test_the_summary_compares_medians(as_module: Callable[[Path], ModuleType]) -> None:
    """Starts that failed do not count, and the plugin's worst start is named."""
    row = {"model": "m", "start": "first"}
    rows = [{**row, "arm": "alone", "seconds": seconds} for seconds in (60.0, 64.0, None)]
    rows += [{**row, "arm": "tunedgemm", "seconds": seconds, "plugin, s": own} for seconds, own in ((61.0, 2.0), (62.0, 4.0), (63.0, 3.0))]
    [line] = as_module(SCRIPT).summary(rows)
    assert line.startswith("m, first start: 64.0 s alone, 62.0 s with tunedgemm, -2.0 s (2 alone, 3 tunedgemm)")
    assert line.endswith("in the plugin 3.00 s, at most 4.00 s")


def test_each_start_has_its_gpu_and_caches(as_module: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    """A second start gets the folders of the first, and DeepGEMM's warm-up is as asked."""
    script = as_module(SCRIPT)
    variables = script.environment(script.parsed(["model", "--deepgemm", "full"]), "3", tmp_path)
    assert variables["CUDA_VISIBLE_DEVICES"] == "3" and variables["VLLM_DEEP_GEMM_WARMUP"] == "full"
    assert {variables[name] for name in script.CACHES} == {str(tmp_path / name.lower()) for name in script.CACHES}


@pytest.mark.parametrize("words", [["--starts", "third"], ["--arms", "again"]])
def test_unknown_words_are_refused(as_module: Callable[[Path], ModuleType], words: list[str]) -> None:
    """Only known arms and starts are accepted."""
    with pytest.raises(SystemExit):
        as_module(SCRIPT).parsed(["model", *words])
