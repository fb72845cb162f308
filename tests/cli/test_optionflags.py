"""Flags of backend options: in the help of ``tune``, checked, passed to workers and part of a run's
identity."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm import cli
from tunedgemm.backends.backend import Backend
from tunedgemm.cli.optionflags import add_options, option_variables
from tunedgemm.errors import UserError
from tunedgemm.plugin import Option
from tunedgemm.testing.fakes import fake_backend, fake_registry

SPACE = Option("--mine-space", "TUNEDGEMM_MINE_SPACE", "how much to list, up to 100 %", ("small", "full"))
VARIABLE = "TUNEDGEMM_FAKE_SPACE"


def backend(libtype: str, *options: Option) -> Backend:
    return fake_backend(libtype, options=options)


def parser_of(*backends: Backend) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    assert add_options(parser, registry=fake_registry(*backends)) == []
    return parser


def test_a_flag_holds_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, the variable has the last typed value; before and after, its old value."""
    parser = parser_of(backend("mine", SPACE))
    monkeypatch.delenv(SPACE.variable, raising=False)
    with option_variables(parser.parse_args(["--mine-space", "small", "--mine-space", "full"])):
        assert SPACE.value() == "full"
    assert SPACE.variable not in os.environ

    monkeypatch.setenv(SPACE.variable, "full")
    with option_variables(parser.parse_args(["--mine-space", "small"])):
        assert SPACE.value() == "small"
    assert SPACE.value() == "full"
    with option_variables(parser.parse_args([])):
        assert SPACE.value() == "full", "a flag that is not typed says nothing"


def test_a_kind_converts_the_text() -> None:
    """A text without choices becomes the value that its function returns; a mistake is the function's own."""

    def kind(text: str) -> str:
        if not text.endswith(".json"):
            raise UserError(f"{text}: no JSON file")
        return f"/folder/{text}"

    parser = parser_of(backend("mine", Option("--mine-file", "TUNEDGEMM_MINE_FILE", "a file", kind=kind)))
    assert parser.parse_args(["--mine-file", "a.json"]).variables == {"TUNEDGEMM_MINE_FILE": "/folder/a.json"}
    with pytest.raises(UserError, match=r"a\.txt: no JSON file"):
        parser.parse_args(["--mine-file", "a.txt"])


@pytest.mark.parametrize("answer", [7, None, SystemExit(0), GeneratorExit()])
def test_a_kind_that_breaks_its_promise_is_an_error(answer: object) -> None:
    """Whatever a plugin's function raises or returns, the command ends with its flag in one line."""

    def kind(text: str) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    parser = parser_of(backend("mine", Option("--mine-file", "TUNEDGEMM_MINE_FILE", "a file", kind=kind)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"--mine-file 'a': its kind\(\) "):
        parser.parse_args(["--mine-file", "a"])


def test_backends_that_state_the_same_share_a_flag() -> None:
    """One flag in one group, which names them all; the help names the variable and the default."""
    text = " ".join(parser_of(backend("mine", SPACE), backend("minetile", SPACE)).format_help().split())
    group = "backends mine, minetile (fake-mine, fake-minetile): --mine-space {small,full}"
    assert f"{group} how much to list, up to 100 %; default: TUNEDGEMM_MINE_SPACE, else small" in text


def test_a_flag_in_use_is_left_out() -> None:
    """A command's own flag wins, then the backend with the higher rank;
    the loser is named with a remedy."""
    other = attrs.evolve(SPACE, choices=("none", "all"))
    core = Option("--batch-invariant", "TUNEDGEMM_BATCH_INVARIANT", "another meaning")
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-invariant", action="store_true")

    space, invariant = sorted(
        add_options(parser, registry=fake_registry(backend("yours", other, core), backend("mine", SPACE))), reverse=True
    )
    found = parser.parse_args(["--batch-invariant", "--mine-space", "full"])

    assert (found.batch_invariant, found.variables) == (True, {"TUNEDGEMM_MINE_SPACE": "full"})
    of = "of backend yours (fake-yours): left out:"
    assert space.startswith(f"flag --mine-space {of} backend mine (fake-mine) has one of that name; set TUNEDGEMM_MINE_SPACE")
    assert invariant.startswith(f"flag --batch-invariant {of} tunedgemm itself has one of that name")


class TestThirdParty:
    """The option of a plugin that the core has never heard of."""

    def test_the_help_of_tune_has_it(self, fake_plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """In a group that is named by its plugin."""
        with pytest.raises(SystemExit):
            cli.main(["tune", "--help"])
        assert "backend fake (fake-plugin): --fake-space {small,full} how much to list;" in " ".join(capsys.readouterr().out.split())

    def test_a_flag_in_use_is_named(self, fake_plugins: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """On standard error, and the command works without it."""
        monkeypatch.setattr("tunedgemm.cli.optionflags.add_options", lambda *_: ["flag --x-y of backend x: left out"])
        with pytest.raises(SystemExit) as end:
            cli.main(["tune", "--help"])
        assert (end.value.code, capsys.readouterr().err) == (0, "tunedgemm: flag --x-y of backend x: left out\n")

    def test_a_wrong_value_is_a_usage_error(self, fake_plugins: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """One line names the valid values."""
        assert cli.main(["tune", "--fake-space", "huge"]) == 2
        error = capsys.readouterr().err
        assert "argument --fake-space: invalid choice: 'huge' (choose from" in error and "full" in error and error.count("\n") == 1

    @pytest.mark.parametrize("words", [["--version"], ["plugins", "--help"], ["table", "--help"], ["--help"]])
    def test_other_commands_load_no_plugin_for_it(self, fake_plugins: Path, child: Callable[..., str], words: list[str]) -> None:
        """Only ``tune`` asks backends for their options."""
        source = f"import sys\nfrom tunedgemm import cli\ntry:\n    cli.main({words})\nfinally:\n    print('fake_plugin' in sys.modules)"
        assert child(f"import contextlib\nwith contextlib.suppress(SystemExit):\n    exec({source!r})", fake_plugins).endswith("False")

    @pytest.mark.slow
    def test_the_workers_list_follows_the_option(self, fake_plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A solution of the full space reaches the workers' list,
        and the flag's value ends with the command."""
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        timed, full = run_of(tmp_path / "full.csv", "--fake-space", "full")
        assert timed == {("linear", 0), ("product", 1), ("product", 2)}
        assert VARIABLE not in os.environ
        timed, small = run_of(tmp_path / "small.csv", "--fake-space", "small")
        assert timed == {("linear", 0), ("product", 1)}
        assert full == {**small, VARIABLE: "full"}, "a run in another space is another run; the default is no part of what it is"


def run_of(table: Path, *words: str) -> tuple[set[tuple[str, int]], dict[str, str]]:
    """Return the solutions of the libtype fake that ``tunedgemm tune`` timed, and the run's
    identity from its trial log."""
    (table.parent / "in.csv").write_text("M,N,K\n4,64,64\n")
    files = ["-i", str(table.parent / "in.csv"), "-o", str(table)]
    assert cli.main(["tune", *files, "--libtype", "fake", "--device", "cpu", "--iters", "5", "--warmup", "1", *words]) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in table.with_suffix(".trials.jsonl").read_text().splitlines()]
    found = [line["solution"] for line in lines if line["kind"] == "trial"]
    (identity,) = [line["identity"] for line in lines if line["kind"] == "run"]
    return {(solution["kernel_name"], solution["split_k"]) for solution in found if solution["libtype"] == "fake"}, identity
