"""M of serving engines: CUDA graph batch sizes, and powers of two for prefill. Torch-free.

Sources: vLLM 0.20 to 0.33, ``VllmConfig._set_cudagraph_sizes``; SGLang,
``ServerArgs._generate_cuda_graph_batch_sizes``. Between two sizes an engine pads a batch to the
larger one.
"""

from __future__ import annotations

import itertools
import shlex

from tunedgemm.errors import UserError

#: Defaults of the engines' HTTP servers: sequences at once, and tokens of one prefill.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192
#: The largest batch that vLLM captures a graph for, whatever the settings.
_VLLM_GRAPH = 512


def rows_of_engine(engine: str, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """List the M that an engine runs, ascending.

    Args:
        engine: ``vllm`` or ``sglang``.
        max_num_seqs: most sequences decoded at once.
        max_num_batched_tokens: most tokens of one step.

    Raises:
        UserError: an unknown engine, or a limit below 1.
    """
    if engine not in _GRAPHS:
        raise UserError(f"--nsets: unknown engine (got {engine!r}); use whole numbers as 1,16,256, or one of {', '.join(_GRAPHS)}")
    for flag, value in (("--max-num-seqs", max_num_seqs), ("--max-num-batched-tokens", max_num_batched_tokens)):
        if value < 1:
            raise UserError(f"{flag}: must be at least 1 (got {value})")
    graphs = {size for size in _GRAPHS[engine](max_num_seqs) if size <= max_num_batched_tokens}
    powers = itertools.takewhile(lambda power: power <= max_num_batched_tokens, (1 << bit for bit in itertools.count()))
    return tuple(sorted(graphs | {power for power in powers if power > max(graphs, default=0)} | {max_num_batched_tokens}))


def _of_vllm(sequences: int) -> set[int]:
    most = min(2 * sequences, _VLLM_GRAPH)
    return {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most}


def _of_sglang(sequences: int) -> set[int]:
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, sequences + 1, 32))
    return {size for size in sizes if size <= sequences}


_GRAPHS = {"vllm": _of_vllm, "sglang": _of_sglang}


def command_of(engine: str, model: str, tp: int, max_num_seqs: int, max_num_batched_tokens: int) -> str:
    """Write the command line that serves a model with the M of `rows_of_engine`."""
    model = shlex.quote(model)
    if engine == "vllm":
        limits = f"--max-num-seqs {max_num_seqs} --max-num-batched-tokens {max_num_batched_tokens}"
        return f"TUNEDGEMM_VLLM=1 vllm serve {model} --tensor-parallel-size {tp} {limits}"
    limits = f"--cuda-graph-max-bs {max_num_seqs} --chunked-prefill-size {max_num_batched_tokens}"
    return f"python -m sglang.launch_server --model-path {model} --tp {tp} {limits}"
