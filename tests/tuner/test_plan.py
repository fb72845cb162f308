"""The shapes to tune, their shard and their order."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.untuned import Untuned
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.tuner.plan import groups, plan, refuse_without_classes, requested
from tunedgemm.tuner.trial import Options, Task

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200", 1)
SHAPES = [Shape("a16w16", m, n, k) for n, k in ((1280, 8192), (8192, 1024), (7168, 8192)) for m in (1, 64, 4096)]
LISTED = [Untuned(shape) for shape in SHAPES]


def row(shape: Shape, name: str = "good", libver: str = "3", **fields) -> Row:
    place = {"gfx": H200.gfx, "cu_num": H200.cu_num, "device": H200.name}
    return Row(shape=shape, solution=Solution("turbo", name), us=5.0, libver=libver, **{**place, **fields})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows for the first three shapes: as tuned now, by an older library, and of another device."""
    path = tmp_path / "t.csv"
    write_rows(path, OP, [row(SHAPES[0]), row(SHAPES[1], libver="2"), row(SHAPES[2], device="nvidia-h100")])
    return path


def test_tuned_shapes_are_skipped_and_duplicates_folded(table: Path) -> None:
    """Rows of this device count as tuned, those of another do not; counts of one shape add up.

    An empty batch makes no task.
    """
    empty = Shape("a16w16", 0, 64, 64)

    planned = plan(OP, [*LISTED, Untuned(SHAPES[8], 6), Untuned(empty)], table, H200, Options())

    assert {task.shape for task in planned.tasks} == set(SHAPES[2:])
    assert {task.shape: task.count for task in planned.tasks}[SHAPES[8]] == 7
    assert set(planned.skipped) == {empty, *SHAPES[:2]}


def test_all_tunes_again_and_names_the_incumbents(table: Path) -> None:
    """With --all no shape is skipped, and the task has the table's row."""
    tasks = plan(OP, LISTED, table, H200, Options(all=True)).tasks

    assert {task.shape: task.incumbent for task in tasks if task.incumbent} == dict.fromkeys(SHAPES[:2], Solution("turbo", "good"))
    assert len(tasks) == len(SHAPES)


def test_the_incumbent_is_the_row_that_dispatch_would_choose(table: Path) -> None:
    """A row that names the device precedes one without a name, then the faster one wins.

    A time of 0 does not count as a row.
    """
    anyone = row(SHAPES[0], "anyone", device="")
    never = attrs.evolve(row(SHAPES[1], "never"), us=0.0)
    write_rows(table, OP, [attrs.evolve(row(SHAPES[0], "slow"), us=9.0), row(SHAPES[0], "fast"), attrs.evolve(anyone, us=1.0), never])

    tasks = plan(OP, LISTED[:2], table, H200, Options(all=True)).tasks

    assert {task.shape: str(task.incumbent) for task in tasks} == {SHAPES[0]: "turbo:fast", SHAPES[1]: "None"}


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("whole", [False, True], ids=["shapes", "groups"])
def test_each_shape_is_in_exactly_one_shard(tmp_path: Path, parts: int, whole: bool) -> None:
    """However the list is ordered.

    Shards differ by one shape at most, unless groups must stay whole.
    """
    lists = [random.Random(part).sample(LISTED, len(LISTED)) for part in range(parts)]

    shards = [
        [task.shape for task in plan(OP, shuffled, tmp_path / "t.csv", H200, Options(shard=(part, parts), batch_invariant=whole)).tasks]
        for part, shuffled in enumerate(lists, 1)
    ]

    assert sorted(map(str, itertools.chain(*shards))) == sorted(map(str, SHAPES))
    sizes = {len(shard) for shard in shards}
    if whole:
        assert len({(n, part) for part, shard in enumerate(shards) for n in {shape.n for shape in shard}}) == 3
        assert max(sizes) == 3 * -(-3 // min(parts, 3))
    else:
        assert max(sizes) - min(sizes) <= 1


def test_a_shard_does_not_depend_on_the_table(table: Path, tmp_path: Path) -> None:
    """A machine that starts later, with a fuller table, still takes its own part."""
    fresh = plan(OP, LISTED, tmp_path / "none.csv", H200, Options(shard=(1, 2)))
    later = plan(OP, LISTED, table, H200, Options(shard=(1, 2)))

    assert {task.shape for task in fresh.tasks} == {task.shape for task in later.tasks} | set(later.skipped)


@pytest.mark.parametrize(
    ("libvers", "stale"),
    [({"turbo": "3"}, SHAPES[1:2]), ({"turbo": "2"}, SHAPES[:1]), ({"turbo": "4"}, SHAPES[:2]), ({}, SHAPES[:2])],
    ids=["one", "the other", "both", "libtype is gone"],
)
def test_stale_takes_rows_of_another_library_version(table: Path, libvers: dict[str, str], stale: list[Shape]) -> None:
    """Selected are the listed shapes whose row on this device has another version.

    New shapes are not tuned then.
    """
    planned = plan(OP, LISTED, table, H200, Options(stale=True), libvers)

    assert {task.shape for task in planned.tasks} == set(stale)
    assert set(planned.skipped) == set(SHAPES) - set(stale)


def test_a_kernel_that_carries_its_revision_is_not_stale(table: Path) -> None:
    """An empty version on both sides is the same version."""
    write_rows(table, OP, [row(SHAPES[0], libver="")])

    assert plan(OP, LISTED, table, H200, Options(stale=True), {"turbo": ""}).tasks == ()


def test_stale_without_a_list_asks_for_the_tables_own_shapes(table: Path, tmp_path: Path) -> None:
    """No captured shapes are needed; the row for any M does not count as a shape.

    A list that is given is obeyed.
    """
    write_rows(table, OP, [row(SHAPES[0]), row(SHAPES[4]), row(attrs.evolve(SHAPES[0], m=0))])
    listed = tmp_path / "untuned.csv"
    listed.write_text("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count\n1,1280,8192,False,bf16,bf16,False,False,3\n")

    assert requested(OP, None, table).shapes == (Untuned(SHAPES[0]), Untuned(SHAPES[4]))
    assert requested(OP, listed, table).shapes == (Untuned(SHAPES[0], 3),)
    with pytest.raises(TableError, match="AITER_TUNE_GEMM=1"):
        requested(OP, None)


def test_rows_of_further_tables_count_as_tuned(table: Path, tmp_path: Path) -> None:
    """A shape that any of the tables has is skipped."""
    write_rows(tmp_path / "b.csv", OP, [row(SHAPES[5])])

    planned = plan(OP, LISTED, (table, tmp_path / "b.csv"), H200, Options())

    assert set(planned.skipped) == {*SHAPES[:2], SHAPES[5]}


def test_a_tuned_table_is_a_list_of_shapes(table: Path) -> None:
    """Each shape of a table's rows is requested, with the row's device; rows for any M are not."""
    write_rows(table, OP, [row(SHAPES[0]), row(SHAPES[0], gfx="gfx942", cu_num=304), row(attrs.evolve(SHAPES[0], m=0))])

    assert requested(OP, table).shapes == (
        Untuned(SHAPES[0], cu_num=H200.cu_num, gfx=H200.gfx), Untuned(SHAPES[0], cu_num=304, gfx="gfx942")
    )  # fmt: skip


def test_all_leaves_lines_of_other_devices(table: Path) -> None:
    """With --all, a line that names another gfx or cu_num is not tuned, as in AITER; without, it is."""
    here, there = Untuned(SHAPES[3], cu_num=132), Untuned(SHAPES[4], cu_num=304)
    lines = [here, there, Untuned(SHAPES[5], cu_num=132, gfx="gfx942"), Untuned(SHAPES[6], cu_num=132, gfx="sm_90"), Untuned(SHAPES[7])]

    planned = plan(OP, lines, table, H200, Options(all=True))

    assert {task.shape for task in planned.tasks} == {SHAPES[3], SHAPES[6], SHAPES[7]}
    assert set(planned.elsewhere) == {SHAPES[4], SHAPES[5]}
    assert {task.shape for task in plan(OP, lines, table, H200, Options()).tasks} == set(SHAPES[3:8])


def test_a_blank_fp8_is_that_of_the_device_that_tunes(tmp_path: Path) -> None:
    """Each kind of device reads a list or a table as its own, also one of another machine."""
    op = op_named("a8w8_blockscale")
    listed, tuned = tmp_path / "list.csv", tmp_path / "table.csv"
    listed.write_text("M,N,K,dtype\n1,1280,8192,\n1,1280,8192,fp8\n2,1280,8192,torch.float8_e4m3fn\n")
    tuned.write_text("gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\ngfx950,256,1,1280,8192,ck,1,0,2,k,1,1,0\n")
    for device, fp8 in ((Device("gfx942", 304), "fp8_e4m3fnuz"), (Device("gfx950", 256), "fp8_e4m3fn"), (H200, "fp8_e4m3fn")):
        assert [line.shape.dtype for line in requested(op, listed).on(op, device)] == [fp8, "fp8_e4m3fn"]
        assert [line.shape.dtype for line in requested(op, tuned).on(op, device)] == [fp8]
        given = Shape("a8w8_blockscale", 1, 64, 64, "fp8_e4m3fn", "bf16", scale="block")
        assert [line.shape for line in requested(op, [given]).on(op, device)] == [given]


def test_lines_that_are_not_shapes_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other shapes of the file remain; a warning names the lines and the reason, once."""
    path = tmp_path / "in.csv"
    path.write_text("M,N,K,dtype\n1,1280,8192,bf16\n1,1280,8192,bf17\n2,1280,8192,bf17\nx,1280,8192,\n64,1280,8192,\n")

    found = requested(OP, path)

    assert found.shapes == tuple(map(Untuned, SHAPES[:2]))
    assert [problem.line for problem in found.left_out] == [3, 4, 5]
    assert [record.getMessage().partition(": u")[0].partition(": c")[0] for record in caplog.records] == [
        f"left out: {path}:3-4", f"left out: {path}:5"
    ]  # fmt: skip


def test_shapes_come_in_with_counts_or_alone(table: Path) -> None:
    """A mapping tells how often each runs; alone each counts once.

    With --stale they are obeyed like a list that is given.
    """
    assert requested(OP, {SHAPES[0]: 61, SHAPES[1]: 3}).shapes == (Untuned(SHAPES[0], 61), Untuned(SHAPES[1], 3))
    assert requested(OP, iter(SHAPES[:2])).shapes == (Untuned(SHAPES[0]), Untuned(SHAPES[1]))
    assert requested(OP, {SHAPES[5]: 2}, table).shapes == (Untuned(SHAPES[5], 2),)
    with pytest.raises(TableError, match="--stale"):
        requested(OP, {SHAPES[0]: 1}, table.parent / "absent.csv")


def test_a_budget_is_spent_where_most_is_saved(tmp_path: Path) -> None:
    """Ordered by count x expected saving; without a budget by memory or arithmetic time."""
    listed = [Untuned(SHAPES[0]), Untuned(SHAPES[8]), Untuned(SHAPES[6], 100), Untuned(SHAPES[3])]

    costly = plan(OP, listed, tmp_path / "t.csv", H200, Options(budget=60.0)).tasks

    assert [task.shape for task in costly] == [SHAPES[6], SHAPES[0], SHAPES[3], SHAPES[8]]
    # 2 B x N x K is 20.9 MB for the first and 117 MB for the third; the second is 4.8e11
    # operations, about 2.3 GB at 206 a byte
    assert [task.shape for task in plan(OP, listed, tmp_path / "t.csv", H200, Options()).tasks] == [SHAPES[i] for i in (8, 6, 0, 3)]


@pytest.mark.parametrize("gfx", ["sm_90", "sm_999", "gfx942"])
def test_one_row_of_a_small_weight_comes_before_many_of_a_large_one(gfx: str, tmp_path: Path) -> None:
    """With equal calls, in any order of the list, on measured devices and others.

    Torch multiplies many rows in 16 bits within 1 % of the best.
    """
    small, large = ((512, 7168), (2304, 6144), (2880, 4096)), ((7168, 8192), (28672, 8192), (8192, 8192))
    listed = [Untuned(Shape("a16w16", m, n, k), 7) for weights, m in ((small, 1), (small, 2), (large, 4096)) for n, k in weights]
    device = attrs.evolve(H200, gfx=gfx, name=H200.name if gfx == "sm_90" else "")
    orders = []
    for seed in range(4):
        random.Random(seed).shuffle(listed)
        tasks = plan(OP, listed, tmp_path / "t.csv", device, Options(budget=60.0)).tasks
        orders.append([task.shape for task in tasks])
        assert [task.saving for task in tasks] == sorted((task.saving for task in tasks), reverse=True)
    assert all(order == orders[0] for order in orders)
    assert {shape.m for shape in orders[0][:6]} == {1, 2}


def test_a_shape_that_is_served_well_untuned_waits(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's choice, or the row of a padded M, leaves less to save than torch's call does.

    The choice is what a winner has to beat.
    """
    listed = [Untuned(Shape("a16w16", m, n, 4096)) for n, m in ((8192, 7), (4096, 8), (4096, 64))]

    def choose(shape: Shape, device: Device) -> Solution | None:
        assert not device.is_present  # the tuner's process does not touch it
        return Solution("skinny", "k") if shape.m == 64 else None

    chooser = with_hooks(fake_backend("skinny"), heuristic_fallback=choose)
    monkeypatch.setenv("TUNEDGEMM_FALLBACK", "skinny")

    def tasks(registry: Registry | None) -> tuple[Task, ...]:
        return plan(OP, listed, table, H200, Options(budget=60.0), registry=registry).tasks

    def order(registry: Registry | None) -> list[int]:
        return [task.shape.m for task in tasks(registry)]

    assert order(None) == [7, 64, 8] and order(fake_registry(chooser)) == [7, 8, 64]
    write_rows(table, OP, [row(Shape("a16w16", 8, 8192, 4096))])
    assert order(None) == [64, 8, 7]
    assert {task.shape.m: task.holder for task in tasks(fake_registry(chooser))} == {64: Solution("skinny", "k"), 7: None, 8: None}


@pytest.mark.parametrize("option", ["batch_invariant", "whole"])
def test_a_budget_finishes_groups(tmp_path: Path, option: str) -> None:
    """A row for any M needs all M of its group, and so does who asks for whole groups.

    They stay together.
    """
    tasks = plan(OP, LISTED, tmp_path / "t.csv", H200, Options(budget=60.0, **{option: True})).tasks

    assert [task.shape.n for task in tasks] == [7168] * 3 + [8192] * 3 + [1280] * 3


def test_batch_invariant_shapes_count_as_tuned_by_a_row_for_any_m(table: Path) -> None:
    """A pinned group is tuned, and its solution is the incumbent of --all.

    Rows of single M do not count.
    """
    write_rows(table, OP, [row(SHAPES[0]), row(attrs.evolve(SHAPES[3], m=0), "pinned")])

    planned = plan(OP, LISTED, table, H200, Options(batch_invariant=True))
    again = plan(OP, LISTED, table, H200, Options(batch_invariant=True, all=True))

    assert set(planned.skipped) == set(SHAPES[3:6])
    assert {str(task.incumbent) for task in again.tasks if task.shape.n == SHAPES[3].n} == {"turbo:pinned"}


def test_a_stale_row_makes_its_class_stale(table: Path) -> None:
    """All M of the group are tuned again, because another class may be the best."""
    classed = [row(attrs.evolve(SHAPES[3], m=m), libver=libver, bit_class="3f") for m, libver in ((0, "3"), (SHAPES[3].m, "2"))]
    write_rows(table, OP, [*classed, row(attrs.evolve(SHAPES[0], m=0), bit_class="ab")])

    planned = plan(OP, LISTED, table, H200, Options(batch_invariant=True, stale=True), {"turbo": "3"})

    assert {task.shape for task in planned.tasks} == set(SHAPES[3:6])


def test_classes_are_not_written_into_a_table_without_them(tmp_path: Path) -> None:
    """The error names the first such row and -o."""
    refuse_without_classes(tmp_path / "t.csv", OP)
    write_rows(tmp_path / "t.csv", OP, [row(SHAPES[0], bit_class="3f"), row(SHAPES[1])])

    with pytest.raises(TableError, match=r"t.csv:3: a row of no bit class.*-o"):
        refuse_without_classes(tmp_path / "t.csv", OP)


def test_groups_are_tasks_that_differ_in_m_alone() -> None:
    """Also a bias keeps them apart, as it does in a table's key; its dtype does not."""
    other = attrs.evolve(SHAPES[0], m=7, epilogue="bias", bias_dtype="fp32")
    found = groups([Task(shape) for shape in (*SHAPES, other, attrs.evolve(other, m=8, bias_dtype="bf16"))])

    assert [[task.shape.m for task in tasks] for tasks in found] == [[1, 64, 4096]] * 3 + [[7, 8]]


@pytest.mark.parametrize("text", ["", "M,N\n1,2\n", "\0"], ids=["empty", "no K", "binary"])
def test_a_file_that_is_not_a_table_is_an_error(tmp_path: Path, text: str) -> None:
    """An output that cannot take rows is refused before planning."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TableError, match=r"t\.csv"):
        plan(OP, LISTED, tmp_path / "t.csv", H200, Options())
