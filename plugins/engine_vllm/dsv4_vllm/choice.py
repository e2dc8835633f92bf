"""What one vLLM worker asks of a backend, and the selection, which all ranks have to make alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch

from dsv4_vllm.drift import Touched, check
from dsv4_vllm.options import AdapterOptions, parse, section
from dsv4core import __version__
from dsv4core.api import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    DSV4Error,
    Limits,
    ModelShape,
    PageSizes,
    Request,
)
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.framework.platform import machine_of
from dsv4core.framework.selection import Selection, select
from dsv4core.framework.wording import one_line
from dsv4core.model.shapes import model_shape

WAIT = 120
"""Seconds that ranks may come apart while they make the first layer."""
PAGE = 256
"""Tokens a page that vLLM takes unless the user says otherwise; it settles that after layers are made."""


@dataclass(frozen=True)
class Choice:
    """A worker's selection and what it was asked with.

    Attributes:
        shape: The model's sizes.
        request: What was asked.
        selection: The backend and its plans.
        rank: This rank among those that share the heads.
        device: Where it computes.
    """

    shape: ModelShape
    request: Request
    selection: Selection
    rank: int
    device: torch.device

    @property
    def padded_heads(self) -> int:
        """Head axis of q, which vLLM allocates alike for all layers."""
        return next(iter(self.selection.plans.values())).padded_q_heads


def choose(vllm_config: Any, base: Any, touched: tuple[Touched, ...] = ()) -> Choice:
    """Select, and agree with the other ranks.

    Args:
        vllm_config: vLLM's configuration.
        base: vLLM's attention class of this platform.
        touched: What has to be there of vLLM.

    Raises:
        DriftError: This vLLM is another one, on any rank.
        ConfigError: Something is asked that is not served, or any rank cannot, or ranks differ.
    """
    return _agreed(lambda: _choose(vllm_config, base, touched))


def _choose(vllm_config: Any, base: Any, touched: tuple[Touched, ...]) -> Choice:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank as tensor_parallel_rank

    check(touched)
    options = parse(section(vllm_config))
    _refuse(vllm_config, base)
    shape, device = model_shape(vllm_config.model_config.hf_config.to_dict()), _device()
    request = _request(vllm_config, shape, device)
    selection = _select(request, options)
    _check(selection)
    return Choice(shape, request, selection, tensor_parallel_rank(), device)


def _refuse(vllm_config: Any, base: Any) -> None:
    """What the adapter does not serve is told at the start, not to the first request that meets it."""
    if vllm_config.speculative_config is not None:
        raise ConfigError("dsv4-vllm does not serve speculative decoding yet; leave speculative_config out.")
    if vllm_config.parallel_config.use_ubatching:
        raise ConfigError("dsv4-vllm does not serve dual batch overlap; leave enable_dbo out.")
    if getattr(vllm_config.model_config.hf_config, "vision_n_layers", 0):
        raise ConfigError("dsv4-vllm does not serve images, whose tokens see each other both ways.")
    if not base.use_fp8_ds_mla_layout:
        raise ConfigError(
            f"vLLM chose {base.__name__}, which writes plain rows, and dsv4-vllm hands over packed "
            "pages; set attention_config.backend to FLASHMLA_SPARSE_DSV4."
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode.has_full_cudagraphs() and mode.mixed_mode() == mode.decode_mode():
        raise ConfigError(
            "cudagraph_mode=FULL captures prefills as if they were decodes, and backends plan those "
            "differently; set FULL_DECODE_ONLY or FULL_AND_PIECEWISE."
        )


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _request(vllm_config: Any, shape: ModelShape, device: torch.device) -> Request:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    ranks, machine = get_tensor_model_parallel_world_size(), machine_of(device)
    return Request(
        platform=machine.platform,
        arch=machine.arch,
        model=shape,
        num_heads=shape.num_attention_heads // ranks,
        limits=Limits(
            max_tokens=scheduler.max_num_batched_tokens,
            max_requests=scheduler.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            max_query_len=scheduler.max_num_batched_tokens,
        ),
        kv_cache_dtype="bf16" if cache.cache_dtype == "bfloat16" else cache.cache_dtype,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        page_sizes=PageSizes(context=cache.block_size if cache.user_specified_block_size else PAGE),
        strided_pages=True,
        tensor_parallel=ranks,
        context_parallel=vllm_config.parallel_config.decode_context_parallel_size,
        graph=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        private_output=False,
        host_lengths=False,
        seam="kernel",
    )


def _select(request: Request, asked: AdapterOptions) -> Selection:
    if asked.backend == "auto":
        if asked.options:
            raise ConfigError('additional_config["dsv4"]["options"] belong to a named backend; name it.')
        try:
            return select(request)
        except BackendUnavailable as error:
            raise ConfigError(_nothing_fits(error)) from error
    return select(request, asked.backend, _options(asked))


def _nothing_fits(error: BackendUnavailable) -> str:
    """One line: selection's own has several, and speaks of keys that vLLM's users do not have."""
    tried = "; ".join(
        f"{decision.backend}: {' '.join(map(str, decision.reasons)).rstrip('.')}"
        for decision in error.decisions
    )
    found = f"found none that can run this ({tried or 'none is in order'})"
    return f'additional_config["dsv4"]["backend"]="auto" {found}; name one.'


def _options(asked: AdapterOptions) -> BackendOptions | None:
    record = discover().get(asked.backend)
    if record is None or not asked.options:
        return None  # selection says what is wrong with an absent backend
    kind = load_backend(record).info.options
    names = [own.name for own in fields(kind) if own.name != "name"]
    unknown = sorted(set(asked.options).difference(names))
    if unknown:
        raise ConfigError(
            f"backend={asked.backend} has no option {unknown[0]!r}; it takes {', '.join(names) or 'none'}."
        )
    return kind(name=asked.backend, **asked.options)


def _check(selection: Selection) -> None:
    """Check that vLLM can hold what the backend plans, and does not do again what it would do."""
    name, dtype = selection.backend.name, selection.request.dtype
    for cache in (selection.layout.window, selection.layout.compressed):
        if cache.name != "fp8_ds_mla":
            raise ConfigError(
                f"backend={name} reads {cache.name} caches, and vLLM writes fp8_ds_mla here; set "
                "kv_cache_dtype=fp8, or choose another backend."
            )
    _check_flavours(selection)
    plans = selection.plans.values()
    sizes = {kind: plan.padded_q_heads for kind, plan in selection.plans.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} for {kind}" for kind, size in sizes.items())
        raise ConfigError(
            f"backend={name} pads q by layer kind ({listed}), and vLLM has one size; choose another one."
        )
    if any(plan.q_dtype != dtype for plan in plans):
        raise ConfigError(f"backend={name} wants q of another dtype than vLLM's {dtype}; choose another one.")
    if any(plan.output.inverse_rotated for plan in plans):
        raise ConfigError(f"backend={name} rotates its output back, and so does vLLM; choose another one.")
    prepares = any(plan.prepares for plan in selection.plans.values())
    if selection.request.graph and prepares and selection.backend.implements("dsv4_prepare_step"):
        raise ConfigError(
            f"backend={name} has host work before every replay of a graph, and vLLM has no place for it; set "
            "enforce_eager=True, or choose another one."
        )


def _check_flavours(selection: Selection) -> None:
    """On gfx942 vLLM's window cache has FNUZ codes, and its compressed cache OCP's, as everywhere."""
    from vllm.platforms import current_platform

    written = {"window": str(current_platform.fp8_dtype()).rpartition("float8_")[2], "compressed": "e4m3fn"}
    for cache, flavour in written.items():
        read = getattr(selection.layout, cache).fp8
        if read != flavour:
            raise ConfigError(
                f"backend={selection.backend.name} reads a {cache} cache of {read} codes, and vLLM writes "
                f"{flavour} on this machine; choose another one."
            )


def _agreed(decide: Callable[[], Choice]) -> Choice:
    """The choice, if all ranks made the same: one that left would let the others wait for ever."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    choice, verdict = None, ""
    facts: dict[str, Any] = {}
    try:
        choice = decide()
        facts = _facts(choice)
    except DSV4Error as error:
        verdict = str(error)
    except Exception as error:
        verdict = f"Selecting a backend raised {one_line(error)}."
    found: list[tuple[str, dict[str, Any]]] = [(verdict, facts)] * group.world_size
    if group.world_size > 1:
        _meet(group)
        torch.distributed.all_gather_object(found, (verdict, facts), group=group.cpu_group)
    refusals = {rank: text for rank, (text, _) in enumerate(found) if text}
    if refusals:
        rank, text = next(iter(refusals.items()))
        raise ConfigError(text if len(refusals) == len(found) else f"Rank {rank} of {len(found)}: {text}")
    first = found[0][1]
    for rank, (_, other) in enumerate(found):
        for name in [name for name in first if other.get(name) != first[name]]:
            raise ConfigError(
                f"Rank {rank} of {len(found)} has {name}={other.get(name)}, and rank 0 has {first[name]}; "
                "install the same packages everywhere."
            )
    assert choice is not None
    return choice


def _facts(choice: Choice) -> dict[str, Any]:
    """What all ranks have to have alike: the packages, the request, the caches, the plans."""
    chosen = choice.selection
    facts = {**chosen.summary(), "dsv4core": __version__}
    for group, values in (
        ("request", vars(chosen.request)),
        ("cache", vars(chosen.layout)),
        ("plan", chosen.plans),
    ):
        facts |= {f"{group}.{name}": value for name, value in values.items()}
    return facts


def _meet(group: Any) -> None:
    """Wait for all ranks, and not for one that never comes here: it has no dsv4-vllm, or another vLLM."""
    try:
        torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=WAIT), wait_all_ranks=True)
    except RuntimeError as error:
        raise ConfigError(
            f"A rank did not answer within {WAIT} s ({one_line(error)}); install dsv4-vllm on every machine, "
            "and name dsv4 wherever VLLM_PLUGINS is set."
        ) from error
