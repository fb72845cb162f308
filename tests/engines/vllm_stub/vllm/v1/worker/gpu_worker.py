"""The worker of one rank."""

from __future__ import annotations

from typing import Any


class Worker:
    """What of it the plugin follows."""

    def __init__(self, vllm_config: Any, run: Any = None) -> None:
        self.vllm_config, self._run = vllm_config, run

    def compile_or_warm_up_model(self) -> str:
        """Run the model once."""
        if self._run is not None:
            self._run()
        return "warm"
