"""Variables of the environment that the plugin asks for."""

from vllm import FORM

if FORM >= (0, 25):
    VLLM_MOE_SKIP_PADDING = FORM >= (0, 33)
