"""Whose schedule a call takes, where plans or calls are captured; whose memory it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4core.api import SWA
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_shared_by_what_is_captured_alike(
    dsv4: Subject, planned: bool, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share a schedule behind a plan of their own kind; a graph of a layer alone makes its own."""
    from dsv4_plugin_flashmla.layer import SharedStep

    host = Host(dsv4, Case(SWA, heads=0))
    shared = host.kind.state
    assert not shared._captures()
    monkeypatch.setattr(SharedStep, "_captures", lambda self: planned)
    step = host.build((3, 200), (1, 1))
    host.plan_step(step)
    monkeypatch.setattr(SharedStep, "_captures", lambda self: called)
    ((_, holder),) = shared.turns
    q = host.query(step)
    for _ in range(2):  # layers of the kind
        host.attend(step, q, None)
    assert (holder.made_for is not None if hasattr(holder, "made_for") else holder.have_initialized) == (
        planned == called
    )


def test_the_kernels_own_memory_is_returned(dsv4: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decodes, which one call attends: nothing is copied."""
    from dsv4_plugin_flashmla import calls

    decode, returned = calls.decode, list[torch.Tensor]()

    def kept(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = decode(*arguments)
        returned.append(out)
        return out, lse

    monkeypatch.setattr(calls, "decode", kept)
    host = Host(dsv4, Case(SWA, heads=40))
    step = host.step((300, 20), (1, 1))
    output = host.attend(step, host.query(step), None)
    (out,) = returned
    assert output.data.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
