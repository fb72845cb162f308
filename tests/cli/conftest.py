"""Folders of small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

#: the sizes of all of them
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 500, "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., str]:
    """Make a folder with a ``config.json`` of a type; a field that is None is left out."""

    def write(name: str, kind: str, **more: object) -> str:
        fields = {"model_type": kind, **SIZES, **more}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
        return str(tmp_path / name)

    return write


@pytest.fixture
def dense(write_model: Callable[..., str]) -> str:
    """A model all of whose products are of a16w16."""
    return write_model("dense", "llama")


@pytest.fixture
def experts(write_model: Callable[..., str]) -> str:
    """A model with products of a16w16 and of fmoe."""
    return write_model("experts", "mixtral", num_local_experts=8, num_experts_per_tok=2)
