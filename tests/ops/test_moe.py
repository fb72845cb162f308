"""moe: activations, routing, and the reference of the fused mixture of experts."""

import math

import attrs
import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops import moe, op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats import mxfp4, scales
from tunedgemm.ops.moe_options import parse_options
from tunedgemm.ops.moe_words import BLOCK_ROWS
from tunedgemm.testing.listed import listed

OP = op_named("fmoe")
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def example(**fields):
    """The first example of the op whose fields are these."""
    return next(
        shape for shape in OP.examples if shape.m and all(dict(shape.extra).get(k, getattr(shape, k, None)) == v for k, v in fields.items())
    )


class TestActivations:
    """The activations against their formulas."""

    GATE, UP = torch.tensor([-9.0, -1.0, 0.0, 2.0, 9.0], dtype=torch.float64), torch.tensor([3.0, -8.0, 5.0, 9.0, 0.5], dtype=torch.float64)

    def of(self, act, gated=True):
        shape = attrs.evolve(OP.examples[0], extra={**dict(OP.examples[0].extra), "act": act, "g1u1": gated})
        return moe.activated(torch.cat([self.GATE, self.UP]) if gated else self.GATE, shape).tolist()

    def test_silu(self):
        """x * sigmoid(x), times the second half where gated."""
        silu = [x / (1 + math.exp(-x)) for x in self.GATE.tolist()]
        assert self.of("silu", False) == pytest.approx(silu)
        assert self.of("silu") == pytest.approx([a * b for a, b in zip(silu, self.UP.tolist(), strict=True)])

    def test_gelu_is_exact(self):
        """x * Phi(x) by erf, not by tanh."""
        gelu = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in self.GATE.tolist()]
        assert self.of("gelu", False) == pytest.approx(gelu, abs=1e-12)
        assert self.of("gelu") == pytest.approx([a * b for a, b in zip(gelu, self.UP.tolist(), strict=True)], abs=1e-12)

    def test_swiglu(self):
        """Both halves are cut off at 7, the slope is 1.702 and the second half has 1 added."""
        wanted = []
        for gate, up in zip(self.GATE.tolist(), self.UP.tolist(), strict=True):
            cut = min(gate, 7.0)
            wanted.append(cut / (1 + math.exp(-1.702 * cut)) * (max(-7.0, min(up, 7.0)) + 1))
        assert self.of("swiglu") == pytest.approx(wanted)
        with pytest.raises(OperandError, match="swiglu needs gated weights"):
            self.of("swiglu", False)

    def test_situv2(self):
        """Both halves are bent by tanh within bounds of 1, the first also by a sigmoid."""
        pairs = zip(self.GATE.tolist(), self.UP.tolist(), strict=True)
        assert self.of("situv2") == pytest.approx([math.tanh(g) / (1 + math.exp(-g)) * math.tanh(u) for g, u in pairs])
        with pytest.raises(OperandError, match="situv2 needs gated weights"):
            self.of("situv2", False)

    def test_no_activation(self):
        """The product is unchanged; of gated weights, both halves are multiplied."""
        assert self.of("no", False) == self.GATE.tolist()
        assert self.of("no") == (self.GATE * self.UP).tolist()


class TestRouting:
    """Which slots go to which experts."""

    def test_each_expert_that_is_hit(self):
        """Experts are in order with the slots that hit them; invalid ids belong to no expert."""
        ids = torch.tensor([[2, 0], [2, 5], [-1, 2]], dtype=torch.int32)
        assert [(expert, places.tolist()) for expert, places in moe.routes(ids, 4)] == [(0, [1]), (2, [0, 2, 5])]

    def test_only_local_experts_count(self):
        """Ids become those of the local experts; slots of absent ones weigh nothing and name a local one."""
        weight = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 2.0]])
        ids = torch.tensor([[1, 3], [0, 4], [4, 2]])
        mask = torch.tensor([0, 1, 0, 1, 1])
        found, local = moe.local_routing(weight, ids, mask, None, 3)
        assert found.tolist() == [[0.75, 0.25], [0.0, 0.5], [1.0, 0.0]]
        assert local.dtype == torch.int32
        assert local[found > 0].tolist() == [0, 1, 2, 2]
        assert 0 <= int(local.min()) <= int(local.max()) < 3

    def test_only_local_tokens_count(self):
        """Slots of tokens beyond the local ones weigh nothing, whatever they hold."""
        weight, ids = torch.ones(3, 2), torch.tensor([[0, 1], [1, 0], [99, -7]])
        found, local = moe.local_routing(weight, ids, None, torch.tensor([1], dtype=torch.int32), 2)
        assert found.tolist() == [[1, 1], [0, 0], [0, 0]]
        assert local[:1].tolist() == [[0, 1]]
        assert 0 <= int(local.min()) <= int(local.max()) < 2

    def test_a_mask_of_more_experts_than_there_are(self):
        """An expert beyond the weights is absent."""
        found, local = moe.local_routing(torch.ones(1, 3), torch.tensor([[0, 1, 2]]), torch.ones(3), None, 2)
        assert found.tolist() == [[1, 1, 0]]
        assert int(local.max()) < 2

    def test_ids_out_of_range(self):
        """An id of no expert gets the weight 0, although it is clamped to one that is here."""
        found, local = moe.local_routing(torch.ones(1, 3), torch.tensor([[5, -1, 1]]), None, None, 3)
        assert found.tolist() == [[0, 0, 1]]
        assert local[0, 2] == 1


def row_major(scale, weight):
    """Shuffled e8m0 scales of mxfp4 weights in order, by expert; others unchanged."""
    if not isinstance(scale, scales.ShuffledScale):
        return scale
    experts, rows, half = weight.shape
    return scales.unshuffle_scale(scale, experts * rows, half // 16).view(experts, rows, -1)


def by_hand(shape, operands):
    """The mixture, one token, one expert at a time, from the definitions of the formats."""
    hidden, w1, w2, weight, ids, w1_scale, w2_scale, a1_scale, _, bias1, bias2 = (*operands, *[None] * 6)[:11]
    options = parse_options(str(dict(shape.extra).get("options", "")))
    w1_scale, w2_scale = row_major(w1_scale, w1), row_major(w2_scale, w2)
    kind, q_dtype = shape["q_type"], shape["q_dtype_a"]

    def wide(weights, scale, expert):
        if shape["q_dtype_w"] == "fp4x2":
            return mxfp4.dequant_fp4(weights.view(torch.uint8)[expert].view(weights.dtype), scale[expert], torch.float64)
        one = weights[expert].double()
        if kind == "per_1x32":
            return one * scale[expert].double().repeat_interleave(32, 1)
        if kind in BLOCK_ROWS:
            rows, cols = one.shape
            return one * scale[expert].double().repeat_interleave(BLOCK_ROWS[kind], 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        return one if kind == "No" else one * scale[expert].double().reshape(-1, 1)

    def narrow(x, top=None):
        """One row, quantised and back."""
        if q_dtype in ("bf16", "fp16"):
            return x.double()
        if q_dtype == "fp4x2":
            return mxfp4.dequant_fp4(*mxfp4.per_1x32_f4_quant(x.float()[None]), torch.float64)[0]
        limit = 127.0 if q_dtype == "int8" else torch.finfo(getattr(torch, "float8_" + q_dtype[4:])).max
        parts = []
        for part in x.float().split({"per_1x32": 32, **dict.fromkeys(BLOCK_ROWS, 128)}.get(kind, len(x))):
            scale = (part.abs().max() if top is None else top) / limit
            scale = 2.0 ** torch.ceil(torch.log2(scale)) if kind == "per_1x32" else scale
            q = part / scale
            q = q.round() if q_dtype == "int8" else q.to(getattr(torch, "float8_" + q_dtype[4:]))
            parts.append(q.double() * scale.double())
        return torch.cat(parts)

    def given(t):
        """A token's hidden states that come quantised."""
        if q_dtype == "fp4x2":
            return mxfp4.dequant_fp4(hidden.view(torch.uint8)[t : t + 1], a1_scale[t : t + 1], torch.float64)[0]
        return hidden[t].double() * a1_scale[t].double().repeat_interleave(128)[: shape.n]

    def act(h, bias):
        if "gate_mode" in dict(shape.extra):
            block = 1 if shape.layout == "row" else 16
            h = torch.cat([h[i * block : (i + 1) * block] for first in (0, 1) for i in range(first, len(h) // block, 2)])
        h = h if bias is None else h + bias.double()
        gate, up = (h[: shape.k], h[shape.k :]) if shape["g1u1"] else (h, 1.0)
        if options.swiglu_limit:
            gate, up = gate.clamp(max=options.swiglu_limit), up.clamp(-options.swiglu_limit, options.swiglu_limit)
        if shape["act"] == "swiglu":
            gate = gate.clamp(max=7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
        if shape["act"] == "situv2":
            bend, stretch = options.beta, options.linear_beta
            return bend * torch.tanh(gate / bend) * torch.sigmoid(gate) * stretch * torch.tanh(up / stretch)
        if shape["act"] == "no":
            return gate * up
        return (gate * torch.sigmoid(gate) if shape["act"] == "silu" else gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))) * up

    tensor_wide, slots = kind == "per_Tensor", [(t, j) for t in range(shape.m) for j in range(shape["topk"])]
    top = hidden.float().abs().max() if tensor_wide else None
    rows = [given(t) if options.quantised else narrow(hidden[t], top) for t in range(shape.m)]
    middle = {}
    for t, j in slots:
        h = wide(w1, w1_scale, int(ids[t, j])) @ rows[t]
        bias = None if bias1 is None else bias1[int(ids[t, j])]
        middle[t, j] = act(h * weight[t, j].double() if shape["doweight_stage1"] else h, bias)
    top = torch.stack(list(middle.values())).float().abs().max() if tensor_wide else None
    out = torch.zeros(shape.m, shape.n, dtype=torch.float64)
    for t, j in slots:
        y = wide(w2, w2_scale, int(ids[t, j])) @ narrow(middle[t, j], top)
        y = y if bias2 is None else y + bias2[int(ids[t, j])].double()
        out[t] += y if shape["doweight_stage1"] else y * weight[t, j].double()
    return out


class TestReference:
    """The exact result that everything is compared with."""

    @listed("shape", [shape for shape in OP.examples if shape.m and shape.layout == "row"], ids=str)
    def test_against_the_definition(self, shape):
        """Every kind of quantisation, activation and weighting, one token and one expert at a time.

        The two quantisations may differ for a value halfway between two steps; a fifth of the bound
        allows for that.
        """
        operands = OP.make_inputs(shape, CPU, 5)
        assert worst_row_error(OP.reference(shape, operands), by_hand(shape, operands)) <= OP.tolerance(shape).row_error / 5

    def test_ids_of_no_expert_add_nothing(self):
        """A slot beyond the experts is as one of weight 0."""
        shape = example(q_type="No", topk=2)
        operands = list(OP.make_inputs(shape, CPU, 0))
        without = list(operands)
        without[3] = operands[3].clone()
        without[3][0, 1] = 0.0
        operands[4] = operands[4].clone()
        operands[4][0, 1] = shape["expert"]
        assert torch.allclose(OP.reference(shape, tuple(operands)), OP.reference(shape, tuple(without)))

    def test_given_scales_of_activations(self):
        """With a1_scale and a2_scale values are cut off at the largest that the scale reaches."""
        shape = example(q_type="per_Tensor", q_dtype_a="fp8_e4m3fn")
        operands = OP.make_inputs(shape, CPU, 0)
        dynamic, one = OP.reference(shape, operands), torch.tensor([1.0])
        tiny = torch.tensor([1e-3])
        assert worst_row_error(OP.reference(shape, (*operands, tiny, None)), dynamic) > 0.1
        assert worst_row_error(OP.reference(shape, (*operands, None, tiny)), dynamic) > 0.1
        top = operands[0].float().abs().max() / 448
        assert torch.equal(OP.reference(shape, (*operands, top.view(1), None)), dynamic)
        assert not torch.equal(OP.reference(shape, (*operands, one, one)), dynamic)

    @listed("kind", ["per_Tensor", "per_Token", "per_1x128", "per_1x32"])
    def test_scales_of_other_experts_change_the_result(self, kind):
        """With the scales of another expert, of either weight, the result of random operands is out of bounds."""
        shape = example(q_type=kind, layout="row")
        operands = OP.make_inputs(shape, CPU, 0)
        reference = OP.reference(shape, operands)
        for place in (5, 6):
            turned = operands[place].view(torch.uint8 if kind == "per_1x32" else torch.float32).roll(1, 0).view(operands[place].dtype)
            wrong = OP.reference(shape, (*operands[:place], turned, *operands[place + 1 :]))
            assert worst_row_error(wrong, reference) > OP.tolerance(shape).row_error
