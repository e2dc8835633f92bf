"""The order in which `auto` tries backends. It is a configuration's: a package cannot put itself into it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dsv4core.api import ConfigError, Request

DEFAULT_ORDER: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "cpu": ("reference",),
        # The reference is a hundred times too slow for a GPU: to fall back to it would be a silent failure.
        "cuda": ("triton",),
        # By geometric means of C4A and C128A decode layers of 1 and 64 tokens on an H200 (docs/benchmarks.md)
        # hopper takes 0.90 of flashmla's time with 64 heads and 0.99 with 128, of triton's 0.91 with 32, 16
        # and 8 (fewer are computed alike), on plain rows 0.94 (bf16) and 0.93 (FP8). flashmla takes 0.87 of
        # triton's with 128 heads, 0.99 with 64 (0.75 at 256 tokens), and with 32, 16 and 8, which it pads as
        # it does fewer, 1.03, 1.06 and 1.07. On plain rows flashinfer takes 1.21 (FP8), and 0.97 (bf16),
        # behind minutes of compilation.
        "sm_90": ("hopper", "flashmla", "triton", "flashinfer"),
        **{
            f"sm_90_heads_{heads}": ("hopper", "triton", "flashmla", "flashinfer")
            for heads in (1, 2, 4, 8, 16, 32)
        },
        # Not measured yet: no GPU of these has run any of them.
        "sm_100": ("flashinfer", "flashmla", "triton"),
        "sm_103": ("flashinfer", "triton"),
        "rocm": (),  # the core's kernels compile for AMD's chips, and have run on none
        "gfx942": ("rocm_aiter",),
        "gfx950": ("rocm_aiter",),
    }
)
"""Names by platform, or by architecture and perhaps heads. A backend moves up with measurements."""

_KEY = re.compile(r"([a-z]+|sm_\d+|gfx[0-9a-f]+)(_heads_\d+)?")


def check_order(order: Mapping[str, Sequence[str]]) -> None:
    """Check that each key names machines, so that a misspelt one is not passed over for ever.

    Raises:
        ConfigError: A key names no machine, or its value is no list of backends.
    """
    if not isinstance(order, Mapping):
        raise ConfigError(
            f"order={order!r} is no mapping; give lists of backends by machine, as in cpu=[a,b]."
        )
    for key, names in order.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"backend.order.{key} names no machine; write a platform (cpu, cuda, rocm) or an "
                "architecture (sm_90, gfx942), with _heads_16 after it for 16 query heads a rank."
            )
        if isinstance(names, str) or not all(isinstance(name, str) and name != "auto" for name in names):
            raise ConfigError(f"backend.order.{key}={names} is no list of backends to try; write [a,b].")


def order_of(request: Request, *orders: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The names to try, by the first order that has any for the request's machine.

    Within an order those for its architecture, else its platform; for its heads, else for any number.
    """
    heads = f"_heads_{request.num_heads}"
    machines = (request.arch + heads, request.arch, request.platform + heads, request.platform)
    return next((order[machine] for order in orders for machine in machines if machine in order), ())
