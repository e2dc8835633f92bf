"""One layer of each kind on a CPU, beside transformers' eager attention on the same fp32 weights, in one run.

    python benchmarks/layer_vs_transformers.py [--out benchmarks/results/cpu/layer_vs_transformers.jsonl]

Prefill of 4,096 tokens in one step, and a decode step at 4,096 and 16,384 tokens of context. Both sides are
checked against each other before they are timed, and take turns. `plan` is what all layers share in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import DynamicCache

from dsv4core.api import Limits, Request
from dsv4core.bench.peers.transformers import Layer
from dsv4core.bench.rows import provenance
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.stack import AttentionStack, load_layer

PREFILL, CONTEXTS, CHUNK, STEPS = 4096, (4096, 16384), 1024, 100
KINDS = {
    "swa": "sliding_attention",
    "c4a": "compressed_sparse_attention",
    "c128a": "heavily_compressed_attention",
}
HEADS, HIDDEN = 8, 512


def write_model(directory: Path, layer_type: str) -> transformers.DeepseekV4ForCausalLM:
    """A model of one layer, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        q_lora_rank=256,
        n_routed_experts=2,
        num_experts_per_tok=1,
        layer_types=[layer_type],
        o_groups=8,
        o_lora_rank=128,
        index_n_heads=8,
        index_topk=512,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        initializer_range=0.05,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


class Peer:
    """transformers' attention module of one layer, with a cache that grows."""

    def __init__(self, model: transformers.DeepseekV4ForCausalLM) -> None:
        self.own = Layer(model.config, model.model.layers[0].self_attn, model.model.rotary_emb)
        self.cache = DynamicCache(config=model.config)

    def plan(self, start: int, hidden: torch.Tensor) -> Any:
        """What all layers share in a step: the mask, and cosines and sines."""
        return self.own.plan(start, hidden, self.cache)

    def layer(self, hidden: torch.Tensor, plan: Any) -> torch.Tensor:
        """Attention of `hidden` `[1, tokens, hidden]`."""
        return self.own.attend(hidden, plan, self.cache)


class Ours:
    """The reference backend's layer with fp32 caches."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        length = max(CONTEXTS) + 2 * STEPS
        request = Request(
            platform="cpu",
            arch="",
            model=checkpoint.shape,
            num_heads=HEADS,
            limits=Limits(PREFILL, 1, length, PREFILL),
            kv_cache_dtype="fp32",
            index_dtype="fp32",
            dtype="float32",
        )
        selection, device = select(request, "reference"), torch.device("cpu")
        self.stack = AttentionStack(selection, [load_layer(selection, checkpoint, 0, device)], device)

    def plan(self, start: int, hidden: torch.Tensor) -> Any:
        """What all layers of the kind share in a step: lengths, tables, slots."""
        return self.stack.plan([start], [hidden.shape[1]])

    def layer(self, hidden: torch.Tensor, plan: Any) -> torch.Tensor:
        """As `Peer.layer`."""
        return self.stack.attend(self.stack.layers[0], hidden[0], plan)[0][None]


Side = Peer | Ours


def timed_step(side: Side, start: int, hidden: torch.Tensor) -> tuple[float, float]:
    """Microseconds of the plan and of the layer."""
    times = [time.perf_counter()]
    plan = side.plan(start, hidden)
    times.append(time.perf_counter())
    side.layer(hidden, plan)
    times.append(time.perf_counter())
    return (times[1] - times[0]) * 1e6, (times[2] - times[1]) * 1e6


def measure(
    makers: dict[str, Callable[[], Side]], hidden: torch.Tensor
) -> dict[tuple[str, str, str, int], float]:
    """Median microseconds by side, operation, phase and context. The sides take turns."""
    samples: dict[tuple[str, str, str, int], list[float]] = {}

    def take(phase: str, context: int, sides: dict[str, Side], start: int, tokens: int) -> None:
        part = hidden[:, start : start + tokens]
        for name, side in sides.items():
            for op, us in zip(("plan", "layer"), timed_step(side, start, part), strict=True):
                samples.setdefault((name, op, phase, context), []).append(us)

    for _ in range(3):
        take("prefill", PREFILL, {name: make() for name, make in makers.items()}, 0, PREFILL)
    sides, done = {name: make() for name, make in makers.items()}, 0
    for context in CONTEXTS:
        while done < context:
            count = min(CHUNK, context - done)
            for side in sides.values():
                timed_step(side, done, hidden[:, done : done + count])
            done += count
        for _ in range(STEPS):
            take("decode", context, sides, done, 1)
            done += 1
    return {key: statistics.median(values) for key, values in samples.items()}


def main() -> None:
    """Check, measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    hidden = torch.randn(1, max(CONTEXTS) + 2 * STEPS, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows = []
    for kind, layer_type in KINDS.items():
        with tempfile.TemporaryDirectory() as directory:
            model = write_model(Path(directory), layer_type)
            checkpoint = Checkpoint.open(directory)
            makers: dict[str, Callable[[], Side]] = {
                "reference": lambda checkpoint=checkpoint: Ours(checkpoint),
                "peer:transformers": lambda model=model: Peer(model),
            }
            check(makers, hidden[:, :1024], kind)
            for (backend, op, phase, context), us in measure(makers, hidden).items():
                rows.append(row(op, backend, kind, phase, context, us))
    show(rows)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in rows))


def check(makers: dict[str, Callable[[], Side]], hidden: torch.Tensor, kind: str) -> None:
    """Both sides compute the same, or the comparison means nothing."""
    mine, theirs = (side.layer(hidden, side.plan(0, hidden)) for side in (make() for make in makers.values()))
    error = float((mine - theirs).norm() / theirs.norm())
    if error > 1e-4:
        raise SystemExit(f"{kind}: the two sides differ by {error:.1e}; nothing was timed.")


def row(op: str, backend: str, kind: str, phase: str, context: int, us: float) -> dict[str, Any]:
    """One measurement in the benchmark's schema."""
    return {
        "op": op,
        "backend": backend,
        "dtype": "float32",
        "kv_format": "fp32",
        "shape": {
            "heads": HEADS,
            "tokens": PREFILL if phase == "prefill" else 1,
            "context": context,
            "hidden": HIDDEN,
        },
        "phase": phase,
        "kind": kind,
        "mode": "eager",
        "us": round(us, 1),
        **provenance("torch", "transformers"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print both sides, row by row."""
    table = Table(title="milliseconds, one layer, fp32 caches, one run")
    for name in ("kind", "op", "phase", "context"):
        table.add_column(name)
    for name in ("dsv4core", "transformers", "ratio"):
        table.add_column(name, justify="right")
    pairs: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for line in rows:
        key = (line["kind"], line["op"], line["phase"], line["shape"]["context"])
        pairs.setdefault(key, {})[line["backend"]] = line["us"] / 1e3
    for (kind, op, phase, context), times in pairs.items():
        ours, peer = times["reference"], times["peer:transformers"]
        table.add_row(kind, op, phase, f"{context:,}", f"{ours:,.2f}", f"{peer:,.2f}", f"{peer / ours:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
