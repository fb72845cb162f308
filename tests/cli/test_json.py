"""`--json` of each command: it parses, has every fact of the printed text, and is documented."""

import json
import re
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.text.printable import printable

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,libtype,solidx,splitK,us,kernelName,err_ratio,libver,owner"
LINE = "gfx942,304,{m},1280,8192,False,bf16,bf16,{libtype},3,4,{us},{kernel},0.01,9.1,ann"
#: Clears a terminal, reverses a line, and leaves ASCII.
HOSTILE = "k\x1b[2J\u202e\x7f\u00e9"


@pytest.fixture
def files(tmp_path):
    """Write two tables that differ in each way, with a broken line, and a list of shapes."""
    rows = {
        "a": [
            (16, "torch", 5.0, "mm"),
            (32, "asm", 4.0, HOSTILE),
            (48, "asm", 3.0, "same"),
            (64, "asm", 2.0, "gone"),
            (80, "asm", 1.0, "slow"),
        ],
        "b": [
            (16, "torch", 5.0, "mm"),
            (32, "asm", 4.0, "other"),
            (48, "asm", 3.0, "same"),
            (96, "asm", 2.0, "new"),
            (80, "asm", 2.0, "slow"),
        ],
    }
    for name, listed in rows.items():
        lines = [LINE.format(m=m, libtype=libtype, us=us, kernel=kernel) for m, libtype, us, kernel in listed]
        (tmp_path / f"{name}.csv").write_text("\n".join([HEAD, *lines, LINE.format(m="banana", libtype="asm", us=1, kernel="k"), ""]))
    head = "M,N,K,bias,dtype,outdtype,count,layer"
    (tmp_path / "u.csv").write_text(f"{head}\n16,1280,8192,False,bf16,bf16,30,o_proj\n24,1280,8192,False,bf16,bf16,7,o_proj\n7,x,,,,,,\n")
    return {name: str(tmp_path / f"{name}.csv") for name in "abu"}


@pytest.fixture
def both(capsys):
    """Return a function that runs a command as text and as JSON: both outputs, and the common exit code."""

    def run(command, **words):
        parts = [word.format(**words) for word in command.split()]
        code = main(parts)
        text = capsys.readouterr().out
        assert main([*parts, "--json"]) == code
        out = capsys.readouterr().out
        assert out.isascii() and printable(out) == out
        return text, json.loads(out), code

    return run


def test_table_show(both, files):
    """Each row has all of its columns, and the faults of other lines follow."""
    text, document, _ = both("table show {a}", **files)
    assert (document["schema"], document["version"], document["op"]) == ("tunedgemm.table.show", 1, "a16w16")
    assert document["file"] == files["a"] and len(document["rows"]) == 5
    row = document["rows"][1]
    assert row["solution"] == {
        "text": f"asm:{HOSTILE} splitK=4", "libtype": "asm", "kernel_name": HOSTILE, "split_k": 4, "solidx": 3, "extra": {},
    }  # fmt: skip
    assert (row["gfx"], row["cu_num"], row["device"], row["us"], row["err_ratio"], row["libver"]) == ("gfx942", 304, "", 4.0, 0.01, "9.1")
    assert (row["shape"]["m"], row["shape"]["n"], row["shape"]["k"], row["line"], row["valid"]) == (32, 1280, 8192, 3, True)
    assert row["source"] == files["a"] and row["extra"] == {"owner": "ann"}
    assert row["tflops"] == pytest.approx(2 * 32 * 1280 * 8192 / 4.0 / 1e6)
    assert document["problems"] == [line.removeprefix("problem: ") for line in text.splitlines() if line.startswith("problem: ")] != []


def test_table_diff(both, files):
    """Each kind of difference has its rows, and their numbers are those of the last printed line."""
    text, document, code = both("table diff {a} {b}", **files)
    assert code == 1 and document["schema"] == "tunedgemm.table.diff" and document["files"] == [files["a"], files["b"]]
    counts = [document["equal"], *(len(document[name]) for name in ("winners", "times", "only_first", "only_second"))]
    assert counts == [2, 1, 1, 1, 1] == list(map(int, re.findall(r"(\d+) (?:equal|other|only)", text.splitlines()[-1])))
    (winner,), (time,) = document["winners"], document["times"]
    assert (winner["first"]["solution"]["kernel_name"], winner["second"]["solution"]["kernel_name"]) == (HOSTILE, "other")
    assert (time["first"]["us"], time["second"]["us"]) == (1.0, 2.0)
    assert [document[name][0]["shape"]["m"] for name in ("only_first", "only_second")] == [64, 96]
    assert both("table diff {a} {a}", **files)[2] == 0


def test_explain(both, files):
    """What runs, what was passed over with the reasons, and what becomes of a row."""
    text, document, _ = both("explain {a}:3", **files)
    assert document["schema"] == "tunedgemm.explain" and document["shape"]["m"] == 32
    assert document["device"]["gfx"] == "gfx942" and document["refused"] == "" and document["tuned"] is False
    assert document["runs"]["solution"]["text"] in text and document["runs"]["why"] in text
    (passed,) = [offer for offer in document["passed_over"] if offer["solution"]["kernel_name"] == HOSTILE]
    assert (passed["origin"], passed["us"], passed["libver"]) == ("table", 4.0, "9.1")
    assert passed["row"] == {"source": files["a"], "line": 3, "m": 32} and passed["reason"]
    assert f"not asm:{printable(HOSTILE)} splitK=4: {passed['reason']} ({passed['why'].replace(HOSTILE, printable(HOSTILE))})" in text
    assert document["row"]["line"] == 3 and document["row"]["verdict"] in text

    text, document, _ = both("explain 16,1280,8192 --table {a} --device gfx942:304", **files)
    assert document["runs"]["row"]["line"] == 2 and document["tuned"] is True and document["row"] is None
    assert document["certain"] is True


def test_coverage(both, files):
    """Shares, groups, each shape, what to tune next and the command for it."""
    command = "coverage {u} --device gfx942:304 --table {a} --by layer --min-exact 90"
    text, document, code = both(command, **files)
    assert code == 1 and document["schema"] == "tunedgemm.coverage" and document["files"] == [files["u"]]
    assert document["calls"] == 37 == sum(shape["calls"] for shape in document["shapes"])
    exact = document["served_by"]["exact"]
    assert (exact["shapes"], exact["calls"]) == (1, 30) and exact["shares"]["calls"] == pytest.approx(30 / 37)
    assert f"exact {100 * 30 / 37:.1f} % of calls" in text
    assert document["by"] == "layer" and [group["calls"] for group in document["groups"]] == [37]
    by_m = {shape["shape"]["m"]: shape for shape in document["shapes"]}
    assert (by_m[16]["how"], by_m[16]["us"], by_m[16]["row_m"], by_m[16]["layer"]) == ("exact", 5.0, 16, "o_proj")
    assert by_m[24]["passed_over"][0]["reason"] and by_m[24]["regret"] is None
    (following,) = document["next"]
    assert following["m"] == [24] and following["name"] == "o_proj" and following["layer"]["n"] == 1280
    assert document["commands"] and all(line in text for line in document["commands"])
    assert len(document["problems"]) == 1 and document["problems"][0] in text
    assert all(rows["reason"] for rows in document["unused_rows"]) and all(note in text for note in document["notes"])


def test_plugins(both, fake_plugins):
    """Usable and refused backends, a failed load with its reason, and what is not installed."""
    text, document, _ = both("plugins -v")
    assert document["schema"] == "tunedgemm.plugins" and document["device"]["gfx"].startswith("cpu-")
    backends = {backend["libtype"]: backend for backend in document["backends"]}
    assert backends["torch"]["usable"] is True and backends["torch"]["reasons"] == [] and "a16w16" in backends["torch"]["ops"]
    broken = backends["fake_unimportable"]
    assert broken["usable"] is False and "cannot be imported" in broken["reasons"][0] and broken["ops"] == []
    for backend in document["backends"]:
        facts = [
            backend["distribution"],
            backend["version"],
            backend["library"],
            *backend["ops"],
            *backend["details"],
            *backend["problems"],
        ]
        assert all(" ".join(fact.split()) in " ".join(text.split()) for fact in facts + backend["reasons"])
    assert all(missing["install"] in text for missing in document["not_installed"])


def test_details_of_a_backend(both, monkeypatch):
    """With -v the library's version and the backend's own lines are in both outputs; without it in none."""
    mine = with_hooks(fake_backend("mine"), details=lambda: ["found libmine.so", "4 kernels"], library_version=lambda: "7.5")
    registry = fake_registry(mine)
    monkeypatch.setattr("tunedgemm.backends.registry.Registry", lambda: registry)
    text, document, _ = both("plugins -v")
    assert document["backends"][0]["details"] == ["found libmine.so", "4 kernels"] and document["backends"][0]["library"] == "7.5"
    assert "mine: found libmine.so\nmine: 4 kernels\n" in text and " 1 7.5 " in text
    text, document, _ = both("plugins")
    assert document["backends"][0]["details"] == [] and "libmine" not in text


def test_every_field_is_documented(both, files, fake_plugins):
    """The page has a section for each document, with its version and each field."""
    page = PAGE.read_text()
    commands = ["table show {a}", "table diff {a} {b}", "table check {a}", "explain {a}:3", "coverage {u} --table {a}", "plugins"]
    for command in (*commands, "plugins --matrix", "ab echo 1 --b X=1 --turns 8"):
        _, document, _ = both(command, **files)
        name = document["schema"]
        section = re.search(rf"^## {re.escape(name)}, version {document['version']}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section, name
        listed = document["rows"] if name.endswith("matrix") else []
        fields = {*document, *(field for row in listed[:1] for field in row)} - {"schema", "version"}
        undocumented = [field for field in fields if f"`{field}`" not in section[1]]
        assert undocumented == [], name


def test_an_error_prints_no_document(files, capsys):
    """A usage error is one line on standard error, exit code 2."""
    assert main(["table", "show", "no-such-file.csv", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
