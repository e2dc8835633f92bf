"""Whose schedule a call takes, where plans or calls are captured."""

from __future__ import annotations

import pytest
import torch

from dsv4core.api import SWA, Limits, Request
from dsv4core.model.shapes import PRESETS, layer_spec


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_shared_by_what_is_captured_alike(
    stub: None, planned: bool, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share a schedule behind a plan of their own kind; a graph of a layer alone makes its own."""
    from dsv4_plugin_flashmla import calls, plugin
    from dsv4_plugin_flashmla.layer import SharedStep

    model = PRESETS["v4_flash"]
    request = Request("cuda", "sm_90", model, 64, Limits(8, 8, 256, 8), probe="static")
    plan = plugin.dsv4_plan_layer(request, layer_spec(model, 0), plugin.FlashMLAOptions())
    shared = SharedStep(request, SWA, plan, False, torch.device("cpu"))
    assert not shared._captures()
    holder = calls.schedule()
    monkeypatch.setattr(shared, "_captured", planned)
    monkeypatch.setattr(shared, "_captures", lambda: called)
    found = [shared.schedule(holder) for _ in range(2)]
    if planned == called:
        assert found == [holder, holder]
        assert found[0] is found[1] is holder
    else:
        assert holder is not found[0] is not found[1]
