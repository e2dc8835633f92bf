"""The base class of a backend's typed options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BackendOptions:
    """Options of one backend: subclass it, add fields with defaults, validate in `__post_init__`.

    Field types are those that OmegaConf's structured configs take: no `Literal`, no tuples. The class is
    not frozen, because OmegaConf would then refuse overrides. A user sets a field as `backend.<name>=value`.
    A field's metadata may hold `help`, a text for `dsv4 --help`, and `choices`, the values that are accepted.

    Attributes:
        name: The backend's name, which is also its entry-point name.
    """

    name: str = ""
