"""Others who do the same, called directly: a row of theirs is a backend named `peer:<name>`.

A peer gets the inputs that a backend of dsv4core was planned for. Where it reads another format, the rows are
converted beforehand, and its row names the format that it read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from dsv4core.api import ConfigError
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import Measured
from dsv4core.bench.peers import deepgemm, flashinfer, flashmla, plain, transformers

PACKAGES = {
    "torch": "torch",
    "flashmla": "flash_mla",
    "flashinfer": "flashinfer",
    "deepgemm": "deep_gemm",
    "transformers": "transformers",
}
PEERS: Mapping[str, Mapping[str, Callable[[Inputs], Measured]]] = {
    "torch": {
        "forward_mqa": plain.attention,
        "o_proj": plain.projection,
        "indexer.topk": plain.index_topk,
        "wq_b": partial(plain.product, "wq_b"),
        "wo_b": partial(plain.product, "wo_b"),
    },
    "flashmla": {"forward_mqa": flashmla.attention, "forward_mqa.step": flashmla.attention},
    "flashinfer": {"forward_mqa": flashinfer.attention, "forward_mqa.step": flashinfer.wrapper_alone},
    "deepgemm": {
        "o_proj": deepgemm.projection,
        "indexer": deepgemm.index_logits,
        "indexer.logits": deepgemm.index_logits,
    },
    "transformers": {"layer": transformers.layer},
}
"""What makes each peer's calls for an operation, or for the part of it that the peer does."""


def check_peer(name: str) -> None:
    """Check that a peer can be called.

    Raises:
        ConfigError: There is no such peer, or its package is not installed.
    """
    if name not in PEERS:
        raise ConfigError(f"There is no peer {name!r}; the peers are {', '.join(PEERS)}.")
    if find_spec(PACKAGES[name]) is None:
        raise ConfigError(f"The peer {name!r} needs the package {PACKAGES[name]}, which is not installed.")


def peer_version(name: str) -> dict[str, str]:
    """The distribution of a peer and its version."""
    for distribution in packages_distributions().get(PACKAGES[name], ()):
        try:
            return {distribution: version(distribution)}
        except PackageNotFoundError:
            continue
    return {}
