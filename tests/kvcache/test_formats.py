"""The formats' sizes, and the table of dtype strings as a total function."""

import itertools

import pytest

from dsv4core.api import C4A, C128A, ConfigError, PageSizes
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, accepted_dtypes, cache_layout, resolve_dtype
from dsv4core.model.shapes import PRESETS

MODEL = PRESETS["v4_flash"]
PACKED_ONLY, PLAIN_ONLY = ("fp8_ds_mla",), ("bf16", "fp8_e4m3")
SEVERAL = ("fp8_ds_mla", "bf16", "fp8_e4m3", "fp32")

TABLE = {
    PACKED_ONLY: dict.fromkeys(["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"], "fp8_ds_mla"),
    PLAIN_ONLY: {
        "auto": "bf16",
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp8": "fp8_e4m3",
        "fp8_e4m3": "fp8_e4m3",
    },
    SEVERAL: {
        "auto": "fp8_ds_mla",
        "fp8": "fp8_ds_mla",
        "fp8_ds_mla": "fp8_ds_mla",
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp8_e4m3": "fp8_e4m3",
        "fp32": "fp32",
    },
}
ENGINE_STRINGS = [
    "float16", "fp8_e5m2", "fp8_inc", "int8_per_token_head", "nvfp4", "turboquant_k8v4", "", "FP8", "None",
]  # fmt: skip


@pytest.mark.parametrize(
    ("formats", "requested"), list(itertools.product(TABLE, [*KV_CACHE_DTYPES, *ENGINE_STRINGS]))
)
def test_kv_cache_dtype_table_is_total(formats, requested):
    if requested in TABLE[formats]:
        found = resolve_dtype("kv_cache_dtype", requested, KV_CACHE_DTYPES, formats, "x")
        assert found == TABLE[formats][requested]
    else:
        with pytest.raises(ConfigError) as error:
            resolve_dtype("kv_cache_dtype", requested, KV_CACHE_DTYPES, formats, "x")
        accepted = ", ".join(name for name in KV_CACHE_DTYPES if name in TABLE[formats])
        assert str(error.value) == (
            f"kv_cache_dtype={requested} is not one that backend=x can store; it accepts: {accepted}."
        )


@pytest.mark.parametrize("formats", [PACKED_ONLY, PLAIN_ONLY, SEVERAL])
def test_accepted_strings_are_those_that_resolve(formats):
    assert set(accepted_dtypes(KV_CACHE_DTYPES, formats)) == set(TABLE[formats])


def test_index_dtypes():
    formats = ("fp8", "bf16", "fp32")
    assert {k: resolve_dtype("index_dtype", k, INDEX_DTYPES, formats, "x") for k in INDEX_DTYPES} == {
        "auto": "fp8", "fp8": "fp8", "bf16": "bf16", "fp32": "fp32",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="index_dtype=mxfp4 is not one .* accepts: auto, fp8"):
        resolve_dtype("index_dtype", "mxfp4", INDEX_DTYPES, ("fp8",), "x")


def test_packed_page_bytes():
    layout, sizes = cache_layout(MODEL, "fp8_ds_mla", "fp8"), PageSizes()
    assert layout.window.bytes_per_token == 584
    pages = {256: 149_760, 128: 74_880, 64: 37_440, 32: 19_008, 16: 9_792, 2: 1_728}
    assert {rows: layout.window.page_bytes(rows) for rows in pages} == pages
    assert layout.window.page_bytes(sizes.compressed_rows(C128A)) == 1728
    assert layout.index.bytes_per_token == 132
    assert layout.index.page_bytes(sizes.compressed_rows(C4A)) == 8640
    assert layout.state.resized(2 * 512).page_bytes(sizes.state_rows(C4A)) == 32832
    assert layout.state.resized(512).page_bytes(sizes.state_rows(C128A)) == 32832
    assert layout.state.resized(2 * 128).page_bytes(sizes.state_rows(C4A)) == 8640


def test_plain_page_bytes():
    bf16, fp8 = cache_layout(MODEL, "bf16", "fp8"), cache_layout(MODEL, "fp8_e4m3", "fp8")
    assert [bf16.window.page_bytes(rows) for rows in (64, 2)] == [65536, 2048]
    assert [fp8.window.page_bytes(rows) for rows in (64, 2)] == [32768, 1024]
    assert bf16.index.page_bytes(64) == 8704
    assert bf16.state.resized(1024).page_bytes(4) == 32768


def test_packed_format_needs_its_head_dimensions():
    from dataclasses import replace

    with pytest.raises(ConfigError) as error:
        cache_layout(replace(MODEL, head_dim=128), "fp8_ds_mla", "fp8")
    assert str(error.value) == (
        "kv_cache_dtype=fp8_ds_mla stores heads of 448 + 64 rotary dimensions, and this model has 64 + 64; "
        "ask for bf16, fp8_e4m3 or fp32 instead."
    )
    with pytest.raises(ValueError, match="fp8_ds_mla rows have a fixed width"):
        cache_layout(MODEL, "fp8_ds_mla", "fp8").window.resized(256)
