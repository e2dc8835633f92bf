"""dsv4core's suite on FA3; on a GPU that has it, all of the suite."""

import pytest
import torch

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
