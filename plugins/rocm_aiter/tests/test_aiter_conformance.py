"""dsv4core's suite on a stub of AITER for gfx950, where every route is AITER's but insert and compressor.

On a machine of AMD's with AITER, all of it on the backend itself.
"""

import torch

from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_projection import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403

if torch.version.hip is not None and torch.cuda.is_available():
    from dsv4core.testing.suite.test_caches import *  # noqa: F403
else:
    del test_layer_of_real_size  # noqa: F821  half a minute each
