"""Backends that exist but need not be installed, and what to say of a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dsv4core.api import Reason
from dsv4core.framework.wording import near_miss


@dataclass(frozen=True)
class KnownBackend:
    """A backend of the project: its distribution and one line about it."""

    distribution: str
    summary: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.distribution}"


KNOWN_BACKENDS: Mapping[str, KnownBackend] = MappingProxyType(
    {
        "flashmla": KnownBackend(
            "dsv4-plugin-flashmla", "FlashMLA and DeepGEMM kernels for sm_90 and sm_100"
        ),
        "flashinfer": KnownBackend(
            "dsv4-plugin-flashinfer", "FlashInfer kernels for sm_90, sm_100 and sm_103"
        ),
        "rocm_aiter": KnownBackend("dsv4-plugin-rocm-aiter", "AITER kernels for gfx942 and gfx950"),
        "hopper": KnownBackend("dsv4-plugin-hopper", "warp-specialised kernels for sm_90"),
    }
)


def absent_reason(name: str, installed: Iterable[str]) -> Reason:
    """Why the backend `name` is not there, and how to get it or which name was probably meant."""
    known = KNOWN_BACKENDS.get(name)
    if known is not None:
        return Reason("package-missing", f"Backend {name!r} is not installed.", f"Run `{known.install}`.")
    names = sorted({"auto", *installed, *KNOWN_BACKENDS})
    near = near_miss(name, names)
    fix = f"Did you mean {near!r}?" if near else f"The names are: {', '.join(names)}."
    return Reason("package-missing", f"No backend is named {name!r}.", fix)
