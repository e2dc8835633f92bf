"""The adapter in a real vLLM 0.32 on a CPU, beside vLLM's own attention: `make test-vllm`.

Each case is served three times: by dsv4core with vLLM's own attention beside it on the same caches, by
dsv4core alone, and by vLLM alone. Where the processor lacks AVX-512, plain torch stands in for vLLM's kernels
in all of them; the log says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from dsv4_vllm_job.checkpoint import write_checkpoint

from dsv4core.testing.tolerances import LAYER_OUTPUT

pytestmark = pytest.mark.vllm

SERVE = Path(__file__).parent / "serve.py"
OURS = {"dsv4": {"backend": "reference"}}
CASES = {
    "one rank": (),
    "prefix caching": ("--prefix-caching",),
    "two ranks": ("--tensor-parallel", "2"),
    "two ranks, prefix caching": ("--tensor-parallel", "2", "--prefix-caching"),
}
MARGIN = 0.25  # of logits: two steps of bf16 between 16 and 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


def serve(checkpoint: Path, config: dict[str, Any], *words: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(config), *words]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=checkpoint,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def layer_errors(path: Path, ranks: int) -> dict[int, float]:
    """The largest relative error of a layer's output by compression ratio, over steps, layers and ranks."""
    worst: dict[int, float] = defaultdict(float)
    for rank in range(ranks):
        for line in Path(f"{path}.{rank}").read_text().splitlines():
            found = json.loads(line)
            worst[found["ratio"]] = max(worst[found["ratio"]], found["rel_err"])
    return dict(worst)


def batches(path: Path) -> set[tuple[bool, bool]]:
    """Whether a step had decodes, and prefills: all combinations that occurred."""
    lines = [json.loads(line) for line in Path(f"{path}.0").read_text().splitlines()]
    assert max(line["tokens"] for line in lines) <= 512, "no chunk of a prompt is longer"
    return {(line["decodes"] > 0, line["prefills"] > 0) for line in lines}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_beside_vllms_own_attention(checkpoint: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    shadow = tmp_path / "shadow"
    serve(checkpoint, OURS, *words, DSV4_JOB_SHADOW=str(shadow))
    ours, own = (serve(checkpoint, config, *words) for config in (OURS, {}))
    errors = layer_errors(shadow, ranks=2 if "--tensor-parallel" in words else 1)
    print(f"\nrelative error by ratio {errors}")
    print(f"tokens/s: {ours['tokens_per_second']:.1f}, vLLM's own {own['tokens_per_second']:.1f}")
    assert set(errors) == {1, 4, 128}
    assert batches(shadow) == {(False, True), (True, True), (True, False)}, (
        "chunks and mixed batches did not occur"
    )
    assert max(errors.values()) <= LAYER_OUTPUT["fp8_ds_mla"]
    if "--prefix-caching" in words:
        assert max(ours["cached"]) >= 256
    for made, expected, margins in zip(ours["tokens"], own["tokens"], own["margins"], strict=True):
        split = next(
            (n for n, pair in enumerate(zip(made, expected, strict=True)) if pair[0] != pair[1]), None
        )
        print(
            f"tokens equal: {len(made)}"
            if split is None
            else f"tokens equal: {split}, margin {margins[split]:.3f}"
        )
        assert split is None or margins[split] <= MARGIN, (made, expected, margins)


MISTAKES = [
    (
        {"dsv4": {"backend": "flashmla"}},
        "Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`.",
    ),
    ({"dsv4": {"backnd": "reference"}}, "has no key 'backnd'; its keys are backend, options."),
]


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(("config", "text"), MISTAKES)
def test_a_mistake_ends_the_server_with_its_reason(
    checkpoint: Path, config: dict[str, Any], text: str, ranks: str
) -> None:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(config), "--tensor-parallel", ranks]
    done = subprocess.run(command, cwd=checkpoint, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert text in done.stdout + done.stderr


def test_a_rank_that_lacks_the_backend_ends_all_of_them(checkpoint: Path) -> None:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(OURS), "--tensor-parallel", "2"]
    environment = {**os.environ, "DSV4_JOB_UNEVEN": "reference"}
    done = subprocess.run(
        command, env=environment, cwd=checkpoint, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "Rank 1 of 2: backend=reference cannot run this request" in text
    assert "DSV4_DISABLE" in text
