"""AITER's functions around experts: routing, sorting, entries and the order of weights."""

from __future__ import annotations

import pytest
import torch
import tunedgemm
from tunedgemm.device import Device
from tunedgemm.errors import OperandError, UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import shuffle_weight, unshuffle_weight
from tunedgemm.ops.moe_words import ActivationType, QuantType
from tunedgemm.testing.listed import listed
from tunedgemm_aiter_names import moe, moe_entries, shuffle

OP = op_named("fmoe")
CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
KEY = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type", "use_g1u1")


def drawn(kind="No", q_dtype_w="bf16", q_dtype_a="", sizes=(6, 128, 128, 4, 2), **cells):
    """A shape and its operands."""
    words = (*map(str, sizes), "Silu", "bf16", q_dtype_a or q_dtype_w, q_dtype_w, kind, "1")
    shape = OP.columns.parse({**dict(zip(KEY, words, strict=True)), "layout": "row", **cells})
    return shape, OP.make_inputs(shape, CPU, 0)


class TestRouting:
    """fused_topk and moe_sorting."""

    @listed("renormalize", [True, False])
    def test_the_largest_values(self, renormalize):
        """Values of a softmax in order, and their experts; given tensors get them."""
        gating = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(BF16)
        ids, weights = torch.empty(8, 3, dtype=torch.int32), torch.empty(8, 3)
        found = moe.fused_topk(torch.empty(5, 8), gating, 3, renormalize, ids, weights)
        wanted = torch.softmax(gating.double(), -1).sort(-1, descending=True)
        values = wanted.values[:, :3]
        assert torch.allclose(found[0].double(), values / values.sum(-1, keepdim=True) if renormalize else values)
        assert found[1].dtype == torch.int32
        assert torch.equal(torch.softmax(gating.float(), -1).gather(1, found[1].long()), torch.softmax(gating.float(), -1).topk(3).values)
        assert found[0].data_ptr() == weights.data_ptr()
        with pytest.raises(OperandError, match=r"gating_output must be \[4, experts\] \(got \(5, 16\)\)"):
            moe.fused_topk(torch.empty(4, 8), gating, 3, True)

    @listed(("mask", "count"), [(None, None), ([1, 0, 1, 1, 0, 1], None), (None, 3), ([0, 0, 1, 1, 1, 0], 4)])
    def test_sorted_pairs(self, mask, count):
        """Blocks of one expert each, in order, of the local experts and tokens."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(5)]).to(torch.int32)
        weights = torch.rand(5, 2, generator=generator)
        expert_mask = None if mask is None else torch.tensor(mask)
        tokens = None if count is None else torch.tensor([count], dtype=torch.int32)
        pairs, values, owners, padded, buffer = moe.moe_sorting(ids, weights, 6, 16, BF16, 4, expert_mask, tokens)
        expected, experts = [], []
        for expert in range(6):
            if mask is None or mask[expert]:
                slots = [(token, slot) for token in range(count or 5) for slot in range(2) if ids[token, slot] == expert]
                blocks = -(-len(slots) // 4)
                expected += [*slots, *[(5, 2)] * (4 * blocks - len(slots))]
                experts += [sum(mask[:expert]) if mask else expert] * blocks
        assert [(int(pair) & 0xFFFFFF, int(pair) >> 24) for pair in pairs[: len(expected)]] == expected
        assert set((pairs[len(expected) :]).tolist()) <= {2 << 24 | 5}
        assert [values[i].item() for i, slot in enumerate(expected) if slot != (5, 2)] == [
            weights[slot].item() for slot in expected if slot != (5, 2)
        ]
        assert owners[: len(experts)].tolist() == experts
        assert set(owners[len(experts) :].tolist()) <= {-1}
        assert padded.tolist() == [len(expected), count or 5]
        assert (tuple(buffer.shape), buffer.dtype, bool(buffer.any())) == ((5, 16), BF16, False)
        assert len(pairs) == 10 + 6 * 4 - 2

    def test_ids_among_local_experts(self):
        """They are -1 for experts elsewhere, and unchanged without a mask."""
        ids, mask = torch.tensor([[0, 1, 5], [2, 4, 3]], dtype=torch.int32), torch.tensor([0, 1, 1, 0, 1, 0])
        assert moe.moe_sorting(ids, torch.ones(2, 3), 6, 8, BF16, 8, mask, return_local_topk_ids=True)[-1].tolist() == [
            [-1, 0, -1],
            [1, 2, -1],
        ]
        assert torch.equal(moe.moe_sorting(ids, torch.ones(2, 3), 6, 8, BF16, 8, return_local_topk_ids=True)[-1], ids)
        assert moe.get_topk_valid_mask(ids, mask).tolist() == [[0, 1, 0], [1, 1, 0]]
        with pytest.raises(UserError, match="flat and output_aux feed single kernels"):
            moe.moe_sorting(ids, torch.ones(2, 3), 6, 8, BF16, flat=True)


class TestEntries:
    """asm_moe, ck_moe_2stages and shared experts."""

    @listed(("kind", "word"), [("No", "bf16"), ("per_Token", "fp8_e4m3fn"), ("per_Token", "int8"), ("per_1x128", "fp8_e4m3fn")])
    def test_shuffled_weights(self, kind, word):
        """They are shuffled by (16, 16), in a plain tensor, too."""
        shape, (hidden, w1, w2, *routing) = drawn(kind, word)
        reference, weights = OP.reference(shape, (hidden, w1, w2, *routing)), [shuffle_weight(w) for w in (w1, w2)]
        blocks = {"block_shape": (128, 128)} if kind == "per_1x128" else {}
        for given in (weights, [w.plain for w in weights]):
            out = moe_entries.asm_moe(hidden, *given, *routing, **blocks)
            assert worst_row_error(out, reference) <= OP.tolerance(shape).row_error
        scales = dict(zip(("fc1_scale", "fc2_scale"), routing[2:], strict=False))
        out = moe_entries.ck_moe_2stages(hidden, *weights, *routing[:2], QuantType[kind], **scales)
        assert worst_row_error(out, reference) <= OP.tolerance(shape).row_error

    def test_what_only_aiter_computes_is_refused(self):
        """Smooth scales, 16-bit activations with scales, and 32-bit words name the remedy."""
        _, (hidden, w1, w2, weight, ids, *scales) = drawn("per_Token", "int8")
        smooth, words = torch.ones(4, 128), torch.zeros(4, 256, 16, dtype=torch.int32)
        calls = {
            "asm_moe": lambda: moe_entries.asm_moe(hidden, w1, w2, weight, ids, *scales, smooth, smooth),
            "asm_moe: .*int32": lambda: moe_entries.asm_moe(hidden, words, words, weight, ids, *scales),
            "asm_moe_tkw1: .*a16=True": lambda: moe_entries.asm_moe_tkw1(hidden, w1, w2, weight, ids, *scales, a16=True),
            "fused_moe_dp_share_expert": lambda: moe_entries.fused_moe_dp_share_expert(
                hidden, w1, w2, quant_type=QuantType.per_Token, w1_scale=scales[0], w2_scale=scales[1], a1_scale=smooth
            ),
        }
        for fault, call in calls.items():
            with pytest.raises(OperandError, match=f"{fault}.*; install AITER for them"):
                call()

    def test_weights_into_stage_1(self):
        """The routing weights enter before the activation."""
        shape, (hidden, w1, w2, weight, ids, w1_scale, w2_scale) = drawn("per_Token", "fp8_e4m3fn", doweight_stage1="1")
        out = moe_entries.asm_moe_tkw1(hidden, shuffle_weight(w1), shuffle_weight(w2), weight, ids, w1_scale, w2_scale)
        assert worst_row_error(out, OP.reference(shape, (hidden, w1, w2, weight, ids, w1_scale, w2_scale))) <= OP.tolerance(shape).row_error

    def test_shared_experts_of_each_rank(self):
        """The ranks' parts add up to all tokens' sum over all experts."""
        _, (hidden, w1, w2, _, _, w1_scale, w2_scale) = drawn("per_Token", "int8")
        ids, ones = torch.arange(4, dtype=torch.int32).expand(6, 4), torch.ones(6, 4)
        weights = [shuffle_weight(w) for w in (w1, w2)]
        named = {"quant_type": QuantType.per_Token, "w1_scale": w1_scale, "w2_scale": w2_scale}
        total = torch.zeros_like(hidden)
        for rank in range(4):
            part = moe_entries.fused_moe_dp_share_expert(hidden, *weights, dp_size=4, dp_rank=rank, **named)
            start, end = moe_entries.get_dp_shared_expert_token_range(6, 4, rank)
            assert not part[:start].any() and not part[end:].any()
            total += part
        wanted = tunedgemm.fused_moe(hidden, w1, w2, ones, ids.contiguous(), **named)
        assert worst_row_error(total, wanted.float()) < 2.0**-4

    @listed("kind", ["weight", "scale"])
    def test_weights_of_alternating_rows(self, kind):
        """shuffle_weight_a16w4 and shuffle_scale_a16w4 make what gate_mode="interleave" reads."""
        shape, operands = drawn("per_1x32", "fp4x2", "bf16", act_type="Swiglu")
        hidden, w1, w2, weight, ids, w1_scale, w2_scale = operands
        reference = OP.reference(shape, operands)
        named = {"activation": ActivationType.Swiglu, "quant_type": QuantType.per_1x32, "gate_mode": moe.GateMode.INTERLEAVE}
        out = tunedgemm.fused_moe(
            hidden, shuffle.shuffle_weight_a16w4(w1, 16, True), shuffle.shuffle_weight_a16w4(w2, 16, False), weight, ids,
            w1_scale=shuffle.shuffle_scale_a16w4(w1_scale.flatten(0, 1), 4, True),
            w2_scale=shuffle.shuffle_scale_a16w4(w2_scale.flatten(0, 1), 4, False),
            **named,
        )  # fmt: skip
        assert worst_row_error(out, reference) <= OP.tolerance(shape).row_error
        rows = unshuffle_weight(shuffle.shuffle_weight_a16w4(w1, 16, True)).view(torch.uint8)
        assert torch.equal(rows[:, 16:32], w1.view(torch.uint8)[:, 128:144])


class TestMetadata:
    """The row that AITER's look-up names."""

    def test_a_row_and_none(self, tmp_path, monkeypatch):
        """Block and kernels are those of the row; its stages tell to call fused_moe."""
        device = Device("gfx950", 256, "amd-mi355x", "amd")
        monkeypatch.setattr("tunedgemm_aiter_names.moe.current_device", lambda: device)
        table = tmp_path / "tuned_fmoe.csv"
        key = "gfx,cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
        head = f"{key},block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw,_tag"
        words = "ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fn,torch.float4_e2m1fn_x2,QuantType.per_1x32"
        row = f"gfx950,256,64,4096,1024,32,4,{words},1,0,64,2,1.0,flydsl_a,0.0%,2.0,flydsl_b,0.0%,3.0,0,0,0,"
        table.write_text(f"{head}\n{row}\n")
        monkeypatch.setenv("AITER_CONFIG_FMOE", str(table))
        tunedgemm.reload()
        arguments = (4096, 1024, 32, 4, BF16, FP8, torch.float4_e2m1fn_x2, QuantType.per_1x32, True, ActivationType.Silu, False)
        found = moe.get_2stage_cfgs(moe.get_padded_M(50), *arguments)
        assert (found.block_m, found.ksplit, found.run_1stage) == (64, 2, False)
        assert [stage.keywords["kernelName"] for stage in (found.stage1, found.stage2)] == ["flydsl_a", "flydsl_b"]
        with pytest.raises(UserError, match=r"stages run inside fused_moe .got a call of flydsl_a"):
            found.stage1()
        absent = moe.get_2stage_cfgs(4, *arguments)
        assert (absent.block_m, absent.stage1.keywords["kernelName"]) == (moe.get_block_size_M(4, 4, 32, 1024), "")
        monkeypatch.delenv("AITER_CONFIG_FMOE")
        tunedgemm.reload()

    @listed(("tokens", "wanted"), [(1, 1), (3, 4), (1024, 1024), (32767, 32768), (40000, 32768), (131072, 131072), (1 << 20, 131072)])
    def test_padded_numbers_of_tokens(self, tokens, wanted):
        """AITER's powers of two, and its two tiers."""
        assert moe.get_padded_M(tokens) == wanted


class TestFusedMoe:
    """AITER's own function: plain tensors hold what AITER's kernels read."""

    @listed(("kind", "dtype"), [("No", "bf16"), ("per_Token", "fp8_e4m3fn"), ("per_1x128", "fp8_e4m3fn"), ("per_Tensor", "int8")])
    def test_a_parameter_that_got_shuffled_bytes(self, kind, dtype):
        """``p.data = shuffle_weight(p.data)`` takes the bytes, not the type; the result is right."""
        shape, operands = drawn(kind, dtype)
        parameters = [torch.nn.Parameter(weight.clone(), requires_grad=False) for weight in operands[1:3]]
        for parameter in parameters:
            parameter.data = shuffle_weight(parameter.data)
        assert all(type(parameter) is torch.nn.Parameter for parameter in parameters)
        out = moe_entries.fused_moe(operands[0], *parameters, *operands[3:5], None, 0, QuantType[kind], False, *operands[5:7])
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error / 2

    @listed("marked", [False, True])
    @listed("view", [False, True])
    @listed("dtype", ["fp4x2", "fp8_e4m3fn"])
    def test_scales_of_mxfp4_and_mxfp8_are_shuffled(self, marked, view, dtype):
        """Loaders that shuffle scales alone are right; AITER's mark tells of shuffled weights."""
        shape, operands = drawn("per_1x32", dtype, sizes=(6, 256, 256, 4, 2))
        weights, scales = operands[1:3], [tunedgemm.shuffle_scale(scale.flatten(0, 1)) for scale in operands[5:7]]
        if view:
            stored = [torch.nn.Parameter(scale.clone(), requires_grad=False) for scale in operands[5:7]]
            for parameter, scale in zip(stored, scales, strict=True):
                parameter.data = scale.view(parameter.shape)
            scales = stored
        if marked:
            weights = [shuffle_weight(weight).plain for weight in weights]
            weights[0].is_shuffled = True
        out = moe_entries.fused_moe(
            operands[0], *weights, *operands[3:5], quant_type=QuantType.per_1x32, w1_scale=scales[0], w2_scale=scales[1]
        )
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error / 2
