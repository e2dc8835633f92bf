"""`dsv4 bench` on a CPU: rows, sweeps, the file, plots, mistakes."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4core.api import Requirement
from dsv4core.bench import timing
from dsv4core.bench.cost import Ceilings
from dsv4core.bench.peers import PEERS
from dsv4core.bench.rows import Row, load
from dsv4core.bench.timing import measure_ceilings
from dsv4core.cli.bench import _libraries, _workloads
from dsv4core.cli.main import main
from dsv4core.config import BENCH_VALUES
from dsv4core.framework.platform import Machine
from dsv4core.framework.request import build_request, configured_shape
from dsv4core.hydra import compose, expand_sweeps
from dsv4core.libraries import DEEP_GEMM
from dsv4core.presets import presets

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools, few repetitions: what is tested is not the time."""
    for module in ("bench.inputs", "cli.bench"):
        monkeypatch.setattr(f"dsv4core.{module}.cache_bytes", lambda device: 1 << 17)
    monkeypatch.setattr("dsv4core.bench.timing.SECONDS", 0.0)
    ceilings = Ceilings(copy_gbps=20.0, matmul_tflops=0.1, fp8_tflops=0.2)
    monkeypatch.setattr("dsv4core.cli.bench.measure_ceilings", lambda device, dtype: ceilings)


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 0.5 < found.copy_gbps < 2000
    assert 1e-3 < found.matmul_tflops < 100


def test_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    assert 900 < timing.host_microseconds(lambda: time.sleep(1e-3), torch.device("cpu")) < 20_000


def rows(capsys: Capture, *words: str) -> list[dict[str, object]]:
    assert main(["bench", "backend=reference", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row(capsys: Capture) -> None:
    (row,) = rows(capsys, "bench.op=[forward_mqa]", "bench.tokens=[2]", "bench.context=[700]")
    assert set(row) == {own.name for own in fields(Row)}
    assert row["shape"] == {"heads": 16, "width": 192, "tokens": 2, "context": 700, "hidden": 256}
    assert (row["backend"], row["kv_format"], row["phase"], row["kind"]) == (
        "reference",
        "fp8_ds_mla",
        "decode",
        "c4a",
    )
    assert row["us"] > 0
    bytes_ = 2 * (584 * 192 + 2048 * 16)
    assert row["gbps"] == pytest.approx(bytes_ / row["us"] / 1e3, abs=0.01)
    assert row["versions"]["torch"] == torch.__version__


def test_a_row_names_the_kernels_libraries() -> None:
    """What a backend requires, by whichever name it is installed; DeepGEMM, which plugins share."""
    record = SimpleNamespace(distribution="dsv4-plugin-acme")
    needed = Requirement("acme", "acme-kernels", "pip install acme-kernels", alternatives=("acme-rocm",))
    backend = SimpleNamespace(info=SimpleNamespace(requirements=(needed,)), record=record)
    assert list(_libraries(backend)) == ["acme-kernels", "acme-rocm", *DEEP_GEMM]  # type: ignore[arg-type]
    record.distribution = "dsv4core"
    assert list(_libraries(backend)) == ["acme-kernels", "acme-rocm"]  # type: ignore[arg-type]


def test_everything_can_be_measured(capsys: Capture) -> None:
    everything = [f"bench.{name}=[{','.join(values)}]" for name, values in BENCH_VALUES.items()]
    found = rows(capsys, *everything, "bench.tokens=[4]", "bench.context=[300]", "bench.peers=[torch]")
    measured = {(row["op"], row["phase"], row["kind"]) for row in found if row["backend"] == "reference"}
    chooses = {op for op in BENCH_VALUES["op"] if op.startswith("indexer")} | {"mixed_table"}
    lacking = {("compress", "swa"), *((op, kind) for op in chooses for kind in ("swa", "c128a"))}
    lacking |= {("prepare_step", kind) for kind in BENCH_VALUES["kind"]}  # by the reference
    assert measured == {
        (op, phase, kind)
        for op in BENCH_VALUES["op"]
        for phase in BENCH_VALUES["phase"]
        for kind in BENCH_VALUES["kind"]
        if (op, kind) not in lacking
    }
    peer = {row["op"] for row in found if row["backend"] == "peer:torch"}
    assert peer == {"forward_mqa", "o_proj", "indexer.topk", "wq_b", "wo_b"}


def test_a_sweep_is_measured_side_by_side(capsys: Capture) -> None:
    words = ("kv_cache_dtype=bf16,fp8", "bench.op=[plan_step]", "bench.tokens=[1,2]", "bench.context=[64]")
    found = rows(capsys, *words)
    assert [(row["kv_format"], row["shape"]["tokens"]) for row in found] == [
        ("bf16", 1),
        ("fp8_ds_mla", 1),
        ("bf16", 2),
        ("fp8_ds_mla", 2),
    ]
    assert len({row["run_id"] for row in found}) == 1


def test_formats_are_not_compared_in_silence(capsys: Capture) -> None:
    words = ("kv_cache_dtype=bf16,fp8", "bench.op=[plan_step]", "bench.tokens=[1]", "bench.context=[64]")
    assert main(["bench", "backend=reference", *words]) == 0
    out = capsys.readouterr().out
    assert "plan_step, decode, c4a, tiny, bfloat16, 16 heads, bf16 caches" in out
    assert "plan_step, decode, c4a, tiny, bfloat16, 16 heads, fp8_ds_mla caches" in out
    assert "Rows of different cache formats read different bytes; compare them within a table." in out


SWEEPS = [
    (["a=1"], [["a=1"]]),
    (["a=1,2", "b=x"], [["a=1", "b=x"], ["a=2", "b=x"]]),
    (["a=1,2", "b=x,y"], [["a=1", "b=x"], ["a=1", "b=y"], ["a=2", "b=x"], ["a=2", "b=y"]]),
    (["a=[1,2]"], [["a=[1,2]"]]),
    (["a=range(1,4)"], [["a=1"], ["a=2"], ["a=3"]]),
]


@pytest.mark.parametrize(("words", "expected"), SWEEPS)
def test_sweeps(words: list[str], expected: list[list[str]]) -> None:
    assert expand_sweeps(words) == expected


def test_the_file_keeps_the_newest_of_each(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "results" / "rows.jsonl"
    words = ("bench.op=[plan_step]", "bench.context=[64]", f"bench.out={file}", "bench.commit=abc")
    rows(capsys, *words, "bench.tokens=[1,2]")
    before = load(file)
    rows(capsys, *words, "bench.tokens=[2,3]")
    after = load(file)
    assert [row.shape["tokens"] for row in after] == [1, 2, 3]
    assert after[0] == before[0]
    assert {row.commit for row in after} == {"abc"}


def test_a_file_of_something_else_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine\n")
    words = ["bench.op=[plan_step]", "bench.tokens=[1]", "bench.context=[64]", f"bench.out={file}"]
    assert main(["bench", "backend=reference", *words]) == 2
    assert "cannot hold the rows" in capsys.readouterr().err
    assert file.read_text() == "mine\n"


def test_plots(tmp_path: Path, capsys: Capture) -> None:
    words = (
        "bench.op=[forward_mqa]",
        "bench.tokens=[1,2]",
        "bench.context=[64,128]",
        "kv_cache_dtype=bf16,fp8",
    )
    rows(capsys, *words, f"bench.plot={tmp_path}")
    plots = (
        *("decode-c4a-context128-by-batch", "decode-c4a-context64-by-batch"),
        *("decode-c4a-tokens1-by-context", "decode-c4a-tokens2-by-context", "roofline"),
    )
    work = "forward_mqa-tiny-bfloat16-16heads"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{work}-{format}-{plot}.png" for format in ("bf16", "fp8_ds_mla") for plot in plots
    ]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_plots_without_matplotlib(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4core.bench.plots.find_spec", lambda name: None)
    assert main(["bench", "backend=reference", "bench.plot=x"]) == 2
    assert capsys.readouterr().err == "dsv4: Plots need matplotlib; run `pip install 'dsv4core[plot]'`.\n"


MISTAKES = [
    (["bench.op=[forwrd]"], "bench.op names forwrd; use some of plan_step, project, insert_kv, compress, "),
    (["bench.kind=[]"], "bench.kind names nothing; use some of swa, c4a, c128a."),
    (["bench.tokens=[0]"], "bench.tokens=[0] cannot be; give numbers from 1 on."),
    (["bench.tokens=4"], "bench.tokens=4 is no list of numbers; write 'bench.tokens=[0,2]'."),
    (["bench=nightly"], "bench=nightly is not known; the names are decode, heads, mixed, prefill, quick."),
    (
        ["bench.peers=[cudnn]", "bench.op=[plan_step]"],
        "There is no peer 'cudnn'; the peers are torch, flashmla",
    ),
    (["bench.peers=[flashmla]"], "The peer 'flashmla' needs the package flash_mla, which is not installed."),
    (
        ["bench.mode=graph", "bench.phase=[decode,mixed]"],
        "bench.mode=graph cannot capture mixed steps: backends plan those by their lengths; use "
        "bench.mode=auto, or bench.phase=[decode].",
    ),
    (
        ["bench.mode=graph", "device=cpu"],
        "bench.mode=graph captures on a GPU, and device=cpu is none; use bench.mode=auto.",
    ),
    (
        ["request.tensor_parallel=1,3"],
        "A tensor-parallel size of 3 does not divide num_attention_heads = 16;",
    ),
    (["bench.op=[indexer]", "bench.kind=[swa]"], "Nothing could be measured; the reasons are above."),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(capsys: Capture, words: list[str], text: str) -> None:
    assert main(["bench", "backend=reference", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"dsv4: {text}")


def test_a_backend_that_cannot_is_left_out_with_its_reasons(capsys: Capture) -> None:
    words = ("backend=reference", "request.context_parallel=1,2", "bench.op=[plan_step]", "bench.tokens=[1]")
    assert main(["bench", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert (
        "dsv4: reference left out of decode c4a, 1 tokens, context 4,096: backend=reference" in captured.err
    )


EXPLODES = {"forward_mqa": lambda inputs: 1 / 0}
FAILURE = ["bench.op=[forward_mqa,plan_step]", "bench.tokens=[1]", "bench.context=[64,65]"]


def test_a_failure_is_a_line_and_the_rest_goes_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "torch", EXPLODES)  # type: ignore[arg-type]
    assert main(["bench", "backend=reference", *FAILURE, "bench.peers=[torch]", "--json"]) == 1
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["op"], row["shape"]["context"]) for row in found] == [
        *(("forward_mqa", 64), ("plan_step", 64), ("forward_mqa", 65), ("plan_step", 65)),
    ]
    step = "peer:torch failed in forward_mqa of decode c4a, 1 tokens, context"
    assert captured.err.splitlines() == [
        f"dsv4: {step} {context}: ZeroDivisionError: division by zero." for context in (64, 65)
    ]


def test_only_failures(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no kernel image\nis there")

    monkeypatch.setattr("dsv4core.cli.bench.Inputs", broken)
    assert main(["bench", "backend=reference", *FAILURE]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == (
        "dsv4: reference failed in decode c4a, 1 tokens, context 64: RuntimeError: no kernel image is there."
    )


def test_a_lost_device_ends_the_run(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "torch", EXPLODES)  # type: ignore[arg-type]
    monkeypatch.setattr("dsv4core.cli.bench.device_lost", lambda device: True)
    file = tmp_path / "rows.jsonl"
    words = [*FAILURE, "bench.peers=[torch]", f"bench.out={file}"]
    assert main(["bench", "backend=reference", *words]) == 1
    assert [row.op for row in load(file)] == ["forward_mqa"]
    captured = capsys.readouterr()
    assert "forward_mqa, decode, c4a, tiny, bfloat16, 16 heads" in captured.out
    assert captured.err.splitlines()[1] == (
        "dsv4: peer:torch failed in forward_mqa of decode c4a, 1 tokens, context 64: after this only another "
        "process can use the device; not run: the rest of this workload, and reference in decode c4a, 1 "
        "tokens, context 65."
    )


def test_strict_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    monkeypatch.setitem(PEERS, "torch", EXPLODES)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        main(["bench", "backend=reference", *FAILURE, "bench.peers=[torch]"])


def test_rows_say_what_was_computed(capsys: Capture) -> None:
    words = ("dtype=float32,bfloat16", "bench.op=[plan_step]", "bench.tokens=[1]", "bench.context=[64]")
    found = rows(capsys, *words)
    assert [(row["model"], row["dtype"]) for row in found] == [("tiny", "float32"), ("tiny", "bfloat16")]


def test_a_row_says_whether_the_cache_was_cold(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 calls of 144 KB move twice 128 KiB; the 8 that a CPU takes at most, less than twice 16 MiB."""
    words = ("bench.op=[forward_mqa]", "bench.tokens=[1]", "bench.context=[4096]")
    assert [row["cold"] for row in rows(capsys, *words)] == [True]
    for module in ("bench.inputs", "cli.bench"):
        monkeypatch.setattr(f"dsv4core.{module}.cache_bytes", lambda device: 1 << 24)
    assert [row["cold"] for row in rows(capsys, *words)] == [False]


SHAPES = {
    "quick": {(16, 1), (16, 8)},
    "decode": {(16, tokens) for tokens in (1, 8, 64, 256, 512)},
    "prefill": {(16, tokens) for tokens in (512, 2048, 4096, 16384)},
    "mixed": {(16, tokens) for tokens in (64, 512, 4096)},
    "heads": {(heads, tokens) for heads in (8, 16, 32, 64, 128) for tokens in (1, 64, 512)},
}


@pytest.mark.parametrize("name", presets("bench"))
def test_presets_expand(name: str) -> None:
    found = set()
    for words in expand_sweeps([f"bench={name}"]):
        config = compose(words)
        request = build_request(config, configured_shape(config), Machine("cpu", "", ""), "static")
        for workload in _workloads(config):
            found.add((request.num_heads, workload.tokens))
            assert workload.limits.max_tokens == workload.tokens
    assert found == SHAPES[name]


def test_a_presets_sweep_gives_way() -> None:
    words = ["bench=quick,heads", "model=v4_pro", "request.tensor_parallel=8,4"]
    assert expand_sweeps(words) == [
        [f"bench={name}", "model=v4_pro", f"request.tensor_parallel={ranks}"]
        for name in ("quick", "heads")
        for ranks in (8, 4)
    ]
    assert len(expand_sweeps(["bench=heads", "model=v4_pro"])) == 4
