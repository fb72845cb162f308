"""A model's config.json: layers, or an error that names the folder; nothing is fetched or allocated."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.errors import UserError
from tunedgemm.table.folders import MODEL_FOLDERS, SHIPPED
from tunedgemm.workload.models import layers_of_model

pytest.importorskip("transformers")


def test_configs(fuzz: Any, mutations: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed config.json gives layers, or an error that names the folder."""

    def no_network(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    path = tmp_path / "config.json"
    shipped = sorted((SHIPPED / MODEL_FOLDERS).glob("*/config.json"))
    seeds = [json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}).encode() for path in shipped[:4]]

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            assert layers_of_model(tmp_path).layers is not None
        except UserError as error:
            assert str(tmp_path) in str(error), error

    fuzz(seeds, mutations.of_json, check, share=0.1)
