from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dsv4core.api import BackendUnavailable, ConfigError, DSV4Error, PluginError
from dsv4core.config import AutoOptions, DSV4Config, ModelOptions, read_prompt
from dsv4core.hydra import _INITIALIZE, chosen_backend, compose, register_configs
from dsv4core.model.shapes import PRESETS
from dsv4core.presets import CONF
from dsv4core.testing.fakes import install_backend


def message(*overrides: str, kind: type[DSV4Error] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        compose(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_dataclass(folder: Path) -> None:
    assert compose() == DSV4Config()
    assert list(folder.iterdir()) == []


ORDERS = ["backend.order.cuda=[flashmla,hopper]", "backend.order.sm_90=[hopper]", "backend.order.sm_120=[a]"]


def test_auto_order(folder: Path) -> None:
    options = compose(ORDERS).backend
    assert isinstance(options, AutoOptions)
    assert options.order == {"cuda": ["flashmla", "hopper"], "sm_90": ["hopper"], "sm_120": ["a"]}
    assert compose().backend.order == {}


def test_a_broken_backend_does_not_disturb_others(folder: Path) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError")
    assert compose(["backend=acme"]).backend.name == "acme"
    assert compose().backend.name == "auto"
    text = message("backend=broken", kind=PluginError)
    assert text.startswith("[broken] Backend 'broken' of fake-broken 1.0 cannot be loaded: OSError (")


def test_presets(folder: Path) -> None:
    assert {path.stem for path in (CONF / "model").iterdir()} == set(PRESETS)
    for name in PRESETS:
        assert compose([f"model={name}"]).model == ModelOptions(name)
    long = compose(["workload=long", "decode=3"])
    assert (long.prefill, long.decode, long.batch) == (4096, 3, 1)


def test_values(folder: Path) -> None:
    config = compose(["layers=[0,2]", "checkpoint=/data/v4 flash", "verify=true", "kv_cache_dtype=fp8"])
    assert (config.layers, config.checkpoint, config.verify) == ([0, 2], "/data/v4 flash", True)
    assert config.kv_cache_dtype == "fp8"


@pytest.mark.parametrize("text", ["a, b = {c}", "007", "true", "null", "${x}", "'quoted'", " é\t", "x=@y"])
def test_prompt_is_taken_word_for_word(folder: Path, text: str) -> None:
    assert compose([f"prompt={text}"]).prompt == text


def test_prompt_from_a_file(folder: Path) -> None:
    (folder / "my (1), file=.txt").write_text("Attention,\nplease: é\n", encoding="utf-8")
    assert compose(["prompt=@my (1), file=.txt"]).prompt == "Attention,\nplease: é\n"


def test_prompt_files_that_cannot_be_used(folder: Path) -> None:
    (folder / "empty").write_text(" \n")
    (folder / "latin").write_bytes("caf\xe9 au lait".encode("latin-1"))
    assert message("prompt=@none") == "prompt=@none: none cannot be read: No such file or directory."
    assert message("prompt=@/") == "prompt=@/: / cannot be read: Is a directory."
    assert message("prompt=@empty") == "prompt=@empty: empty is empty."
    assert message("prompt=@latin") == "prompt=@latin: latin is not UTF-8 text (byte 3)."
    assert read_prompt("") == ""


KEYS = (
    "backend, batch, bench, bench.*, checkpoint, chunk, decode, device, dtype, index_dtype, json, "
    "kv_cache_dtype, layers, model, plugins.*, prefill, prompt, request.*, scales, seed, verify, workload"
)
PAGES = "request.page_sizes.context, request.page_sizes.state, request.page_sizes.window"
REQUEST = (
    "request.arch, request.context_parallel, request.decode_query_len, request.deterministic, request.graph, "
    f"request.host_lengths, {PAGES}, request.private_output, request.probe, request.seam, "
    "request.strided_pages, request.tensor_parallel"
)
MISTAKES = [
    ("decod=1", "'decod' is not a key; did you mean 'decode'?"),
    ("zzz=1", f"'zzz' is not a key; the keys are {KEYS}."),
    ("+zzz=1", f"'zzz' is not a key; the keys are {KEYS}."),
    ("hydra.run.dir=x", f"'hydra.run.dir' is not a key; the keys are {KEYS}."),
    ("model.name=v4_pro", "'model.name' is not a key; did you mean 'model'?"),
    (
        "backend.zzz=1",
        "'backend.zzz' is not an option of this backend; it takes backend.order.",
    ),
    (
        "backend.name=acme",
        "'backend.name' is not an option of this backend; it takes backend.order.",
    ),
    ("prefill=abc", "prefill takes int: Value 'abc' of type 'str' could not be converted to Integer."),
    ("prefill=null", "prefill takes int: field 'prefill' is not Optional."),
    ("json=maybe", "json takes bool: Value 'maybe' is not a valid bool (type str)."),
    (
        "backend.order=3",
        "backend.order=3 has no keys; set one of them, as in 'backend.order.KEY=VALUE'.",
    ),
    (
        "backend.order.cpu.x=[a]",
        "'backend.order.cpu.x' is not an option of this backend; it takes backend.order.",
    ),
    ("decode=???", "decode=??? leaves it without a value; give one."),
    (
        "+backend.order.sm90=[a]",
        "backend.order.sm90 names no machine; write a platform (cpu, cuda, rocm) or an architecture "
        "(sm_90, gfx942), with _heads_16 after it for 16 query heads a rank.",
    ),
    (
        "backend.order.cpu=[auto]",
        "backend.order.cpu=['auto'] is no list of backends to try; write [a,b].",
    ),
    ("request.arhc=sm_90", "'request.arhc' is not a key; did you mean 'request.arch'?"),
    ("request.zzzzzzzzz=1", f"'request.zzzzzzzzz' is not a key; request takes {REQUEST}."),
    (
        "request.page_sizes.windw=1",
        "'request.page_sizes.windw' is not a key; did you mean 'request.page_sizes.window'?",
    ),
    ("request.arch=90", "request.arch=90 is no architecture; write it as in sm_90, gfx942 or cpu."),
    ("request.seam=model", "request.seam=model is not known; use layer or kernel."),
    ("request.probe=deep", "request.probe=deep is not known; use static or host."),
    ("request.tensor_parallel=0", "request.tensor_parallel=0 is too small; the least is 1."),
    ("request.graph=maybe", "request.graph takes bool: Value 'maybe' is not a valid bool (type str)."),
    (
        "plugins.disable=acme",
        "plugins.disable=acme is no list of names; write 'plugins.disable=[a,b]'.",
    ),
    ("backend.order=[]", "backend.order=[] has no keys; set one of them, as in 'backend.order.KEY=VALUE'."),
    (
        "backend.order.cuda=flashmla",
        "backend.order.cuda=flashmla is no list of names; write 'backend.order.cuda=[a,b]'.",
    ),
    ("index_dtype=fp4", "index_dtype=fp4 is not known; use auto, fp8, bf16 or fp32."),
    ("model=v5", "model=v5 is not known; the names are tiny, v4_flash, v4_pro."),
    ("workload=short", "workload=short is not known; the names are long, quick."),
    ("backend=null", "backend takes a name; `dsv4 plugins` lists them."),
    ("backend={name: acme}", "backend takes a name; `dsv4 plugins` lists them."),
    ("prefill=1,2", "'prefill=1,2' gives several values; give one, or a list as key=[a,b]."),
    ("~prefill", "'~prefill' would take a key away, and every key has a value; leave it out."),
    ("word", "'word' cannot be read; write key=value; free text goes after --prompt."),
    (
        "checkpoint=a=b",
        "'checkpoint=a=b' cannot be read; quote a value that has special characters, as in 'key=\"a, b\"'.",
    ),
    ("checkpoint=${zzz}", "checkpoint: Interpolation key 'zzz' not found."),
    ("decode=-1", "decode=-1 is too small; the least is 0."),
    ("batch=0", "batch=0 is too small; the least is 1."),
    ("dtype=float16", "dtype=float16 is not known; use bfloat16 or float32."),
    ("layers=[0,-1]", "layers=[0, -1] cannot be run; give numbers from 0 on, or null for all."),
    ("layers=[]", "layers=[] cannot be run; give numbers from 0 on, or null for all."),
]


@pytest.mark.parametrize(("override", "text"), MISTAKES)
def test_mistakes_end_in_one_line(folder: Path, override: str, text: str) -> None:
    assert message(override) == text


def test_nothing_to_run(folder: Path) -> None:
    text = "prefill=0 and decode=0 leave nothing to run; set one of them."
    assert message("prefill=0", "decode=0") == text


@pytest.mark.parametrize("sign", ["+", "++"])
def test_a_plus_sign_makes_no_difference(folder: Path, sign: str) -> None:
    install_backend(folder, "acme")
    config = compose([f"{sign}backend=acme", f"{sign}decode=3", f"{sign}model=v4_pro"])
    assert (config.backend.name, config.decode, config.model.name) == ("acme", 3, "v4_pro")


def test_compose_does_not_disturb_an_application(folder: Path) -> None:
    with hydra.initialize(config_path=None, **_INITIALIZE):
        assert message() == (
            "compose cannot be called inside a Hydra application; call register_configs before hydra.main, "
            "and take the configuration that Hydra hands over."
        )


def test_threads_may_compose(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda decode: compose([f"decode={decode}"]), range(1, 9)))
    assert [config.decode for config in configs] == list(range(1, 9))


def test_disabled_backends_are_not_loaded(folder: Path) -> None:
    install_backend(folder, "acme", "raise OSError", distribution="fake-one")
    install_backend(folder, "acme", distribution="fake-two")
    config = compose(["backend=acme", "plugins.disable=[fake-one]"])
    assert config.plugins.disable == ["fake-one"]
    assert config.backend.workspace_mib == 64  # type: ignore[attr-defined]
    text = message("backend=acme", "plugins.disable=[acme]", kind=PluginError)
    assert text == "[disabled] Backend 'acme' is disabled. Take 'acme' out of plugins.disable."


def test_absent_backends(folder: Path) -> None:
    install_backend(folder, "acme")
    assert message("backend=flashmla", kind=BackendUnavailable) == (
        "[package-missing] Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`."
    )
    assert message("backend=acne", "backend.x=1", kind=BackendUnavailable) == (
        "[package-missing] No backend is named 'acne'. Did you mean 'acme'?"
    )


def test_chosen_backend() -> None:
    assert chosen_backend(["decode=1", "prompt=a, b"]) == "auto"
    assert chosen_backend(["backend=a", "backend=b"]) == "b"


def test_another_hydra_application(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError")
    caplog.set_level(logging.WARNING)
    register_configs(group="dsv4/backend")
    assert caplog.messages[0].startswith("[broken] Backend 'broken' of fake-broken 1.0 cannot be loaded")
    defaults = ["_self_", {"dsv4": "dsv4_config"}, {"dsv4/backend": "auto"}]
    ConfigStore.instance().store(name="app", node={"defaults": defaults, "lr": 1.0})
    with hydra.initialize(config_path=None, **_INITIALIZE):
        overrides = ["dsv4/backend=acme", "dsv4.backend.workspace_mib=9", "dsv4.decode=4"]
        config = OmegaConf.to_object(hydra.compose("app", overrides).dsv4)
    assert isinstance(config, DSV4Config)
    assert (config.decode, vars(config.backend)) == (4, {"name": "acme", "workspace_mib": 9})
