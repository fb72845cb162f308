"""fmoe: operands, columns of both stages, work and AITER's function of the fused mixture of experts."""

import csv
import enum
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.accuracy import worst_row_error
from tunedgemm.dispatch import Dispatcher
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.fmoe import ActivationType, QuantType
from tunedgemm.settings import Settings
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.weights import shuffle_weight

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

    def test_every_example_and_its_fields(self):
        """Tokens are M, model_dim N and inter_dim K; what the operands do not tell comes by name."""
        shape, operands = inputs()
        assert (shape.m, shape.n, shape.k, shape.dtype, shape.outdtype) == (4, 128, 64, "bf16", "bf16")
        assert OP.shape_of(*operands, quant_type=QuantType.per_Token) == shape
        assert dict(shape.extra) == {
            "expert": 8, "topk": 2, "act": "silu", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "q_type": "per_Token",
            "g1u1": True, "doweight_stage1": False,
        }  # fmt: skip
        other = OP.shape_of(*operands, otype=torch.float16, activation=1, quant_type=2, doweight_stage1=True)
        assert (other.outdtype, other["act"], other["doweight_stage1"]) == ("fp16", "gelu", True)

    @pytest.mark.parametrize("cells", [TENSOR, {}, BLOCK, FP4], ids=lambda cells: cells.get("q_type", "QuantType.per_Token"))
    def test_scales_in_every_form(self, cells):
        """Scales may be flattened or have a last dimension of one where nothing can be mistaken."""
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
        shape, operands = inputs()
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

    @pytest.mark.parametrize(
        ("cells", "change", "message"),
        [
            ({}, {0: lambda x: x[0]}, r"hidden must be \[T, model_dim\], w1 \[E, rows, model_dim\].*hidden \(128,\)"),
            ({}, {0: lambda x: x.float()}, "hidden must be torch.bfloat16 or torch.float16; the op quantises it itself"),
            ({}, {0: lambda x: None}, "hidden must be a tensor .got NoneType"),
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
            ({}, {3: lambda t: t.repeat(1, 5), 4: lambda t: t.repeat(1, 5)}, r"topk must be in 1..expert \(got topk=10, expert=8\)"),
            ({}, {5: lambda s: s[:, :64]}, r"w1_scale must be \[8, 128, 1\] or \[8, 128\], torch.float32 on cpu \(got \(8, 64"),
            ({}, {6: lambda s: s.half()}, "w2_scale must be .*torch.float32 on cpu .got .*float16"),
            ({}, {5: lambda s: None}, "w1_scale must be .*got None"),
            ({}, {5: lambda s: s.to("meta")}, "w1_scale must be .*on meta"),
            (BLOCK, {6: lambda s: s.repeat(1, 1, 2)}, r"per_1x128 w2_scale must be \[8, 1, 1\] or \[8, 1\]"),
            (FP4, {5: lambda s: s.float()}, "w1_scale must be .*torch.float8_e8m0fnu or torch.uint8 .*got .*float32"),
            ({**FP4, "layout": ""}, {5: lambda s: s.view(torch.uint8)[:, :4].clone()}, "in the order of quant.shuffle_scale"),
            (PLAIN, {5: lambda s: torch.ones(8)}, "w1_scale is given, but QuantType.No has no scales; name the quant_type"),
            ({}, {7: lambda s: torch.ones(1)}, "a1_scale is taken with QuantType.per_Tensor alone"),
            (TENSOR, {8: lambda s: torch.ones(2)}, r"a2_scale must be one float32 value on cpu \(got \(2,\)"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, cells, change, message):
        """Each mistake is named with what was given and what would fit."""
        shape, operands = inputs(**cells)
        operands += [None] * (9 - len(operands))
        for place, wrong in change.items():
            operands[place] = wrong(operands[place])
        with pytest.raises(OperandError, match=rf"fmoe: .*{message}"):
            OP.shape_of(*operands, **OP.fields(shape))

    def test_fields_that_do_not_fit(self):
        """Activation, kind, output dtype and number of operands are checked, too."""
        _, operands = inputs(**PLAIN, use_g1u1="0")
        with pytest.raises(OperandError, match="swiglu needs gated weights"):
            OP.shape_of(*operands, activation=ActivationType.Swiglu)
        with pytest.raises(OperandError, match="no ActivationType 3 is computed here"):
            OP.shape_of(*operands, activation=3)
        with pytest.raises(OperandError, match=r"output must be torch.bfloat16 or torch.float16 .got torch.float32"):
            OP.shape_of(*operands, otype=torch.float32)
        with pytest.raises(OperandError, match=r"5 to 9 operands, hidden, w1, .*got 3"):
            OP.shape_of(*operands[:3])
        fp4 = torch.zeros(2, 96, 24, dtype=torch.uint8), torch.zeros(2, 48, 48, dtype=torch.uint8)
        with pytest.raises(OperandError, match=r"multiples of 32 .got 48 and 96"):
            OP.shape_of(torch.zeros(4, 48, dtype=BF16), *fp4, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32), quant_type=3)


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_row_of_aiters(self):
        """The weights of AITER's rows are shuffled; what is written is what was read."""
        shape = OP.columns.parse(ROW)
        assert shape.layout == "aiter16x16"
        assert OP.columns.format(shape) == {**ROW, "layout": "", "outdtype": ""}
        assert OP.columns.format(shape_from())["layout"] == "row"

    @pytest.mark.parametrize(
        ("cells", "message"),
        [
            (
                {"act_type": "ActivationType.Situv2"},
                "'act_type' has the unknown word 'ActivationType.Situv2'; known: ActivationType.Silu, ",
            ),
            ({"act_type": ""}, "'act_type' has the unknown word ''"),
            ({"q_type": "QuantType.per_256x128"}, "'q_type' has the unknown word .*known: QuantType.No, QuantType.per_Tensor"),
            ({"q_dtype_w": "torch.int8"}, "both factors must have one dtype"),
            ({"q_dtype_w": ""}, "'q_dtype_w' must be one of"),
            ({"q_dtype_w": "torch.bfloat16"}, "'q_dtype_w' must be one of fp8_e4m3fn, fp8_e4m3fnuz, int8"),
            ({**PLAIN, "dtype": "fp16"}, "for QuantType.No that of column 'dtype'"),
            ({"dtype": "torch.float32"}, "'dtype' must be one of bf16, fp16"),
            ({"topk": "9"}, "topk must be in 1..expert"),
            ({"expert": "0"}, "topk must be in 1..expert"),
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

    @pytest.mark.parametrize("name", ["one", "one+two", ""])
    def test_what_is_written_is_read_again(self, name):
        """Written in AITER's columns, a solution of ours comes back."""
        cells = {"libtype": "torch", "kernelName": name, "splitK": "3", "us": "12.5", "err_ratio": "0.02", "tflops": "1.5"}
        written = OP.columns.write(cells)
        assert {written["err1"], written["err2"]} == {"2.0%"}
        assert set(written) <= {"libtype", *OP.columns.values}
        again = OP.columns.read(written)
        assert again == {key: text for key, text in {**cells, "err_ratio": "2.0%"}.items() if text and key != "tflops"}

    def test_errors_of_the_stages_are_kept(self):
        """Where nothing was measured anew the two errors stay as they were."""
        cells = {"kernelName": "a+b", "splitK": "0", "err_ratio": "0.121", "err1": "0.3%", "err2": "12.1%", "block_m": "32"}
        written = OP.columns.write(cells)
        assert (written["err1"], written["err2"], written["block_m"]) == ("0.3%", "12.1%", "32")

    @pytest.mark.parametrize(
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
        assert [(kin.layout, kin["act"]) for kin in OP.kin(shape)] == [
            (layout, act) for act in ("silu", "gelu", "swiglu") for layout in ("row", "aiter16x16")
        ]
        shuffled = attrs.evolve(shape, layout="aiter16x16", outdtype="fp16")
        assert [(kin.layout, kin.outdtype) for kin in OP.kin(shuffled)[:3]] == [
            ("aiter16x16", "fp16"), ("aiter16x16", "bf16"), ("row", "bf16"),
        ]  # fmt: skip

    def test_ungated_experts_have_no_swiglu(self):
        """No row of swiglu can serve weights without a gate."""
        assert {kin["act"] for kin in OP.kin(shape_from(use_g1u1="0"))} == {"silu", "gelu"}

    def test_ladder_of_tokens(self):
        """The exact number of tokens, then AITER's power of two or tier."""
        assert dict(OP.ladder(300, 128)) == {300: "exact", 512: "padded"}
        assert list(OP.ladder(200000, 128)) == [200000, 131072, 32768]


class TestWork:
    """Operations and bytes of one call."""

    def test_flops(self):
        """Both stages' products for each slot: 2 * (2 * inter + inter) * model_dim, or without a gate 2 * 2 * inter * model_dim."""
        assert OP.flops(shape_from()) == 4 * 2 * 2 * 128 * 3 * 64
        assert OP.flops(shape_from(use_g1u1="0")) == 4 * 2 * 2 * 128 * 2 * 64

    @pytest.mark.parametrize(
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


class TestInputs:
    """Random operands of a shape."""

    def test_routing(self):
        """Each token has topk distinct experts, and weights that add up to one."""
        _, operands = inputs(token="50", topk="5")
        weight, ids = operands[3:5]
        assert all(len(set(row)) == 5 and 0 <= min(row) <= max(row) < 8 for row in ids.tolist())
        assert torch.allclose(weight.sum(-1), torch.ones(50))
        assert (weight > 0).all()

    def test_some_experts_have_no_token(self):
        """Few tokens leave experts out, as in decoding."""
        _, operands = inputs(token="1")
        assert len(set(operands[4].flatten().tolist())) == 2

    def test_experts_differ(self):
        """No expert has the weights of another."""
        _, operands = inputs(**PLAIN)
        for weight in operands[1:3]:
            assert len({tuple(one.flatten().tolist()) for one in weight}) == 8

    def test_shuffled_where_the_shape_says_so(self):
        """Weights know their layout; mxfp4's scales are padded and in AITER's order."""
        shape = OP.columns.parse({**ROW, **FP4})
        operands = OP.make_inputs(shape, CPU, 0)
        assert [getattr(operand, "layout_name", "row") for operand in operands[:3]] == ["row", "aiter16x16", "aiter16x16"]
        assert [tuple(scale.shape) for scale in operands[5:]] == [(1024, 8), (1024, 8)]
        assert OP.shape_of(*operands, quant_type=3) == shape


def test_fakes_serve_meta_tensors():
    """The output's form is known without data, whatever the fields are."""
    hidden = torch.empty(4, 128, dtype=BF16, device="meta")
    out = OP.fake(hidden, hidden, hidden, otype=torch.float16, **OP.fields(shape_from()))
    assert (out.shape, out.dtype, out.device.type) == ((4, 128), torch.float16, "meta")
    assert OP.fake(hidden).dtype == BF16


class TestFunction:
    """AITER's fused_moe over a dispatcher."""

    @staticmethod
    def call(dispatcher, shape, operands, **more):
        fields = {"activation": ActivationType[shape["act"].title()], "quant_type": QuantType[shape["q_type"]]}
        scales = dict(zip(("w1_scale", "w2_scale", "a1_scale", "a2_scale"), operands[5:], strict=False))
        fused_moe = OP.entry(dispatcher)["fused_moe"]
        return fused_moe(*operands[:5], **{**fields, "doweight_stage1": shape["doweight_stage1"], **scales, **more})

    @pytest.mark.parametrize("shape", [shape for shape in OP.examples if shape.m in (5, 16, 24)], ids=str)
    def test_the_result(self, shape):
        """The mixture in the dtype of the hidden states; the launcher is kept and serves equal calls."""
        dispatcher, operands = Dispatcher(OP), OP.make_inputs(shape, CPU, 0)
        out = self.call(dispatcher, shape, operands, block_size_M=32, moe_sorting_dispatch_policy=1)
        assert out.dtype == operands[0].dtype
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error
        assert torch.equal(out, self.call(dispatcher, shape, operands))
        assert len(dispatcher.launchers) == 1

    def test_positions_are_aiters(self):
        """The first thirteen arguments in AITER's order."""
        shape, operands = inputs()
        fused_moe = OP.entry(Dispatcher(OP))["fused_moe"]
        out = fused_moe(*operands[:5], None, ActivationType.Silu, QuantType.per_Token, False, *operands[5:], None, None)
        assert worst_row_error(out, OP.reference(shape, tuple(operands))) <= OP.tolerance(shape).row_error

    def test_calls_that_differ_have_launchers_of_their_own(self):
        """What is no tensor is part of the key, too: an activation or a weighting never gets another's launcher."""
        dispatcher = Dispatcher(OP)
        shape, operands = inputs(**TENSOR)
        one = torch.tensor([0.1])
        changes = [{}, {"activation": 1}, {"doweight_stage1": True}, {"dtype": torch.float16}, {"a1_scale": one}, {"a2_scale": one}]
        outs = [self.call(dispatcher, shape, operands, **change) for change in changes]
        assert len(dispatcher.launchers) == len(changes)
        assert not any(torch.equal(outs[0].float(), out.float()) for out in outs[1:])
        assert outs[3].dtype == torch.float16

    def test_enums_of_another_library(self):
        """AITER's own members mean what ours mean."""

        class Theirs(enum.Enum):
            Gelu = 1
            per_Token = 2

        dispatcher = Dispatcher(OP)
        shape, operands = inputs(act_type="ActivationType.Gelu")
        theirs = self.call(dispatcher, shape, operands, activation=Theirs.Gelu, quant_type=Theirs.per_Token)
        assert torch.equal(theirs, self.call(dispatcher, shape, operands))

    def test_experts_of_other_ranks(self):
        """What the ranks of an expert-parallel group compute adds up to the whole."""
        shape, operands = inputs(token="9", topk="3", **PLAIN)
        hidden, w1, w2, *routing = operands
        total = torch.zeros(9, 128)
        for mask in ([1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1]):
            here = torch.tensor(mask, dtype=torch.bool)
            part = [hidden, w1[here].contiguous(), w2[here].contiguous(), *routing]
            total += self.call(Dispatcher(OP), shape, part, expert_mask=torch.tensor(mask, dtype=torch.int32)).float()
        reference = OP.reference(shape, tuple(operands))
        assert worst_row_error(total, reference) <= OP.tolerance(shape).row_error

    def test_tokens_that_are_padding(self):
        """Rows beyond the local tokens are zero, the others as they would be."""
        shape, operands = inputs(**PLAIN)
        out = self.call(Dispatcher(OP), shape, operands, num_local_tokens=torch.tensor([3], dtype=torch.int32))
        reference = OP.reference(shape, tuple(operands))
        assert worst_row_error(out[:3], reference[:3]) <= OP.tolerance(shape).row_error
        assert not out[3:].any()

    @pytest.mark.parametrize("cells", [PLAIN, TENSOR])
    def test_padding_may_hold_anything(self, cells):
        """What lies beyond the local tokens reaches neither the output nor a scale of all tokens."""
        shape, operands = inputs(**cells)
        count = torch.tensor([3], dtype=torch.int32)
        clean = [operands[0].clone(), *operands[1:]]
        clean[0][3:] = 0.0
        wanted = self.call(Dispatcher(OP), shape, clean, num_local_tokens=count)
        for rubbish in (float("nan"), float("inf"), 1e30):
            operands[0][3:] = rubbish
            assert torch.equal(self.call(Dispatcher(OP), shape, operands, num_local_tokens=count), wanted)

    @pytest.mark.parametrize(
        ("change", "arguments", "message"),
        [
            ({4: None}, {"num_local_tokens": torch.tensor([3])}, "topk_ids must be a tensor .got NoneType"),
            ({}, {"num_local_tokens": 3}, "num_local_tokens must be a tensor .got int"),
            ({}, {"num_local_tokens": torch.tensor([3, 4])}, r"num_local_tokens must be one value .got shape \(2,\)"),
            ({}, {"expert_mask": [1] * 8}, "expert_mask must be a tensor .got list"),
            ({}, {"expert_mask": torch.ones(0)}, "expert_mask must have one value"),
            ({}, {"expert_mask": torch.ones(8, device="meta")}, "expert_mask must be on cpu, as hidden .got it on meta"),
            ({3: torch.ones(4, 1)}, {"expert_mask": torch.ones(8)}, r"topk_weight and topk_ids \[T, topk\] .got .*topk_weight \(4, 1\)"),
        ],
    )  # fmt: skip
    def test_what_tells_the_local_part_is_named(self, change, arguments, message):
        """A mask or a number of tokens that does not fit is an error of the op, before anything is computed."""
        shape, operands = inputs(**PLAIN)
        for place, value in change.items():
            operands[place] = value
        with pytest.raises(OperandError, match=message):
            self.call(Dispatcher(OP), shape, operands, **arguments)

    def test_an_activation_that_is_none(self):
        """Whatever is given instead of a member is named."""
        shape, operands = inputs(**PLAIN)
        for wrong in ([1], "silu", 9):
            with pytest.raises(OperandError, match="no ActivationType"):
                self.call(Dispatcher(OP), shape, operands, activation=wrong)

    @pytest.mark.parametrize(
        ("argument", "value"),
        [("bias1", torch.zeros(8, 128)), ("bias2", torch.zeros(1)), ("hidden_pad", 64), ("intermediate_pad", 1), ("swiglu_limit", 5.0),
         ("gate_mode", "interleave"), ("shared_expert_id", 3), ("shared_w1", torch.zeros(1))],
    )  # fmt: skip
    def test_arguments_that_are_not_computed(self, argument, value):
        """What would change the result and is not computed raises and names itself; AITER's defaults do not."""
        shape, operands = inputs(**PLAIN)
        with pytest.raises(OperandError, match=f"fmoe: {argument} is not computed here"):
            self.call(Dispatcher(OP), shape, operands, **{argument: value})
        defaults = {"bias1": None, "bias2": None, "hidden_pad": 0, "swiglu_limit": None, "gate_mode": "separated", "shared_expert_id": -1}
        assert self.call(Dispatcher(OP), shape, operands, **defaults).shape == (4, 128)

    def test_mistakes(self):
        """An argument that nobody has is a TypeError, an operand that is no tensor is named."""
        shape, operands = inputs(**PLAIN)
        with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
            self.call(Dispatcher(OP), shape, operands, topk=2)
        with pytest.raises(OperandError, match=r"w1 must be a tensor .got list"):
            self.call(Dispatcher(OP), shape, [operands[0], [], *operands[2:]])
