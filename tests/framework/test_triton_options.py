"""What `backend=triton` lets users choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4core.api import BackendUnavailable, ConfigError, Limits, Request
from dsv4core.backends.triton import TritonOptions
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS

FLASH = PRESETS["v4_flash"]
REQUEST = Request("cuda", "sm_90", FLASH, FLASH.num_attention_heads, Limits(8192, 8, 1 << 20, 8192))
GATHER = TritonOptions(prefill="gather")


def test_gathering_is_in_the_plan() -> None:
    """Room for four requests of a million tokens: their entries, windows and queries, 1 KB each; a table."""
    in_place, gather = (select(REQUEST, "triton", own).plans["c4a"] for own in (TritonOptions(), GATHER))
    area = 4 * ((1 << 18) + 128 + 8192) + 2 * (16 * 8 + 64)
    assert gather.workspace_bytes - in_place.workspace_bytes == area * 1024 + 4 * 8192 * 132
    assert (in_place.variant, gather.variant) == ("triton (prefill=in_place)", "triton (prefill=gather)")


def test_gathering_needs_lengths() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(REQUEST, host_lengths=False), "triton", GATHER)
    assert (
        "[option] backend.prefill=gather plans workspaces by the lengths of a step, and the host has none. "
        "Give Step.host_lengths, or set backend.prefill=in_place."
    ) in str(caught.value)


def test_another_word_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^backend.prefill=gathered is not known; write in_place or gather\.$"
    ):
        TritonOptions(prefill="gathered")
