"""Where tables lie, and which of them rank above which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.table import folders
from tunedgemm.table.folders import home_folder, is_table_name, named_file, table_layers, tuned_path, untuned_path

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
    """Without a variable the user's table ranks above the models', and those above the shipped one.

    Files of other ops are left out.
    """
    assert names(table_layers(OP)) == BELOW
    assert names(table_layers(OP, [Path("mine.csv")])) == [("instance", ["mine.csv"]), *BELOW]


def test_a_variable_replaces_the_layers_below(monkeypatch):
    """A set variable replaces the user's and the shipped tables; its files are one layer."""
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", os.pathsep.join(["/a/x.csv", " /b/y.csv", ""]))
    assert names(table_layers(OP)) == [("environment", ["x.csv", "y.csv"])]
    assert tuned_path(OP) == Path("/a/x.csv")


def test_the_word_default_puts_them_back(monkeypatch, faults_of):
    """``default`` anywhere, or a missing path to AITER's own default table, puts the layers below back."""

    def check(value):
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", value.replace(":", os.pathsep))
        assert names(table_layers(OP)) == [("environment", ["x.csv"]), *BELOW]
        assert tuned_path(OP) == Path("/a/x.csv")

    assert not faults_of(check, ["/a/x.csv:default", "default:/a/x.csv", f"/a/x.csv:/opt/none/aiter/configs/{NAME}"])


def test_aiters_default_path_is_used_if_it_exists(tmp_path, monkeypatch):
    """AITER's default table is read like any file where it exists; one of another name is just missing."""
    table = tmp_path / "aiter" / "configs" / NAME
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table.with_name("other.csv")))
    assert names(table_layers(OP)) == [("environment", ["other.csv"])]
    table.parent.mkdir(parents=True)
    table.write_text("")
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table))
    assert names(table_layers(OP)) == [("environment", [NAME])]


def test_default_places(tmp_path, monkeypatch, faults_of):
    """A variable that names no file leaves the default layers and output."""

    def check(value):
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", value)
        assert names(table_layers(OP)) == BELOW
        assert tuned_path(OP) == tmp_path / "home" / NAME
        assert untuned_path(OP) == tmp_path / "home" / "bf16_untuned_gemm.csv"

    assert not faults_of(check, ["", "default", os.pathsep])


def test_a_bare_name_finds_a_shipped_file(shipped, tmp_path, monkeypatch):
    """A bare name is a file here, else a shipped one; a path is only itself."""
    monkeypatch.chdir(tmp_path)
    model = "zeta_bf16_tuned_gemm.csv"
    assert named_file(model) == shipped / folders.MODELS / model
    assert named_file(f"./{model}") == Path(model)
    assert named_file("nowhere.csv") == Path("nowhere.csv")
    (tmp_path / model).write_text("")
    assert named_file(model) == Path(model)


def test_a_bare_name_finds_a_shipped_model(shipped, tmp_path, monkeypatch):
    """A bare name is a folder here, else a shipped model; otherwise the error lists what is shipped."""
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large"):
        (shipped / folders.MODEL_FOLDERS / name).mkdir(parents=True)
        (shipped / folders.MODEL_FOLDERS / name / "config.json").write_text("{}")
    assert folders.named_model("small") == shipped / folders.MODEL_FOLDERS / "small"
    assert folders.named_model("./small") == Path("small")
    with pytest.raises(UserError, match="medium: no such model folder; shipped: large, small"):
        folders.named_model("medium")
    (tmp_path / "small").mkdir()
    assert folders.named_model("small") == Path("small")


def test_a_name_is_of_one_op(faults_of):
    """The longest name of an op's file that is there as whole words tells the op."""

    def check(file, op):
        assert [name for name, each in ops().items() if is_table_name(file, each)] == [op] * bool(op)

    assert not faults_of(
        check,
        [
            ("a8w8_blockscale_tuned_gemm_ds_v3.csv", "a8w8_blockscale"),
            ("a8w8_blockscale_bpreshuffle_tuned_gemm_dsv3.csv", "a8w8_blockscale_bpreshuffle"),
            ("dsv3_a8w8_bpreshuffle_tuned_gemm.csv", "a8w8_bpreshuffle"),
            ("a8w8_blockscale_tuned_fmoe_ds_v3.csv", "fmoe"),
            ("a8w8_blockscale_untuned_fmoe_ds_v3.csv", "fmoe"),
            ("a8w8_tuned_batched_gemm.csv", "batched_a8w8"),
            ("a8w8_tuned_gemm.csv", "a8w8"),
            ("fp8a8w8_tuned_gemm.csv", ""),
            ("a8w8_tuned_gemm2.csv", ""),
            ("llama70B_untuned_gemm.csv", ""),
        ],
    )
