"""What a backend imports. Torch is never imported here, so that listing and selecting stay fast.

Everything in `__all__` is public: its signatures and fields change only with `API_VERSION`.
"""

from dsv4core.api.errors import (
    BackendUnavailable,
    CacheError,
    CheckpointError,
    ConfigError,
    DSV4Error,
    PluginError,
    WeightError,
)
from dsv4core.api.hookspecs import API_VERSION, SUPPORTED_API, hookimpl
from dsv4core.api.kvcache import KVCacheFormat, KVCacheLayout, KVCachePart, PageSizes
from dsv4core.api.layer import (
    OWN_OPS,
    AttentionOutput,
    LayerCaches,
    LayerPlan,
    LayerScales,
    LayerSpec,
    LayerWeights,
    OutputSpec,
    Weight,
)
from dsv4core.api.model import C4A, C128A, SWA, LayerKind, ModelShape, RopeParameters, YarnParameters
from dsv4core.api.options import BackendOptions
from dsv4core.api.selection import (
    CAPABILITIES,
    REASON_CODES,
    BackendInfo,
    Decision,
    Limits,
    Reason,
    Request,
    Requirement,
)
from dsv4core.api.step import CacheTable, HostLengths, Step

__all__ = [
    "API_VERSION",
    "C4A",
    "C128A",
    "CAPABILITIES",
    "OWN_OPS",
    "REASON_CODES",
    "SUPPORTED_API",
    "SWA",
    "AttentionOutput",
    "BackendInfo",
    "BackendOptions",
    "BackendUnavailable",
    "CacheError",
    "CacheTable",
    "CheckpointError",
    "ConfigError",
    "DSV4Error",
    "Decision",
    "HostLengths",
    "KVCacheFormat",
    "KVCacheLayout",
    "KVCachePart",
    "LayerCaches",
    "LayerKind",
    "LayerPlan",
    "LayerScales",
    "LayerSpec",
    "LayerWeights",
    "Limits",
    "ModelShape",
    "OutputSpec",
    "PageSizes",
    "PluginError",
    "Reason",
    "Request",
    "Requirement",
    "RopeParameters",
    "Step",
    "Weight",
    "WeightError",
    "YarnParameters",
    "hookimpl",
]
