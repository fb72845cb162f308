"""Where tables lie, and which of them rank above which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tunedgemm import folders
from tunedgemm.folders import home_folder, named_file, table_layers, tuned_path, untuned_path
from tunedgemm.ops import op_named

OP = op_named("a16w16")
NAME = "bf16_tuned_gemm.csv"


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    """A stand-in for the shipped tables: two models', one of another op, and an untuned file."""
    models = tmp_path / "configs" / folders.MODELS
    models.mkdir(parents=True)
    for name in ("zeta_bf16_tuned_gemm.csv", "alpha_bf16_tuned_gemm_fp.csv", "alpha_bf16_untuned_gemm.csv", "a8w8_tuned_gemm.csv"):
        (models / name).write_text("")
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "configs")
    return tmp_path / "configs"


def names(layers):
    return [(layer.name, [path.name for path in layer.paths]) for layer in layers]


BELOW = [("user", [NAME]), ("model", ["alpha_bf16_tuned_gemm_fp.csv", "zeta_bf16_tuned_gemm.csv"]), ("shipped", [NAME])]


def test_home_folder(tmp_path, monkeypatch):
    """TUNEDGEMM_HOME names the user's folder, else it is the platform's; looking makes none."""
    assert home_folder() == tmp_path / "home"
    monkeypatch.setenv("TUNEDGEMM_HOME", "~/tables")
    assert home_folder() == Path.home() / "tables"
    monkeypatch.delenv("TUNEDGEMM_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert home_folder().name == "tunedgemm"
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "xdg").exists()


def test_layers_without_a_variable():
    """Without a variable the user's table ranks above the models', and these above the shipped one; files of others are left out."""
    assert names(table_layers(OP)) == BELOW
    assert names(table_layers(OP, [Path("mine.csv")])) == [("instance", ["mine.csv"]), *BELOW]


def test_a_variable_replaces_the_layers_below(monkeypatch):
    """A set variable replaces the user's and the shipped tables; its files are one layer."""
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", os.pathsep.join(["/a/x.csv", " /b/y.csv", ""]))
    assert names(table_layers(OP)) == [("environment", ["x.csv", "y.csv"])]
    assert tuned_path(OP) == Path("/a/x.csv")


@pytest.mark.parametrize("value", ["/a/x.csv:default", "default:/a/x.csv", f"/a/x.csv:/opt/none/aiter/configs/{NAME}"])
def test_the_word_default_puts_them_back(monkeypatch, value):
    """``default`` anywhere, or a missing path to AITER's own default table, puts the layers below back."""
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", value.replace(":", os.pathsep))
    assert names(table_layers(OP)) == [("environment", ["x.csv"]), *BELOW]
    assert tuned_path(OP) == Path("/a/x.csv")


def test_aiters_default_that_exists_is_a_file(tmp_path, monkeypatch):
    """AITER's own default table is read as any other file where it exists; one of another name is just missing."""
    table = tmp_path / "aiter" / "configs" / NAME
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table.with_name("other.csv")))
    assert names(table_layers(OP)) == [("environment", ["other.csv"])]
    table.parent.mkdir(parents=True)
    table.write_text("")
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table))
    assert names(table_layers(OP)) == [("environment", [NAME])]


@pytest.mark.parametrize("value", ["", "default", os.pathsep])
def test_default_places(tmp_path, monkeypatch, value):
    """A variable that names no file of its own leaves the layers and the output where they are by default."""
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", value)
    assert names(table_layers(OP)) == BELOW
    assert tuned_path(OP) == tmp_path / "home" / NAME
    assert untuned_path(OP) == tmp_path / "home" / "bf16_untuned_gemm.csv"


def test_a_bare_name_finds_a_shipped_file(shipped, tmp_path, monkeypatch):
    """A bare name is a file here, else a shipped one; a path is only itself."""
    monkeypatch.chdir(tmp_path)
    model = "zeta_bf16_tuned_gemm.csv"
    assert named_file(model) == shipped / folders.MODELS / model
    assert named_file(f"./{model}") == Path(model)
    assert named_file("nowhere.csv") == Path("nowhere.csv")
    (tmp_path / model).write_text("")
    assert named_file(model) == Path(model)
