"""All that computes of the suite on a GPU, with a backend that can be captured: graphs, waiting, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_caches import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_projection import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403
from tests.suite.test_capturable import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


@pytest.fixture
def dsv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    declare_backends(tmp_path, "capturable", BACKENDS)
    isolate(tmp_path, monkeypatch)
    return Subject("capturable", device=torch.device("cuda"))
