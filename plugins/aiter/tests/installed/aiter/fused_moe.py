"""Stand for AITER's fused MoE; the products are tunedgemm's, over the same operands."""

from __future__ import annotations

import csv
import enum
from collections.abc import Callable
from pathlib import Path

import torch
import tunedgemm
from tunedgemm import ActivationType, QuantType

from aiter.jit.utils.chip_info import get_cu_num, get_gfx_runtime


class GateMode(str, enum.Enum):
    SEPARATED = "separated"
    INTERLEAVE = "interleave"


#: The rows that `_fused_moe_impl` ran.
rows_run: list[dict[str, str]] = []


def get_padded_M(M):
    return 1 << (M - 1).bit_length() if M > 1 else 1


def fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    expert_mask: torch.Tensor | None = None,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    doweight_stage1=False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M=None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy=0,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    splitk=0,
    swiglu_limit=None,
    beta=None,
    linear_beta=None,
    gate_mode: str | None = GateMode.SEPARATED.value,
    shared_w1: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w1_scale: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter=None,
):
    assert expert_mask is block_size_M is num_local_tokens is bias1 is bias2 is stage2_scatter is None and gate_mode == "separated"
    assert w1.is_shuffled and w2.is_shuffled and dtype == hidden_states.dtype
    weights = *map(tunedgemm.as_shuffled, (w1, w2)), topk_weight, topk_ids, None, activation, quant_type
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale, "a2_scale": a2_scale}
    order = {"scale_order": "aiter32x8"} if quant_type == QuantType.per_1x32 and w1_scale.element_size() == 1 else {}
    return tunedgemm.fused_moe(hidden_states, *weights, doweight_stage1=doweight_stage1, dtype=dtype, **order, **scales)


def _fused_moe_impl(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: int = ActivationType.Silu.value,
    quant_type: int = QuantType.No.value,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int = -1,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = GateMode.SEPARATED.value,
    stage2_scatter=None,
    *,
    _q_dtype_a: torch.dtype | None = None,
    _metadata_transform: Callable | None = None,
    _metadata_config_file: str | None = None,
    _stage1_extra_args: dict | None = None,
    _stage2_extra_args: dict | None = None,
) -> torch.Tensor:
    assert type(activation) is type(quant_type) is int and type(doweight_stage1) is bool
    assert _metadata_transform is _stage1_extra_args is _stage2_extra_args is stage2_scatter is None
    experts, model_dim = w2.shape[:2]
    inter_dim = w2.shape[2] * (2 if w2.dtype == torch.float4_e2m1fn_x2 else 1)
    key = (
        *(get_gfx_runtime(), get_cu_num(), get_padded_M(len(topk_ids)), model_dim, inter_dim, experts, topk_ids.shape[1]),
        *(str(ActivationType(activation)), str(dtype), str(_q_dtype_a), str(w1.dtype), str(QuantType(quant_type))),
        *(int(w1.shape[1] != inter_dim), int(doweight_stage1), experts - 1, hidden_pad, intermediate_pad, str(GateMode(gate_mode))),
    )
    (row,) = csv.DictReader(Path(_metadata_config_file).read_text().splitlines())
    columns = "gfx cu_num token model_dim inter_dim expert topk act_type dtype q_dtype_a q_dtype_w q_type use_g1u1 doweight_stage1"
    columns += " shared_expert_id hidden_pad intermediate_pad gate_mode"
    found = tuple(row[column] for column in columns.split())
    if found != tuple(map(str, key)):
        raise NotImplementedError(f"no row for {key} in {_metadata_config_file}: {found}")
    assert int(row["block_m"]) > 0 and int(row["ksplit"]) >= 0 and row["run_1stage"] in "01"
    rows_run.append(row)
    kinds = ActivationType(activation), QuantType(quant_type)
    scales = w1_scale, w2_scale, a1_scale, a2_scale
    return fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, None, *kinds, doweight_stage1, *scales, dtype=dtype)
