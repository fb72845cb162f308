"""Roles: infer the role of a linear layer from its name. Torch-free."""

from __future__ import annotations

#: Role -> last words of module names, in transformers and in checkpoints.
_WORDS = {
    "q": ("q_proj", "query", "q", "wq", "q_lin", "query_proj", "to_q"),
    "k": ("k_proj", "key", "k", "wk", "k_lin", "key_proj", "to_k"),
    "v": ("v_proj", "value", "v", "wv", "v_lin", "value_proj", "to_v"),
    "qkv": ("qkv_proj", "qkv", "query_key_value", "c_attn", "Wqkv", "attn_qkv"),
    "o": ("o_proj", "out_proj", "out_lin", "o"),
    "q_a": ("q_a_proj",),
    "kv_a": ("kv_a_proj_with_mqa", "kv_a_proj"),
    "q_b": ("q_b_proj",),
    "kv_b": ("kv_b_proj",),
    "gate": ("gate_proj", "w1", "wi_0"),
    "up": ("up_proj", "w3", "wi_1", "wi", "fc1", "c_fc", "dense_h_to_4h", "linear_fc1", "lin1", "linear_1"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_fc2", "lin2", "linear_2"),
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words}
#: Names of output projections: of an attention inside one, else of a feed-forward network.
_CLOSING = ("dense", "c_proj", "wo", "proj", "linear_proj")
_IN_ATTENTION = ("attn", "attention")

#: Megatron's scheme, as in serving engines: column-parallel first layers (weight rows are split),
#: row-parallel last layers (weight columns are split).
SPLIT_BY_ROWS = ("q", "k", "v", "qkv", "q_b", "kv_b", "gate", "up", "gate_up")
SPLIT_BY_COLUMNS = ("o", "down")
#: Roles that are replicated on every rank: down projections to a latent vector.
NEVER_SPLIT = ("q_a", "kv_a")


def role_of(name: str) -> str:
    """Return the role of a module by its name; "" if unknown."""
    parent, _, word = name.rpartition(".")
    if word in _CLOSING:
        above = parent.lower().split(".")[-2:]
        if above[-1] == "intermediate":  # BERT's up projection
            return "up"
        return "o" if any(part in step for part in _IN_ATTENTION for step in above) else "down"
    return _ROLES.get(word, "")


def crosses(name: str) -> bool:
    """Check whether a name is that of a cross-attention."""
    return any(part in name.lower() for part in ("encdecattention", "encoder_attn", "cross_attn", "crossattention"))


def chooses_experts(name: str) -> bool:
    """Check whether a linear layer is an expert router, by its name."""
    parent, _, word = name.rpartition(".")
    return word in ("router", "shared_expert_gate") or parent.rpartition(".")[2] == "router"
