"""Stand for AITER's questions about the device."""


def get_gfx_runtime() -> str:
    return "gfx950"


def get_cu_num() -> int:
    return 256
