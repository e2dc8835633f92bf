"""The adapter in a real vLLM 0.32 on a CPU, beside vLLM's own attention: `make test-vllm`.

Each case is served three times: by dsv4core with vLLM's own attention beside it on the same caches, by
dsv4core alone, and by vLLM alone. Where the processor lacks AVX-512, plain torch stands in for vLLM's kernels
in all of them; the log says so.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dsv4_vllm_job.checkpoint import write_checkpoint

from dsv4core.testing.tolerances import ATTENTION

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"),
]

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


def run(command: list[str], folder: Path, seconds: int, environment: dict[str, str]) -> tuple[int, str]:
    """Run a server; its workers end with it, also where it hangs."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def serve(checkpoint: Path, config: dict[str, Any], *words: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(config), *words]
    code, output = run(command, checkpoint, 1800, environment)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert code == 0, output[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def layer_errors(path: Path, ranks: int) -> dict[int, float]:
    """The largest relative error of a token's head by compression ratio, over steps, layers and ranks."""
    found: dict[int, list[float]] = defaultdict(list)
    for rank in range(ranks):
        for line in map(json.loads, Path(f"{path}.{rank}").read_text().splitlines()):
            found[line["ratio"]].append(line["error"])
    assert all(math.isfinite(error) for errors in found.values() for error in errors)
    return {ratio: max(errors) for ratio, errors in found.items()}


def compared_tokens(made: list[int], expected: list[int], margins: list[float]) -> tuple[int, float | None]:
    """How many tokens are equal from the first on, and the margin of the one that is not."""
    for number, (one, other) in enumerate(zip(made, expected, strict=True)):
        if one != other:
            return number, margins[number]
    return len(made), None


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
    print(f"\nkernels of vLLM that plain torch stands in for: {ours['standins']}")
    print(f"largest relative error of a token's head by ratio: {errors}")
    print(f"tokens/s: {ours['tokens_per_second']:.1f}, vLLM's own {own['tokens_per_second']:.1f}")
    assert set(errors) == {1, 4, 128}
    assert batches(shadow) == {(False, True), (True, True), (True, False)}, (
        "chunks and mixed batches did not occur"
    )
    assert max(errors.values()) <= ATTENTION["bfloat16"], "both read the same bytes"
    if "--prefix-caching" in words:
        assert max(ours["cached"]) >= 256
    compared = [
        compared_tokens(*three) for three in zip(ours["tokens"], own["tokens"], own["margins"], strict=True)
    ]
    print("equal tokens, and the margin of the first other one:", compared)
    assert all(margin is None or margin <= MARGIN for _, margin in compared)
    assert sum(count for count, _ in compared) >= 16, "so few tokens prove little"


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
    code, output = run(command, checkpoint, 300, {})
    assert code != 0
    assert any(text in line for line in output.splitlines())


def test_a_rank_that_lacks_the_backend_ends_all_of_them(checkpoint: Path) -> None:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(OURS), "--tensor-parallel", "2"]
    code, output = run(command, checkpoint, 300, {"DSV4_JOB_UNEVEN": "reference"})
    assert code != 0
    refusal = "Rank 1 of 2: backend=reference cannot run this request"
    assert any(refusal in line and "DSV4_DISABLE" in line for line in output.splitlines())


def test_a_rank_without_the_adapter_is_not_waited_for(checkpoint: Path) -> None:
    command = [sys.executable, str(SERVE), str(checkpoint), json.dumps(OURS), "--tensor-parallel", "2"]
    code, output = run(command, checkpoint, 300, {"DSV4_JOB_LONE": "5"})
    assert code != 0
    assert any("A rank did not answer within 5 s" in line for line in output.splitlines())
