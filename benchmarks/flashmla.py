"""What `backend=flashmla` takes beside FlashMLA itself, and layers beside `backend=triton`'s.

    python benchmarks/flashmla.py benchmarks/results/h200/flashmla.jsonl [commit]

needs FlashMLA, and DeepGEMM for the output projection and the scores.
"""

from __future__ import annotations

import sys

from dsv4core.cli.main import main

COMMON = ("bench", "bench.phase=[decode]", "bench.context=[65536]", "kv_cache_dtype=fp8_ds_mla")
SETS = (
    # What our tables, schedule and call add.
    *(
        (
            *("backend=flashmla", "bench.peers=[flashmla]", f"model={model}", f"bench.kind=[{kind}]"),
            *("bench.op=[forward_mqa.step]", f"bench.tokens={tokens}"),
        )
        for model, kind, tokens in (
            ("v4_flash", "swa,c4a,c128a", "[1,8,64,512]"),
            ("v4_pro", "c4a", "[1,64,512]"),
        )
    ),
    *(
        (
            *(
                f"backend={backend}",
                "model=v4_flash",
                "bench.kind=[swa,c4a,c128a]",
                "bench.tokens=[1,64,256]",
            ),
            "bench.op=[layer.step]",
        )
        for backend in ("flashmla", "triton")
    ),
    # The order of `auto` by heads: 64 are above.
    *(
        (
            *(f"backend={backend}", f"model={model}", f"request.tensor_parallel={ranks}"),
            *("bench.op=[layer.step]", "bench.kind=[c4a,c128a]", "bench.tokens=[1,64]"),
        )
        for model, ranks in (("v4_pro", 1), ("v4_flash", 2), ("v4_flash", 4), ("v4_flash", 8))
        for backend in ("flashmla", "triton")
    ),
    (
        *("backend=flashmla", "model=v4_flash", "bench.kind=[c4a]", "bench.tokens=[1,64,256]"),
        "bench.op=[indexer.logits,o_proj]",
    ),
    *(
        (
            *("backend=flashmla", f"backend.prefill={where}", "model=v4_flash", "bench.kind=[c4a]"),
            *("bench.op=[forward_mqa]", "bench.phase=[prefill]", "bench.tokens=[4096]"),
        )
        for where in ("gather", "in_place")
    ),
    *(
        (
            *(f"backend={backend}", "model=v4_flash", "bench.kind=[c4a]", "bench.phase=[prefill]"),
            *("bench.op=[indexer.logits]", "bench.tokens=[512,4096]"),
        )
        for backend in ("flashmla", "triton")
    ),
)


def run(out: str, commit: str | None = None) -> int:
    """Measure all sets; the exit code is 1 where something failed."""
    common = [*COMMON, f"bench.out={out}", *([] if commit is None else [f"bench.commit={commit}"])]
    return max(main([*common, *own]) for own in SETS)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
