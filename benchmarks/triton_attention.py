"""What `backend=triton` takes for attention and for layers of decodes, beside FlashMLA where it is installed.

    python benchmarks/triton_attention.py benchmarks/results/h200/triton_attention.jsonl [commit]

FlashMLA reads packed rows, and 64 or 128 heads: it pads fewer.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from dsv4core.cli.main import main

COMMON = ("bench", "backend=triton", "bench.phase=[decode]", "bench.context=[65536]")
TOKENS = "bench.tokens=[1,8,16,32,64,128,256,512]"
PACKED, PLAIN = "kv_cache_dtype=fp8_ds_mla", "kv_cache_dtype=bf16"
C4A, ATTENTION = "bench.kind=[c4a]", "bench.op=[forward_mqa]"
SETS = (
    *(
        (f"model={model}", f"request.tensor_parallel={ranks}", dtype, C4A, ATTENTION, tokens)
        for model, ranks, tokens in (
            ("v4_flash", 1, TOKENS),
            ("v4_pro", 1, TOKENS),
            ("v4_flash", 4, "bench.tokens=[64]"),
            ("v4_flash", 8, "bench.tokens=[64]"),
        )
        for dtype in (PACKED, PLAIN)
    ),
    ("model=v4_flash", PACKED, "bench.kind=[swa,c128a]", ATTENTION, "bench.tokens=[1,64,128]"),
    (
        *("model=v4_flash", PACKED, "bench.kind=[c128a]", ATTENTION),
        *("bench.tokens=[1,64]", "bench.context=[1048576]"),
    ),
    *(
        ("model=v4_flash", PACKED, C4A, ATTENTION, "bench.phase=[prefill]", "bench.tokens=[4096]", where)
        for where in ("backend.prefill=in_place", "backend.prefill=gather")
    ),
    (
        *("model=v4_flash", PACKED, "bench.kind=[swa,c4a,c128a]", "bench.tokens=[1,64,256]"),
        "bench.op=[layer,project,insert_kv,compress,indexer,forward_mqa,o_proj]",
    ),
    (
        *("model=v4_flash", PACKED, "bench.kind=[swa,c4a,c128a]", "bench.tokens=[1,64]"),
        *("bench.op=[layer]", "bench.context=[1048576]"),
    ),
)


def run(out: str, commit: str | None = None) -> int:
    """Measure all sets; the exit code is 1 where something failed."""
    peers = ["bench.peers=[flashmla]"] if find_spec("flash_mla") else []
    common = [*COMMON, *peers, f"bench.out={out}", *([] if commit is None else [f"bench.commit={commit}"])]
    return max(main([*common, *own]) for own in SETS)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
