"""``tunedgemm shapes``: lists, files and usage errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.device import Device
from tunedgemm.dtype import fp8_of
from tunedgemm.ops import op_named
from tunedgemm.ops.scale_order import field_of
from tunedgemm.shape import Shape
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.untuned import Untuned, read_untuned, write_untuned

A16W16 = op_named("a16w16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["shapes", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def sizes(rows: list[Untuned]) -> list[tuple[int, int, int, int]]:
    return sorted((row.shape.m, row.shape.n, row.shape.k, row.calls) for row in rows)


def test_a_file_holds_what_a_pass_runs(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file lists a rank's fused products at each M times the batch size, with counts and layers
    after AITER's columns."""
    path = tmp_path / "new" / "list.csv"

    code, out, err = run(capsys, "--model_dir", dense, "--tp", "2", "--nsets", "1,8", "--batch_size", "2", "-o", str(path))

    assert (code, out, err) == (0, f"{path}: 6 shapes of a16w16\n", "")
    assert path.read_text() == (
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count,layer\n"
        "2,128,64,False,torch.bfloat16,torch.bfloat16,False,False,3,model.layers.*.self_attn.o_proj\n"
        "16,128,64,False,torch.bfloat16,torch.bfloat16,False,False,3,model.layers.*.self_attn.o_proj\n"
        "2,128,128,False,torch.bfloat16,torch.bfloat16,False,False,6,model.layers.*.self_attn.qkv_proj model.layers.*.mlp.down_proj\n"
        "16,128,128,False,torch.bfloat16,torch.bfloat16,False,False,6,model.layers.*.self_attn.qkv_proj model.layers.*.mlp.down_proj\n"
        "2,256,128,False,torch.bfloat16,torch.bfloat16,False,False,4,model.layers.*.mlp.gate_up_proj lm_head\n"
        "16,256,128,False,torch.bfloat16,torch.bfloat16,False,False,4,model.layers.*.mlp.gate_up_proj lm_head\n"
    )


def test_a_folder_gets_a_file_for_each_op(experts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder gets a file per op under AITER's name, with or without a slash;
    only lists of shapes are replaced."""
    folder = tmp_path / "lists"
    for target in (f"{folder}/", str(folder)):
        code, out, _ = run(capsys, "--model_dir", experts, "--nsets", "1,16", "-o", target)
        assert code == 0 and sorted(path.name for path in folder.glob("*.csv")) == ["bf16_untuned_gemm.csv", "untuned_fmoe.csv"]
    assert out == f"{folder}/bf16_untuned_gemm.csv: 8 shapes of a16w16\n{folder}/untuned_fmoe.csv: 2 shapes of fmoe\n"
    assert sizes(read_untuned(folder / "untuned_fmoe.csv", op_named("fmoe"))) == [(1, 128, 256, 3), (16, 128, 256, 3)]

    (folder / "untuned_fmoe.csv").write_text("a diary\n")
    code, out, err = run(capsys, "--model_dir", experts, "--nsets", "1", "-o", str(folder))
    assert (code, out) == (2, "") and "untuned_fmoe.csv: would overwrite this file" in err
    assert len(read_untuned(folder / "bf16_untuned_gemm.csv", A16W16)) == 8


def test_captured_shapes_are_not_overwritten(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model cannot restore the shapes of a workload."""
    captured = untuned_path(A16W16)
    write_untuned(captured, A16W16, [Untuned(Shape("a16w16", 3, 64, 64), 17)])

    code, _, err = run(capsys, "--model_dir", dense, "-o", f"{captured.parent}/")

    assert code == 2 and "would overwrite the captured shapes of a16w16" in err
    assert sizes(read_untuned(captured, A16W16)) == [(3, 64, 64, 17)]


def test_several_tp_are_a_union(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several TP give the union of their shapes; a shared shape has its largest count."""
    for name, tp in (("one", "1"), ("two", "2"), ("both", "2,1,2")):
        assert run(capsys, "--model_dir", dense, "--tp", tp, "--nsets", "1", "-o", str(tmp_path / name))[0] == 0
    one, two, both = ({row[:3]: row[3] for row in sizes(read_untuned(tmp_path / n, A16W16))} for n in ("one", "two", "both"))

    assert both == {shape: max(one.get(shape, 0), two.get(shape, 0)) for shape in {**one, **two}}
    assert (one[1, 128, 128], two[1, 128, 128], both[1, 128, 128]) == (3, 6, 6)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_is_readable(experts: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows layers with op, sizes, count and TP,
    fits the width, and keeps names whole."""
    monkeypatch.setenv("COLUMNS", str(width))

    code, out, err = run(capsys, "--model_dir", experts, "--tp", "1,2", "--nsets", "1,16")

    lines = out.splitlines()
    assert code == 0 and err == "" and all(len(line) <= width for line in lines[1:])
    assert lines[0].endswith("at TP 1, 2, M = 1, 16; shapes: 10 of a16w16, 4 of fmoe")
    cells = [tuple(cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")) for line in lines if line[:1] in "│┃"]
    layers, experts_of, wrapped = ("", "fmoe 8 experts, top", 2) if width == 80 else ("model.layers.*.", "fmoe 8 experts, top 2", 0)
    assert cells[0] == ("layer", "op", "N", "K", "dtype", "TP", "a pass") and len(cells) == 1 + 9 + wrapped
    assert (f"{layers}self_attn.qkv_proj", "a16w16", "256", "128", "bf16", "1", "3") in cells
    assert (f"{layers}mlp.gate", "a16w16", "8", "128", "bf16", "1,2", "3") in cells
    assert (f"{layers}mlp.experts", experts_of, "128", "128", "bf16", "2", "3") in cells


@pytest.mark.parametrize("flags", ["", "--tp 1,8", "-v"])
def test_a_large_model_is_a_table_in_80_columns(flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Long names are whole, and each shape has one line or two."""
    monkeypatch.setenv("COLUMNS", "80")

    code, out, _ = run(capsys, "--model_dir", "dsv3", "--nsets", "1,16384", *flags.split())

    lines = out.splitlines()[1:]
    assert code == 0 and all(len(line) <= 80 for line in lines) and len(lines) <= 35
    assert {"self_attn.fused_qkv_a_proj", "a8w8_blockscale", "129280"} <= {word for line in lines for word in line.split()}


def test_verbose_lists_every_shape(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    """-v has a line for each M."""
    _, out, _ = run(capsys, "--model_dir", dense, "--nsets", "5,77", "-v")

    assert out.count("│  5 │") == out.count("│ 77 │") == 4


def test_layers_are_picked_by_pattern(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--layers takes patterns;
    a layer's number selects all of its kind, and counts follow the selection."""
    path = tmp_path / "l.csv"

    assert run(capsys, "--model_dir", dense, "--nsets", "1", "--layers", "model.layers.0.mlp.down_proj, lm_*", "-o", str(path))[0] == 0

    assert sizes(read_untuned(path, A16W16)) == [(1, 128, 256, 3), (1, 512, 128, 1)]


def test_unfused_is_product_for_product(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--no-fuse lists the products of transformers, with the vocabulary unpadded."""
    path = tmp_path / "l.csv"

    assert run(capsys, "--model_dir", dense, "--nsets", "1", "--no-fuse", "-o", str(path))[0] == 0

    assert sizes(read_untuned(path, A16W16)) == [(1, 64, 128, 6), (1, 128, 128, 6), (1, 128, 256, 3), (1, 256, 128, 6), (1, 500, 128, 1)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--indtype f16", {("fp16", "fp16", False)}),
        ("--outdtype f32", {("bf16", "fp32", False)}),
        ("--indtype fp8", {("fp8_e4m3fn", "bf16", False)}),
        ("--indtype fp8 --fp8 e4m3fnuz --outdtype f16", {("fp8_e4m3fnuz", "fp16", False)}),
        ("--all_bias", {("bf16", "bf16", False), ("bf16", "bf16", True)}),
    ],
)
def test_dtypes_and_bias_are_changed(
    dense: str, words: str, expected: set[tuple[str, str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AITER's overrides hold for every shape;
    the output dtype follows the input, and is bf16 for 8 bits."""
    path = tmp_path / "l.csv"

    assert run(capsys, "--model_dir", dense, "--nsets", "1,2", *words.split(), "-o", str(path))[0] == 0

    shapes = [row.shape for row in read_untuned(path, A16W16)]
    assert {(shape.dtype, shape.outdtype, shape.bias) for shape in shapes} == expected
    assert len(shapes) == 8 * len(expected)


def test_fp8_is_the_devices(
    dense: str, write_model: Callable[..., str], tmp_path: Path, mi300: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """On MI300 fp8 is e4m3fnuz without a flag, and a list of block scales leaves its column out."""
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    blocks = ("--model_dir", write_model("b", "llama", quantization_config=block), "--op", "a8w8_blockscale")
    path = tmp_path / "l.csv"
    for words, op, fp8, text in (
        (("--model_dir", dense, "--indtype", "fp8"), "a16w16", fp8_of(mi300.gfx), ",torch.float8_e4m3fnuz,"),
        (blocks, "a8w8_blockscale", fp8_of(mi300.gfx), "M,N,K,count,layer\n"),
        ((*blocks, "--fp8", "e4m3fn"), "a8w8_blockscale", "fp8_e4m3fn", ",torch.float8_e4m3fn,"),
    ):
        assert run(capsys, *words, "--nsets", "1", "-o", str(path))[0] == 0
        assert {row.shape.dtype for row in read_untuned(path, op_named(op))} == {fp8} and text in path.read_text()
        path.unlink()


def test_a_quantised_model_with_shuffled_weights(
    write_model: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--preshuffle lists the twin of each op that has one; --op takes the plain name for it."""
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantised = write_model("q", "llama", quantization_config=block)
    words = ("--model_dir", quantised, "--nsets", "1", "--preshuffle", "--op", "a8w8_blockscale", "-o", str(tmp_path / "l.csv"))

    code, out, _ = run(capsys, *words)

    assert code == 0 and out.endswith(": 4 shapes of a8w8_blockscale_bpreshuffle\n")
    assert {row.shape.layout for row in read_untuned(tmp_path / "l.csv", op_named("a8w8_blockscale_bpreshuffle"))} == {"aiter16x16"}


def test_an_engines_order_of_scales_is_listed(write_model: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an engine, scales by block have its order on the device, and a note says which; else row-major.

    Experts have no order.
    """
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    sizes = {"hidden_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "quantization_config": block}
    model, path = write_model("b", "mixtral", **sizes), tmp_path / "l.csv"
    words = ("--model_dir", model, "--layers", "*.qkv_proj,*.experts", "--max-num-seqs", "4", "--max-num-batched-tokens", "6")
    for engine, device, order in (("vllm", "sm_90:132", "m_major_padded"), ("sglang", "gfx942:304", "row")):
        code, out, err = run(capsys, *words, "--nsets", engine, "--device", device)
        assert code == 0 and f"a8w8_blockscale: x's scales are listed as {order} for {engine} on {device.partition(':')[0]}, " in err
        assert ("a8w8_blockscale m_major_padded" in out) == (order != "row") and "fmoe 8 experts, top 2 " in out
    for engine, orders in (("vllm", ["m_major_padded", "m_major_padded", "m_major", "m_major_padded"]), ("1,2,4,6", ["row"] * 4)):
        words = ("--model_dir", model, "--op", "a8w8_blockscale", "--layers", "*.qkv_proj", "--nsets", engine, "--device", "sm_90:132")
        more = ("--max-num-seqs", "2", "--max-num-batched-tokens", "6") if engine == "vllm" else ()
        assert run(capsys, *words, *more, "-o", str(path))[0] == 0
        assert [field_of(row.shape) for row in read_untuned(path, op_named("a8w8_blockscale"))] == orders
        path.unlink()


def test_an_engine_decides_the_activations_of_nvfp4(write_model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The device of --device decides; the table names format and group."""
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    model = write_model("nvfp4", "llama", hidden_size=256, intermediate_size=512, quantization_config=stated)
    for device, says in (("sm_90:132", "a16wn nvfp4/16"), ("sm_100:148", "")):
        code, out, err = run(capsys, "--model_dir", model, "--nsets", "vllm", "--device", device)
        assert (
            code == 0 and says in out and ("left out, as no engine's calls of ours have nvfp4" in err) == (not says) == ("a16wn" not in out)
        )


def test_notes_are_never_lost(write_model: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products without an op are named on standard error, for tables and files."""
    gptq = write_model("gptq", "llama", quantization_config={"quant_method": "gptq", "bits": 4})
    for words in ((), ("-o", str(tmp_path / "l.csv"))):
        code, _, err = run(capsys, "--model_dir", gptq, "--nsets", "1", *words)
        assert (
            code == 0
            and err.startswith("tunedgemm: note: left out, as no op has GPTQ without")
            and "qkv_proj" not in err
            and "q_proj" in err
        )


def test_aiters_variables_are_the_defaults(dense: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """GTUNE_MODEL, GTUNE_TP and GTUNE_BATCH_SIZE are defaults of their flags;
    a bad value is named."""
    for name, text in (("MODEL", dense), ("TP", "2"), ("BATCH_SIZE", "8")):
        monkeypatch.setenv(f"GTUNE_{name}", text)

    assert "at TP 2, M = 8, 32;" in run(capsys, "--nsets", "1,4")[1]
    assert "at TP 1, M = 3;" in run(capsys, "--nsets", "1", "--tp", "1", "--batch_size", "3")[1]

    monkeypatch.setenv("GTUNE_TP", "two")
    code, _, err = run(capsys)
    assert code == 2 and err == "tunedgemm: error: GTUNE_TP=two: expected whole numbers such as 1,2,4 (got 'two')\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no model is named; pass --model_dir"),
        ("--tp 2", "--tp: requires a model; name one with --model_dir"),
        ("--model_dir nobodys", "nobodys: no such model folder; shipped: dsv3, gptoss120B, llama405B, llama70B, llama70B-fp8, "),
        ("--model_dir {tmp}/absent", "absent: no such folder"),
        ("--model_dir {tmp}", "no config.json in it"),
        ("--model_dir {tmp}/unknown", "does not know the architecture 'martian'"),
        ("--model_dir {tmp}/missing", "lacks intermediate_size"),
        ("--model_dir {dense} --tp 3", "tp=3 does not divide heads of model.layers.*.self_attn.q_proj: 4"),
        ("--model_dir {dense} --tp 0", "tp must be in 1.."),
        ("--model_dir {dense} --tp 1,x", "--tp: expected whole numbers such as 1,2,4 (got '1,x')"),
        ("--model_dir {dense} --nsets 1,", "--nsets: expected whole numbers"),
        ("--model_dir {dense} --nsets 0,1", "M (--nsets times --batch_size) must be in 1..2147483647 (got 0)"),
        ("--model_dir {dense} --nsets 1,9999999999999", "(got 9999999999999)"),
        ("--model_dir {dense} --nsets 1 --batch_size 0", "the batch size must be at least 1"),
        ("--model_dir {dense} --batch_size -1", "--batch_size: expected a whole number (got '-1')"),
        ("--model_dir {dense} --op fmoe", "has no products of the op fmoe; it has products of a16w16"),
        ("--model_dir {dense} --op a99", "unknown op 'a99'"),
        ("--model_dir {dense} --layers *.nothing", "no layer matches '*.nothing'; the layers are model.layers.*.self_attn.qkv_proj,"),
        ("--model_dir {dense} --indtype f8", "--indtype: invalid choice: 'f8'"),
        ("--model_dir {dense} --fuse-shared-experts", "the model has no shared experts"),
        ("--model_dir {experts} -o {tmp}/one.csv", "one file cannot hold several ops (a16w16, fmoe); name a folder, as"),
        ("--model_dir {experts} --indtype fp8", "fmoe cannot have dtype=fp8, outdtype=bf16: column 'dtype' must be one of bf16, fp16"),
        ("--model_dir {experts} --all_bias", "--all_bias: fmoe has no such column"),
        ("--model_dir {dense} -o /proc/nobody/list.csv", "/proc/nobody"),
        ("--model_dir {dense} -o /dev/full", "/dev/full: not a regular file"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(
    arguments: str,
    message: str,
    dense: str,
    experts: str,
    write_model: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake exits with 2 and prints its reason; nothing else is printed or written."""
    write_model("unknown", "martian")
    write_model("missing", "llama", intermediate_size=None)

    code, out, err = run(capsys, *arguments.format(tmp=tmp_path, dense=dense, experts=experts).split())

    assert (code, out) == (2, "")
    assert err.startswith("tunedgemm: error: ") and err.count("\n") == 1 and message in err
    assert not list(tmp_path.glob("*.csv"))


def test_the_batch_sizes_of_an_engine(capsys, dense, tmp_path) -> None:
    """``--nsets vllm`` takes M from vLLM's batch sizes and prints vLLM's command line; limits
    without it are an error."""
    path = tmp_path / "shapes.csv"
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    code, _, err = run(capsys, "--model_dir", dense, "--nsets", "vllm", *limits, "-o", str(path))
    assert code == 0
    assert f"serve with: TUNEDGEMM_VLLM=1 vllm serve {dense} --tensor-parallel-size 1 {' '.join(limits)}" in err
    assert {line.split(",")[0] for line in path.read_text().splitlines()[1:]} == {"1", "2", "4", "8", "16", "32", "64"}

    code, _, err = run(capsys, "--model_dir", dense, *limits)
    assert code == 2 and "require an engine; add --nsets vllm or --nsets sglang" in err
