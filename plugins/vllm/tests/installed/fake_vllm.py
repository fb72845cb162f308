"""The backend over a stand-in of vLLM's wheel, in a process whose CPU emulates an H200."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device
from tunedgemm_vllm import Vllm
from tunedgemm_vllm import vllm as real
from tunedgemm_vllm.library import Vendor

hooks = Vllm("fakevllm", Vendor("vllm_stand_in", "vllm_stand_in_C"))
vllm = attrs.evolve(real, libtype="fakevllm", hooks=hooks, host=Device("sm_90", 132, "nvidia-h200"))
