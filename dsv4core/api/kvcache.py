"""KV-cache formats as values: what one page of a cache holds, byte for byte. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dsv4core.api.errors import ConfigError
from dsv4core.api.model import LayerKind

ScaleKind = Literal["none", "tensor", "ue8m0_tile", "fp32_row"]
FP8Flavour = Literal["e4m3fn", "e4m3fnuz"]

DTYPE_BYTES = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class KVCachePart:
    """One field of a cached row.

    Attributes:
        name: Field name, such as `nope`, `rope`, `scale`, `row`, `key`, `kv`, `score`.
        dtype: Torch dtype name of the elements.
        width: Elements a row.
        region: Region of the page that holds it. The parts of one region lie row by row, side by side;
            region `r + 1` starts where region `r` of all rows ends.
    """

    name: str
    dtype: str
    width: int
    region: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that this part takes in one row."""
        return DTYPE_BYTES[self.dtype] * self.width


@dataclass(frozen=True)
class KVCacheFormat:
    """How the rows of one cache are stored.

    A pool is a tensor `[num_pages, page_size, row_width]` of `storage_dtype`. For a format of several
    regions the two inner dimensions are only a label for `page_size * bytes_per_token` bytes.

    Attributes:
        name: `fp8_ds_mla`, `bf16`, `fp8_e4m3`, `fp32`, or an index or state format's name.
        parts: Fields of a row.
        scale: `none`; `tensor` (one scale for the cache); `ue8m0_tile` (a power of two for each tile of
            `tile` values); `fp32_row` (one fp32 scale a row).
        fp8: FP8 flavour of the stored codes, None where nothing is FP8. It belongs to each pool.
        tile: Values that share one scale, 0 where `scale` is `none` or `tensor`.
        page_alignment: Page strides are multiples of this many bytes.
        strided_pages: Whether a page may be followed by bytes of something else.
    """

    name: str
    parts: tuple[KVCachePart, ...]
    scale: ScaleKind = "none"
    fp8: FP8Flavour | None = None
    tile: int = 0
    page_alignment: int = 1
    strided_pages: bool = True

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row, page padding excluded."""
        return sum(part.bytes for part in self.parts)

    @property
    def storage_dtype(self) -> str:
        """Torch dtype name of the pool: that of the only dtype used, else `uint8`."""
        dtypes = {part.dtype for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else "uint8"

    @property
    def row_width(self) -> int:
        """Size of the pool's last dimension, in elements of `storage_dtype`."""
        return self.bytes_per_token // DTYPE_BYTES[self.storage_dtype]

    @property
    def regions(self) -> int:
        """Number of regions in a page."""
        return 1 + max(part.region for part in self.parts)

    def region_bytes(self, region: int) -> int:
        """Bytes that one row takes in `region`."""
        return sum(part.bytes for part in self.parts if part.region == region)

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one tightly packed page of `page_size` rows to the next, alignment included."""
        return round_up(self.bytes_per_token * page_size, self.page_alignment)

    def resized(self, width: int) -> KVCacheFormat:
        """The same format with rows of `width` elements in each part; for formats without scales."""
        if self.scale not in ("none", "tensor"):
            raise ValueError(f"{self.name} rows have a fixed width: a scale serves {self.tile} values.")
        return replace(self, parts=tuple(replace(part, width=width) for part in self.parts))


@dataclass(frozen=True)
class KVCacheLayout:
    """The formats that a backend reads and writes for one request.

    Attributes:
        window: Raw tokens of the sliding window.
        compressed: Compressed entries.
        index: The indexer's keys.
        state: Compressor state of raw tokens (projected KV and score, fp32); `resized` by the core to the
            projection width of each compressor.
    """

    window: KVCacheFormat
    compressed: KVCacheFormat
    index: KVCacheFormat
    state: KVCacheFormat

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, KVCacheFormat):
                raise ValueError(f"{name}={value!r} of a layout cannot be; give a KVCacheFormat.")


@dataclass(frozen=True)
class PageSizes:
    """Rows a page of the caches.

    Attributes:
        window: Rows of a window page.
        context: Raw tokens that one page of compressed entries and index keys stands for; it has
            `context // ratio` rows.
        state: Most rows of a compressor-state page; a kind with a smaller ratio uses its ratio.
    """

    window: int = 64
    context: int = 256
    state: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"page size {name}={value} holds nothing; the least is 1.")

    def check_kind(self, kind: LayerKind) -> None:
        """Check that entries of `kind` do not straddle context pages.

        Raises:
            ConfigError: A context page is not a whole number of entries.
        """
        if kind.ratio is not None and self.context % kind.ratio:
            raise ConfigError(
                f"a context page of {self.context} tokens is not a whole number of {kind.ratio}-token "
                f"entries; choose a multiple of {kind.ratio}."
            )

    def compressed_rows(self, kind: LayerKind) -> int:
        """Rows of a compressed or index page of layers of `kind`."""
        return self.context // (kind.ratio or 1)

    def state_rows(self, kind: LayerKind) -> int:
        """Rows of a compressor-state page of layers of `kind`: 4 at ratio 4, 8 at ratio 128."""
        return min(self.state, kind.ratio or 1)
