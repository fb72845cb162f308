"""The platform that vLLM runs on: here one whose weights are not packed."""

from __future__ import annotations


class Platform:
    """Any platform but a CPU."""

    _enum = "any"

    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return False

    is_cuda = is_cpu


current_platform = Platform()
