"""`dsv4 explain`: which backend a run would take, here or elsewhere, and why not the others. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from rich.table import Table

from dsv4core.api import (
    BackendUnavailable,
    Decision,
    KVCacheLayout,
    LayerPlan,
    Request,
)
from dsv4core.api.selection import Probe
from dsv4core.cli.configuration import configuration
from dsv4core.cli.output import show, show_json
from dsv4core.config import DSV4Config, leaves
from dsv4core.framework.platform import Machine, guess_machine, machine_named
from dsv4core.framework.request import build_request, configured_shape, select_configured
from dsv4core.framework.selection import Selection


def explain(overrides: Sequence[str]) -> int:
    """Print what selection decides for a configuration.

    With `request.probe=static`, the default, backends look at package metadata only, so one may still find
    at run time that its kernels do not load.

    Returns:
        The exit code: 0 where a backend was chosen, else 2.
    """
    config = configuration(overrides)
    keys = _keys(config)  # before a backend is asked, which might write into its options
    arch = config.request.arch
    machine = guess_machine(config.device) if arch is None else machine_named(arch)
    request = build_request(config, configured_shape(config), machine, cast(Probe, config.request.probe))
    selection, decisions = _select(config, request)
    if config.json:
        show_json(_report(request, selection, decisions, keys))
    else:
        _print(machine, config, selection, decisions, keys)
    return 0 if selection else 2


def _select(config: DSV4Config, request: Request) -> tuple[Selection | None, tuple[Decision, ...]]:
    try:
        selection = select_configured(config, request)
    except BackendUnavailable as error:
        return None, error.decisions
    return selection, selection.decisions


def _report(
    request: Request, selection: Selection | None, decisions: Sequence[Decision], keys: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "request": asdict(request),
        "chosen": selection.backend.name if selection else None,
        "decisions": [asdict(decision) for decision in decisions],
        "kv_cache": _formats(selection.layout) if selection else None,
        "plan": {kind: asdict(plan) for kind, plan in selection.plans.items()} if selection else None,
        "selection": selection.summary() if selection else None,
        "config": keys,
    }


def _keys(config: DSV4Config) -> dict[str, dict[str, Any]]:
    """Every key with its value, and whether that is the default."""
    defaults = dict(_values(DSV4Config(backend=type(config.backend)(name=config.backend.name))))
    return {
        name: {"value": value, "source": "default" if (name, value) in defaults.items() else "set"}
        for name, value in _values(config)
    }


def _values(config: DSV4Config) -> Iterator[tuple[str, Any]]:
    for name, _, value in leaves(config):
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", one) for key, one in value.items())
        else:
            yield name, value


def _formats(layout: KVCacheLayout) -> dict[str, dict[str, Any]]:
    formats = vars(layout)
    return {
        name: {"name": kept.name, "bytes_per_token": kept.bytes_per_token} for name, kept in formats.items()
    }


def _print(
    machine: Machine,
    config: DSV4Config,
    selection: Selection | None,
    decisions: Sequence[Decision],
    keys: Mapping[str, Any],
) -> None:
    model = config.checkpoint or config.model.name
    where = f"{machine.platform} {machine.arch}".rstrip()
    table = Table("backend", "verdict", box=None, padding=(0, 2, 0, 0))
    table.add_column("reasons", overflow="fold")
    for decision in decisions:
        table.add_row(decision.backend, decision.verdict, "\n".join(map(str, decision.reasons)))
    asked = "" if machine.source == "as asked" else "; torch was not asked"
    show(f"{model} on {where} ({machine.source}{asked})\n", table)
    changed = [f"{name}={facts['value']}" for name, facts in keys.items() if facts["source"] == "set"]
    show(f"\nNot the defaults: {', '.join(changed) or 'nothing'}")
    if selection is None:
        show("Nothing was chosen. Name a backend with backend=NAME, or list some in backend.order.")
        return
    rows = (f"{name} {kept.name} {kept.bytes_per_token} B" for name, kept in vars(selection.layout).items())
    show(f"KV caches, bytes a row: {', '.join(rows)}")
    show(*(f"{kind}: {_sentence(plan)}" for kind, plan in selection.plans.items()))
    show(*_notes(selection.plans))


def _sentence(plan: LayerPlan) -> str:
    own = f", own operations: {', '.join(sorted(plan.own_ops))}" if plan.own_ops else ""
    return (
        f"{plan.padded_q_heads} query heads of {plan.q_dtype}, {plan.output.format} output, "
        f"{plan.workspace_bytes} B of workspace, variant {plan.variant or 'default'}{own}"
    )


def _notes(plans: Mapping[str, LayerPlan]) -> Iterator[str]:
    """Each note once, behind the kinds whose plans have it where others do not."""
    for note in dict.fromkeys(note for plan in plans.values() for note in plan.notes):
        kinds = [kind for kind, plan in plans.items() if note in plan.notes]
        yield note if len(kinds) == len(plans) else f"{', '.join(kinds)}: {note}"
