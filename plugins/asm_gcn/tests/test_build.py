"""Assemble every generated kernel, and test which assembler is used."""

import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_asm import codeobject, packs
from tunedgemm_asm_gcn import build
from tunedgemm_asm_gcn.build import assembler_for, build_pack
from tunedgemm_asm_gcn.frame import ABI
from tunedgemm_asm_gcn.kernel import stream_of, text_of, vectors
from tunedgemm_asm_gcn.resources import TARGETS
from tunedgemm_asm_gcn.space import enumerate_configs
from tunedgemm_asm_gcn.stream import Op

pytestmark = pytest.mark.nightly

DISASSEMBLERS = [found for name in ("llvm-objdump", *(f"llvm-objdump-{n}" for n in range(26, 17, -1))) if (found := shutil.which(name))]


def able(gfx):
    """Return the assembler for an architecture, or skip."""
    try:
        return assembler_for(gfx)
    except PluginError as error:
        pytest.skip(str(error))


def few(gfx):
    """Return one kernel of each kind: plain or shuffled weight, with or without split-K."""
    return tuple(
        {(config.shuffled, config.split): config for config in enumerate_configs(gfx) if config.tile_m * config.tile_n <= 64 * 64}.values()
    )


@pytest.fixture(
    scope="module",
    params=[(gfx, few) for gfx in TARGETS] + [pytest.param((gfx, enumerate_configs), marks=pytest.mark.slow) for gfx in TARGETS],
    ids=lambda chosen: f"{chosen[0]}-{'all' if chosen[1] is enumerate_configs else 'few'}",
)
def built(request, tmp_path_factory):
    """Build a pack of one kernel of each kind, or of all: architecture, folder, configurations."""
    gfx, chosen = request.param
    able(gfx)
    folder, made = tmp_path_factory.mktemp(gfx), tuple(chosen(gfx))
    assert build_pack(gfx, folder, () if chosen is enumerate_configs else made).names == tuple(config.name for config in made)
    return gfx, folder, made


def test_every_kernel_is_assembled(built):
    """Each configuration has a code object with its symbol."""
    gfx, folder, made = built
    assert sorted(path.name for path in folder.glob("*.co")) == sorted(f"{config.name}.co" for config in made)
    for config in made:
        code = codeobject.read((folder / f"{config.name}.co").read_bytes())
        assert code.gfx == gfx
        assert list(code.kernels) == [config.name]


def test_registers_and_lds_are_those_of_the_plan(built):
    """The metadata matches the instructions, without spills and within LDS."""
    _, folder, made = built
    for config in made:
        seen = codeobject.read((folder / f"{config.name}.co").read_bytes()).kernels[config.name]
        stream, f = stream_of(config)
        used = {unit for item in stream if isinstance(item, Op) for reg in (*item.read, *item.written) for unit in reg.units}
        most = {file: max((index for name, index in used if name == file), default=-1) + 1 for file in "vas"}
        assert most["v"] <= vectors(f) == seen.vgprs - seen.agprs
        assert most["a"] == seen.agprs == f.accumulators.count
        assert most["s"] <= f.given.taken["s"] <= seen.sgprs
        assert seen.spills == 0
        assert seen.lds_bytes == config.lds_bytes <= config.target.lds_bytes
        assert seen.kernarg_bytes == ABI.size
        assert seen.workgroup == 256
        assert seen.wavefront == 64


def test_the_loader_takes_the_pack(built, monkeypatch):
    """The loader accepts every kernel with its parameters."""
    gfx, folder, made = built
    monkeypatch.setenv("TUNEDGEMM_ASM_PACKS", str(folder))
    packs.reload()
    catalog = packs.catalog_of(gfx)
    assert not catalog.problems
    assert {config.name for config in made} == set(catalog.kernels)
    for config in made:
        loaded = catalog.kernels[config.name]
        assert (loaded.kernel.tile_m, loaded.kernel.tile_n, loaded.kernel.shuffled) == (config.tile_m, config.tile_n, config.shuffled)
        assert (loaded.kernel.splits, loaded.kernel.bias, loaded.kernel.prefetch) == (config.split, True, config.prefetch)
        assert loaded.checked().content == (folder / f"{config.name}.co").read_bytes()


def disassembler(gfx, path):
    """Return a disassembler that knows the architecture, or skip."""
    for program in DISASSEMBLERS:
        known = subprocess.run([program, "--mcpu=help", "--triple=amdgcn", "-d", str(path)], capture_output=True, text=True)
        if f"{gfx} " in known.stderr:
            return program
    pytest.skip(f"no llvm-objdump knows {gfx}: {', '.join(DISASSEMBLERS) or 'none'}")


def test_the_code_is_the_text(built):
    """The disassembly has the mnemonics of the text in order."""
    gfx, folder, made = built
    program = disassembler(gfx, folder / f"{made[0].name}.co")
    for config in made:
        command = [program, "-d", str(folder / f"{config.name}.co")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        read = re.findall(r"^\s+([a-z]+_\w+)", printed, re.MULTILINE)
        stream, _ = stream_of(config)
        wanted = [bare(item.name) for item in stream if isinstance(item, Op)]
        assert [bare(name) for name in read[: len(wanted)]] == wanted


def bare(name):
    """Return a mnemonic without its encoding suffix."""
    return re.sub(r"_e(32|64)$", "", name)


def test_another_architecture_refuses_the_text(tmp_path):
    """The assembler for gfx942 rejects gfx950's instructions."""
    found = able("gfx942")
    config = next(enumerate_configs("gfx950"))
    with pytest.raises(PluginError):
        found.assemble({"k.co": text_of(config).replace("gfx950", "gfx942")}, tmp_path)


def test_text_is_the_same_each_time():
    """Text does not depend on hash seeds, so packs can be compared by hash."""
    imports = "from tunedgemm_asm_gcn.kernel import text_of; from tunedgemm_asm_gcn.space import enumerate_configs"
    program = f"{imports}; print(text_of(next(enumerate_configs('gfx950'))))"
    texts = [
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert texts[0].decode() == text_of(next(enumerate_configs("gfx950"))) + "\n"


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_the_named_clang_is_taken_alone(monkeypatch, tmp_path):
    """TUNEDGEMM_ASM_CLANG replaces all other assemblers, and its error is shown."""
    monkeypatch.setenv(build.CLANG, script(tmp_path / "clang", 'echo "it is broken" >&2; exit 3'))
    with pytest.raises(PluginError, match=r"no assembler for gfx942.*it is broken") as told:
        assembler_for("gfx942")
    assert "Triton" not in str(told.value)
    monkeypatch.setenv(build.CLANG, str(tmp_path / "absent"))
    with pytest.raises(PluginError, match="absent"):
        assembler_for("gfx942")


def test_a_clang_without_the_architecture_is_skipped(monkeypatch, tmp_path):
    """A clang that does not know the architecture is skipped."""
    bad = script(tmp_path / "clang", 'echo "clang version 1"; [ "$1" = --version ] || { echo "invalid target ID" >&2; exit 1; }')
    good = script(tmp_path / "clang-20", 'echo "clang version 20"; while [ $# -gt 1 ]; do shift; done; [ "$1" = --version ] || echo > "$1"')
    monkeypatch.delenv(build.CLANG, raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "_NEWEST", 20)
    found = assembler_for("gfx950")
    assert found.clang in (good, shutil.which("amdclang"))
    assert found.clang != bad


def test_without_an_assembler_the_error_names_all_tried(monkeypatch, tmp_path):
    """Without an assembler the error names the variable and all tried, and nothing is written."""
    monkeypatch.setattr(build, "_candidates", lambda: iter([script(tmp_path / "clang", "exit 1")]))
    with pytest.raises(PluginError, match="TUNEDGEMM_ASM_CLANG"):
        build_pack("gfx942", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_unknown_architectures_are_refused(tmp_path):
    """An unknown architecture is rejected with the supported ones."""
    with pytest.raises(PluginError, match="no generated kernels for 'gfx1100'; supported: gfx942, gfx950"):
        build_pack("gfx1100", tmp_path)
    assert not (tmp_path / build.MANIFEST).exists()
