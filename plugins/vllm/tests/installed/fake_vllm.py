"""The backend over a stand-in of vLLM's wheel, in a process whose CPU emulates an H200."""

from __future__ import annotations

from tunedgemm.plugin import Device
from tunedgemm_vllm import Vllm
from tunedgemm_vllm.library import Vendor

vllm = Vllm("fakevllm", Vendor("vllm_stand_in", "vllm_stand_in_C"), Device("sm_90", 132, "nvidia-h200"))
