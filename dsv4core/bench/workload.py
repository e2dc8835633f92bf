"""What is measured: a step of some requests on one layer kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4core.api import C4A, C128A, SWA, LayerKind, Limits, ModelShape

KINDS = {kind.name: kind for kind in (SWA, C4A, C128A)}
SPREAD = 64
"""Most tokens between a context of a batch and their mean: a large batch has every remainder by 128."""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        phase: `decode`: one query token a request; `prefill`: the last tokens of one request; `mixed`: half
            of the query tokens are decodes, the others one prefill.
        kind: The layer kind.
        tokens: Query tokens.
        context: Tokens of each request, this step's included; of decodes the mean.
        layers: Layers of the kind, which share what a step plans.
    """

    phase: str
    kind: LayerKind
    tokens: int
    context: int
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.phase} {self.kind.name}, {self.tokens} tokens, context {self.context:,}"

    @property
    def query(self) -> tuple[int, ...]:
        """Query tokens of each request, decodes first."""
        decodes = {"decode": self.tokens, "prefill": 0, "mixed": self.tokens // 2}[self.phase]
        rest = self.tokens - decodes
        return (1,) * decodes + ((rest,) if rest else ())

    @property
    def total(self) -> tuple[int, ...]:
        """Tokens of each request: decodes lie around the context, a prompt is no shorter than its chunk."""
        rest = self.query[self.decodes :]
        return (*_around(self.context, self.decodes), *(max(self.context, count) for count in rest))

    @property
    def lengths(self) -> list[int]:
        """For each query token, the tokens of its request up to it, itself included."""
        pairs = zip(self.query, self.total, strict=True)
        return [length for query, total in pairs for length in range(total - query + 1, total + 1)]

    @property
    def decodes(self) -> int:
        """Requests that are decodes."""
        return sum(self.phase != "prefill" and count == 1 for count in self.query)

    @property
    def limits(self) -> Limits:
        """The limits of a host that runs no larger step."""
        return Limits(
            max_tokens=self.tokens,
            max_requests=len(self.query),
            max_model_len=max(self.total),
            max_query_len=max(self.query),
        )

    def width(self, model: ModelShape) -> int:
        """Rows that the last query of a request of the mean context attends: its window and its entries."""
        length = max(self.context, *self.query)
        entries = self.kind.visible_entries(length)
        if self.kind.select == "top_k":
            entries = min(entries, model.index_topk)
        return min(model.sliding_window, length) + entries


def _around(mean: int, count: int) -> Iterator[int]:
    """So many lengths, in pairs above and below their mean."""
    reach = min(SPREAD, mean - 1)
    for number in range(count):
        paired = number < count // 2 * 2
        distance = (number // 2 + 1) % (reach + 1) if paired else 0
        yield mean - distance if number % 2 else mean + distance
