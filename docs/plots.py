"""Draws the plots of the docs from measurements on an H200. It needs matplotlib.

python docs/plots.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from dsv4core.bench.plots import plot
from dsv4core.bench.rows import load

DOCS = Path(__file__).parent
ROWS = DOCS.parent / "benchmarks" / "results" / "h200" / "hopper.jsonl"


def main() -> None:
    """Decodes' attention by query tokens, `backend=hopper` beside FlashMLA."""
    for model, heads in (("v4_flash", 64), ("v4_pro", 128)):
        rows = [
            row
            for row in load(ROWS)
            if (row.op, row.model, row.phase, row.kind) == ("forward_mqa", model, "decode", "c4a")
            and row.shape["heads"] == heads
            and row.kv_format == "fp8_ds_mla"
            and row.options.get("operands") != "f16"
        ]
        with TemporaryDirectory() as folder:
            (drawn,) = (file for file in plot(rows, Path(folder)) if file.stem.endswith("by-batch"))
            target = DOCS / "plots" / f"hopper-{heads}-heads.png"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(drawn.read_bytes())


if __name__ == "__main__":
    main()
