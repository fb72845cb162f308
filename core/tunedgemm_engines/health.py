"""What `tunedgemm doctor` asks about each engine, found by the entry points ``tunedgemm.engines``."""

from __future__ import annotations

from tunedgemm.integrations import Engine

from tunedgemm_engines import sglang, vllm
from tunedgemm_engines.start import unknown_version

VLLM = Engine(
    "vLLM", "vllm", "vllm.general_plugins", "VLLM_PLUGINS", vllm.VARIABLE,
    lambda switch, version, on_cpu: vllm.off_reason(switch, version, lambda: on_cpu),
)  # fmt: skip
SGLANG = Engine(
    "SGLang", "sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", sglang.VARIABLE,
    lambda _switch, version, _on_cpu: unknown_version("SGLang", version, sglang.KNOWN),
)  # fmt: skip
