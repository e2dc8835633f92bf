"""Who does which operation: AITER's symbols by chip, cached rows, version and signature, else the core.

The symbols are data (`symbols.json`), in the order in which they are preferred. Those that no route can take
are there, too, so that a plan can say why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dsv4_plugin_rocm_aiter.library import DISTRIBUTION, TRITON_ONLY, Aiter, fits

ARCHITECTURES = ("gfx942", "gfx950")
OPERATIONS = (
    *("insert", "compress", "index_logits", "index_topk"),
    *("decode", "prefill", "inverse_rope_quant", "o_proj"),
)
TOGETHER = ("inverse_rope_quant", "o_proj")
"""What one writes the other multiplies: both are AITER's, or neither."""


@dataclass(frozen=True)
class Symbol:
    """A function or kernel of AITER.

    Attributes:
        op: The operation that it does.
        target: `module.function`.
        technology: `triton`, `gluon`, `hip`, `opus`, `asm` or `flydsl`.
        archs: Chips that it has kernels for.
        layouts: Cached rows that it reads or writes; for scores, formats of the indexer's keys. None of them
            stands for any: it touches no cache.
        since: The first version that is right for what is asked of it.
        parameters: What is passed to it.
        before: The first version that does not have it any more.
        pools: Pools that one call attends; a prefill attends one workspace, whatever it was gathered from.
        strided: Whether pages may be apart.
        least_heads: Query heads that it takes at least; fewer are padded.
        softmax_scale: The factor of scores that it is compiled with, None where it is an argument.
        least_queries: Query tokens of prefills from which on it is taken.
        writes_empty_rows: Whether a query without rows gets zeros, and not what memory held.
        refused: Why it is never taken, empty where it may be.
    """

    op: str
    target: str
    technology: str
    archs: tuple[str, ...]
    layouts: tuple[str, ...]
    since: str
    parameters: tuple[str, ...]
    before: str | None = None
    pools: int = 1
    strided: bool = False
    least_heads: int = 1
    softmax_scale: float | None = None
    least_queries: int = 1
    writes_empty_rows: bool = True
    refused: str = ""

    @property
    def name(self) -> str:
        """The function's, without its module."""
        return self.target.rpartition(".")[2]

    @property
    def address(self) -> str:
        """Its target, and what it is written in: one function may be two kernels."""
        return f"{self.target} ({self.technology})"

    def __str__(self) -> str:
        """The same, without the module."""
        return f"{self.name} ({self.technology})"


@dataclass(frozen=True)
class Asked:
    """What routes of a layer depend on, besides the library.

    Attributes:
        arch: The chip.
        layout: The format of window and compressed rows.
        index_layout: The format of the indexer's keys.
        pools: Pools that a query attends: 1 without compressed entries, else 2.
        heads: Query heads of the rank.
        softmax_scale: Factor of the scores.
        strided: Whether pages may be apart.
        core: Operations that are left to the core, as the user asks.
    """

    arch: str
    layout: str
    index_layout: str
    pools: int
    heads: int
    softmax_scale: float
    strided: bool = False
    core: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Route:
    """Who does one operation.

    Attributes:
        op: The operation.
        symbol: AITER's symbol; None for the core.
        passed_over: Why symbols that would come before were not taken.
        heads: Query heads of a call.
    """

    op: str
    symbol: Symbol | None
    passed_over: tuple[str, ...]
    heads: int

    def __str__(self) -> str:
        """A line for people."""
        who = "the core" if self.symbol is None else f"AITER's {self.symbol}"
        return "; ".join([f"{self.op} by {who}", *self.passed_over])


@cache
def symbols() -> tuple[Symbol, ...]:
    """All symbols that are known, in the order of preference."""
    entries = json.loads(Path(__file__).with_name("symbols.json").read_text(encoding="utf-8"))
    return tuple(Symbol(**{name: _frozen(value) for name, value in entry.items()}) for entry in entries)


def symbol_of(op: str, address: str | None) -> Symbol | None:
    """The one that does an operation, by its address; None where that is no symbol's."""
    return next((own for own in symbols() if (own.op, own.address) == (op, address)), None)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def routes(asked: Asked, library: Aiter) -> dict[str, Route]:
    """The route of each operation; those that belong together are taken together."""
    own = {op: route(op, asked, library) for op in OPERATIONS}
    lacking = [op for op in TOGETHER if own[op].symbol is None]
    for op in TOGETHER if lacking else ():
        if (symbol := own[op].symbol) is not None:
            why = f"{symbol} needs {lacking[0]} to be AITER's"
            own[op] = Route(op, None, (*own[op].passed_over, why), asked.heads)
    return own


def route(op: str, asked: Asked, library: Aiter) -> Route:
    """The first symbol that does an operation, or the core."""
    if op in asked.core:
        return Route(op, None, (f"backend.core has {op}",), asked.heads)
    passed: list[str] = []
    for symbol in (own for own in symbols() if own.op == op):
        why = next(_why_not(symbol, asked, library), "")
        if not why:
            return Route(op, symbol, tuple(passed), max(asked.heads, symbol.least_heads))
        passed.append(f"{symbol} {why}")
    return Route(op, None, tuple(passed), asked.heads)


def _why_not(symbol: Symbol, asked: Asked, library: Aiter) -> Iterator[str]:
    """Why a symbol cannot be taken; what no installation would help comes first."""
    layout = asked.index_layout if symbol.op == "index_logits" else asked.layout
    if asked.arch not in symbol.archs:
        yield f"is for {' and '.join(symbol.archs)}"
    if symbol.layouts and layout not in symbol.layouts:
        yield f"is for rows of {' and '.join(symbol.layouts)}"
    if asked.pools > symbol.pools and symbol.op == "decode":
        yield "attends one pool, and this layer has two"
    if asked.strided and not symbol.strided and symbol.op == "decode":
        yield "reads pages side by side, and the host's are apart"
    if symbol.softmax_scale not in (None, asked.softmax_scale):
        yield f"has a fixed softmax scale of {symbol.softmax_scale:.6g}"
    if symbol.refused:
        yield symbol.refused
    if library.version is None or not fits(library.version, symbol.since, symbol.before):
        until = f" and below {symbol.before}" if symbol.before else ""
        yield f"needs {DISTRIBUTION} {symbol.since}{until}"
    if library.triton_only and symbol.technology not in ("triton", "gluon"):
        yield f"is left out by {TRITON_ONLY}=1"
    if library.missing is not None and (lacking := library.missing(symbol.target, symbol.parameters)):
        yield lacking
