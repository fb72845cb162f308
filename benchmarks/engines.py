"""Engines of `engine_speed.py`, `engine_start.py` and `engine_bits.py` in their child processes: vLLM
and SGLang, with random weights.

This file imports neither torch nor tunedgemm at its top: an engine alone must not load tunedgemm.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Tokens of a prompt, and the two numbers of decoded tokens between which steps are timed.
PROMPT, SHORT, LONG = 16, 8, 136
#: Options of SGLang by default.
SGLANG = {
    "attention_backend": "fa3", "sampling_backend": "pytorch", "grammar_backend": "none", "disable_radix_cache": True,
    "context_length": 4096, "max_running_requests": 64, "max_total_tokens": 16384, "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.9, "log_level": "info",
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 8, 32, 64], "max_bs": 64}, "prefill": {"backend": "disabled"}},
}  # fmt: skip


def fill(model: Any) -> None:
    """Give a model random weights by their names: dummy ones vanish in 8 bits, and no output would
    depend on them.
    """
    import zlib

    import torch
    from quantised import exponent, fill_packed

    spread = 40.0  # of 8-bit weights: e4m3 holds up to 448, int8 up to 127
    with torch.inference_mode():
        for name, module in model.named_modules():
            device = next((parameter.device for parameter in module.parameters(recurse=False)), None)
            if device is not None and fill_packed(module, torch.Generator(device).manual_seed(zlib.crc32(name.encode()))):
                continue
            for kind in ("weight", "w13_weight", "w2_weight"):
                weight = getattr(module, kind, None)
                if not isinstance(weight, torch.Tensor):
                    continue
                data = weight.data
                if data.dim() == 1:  # of a norm
                    data.fill_(1)
                    continue
                scale = getattr(module, "input_size_per_partition", data.shape[-1]) ** -0.5
                seeded = torch.Generator(data.device).manual_seed(zlib.crc32(f"{name}.{kind}".encode()))
                for part in data if data.dim() > 2 else [data]:  # expert by expert: float32 takes four times their memory
                    values = torch.randn(part.shape, generator=seeded, device=data.device)
                    part.copy_(values * scale if data.dtype.itemsize > 1 else (values * spread).clamp(-127, 127))
                if data.dtype.itemsize > 1:
                    continue
                for scales in (f"{kind}_scale", f"{kind}_scale_inv"):
                    if isinstance(held := getattr(module, scales, None), torch.Tensor):
                        held.data.fill_(exponent(scale / spread) if held.dtype is torch.uint8 else scale / spread)


def register() -> None:
    """Register the load format ``filled`` with vLLM: its dummy weights, then those of `fill`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("filled")
    class Filled(DummyModelLoader):  # type: ignore[misc, unused-ignore]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill(model)


def offer_filled(folder: Path) -> None:
    """Make `register` one of vLLM's plugins for the processes that this one starts, by a
    distribution's metadata in *folder*.
    """
    about = folder / "filled-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: filled\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfilled = engines:register\n")
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths[:2]


class Vllm:
    """One engine of vLLM in the child process; each public method answers one request of the
    parent.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        offer_filled(Path(self._folder.name))
        self._llm = LLM(model=model, skip_tokenizer_init=True, load_format="filled", disable_log_stats=True, **options)
        self._vocabulary = self._llm.llm_engine.model_config.get_vocab_size()

    def _prompts(self, count: int, length: int, seed: int) -> list[Any]:
        chosen = random.Random(seed)
        return [{"prompt_token_ids": [chosen.randrange(self._vocabulary) for _ in range(length)]} for _ in range(count)]

    def decode(self, batch: int, seed: int) -> float:
        """Return milliseconds of one decoded token of each of *batch* sequences.

        Timed from the step where all have `SHORT` tokens to that where the first has `LONG`: no
        prefill is in between.
        """
        from vllm import SamplingParams

        engine, tokens, begun = self._llm.llm_engine, dict[str, int](), (0.0, 0)
        params = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=0, detokenize=False)
        for place, prompt in enumerate(self._prompts(batch, PROMPT, seed)):
            engine.add_request(f"decode-{seed}-{place}", prompt, params)
        milliseconds = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
            now, most = time.perf_counter(), max(tokens.values(), default=0)
            if not begun[1] and len(tokens) == batch and min(tokens.values()) >= SHORT:
                begun = now, most
            elif begun[1] and not milliseconds and most == LONG:
                milliseconds = (now - begun[0]) * 1e3 / (LONG - begun[1])
        return milliseconds

    def prefill(self, batch: int, length: int, seed: int) -> float:
        """Return milliseconds until *batch* prompts of *length* tokens have one token each."""
        from vllm import SamplingParams

        prompts = self._prompts(batch, length, seed)
        start = time.perf_counter()
        self._llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, detokenize=False), use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    def trace(self, requests: list[tuple[float, int, int]], seed: int) -> dict[str, Any]:
        """Serve requests (arrival in seconds, tokens of the prompt, tokens to decode) and time
        each.
        """
        from vllm import SamplingParams

        engine, waiting = self._llm.llm_engine, list(enumerate(requests))
        prompts = [self._prompts(1, length, seed + index)[0] for index, (_, length, _) in enumerate(requests)]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while waiting and waiting[0][1][0] <= now:
                index, (_, _, tokens) = waiting.pop(0)
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
                engine.add_request(str(index), prompts[index], params)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][1][0] - now))
                continue
            for output in engine.step():
                at = time.perf_counter() - start
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, at)
                last[output.request_id] = at
        seconds = time.perf_counter() - start
        keys = [next(key for key in first if key == str(index) or key.startswith(f"{index}-")) for index in range(len(requests))]
        ttft = [(first[key] - arrival) * 1e3 for key, (arrival, _, _) in zip(keys, requests, strict=True)]
        tpot = [(last[key] - first[key]) * 1e3 / (tokens - 1) for key, (_, _, tokens) in zip(keys, requests, strict=True) if tokens > 1]
        middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
        return {"tokens_per_s": sum(tokens for *_, tokens in requests) / seconds, "ttft_ms": middle(ttft), "tpot_ms": middle(tpot)}

    def logits(self, lengths: list[int], top: int) -> list[list[tuple[int, dict[int, float]]]]:
        """Return the tokens chosen after prompts of these lengths, three each, and the log
        probabilities of the most likely ones.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, detokenize=False, logprobs=top)
        answers = []
        for length in lengths:  # one at a time: decoding is at batch 1
            [output] = self._llm.generate(self._prompts(1, length, length), params, use_tqdm=False)
            chosen = output.outputs[0]
            tokens = zip(chosen.token_ids, chosen.logprobs, strict=True)
            answers.append([(token, {other: entry.logprob for other, entry in likely.items()}) for token, likely in tokens])
        return answers

    def exact(self, batches: list[list[tuple[int, int, int]]], top: int) -> list[list[list[str]]]:
        """Return the tokens of each request of each batch, with log probabilities bit for bit.

        A token's text is its number, then the most likely numbers, each with its log probability.

        Args:
            batches: requests served together: seed, length of the prompt, tokens to decode.
            top: how many tokens are listed.
        """
        from vllm import SamplingParams

        answers = []
        for batch in batches:
            prompts = [self._prompts(1, length, seed)[0] for seed, length, _ in batch]
            asked = [
                SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, logprobs=top) for *_, tokens in batch
            ]
            chosen = [output.outputs[0] for output in self._llm.generate(prompts, asked, use_tqdm=False)]
            answers.append(
                [
                    [" ".join((str(token), *_hexadecimal(likely))) for token, likely in zip(each.token_ids, each.logprobs, strict=True)]
                    for each in chosen
                ]
            )
        return answers

    def decode_kernels(self, batch: int, steps: int) -> dict[str, tuple[int, float]]:
        """Return the kernels of decoding steps of a batch: name -> launches and microseconds."""
        from vllm import SamplingParams

        engine, tokens = self._llm.llm_engine, dict[str, int]()
        params = SamplingParams(max_tokens=steps + SHORT, ignore_eos=True, temperature=0, detokenize=False)
        for place, prompt in enumerate(self._prompts(batch, PROMPT, 0)):
            engine.add_request(f"kernels-{batch}-{place}", prompt, params)
        while len(tokens) < batch or min(tokens.values()) < SHORT // 2:  # the prompts are done
            tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        self._llm.collective_rpc("begin_kernels")
        for _ in range(steps):
            engine.step()
        [kernels] = self._llm.collective_rpc("end_kernels")
        while engine.has_unfinished_requests():
            engine.step()
        return kernels  # type: ignore[no-any-return, unused-ignore]

    def prefill_kernels(self, batch: int, length: int) -> dict[str, tuple[int, float]]:
        """Return the kernels of the prefill of so many prompts: name -> launches and microseconds."""
        self.prefill(batch, length, 1)
        self._llm.collective_rpc("begin_kernels")
        self.prefill(batch, length, 2)
        [kernels] = self._llm.collective_rpc("end_kernels")
        return kernels  # type: ignore[no-any-return, unused-ignore]

    def layers(self, sizes: list[int], folder: str) -> list[dict[str, Any]]:
        """Return digests of the outputs of all linear layers for each number of rows of x, and write
        one layer of each kind to *folder*.
        """
        [rows] = self._llm.collective_rpc("bits_of_layers", args=(sizes, folder))
        return rows  # type: ignore[no-any-return, unused-ignore]


def _hexadecimal(likely: dict[int, Any]) -> list[str]:
    return [f"{token}:{float(entry.logprob).hex()}" for token, entry in sorted(likely.items())]


class Sglang:
    """One engine of SGLang in the child process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(model_path=model, load_format="dummy", skip_tokenizer_init=True, **options)
        self._vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]

    def _ask(self, batch: int, length: int, tokens: int, seed: int, **more: Any) -> Any:
        chosen = random.Random(seed)
        prompts = [[chosen.randrange(self._vocabulary) for _ in range(length)] for _ in range(batch)]
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return self._engine.generate(input_ids=prompts, sampling_params=params, **more)

    def _generate(self, batch: int, length: int, tokens: int, seed: int) -> float:
        start = time.perf_counter()
        self._ask(batch, length, tokens, seed)
        return (time.perf_counter() - start) * 1e3

    def decode(self, batch: int, tokens: int, seed: int) -> float:
        """Return milliseconds of one decoded token of each of *batch* sequences, as a difference of
        runs that differ by *tokens*.
        """
        short, long = (self._generate(batch, PROMPT, count, seed) for count in (SHORT, SHORT + tokens))
        return (long - short) / tokens

    def prefill(self, batch: int, length: int, seed: int) -> float:
        """Return milliseconds until *batch* prompts of *length* tokens have one token each."""
        return self._generate(batch, length, 1, seed)

    def logits(self, lengths: list[int], top: int) -> list[list[tuple[int, dict[int, float]]]]:
        """Return the tokens chosen after prompts of these lengths, three each, and the log
        probabilities of the most likely ones.
        """
        answers = []
        for length in lengths:
            [output] = self._ask(1, length, 3, length, return_logprob=True, top_logprobs_num=top)
            likely = output["meta_info"]["output_top_logprobs"]
            tokens = zip(output["output_ids"], likely, strict=True)
            answers.append([(token, {other: value for value, other, _ in entries}) for token, entries in tokens])
        return answers


def serve(pipe: Connection, log: str, engine_of: type[Any], model: str, options: dict[str, Any]) -> None:
    """Run one arm in a child process until the parent closes the pipe."""
    os.setsid()  # the engine's own children end with this process
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    start = time.perf_counter()
    try:
        engine = engine_of(model, options)
        pipe.send(time.perf_counter() - start)
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(engine, name)(*arguments))
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}"))
        raise
