"""`dsv4 run` as a user meets it: the table, the JSON, verification, prompts, and mistakes in one line."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4core.api import ConfigError
from dsv4core.cli.main import main
from dsv4core.cli.tokens import prompt_tokens
from dsv4core.testing.fakes import install_backend, isolate

SHORT = ["prefill=40", "decode=3", "batch=2", "chunk=16"]
CHOOSING = ["prefill=300", "decode=3", "batch=1", "chunk=128"]  # long enough for the indexer to drop entries

WRONG = """\
from dsv4core.backends.reference import *
from dsv4core.backends import reference
from dsv4core.api import hookimpl

@hookimpl
def dsv4_forward_mqa(state, q, caches, selected, step, kind_state, want_lse):
    return state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink=False)
"""


UPSIDE_DOWN = """\
from dataclasses import replace
from dsv4core.backends.reference import *
from dsv4core.backends import reference
from dsv4core.api import hookimpl

@hookimpl
def dsv4_plan_layer(request, layer):
    return replace(reference.dsv4_plan_layer(request, layer), own_ops=frozenset({"index_topk"}))

@hookimpl
def dsv4_index_topk(layer, logits, visible):
    from dsv4core import ops
    return ops.index_topk(-logits, visible, layer.model.index_topk)
"""


@pytest.fixture(autouse=True)
def cache_home(tiny_checkpoint, tmp_path, monkeypatch):
    """A cache that has the tiny checkpoint already."""
    home = tmp_path / "cache"
    (home / "dsv4core").mkdir(parents=True)
    for layers in ("", "-layers0", "-layers1", "-layers2", "-layers0-1-2"):
        (home / "dsv4core" / f"tiny-v1-seed0{layers}").symlink_to(tiny_checkpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def run_json(capsys, *overrides):
    code = main(["run", "json=true", *overrides])
    return code, json.loads(capsys.readouterr().out)


def test_report_for_machines(capsys, tiny_checkpoint):
    code, report = run_json(capsys, *SHORT, "verify=true", "layers=[0,1,2]")
    assert code == 0
    assert list(report) == [
        "backend", "kv_cache", "layers", "prefill_tokens", "decode_tokens", "timing", "peak_bytes", "verify",
    ]  # fmt: skip
    assert (report["backend"], report["layers"]) == ("reference", [0, 1, 2])
    assert (report["prefill_tokens"], report["decode_tokens"]) == (80, 6)
    assert report["kv_cache"]["window"] == "fp8_ds_mla"
    assert report["kv_cache"]["bytes_per_token"] == (584 + 132) / 4 + 584 / 128
    operations = {"plan", "project", "insert_kv", "compress", "indexer", "forward_mqa", "o_proj"}
    for phase, tokens in (("prefill", 80), ("decode", 6)):
        timing = report["timing"][phase]
        assert set(timing["operations"]) == operations
        assert 0 < sum(timing["operations"].values()) <= timing["seconds"]
        assert timing["tokens_per_second"] == pytest.approx(tokens / timing["seconds"])
    verify = report["verify"]
    assert verify["ok"]
    assert verify["compared_with"] == "itself with fp32 caches"
    assert (
        1e-3 < verify["rel_err"] < verify["tolerance"]
    )  # FP8 caches are not exact, and a zero would be a lie
    assert verify["worst_layer"] in (0, 1, 2)


def test_fp32_caches_are_what_verification_compares_with(capsys):
    formats = ["kv_cache_dtype=fp32", "index_dtype=fp32", "dtype=float32"]
    code, report = run_json(capsys, *CHOOSING, *formats, "verify=true")
    assert code == 0
    assert report["verify"]["rel_err"] == report["verify"]["max_abs_err"] == 0.0
    assert report["verify"]["agreement"] == 1.0


def test_report_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", *SHORT, "verify=true", "layers=[1]"]) == 0
    out = capsys.readouterr().out
    for text in (
        "the attention stack (no MLPs, no output head)",
        "reference (dsv4core",
        "the first of auto's order that can run this",
        "1: 1 c4a; activations bfloat16",
        "fp8_ds_mla, 584 B a row; index_fp8, 132 B a key",
        "179.00 B a token of context",
        "tokens/s (80 tokens in",
        "ok against itself with fp32 caches",
        "forward_mqa",
    ):
        assert text in out.replace("\n", " "), text


def test_a_backend_that_is_wrong_fails_verification(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "plugins"
    folder.mkdir()
    install_backend(folder, "reference", "from dsv4core.backends.reference import *\n")
    install_backend(folder, "sinkless", WRONG)
    isolate(folder, monkeypatch)
    code, report = run_json(capsys, *SHORT, "backend=sinkless", "verify=true", "layers=[0]")
    assert code == 1
    assert not report["verify"]["ok"]
    assert report["verify"]["rel_err"] > report["verify"]["tolerance"]
    assert report["verify"]["compared_with"] == "the reference with fp8_ds_mla caches"
    assert main(["run", *SHORT, "backend=sinkless", "verify=true", "layers=[0]"]) == 1
    assert "FAILED against the reference with fp8_ds_mla caches" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_run(capsys, tiny_checkpoint):
    fixed = [*SHORT, "verify=true", "layers=[1]", f"checkpoint={tiny_checkpoint}"]
    runs = [run_json(capsys, *fixed, f"seed={seed}")[1]["verify"] for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0]["rel_err"] != runs[2]["rel_err"]


def test_the_default_checkpoint_is_written_on_first_use(capsys, cache_home):
    folder = cache_home / "dsv4core" / "tiny-v1-seed0-layers1"
    folder.unlink()
    assert main(["run", *SHORT, "layers=[1]"]) == 0
    assert f"writing a checkpoint with random weights (4.0 MiB) to {folder}" in capsys.readouterr().err
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    assert written == pytest.approx(4.0, rel=0.02)
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.split(".")[1] for name in names} == {"1", "weight"}
    assert main(["run", *SHORT, "layers=[1]"]) == 0
    assert "writing a checkpoint" not in capsys.readouterr().err


def test_a_layer_has_the_same_weights_alone(capsys, cache_home):
    _, among_all = run_json(capsys, *SHORT, "layers=[1]", "verify=true")
    (cache_home / "dsv4core" / "tiny-v1-seed0-layers1").unlink()
    _, alone = run_json(capsys, *SHORT, "layers=[1]", "verify=true")
    assert alone["verify"] == among_all["verify"]


def test_a_cache_that_cannot_be_written(capsys, cache_home):
    folder = cache_home / "dsv4core" / "tiny-v1-seed5"
    (cache_home / "dsv4core" / f".{folder.name}.{os.getpid()}").write_text("in the way")
    assert one_line(capsys, "seed=5", "layers=null") == (
        f"dsv4: {folder} cannot be written: File exists; choose another place (XDG_CACHE_HOME for dsv4 run)."
    )


def test_only_decode_or_only_prefill(capsys):
    _, report = run_json(capsys, "prefill=0", "decode=4", "layers=[1]", "verify=true")
    assert report["timing"]["prefill"]["tokens_per_second"] is None
    assert report["verify"]["agreement"] is None  # nothing had to be dropped
    _, report = run_json(capsys, "prefill=9", "decode=0", "layers=[2]")
    assert report["timing"]["decode"]["tokens_per_second"] is None
    assert report["verify"] is None


def test_prompts(capsys, tmp_path):
    assert main(["run", "--prompt", "Grüße", "prefill=8", "decode=2", "layers=[0]"]) == 0
    assert "7 prompt tokens (UTF-8 bytes), repeated to 10" in capsys.readouterr().out
    file = tmp_path / "prompt.txt"
    file.write_text("a longer prompt than is asked for")
    assert main(["run", f"prompt=@{file}", "prefill=8", "decode=2", "layers=[0]"]) == 0
    assert "33 prompt tokens (UTF-8 bytes), the first 10" in capsys.readouterr().out


def copy_checkpoint(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint, tmp_path / "broken")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one_line(capsys, *overrides):
    """Run a mistake; what the user sees."""
    assert main(["run", *SHORT, *overrides]) == 2
    captured = capsys.readouterr()
    progress = ("chose reference", "writing a checkpoint")
    lines = [line for line in captured.err.splitlines() if not any(text in line for text in progress)]
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    return lines[0]


def test_unknown_dtype_strings(capsys):
    assert one_line(capsys, "kv_cache_dtype=int8") == (
        "dsv4: kv_cache_dtype=int8 is not known; use auto, fp8, fp8_ds_mla, fp8_e4m3, bf16, bfloat16 or fp32."
    )
    assert one_line(capsys, "index_dtype=mxfp4") == (
        "dsv4: index_dtype=mxfp4 is not known; use auto, fp8, bf16 or fp32."
    )


def test_config_that_contradicts_the_weights(capsys, tiny_checkpoint, tmp_path):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    edit_config(folder, q_lora_rank=64)
    assert main(["run", *SHORT, f"checkpoint={folder}", "layers=[0]"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"dsv4: The checkpoint in {folder} cannot be used:"
    assert "  layers.0.attn.q_norm.weight: found BF16 [128]; expected BF16 or F32 [64]." in lines


def test_heads_that_groups_do_not_divide(capsys, tiny_checkpoint, tmp_path):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    edit_config(folder, o_groups=7)
    assert one_line(capsys, f"checkpoint={folder}") == (
        "dsv4: num_attention_heads = 16 is not a multiple of o_groups = 7; each output group needs the same "
        "number of heads."
    )


def test_a_checkpoint_cut_short(capsys, tiny_checkpoint, tmp_path):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(100_000)
    assert one_line(capsys, f"checkpoint={folder}") == (
        f"dsv4: The checkpoint in {folder} cannot be used: {file} has 100000 bytes, but its header says "
        f"{size}; the file is cut short or damaged, so download it again."
    )


def test_nan_in_a_weight(capsys, tiny_checkpoint, tmp_path):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    tensors["layers.0.attn.kv_norm.weight"][3] = float("nan")
    save_file(tensors, file)
    assert one_line(capsys, f"checkpoint={folder}") == (
        "dsv4: layers.0.attn.kv_norm.weight holds 1 NaN or infinite values; the checkpoint is damaged, so "
        "get it again."
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layers=[1,9]"], "layers=[1, 9]: layer 9 does not exist; the model has 5 layers."),
        (
            ["layers=[1,1]"],
            "layers=[1, 1] names a layer twice, and each has one set of caches; name it once.",
        ),
        (["layers=2"], "layers=2 is no list of numbers; write 'layers=[0,2]', or null."),
        (["layers=[a]"], "layers=['a'] is no list of numbers; write 'layers=[0,2]', or null."),
        (["device=tpu"], "device=tpu is not a torch device; use auto, cpu, cuda or cuda:1."),
        (["checkpoint=/nowhere"], "/nowhere is not a directory; give the one that holds config.json."),
        (["model=huge"], "model=huge is not known; the names are tiny, v4_flash, v4_pro."),
    ],
)
def test_other_mistakes(capsys, overrides, message):
    assert one_line(capsys, *overrides) == f"dsv4: {message}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(capsys):
    expected = f"dsv4: device=cuda: this torch ({torch.__version__}) sees no GPU; use device=cpu."
    assert one_line(capsys, "device=cuda") == expected


def test_a_tokenizer_without_its_package(capsys, tiny_checkpoint, tmp_path, monkeypatch):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert one_line(capsys, f"checkpoint={folder}", "--prompt=hello") == (
        "dsv4: the prompt needs the checkpoint's tokenizer, and the package tokenizers is not installed; "
        "run `pip install tokenizers`, or leave the prompt out for random tokens (tokenizer.json was found)."
    )


def test_a_prompt_outside_the_vocabulary():
    with pytest.raises(ConfigError) as error:
        prompt_tokens("xyz", Path("nowhere"), 100, 1, 8)
    assert str(error.value) == (
        "the prompt's token 122 (UTF-8 bytes) is outside the vocabulary of 100; use a checkpoint whose "
        "vocabulary fits, or plain ASCII text."
    )


def test_prompts_that_cannot_be_read(capsys, tiny_checkpoint, tmp_path):
    folder = copy_checkpoint(tiny_checkpoint, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot tokenise the prompt" in one_line(capsys, f"checkpoint={folder}", "--prompt=hello")
    assert one_line(capsys, "--prompt=\udcff") == (
        "dsv4: the prompt is not UTF-8 text (character 0); save it as UTF-8."
    )


def test_a_wrong_indexer_fails_verification(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "plugins"
    folder.mkdir()
    install_backend(folder, "reference", "from dsv4core.backends.reference import *\n")
    install_backend(folder, "upside", UPSIDE_DOWN)
    isolate(folder, monkeypatch)
    words = ("prefill=500", *CHOOSING[1:])  # the worst 64 of 75 entries are mostly the best ones
    code, report = run_json(capsys, *words, "backend=upside", "verify=true", "layers=[1]")
    assert code == 1
    assert report["verify"]["rel_err"] < report["verify"]["tolerance"]
    assert report["verify"]["agreement"] < report["verify"]["least_agreement"]


def test_paths_with_brackets_are_printed_as_they_are(capsys, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "k[" / "x]")
    assert main(["run", *SHORT, f'checkpoint="{folder}"', "layers=[0]"]) == 0
    assert str(folder) in capsys.readouterr().out


def test_numbers_that_are_too_large(capsys):
    assert one_line(capsys, "seed=99999999999999") == (
        "dsv4: seed=99999999999999 is too large; the most is 4294967295."
    )
    assert one_line(capsys, "prefill=20000") == (
        "dsv4: prefill=20000 and decode=3 make 20003 tokens, and the model has 16384 positions; ask for "
        "fewer."
    )
