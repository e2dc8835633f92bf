"""dsv4core's suite: on stubs of the libraries, or on a GPU with the real ones.

Writers and projections are the core's on a CPU, and checked there by themselves.
"""

import torch

from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403

if torch.cuda.is_available():
    from dsv4core.testing.suite.test_caches import *  # noqa: F403
    from dsv4core.testing.suite.test_projection import *  # noqa: F403
else:
    del test_layer_of_real_size  # noqa: F821  half a minute each
