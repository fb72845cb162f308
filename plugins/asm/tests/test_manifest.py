"""Test manifests: both of AITER's dialects, comments and bad lines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tunedgemm_asm import manifest
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.manifest import KernelConfig, PackError, inside, parse

BF16, I8, F4 = ABIS["aiter-bf16gemm"], ABIS["aiter-i8gemm"], ABIS["aiter-f4gemm"]
HEAD = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
GOOD = "good,good.co,1,96,64,3,1,1,64,1\n"

AITER = Path(__file__).parents[4] / "shared" / "aiter" / "manifests"


def test_the_columns_of_bf16_kernels() -> None:
    """Every column of bf16 manifests sets its field."""
    listed = parse(HEAD + GOOD, "m.csv", BF16)

    assert listed.kernels == (KernelConfig("good", "good.co", "aiter-bf16gemm", 96, 64, 3, True, True, 64, True, ("bf16", "fp32")),)
    assert not listed.refused and not listed.remarks


@pytest.mark.parametrize(
    "header", ["tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name", "tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name"]
)
def test_the_columns_of_other_kernels(header: str) -> None:
    """Other spellings and orders of columns are read; missing columns use the layout's values."""
    (kernel,) = parse(f"{header}\n128,512,1,1,k,k.co\n", "m.csv", F4).kernels
    assert kernel == KernelConfig("k", "k.co", "aiter-f4gemm", 128, 512, 0, True, True, 256, False, ("bf16",))
    (kernel,) = parse(f"{header}\n128,256,0,1,k,k.co\n", "m.csv", I8).kernels
    assert (kernel.sub_k, kernel.splits, kernel.bias) == (128, False, True)


def test_comments_blank_lines_and_spaces_are_ignored() -> None:
    """Comments, blank lines and spaces are ignored, and line numbers are kept."""
    text = (
        "\ufeff".encode().decode("utf-8-sig")
        + "# kernels\n/* not\nyet */\n"
        + HEAD
        + "\n  good , good.co,1,96,64,3,1,1,64,1 // slow\n; off\n"
    )
    listed = parse(text + "bad,bad.co,1,0,64,3,1,1,64,1\n", "m.csv", BF16)

    assert [kernel.name for kernel in listed.kernels] == ["good"]
    assert listed.refused["bad"].startswith("m.csv line 8: column tilem:")


def test_a_file_without_lines_has_no_kernels() -> None:
    """A header alone gives no kernels."""
    assert parse(HEAD.strip(), "m.csv", BF16).kernels == ()


def test_a_wrong_line_costs_only_its_kernel(failing: Any) -> None:
    """A bad line is refused with file, line and column, and other lines are used."""

    def check(line: str, reason: str) -> None:
        listed = parse(HEAD + f"{line}\n" + GOOD, "m.csv", BF16)

        assert [kernel.name for kernel in listed.kernels] == ["good"]
        (name, told), *others = listed.refused.items()
        assert not others and name == line.split(",", maxsplit=1)[0] and told.startswith("m.csv line 2: ") and reason in told

    assert not failing(
        check,
        [
            ("k,k.co,1,12x,64,0,1,0,64,1", "column tilem: '12x' is not a number from 1 to 4096"),
            ("k,k.co,1,96,0,0,1,0,64,1", "column tilen: '0' is not a number from 1 to 4096"),
            ("k,k.co,1,99999999999999999999,64,0,1,0,64,1", "column tilem"),
            ("k,k.co,1,-96,64,0,1,0,64,1", "column tilem: '-96'"),
            ("k,k.co,1,²,64,0,1,0,64,1", "column tilem"),
            ("k,k.co,1,96,,0,1,0,64,1", "column tilen: ''"),
            ("k,k.co,2,96,64,0,1,0,64,1", "column tn: '2'; expected 1"),
            ("k,k.co,1,96,64,0,2,0,64,1", "column bpreshuffle: '2' is not a number from 0 to 1"),
            ("k,k.co,1,96,64,0,1,yes,64,1", "column splitk: 'yes'"),
            ("k,k.co,1,96,64,0,1,1,0,1", "column subk: '0'"),
            ("k,../k.co,1,96,64,0,1,0,64,1", "column co_name: '../k.co' is outside the pack's folder"),
            ("k,/etc/k.co,1,96,64,0,1,0,64,1", "column co_name: '/etc/k.co' is outside"),
            ("k,a/../../k.co,1,96,64,0,1,0,64,1", "is outside"),
            ("k,..\\k.co,1,96,64,0,1,0,64,1", "is not a relative path"),
            ("k,C:k.co,1,96,64,0,1,0,64,1", "is not a relative path"),
            ("k,.,1,96,64,0,1,0,64,1", "is outside"),
            ("k,,1,96,64,0,1,0,64,1", "is not a relative path"),
            ("k k,k.co,1,96,64,0,1,0,64,1", "column knl_name: invalid symbol 'k k'"),
            ("k,k.co,1,96,64,0,1,0,64", "expected 10 cells (got 9)"),
            ("k,k.co,1,96,64,0,1,0,64,1,1", "expected 10 cells (got 11)"),
        ],
    )


@pytest.mark.parametrize("line", ["k" * 200_000, '"k,k.co,1,96,64,0,1,0,64,1'], ids=["a long cell", "a quote without its second"])
def test_a_line_that_is_not_csv_costs_only_itself(line: str) -> None:
    """An unparsable line is refused, and other lines are used."""
    listed = parse(HEAD + f"{line}\n" + GOOD, "m.csv", BF16)

    assert [kernel.name for kernel in listed.kernels] == ["good"]
    (told,) = listed.refused.values()
    assert told.startswith("m.csv line 2: ") and ("field larger than field limit" in told or "expected 10 cells (got 1)" in told)


def test_a_kernel_listed_twice_is_refused_as_a_whole() -> None:
    """A kernel listed twice is refused."""
    listed = parse(HEAD + GOOD + "twice,a.co,1,96,64,0,1,0,64,1\ntwice,b.co,1,32,64,0,1,0,64,1\n", "m.csv", BF16)

    assert [kernel.name for kernel in listed.kernels] == ["good"]
    assert listed.refused == {"twice": "m.csv: listed 2 times, in lines 3, 4"}


def test_outputs_may_be_fewer_than_the_layouts() -> None:
    """The column `outputs` narrows the dtypes."""
    text = HEAD.strip() + ",outputs\na,a.co,1,96,64,0,1,0,64,1,bf16\nb,b.co,1,96,64,0,1,0,64,1,fp16\nc,c.co,1,96,64,0,1,0,64,1,\n"
    listed = parse(text, "m.csv", BF16)

    assert {kernel.name: kernel.outputs for kernel in listed.kernels} == {"a": ("bf16",), "c": ("bf16", "fp32")}
    assert "column outputs: unsupported 'fp16'; aiter-bf16gemm has bf16 fp32" in listed.refused["b"]


def test_an_unknown_column_is_noted_and_unused() -> None:
    """An unknown column is a remark."""
    listed = parse(HEAD.strip() + ",cluster\n" + GOOD.strip() + ",4\n", "m.csv", BF16)

    assert len(listed.kernels) == 1 and listed.remarks == ("m.csv: unknown columns: cluster",)


def test_a_manifest_without_a_header_is_refused(failing: Any) -> None:
    """A bad header is refused with file and column."""

    def check(text: str, reason: str) -> None:
        with pytest.raises(PackError, match=r"m\.csv") as caught:
            parse(text, "m.csv", BF16)
        assert reason in str(caught.value)

    assert not failing(
        check,
        [
            ("", "m.csv: empty"),
            ("# nothing\n", "m.csv: empty"),
            ("knl_name,tileM,tileN\n", "m.csv line 1: column co_name is missing"),
            (HEAD.strip() + ",tile_m\n", "column tilem is duplicate"),
            ("k" * 200_000, "m.csv line 1: field larger than field limit"),
        ],
    )


def test_any_text_is_read_or_refused() -> None:
    """Randomly changed text is read or refused in one line of bounded length."""
    draw, text = random.Random(7), HEAD + GOOD + "b,b/b.co,1,32,64,0,0,0,64,0\n"
    for _ in range(2000):
        letters = list(text)
        for _ in range(draw.choice((1, 2, 5))):
            letters[draw.randrange(len(letters))] = draw.choice('",\n\r\0 #/*;0.\\é²x')
        try:
            listed = parse("".join(letters), "m.csv", BF16)
        except PackError as error:
            told = [str(error)]
        else:
            told = [f"{name}: {reason}" for name, reason in listed.refused.items()]
            assert all(kernel.tile_m and kernel.file and ".." not in kernel.file.split("/") for kernel in listed.kernels)
        assert all("\n" not in line and len(line) < 1200 for line in told), told


@pytest.mark.parametrize("content", [b"\xff\xfe\0k", b"x" * (manifest.MAX_BYTES + 1), None], ids=["no text", "too large", "absent"])
def test_a_file_that_is_not_a_manifest_is_refused(content: bytes | None, tmp_path: Path) -> None:
    """Binary, oversized and missing files are refused."""
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PackError, match=r"m\.csv"):
        manifest.read(path, BF16)


def test_paths_stay_inside() -> None:
    """Paths inside a folder are normalized."""
    assert inside("a/./b.co", "x") == "a/b.co"
    with pytest.raises(PackError, match="x: "):
        inside("a\0b", "x")


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's manifests not found")
def test_aiters_manifests_are_read_whole() -> None:
    """Every line of AITER's eight manifests is read."""
    from tunedgemm_asm.descriptor import AITER as families

    counted = {}
    for listed, abi in families.values():
        for gfx in ("gfx942", "gfx950"):
            found = manifest.read(AITER / f"{gfx}_{listed}", ABIS[abi])
            assert not found.refused and not found.remarks
            counted[gfx, abi] = len(found.kernels)

    assert counted == {
        ("gfx942", "aiter-bf16gemm"): 22,
        ("gfx950", "aiter-bf16gemm"): 24,
        ("gfx942", "aiter-i8gemm"): 9,
        ("gfx950", "aiter-i8gemm"): 8,
        ("gfx942", "aiter-f4gemm"): 0,
        ("gfx950", "aiter-f4gemm"): 35,
        ("gfx942", "aiter-fp8gemm-blockscale"): 6,
        ("gfx950", "aiter-fp8gemm-blockscale"): 6,
    }
