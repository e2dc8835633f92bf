"""dsv4core's suite, on sm_90."""

from __future__ import annotations

import pytest
import torch

from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_caches import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_projection import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="It needs an sm_90 GPU.")
