"""Menu for packages that are not backends: engines, AITER's function names, executors of the tuner.

It completes `tunedgemm`, `tunedgemm.plugin` and `tunedgemm.tools` with row look-up, custom ops in
compiled graphs, memory orders of formats, and device tuners.
Names are imported at first use, since engines import their plugins in every process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` returns, for type checkers and editors
    from tunedgemm.backends.registry import Registry as Registry
    from tunedgemm.device import current_device as current_device
    from tunedgemm.dispatch.choice import offers as offers
    from tunedgemm.dtype import fp8_of as fp8_of
    from tunedgemm.errors import OperandError as OperandError
    from tunedgemm.integrations.exposition import expose_counters as expose_counters
    from tunedgemm.integrations.health import Engine as Engine
    from tunedgemm.integrations.torch_compile import define_op as define_op
    from tunedgemm.integrations.torch_compile import plain as plain
    from tunedgemm.ops.a16wn import check_values as check_values
    from tunedgemm.ops.formats.int4 import pack_int8_to_packed_int4 as pack_int8_to_packed_int4
    from tunedgemm.ops.formats.int4 import per_1x32_i4_quant as per_1x32_i4_quant
    from tunedgemm.ops.formats.int4 import shuffle_scale_for_int4 as shuffle_scale_for_int4
    from tunedgemm.ops.formats.mxfp8 import per_1x32_f8_quant as per_1x32_f8_quant
    from tunedgemm.ops.formats.scales import plain_bytes as plain_bytes
    from tunedgemm.ops.formats.shuffle import alternated as alternated
    from tunedgemm.ops.formats.weight_only import pack as pack
    from tunedgemm.ops.formats.weight_only import unpack as unpack
    from tunedgemm.ops.layout import Order as Order
    from tunedgemm.ops.layout import name_of as name_of
    from tunedgemm.ops.moe_options import gate_block as gate_block
    from tunedgemm.ops.moe_words import act_word as act_word
    from tunedgemm.ops.moe_words import quant_word as quant_word
    from tunedgemm.ops.padded_m import padded_m as padded_m
    from tunedgemm.ops.padded_m import padded_tokens as padded_tokens
    from tunedgemm.ops.scale_order import equivalent_orders as equivalent_orders
    from tunedgemm.ops.scale_order import field_of as field_of
    from tunedgemm.ops.scale_order import order_of as order_of
    from tunedgemm.ops.scale_order import with_order as with_order
    from tunedgemm.process.variables import read as read
    from tunedgemm.process.variables import read_switch as read_switch
    from tunedgemm.table.deny import DenyList as DenyList
    from tunedgemm.table.folders import tuned_path as tuned_path
    from tunedgemm.text.printable import logger as logger
    from tunedgemm.text.printable import printable_line as printable_line
    from tunedgemm.tuner.executors.local import device_tuner as device_tuner
    from tunedgemm.tuner.rounds import touch as touch
    from tunedgemm.tuner.worker_client import DeviceLost as DeviceLost

_NAMES = {
    "backends.registry": "Registry",
    "device": "current_device",
    "dispatch.choice": "offers",
    "dtype": "fp8_of",
    "errors": "OperandError",
    "integrations.exposition": "expose_counters",
    "integrations.health": "Engine",
    "integrations.torch_compile": "define_op plain",
    "ops.a16wn": "check_values",
    "ops.formats.int4": "pack_int8_to_packed_int4 per_1x32_i4_quant shuffle_scale_for_int4",
    "ops.formats.mxfp8": "per_1x32_f8_quant",
    "ops.formats.scales": "plain_bytes",
    "ops.formats.shuffle": "alternated",
    "ops.formats.weight_only": "pack unpack",
    "ops.layout": "Order name_of",
    "ops.moe_options": "gate_block",
    "ops.moe_words": "act_word quant_word",
    "ops.padded_m": "padded_m padded_tokens",
    "ops.scale_order": "equivalent_orders field_of order_of with_order",
    "process.variables": "read read_switch",
    "table.deny": "DenyList",
    "table.folders": "tuned_path",
    "text.printable": "logger printable_line",
    "tuner.executors.local": "device_tuner",
    "tuner.worker_client": "DeviceLost",
    "tuner.rounds": "touch",
}
_HOME = {name: f"tunedgemm.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_HOME)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value
