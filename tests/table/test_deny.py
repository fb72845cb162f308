"""Deny lists: a denied kernel is neither served nor tuned, and the next offer serves."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.analysis.doctor.tables import tables
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.deny import Denial, DenyList, add_denial, deny_paths, read_denials, user_list
from tunedgemm.table.lookup import Table
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.open_device import OpenDevice
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Options

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 16, 64, 128)
MI300 = Device("gfx942", 304)
FAST = Solution("turbo", "fast")


def denied(denial: Denial, shape: Shape = SHAPE, solution: Solution = FAST, device: Device = MI300, version: str = "3.8.1") -> bool:
    found = DenyList((denial,)).against(shape, device, lambda libtype: version)
    return found is not None and bool(found(solution))


@pytest.mark.parametrize(
    ("fields", "is_denied"),
    [
        ({}, True),
        ({"libtype": "turbo"}, True),
        ({"libtype": "other"}, False),
        ({"libtype": "turbo", "kernel": "fast"}, True),
        ({"kernel": "fas"}, False),
        ({"op": "*"}, True),
        ({"op": "a8w8"}, False),
        ({"gfx": "gfx942", "cu_num": "304"}, True),
        ({"gfx": "gfx950"}, False),
        ({"cu_num": "80"}, False),
        ({"libver": "3.8"}, True),
        ({"libver": "3.9"}, False),
        ({"libver": "3"}, True),
        ({"libver": "3.8.10"}, False),
        ({"split_k": "0"}, True),
        ({"split_k": "2"}, False),
        ({"gfx": "GFX942"}, True),
        ({"fields": (("M", "016"),)}, True),
        ({"fields": (("M", "16"), ("dtype", "bf16"), ("bias", "0"), ("outdtype", "torch.BFLOAT16"))}, True),
        ({"fields": (("M", "17"),)}, False),
        ({"fields": (("dtype", "fp16"),)}, False),
    ],
)
def test_an_entry_denies_what_its_cells_name(fields: dict, is_denied: bool) -> None:
    """Empty cells are any value; dtypes and switches match in every spelling."""
    assert denied(Denial(**fields)) is is_denied


def test_torch_is_never_denied(tmp_path: Path) -> None:
    """An entry that names torch is a fault, and one for every backend leaves torch out."""
    assert not denied(Denial(), solution=Solution("torch", "native"))
    (tmp_path / "d.csv").write_text("op,libtype,reason\n,torch,no\n*,*,all\na16w17,,\n")
    entries, problems = read_denials(tmp_path / "d.csv")
    assert [(entry.op, entry.libtype) for entry in entries] == [("*", "")]
    assert [problem.line for problem in problems] == [2, 4] and "must be another than torch" in str(problems[0])


def test_a_bias_that_is_added_afterwards() -> None:
    """A kernel's name denies it with an added bias, too; the name with the add denies that alone."""
    added = Solution("turbo", "fast+add")
    assert denied(Denial(kernel="fast"), solution=added) and denied(Denial(kernel="fast+add"), solution=added)
    assert not denied(Denial(kernel="fast+add"))


def test_lines_that_name_nothing_and_that_are_cut(tmp_path: Path) -> None:
    """A reason alone denies nothing, and the lines before one that is cut off count."""
    (tmp_path / "d.csv").write_text("op,libtype,kernelName,reason\n,,,hello\n,turbo,k,r\n,other")
    entries, problems = read_denials(tmp_path / "d.csv")
    assert [entry.kernel for entry in entries] == ["k"] and sorted(problem.line for problem in problems) == [2, 4]


def test_aiters_list_denies_all_but_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER's file has shapes alone: its variable is read, and its shapes go to torch."""
    (tmp_path / "a.csv").write_text(
        "# traps\nM,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n16,64,128,False,torch.bfloat16,torch.bfloat16,False,False\n"
    )
    monkeypatch.setenv("AITER_GEMM_UNSUPPORTED_CSV", str(tmp_path / "a.csv"))
    (entry,) = DenyList.load().entries
    assert denied(entry) and not denied(entry, attrs.evolve(SHAPE, m=8)) and not denied(entry, attrs.evolve(SHAPE, epilogue="bias"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", "the file is empty"), ("op,Q\na16w16,3\n", "a16w16 has no column 'Q'"), ("op,q\n*,3\n", "no op has a column 'q'")],
)
def test_an_unusable_list_is_named_and_serving_goes_on(tmp_path, monkeypatch, caplog, text: str, fault: str) -> None:
    """A bad line or file denies nothing, and one warning names it."""
    (tmp_path / "d.csv").write_text(text)
    monkeypatch.setenv("TUNEDGEMM_DENY", str(tmp_path / "d.csv"))
    assert DenyList.load().entries == () and fault in caplog.text


def test_a_named_list_that_is_missing_is_named(tmp_path, monkeypatch, caplog) -> None:
    """A variable's file must exist; the user's own need not."""
    monkeypatch.setenv("TUNEDGEMM_DENY", str(tmp_path / "none.csv"))
    DenyList.load()
    assert "none.csv: no such file" in caplog.text and user_list() not in deny_paths()


def dispatcher(*kernels: str) -> Dispatcher:
    here = current_device()
    rows = [
        Row(gfx=here.gfx, cu_num=here.cu_num, device=here.name, shape=SHAPE, us=1.0 + place, solution=Solution("turbo", name))
        for place, name in enumerate(kernels)
    ]
    turbo = with_hooks(fake_backend("turbo", solutions=kernels), library_version=lambda device: "3.8.1")
    return Dispatcher(OP, fake_registry(turbo), settings=Settings(untuned=()), table=Table(OP, [rows]))


def test_the_next_row_serves_and_the_explanation_names_the_entry() -> None:
    """A call of a denied kernel is served by the next row, then torch, after the lists are read again."""
    made = dispatcher("fast", "slow")
    assert made.explain(SHAPE).offer.solution == FAST
    add_denial(user_list(), Denial(libtype="turbo", kernel="fast", libver="3.8", reason="wrong sums", date="2026-11-29"))
    made.reload()
    x, weight = torch.randn(16, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    assert torch.equal(made.call(x, weight), made.op.reference(SHAPE, (x, weight)).bfloat16())
    explanation = made.explain(SHAPE)
    assert explanation.offer.solution.kernel_name == "slow"
    assert f"not turbo:fast: denied by {user_list()}:2: wrong sums (2026-11-29)" in str(explanation)
    add_denial(user_list(), Denial(reason="all"))
    made.reload()
    assert made.explain(SHAPE).libtype == "torch"


def test_a_denied_kernel_is_no_candidate() -> None:
    """The tuner neither times nor stores it, and says so of a backend without any other kernel."""
    add_denial(user_list(), Denial(libtype="turbo", kernel="fast"))
    add_denial(user_list(), Denial(libtype="only"))
    registry = fake_registry(fake_backend("turbo", solutions=("fast", "slow")), fake_backend("only", solutions=("one",)))
    options = Options(libtype="turbo,only")
    session = Session("a16w16", -1, options, registry)

    opened = OpenDevice(OP, options, lambda request, timeout: request.run(session), Compilers(registry=registry), {"turbo": 0, "only": 1})
    listing = opened.listed(SHAPE)
    assert list(map(str, listing.solutions)) == ["turbo:slow"] and "only: deny lists deny all of its kernels" in listing.reasons


def _add(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        add_denial(path, Denial(libtype="turbo", kernel=f"k{number}"))


def test_two_processes_write_one_list(tmp_path: Path) -> None:
    """No entry is lost, and none is written twice."""
    processes = [multiprocessing.get_context("fork").Process(target=_add, args=(tmp_path / "d.csv", first)) for first in (0, 5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(int(entry.kernel[1:]) for entry in read_denials(tmp_path / "d.csv")[0]) == list(range(15))


def test_the_command_adds_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`table deny` adds an entry that a process reads, and lists those in force."""
    assert main(["table", "deny"]) == 0 and "nothing is denied" in capsys.readouterr().out
    words = ["table", "deny", "--libtype", "triton", "--kernel", "fast", "--set", "M=16", "--reason", "wrong"]
    assert main(words) == 0 and "added: triton:fast for a16w16 with M=16" in capsys.readouterr().out
    assert main(words) == 0 and "already has this entry" in capsys.readouterr().out
    assert main(["table", "deny"]) == 0 and "triton:fast for a16w16 with M=16: wrong (" in capsys.readouterr().out
    assert main([*words, "-o", str(tmp_path / "other.csv")]) == 0 and "TUNEDGEMM_DENY" in capsys.readouterr().out
    user_list().write_text(user_list().read_text() + "a16w16,torch\n")
    assert main(["table", "deny"]) == 1 and "denies nothing: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--libtype", "torch", "--reason", "x"], "must be another than torch"),
        (["--kernel", "fast", "--reason", "x"], "add --libtype"),
        (["--libtype", "trition", "--reason", "x"], "did you mean triton?"),
        (["--set", "M=16", "--set", "M=32", "--reason", "x"], "M is given twice"),
        (["--gfx", "gfx942"], "--reason: is empty"),
        (["--libtype", "triton"], "--reason: is empty"),
        (["--set", "M", "--reason", "x"], "must be COLUMN=TEXT"),
        (["--set", "Q=1", "--reason", "x"], "has no column 'Q'"),
    ],
)
def test_the_command_refuses(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be meant is an error, and no list is written."""
    assert main(["table", "deny", *words]) == 2 and fault in capsys.readouterr().err and not user_list().exists()


def test_an_unknown_op_is_an_error() -> None:
    """An entry names an op that exists."""
    with pytest.raises(UserError, match="a16w17"):
        Denial(op="a16w17")


def test_checks_of_a_table_name_the_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`table check` notes the rows whose kernel is denied, and `doctor` the lists."""
    here = current_device()
    row = Row(gfx=here.gfx, cu_num=here.cu_num, device=here.name, shape=SHAPE, us=1.0, solution=Solution("torch", "native"))
    write_rows(tmp_path / "t.csv", OP, [row, attrs.evolve(row, shape=attrs.evolve(SHAPE, m=32), solution=Solution("skinny", "rows"))])
    add_denial(user_list(), Denial(libtype="skinny", reason="traps"))
    main(["table", "check", str(tmp_path / "t.csv")])
    assert "one row is a miss here, in line 3: skinny: denied by" in capsys.readouterr().out
    section = tables(Registry(), here)
    assert [fact.more for fact in section.facts if fact.name == "deny list"] == [{"entries": 1}]
