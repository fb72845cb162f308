"""Tuning into JSON files: the core's tuner over our lists of kernels, with invented times, on the
CPU.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm_triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tunedgemm.plugin import Device, Shape, Solution, UserError
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.replay import Samples
from tunedgemm.tools.tables import Options, Outcome, Planned, Row, ops, upsert
from tunedgemm_triton.jsonfiles import buckets, entries, export, files, space, tune
from tunedgemm_triton.jsonfiles.dialect import OURS
from tunedgemm_triton.jsonfiles.tune import Request

H200 = Device("sm_90", 132)
PAIRS = ((96, 256), (160, 128))


def _us(shape: Shape, solution: Solution) -> float:
    """Return a time that depends on both, the same in every run."""
    return 10.0 + zlib.crc32(f"{shape} {solution}".encode()) % 1000 / 100


def _bench(op: Any, shape: Shape, device: Device) -> Callable[..., Any]:
    return lambda launchers, rounds: {solution: Samples((_us(shape, solution),) * rounds) for solution in launchers}


#: Our dialect as on an H200, on any machine.
DIALECT = attrs.evolve(
    OURS,
    solution_of=lambda entry, shape, _: OURS.solution_of(entry, shape, H200),
    fits=lambda solution, shape, _: OURS.fits(solution, shape, H200),
    listed=lambda shape, _: list(OURS.listed(shape, H200))[:5],
    unsupported=lambda shape, _: OURS.unsupported(shape, H200),
)


def _bench_of(call: Callable[..., Any] = exact, op: str = "a16w16") -> dict[str, Any]:
    def listed(shape: Shape, device: Device) -> list[Solution]:
        user_space = space.enumerate_current(DIALECT, shape, device)
        return list(DIALECT.listed(shape, device) if user_space is None else user_space)

    return {"registry": fake_registry(fake_backend("triton", ops=(op,), solutions=listed, call=call)), "bench": _bench}


def _request(folder: Path, **changes: Any) -> Request:
    options = Options(libtype="triton", device="cpu", iters=3, warmup=0, atol=1e-2, rtol=1e-2)
    request = Request(DIALECT, "a16w16", PAIRS, (1, 16, 48, 100), {"outdtype": "bf16"}, folder, options)
    return attrs.evolve(request, **changes)


def _ran(request: Request, progress: Callable[..., None] = lambda *_: None, **bench: Any) -> tuple[tune.Result, list[str]]:
    said: list[str] = []
    return tune.run(request, progress, said.append, **(bench or _bench_of())), said


def _gfx(result: tune.Result) -> str:
    return str(result.report.places[0].device.gfx)


@pytest.mark.parametrize("style", [buckets.NEW, buckets.LEGACY])
def test_reading_returns_what_the_tuner_writes(tmp_path: Path, style: str) -> None:
    """Each tested M of two weights gets its winner, and the default file exists."""
    request = _request(tmp_path, style=style)
    result, said = _ran(request)
    winners = {outcome.task.shape: outcome.winner.solution for outcome in result.report.outcomes}
    assert len(winners) == 8
    gfx = _gfx(result)
    names = [f"{gfx}-GEMM-A16W16-N=96-K=256.json", f"{gfx}-GEMM-A16W16-N=160-K=128.json", f"{gfx}-GEMM-A16W16.json"]
    assert [path.name for path in result.files] == names
    shared = [shape for shape in winners if style == buckets.LEGACY and shape.m in (1, 16)]
    for shape, winner in winners.items():
        content = files.read(tmp_path / f"{gfx}-GEMM-A16W16-N={shape.n}-K={shape.k}.json")
        key = buckets.find(content, shape.m)
        assert key is not None
        solution, notes = entries.solution_of(content[key], shape, H200)
        assert not notes
        if shape not in shared:
            assert solution == winner
        else:
            assert solution in {winners[other] for other in shared if (other.n, other.k) == (shape.n, shape.k)}
        assert entries.solution_of(content["any"], attrs.evolve(shape, m=100), H200)[0] == winners[attrs.evolve(shape, m=100)]
    assert said[0] == f"Architecture: {gfx}"
    assert ": 5 configurations a shape from the backend's list" in said[1]
    assert said[2] == "Number of (N, K): 2, 8 shapes to time, 0 in the table already"
    assert [line.split(" took ")[0] for line in said[3:]] == ["Tuning for A16W16-N=96-K=256", "Tuning for A16W16-N=160-K=128"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.sets(st.integers(1, 20_000), min_size=1, max_size=8),
    picks=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    style=st.sampled_from([buckets.NEW, buckets.LEGACY]),
    which=st.sampled_from([("a16w16", 4096, 4096), ("a8w8_blockscale", 2112, 7168), ("a4w4_blockscale", 2048, 2048)]),
)
def test_rows_become_buckets_that_return_them(rows: set[int], picks: list[int], style: str, which: tuple[str, int, int]) -> None:
    """Every M finds a row of its bucket, its own where it is the only one; `any` is the largest
    M's.
    """
    op, n, k = which
    base = next((shape for shape in ops()[op].examples if shape.m), Shape("a16w16", 1, 1, 1))
    rows_made = []
    for m, pick in zip(sorted(rows), picks, strict=False):
        shape = attrs.evolve(base, m=m, n=n, k=k)
        listed = list(OURS.listed(shape, H200))
        rows_made.append(Row(shape, "sm_90", 132, "", listed[pick % len(listed)], 5.0 + pick))
    content = export.entries_of(rows_made, OURS, style, {})
    bounds = buckets.bounds_of(OURS.tag_of(rows_made[0].shape))
    own = {row.shape.m: entries.entry_of(row.solution, row.shape, "sm_90") for row in rows_made}
    for row in rows_made:
        key = buckets.find(content, row.shape.m, bounds)
        assert key == buckets.key_of(row.shape.m, style, bounds)
        same = [other for other in own if buckets.key_of(other, style, bounds) == key]
        assert content[key] in [own[m] for m in same]
        if len(same) == 1:
            assert entries.solution_of(content[key], row.shape, H200) == (row.solution, ())
    assert content["any"] == own[max(own)]
    assert buckets.dead_keys(content, bounds) == {}


def test_a_bucket_gets_the_cheapest_solution() -> None:
    """Of two M of one bucket the winner of one serves both if nearly as fast for the other."""
    shapes = [Shape("a16w16", m, 4096, 4096) for m in (40, 60)]
    first, second = list(OURS.listed(shapes[0], H200))[:2]
    rows = [Row(shapes[0], "sm_90", 132, "", first, 10.0), Row(shapes[1], "sm_90", 132, "", second, 10.0)]
    assert export.cheapest(rows, {}) == rows[1]
    assert export.cheapest(rows, {shapes[1]: {first: 10.2}, shapes[0]: {second: 20.0}}) == rows[0]
    assert export.cheapest(rows, {shapes[1]: {first: 30.0}, shapes[0]: {second: 20.0}}) == rows[1]


def test_a_shared_bucket_is_reported(tmp_path: Path) -> None:
    """For an M with another solution than its best, the run prints the slowdown."""
    result, _ = _ran(_request(tmp_path, rows=(33, 40, 50, 60, 64)))
    winners = {outcome.task.shape: outcome.winner for outcome in result.report.outcomes}
    by_weight = {pair: {w.solution for s, w in winners.items() if (s.n, s.k) == pair} for pair in PAIRS}
    assert max(map(len, by_weight.values())) > 1
    assert result.shared
    assert all("shares M_LEQ_64: 1." in line and line.endswith("x as long as its best") for line in result.shared)


def test_the_default_is_the_most_common_choice() -> None:
    """For each bucket the default has the entry of most weights, the first of several."""
    contents: list[Mapping[str, Any]] = [
        {"M_LEQ_16": {"a": 1}, "any": {"a": 1}},
        {"M_LEQ_16": {"a": 2}, "any": {"a": 3}},
        {"M_LEQ_16": {"a": 2}, "M_LEQ_4": {"a": 9}, "any": {"a": 2}},
    ]  # fmt: skip
    assert export.default_of(contents) == {"M_LEQ_4": {"a": 9}, "M_LEQ_16": {"a": 2}, "any": {"a": 1}}
    assert list(export.default_of(contents)) == ["M_LEQ_4", "M_LEQ_16", "any"]


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    """After Ctrl-C the first weight's file stays; the same command times only the rest and writes
    equal files.
    """
    done: list[Shape] = []

    def stop(place: Any, event: Any) -> None:
        if isinstance(event, Outcome):
            done.append(event.task.shape)
            if len(done) == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _ran(_request(tmp_path / "first"), stop)
    assert len(list((tmp_path / "first").glob("*.json"))) == 1
    again: list[int] = []

    def count(place: Any, event: Any) -> None:
        if isinstance(event, Planned):
            again.append(len(event.tasks))

    result, _ = _ran(_request(tmp_path / "first"), count)
    whole, _ = _ran(_request(tmp_path / "whole"))
    assert again == [3]
    assert len(result.files) == len(whole.files) == 3
    for path in whole.files:
        assert (tmp_path / "first" / path.name).read_text() == path.read_text()


def test_a_weight_beyond_the_budget_is_unfinished(tmp_path: Path) -> None:
    """A weight that was not begun has no file and is not missing."""
    spent = attrs.evolve(_request(tmp_path).options, budget=1e-6)
    result, _ = _ran(_request(tmp_path, options=spent))
    assert len(result.report.unbegun) == 8
    assert (result.files, result.missing) == ((), ())
    assert len(result.unfinished) == 2


def test_a_weight_is_written_when_every_m_is_timed(tmp_path: Path) -> None:
    """A weight that the budget left unfinished is reported, not written from its few M."""
    earlier, _ = _ran(_request(tmp_path, pairs=PAIRS[:1], rows=(16,)))
    for path in earlier.files:
        path.unlink()
    spent = attrs.evolve(_request(tmp_path).options, budget=1e-6)
    result, _ = _ran(_request(tmp_path, options=spent))
    assert (result.files, result.missing) == ((), ())
    assert [dict(name.sizes) for name in result.unfinished] == [{"N": n, "K": k} for n, k in PAIRS]
    assert not list(tmp_path.glob("*.json"))


def test_a_broken_file_does_not_end_a_run(tmp_path: Path) -> None:
    """The default is made of the readable files."""
    whole, _ = _ran(_request(tmp_path))
    (tmp_path / f"{_gfx(whole)}-GEMM-A16W16-N=7-K=7.json").write_text("{")
    again, _ = _ran(_request(tmp_path))
    assert again.files == whole.files


def test_each_architecture_has_its_files(tmp_path: Path) -> None:
    """With two kinds of devices a file is written when its device is done, and none is missing at
    the end.
    """
    seen: list[Any] = []
    _ran(_request(tmp_path / "seen", pairs=PAIRS[:1], rows=(16,)), lambda _, event: seen.append(event))
    [planned], [outcome] = ([event for event in seen if isinstance(event, kind)] for kind in (Planned, Outcome))
    places = tuple(attrs.evolve(planned.places[0], device=Device(gfx, 132)) for gfx in ("sm_90", "sm_100"))
    names = [f"{place.device.gfx}-GEMM-A16W16-N=96-K=256.json" for place in places]
    folder = tmp_path / "out"
    request = _request(folder, pairs=PAIRS[:1], rows=(16,))
    run = tune._Run(request, request.shapes(), request.table(), lambda *_: None, lambda _: None)
    run(None, attrs.evolve(planned, tasks=planned.tasks * 2, places=places))
    request.table().parent.mkdir(parents=True)
    for count, place in enumerate(places, 1):
        row = Row(outcome.task.shape, place.device.gfx, 132, "", outcome.winner.solution, 5.0)
        upsert(request.table(), request.family, [row])
        run(place, attrs.evolve(outcome, place=place))
        assert sorted(path.name for path in folder.glob("*.json")) == sorted(names[:count])
    written, missing, _ = run.finish()
    assert [path.name for path in written] == [*names, "sm_90-GEMM-A16W16.json", "sm_100-GEMM-A16W16.json"]
    assert missing == []


def test_only_the_users_space_is_timed(tmp_path: Path) -> None:
    """The run times each kernel of the space's product once, no neighbours outside, and prints its
    size.
    """
    values = {"BLOCK_SIZE_M": [16, 32], "BLOCK_SIZE_N": [64, 128], "BLOCK_SIZE_K": 64, "kpack": [1, 2], "num_stages": 3}
    (tmp_path / "space.json").write_text(json.dumps(values))
    result, said = _ran(_request(tmp_path / "out", space=str(tmp_path / "space.json"), rows=(48,)))
    timed = {
        timing.solution.kernel_name
        for outcome in result.report.outcomes
        for timing in outcome.timings
        if timing.solution.libtype == "triton"
    }
    assert timed == {f"gemm_r1_m{m}n{n}k64_g1_w4s3" for m in (16, 32) for n in (64, 128)}
    assert said[1].endswith(f"8 configurations, of which 4 differ on {_gfx(result)} and 4 fit a shape")


def test_the_flag_of_tune_selects_a_space_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag's value is a file's absolute path or AITER's name; a missing file is an error."""
    (tmp_path / "space.json").write_text('{"BLOCK_SIZE_M": [64]}')
    monkeypatch.chdir(tmp_path)
    (option,) = tunedgemm_triton.triton.options
    assert option.flag == "--triton-space"
    assert [option.kind(text) for text in ("space.json", "aiter", "")] == [str(tmp_path / "space.json"), "aiter", ""]
    with pytest.raises(UserError, match="cannot be read"):
        option.kind("absent.json")
    monkeypatch.setenv(option.variable, option.kind("space.json"))
    current = space.current()
    assert current is not None and current.entries == ({"BLOCK_SIZE_M": 64},)


def test_the_space_of_aiter_has_5832() -> None:
    """On an H200 the loops of the guide make 972 different kernels."""
    aiter = space.space_of(space.AITER)
    shape = Shape("a8w8_blockscale", 4096, 4096, 4096, "fp8_e4m3fn", "bf16", scale="block")
    assert len(aiter.entries) == 5832
    listed = space.listed(aiter, OURS, attrs.evolve(shape, n=1024, m=512), H200)
    assert listed.different == 972
    assert 100 < len(listed.solutions) < 972


WRONG_SPACES = [
    ("{", "invalid JSON"),
    ("[]", "must be an object of parameters"),
    ('{"BLOCK_SIZE_M": [64], "BLOCK_SIZE_N": [64], "BLOCK_SIZE_K": [64], "speed": [1]}', "have no parameter 'speed'"),
    ('{"BLOCK_SIZE_M": [64, 65], "BLOCK_SIZE_N": [64], "BLOCK_SIZE_K": [64]}', "BLOCK_SIZE_M must be a power of two"),
    ('{"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "num_stages": 8}', "none of its 1 configurations can run"),
]


def test_a_wrong_space_is_an_error(tmp_path: Path) -> None:
    """An error with the reason comes before anything is measured; a right space is tuned."""
    path = tmp_path / "space.json"
    request = _request(tmp_path / "out", space=str(path), rows=(48,))
    for text, message in WRONG_SPACES:
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            _ran(request)
        assert not list((tmp_path / "out").glob("*.json"))
    path.write_text('{"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "kernel": "tma"}')
    assert _ran(request)[0].missing == ()


def test_a_weight_without_a_correct_kernel_has_no_file(tmp_path: Path) -> None:
    """Kernels outside the tolerances are counted as wrong; a weight with no other is missing, the
    rest is written.
    """

    def call(solution: Solution, shape: Shape, *operands: Any) -> Any:
        return exact(solution, shape, *operands) * (1.03 if shape.n == 96 else 1.0)

    result, _ = _ran(_request(tmp_path), **_bench_of(call))
    assert [name.text for name in result.missing] == [f"{_gfx(result)}-GEMM-A16W16-N=96-K=256.json"]
    assert {timing.status for o in result.report.failed for timing in o.timings if timing.solution.libtype == "triton"} == {"wrong"}
    assert len(result.files) == 2


def test_the_requested_tolerances_apply(tmp_path: Path) -> None:
    """Kernels that are 0.5 % off pass wide tolerances and fail tight ones."""

    def call(solution: Solution, shape: Shape, *operands: Any) -> Any:
        return exact(solution, shape, *operands) * 1.005

    assert _ran(_request(tmp_path / "wide"), **_bench_of(call))[0].missing == ()
    tight = Options(libtype="triton", device="cpu", iters=3, warmup=0, atol=1e-6, rtol=1e-4)
    assert len(_ran(_request(tmp_path / "tight", options=tight), **_bench_of(call))[0].missing) == 2


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The error comes before anything is measured and names the flag."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written.*--save-path"):
        _ran(_request(tmp_path / "file" / "below"))


def test_impossible_sizes_are_errors(tmp_path: Path) -> None:
    """The error has the bound of M, N or K."""
    for changes in ({"pairs": ((0, 128),)}, {"pairs": ((128, 0),)}, {"pairs": ((128, 1 << 40),)}, {"rows": (16, 0)}):
        with pytest.raises(UserError, match="must be"):
            _ran(_request(tmp_path, **changes))


def test_tables_become_files_and_back(tmp_path: Path) -> None:
    """The tuner's table becomes the same files; these become the same rows with its trial log."""
    request = _request(tmp_path)
    result, _ = _ran(request)
    table = request.table()
    rows = tune.read_rows(table, request.family)[0]
    log = table.with_name(table.stem + ".trials.jsonl")
    exported = export.files_of(rows, DIALECT, buckets.NEW, {})
    assert exported.left == ()
    assert {name.text: json.dumps(content, indent=4) + "\n" for name, content in exported.files.items()} == {
        path.name: path.read_text() for path in result.files[:-1]
    }
    times = next(iter(export.timed(log, request.family).values()))
    back = []
    for name, content in exported.files.items():
        here = {shape: us for shape, us in times.items() if shape.n == dict(name.sizes)["N"]}
        made, left = export.rows_of(content, DIALECT, Device(name.gfx, rows[0].cu_num, rows[0].device), here)
        assert left == []
        back += made
    assert {(row.shape, row.solution, row.us) for row in back} == {(row.shape, row.solution, row.us) for row in rows}


def test_an_op_without_files_is_left_out(tmp_path: Path) -> None:
    """A row of weight-only formats stays in its table, and tuning into files refuses the op."""
    shape = next(shape for shape in ops()["a16wn"].examples if shape.m)
    row = Row(shape, "sm_90", 132, "nvidia-h200", Solution("triton", "wn_r1_m16n64k32_g1_w4s4_t"), 3.0)
    reason = "triton has no JSON files for a16wn"
    assert export.files_of([row], DIALECT, buckets.NEW, {}) == export.Exported({}, (f"{row.shape}: {reason}",))
    with pytest.raises(UserError, match=f"{reason}; its ops are a16w16"):
        _ran(_request(tmp_path, op="a16wn", columns={"w_format": "gptq_int4", "w_group": "32"}))
