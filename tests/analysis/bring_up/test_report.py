"""The report of the bring-up kit: without private data, complete after each check, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.analysis.bring_up import Bringing
from tunedgemm.analysis.bring_up.report import Report, page, private_words, read_report, scrubbed
from tunedgemm.errors import UserError

WORDS = ("jane.doe", "gpu-box-7", "jane")
ITEMS = [{"id": f"outputs a {number}", "check": "outputs", "libtype": "ab"[number % 2], "shape": None} for number in range(4)]
PLAN: dict[str, Any] = {
    "device": {"gfx": "gfx942", "cu_num": 304, "name": "amd-instinct-mi300x"}, "versions": {"torch": "2.13"}, "libraries": {},
    "backends": {"asm": "no: /home/jane/packs holds no pack"}, "items": ITEMS,
}  # fmt: skip
OK = {"status": "ok", "detail": "", "kernel": "k", "measures": {}}


class Answers:
    """Stands for the child: answers with the next of *answers*, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def ask(self, item: dict[str, Any], until: float) -> Any:
        """Return the next answer."""
        self.asked.append(item["id"])
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def run(path: Path, *answers: Any) -> tuple[Bringing, Answers]:
    child = Answers(*answers)
    bringing = Bringing(Report.opened(path, PLAN), child)  # type: ignore[arg-type]
    bringing.run(ITEMS, float("inf"), lambda *_: None)
    return bringing, child


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/jane/x/libhipblaslt.so.1: no function f", "<path>/libhipblaslt.so.1: no function f"),
        ("File '/srv/My/pack.tmp', line 3", "File '<path>', line 3"),
        ("No such file: '/home/Jane Doe/My Files/x.txt', './lab/plan.co'", "No such file: '<path>', '<path>/plan.co'"),
        ("['hipcc', '-I/home/jane/lab'] hipcc -L/opt/lab ../lab", "['hipcc', '-I<path>'] hipcc -L<path> <path>"),
        ("at gpu-box-7.corp.example:22 for 'x'/'y'", "at <name>:22 for 'x'/'y'"),
        ("C:\\Users\\jane\\kernel.py failed", "<path>/kernel.py failed"),
        ("~/packs and ~jane", "<path> and ~<name>"),
        ("on gpu-box-7 by jane.doe at 10.0.0.7:22, jane@corp.example", "on <name> by <name> at <address>, <address>"),
        ("https://user:secret@host/x?token=1 refused", "<address> refused"),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef at 0000:c1:00.0", "<uuid> at <bus>"),
        ("1/2 of rows, 3.5e-02/4.0, bf16->bf16, jane_kernel", "1/2 of rows, 3.5e-02/4.0, bf16->bf16, jane_kernel"),
        ("_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_32x128E", "_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_32x128E"),
    ],
)
def test_private_data_is_removed(text: str, expected: str) -> None:
    """Paths, addresses, names of user and host, and identifiers of hardware go; kernels and numbers stay."""
    assert scrubbed(text, WORDS) == expected


def test_the_file_has_no_private_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of the plan and verdicts are scrubbed, and so is the page; markup of a message is text there."""
    monkeypatch.setattr("tunedgemm.analysis.bring_up.report.private_words", lambda: WORDS)
    path = tmp_path / "r.json"
    verdict = {"status": "wrong", "detail": "at /home/jane/a <b>", "kernel": "k", "measures": {"jane": ["/tmp/x"]}}
    report = Report(path, PLAN | {"backends": {"asm": "no: <path> holds no pack"}}, words=WORDS)
    report.record(ITEMS[0], verdict, 1.0)
    report.write()
    text = path.read_text()
    assert "jane" not in text and "/home" not in text and "/tmp" not in text and '"no: <path> holds no pack"' in text
    assert "at &lt;path&gt; &lt;b&gt;" in page(read_report(path)) and "Faults: 1" in page(read_report(path))
    assert private_words() == WORDS or all(len(word) > 2 for word in private_words())


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """No item runs twice; one that the budget cuts off, or Ctrl-C, runs again."""
    path = tmp_path / "r.json"
    _, child = run(path, OK, None)
    assert child.asked == ["outputs a 0", "outputs a 1"] and read_report(path)["begun"] is None
    with pytest.raises(KeyboardInterrupt):
        run(path, OK, KeyboardInterrupt())
    assert [each["id"] for each in read_report(path)["results"]] == ["outputs a 0", "outputs a 1"]
    bringing, child = run(path, OK, OK)
    assert child.asked == ["outputs a 2", "outputs a 3"] and not bringing.failed
    assert read_report(path)["counts"] == {"ok": 4} and read_report(path)["planned"] == 4


def test_a_check_that_ended_the_machine_is_not_repeated(tmp_path: Path) -> None:
    """The item that had begun when the process was killed is a fault of the next run's report."""
    path = tmp_path / "r.json"
    Report.opened(path, PLAN).begin(ITEMS[0])
    bringing, child = run(path, OK, OK, OK)
    assert "outputs a 0" not in child.asked
    assert [(each["id"], each["status"]) for each in bringing.failed] == [("outputs a 0", "ended")]


def test_slow_compilers_come_last(tmp_path: Path) -> None:
    """After an item whose kernel did not compile in time, other backends come first."""
    _, child = run(tmp_path / "r.json", OK | {"status": "late"}, OK, OK, OK)
    assert child.asked == ["outputs a 0", "outputs a 1", "outputs a 3", "outputs a 2"]


def test_a_file_of_another_device_is_kept(tmp_path: Path) -> None:
    """Results of other versions are not mixed, and another file is not overwritten."""
    path = tmp_path / "r.json"
    run(path, OK, OK, OK, OK)
    with pytest.raises(UserError, match=r"has results of other versions \(got torch 2.13, now 2.14\); name another -o"):
        Report.opened(path, PLAN | {"versions": {"torch": "2.14"}})
    for content in (
        "{}",
        "no JSON",
        json.dumps({"schema": "tunedgemm.bring_up", "version": 2}),
        json.dumps({"schema": "tunedgemm.bring_up", "version": 1}),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=r"not a (whole )?report"):
            Report.opened(path, PLAN)
        assert path.read_text() == content
