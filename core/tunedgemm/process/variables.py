"""Variables: every environment variable that the core reads; imports nothing from the package.

Those of tables are fields of the ops (`Columns.variable`), and each plugin states its variables.
"""

from __future__ import annotations

#: Words that switch a variable of `SWITCHES` on, or off.
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

#: Variables that are on or off. Another word counts as off without a message.
SWITCHES = ("AITER_LOG_TUNED_CONFIG", "AITER_ONLINE_TUNE", "AITER_TUNE_GEMM", "HIP_ONLINE_TUNING")

#: All others.
OTHERS = (
    "AITER_BF16_FP8_MOE_BOUND", "AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "AITER_SITUV2_A8W4", "GTUNE_BATCH_SIZE", "GTUNE_INPUT",
    "GTUNE_MODEL", "GTUNE_TP", "GTUNE_TUNED", "TUNEDGEMM_CACHE", "TUNEDGEMM_FALLBACK", "TUNEDGEMM_HOME", "TUNEDGEMM_MAX_FILE_MIB",
    "TUNEDGEMM_ONLINE_LIBTYPE", "TUNEDGEMM_ONLINE_SECONDS", "TUNEDGEMM_REQUIRE_SIGNED", "TUNEDGEMM_SGLANG", "TUNEDGEMM_SGLANG_SECONDS",
    "TUNEDGEMM_SHARED_CACHE", "TUNEDGEMM_TEST_DEVICE", "TUNEDGEMM_TRUSTED_KEYS", "TUNEDGEMM_VLLM", "TUNEDGEMM_VLLM_SECONDS",
)  # fmt: skip

#: AITER's variables that resemble these, and that tunedgemm does not read.
AITERS_OWN = ("AITER_CONFIG_FHMOE", "AITER_CONFIG_GROUPED_FMOE")

#: Beginnings of names that are tunedgemm's alone: an unknown one is a mistake.
RESERVED = ("TUNEDGEMM_", "GTUNE_")

#: Variables of others that decide which device, compiler or library is found.
MACHINE = (
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "GPU_ARCHS", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "OMP_NUM_THREADS", "ROCM_PATH", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
