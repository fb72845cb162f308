"""moe_entry: AITER's function of the fused mixture of experts over a dispatcher."""

import enum

import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.fmoe import ActivationType, QuantType
from tunedgemm.ops.formats.scales import shuffle_scale
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.testing.listed import listed

OP = op_named("fmoe")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
COLUMNS = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type", "use_g1u1")
ROW = ("4", "128", "64", "8", "2", "ActivationType.Silu", "bf16", "fp8_e4m3fn", "fp8_e4m3fn", "QuantType.per_Token", "1")
PLAIN = {"q_type": "QuantType.No", "q_dtype_a": "bf16", "q_dtype_w": "bf16"}
TENSOR = {"q_type": "QuantType.per_Tensor"}


def inputs(**cells):
    shape = OP.columns.parse({**dict(zip(COLUMNS, ROW, strict=True)), "layout": "row", **cells})
    return shape, list(OP.make_inputs(shape, CPU, 0))


class TestFunction:
    """AITER's fused_moe over a dispatcher."""

    @staticmethod
    def call(dispatcher, shape, operands, **more):
        fields = {name: value for name, value in OP.fields(shape).items() if name != "expert_parallel"}
        if "options" in dict(shape.extra) and "quantised" in shape["options"]:
            fields["dtype"] = BF16
        scales = dict(zip(("w1_scale", "w2_scale", "a1_scale", "a2_scale", "bias1", "bias2"), operands[5:], strict=False))
        return OP.entry(dispatcher)["fused_moe"](*operands[:5], **{**fields, **scales, **more})

    @listed(
        "shape", [shape for shape in OP.examples if shape.m in (3, 4, 5, 6, 7, 8, 16, 24) and "q_dtype_a" not in OP.fields(shape)], ids=str
    )
    def test_the_result(self, shape):
        """The mixture in the dtype of the hidden states; the launcher is kept and serves equal calls."""
        dispatcher, operands = Dispatcher(OP), OP.make_inputs(shape, CPU, 0)
        out = self.call(dispatcher, shape, operands, block_size_M=32, moe_sorting_dispatch_policy=1)
        assert out.dtype == torch_dtype(shape.outdtype)
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error
        assert torch.equal(out, self.call(dispatcher, shape, operands))
        assert len(dispatcher.launchers) == 1

    def test_positions_are_aiters(self):
        """The first thirteen arguments in AITER's order."""
        shape, operands = inputs()
        fused_moe = OP.entry(Dispatcher(OP))["fused_moe"]
        out = fused_moe(*operands[:5], None, ActivationType.Silu, QuantType.per_Token, False, *operands[5:], None, None)
        assert worst_row_error(out, OP.reference(shape, tuple(operands))) <= OP.tolerance(shape).row_error

    def test_different_calls_have_different_launchers(self):
        """Non-tensor arguments are part of the key:
        an activation or weighting never gets another's launcher."""
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
        """The results of an expert-parallel group's ranks add up to the whole."""
        shape, operands = inputs(token="9", topk="3", **PLAIN)
        hidden, w1, w2, *routing = operands
        total = torch.zeros(9, 128)
        for mask in ([1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1]):
            here = torch.tensor(mask, dtype=torch.bool)
            part = [hidden, w1[here].contiguous(), w2[here].contiguous(), *routing]
            total += self.call(Dispatcher(OP), shape, part, expert_mask=torch.tensor(mask, dtype=torch.int32)).float()
        reference = OP.reference(shape, tuple(operands))
        assert worst_row_error(total, reference) <= OP.tolerance(shape).row_error

    @listed("layout", ["row", "aiter16x16"])
    @listed("form", ["row", "shuffled", "by expert", "raw"])
    def test_scales_of_either_order_go_with_either_weight(self, layout, form):
        """mxfp4 experts are as right with shuffled scales, which need no padding here, as with row-major ones."""
        shape, operands = inputs(q_type="QuantType.per_1x32", q_dtype_a="fp4x2", q_dtype_w="fp4x2", model_dim="256", inter_dim="256")
        wanted = OP.reference(shape, tuple(operands))
        if layout != "row":
            operands[1:3] = (shuffle_weight(weight, layout) for weight in operands[1:3])
        if form != "row":
            scales = [shuffle_scale(scale.flatten(0, 1)) for scale in operands[5:7]]
            by_expert = [scale.view(8, -1, 8) for scale in scales]
            operands[5:7] = {"shuffled": scales, "by expert": by_expert, "raw": [scale.plain.clone() for scale in by_expert]}[form]
        more = {"raw": {"scale_order": "aiter32x8"}, "row": {"scale_order": "row"} if layout != "row" else {}}.get(form, {})
        out = self.call(Dispatcher(OP), shape, operands, **more)
        assert worst_row_error(out, wanted) <= OP.tolerance(shape).row_error / 2
        if more and (form, layout) != ("raw", "row"):
            with pytest.raises(OperandError, match=r"w1_scale: sizes .* fit row-major and shuffled scales; pass as_shuffled_scale"):
                self.call(Dispatcher(OP), shape, operands)

    def test_a_type_that_an_assignment_lost(self):
        """``p.data = shuffle_weight(w)`` and its like of scales are errors that name the remedy."""
        shape, operands = inputs(q_type="QuantType.per_1x32", q_dtype_a="fp4x2", q_dtype_w="fp4x2", model_dim="256", inter_dim="256")
        for place, function in ((1, shuffle_weight), (5, lambda scale: shuffle_scale(scale.flatten(0, 1)).view(scale.shape))):
            parameter = torch.nn.Parameter(operands[place].clone(), requires_grad=False)
            parameter.data = function(parameter.data)
            lost = [*operands[:place], parameter, *operands[place + 1 :]]
            with pytest.raises(OperandError, match=r"lost the type, as by parameter\.data = shuffle_(weight|scale).*torch.nn.Parameter"):
                self.call(Dispatcher(OP), shape, lost)
        parameter.data = operands[5].clone()
        out = self.call(Dispatcher(OP), shape, [*operands[:5], parameter, operands[6]])
        assert torch.equal(out, self.call(Dispatcher(OP), shape, operands))

    def test_an_order_of_scales_needs_e8m0(self):
        """Other kinds of scales have no order to state."""
        shape, operands = inputs()
        with pytest.raises(OperandError, match=r"scale_order applies to e8m0 scales, of QuantType.per_1x32 .got 'row' with per_Token"):
            self.call(Dispatcher(OP), shape, operands, scale_order="row")

    def test_fewer_local_experts_than_slots(self):
        """Ranks with two of sixteen experts, and a spare slot, add up to five experts of each token."""
        shape, operands = inputs(token="9", expert="16", topk="5", **PLAIN)
        hidden, w1, w2, weight, ids = operands
        spare = torch.full((9, 1), 16, dtype=torch.int32)
        routing = [torch.cat([weight, torch.ones(9, 1)], 1), torch.cat([ids, spare], 1)]
        total = torch.zeros(9, 128)
        for rank in range(8):
            mask = torch.tensor([first // 2 == rank for first in range(16)] + [False], dtype=torch.int32)
            here = slice(2 * rank, 2 * rank + 2)
            total += self.call(Dispatcher(OP), shape, [hidden, w1[here], w2[here], *routing], expert_mask=mask).float()
        reference = OP.reference(shape, tuple(operands))
        assert worst_row_error(total, reference) <= OP.tolerance(shape).row_error

    def test_tokens_that_are_padding(self):
        """Rows beyond the local tokens are zero, the others as they would be."""
        shape, operands = inputs(**PLAIN)
        out = self.call(Dispatcher(OP), shape, operands, num_local_tokens=torch.tensor([3], dtype=torch.int32))
        reference = OP.reference(shape, tuple(operands))
        assert worst_row_error(out[:3], reference[:3]) <= OP.tolerance(shape).row_error
        assert not out[3:].any()

    def test_padding_of_quantised_hidden_states(self):
        """Rows past the local tokens, and their scales, affect nothing."""
        shape, operands = inputs(q_type="QuantType.per_1x128", options="quantised")
        wanted = OP.reference(shape, tuple(operands))
        operands[7][3:] = float("nan")
        out = self.call(Dispatcher(OP), shape, operands, num_local_tokens=torch.tensor([3]))
        assert worst_row_error(out[:3], wanted[:3]) <= OP.tolerance(shape).row_error
        assert not out[3:].any()

    @listed("cells", [PLAIN, TENSOR])
    def test_padding_may_hold_anything(self, cells):
        """Rows past the local tokens affect neither the output nor a scale of all tokens."""
        shape, operands = inputs(**cells)
        count = torch.tensor([3], dtype=torch.int32)
        clean = [operands[0].clone(), *operands[1:]]
        clean[0][3:] = 0.0
        wanted = self.call(Dispatcher(OP), shape, clean, num_local_tokens=count)
        for rubbish in (float("nan"), float("inf"), 1e30):
            operands[0][3:] = rubbish
            assert torch.equal(self.call(Dispatcher(OP), shape, operands, num_local_tokens=count), wanted)

    @listed(
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
    def test_the_argument_for_local_experts_is_named(self, change, arguments, message):
        """A mask or a number of tokens that does not fit is an error of the op, before anything is computed."""
        shape, operands = inputs(**PLAIN)
        for place, value in change.items():
            operands[place] = value
        with pytest.raises(OperandError, match=message):
            self.call(Dispatcher(OP), shape, operands, **arguments)

    def test_an_unknown_activation(self):
        """Whatever is given instead of a member is named."""
        shape, operands = inputs(**PLAIN)
        for wrong in ([1], "silu", 9):
            with pytest.raises(OperandError, match="no ActivationType"):
                self.call(Dispatcher(OP), shape, operands, activation=wrong)

    @listed(("argument", "value"), [("shared_expert_id", 3), ("shared_w1", torch.zeros(1)), ("stage2_scatter", object())])
    def test_arguments_that_are_not_computed(self, argument, value):
        """An unsupported argument that would change the result is a named error; AITER's defaults pass."""
        shape, operands = inputs(**PLAIN)
        with pytest.raises(OperandError, match=f"fmoe: {argument} is not computed here"):
            self.call(Dispatcher(OP), shape, operands, **{argument: value})
        defaults = {"bias1": None, "bias2": None, "hidden_pad": 0, "swiglu_limit": None, "gate_mode": "separated", "splitk": 2}
        defaults["shared_expert_id"] = -1
        assert self.call(Dispatcher(OP), shape, operands, **defaults).shape == (4, 128)

    @listed(
        "arguments",
        [{"swiglu_limit": 0.5}, {"bias1": torch.ones(8, 128)}, {"bias2": torch.ones(8, 128)}],
    )
    def test_each_option_has_its_own_launcher(self, arguments):
        """An option changes the result, and no call without it gets its launcher."""
        dispatcher, (shape, operands) = Dispatcher(OP), inputs(**PLAIN)
        plain = self.call(dispatcher, shape, operands)
        assert not torch.equal(self.call(dispatcher, shape, operands, **arguments), plain)
        assert torch.equal(self.call(dispatcher, shape, operands), plain)

    def test_rows_alternate_with_scales_of_32_elements_alone(self):
        """As in AITER, gate_mode has no effect on another kind of quantisation."""
        for cells, alike in ((PLAIN, True), ({"q_type": "QuantType.per_1x32"}, False)):
            shape, operands = inputs(**cells)
            outs = [self.call(Dispatcher(OP), shape, operands, gate_mode=mode) for mode in ("separated", "interleave")]
            assert torch.equal(*outs) == alike

    def test_padding_is_accepted(self):
        """Padded sizes are computed in full: the weights' padding is zero."""
        shape, operands = inputs(**PLAIN)
        operands[1][:, :, -32:], operands[2][:, :, -16:] = 0.0, 0.0
        padded = self.call(Dispatcher(OP), shape, operands, hidden_pad=32, intermediate_pad=16)
        assert torch.equal(padded, self.call(Dispatcher(OP), shape, operands))

    @listed(
        ("change", "arguments", "message"),
        [
            ({}, {"gate_mode": "sideways"}, "gate_mode must be separated or interleave .got 'sideways'"),
            ({}, {"bias1": torch.zeros(8, 64)}, r"bias1 must be \[8, 128\] in a float dtype on cpu .got \(8, 64\)"),
            ({}, {"bias2": torch.zeros(8, 128, dtype=torch.int32)}, r"bias2 must be .*torch.int32"),
            ({0: torch.zeros(4, 128, dtype=torch.int8)}, {"dtype": BF16}, r"a1_scale of quantised hidden states must be \[4, 1\] or \[4\]"),
            ({0: torch.zeros(4, 128, dtype=torch.int8)}, {"a1_scale": torch.ones(4, 1)}, "the dtype of the output must be given"),
        ],
    )
    def test_options_that_do_not_fit(self, change, arguments, message):
        """The argument is named."""
        shape, operands = inputs()
        for place, value in change.items():
            operands[place] = value
        with pytest.raises(OperandError, match=message):
            self.call(Dispatcher(OP), shape, operands, **arguments)

    def test_mistakes(self):
        """An unknown argument is a TypeError,
        and an operand of another type than a tensor is named."""
        shape, operands = inputs(**PLAIN)
        with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
            self.call(Dispatcher(OP), shape, operands, topk=2)
        with pytest.raises(OperandError, match=r"w1 must be a tensor .got \[\]"):
            self.call(Dispatcher(OP), shape, [operands[0], [], *operands[2:]])
