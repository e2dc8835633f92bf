"""Writes the tables of the docs that come from code and measurements, between their markers.

python docs/tables.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from dsv4_plugin_rocm_aiter.library import Aiter
from dsv4_plugin_rocm_aiter.routes import ARCHITECTURES, OPERATIONS, Asked, route

from dsv4core.api import CAPABILITIES, REASON_CODES, KVCacheLayout
from dsv4core.framework.known import KNOWN_BACKENDS
from dsv4core.kvcache import KV_CACHE_DTYPES, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MODEL = PRESETS["v4_flash"]
OURS = {
    "reference": "dsv4core.backends.reference",
    "triton": "dsv4core.backends.triton",
    "flashmla": "dsv4_plugin_flashmla.plugin",
    "flashinfer": "dsv4_plugin_flashinfer.plugin",
    "rocm_aiter": "dsv4_plugin_rocm_aiter.plugin",
    "hopper": "dsv4_plugin_hopper.plugin",
}
"""Backends of the repository, and their modules."""
PROVEN: dict[str, tuple[str, str, str, str]] = json.loads((DOCS / "proven.json").read_text())
"""By backend: contract-tested, compiles for, ran on NVIDIA, ran on AMD."""
FIXES = {
    "platform": "name a backend with kernels for this platform; `dsv4 plugins` lists them",
    "arch": "the same, for this architecture",
    "package-missing": "run the command that the reason prints",
    "package-wrong": "uninstall the namesake, then run the command that the reason prints",
    "package-version": "install a version that the reason names",
    "artifact-missing": "run the command that the reason prints; it fetches or compiles what is missing",
    "kv-dtype": "ask for one of the strings that the reason lists, or for `auto`",
    "layout": "let the host write the format that the backend reads, or choose another backend",
    "q-heads": "change `tensor_parallel`, or choose another backend",
    "head-dim": "choose another backend: this model has other heads",
    "block-size": "set the page size that the reason names",
    "capability": "take the host's wish back (`graph`, `deterministic`, …), or choose another backend",
    "model": "choose another backend: this one has no kernels for a layer kind of the model",
    "parallel": "set the degree that the reason names",
    "option": "set the option that the reason names",
    "probe-error": "`DSV4_STRICT=1` shows the traceback; it is the plugin's to mend",
    "broken": "the same; reinstall the distribution that the reason names",
    "api": "install versions of core and plugin that fit; the reason names them",
    "conflict": "uninstall one of the two distributions, or disable it by name",
    "disabled": "take the name out of `DSV4_DISABLE` or `plugins.disable`",
    "not-in-order": "ask for it by name, or put it into `backend.order`",
}
SAID = {
    "fp8_ds_mla": "584 B packed",
    "bf16": "plain bf16",
    "fp8_e4m3": "plain E4M3",
    "fp32": "reference only",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def support() -> str:
    """The repository's backends, then those that are not released."""
    rows = []
    for name, module in OURS.items():
        info = import_module(module).dsv4_backend_info()
        rows.append((f"`{name}`", info.summary, ", ".join(info.platforms), *PROVEN[name]))
    rows += [
        (f"`{name}`", known.summary, "not released", "–", "–", "–", "")
        for name, known in KNOWN_BACKENDS.items()
        if name not in OURS
    ]
    head = ("backend", "what", "platforms", "contract-tested", "compiles for", "ran on NVIDIA", "ran on AMD")
    return table(head, rows)


def aiter() -> str:
    """Who does what on AMD's chips, with AITER 0.1.20 or newer, by the format of cached rows."""
    rows = []
    for op in OPERATIONS:
        cells = (_aiter(op, arch, layout) for arch in ARCHITECTURES for layout in ("fp8_ds_mla", "bf16"))
        rows.append((f"`{op}`", *cells))
    head = (f"{arch}, `{layout}`" for arch in ARCHITECTURES for layout in ("fp8_ds_mla", "bf16"))
    return table(("operation", *head), rows)


def _aiter(op: str, arch: str, layout: str) -> str:
    """The symbol that layers without compressed entries take, and that of those with them."""
    names = []
    for pools in (1, 2):
        asked = Asked(arch, layout, "index_fp8", pools, MODEL.num_attention_heads, MODEL.softmax_scale)
        symbol = route(op, asked, Aiter("0.1.20")).symbol
        names.append("the core" if symbol is None else f"`{symbol.name}`")
    alone, compressed = names
    return alone if alone == compressed else f"{alone}; with compressed entries {compressed}"


def dtypes() -> str:
    """What each string means."""
    rows = [
        (f"`{asked}`", ", then ".join(f"`{name}`" for name in names))
        for asked, names in KV_CACHE_DTYPES.items()
    ]
    return table(("kv_cache_dtype", "formats"), rows)


def formats() -> str:
    """Sizes of all formats, by a pool that is made."""
    rows = []
    for name in SAID:
        format = cache_layout(MODEL, name, "fp8").window
        cache = allocate_cache(format, 2, 64)
        assert cache.pool.dtype == getattr(torch, format.storage_dtype)
        parts = ", ".join(f"{part.width} × {part.dtype}" for part in format.parts)
        page = f"{cache.page_stride_bytes:,} B"
        rows.append((f"`{name}`", SAID[name], parts, f"{format.bytes_per_token} B", page))
    layout: KVCacheLayout = cache_layout(MODEL, "fp8_ds_mla", "fp8")
    parts = ", ".join(f"{part.width} × {part.dtype}" for part in layout.index.parts)
    page = f"{layout.index.page_bytes(64):,} B"
    rows.append(("`index_fp8`", "the indexer's keys", parts, f"{layout.index.bytes_per_token} B", page))
    return table(("format", "", "a row", "bytes a row", "page of 64 rows"), rows)


def capabilities() -> str:
    """The closed list."""
    return table(("capability", "what it says"), [(f"`{name}`", text) for name, text in CAPABILITIES.items()])


def reasons() -> str:
    """What each code means, and what to do."""
    rows = [(f"`{code}`", text, FIXES[code]) for code, text in REASON_CODES.items()]
    return table(("code", "what it means", "what to do"), rows)


def measured(name: str) -> list[dict[str, Any]]:
    """Rows of a file of results on an H200."""
    return [json.loads(line) for line in (RESULTS / "h200" / f"{name}.jsonl").read_text().splitlines()]


def by_tokens(
    rows: Iterable[dict[str, Any]],
    head: Sequence[str],
    key: Callable[[dict[str, Any]], tuple[Any, ...]],
    value: Callable[[dict[str, Any]], str],
) -> str:
    """A line for each key, in order, and a column for each number of query tokens."""
    found: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows:
        found.setdefault(key(row), {})[row["shape"]["tokens"]] = value(row)
    tokens = sorted({count for times in found.values() for count in times})
    lines = [
        (*map(str, names), *(times.get(count, "") for count in tokens))
        for names, times in sorted(found.items())
    ]
    return table((*head, *(f"{count} token{'s' * (count > 1)}, µs" for count in tokens)), lines)


def hopper() -> str:
    """Decodes' attention beside FlashMLA, and layers beside other backends', by rows and heads."""
    rows = [
        row
        for row in measured("hopper")
        if row["phase"] == "decode" and row["options"].get("operands") != "f16"
    ]
    return by_tokens(
        rows,
        ("operation", "kind", "context", "caches", "heads", "backend"),
        lambda row: (
            row["op"],
            row["kind"],
            f"{row['shape']['context']:,}",
            row["kv_format"],
            row["shape"]["heads"],
            row["backend"],
        ),
        lambda row: f"{row['us']:,.1f}",
    )


def peers() -> str:
    """Microseconds of peers on an H200, by the rows that they read, heads and query tokens."""
    rows = [
        row
        for row in measured("peers")
        if row["backend"].startswith("peer:") and row["kind"] == "c4a" and row["shape"]["context"] == 65536
    ]
    return by_tokens(
        rows,
        ("operation", "backend", "caches", "heads"),
        lambda row: (row["op"], row["backend"], row["kv_format"], row["shape"]["heads"]),
        lambda row: f"{row['us']:,.1f}",
    )


def attention() -> str:
    """Decodes' attention in Triton and in FlashMLA, of one run."""
    rows = [row for row in measured("triton_attention") if row["op"] == "forward_mqa"]
    return by_tokens(
        (row for row in rows if row["phase"] == "decode"),
        ("kind", "context", "heads", "caches", "backend"),
        lambda row: (
            row["kind"],
            f"{row['shape']['context']:,}",
            row["shape"]["heads"],
            row["kv_format"],
            row["backend"],
        ),
        lambda row: f"{row['us']:,.1f}",
    )


def layers() -> str:
    """Decode layers by operation; in brackets the share of the time that their floors are."""
    rows = [row for row in measured("triton_attention") if row["backend"] == "triton"]
    whole = {(row["kind"], row["shape"]["tokens"]) for row in rows if row["op"] == "layer"}
    rows = [
        row
        for row in rows
        if (row["kind"], row["shape"]["tokens"]) in whole
        and (row["model"], row["kv_format"], row["shape"]["heads"]) == ("v4_flash", "fp8_ds_mla", 64)
        and (row["phase"], row["shape"]["context"]) == ("decode", 65536)
    ]
    return by_tokens(
        rows,
        ("kind", "operation"),
        lambda row: (row["kind"], row["op"]),
        lambda row: f"{row['us']:,.1f} ({row['floor_us'] / row['us']:.0%})",
    )


def steps(name: str) -> str:
    """Layers of decodes behind the plan that they share, by backends of one run."""
    rows = [
        row for row in measured(name) if row["op"].endswith(".step") or row["backend"].startswith("peer:")
    ]
    return by_tokens(
        (row for row in rows if row["phase"] == "decode"),
        ("operation", "kind", "heads", "caches", "backend"),
        lambda row: (
            row["op"],
            row["kind"],
            row["shape"]["heads"],
            row["kv_format"],
            row["backend"],
        ),
        lambda row: f"{row['us']:,.1f}",
    )


def kernels() -> str:
    """The core's Triton kernels on an H200, with peers of the same run."""
    rows = measured("triton")
    found: dict[tuple[str, str, str, int, int], dict[str, dict[str, float]]] = {}
    for row in rows:
        key = (row["op"], row["phase"], row["kind"], row["shape"]["tokens"], row["shape"]["context"])
        share = row["gbps"] / row["ceilings"]["copy_gbps"]
        found.setdefault(key, {})[row["backend"]] = {"us": row["us"], "share": share}
    lines = []
    for (op, phase, kind, tokens, context), own in found.items():
        if "triton" not in own:
            continue
        peers = (
            f"{name.removeprefix('peer:')} {row['us']:.1f}" for name, row in own.items() if name != "triton"
        )
        us, share = own["triton"]["us"], own["triton"]["share"]
        where = (op, f"{phase}, {kind}", f"{tokens:,}", f"{context:,}")
        lines.append((*where, f"{us:.1f}", f"{share:.0%}", ", ".join(peers)))
    head = ("operation", "step", "tokens", "context", "µs", "of copy bandwidth", "peers, µs")
    return table(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "support": support,
    "aiter": aiter,
    "dtypes": dtypes,
    "formats": formats,
    "capabilities": capabilities,
    "reasons": reasons,
    "peers": peers,
    "kernels": kernels,
    "attention": attention,
    "layers": layers,
    "flashmla": lambda: steps("flashmla"),
    "plain": lambda: steps("plain_caches"),
    "hopper": hopper,
}


def written(text: str) -> str:
    """A page with its tables."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if re.search(pattern, text, re.DOTALL):
            content = make()
            text = re.sub(
                pattern, lambda match, own=content: f"{match[1]}{own}\n{match[2]}", text, flags=re.DOTALL
            )
    return text


def main() -> None:
    """Write all pages; say which have changed."""
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text()
        if (after := written(before)) != before:
            page.write_text(after)
            print(page.name, file=sys.stderr)


if __name__ == "__main__":
    main()
