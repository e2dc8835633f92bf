"""A little of the suite on `backend=triton`, in Triton's interpreter: that takes minutes for a GPU's second.

On a GPU `dsv4 check triton` runs all of it.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.backends.triton import TritonOptions
from dsv4core.ops import triton as kernels
from dsv4core.ops.gather_rows.triton import gather_rows
from dsv4core.step import gathered
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention, test_caches, test_projection
from dsv4core.testing.suite.test_calls import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import test_topk  # noqa: F401


@pytest.fixture
def dsv4() -> Subject:
    if torch.cuda.is_available():
        return Subject("triton", device=torch.device("cuda"))
    return Subject("triton", device=torch.device("cpu"), dtype="float32")  # bf16 products are wrong there


@pytest.mark.parametrize("entries", [1, 129])
def test_widths(dsv4: Subject, entries: int) -> None:
    test_attention.test_widths(dsv4, entries)


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
def test_gathered_prefills(dsv4: Subject, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind decodes; two chunks; a request that the window holds, and one that it does not."""
    workspaces: list[StorageWeakRef] = []

    def gather(*args: Any) -> None:
        if args[0] is host.caches.window:
            gc.collect()  # the interpreter's own cycles
            assert all(own.expired() for own in workspaces), (
                "A chunk's workspace is still there at the next one."
            )
        gather_rows(*args)
        workspaces.append(StorageWeakRef(args[-1].untyped_storage()))

    monkeypatch.setattr(kernels, "gather_rows", gather)
    monkeypatch.setattr(gathered, "gather_area", lambda *sizes: 600 if kind is C4A else 300)
    subject = replace(dsv4, options=TritonOptions(prefill="gather"))
    host = Host(subject, Case(kind, heads=0, host_lengths=True))
    test_attention.compare(host, (700, 300, 64, 0), (1, 9, 5, 7), want_lse=True)
    assert len(workspaces) == (2 if kind is SWA else 4)


def test_queries(dsv4: Subject) -> None:
    test_caches.test_queries(dsv4, SWA)


def test_output_projection(dsv4: Subject) -> None:
    test_projection.test_rotating_back_and_projecting(dsv4, 5)
