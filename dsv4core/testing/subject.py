"""The backend that is tested: its options, the machine, and what it answers to requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    BackendInfo,
    BackendOptions,
    BackendUnavailable,
    Limits,
    ModelShape,
    PluginError,
    Reason,
    Request,
)
from dsv4core.framework.discovery import discover
from dsv4core.framework.known import absent_reason
from dsv4core.framework.manager import Backend, answer, load_backend
from dsv4core.framework.platform import Machine, machine_of, torch_device
from dsv4core.framework.selection import Selection, select
from dsv4core.model.shapes import PRESETS

MODEL = replace(
    PRESETS["v4_flash"],
    hidden_size=512,
    num_hidden_layers=3,
    q_lora_rank=256,
    o_lora_rank=256,
    vocab_size=512,
    layer_kinds=(SWA, C4A, C128A),
    draft_layer_kinds=(),
)
"""DeepSeek-V4-Flash with one layer of each kind; attention has its sizes, the projections are smaller."""

ELSEWHERE = frozenset(
    {"platform", "arch", "package-missing", "package-wrong", "package-version", "artifact-missing"}
)
"""Codes of reasons that lie in the machine: the same check can run on another one."""

ARCHITECTURES = {
    "cuda": ("sm_90", "sm_100", "sm_103", "sm_120", "sm_80", "sm_86", "sm_89", "sm_121"),
    "rocm": ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201"),
}
"""Architectures with which a backend is asked from afar."""

REFUSABLE = ELSEWHERE | {
    *("kv-dtype", "layout", "q-heads", "head-dim", "block-size"),
    *("capability", "model", "parallel", "option"),
}
"""Codes with which a backend may turn down what it does not serve. All others are defects."""


class Elsewhere(Exception):
    """What is to be checked does not show on this machine."""


class LeftToCore(Exception):
    """What is to be checked needs an operation that the backend leaves to the core."""


class Refused(Exception):
    """The backend turned a request down, with its reasons."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__(" ".join(map(str, reasons)))
        self.reasons = reasons

    @property
    def elsewhere(self) -> bool:
        """Whether another machine could run it."""
        return any(reason.code in ELSEWHERE for reason in self.reasons)

    @property
    def defect(self) -> bool:
        """Whether a reason is none that a backend may give."""
        return any(reason.code not in REFUSABLE for reason in self.reasons)


@dataclass(frozen=True, eq=False)
class Subject:
    """A backend on one machine.

    Attributes:
        name: Its name.
        options: Its options; None is its defaults.
        device: Where it computes.
        dtype: Activation dtype's name.
        seen: What was asked of it and accepted, for the report of what was covered.
    """

    name: str
    options: BackendOptions | None = None
    device: torch.device = torch.device("cpu")
    dtype: str = "bfloat16"
    seen: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def configured(cls, name: str, overrides: Iterable[str] = ()) -> Subject:
        """The backend as a configuration describes it.

        Args:
            name: The backend.
            overrides: `backend.<option>=…`, `device=…` and `dtype=…`.

        Raises:
            DSV4Error: It is not installed or cannot be loaded, or an override does not fit.
        """
        from dsv4core.hydra import compose

        config = compose([f"backend={name}", *overrides])
        return cls(name, config.backend, torch_device(config.device), config.dtype)

    @property
    def backend(self) -> Backend:
        """The loaded backend.

        Raises:
            PluginError: It is not installed or cannot be loaded.
        """
        records = discover()
        if self.name not in records:
            raise PluginError(absent_reason(self.name, records))
        return load_backend(records[self.name])

    @property
    def info(self) -> BackendInfo:
        """What it says about itself, on a machine that it has kernels for."""
        return self.backend.info.on(self.home.arch)

    @cached_property
    def home(self) -> Machine:
        """A machine that it has kernels for: this one, or one that it does not turn down from afar.

        Raises:
            AssertionError: It turns down every architecture that is known of its platforms.
        """
        here, platforms = machine_of(self.device), self.backend.info.platforms
        if here.platform in platforms:
            return here
        for platform in platforms:
            for arch in ARCHITECTURES.get(platform, ("",)):
                request = self.request(platform=platform, arch=arch, probe="static")
                arguments = {"request": request, "options": self.own_options}
                reasons = answer(self.backend, "dsv4_unsupported_reasons", list, **arguments)
                if not any(reason.code == "arch" for reason in reasons):
                    return Machine(platform, arch, "the backend serves it")
        raise AssertionError(f"It has kernels for {platforms}, and for no architecture of these.")

    @property
    def own_options(self) -> BackendOptions:
        """Its options, or their defaults."""
        return self.options or self.backend.info.options(name=self.name)

    @cached_property
    def few_heads(self) -> int:
        """The fewest query heads of 8, 16, 32 and 64 that it accepts: enough where heads do not matter."""
        for heads in (8, 16, 32):
            model = replace(MODEL, num_attention_heads=heads)
            try:
                select(self.request(model, seam="kernel"), self.name, self.options)
            except BackendUnavailable:
                continue
            return heads
        return MODEL.num_attention_heads

    def request(self, model: ModelShape = MODEL, **changes: Any) -> Request:
        """A host's request on this machine: one that gives away no more than the backend needs."""
        machine = machine_of(self.device)
        asked: dict[str, Any] = {
            "platform": machine.platform,
            "arch": machine.arch,
            "limits": Limits(max_tokens=32, max_requests=8, max_model_len=4096, max_query_len=32),
            "num_heads": model.num_attention_heads // changes.get("tensor_parallel", 1),
            "dtype": self.dtype,
            "private_output": False,
        }
        own = self.backend.info.on((asked | changes)["arch"])
        asked["host_lengths"] = "needs-host-lengths" in own.capabilities
        return Request(model=model, **(asked | changes))

    def select(self, request: Request) -> Selection:
        """Let selection ask the backend.

        Raises:
            Refused: It cannot run the request.
        """
        try:
            selection = select(request, self.name, self.options)
        except BackendUnavailable as error:
            raise Refused(error.decisions[0].reasons) from error
        self.seen.append(
            {
                "kinds": [kind.name for kind in request.model.kinds],
                "heads": request.num_heads,
                "kv_format": selection.layout.window.name,
                "window_page": request.page_sizes.window,
                "context_page": request.page_sizes.context,
                "seam": request.seam,
                "own_ops": sorted(set().union(*(plan.own_ops for plan in selection.plans.values()))),
            }
        )
        return selection
