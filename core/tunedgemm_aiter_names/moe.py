"""AITER's functions around fused_moe: routing, sorting, the choice of kernels, and other entries."""

from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch
from tunedgemm import dispatcher
from tunedgemm.integrations import OperandError, act_word, current_device, padded_tokens, quant_word
from tunedgemm.plugin import Shape, UserError
from tunedgemm.tools.launching import short_dtype

if TYPE_CHECKING:
    from tunedgemm.tools.tables import Row

BLOCK_SIZE_M = 32
#: Blocks of rows that AITER's heuristics choose from, and columns of a tile.
_BLOCKS, _TILE = (32, 64, 128), 128


class GateMode(str, enum.Enum):
    """AITER's orders of the gate's rows in w1."""

    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"


def is_flydsl_available() -> bool:
    """Return False: FlyDSL's kernels are in AITER alone, which is hidden or absent."""
    return False


def nextPow2(n: int) -> int:
    """Round up to a power of two."""
    return 1 << max(n - 1, 0).bit_length()


def get_padded_M(M: int) -> int:
    """Return the number of tokens whose row AITER looks up first for *M*."""
    return padded_tokens(M)


def get_inter_dim(w1_shape: Any, w2_shape: Any) -> tuple[int, int, int]:
    """Return (experts, model_dim, inter_dim) of the shapes of weights, whose elements may be packed."""
    experts, model_dim, inter_dim = w2_shape
    return experts, model_dim, inter_dim * (model_dim // w1_shape[-1])


def get_topk_valid_mask(topk_ids: torch.Tensor, expert_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return [T, topk], 1 where an id is that of a local expert."""
    return torch.ones_like(topk_ids, dtype=torch.int32) if expert_mask is None else expert_mask[topk_ids.long()]


def fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    topk_ids: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens: the largest softmax values [T, topk] in float32, and their experts in int32.

    Args:
        renormalize: divide each token's values by their sum.
        topk_ids, topk_weights: tensors that get the results.

    Raises:
        OperandError: the gating output has another number of tokens.
    """
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise OperandError(f"fused_topk: gating_output must be [{hidden_states.shape[0]}, experts] (got {tuple(gating_output.shape)})")
    weights, ids = torch.softmax(gating_output.float(), -1).topk(topk, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    results = (weights, ids.to(torch.int32))
    for given, result in zip((topk_weights, topk_ids), results, strict=True):
        if given is not None:
            given[: len(result)].copy_(result)
    return tuple(result if given is None else given[: len(result)] for given, result in zip((topk_weights, topk_ids), results, strict=True))  # type: ignore[return-value]


def moe_sorting(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = BLOCK_SIZE_M,
    expert_mask: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: bool = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Sort pairs of a token and an expert by expert, in blocks, as AITER's kernels read them.

    Returns:
        (ids: slot << 24 | token, topk << 24 | T where a block is padded; weights; the local expert
        of each block, -1 beyond the last; [pairs with padding, tokens]; zeros [T, model_dim]), and
        the ids among local experts if asked for.

    Raises:
        UserError: *flat* or *output_aux*, which serve one kernel each.
    """
    del dispatch_policy
    if flat or output_aux:
        raise UserError("moe_sorting: flat and output_aux feed single kernels of AITER; leave them out")
    tokens, topk = topk_ids.shape
    device, most = topk_ids.device, topk_ids.numel() + num_experts * block_size - topk
    mask = torch.ones(num_experts, dtype=torch.bool, device=device) if expert_mask is None else expert_mask.reshape(-1)[:num_experts] != 0
    token = torch.arange(tokens, device=device)[:, None].expand(-1, topk)
    ids, slot = topk_ids.long(), torch.arange(topk, device=device).expand(tokens, -1)
    valid = (ids >= 0) & (ids < num_experts) & mask[ids.clamp(0, num_experts - 1)]
    count = torch.tensor(tokens, device=device) if num_local_tokens is None else num_local_tokens.reshape(())
    key = torch.where(valid & (token < count), ids, num_experts).reshape(-1)
    order = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    blocks = -(-counts // block_size)
    shift = (blocks.cumsum(0) - blocks) * block_size - (counts.cumsum(0) - counts)
    sorted_key = key[order]
    chosen = sorted_key < num_experts
    places = (torch.arange(len(key), device=device) + shift[sorted_key.clamp(max=num_experts - 1)])[chosen]
    pairs = order[chosen]
    sorted_ids = torch.full((most,), topk << 24 | tokens, dtype=torch.int32, device=device)
    sorted_weights = torch.zeros(most, dtype=torch.float32, device=device)
    sorted_ids[places] = (slot.reshape(-1)[pairs] << 24 | token.reshape(-1)[pairs]).to(torch.int32)
    sorted_weights[places] = topk_weights.reshape(-1)[pairs].float()
    owners = torch.full((-(-most // block_size),), -1, dtype=torch.int32, device=device)
    local = (mask.cumsum(0) - 1).to(torch.int32)
    repeated = local.repeat_interleave(blocks)
    owners[: len(repeated)] = repeated
    padded = torch.stack([blocks.sum() * block_size, count]).to(torch.int32)
    buffer = torch.zeros((tokens, model_dim) if accumulate or expert_mask is not None else (0, 0), dtype=moebuf_dtype, device=device)
    results = (sorted_ids, sorted_weights, owners, padded, buffer)
    here = torch.where(valid, local[ids.clamp(0, num_experts - 1)], -1).to(topk_ids.dtype)
    return (*results, here) if return_local_topk_ids else results


def moe_sorting_ck(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = BLOCK_SIZE_M,
    expert_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Call `moe_sorting`, with the arguments of AITER's function of this name."""
    return moe_sorting(topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size, expert_mask)


def get_block_size_M(token: int, topk: int, expert: int, inter_dim: int) -> int:
    """Return AITER's rows of a block without a row: the fewest rounds of tiles, then the fullest last one."""
    units = current_device().cu_num or 1

    def rounds(block: int) -> tuple[int, int]:
        tiles = -(-inter_dim // _TILE) * (token * topk + expert * block - topk + block - 1) // block
        return -(-tiles // units), units - tiles % units

    return min(_BLOCKS, key=rounds)


@attrs.frozen
class MOEMetadata:
    """The choice of a row, in AITER's words; its stages name kernels and cannot be called alone."""

    stage1: Any
    stage2: Any
    block_m: int
    ksplit: int
    run_1stage: bool = False
    has_bias: bool = False
    use_non_temporal_load: bool = True
    fuse_quant: str = ""
    flat: bool = False


def _stage(*_arguments: Any, kernelName: str = "", **_named: Any) -> torch.Tensor:
    raise UserError(f"stages run inside fused_moe (got a call of {kernelName or 'an untuned stage'}); call fused_moe")


def get_2stage_cfgs(
    token: int,
    model_dim: int,
    inter_dim: int,
    expert: int,
    topk: int,
    dtype: torch.dtype,
    q_dtype_a: torch.dtype,
    q_dtype_w: torch.dtype,
    q_type: Any,
    use_g1u1: bool,
    activation: Any,
    doweight_stage1: bool,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    is_shuffled: bool = True,
    gate_mode: Any = GateMode.SEPARATED,
    is_ep: bool = False,
    has_stage2_bias: bool = False,
    opus_weights_shuffled: bool | None = None,
    config_file: str | None = None,
) -> MOEMetadata:
    """Return the row of the tables for a call, or AITER's heuristic block without one.

    Raises:
        UserError: *config_file*, which is another family's.
    """
    del hidden_pad, intermediate_pad, gate_mode, has_stage2_bias, opus_weights_shuffled
    if config_file is not None:
        raise UserError(f"get_2stage_cfgs: config_file is the table of heterogeneous experts, without an op (got {config_file!r})")
    extra = {
        "expert": expert, "topk": topk - bool(is_ep), "act": act_word(activation), "q_dtype_a": short_dtype(q_dtype_a),
        "q_dtype_w": short_dtype(q_dtype_w), "q_type": quant_word(q_type), "g1u1": bool(use_g1u1),
        "doweight_stage1": bool(doweight_stage1),
    }  # fmt: skip
    word, layout = short_dtype(dtype), "aiter16x16" if is_shuffled else "row"
    row = _row(Shape("fmoe", token, model_dim, inter_dim, word, word, layout=layout, extra=extra))  # type: ignore[arg-type]
    first, second, cells, split = "", "", {}, 0
    if row is not None:
        cells = {name: str(text) for name, text in (*row.solution.extra, *row.extra)}
        first, _, second = row.solution.kernel_name.partition("+")
        split = row.solution.split_k
    stage1, stage2 = (functools.partial(_stage, kernelName=name) for name in (first, second))
    block = cells.get("block_m") or get_block_size_M(token, topk - bool(is_ep), expert, inter_dim)
    run_1stage, flat = (cells.get(name, "0").strip() in ("1", "True", "1.0") for name in ("run_1stage", "flat"))
    return MOEMetadata(stage1, stage2, int(float(block)), split, run_1stage, flat=flat)


def _row(shape: Any) -> Row | None:
    """Return the first row that may serve a shape on the present device."""
    match = next(dispatcher("fmoe").table.candidates(shape, current_device()), None)
    return None if match is None else match.row
