from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4core.api import ConfigError, Request
from dsv4core.framework.known import KNOWN_BACKENDS
from dsv4core.framework.order import DEFAULT_ORDER, check_order, order_of
from dsv4core.framework.selection import select
from dsv4core.testing.fakes import altered, install_backend

ORDER = {"cuda": ["a"], "cuda_heads_16": ["b"], "sm_90": ["c"], "sm_90_heads_16": ["d"], "sm_100_heads_8": []}
MACHINES = [
    ("sm_90", 16, ["d"]),
    ("sm_90", 8, ["c"]),
    ("sm_80", 16, ["b"]),
    ("sm_80", 8, ["a"]),
    ("sm_100", 8, []),
    ("sm_100", 16, ["b"]),
]


@pytest.mark.parametrize(("arch", "heads", "names"), MACHINES)
def test_the_most_specific_machine_wins(request_: Request, arch: str, heads: int, names: list[str]) -> None:
    request = replace(request_, platform="cuda", arch=arch, num_heads=heads)
    assert order_of(request, ORDER) == names


def test_a_cpu_has_no_architecture(request_: Request) -> None:
    assert order_of(request_, {"cpu_heads_16": ["a"], "cpu": ["b"]}) == ["a"]
    assert order_of(request_, {"cuda": ["a"]}) == ()


def test_the_default_order_names_backends_that_exist() -> None:
    check_order(DEFAULT_ORDER)
    named = {name for names in DEFAULT_ORDER.values() for name in names}
    assert named <= {"reference", "triton", *KNOWN_BACKENDS}
    gpus = [names for machine, names in DEFAULT_ORDER.items() if machine != "cpu"]
    assert not any("reference" in names for names in gpus)


def test_a_default_yields_to_whatever_is_given(request_: Request) -> None:
    """An order for a machine also to defaults for some of its heads; others are as they were."""
    request = replace(request_, platform="cuda", arch="sm_90", num_heads=16)
    given = {"sm_90": ["mine"], "sm_80": []}
    assert order_of(request, given, DEFAULT_ORDER) == ["mine"]
    assert order_of(replace(request, arch="sm_80"), given, DEFAULT_ORDER) == []
    assert order_of(replace(request, arch="sm_100"), given, DEFAULT_ORDER) == DEFAULT_ORDER["sm_100"]
    assert order_of(request, {}, DEFAULT_ORDER) == DEFAULT_ORDER["sm_90_heads_16"]
    assert order_of(replace(request, num_heads=64), {}, DEFAULT_ORDER) == DEFAULT_ORDER["sm_90"]


@pytest.mark.parametrize(
    ("heads", "second"), [(1, "triton"), (32, "triton"), (64, "flashmla"), (128, "flashmla")]
)
def test_heads_that_are_padded(request_: Request, heads: int, second: str) -> None:
    """FlashMLA is behind Triton's kernels where it has fewer than 64."""
    request = replace(request_, platform="cuda", arch="sm_90", num_heads=heads)
    assert list(order_of(request, DEFAULT_ORDER)[:2]) == ["hopper", second]


@pytest.mark.parametrize("machine", ["sm90", "sm_90a", "SM_90", "sm_90_heads_", "sm_90_16", "heads_16", ""])
def test_machines_that_do_not_exist(request_: Request, machine: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(request_, order={"cpu": ["acme"], machine: ["acme"]})
    assert str(caught.value) == (
        f"backend.order.{machine} names no machine; write a platform (cpu, cuda, rocm) or an architecture "
        "(sm_90, gfx942), with _heads_16 after it for 16 query heads a rank."
    )


def test_an_order_is_by_machine(request_: Request) -> None:
    with pytest.raises(ConfigError) as caught:
        select(request_, order=["acme"])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "order=['acme'] is no mapping; give lists of backends by machine, as in cpu=[a,b]."
    )


def test_a_name_is_tried_once(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme")
    decisions = select(request_, order={"cpu": ["hopper", "acme", "hopper", "acme"]}).decisions
    assert [(decision.backend, decision.verdict) for decision in decisions] == [
        ("hopper", "rejected"),
        ("acme", "chosen"),
    ]


def test_a_platform_may_be_another_makers(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme", altered(('("cpu",)', '("npu",)')))
    request = replace(request_, platform="npu", arch="ascend910")
    assert select(request, order={"npu": ["acme"]}).backend.name == "acme"


@pytest.mark.parametrize("names", ["acme", ["acme", "auto"], [1]])
def test_lists_that_are_none(names: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_order({"cpu": names})  # type: ignore[dict-item]
    assert str(caught.value) == f"backend.order.cpu={names} is no list of backends to try; write [a,b]."
