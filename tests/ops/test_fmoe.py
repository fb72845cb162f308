"""fmoe: operands, columns of both stages, work and AITER's function of the fused mixture of experts."""

import csv
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.fmoe import ActivationType
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.ops.scale_order import scale_order
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.listed import listed

OP = op_named("fmoe")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
CONFIGS = Path(__file__).parents[3] / "shared" / "aiter" / "configs"
ROW = {
    "token": "4", "model_dim": "128", "inter_dim": "64", "expert": "8", "topk": "2", "act_type": "ActivationType.Silu",
    "dtype": "torch.bfloat16", "q_dtype_a": "torch.float8_e4m3fn", "q_dtype_w": "torch.float8_e4m3fn",
    "q_type": "QuantType.per_Token", "use_g1u1": "1", "doweight_stage1": "0",
}  # fmt: skip


def shape_from(**cells):
    return OP.columns.parse({**ROW, "layout": "row", **cells})


def inputs(seed=0, **cells):
    shape = shape_from(**cells)
    return shape, list(OP.make_inputs(shape, CPU, seed))


FP4 = {"q_type": "QuantType.per_1x32", "q_dtype_a": "fp4x2", "q_dtype_w": "fp4x2"}
PLAIN = {"q_type": "QuantType.No", "q_dtype_a": "bf16", "q_dtype_w": "bf16"}
BLOCK = {"q_type": "QuantType.per_1x128"}
TENSOR = {"q_type": "QuantType.per_Tensor"}


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("cells", [TENSOR, {}, BLOCK, FP4], ids=lambda cells: cells.get("q_type", "QuantType.per_Token"))
    def test_scales_in_every_form(self, cells):
        """Scales may be flattened or have a last dimension of one if that is unambiguous."""
        shape, operands = inputs(**cells)
        fields = OP.fields(shape)
        forms = {
            "per_Tensor": [(8, 1), (8, 1, 1)], "per_Token": [(8, 128)], "per_1x128": [(8, 1)], "per_1x32": [(8 * 128, 4)],
        }[shape["q_type"]]  # fmt: skip
        for form in forms:
            operands[5] = operands[5].reshape(form)
            assert OP.shape_of(*operands, **fields) == shape
            assert torch.equal(OP.reference(shape, tuple(operands)), OP.reference(shape, OP.make_inputs(shape, CPU, 0)))

    def test_bytes_are_mxfp4_too(self):
        """uint8 weights and scales are taken where two 4-bit values and an exponent fill a byte."""
        shape, operands = inputs(**FP4)
        as_bytes = [*operands[:1], *[weight.view(torch.uint8) for weight in operands[1:3]], *operands[3:5]]
        as_bytes += [scale.view(torch.uint8) for scale in operands[5:]]
        assert OP.shape_of(*as_bytes, quant_type=3) == shape
        assert torch.equal(OP.reference(shape, tuple(as_bytes)), OP.reference(shape, tuple(operands)))

    def test_routing_of_either_width(self):
        """Launchers get int32 ids; fused_moe takes int64, too."""
        _, operands = inputs()
        operands[4] = operands[4].long()
        with pytest.raises(OperandError, match="topk_ids int32"):
            OP.shape_of(*operands, quant_type=2)
        seen = []
        turbo = fake_backend(
            "turbo", ops=("fmoe",), heuristic="fake", call=lambda s, shape, *given: seen.append(given[4].dtype) or given[0]
        )
        dispatcher = Dispatcher(OP, fake_registry(turbo), settings=Settings(untuned=("turbo",)))
        OP.entry(dispatcher)["fused_moe"](*operands[:5], quant_type=2, w1_scale=operands[5], w2_scale=operands[6])
        assert seen == [torch.int32]

    @listed(
        ("cells", "change", "message"),
        [
            ({}, {0: lambda x: x[0]}, r"hidden must be \[T, model_dim\], w1 \[E, rows, model_dim\].*hidden \(128,\)"),
            ({}, {0: lambda x: x.float()}, "hidden must be torch.float8_e4m3fn or .* torch.float16 with QuantType.per_Token"),
            ({}, {0: lambda x: x.to("meta")}, "hidden is on meta, w1 on cpu"),
            ({}, {1: lambda w: w[:7]}, r"w1 must be \[E, 2 \* inter_dim or inter_dim, model_dim\].*w1 \(7, 128, 128\)"),
            ({}, {1: lambda w: w[:, :100].contiguous()}, "w1 must be"),
            ({}, {2: lambda w: w[:, :, :48].contiguous()}, "w1 must be"),
            ({}, {1: lambda w: w.to(BF16), 2: lambda w: w.to(BF16)}, "per_Token w1 and w2 must both be torch.float8_e4m3fn or"),
            ({}, {2: lambda w: w.float().to(torch.int8)}, "w1 and w2 must both be"),
            (PLAIN, {0: lambda x: x.half()}, "with QuantType.No w1 and w2 must both be torch.float16"),
            (FP4, {2: lambda w: w.view(torch.uint8)[:, :, :20].contiguous().view(w.dtype)}, "two 4-bit values are one element"),
            ({}, {1: shuffle_weight}, "w1 and w2 must lie alike .got layouts aiter16x16 and row"),
            ({}, {3: lambda t: t.half()}, r"topk_weight must be float32 and .*both \[4, topk\] on cpu .got .*float16"),
            ({}, {4: lambda t: t.float()}, "topk_ids int32"),
            ({}, {4: lambda t: t[:, :1]}, r"both \[4, topk\]"),
            ({}, {3: lambda t: t[:3], 4: lambda t: t[:3]}, r"both \[4, topk\]"),
            ({}, {3: lambda t: t[:, :0], 4: lambda t: t[:, :0]}, r"topk must be at least 1 \(got 0\)"),
            ({}, {5: lambda s: s[:, :64]}, r"w1_scale must be \[8, 128, 1\] or \[8, 128\], torch.float32 on cpu \(got \(8, 64"),
            ({}, {6: lambda s: s.half()}, "w2_scale must be .*torch.float32 on cpu .got .*float16"),
            ({}, {5: lambda s: None}, "w1_scale must be .*got None"),
            ({}, {5: lambda s: s.to("meta")}, "w1_scale must be .*on meta"),
            (BLOCK, {6: lambda s: s.repeat(1, 1, 2)}, r"per_1x128 w2_scale must be \[8, 1, 1\] or \[8, 1\]"),
            (FP4, {5: lambda s: s.float()}, "w1_scale must be .*torch.float8_e8m0fnu or torch.uint8 .*got .*float32"),
            ({**FP4, "layout": ""}, {5: lambda s: s.plain.view(torch.uint8)[:, :4].clone()}, "all scales must have one order"),
            ({**FP4, "layout": ""}, {5: lambda s: s[:512], 6: lambda s: s[:512]}, "in the order of shuffle_scale, torch.float8_e8m0fnu"),
            (PLAIN, {5: lambda s: torch.ones(8)}, "w1_scale is given, but QuantType.No has no scales; name the quant_type"),
            ({}, {7: lambda s: torch.ones(1)}, "a1_scale applies only to QuantType.per_Tensor"),
            (TENSOR, {8: lambda s: torch.ones(2)}, r"a2_scale must be one float32 value on cpu \(got \(2,\)"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, cells, change, message):
        """Each error names the given value and the valid one."""
        shape, operands = inputs(**cells)
        operands += [None] * (9 - len(operands))
        for place, wrong in change.items():
            operands[place] = wrong(operands[place])
        with pytest.raises(OperandError, match=rf"fmoe: .*{message}"):
            OP.shape_of(*operands, **OP.fields(shape))

    def test_fields_that_do_not_fit(self):
        """Activation, kind and output dtype are checked, too."""
        _, operands = inputs(**PLAIN, use_g1u1="0")
        with pytest.raises(OperandError, match="swiglu needs gated weights"):
            OP.shape_of(*operands, activation=ActivationType.Swiglu)
        with pytest.raises(OperandError, match="no ActivationType 4 is computed here"):
            OP.shape_of(*operands, activation=4)
        with pytest.raises(OperandError, match=r"output must be torch.bfloat16 or torch.float16 .got torch.float32"):
            OP.shape_of(*operands, otype=torch.float32)
        fp4 = torch.zeros(2, 96, 24, dtype=torch.uint8), torch.zeros(2, 48, 48, dtype=torch.uint8)
        with pytest.raises(OperandError, match=r"multiples of 32 .got 48 and 96"):
            OP.shape_of(torch.zeros(4, 48, dtype=BF16), *fp4, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32), quant_type=3)


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_row_of_aiters(self):
        """The weights of AITER's rows are shuffled; it is written as it was read."""
        shape = OP.columns.parse(ROW)
        assert shape.layout == "aiter16x16"
        assert OP.columns.format(shape) == {**ROW, **dict.fromkeys(OP.columns.own, "")}
        assert OP.columns.format(shape_from())["layout"] == "row"

    @listed(
        ("act", "dtypes", "kind"),
        [
            ("Silu", ("float8_e4m3fn", "float4_e2m1fn_x2"), "per_1x32"),
            ("Situv2", ("bfloat16", "float4_e2m1fn_x2"), "per_1x32"),
            ("Swiglu", ("float8_e4m3fn", "float8_e4m3fn"), "per_1x32"),
            ("Silu", ("bfloat16", "int4"), "per_1x32"),
            ("No", ("float8_e4m3fnuz", "float8_e4m3fnuz"), "per_256x128"),
            ("Gelu", ("float8_e4m3fn", "float8_e4m3fn"), "per_1024x128"),
            ("Silu", ("bfloat16", "int8"), "per_Token"),
        ],
    )
    def test_activations_of_another_dtype_than_the_weights(self, act, dtypes, kind):
        """AITER's rows of a8w4, a16w4, mxfp8 and int4 are written as they were read."""
        words = {"act_type": f"ActivationType.{act}", "q_type": f"QuantType.{kind}"}
        row = {**ROW, **words, **{f"q_dtype_{side}": f"torch.{name}" for side, name in zip("aw", dtypes, strict=True)}}
        formatted = OP.columns.format(OP.columns.parse(row))
        assert {column: formatted[column] for column in row} == row

    def test_rows_of_any_topk(self):
        """AITER's -1 of grouped experts is named: a call has at least one expert a token."""
        with pytest.raises(ShapeError, match=r"topk must be at least 1 \(got -1\); AITER's rows of grouped experts"):
            OP.columns.parse({**ROW, "topk": "-1"})
        with pytest.raises(ShapeError, match="'topk' must be a whole number"):
            OP.columns.parse({**ROW, "topk": "-2"})

    def test_options_are_columns(self):
        """The order of w1's rows and the options come back; AITER's text of the mode is read."""
        row = {**ROW, "q_type": "QuantType.per_1x32"}
        shape = OP.columns.parse({**row, "gate_mode": "GateMode.INTERLEAVE", "options": "bias2 swiglu_limit=5.5"})
        assert (shape["gate_mode"], shape["options"]) == ("interleave", "bias2 swiglu_limit=5.5")
        formatted = OP.columns.format(shape)
        assert (formatted["gate_mode"], formatted["options"]) == ("interleave", "bias2 swiglu_limit=5.5")
        assert OP.columns.parse({**ROW, "gate_mode": "GateMode.SEPARATED", "options": ""}) == OP.columns.parse(ROW)
        for cells in ({"gate_mode": "sideways"}, {"options": "bias3"}, {"options": "beta=much"}, {"options": "swiglu_limit"}):
            with pytest.raises(ShapeError, match=f"column '{next(iter(cells))}'"):
                OP.columns.parse({**ROW, **cells})

    def test_both_names_of_blocks_are_one_kind(self):
        """per_128x128 is per_1x128, as AITER looks it up."""
        assert OP.columns.parse({**ROW, "q_type": "QuantType.per_128x128"}) == OP.columns.parse({**ROW, "q_type": "QuantType.per_1x128"})

    @listed(
        ("cells", "message"),
        [
            ({"act_type": "ActivationType.Relu"}, "'act_type' has the unknown word 'ActivationType.Relu'; known: ActivationType.Silu, "),
            ({"act_type": ""}, "'act_type' is empty; known"),
            ({"q_type": "QuantType.per_2x2"}, "'q_type' has the unknown word .*known: QuantType.No, QuantType.per_Tensor"),
            ({"q_dtype_a": "torch.float4_e2m1fn_x2"}, "'q_dtype_a' must be one of fp8_e4m3fn, fp8_e4m3fnuz, int8, bf16, fp16"),
            ({**BLOCK, "q_dtype_a": "torch.int8"}, "'q_dtype_a' must be one of fp8_e4m3fn, fp8_e4m3fnuz, bf16, fp16"),
            ({"q_dtype_w": ""}, "'q_dtype_w' must be one of"),
            ({"q_dtype_w": "torch.bfloat16"}, "'q_dtype_w' must be one of fp8_e4m3fn, fp8_e4m3fnuz, int8"),
            ({**PLAIN, "dtype": "fp16"}, "'q_dtype_a' must be one of fp16"),
            ({"dtype": "torch.float32"}, "'dtype' must be one of bf16, fp16"),
            ({"topk": "0"}, "topk must be at least 1"),
            ({"expert": "0"}, "expert must be at least 1"),
            ({"token": "inf"}, "'token' must be a whole number"),
            ({"use_g1u1": "yes"}, "'use_g1u1' must be True or False"),
            ({"use_g1u1": "0", "act_type": "ActivationType.Swiglu"}, "swiglu needs gated weights"),
            ({**FP4, "inter_dim": "72"}, "multiples of 32"),
        ],
    )
    def test_bad_cells_are_named(self, cells, message):
        """A cell that is wrong is named, and closed lists are listed."""
        with pytest.raises(ShapeError, match=message):
            OP.columns.parse({**ROW, **cells})

    @pytest.mark.parametrize("first", [{}, {"kernelName1": ""}, {"kernelName1": "Null"}, {"kernelName1": "0"}])
    def test_a_second_stage_without_a_first_is_refused(self, first):
        """Rewritten, it would name two stages."""
        with pytest.raises(ShapeError, match="'kernelName2' names a second stage"):
            OP.columns.read({**first, "kernelName2": "moe_ck2", "us": "32.3"})

    def test_two_stages_are_one_solution(self):
        """Both kernels' names, the backends of both, the larger error."""
        read = OP.columns.read
        both = {"ksplit": "2", "kernelName1": "_ZN5aiter1", "err1": "0.3%", "kernelName2": "moe_ck2", "err2": "12.1%", "us": "32.3"}
        assert read(both) == {"libtype": "asm+ck", "kernelName": "_ZN5aiter1+moe_ck2", "splitK": "2", "err_ratio": "12.1%", "us": "32.3"}
        assert read({"kernelName1": "flydsl_a", "kernelName2": "flydsl_b"}) == {"libtype": "flydsl", "kernelName": "flydsl_a+flydsl_b"}
        for nothing in ({}, {"kernelName2": ""}, {"kernelName2": "Null"}, {"kernelName2": "nan"}):
            assert read({"kernelName1": "_ZN5aiter1", **nothing}) == {"libtype": "asm", "kernelName": "_ZN5aiter1"}
        assert read({"libtype": "torch", "us": "5"}) == {"libtype": "torch", "us": "5"}
        assert read({"err1": "much", "err2": "1%"})["err_ratio"] == "much"

    @listed("name", ["one", "one+two", ""])
    def test_written_rows_are_read_again(self, name):
        """Written in AITER's columns, a solution of ours comes back."""
        cells = {"libtype": "torch", "kernelName": name, "splitK": "3", "us": "12.5", "err_ratio": "0.02", "tflops": "1.5"}
        written = OP.columns.write(cells)
        assert {written["err1"], written["err2"]} == {"2.0%"}
        assert set(written) <= {"libtype", *OP.columns.values}
        again = OP.columns.read(written)
        assert again == {key: text for key, text in {**cells, "err_ratio": "2.0%"}.items() if text and key != "tflops"}

    def test_errors_of_the_stages_are_kept(self):
        """Without a new measurement the two errors are unchanged."""
        cells = {"kernelName": "a+b", "splitK": "0", "err_ratio": "0.121", "err1": "0.3%", "err2": "12.1%", "block_m": "32"}
        written = OP.columns.write(cells)
        assert (written["err1"], written["err2"], written["block_m"]) == ("0.3%", "12.1%", "32")

    @listed(
        ("name", "libtypes"),
        [
            ("tuned_fmoe.csv", {"asm+ck", "ck", "asm"}),
            ("untuned_fmoe.csv", set()),
            ("model_configs/a8w8_blockscale_tuned_fmoe_ds_v3.csv", {"asm+ck", "ck", "asm"}),
            ("model_configs/a8w8_blockscale_untuned_fmoe_ds_v3.csv", set()),
            ("model_configs/dsv3_fp4_tuned_fmoe.csv", {"flydsl", "flydsl+ck", "ck+flydsl"}),
            ("model_configs/dsv3_fp4_untuned_fmoe.csv", set()),
        ],
    )
    def test_every_row_of_aiters_tables(self, name, libtypes):
        """Each row is a shape whose key is that of the row, and its stages come back as they were."""
        path = CONFIGS / name
        if not path.exists():
            pytest.skip(f"{path} is not here")
        with path.open(newline="") as file:
            rows = [{column: (text or "").strip() for column, text in row.items()} for row in csv.DictReader(file)]
        found = set()
        for row in rows:
            formatted = OP.columns.format(OP.columns.parse({column: row[column] for column in OP.columns.key if row.get(column)}))
            assert {column: formatted[column] for column in OP.columns.key} == {column: row[column] for column in OP.columns.key}
            if "us" in row:
                told = OP.columns.read(row)
                found.add(told["libtype"])
                written = OP.columns.write({**row, **told})
                for column in ("kernelName1", "kernelName2", "ksplit", "us", "err1", "err2"):
                    assert written[column] == ("" if row[column] == "Null" else row[column])
        assert rows
        assert found == libtypes


class TestKin:
    """Which rows may serve a call."""

    def test_layouts_come_before_other_activations(self):
        """The shape, AITER's shuffled row of it, and only then rows of another activation."""
        shape = shape_from()
        assert [(kin.layout, kin["act"]) for kin in OP.equivalent_shapes(shape)] == [
            (layout, act) for act in ("silu", "gelu", "swiglu", "situv2", "no") for layout in ("row", "aiter16x16")
        ]
        shuffled = attrs.evolve(shape, layout="aiter16x16", outdtype="fp16")
        assert [(kin.layout, kin.outdtype) for kin in OP.equivalent_shapes(shuffled)[:3]] == [
            ("aiter16x16", "fp16"), ("aiter16x16", "bf16"), ("row", "bf16"),
        ]  # fmt: skip

    def test_rows_without_options_serve_calls_with_them(self):
        """AITER's key lacks biases, bounds and the order of w1's rows."""
        shape = shape_from(gate_mode="interleave", options="bias1")
        kin = OP.equivalent_shapes(shape)
        assert kin[0] == shape
        assert shape_from() in kin
        assert kin.index(shape_from()) > kin.index(attrs.evolve(shape, layout="aiter16x16"))

    def test_ungated_experts_have_no_swiglu(self):
        """No row of an activation of two halves can serve weights without a gate."""
        assert {kin["act"] for kin in OP.equivalent_shapes(shape_from(use_g1u1="0"))} == {"silu", "gelu", "no"}

    @listed(("layout", "order"), [("row", "aiter32x8"), ("", "row")])
    def test_the_order_of_scales(self, layout, order):
        """A column of mxfp4 where it is not the usual one; rows of the usual ones follow."""
        shape = shape_from(**FP4 | {"layout": layout, "scale_order": order})
        assert dict(shape.extra)["scale_order"] == order
        assert OP.columns.parse(OP.columns.format(shape)) == shape
        found = [(kin.layout, scale_order(kin)) for kin in OP.equivalent_shapes(shape) if kin["act"] == "silu"]
        assert found == [(layout or "aiter16x16", order), ("aiter16x16", "aiter32x8"), ("row", "row")]
        with pytest.raises(ShapeError, match="'scale_order' must be one of row"):
            shape_from(scale_order="aiter32x8")

    def test_expert_parallel_calls_find_rows_without_the_spare_slot(self):
        """Their own rows come first, then AITER's of one slot fewer, then those of all slots."""
        shape = shape_from(topk="9", expert="4", expert_parallel="True")
        found = [(kin["topk"], ("expert_parallel", True) in kin.extra) for kin in OP.equivalent_shapes(shape)]
        assert list(dict.fromkeys(found)) == [(9, True), (8, False), (9, False)]
        assert shape_from(topk="8", expert="4") in OP.equivalent_shapes(shape)
        assert {kin["topk"] for kin in OP.equivalent_shapes(shape_from(topk="1", expert_parallel="1"))} == {1}
        assert OP.columns.parse(OP.columns.format(shape)) == shape

    def test_padded_numbers_of_tokens(self):
        """The exact number of tokens, then AITER's power of two or tier."""
        assert dict(OP.padded_m(300, 128)) == {300: "exact", 512: "padded"}
        assert list(OP.padded_m(200000, 128)) == [200000, 131072, 32768]


class TestWork:
    """Operations and bytes of one call."""

    def test_flops(self):
        """Per slot both stages take 2 * (2 * inter + inter) * model_dim, or 2 * 2 * inter *
        model_dim ungated."""
        assert OP.flops(shape_from()) == 4 * 2 * 2 * 128 * 3 * 64
        assert OP.flops(shape_from(use_g1u1="0")) == 4 * 2 * 2 * 128 * 2 * 64

    @listed(
        ("cells", "expert"),
        [
            (PLAIN, 3 * 64 * 128 * 2),
            (TENSOR, 3 * 64 * 128 + 2 * 4),
            ({}, 3 * 64 * 128 + (128 + 128) * 4),
            (BLOCK, 3 * 64 * 128 + 2 * 4),
            (FP4, 3 * 64 * 128 // 2 + 128 * 4 + 128 * 2),
        ],
    )
    def test_bytes_of_the_experts_that_can_be_hit(self, cells, expert):
        """Weights and scales of at most topk experts a token, hidden states, output and routing once."""
        for tokens, hit in ((1, 2), (4, 8), (100, 8)):
            shape = shape_from(token=str(tokens), **cells)
            assert OP.bytes_moved(shape) == hit * expert + tokens * (2 * 128 + 2 * 128 + 2 * 8)
            assert OP.bytes_moved(attrs.evolve(shape, layout="aiter16x16")) == OP.bytes_moved(shape)
