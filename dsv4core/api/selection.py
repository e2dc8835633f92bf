"""What is asked of a backend, and what it answers before anything is built. Plain data, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, get_args

from dsv4core.api.errors import ConfigError
from dsv4core.api.kvcache import PageSizes
from dsv4core.api.model import ModelShape
from dsv4core.api.options import BackendOptions

Platform = str
"""`cpu`, `cuda`, `rocm`, or the name of another of torch's device types (`xpu`, `npu`, …)."""
Seam = Literal["layer", "kernel"]
Probe = Literal["static", "host"]
Verdict = Literal["chosen", "rejected", "could-run", "not-reached"]

ARCH_PATTERNS: Mapping[str, str] = MappingProxyType({"cpu": r"", "cuda": r"sm_\d+", "rocm": r"gfx[0-9a-f]+"})
"""How architectures of a platform are written; those of other platforms are anybody's."""

REASON_CODES: Mapping[str, str] = MappingProxyType(
    {
        "platform": "the backend has no kernels for this platform",
        "arch": "the backend has no kernels for this architecture",
        "package-missing": "a package that the backend needs is not installed",
        "package-wrong": "another package is installed under the name of the needed one",
        "package-version": "the installed version of a needed package does not fit",
        "artifact-missing": "a compiled artifact that the backend needs is not there",
        "kv-dtype": "the asked kv_cache_dtype or index_dtype is not one of the backend's",
        "layout": "the host's cache layout cannot be read or written by the backend",
        "q-heads": "the number of query heads does not fit the kernels",
        "head-dim": "the head dimensions do not fit the kernels",
        "block-size": "a page size does not fit the kernels",
        "capability": "the request needs a capability that the backend does not declare",
        "model": "the model's shape or layer kinds are not served by the backend",
        "parallel": "the asked parallelism is not served by the backend",
        "option": "an option of the backend does not fit the request or the machine",
        "probe-error": "the backend's own checks raised",
        "broken": "the backend's package could not be loaded",
        "api": "the backend was written for another version of the contract",
        "conflict": "two distributions declare the same backend name",
        "disabled": "the backend was disabled by the user",
        "not-in-order": "the backend is not in the order that `auto` walks",
    }
)

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "kernel-seam": "serves a host that owns insert, compressor, indexer and caches",
        "lse": "returns the log-sum-exp of the attended scores",
        "defer-sink": "can leave the sink out, for a host that merges partial attention",
        "multi-token-decode": "a decode request may have several query tokens",
        "graph": "plan_step and everything hot can be captured in a CUDA or HIP graph",
        "strided-pages": "page strides may be larger than a page",
        "tensor-parallel": "runs with a rank's share of the heads",
        "needs-host-lengths": "needs the lengths of a step on the host (`Step.host_lengths`)",
        "private-output": "may hand its own o_proj an output of a format of its own",
        "deterministic": "a row's output does not depend on the other rows of its batch",
    }
)


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot run a request.

    Attributes:
        code: One of `REASON_CODES`.
        text: A sentence with the values at hand.
        fix: What the user can do, or None where nothing can be done.
    """

    code: str
    text: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            known = ", ".join(REASON_CODES)
            raise ValueError(f"reason code {self.code!r} is not known; the codes are: {known}.")

    def __str__(self) -> str:
        return f"[{self.code}] {self.text}" + (f" {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Decision:
    """What selection found about one backend.

    Attributes:
        backend: Its name.
        verdict: `chosen`; `rejected` for `reasons`; `could-run` where a named backend could not and this one
            could; `not-reached` where `auto` had found one before.
        reasons: Why it was rejected, else empty.
    """

    backend: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Requirement:
    """A package that a backend needs at run time. The core checks it from metadata, without an import.

    Attributes:
        module: What the backend imports, such as `flashinfer`.
        distribution: Who has to provide it, such as `flashinfer-python`.
        install: The command that installs it.
        version: The versions that fit, such as `>=0.6.14,<0.8`; empty where any does.
        alternatives: Other distributions that provide the same, as ROCm's builds do under names of their own.

    Raises:
        ValueError: `version` is no version specifier of PEP 440.
    """

    module: str
    distribution: str
    install: str
    version: str = ""
    alternatives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("module", "distribution", "install"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a requirement is empty; name it.")
        if self.version:
            from packaging.specifiers import SpecifierSet

            SpecifierSet(self.version)


@dataclass(frozen=True)
class BackendInfo:
    """A backend's description of itself.

    Attributes:
        api: Contract version it was written for, one of `SUPPORTED_API`.
        options: Its options class, a subclass of `BackendOptions`.
        platforms: Platforms it has kernels for.
        summary: One line for tables.
        requirements: Packages it needs at run time.
        capabilities: Names from `CAPABILITIES`.
        arch_capabilities: Further ones by architecture, where kernels differ.

    Raises:
        ValueError: A platform or a capability is not known.
    """

    api: int
    options: type[BackendOptions]
    platforms: tuple[Platform, ...]
    summary: str
    requirements: tuple[Requirement, ...] = ()
    capabilities: frozenset[str] = field(default_factory=frozenset)
    arch_capabilities: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)

    def on(self, arch: str) -> BackendInfo:
        """The same with its capabilities on an architecture."""
        further = self.arch_capabilities.get(arch, frozenset())
        return replace(self, capabilities=self.capabilities | further)

    def __post_init__(self) -> None:
        for name in ("platforms", "capabilities", "requirements"):
            # A string is a collection too, and `"cuda" in "cuda"` would pass for a while.
            if not isinstance(getattr(self, name), (tuple, frozenset)):
                raise ValueError(f"{name}={getattr(self, name)!r} cannot be; give a tuple or a frozenset.")
        for arch, further in self.arch_capabilities.items():
            if not isinstance(further, frozenset) or not any(
                re.fullmatch(pattern, arch) for pattern in ARCH_PATTERNS.values()
            ):
                raise ValueError(
                    f"arch_capabilities={dict(self.arch_capabilities)!r} cannot be; give frozensets by names "
                    "such as sm_90 and gfx942."
                )
        unknown = sorted(self.capabilities.union(*self.arch_capabilities.values()) - set(CAPABILITIES))
        if unknown:
            known = ", ".join(sorted(CAPABILITIES))
            raise ValueError(f"capabilities {unknown} are not known; the list is closed: {known}.")
        if not self.platforms or not all(name.isidentifier() for name in self.platforms):
            raise ValueError(f"platforms={self.platforms!r} cannot be; name those that it has kernels for.")
        if not (isinstance(self.summary, str) and self.summary):
            raise ValueError(f"summary={self.summary!r} cannot be; give one line for tables.")
        if not all(isinstance(requirement, Requirement) for requirement in self.requirements):
            raise ValueError(f"requirements={self.requirements!r} cannot be; give several Requirement.")


@dataclass(frozen=True)
class Limits:
    """The largest step that buffers are made for.

    Attributes:
        max_tokens: Query tokens in one step.
        max_requests: Requests in one step.
        max_model_len: Tokens of one request, its prompt included.
        max_query_len: Query tokens of one request in one step.
    """

    max_tokens: int
    max_requests: int
    max_model_len: int
    max_query_len: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}={value} leaves no room for a step; the least is 1.")


@dataclass(frozen=True)
class Request:
    """Everything that selection may depend on. Frozen, hashable, dtypes as strings, no tensors.

    Attributes:
        platform: `cpu`, `cuda` or `rocm`.
        arch: `sm_90`, `gfx942`, …; empty on a CPU.
        model: The whole model's sizes.
        num_heads: Query heads of this rank.
        limits: The largest step.
        kv_cache_dtype: As the user wrote it, `auto` included.
        index_dtype: As the user wrote it, `auto` included.
        dtype: Activation dtype, `bfloat16` in service.
        page_sizes: Rows a page.
        strided_pages: Whether the host's pages are strided.
        decode_query_len: Most query tokens of a decode request (1 + drafts).
        tensor_parallel: Ranks that share the heads.
        context_parallel: Ranks that share the context (DCP).
        graph: Whether decode steps will be captured.
        private_output: Whether the host lets a backend keep its attention output to itself.
        host_lengths: Whether the host can give a step's lengths on the host.
        deterministic: Whether a row's output must not depend on the other rows of its batch.
        seam: The depth at which the host uses the backend.
        probe: `static` may read distribution metadata only; `host` may import the kernel library.

    Raises:
        ConfigError: A value is out of range or not known, or the architecture is not the platform's.
    """

    platform: Platform
    arch: str
    model: ModelShape
    num_heads: int
    limits: Limits
    kv_cache_dtype: str = "auto"
    index_dtype: str = "auto"
    dtype: str = "bfloat16"
    page_sizes: PageSizes = PageSizes()
    strided_pages: bool = False
    decode_query_len: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    graph: bool = False
    private_output: bool = True
    host_lengths: bool = True
    deterministic: bool = False
    seam: Seam = "layer"
    probe: Probe = "host"

    def __post_init__(self) -> None:
        for name, known in {"seam": get_args(Seam), "probe": get_args(Probe)}.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)} is not known; use {' or '.join(known)}.")
        for name in ("num_heads", "decode_query_len", "tensor_parallel", "context_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small; the least is 1.")
        pattern = ARCH_PATTERNS.get(self.platform)
        if pattern is not None and not re.fullmatch(pattern, self.arch):
            raise ConfigError(
                f"arch={self.arch!r} is no architecture of platform={self.platform}; write sm_90 for cuda, "
                "gfx942 for rocm, and nothing for a cpu."
            )
