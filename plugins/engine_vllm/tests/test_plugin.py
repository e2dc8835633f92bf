"""The entry point as vLLM calls it: in a process of its own, more than once, and free for other models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE / "stub")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registering_imports_nothing_of_vllm_and_no_torch() -> None:
    program = """
from importlib.metadata import entry_points
import sys
(entry_point,) = entry_points(group="vllm.general_plugins", name="dsv4")
register = entry_point.load()
register()
register()
print(sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "torch", "hydra")))
"""
    assert run(program) == "[]\n"


def test_the_seams_are_ready_when_the_model_is_imported() -> None:
    program = """
from dsv4_vllm.plugin import register
register()
register()
from vllm.models.deepseek_v4.cpu import model
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from dsv4_vllm.seams import MARK
print(MARK in vars(model.DeepseekV4CPUAttention), MARK in vars(DeepseekV4Attention))
"""
    assert run(program) == "True True\n"


def test_a_model_that_was_imported_before_is_served_too() -> None:
    program = """
from vllm.models.deepseek_v4.nvidia import model
from dsv4_vllm.plugin import register
register()
from dsv4_vllm.seams import MARK
print(hasattr(model._select_dsv4_attn_cls, MARK))
"""
    assert run(program) == "True\n"
