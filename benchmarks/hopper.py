"""What `backend=hopper` takes for attention beside FlashMLA, and layers beside the other backends'.

    python benchmarks/hopper.py benchmarks/results/h200/hopper.jsonl [commit]

needs FlashMLA, and DeepGEMM for the output projection.
"""

from __future__ import annotations

import sys

from dsv4core.cli.main import main

COMMON = ("bench", "bench.context=[65536]", "kv_cache_dtype=fp8_ds_mla")
TOKENS = "bench.tokens=[1,8,16,32,64,128,256,512]"
C4A, ATTENTION, DECODE = "bench.kind=[c4a]", "bench.op=[forward_mqa]", "bench.phase=[decode]"
BESIDE = ("backend=hopper", "bench.peers=[flashmla]", ATTENTION, DECODE)
SETS = (
    *((*BESIDE, f"model={model}", C4A, TOKENS) for model in ("v4_flash", "v4_pro")),
    *(
        (*BESIDE, "model=v4_flash", C4A, f"request.tensor_parallel={ranks}", "bench.tokens=[64]")
        for ranks in (4, 8)
    ),
    (*BESIDE, "model=v4_flash", "bench.kind=[swa]", "bench.tokens=[1,64,128,512]"),
    (
        *(*BESIDE, "model=v4_flash", "bench.kind=[c128a]", "bench.tokens=[1,64,128]"),
        "bench.context=[1048576]",
    ),
    *(
        (*own, "model=v4_flash", C4A, ATTENTION, "bench.phase=[prefill]", "bench.tokens=[4096]")
        for own in (("backend=hopper",), ("backend=flashmla", "backend.prefill=gather"))
    ),
    *(
        (
            *(f"backend={backend}", f"model={model}", "bench.kind=[swa,c4a,c128a]", "bench.op=[layer.step]"),
            *(DECODE, "bench.tokens=[1,64,256]"),
        )
        for model in ("v4_flash", "v4_pro")
        for backend in ("hopper", "flashmla", "triton")
    ),
    # `auto` with fewer heads, and on plain rows.
    *(
        (
            *(f"backend={backend}", "model=v4_flash", f"request.tensor_parallel={ranks}", DECODE),
            *("bench.kind=[c4a,c128a]", "bench.op=[layer.step]", "bench.tokens=[1,64]"),
        )
        for ranks in (2, 4, 8)
        for backend in ("hopper", "triton")
    ),
    *(
        (
            *(f"backend={backend}", f"kv_cache_dtype={dtype}", "model=v4_flash", DECODE),
            *("bench.kind=[c4a,c128a]", "bench.op=[forward_mqa,layer.step]", "bench.tokens=[1,64,256]"),
        )
        for dtype in ("bf16", "fp8_e4m3")
        for backend in ("hopper", "triton")
    ),
    *(
        (
            *("backend=hopper", "backend.operands=f16", f"model={model}", C4A, ATTENTION, DECODE),
            "bench.tokens=[1,32,128,512]",
        )
        for model in ("v4_flash", "v4_pro")
    ),
)


def run(out: str, commit: str | None = None) -> int:
    """Measure all sets; the exit code is 1 where something failed."""
    common = [*COMMON, f"bench.out={out}", *([] if commit is None else [f"bench.commit={commit}"])]
    return max(main([*common, *own]) for own in SETS)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
