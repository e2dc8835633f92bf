"""What ranks agree on: the same selection on each, or one line, and never a rank that waits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_mode import GraphMode

from dsv4core import __version__
from dsv4core.api import ConfigError, DSV4Error

REFERENCE = {"backend": "reference"}


@pytest.fixture
def ranks(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets this process be rank 0 of two, and the other answer what a test says."""

    def answer(change: Any) -> None:
        state = import_module("vllm.distributed.parallel_state")
        group = SimpleNamespace(world_size=2, cpu_group=None)
        monkeypatch.setattr(state, "get_tp_group", lambda: group)
        monkeypatch.setattr(state, "get_tensor_model_parallel_world_size", lambda: 2)

        def gather(found: list[Any], own: Any, group: object) -> None:
            found[:] = [own, change(*from_another_process(own))]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        monkeypatch.setattr(torch.distributed, "monitored_barrier", lambda *how, **more: None)

    return answer


def from_another_process(value: Any) -> Any:
    """The same, with hashes of another seed: sets may come in another order."""
    program = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input=pickle.dumps(value), env=environment, stdout=subprocess.PIPE, check=True
    )
    return pickle.loads(done.stdout)


def make_layer(vllm_config: Any) -> Any:
    model = import_module("vllm.models.deepseek_v4.cpu.model")
    return model.make_layer(vllm_config, "model.layers.1.attn")


def test_two_ranks_that_agree(ranks: Any, config: Any) -> None:
    ranks(lambda verdict, summary: (verdict, dict(summary)))
    host = make_layer(config(REFERENCE))._dsv4_host
    assert (host.request.num_heads, host.request.tensor_parallel) == (4, 2)
    assert host.spec(1).num_heads == 4


def test_a_rank_that_selects_differently(ranks: Any, config: Any) -> None:
    ranks(lambda verdict, summary: (verdict, {**summary, "version": "9.9"}))
    with pytest.raises(ConfigError) as caught:
        make_layer(config(REFERENCE))
    assert str(caught.value) == (
        f"Rank 1 of 2 has version=9.9, and rank 0 has {__version__}; install the same packages everywhere."
    )


def test_a_rank_whose_caches_differ(ranks: Any, config: Any) -> None:
    ranks(lambda verdict, summary: (verdict, {**summary, "cache.window": "fnuz"}))
    with pytest.raises(ConfigError, match=r"Rank 1 of 2 has cache\.window=fnuz, and rank 0 has KVC"):
        make_layer(config(REFERENCE))


def test_a_rank_that_never_comes(ranks: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(lambda verdict, summary: (verdict, summary))

    def barrier(*how: object, **more: object) -> None:
        raise RuntimeError("Rank 1 failed to pass monitoredBarrier in 120000 ms")

    monkeypatch.setattr(torch.distributed, "monitored_barrier", barrier)
    with pytest.raises(ConfigError) as caught:
        make_layer(config(REFERENCE))
    assert str(caught.value) == (
        "A rank did not answer within 120 s (RuntimeError: Rank 1 failed to pass monitoredBarrier in 120000 "
        "ms); install dsv4-vllm on every machine, and name dsv4 wherever VLLM_PLUGINS is set."
    )


def test_drift_on_one_rank_reaches_the_others(
    ranks: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ranks(lambda verdict, summary: (told.append(verdict) or verdict, summary))
    sparse = import_module("vllm.models.deepseek_v4.cpu.cpu_sparse")
    monkeypatch.setattr(sparse.DeepseekV4CPUAttention, "forward_mqa", lambda self, q: None)
    with pytest.raises(DSV4Error, match="forward_mqa takes"):
        make_layer(config(REFERENCE))
    assert "forward_mqa takes (self, q)" in told[0]


def test_a_rank_that_cannot(ranks: Any, config: Any) -> None:
    ranks(lambda verdict, summary: ("backend=reference cannot run this request: [platform] no.", {}))
    with pytest.raises(ConfigError) as caught:
        make_layer(config(REFERENCE))
    assert str(caught.value) == "Rank 1 of 2: backend=reference cannot run this request: [platform] no."


def test_ranks_that_all_cannot(ranks: Any, config: Any, absent: str) -> None:
    asked: list[str] = []
    ranks(lambda verdict, summary: (asked.append(verdict) or verdict, summary))
    with pytest.raises(ConfigError) as caught:
        make_layer(config({"backend": absent}))
    assert asked == [str(caught.value)]
    assert "Run `pip install dsv4-plugin-acme`" in asked[0]


def test_any_failure_of_a_rank_reaches_the_others(
    ranks: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr("dsv4_vllm.choice.select", explode)
    ranks(lambda verdict, summary: (verdict, summary))
    with pytest.raises(DSV4Error, match="OSError: disk"):
        make_layer(config(REFERENCE))


def test_a_rank_that_fails_before_it_selects_reaches_the_others(
    ranks: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4_vllm.choice.machine_of", lambda device: 1 / 0)
    ranks(lambda verdict, summary: (verdict, summary))
    with pytest.raises(DSV4Error, match="ZeroDivisionError"):
        make_layer(config(REFERENCE))


def test_a_backend_with_work_before_each_replay(
    vllm: None, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4core.framework.manager import Backend

    monkeypatch.setattr("dsv4core.framework.checks._capability_reasons", lambda info, request: iter(()))
    monkeypatch.setattr(Backend, "implements", lambda self, hook: True)
    with pytest.raises(ConfigError) as caught:
        make_layer(config(REFERENCE, compilation_config__cudagraph_mode=GraphMode("FULL", "NONE")))
    assert str(caught.value) == (
        "backend=reference has host work before every replay of a graph, and vLLM has no place for it; set "
        "enforce_eager=True, or choose another one."
    )
