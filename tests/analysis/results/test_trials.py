"""Readers of trial logs and profiles, whole and damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import attrs
import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.table.untuned import Untuned, write_untuned
from tunedgemm.tuner.store import Store
from tunedgemm.tuner.trial import Outcome, Place, Task

from .conftest import H200, TALL, TRIALS, WIDE, WINNERS, log_lines, outcome_line, trial_line


def winners(findings) -> dict[int, str]:
    """Return the winner of each M."""
    return {shape.m: entry.winner.solution for (_, shape), entry in findings.entries.items()}


def test_a_log_has_all(log):
    """Read trials, outcomes, seconds and the run's header."""
    findings = read_findings([log()])

    assert winners(findings) == {64: "asm:fast splitK=2", 4096: "torch:native"}
    assert findings.timings == 6 and findings.devices == [H200] and not findings.faults
    wide = findings.entries[H200, WIDE]
    assert wide.gain == pytest.approx(1.5) and wide.ties == 1 and wide.seconds == {"compile": 1.5}
    assert wide.trials["triton:bad"].detail == "K must be a multiple of 96"
    assert [(run.version, run.started[:10]) for run in findings.runs] == [("0.1.0", "2026-11-23")]


def test_a_table_brings_its_log(table, log):
    """Read the log next to a table, whose rows win."""
    log()
    findings = read_findings([table(scale=0.9)])

    assert [kind for _, kind in findings.files] == ["table", "log"]
    assert findings.entries[H200, WIDE].winner.us == pytest.approx(7.2)
    assert findings.entries[H200, WIDE].gain == pytest.approx(12 / 7.2)
    assert findings.versions == {"asm 9.1", "torch 9.1"}


def test_what_the_store_writes_is_read(tmp_path):
    """Read the profile and the log of the tuner's own store alike."""
    store = Store(op_named("a16w16"), tmp_path / "bf16_tuned_gemm.csv", profile=tmp_path / "profile.csv")
    store.open({"torch": "2.11.0"})
    place = Place(H200)
    for shape, timings in TRIALS.items():
        by_solution = {timing.solution: timing for timing in timings}
        store.log(place, timings)
        store.record(Outcome(Task(shape), by_solution[WINNERS[shape]], timings[0], timings, place=place))
    store.finish()

    from_log = read_findings([tmp_path / "bf16_tuned_gemm.trials.jsonl"])
    from_profile = read_findings([tmp_path / "profile.csv"], device=H200)

    assert winners(from_log) == winners(from_profile) == {64: "asm:fast splitK=2", 4096: "torch:native"}
    for key, entry in from_log.entries.items():
        assert {name: trial.us for name, trial in entry.trials.items()} == {
            name: trial.us for name, trial in from_profile.entries[key].trials.items()
        }


def test_trials_of_bits_are_no_shapes(tmp_path):
    """Those of M = 0 have a bit class and no time."""
    store = Store(op_named("a16w16"), tmp_path / "bf16_tuned_gemm.csv")
    store.open({"torch": "2.11.0"})
    of_all_m = attrs.evolve(TRIALS[WIDE][0], shape=WIDE.with_m(0), us=0.0, bits="3f")
    store.log(Place(H200), [*TRIALS[WIDE], of_all_m])
    store.finish()

    assert [shape for _, shape in read_findings([store.trials]).entries] == [WIDE]


def test_a_failed_shape_has_its_reason(log):
    """Respect the outcome that no solution passed, and keep its reason."""
    lines = [*log_lines({WIDE: TRIALS[WIDE]}), outcome_line(WIDE, None, reason="its baseline ended the worker")]
    findings = read_findings([log(lines)])

    entry = findings.entries[H200, WIDE]
    assert (entry.winner, entry.gain, entry.reason) == (None, 0.0, "its baseline ended the worker")


def test_an_endless_line_is_an_error(log, monkeypatch):
    """Refuse a line that no tuner writes, before it fills the memory."""
    monkeypatch.setattr("tunedgemm.analysis.results.files._LONGEST", 1000)

    with pytest.raises(UserError, match=r"jsonl:11: longer than this command reads"):
        read_findings([log([*log_lines(), "x" * 2000])])


DAMAGE = {
    "cut off": '{"schema": 2, "kind": "trial", "run": "r", "gfx": "sm_9',
    "another file's line": "M,N,K,us",
    "a newer schema": '{"schema": 99, "kind": "trial"}',
    "no object": "[1, 2]",
    "no time": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "us": "fast"}),
    "an endless time": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "us": float("inf")}),
    "an unknown status": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "status": "great"}),
    "no shape": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "shape": 4}),
    "a strange shape": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "shape": {"op": [1]}}),
    "an impossible shape": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "shape": {"op": "a16w16", "m": -1, "n": 1, "k": 1}}),
    "an unknown op": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "shape": {"op": "a1w1", "m": 1, "n": 1, "k": 1}}),
    "no solution": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "solution": {"libtype": 3}}),
    "a strange device": json.dumps({**json.loads(trial_line(TRIALS[WIDE][0])), "gfx": {}}),
    "deep nesting": "[" * 100_000,
    "zero bytes": "\0" * 64 + "x",
}


def test_damaged_lines_are_counted_and_named(log):
    """Read all other lines, and name the damaged ones by their numbers."""
    whole = log_lines()
    lines = [*whole[:2], *(f"{text}\n" for text in DAMAGE.values()), "\n", *whole[2:]]

    findings = read_findings([log(lines)])

    assert winners(findings) == {64: "asm:fast splitK=2", 4096: "torch:native"}
    [faults] = findings.faults
    assert faults.count == len(DAMAGE)
    assert faults.named[0].startswith("line 3: not JSON")
    assert len(faults.named) == 5


def test_damaged_lines_of_a_profile(tmp_path):
    """Name lines with missing fields or wrong numbers; a reason may have line breaks."""
    header = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,kernelName,status,us,noise,samples,detail\n"
    start = "sm_90,132,64,2048,4096,False,torch.bfloat16,torch.bfloat16,False,False,"
    lines = ["asm,0,2,fast,ok,8.0,0.001,51,\n", 'torch,0,0,native,fault,-1,0,0,"one\ntwo"\n', "asm,0,2,cut\n", "asm,0,x,f,ok,8,0,1,\n"]
    path = tmp_path / "p.csv"
    path.write_text(header + "".join(start + text for text in lines))

    findings = read_findings([path], device=H200)

    [faults] = findings.faults
    assert [text.partition(":")[0] for text in faults.named] == ["line 5", "line 6"]
    assert findings.entries[H200, WIDE].trials["torch:native"].detail == "one\ntwo"


def test_an_unclosed_quote_costs_what_it_hides(tmp_path):
    """Name the lines that an unclosed quote hides, rather than take them for a reason."""
    header = "gfx,cu_num,M,N,K,libtype,solidx,splitK,kernelName,status,us,noise,samples,detail\n"
    line = "sm_90,132,64,2048,4096,asm,0,0,k{},ok,8.0,0,5,{}\n"
    path = tmp_path / "p.csv"
    path.write_text(header + line.format(0, "") + line.format(1, '"') + "".join(line.format(n, "") for n in range(2, 99)))

    findings = read_findings([path], op="a16w16")

    assert findings.timings == 1
    assert findings.faults[0].named == ["line 3: an unclosed quote hides the lines up to 100"]


def test_packed_files(log, tmp_path):
    """Read a gzip file; of a damaged one read what comes before the damage."""
    packed = tmp_path / "trials.jsonl.gz"
    content = gzip.compress(log().read_bytes() * 50)
    packed.write_bytes(content)
    assert read_findings([packed]).timings == 300

    packed.write_bytes(content[: len(content) // 2])
    findings = read_findings([packed])
    assert 0 < findings.timings < 300
    assert "the gzip file is damaged" in findings.faults[0].named[-1]


def test_a_nameless_device_is_that_of_the_others(log, table):
    """Give lines without a device the one that the files name, and say so; never guess between two."""
    old = [json.dumps({"schema": 1, **{k: v for k, v in json.loads(trial_line(t)).items() if k in ("shape", "solution", "status", "us")}})
           for t in TRIALS[WIDE]]  # fmt: skip
    nameless = log([f"{text}\n" for text in old], "old.jsonl")

    findings = read_findings([nameless, table()])
    assert findings.devices == [H200] and "count as sm_90, 132 SMs (nvidia-h200)" in findings.notes[0]
    assert findings.entries[H200, WIDE].gain == pytest.approx(1.5)

    other = Device("sm_90", 132, "nvidia-h100")
    findings = read_findings([nameless, table(), table("bf16_tuned_gemm2.csv", device=other)])
    assert {device.gfx for device in findings.devices} == {"unknown", "sm_90"} and not findings.notes


def test_calls_of_captured_shapes_count(log, tmp_path):
    """Add calls and layers to their shapes; calls of other shapes are noted."""
    listed = tmp_path / "bf16_untuned_gemm.csv"
    write_untuned(listed, op_named("a16w16"), [Untuned(WIDE, 7, 3, "mlp.up"), Untuned(TALL, 5), Untuned(WIDE.with_m(3), 9)])

    findings = read_findings([log(), listed])

    assert findings.entries[H200, WIDE].calls == 10 and findings.entries[H200, WIDE].layer == "mlp.up"
    assert findings.notes == ["9 captured calls are of shapes that these files do not have; the gains leave them out"]


@pytest.mark.parametrize("content", ["", "hello\n", "a,b,c\n1,2,3\n", "\x7fELF\0\0"])
def test_other_files_are_refused(tmp_path, content):
    """Refuse a file that the tuner did not write."""
    path = tmp_path / "other.bin"
    path.write_text(content)

    with pytest.raises(UserError, match=r"other\.bin: not a table, trial log, profile or list of shapes"):
        read_findings([path])


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="needs the committed results")
@pytest.mark.parametrize(
    ("names", "shapes", "timings"),
    [
        (("h200-2026-11-23/all-a16w16-tuned.csv", "h200-2026-11-23/all-a16w16-profile.csv.gz"), 12, 5337),
        (("h100-2026-11-25/asm/a8w8_blockscale-tuned.csv", "h100-2026-11-25/asm/a8w8_blockscale-profile.csv"), 57, 1732),
        (("h200-2026-11-23/cutlass/fmoe-tuned.csv", "h200-2026-11-23/cutlass/fmoe-profile.csv"), 9, 153),
        (("h200-2026-11-20/trials.jsonl.gz",), 26, 2186),
    ],
)
def test_committed_results(names, shapes, timings):
    """Read every line of the committed results."""
    findings = read_findings([RESULTS / name for name in names])

    assert (len(findings.entries), findings.timings, findings.faults) == (shapes, timings, [])
    assert all(entry.winner is not None for entry in findings.entries.values())
