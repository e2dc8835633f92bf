"""Serve prompts once with vLLM and print what came out as JSON.

python serve.py CHECKPOINT '{"dsv4": {"backend": "reference"}}' [--lengths 5,300,2500] [--tensor-parallel 2] …
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
VOCABULARY = 1024


def prompt(length: int, number: int) -> list[int]:
    """Token ids that repeat nothing; every prompt begins with the same 300."""
    shared = [(i * 37) % (VOCABULARY - 2) + 2 for i in range(min(length, 300))]
    return shared + [(i * 53 + 7 * number) % (VOCABULARY - 2) + 2 for i in range(length - len(shared))]


def serve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens, the margin of each over its runner-up, and the time taken."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_dtype="fp8",
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=arguments.chunk,
        enable_chunked_prefill=True,
        enable_prefix_caching=arguments.prefix_caching,
        tensor_parallel_size=arguments.tensor_parallel,
        additional_config=arguments.additional_config,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        max_tokens=arguments.decode, temperature=0, detokenize=False, ignore_eos=True, logprobs=2
    )
    lengths = [int(length) for length in arguments.lengths.split(",")]
    prompts = [{"prompt_token_ids": prompt(length, n)} for n, length in enumerate(lengths)]
    if arguments.prefix_caching:  # so that the round that counts finds its prefixes
        llm.generate(prompts, sampling, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    made = [output.outputs[0] for output in outputs]
    from dsv4_vllm_job import standins

    return {
        "standins": len(standins.installed),
        "lengths": lengths,
        "tokens": [list(output.token_ids) for output in made],
        "margins": [[margin(step) for step in output.logprobs] for output in made],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds + len(lengths) * arguments.decode / seconds,
    }


def margin(step: dict[int, Any]) -> float:
    """By how much the first choice's logit leads the second's."""
    first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return float(first - second)


def main() -> None:
    """Serve, and print one line of JSON after a marker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("additional_config", type=json.loads)
    parser.add_argument("--lengths", default="5,300,2500,40")
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--prefix-caching", action="store_true")
    arguments = parser.parse_args()
    if arguments.tensor_parallel > 1:  # vLLM binds ranks to NUMA nodes of their own, unless told cores
        cores = map(str, range(arguments.tensor_parallel))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(cores))
    print("RESULT " + json.dumps(serve(arguments)), flush=True)


if __name__ == "__main__":
    main()
