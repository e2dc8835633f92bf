"""dsv4core's suite on FA3; on a GPU that has it, all of the suite."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403

if torch.cuda.is_available():
    from dsv4core.testing.suite.test_caches import *  # noqa: F403
    from dsv4core.testing.suite.test_indexer import *  # noqa: F403
    from dsv4core.testing.suite.test_projection import *  # noqa: F403

del test_layer_of_real_size  # noqa: F821  half a minute each


@pytest.fixture
def dsv4(fa3: Subject) -> Subject:
    return fa3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Launches are counted on a GPU.")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("kind", "tables"), [(SWA, 1), (C4A, 3), (C128A, 1)], ids=["swa", "c4a", "c128a"])
def test_launches_that_make_tables(fa3: Subject, kind: LayerKind, tables: int, captured: bool) -> None:
    """A step and three layers, launched or captured: one table, or one a layer where layers choose."""
    from triton import knobs

    host = Host(fa3, Case(kind, heads=64, host_lengths=True, graph=captured))
    step = host.step((700, 300), (1, 1))
    q, selected = host.query(step), host.select(step)
    host.attend(step, q, selected)  # from now on the plan knows how the pools lie
    launched: list[str] = []

    def note(launch: Any) -> None:
        launched.append(launch.get()["name"])

    def once() -> None:
        host.kind.plan_step(step)
        for _ in range(3):
            host.attend(step, q, selected)

    host.kind.prepare_step(step)
    once()
    knobs.runtime.launch_enter_hook.add(note)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()) if captured else nullcontext():
            once()
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    assert sum(name.startswith("_number") for name in launched) == tables, launched
