#!/usr/bin/env bash
# Tunes the products of a model for the batch sizes that vLLM runs, then serves it.
#   examples/vllm/serve.sh MODEL [arguments of vllm serve]
# TP=1 SEQS=64 TOKENS=8192   ranks, sequences decoded at once, tokens of a step
# CAPTURE=1                  capture the shapes of a run of vLLM instead; end it with Ctrl-C, then run this again without CAPTURE
# LIBTYPE=all                which backends may win
set -euo pipefail
model=${1:?usage: serve.sh MODEL [arguments of vllm serve]}
shift
limits=(--max-num-seqs "${SEQS:-64}" --max-num-batched-tokens "${TOKENS:-8192}")
serve=(vllm serve "$model" --tensor-parallel-size "${TP:-1}" "${limits[@]}" "$@")

if [ -n "${CAPTURE:-}" ]; then
  exec env AITER_TUNE_GEMM=1 TUNEDGEMM_VLLM=1 "${serve[@]}"
fi
if [ -d "$model" ]; then
  tunedgemm tune --model_dir "$model" --tp "${TP:-1}" --nsets vllm "${limits[@]}" --libtype "${LIBTYPE:-all}"
else
  tunedgemm tune --libtype "${LIBTYPE:-all}" # what was captured
fi
exec env TUNEDGEMM_VLLM=1 "${serve[@]}"
