"""The worker of one rank on a CPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker


class CPUWorker(Worker):
    """Has a separate warm-up, which does not call that of GPUs."""

    def compile_or_warm_up_model(self) -> str:
        """Run the model once."""
        if self._run is not None:
            self._run()
        return "warm"
