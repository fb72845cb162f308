"""The runner of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class ModelRunner:
    """What of it the plugin follows."""

    def __init__(self, model: torch.nn.Module, sizes: list[int] | None = None, **options: Any) -> None:
        self.made, self.sizes, self.server_args, self.dtype = model, sizes, SimpleNamespace(**options), torch.bfloat16

    def load_model(self) -> None:
        """Take the model, and let its methods repack the weights."""
        self.model = self.made
        for module in self.model.modules():
            process = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
            if process is not None:
                process(module)

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """Capture graphs of these batch sizes."""
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=self.sizes) if capture_decode_cuda_graph and self.sizes else None
