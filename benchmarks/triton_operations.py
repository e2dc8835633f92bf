"""What `backend=triton` takes for its operations on V4-Flash, each where the memory or the launch binds it.

    python benchmarks/triton_operations.py benchmarks/results/h200/triton.jsonl [commit]

One run of `dsv4 bench`, with several sets of lists; with DeepGEMM beside it where that is installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from dsv4core.cli.main import main

PEERS = "torch,deepgemm" if find_spec("deep_gemm") else "torch"
COMMON = ("bench", "backend=triton", "model=v4_flash", f"bench.peers=[{PEERS}]")
WRITERS = "insert_kv,compress,inverse_rope_quant"
SETS = (
    ("[prefill]", "[c4a]", f"[{WRITERS}]", "[8192]", "[8192]"),
    ("[prefill]", "[c128a]", "[compress]", "[8192]", "[8192]"),
    ("[decode]", "[c4a]", f"[{WRITERS},wq_b,wo_b]", "[1,64]", "[65536]"),
    ("[decode]", "[c128a]", "[compress]", "[1,64]", "[65536]"),
    ("[decode]", "[c4a]", "[indexer.logits,indexer.topk]", "[1]", "[1048576]"),
    ("[decode]", "[c4a]", "[indexer.logits,indexer.topk]", "[32]", "[65536]"),
    ("[decode]", "[c4a]", "[indexer.logits,indexer.topk]", "[128]", "[8192]"),
    ("[decode]", "[c4a]", "[mixed_table]", "[512]", "[65536]"),
    ("[decode]", "[c4a]", "[forward_mqa,indexer,o_proj]", "[1,64]", "[65536]"),
)
"""Phases, kinds, operations, query tokens and contexts that are measured together."""


def run(out: str, commit: str | None = None) -> int:
    """Measure all sets; the exit code is 1 where something failed."""
    names = ("phase", "kind", "op", "tokens", "context")
    common = (*COMMON, f"bench.out={out}", *([] if commit is None else [f"bench.commit={commit}"]))
    words = [[f"bench.{name}={own}" for name, own in zip(names, values, strict=True)] for values in SETS]
    return max(main([*common, *own]) for own in words)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
