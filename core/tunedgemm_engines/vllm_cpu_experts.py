"""Experts for vLLM without a kernel for plain weights, as on CPUs.

They take layers whose rows serve every number of tokens.

The methods of vLLM's layers of experts call a function for the class that computes them:
``select_…_moe_backend`` of the modules of ``vllm.model_executor.layers.fused_moe.oracle``.
`install` wraps it to return `TunedGemmExperts` for such layers. `tunedgemm_engines.vllm` loads
this module where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from tunedgemm import QuantType, dispatcher, fused_moe
from tunedgemm.integrations import OperandError, logger, plain
from tunedgemm.plugin import Shape
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from tunedgemm_engines.start import described
from tunedgemm_engines.vllm_experts import ACTIVATIONS, FP8, known_ids, refused, shape_of, single_rank

_log = logging.getLogger("tunedgemm")
#: vLLM prints the messages of loggers below its root logger.
_log_of_vllm = logger("vllm.tunedgemm")

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle"
#: Module, the functions that choose and make a kernel, and the enumeration whose member TRITON
#: keeps weights as loaded. The oracle of int8 is excluded: vLLM's method that quantises to int8 at
#: loading asks it for int8 activations, and then describes 16-bit ones (0.32).
ORACLES = (
    ("unquantized", "select_unquantized_moe_backend", "make_unquantized_moe_kernel", "UnquantizedMoeBackend"),
    ("fp8", "select_fp8_moe_backend", "make_fp8_moe_kernel", "Fp8MoeBackend"),
)

#: Rows and columns that share a scale, of the activations and of the transposed weights; -1 is all
#: of them.
_SCALES = {
    ((-1, -1), (-1, -1)): QuantType.per_Tensor,
    ((1, -1), (-1, 1)): QuantType.per_Token,
    ((1, 128), (128, 128)): QuantType.per_1x128,
}


def install(kinds: Collection[str]) -> None:
    """Make vLLM ask for our experts first; warn about an oracle of another form and leave it."""
    del kinds  # it has one
    if inspect.isabstract(TunedGemmExperts):
        missing = ", ".join(sorted(TunedGemmExperts.__abstractmethods__))
        _log.warning("vLLM's experts: stay vLLM's, because this vLLM has another interface: they need %s", missing)
        return
    for module, select, make, backends in ORACLES:
        try:
            theirs, as_loaded = _oracle_functions(module, select, make, backends)
        except (ImportError, AttributeError) as error:
            _log.warning("vLLM's %s experts: stay vLLM's, because this vLLM has another interface: %s", module, error)
            continue
        ours = _wrap_choice(theirs, as_loaded)
        # Modules that were loaded earlier hold the function by its name.
        for holder in [loaded for name, loaded in sys.modules.items() if name.partition(".")[0] == "vllm"]:
            if getattr(holder, "__dict__", {}).get(select) is theirs:
                setattr(holder, select, ours)


def _oracle_functions(module: str, select: str, make: str, backends: str) -> tuple[Callable[..., Any], Any]:
    """Return an oracle's choosing function, and its backend that keeps weights as loaded.

    Raises:
        ImportError, AttributeError: the oracle has another form.
    """
    oracle = importlib.import_module(f"{_ORACLE}.{module}")
    if "experts_cls" not in inspect.signature(getattr(oracle, make)).parameters:
        raise AttributeError(f"{make} does not ask which class was chosen")
    return getattr(oracle, select), getattr(oracle, backends).TRITON


def _wrap_choice(theirs: Callable[..., Any], as_loaded: Any) -> Callable[..., Any]:
    """Wrap vLLM's function that chooses experts; *as_loaded* is the backend that keeps loaded weights."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def select(*arguments: Any, **named: Any) -> Any:
        if not current_platform.is_cpu():
            with contextlib.suppress(NotImplementedError, ValueError):
                return theirs(*arguments, **named)
        try:
            call = signature.bind(*arguments, **named)
            call.apply_defaults()
            config, *_ = call.arguments.values()
            reason = unserved_reason(config, call.arguments.get("weight_key"), call.arguments.get("activation_key"))
        except AttributeError as error:
            reason = f"vLLM describes them in an unknown form: {error}"
        except Exception as error:  # a plugin may raise anything
            reason = f"asking the tables failed: {described(error)}"
        _log_once(f"experts stay vLLM's: {reason}" if reason else "experts go through the tables (TunedGemmExperts)")
        return theirs(*arguments, **named) if reason else (as_loaded, TunedGemmExperts)

    return select


@functools.cache
def _log_once(text: str) -> None:
    """Log once a process, because a model has dozens of equal layers."""
    _log_of_vllm.info(text)


def unserved_reason(config: Any, weight_key: Any, activation_key: Any) -> str:
    """Return why vLLM computes a layer of experts, "" if it goes through the tables.

    Args:
        config: vLLM's FusedMoEConfig.
        weight_key, activation_key: vLLM's QuantKey of both factors, None for 16 bits.
    """
    standard = modular_kernel.FusedMoEActivationFormat.Standard
    able, reason = TunedGemmExperts.is_supported_config(TunedGemmExperts, config, weight_key, activation_key, standard)
    if not able:
        return str(reason)
    if reason := refused(config):
        return reason
    op_dispatcher = dispatcher("fmoe")
    if op_dispatcher.settings.needs_calls("fmoe"):
        return ""
    most = get_current_vllm_config().scheduler_config.max_num_batched_tokens
    dtype = config.in_dtype if weight_key is None else weight_key.dtype
    shape = shape_of(config, _quant_type(weight_key, activation_key) or QuantType.No, dtype)
    return _unserved(op_dispatcher, op_dispatcher.table, shape, most)


@functools.lru_cache(maxsize=64)
def _unserved(op_dispatcher: Any, table: object, shape: Shape, most: int) -> str:
    """Return why rows do not serve a layer at every number of tokens up to *most*, "" if they do.

    All or none go through the tables, because torch's products, which serve calls without a row,
    were not measured against vLLM's experts. The row of the next power of two serves the numbers of
    tokens between two rows.
    """
    del table  # part of the key: tables may be read again
    powers = itertools.takewhile(lambda power: power < 2 * most, (1 << bit for bit in itertools.count()))
    for tokens in dict.fromkeys(list(op_dispatcher.op.padded_m(power, shape.n))[-1] for power in powers):
        if not op_dispatcher.explain(shape.with_m(tokens)).tuned:
            cells = op_dispatcher.op.columns.format(shape)
            fields = ", ".join(f"{name}={value}" for name, value in cells.items() if value and name != "token")
            return f"no tuned row of fmoe serves token={tokens}, {fields}; each power of two up to {most} tokens needs one"
    return ""


def _quant_type(weight_key: Any, activation_key: Any) -> QuantType | None:
    """Return the kind of scales, None for kinds that the op lacks."""
    if weight_key is None or activation_key is None:
        return QuantType.No if weight_key is activation_key else None
    keys = (activation_key, weight_key)
    kind = _SCALES.get(tuple(tuple(key.scale.group_shape) for key in keys))  # type: ignore[arg-type]
    plain = all(key.symmetric and key.scale.dtype is torch.float32 and key.scale2 is None for key in keys)
    is_fp8 = weight_key.dtype in FP8 and activation_key.dtype == weight_key.dtype
    # Only the scale of a whole tensor can be known before its values.
    ahead = kind is QuantType.per_Tensor or not activation_key.scale.static
    return kind if plain and is_fp8 and ahead else None


class TunedGemmExperts(modular_kernel.FusedMoEExpertsModular):  # type: ignore[misc,unused-ignore]
    """Experts by `tunedgemm.fused_moe`, between routing and the reduction among ranks."""

    def __init__(self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self._quant_type = _of_config(quant_config)

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Leave hidden states to the op, which quantises them."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """Return the format in which rows are tokens."""
        return modular_kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return _quant_type(weight_key, activation_key) is not None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return single_rank(moe_parallel_config)

    def supports_expert_map(self) -> bool:
        """Answer vLLM 0.20: every expert is on its rank."""
        return False

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Leave the weighted sum to the op."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *others: Any, **named: Any) -> tuple[tuple[int, ...], ...]:
        """Return no workspace and the output [M, K], in the names of vLLM's signature."""
        del N, others, named
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        **others: Any,
    ) -> None:
        """Sum over each token's experts of hidden_states [M, K] into *output* [M, K].

        The names are those of vLLM's signature.

        Raises:
            OperandError: some experts are on other ranks; `unserved_reason` names such layers.
        """
        if others.get("expert_map") is not None:
            raise OperandError("fmoe: TunedGemmExperts needs every expert on its rank (got a map of experts from vLLM)")
        if others.get("apply_router_weight_on_input"):  # vLLM multiplied hidden_states by them
            topk_weights = torch.ones_like(topk_weights)
        result = fused_moe(
            hidden_states, plain(w1), plain(w2), topk_weights.float(), known_ids(topk_ids), activation=ACTIVATIONS[activation.value],
            quant_type=self._quant_type, w1_scale=plain(self.w1_scale), w2_scale=plain(self.w2_scale), a1_scale=plain(self.a1_scale),
            a2_scale=plain(self.a2_scale), dtype=output.dtype,
        )  # fmt: skip
        if torch.compiler.is_compiling() or not result.is_contiguous() or output.untyped_storage().nbytes() != output.nbytes:
            output.copy_(result)
        else:  # the output owns its memory: swap it, because copying would cost a kernel
            output.set_(result)  # type: ignore[call-overload]


def _of_config(quant_config: Any) -> QuantType:
    """Return the kind of scales of a layer's FusedMoEQuantConfig."""
    if quant_config.quant_dtype is None:
        return QuantType.No
    if quant_config.block_shape is not None:
        return QuantType.per_1x128
    return QuantType.per_Token if quant_config.per_act_token_quant else QuantType.per_Tensor
