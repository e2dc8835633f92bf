"""dsv4core's suite on a stub of AITER for gfx950, where every route is AITER's but insert and compressor."""

from dsv4core.testing.suite.test_attention import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import *  # noqa: F403
from dsv4core.testing.suite.test_layers import *  # noqa: F403
from dsv4core.testing.suite.test_projection import *  # noqa: F403
from dsv4core.testing.suite.test_steps import *  # noqa: F403

del test_layer_of_real_size  # noqa: F821  half a minute each
