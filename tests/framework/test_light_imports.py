from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4core.testing.fakes import install_backend

SELECT = """
from dsv4core.api import Limits, Request
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS
request = Request("cpu", "", PRESETS["tiny"], 16, Limits(512, 2, 316, 256))
assert select(request, "acme").backend.name == "acme"
assert select(request, order={"cpu": ["acme"]}).plans
"""
PLUGINS = "from dsv4core.cli.main import main; assert main(['plugins', '--json']) == 0"
HELP = "from dsv4core.cli.main import main; assert main(['--help']) == 0"
EXPLAIN = "from dsv4core.cli.main import main; assert main(['explain', 'backend=acme', 'device=cpu']) == 0"
COMPLETE = "import os; os.environ['COMP_LINE'] = 'dsv4 run backend='\n" + (
    "from dsv4core.cli.main import main; assert main(['-sc', 'query=bash']) == 0"
)
COMPUTE = """
import torch
from dsv4core.api import Limits, Request
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.random_checkpoint import write_random_checkpoint
from dsv4core.model.shapes import PRESETS
from dsv4core.stack import AttentionStack, load_layer
write_random_checkpoint("tiny", layers=[0])
checkpoint = Checkpoint.open("tiny")
selection = select(Request("cpu", "", checkpoint.shape, 16, Limits(4, 1, 8, 4)), "reference")
device = torch.device("cpu")
stack = AttentionStack(selection, [load_layer(selection, checkpoint, 0, device)], device)
hidden = torch.randn(4, checkpoint.shape.hidden_size, dtype=torch.bfloat16)
stack.attend(stack.layers[0], hidden, stack.plan([0], [4]))
"""
BOTH = ("torch", "hydra", "omegaconf")
PROGRAMS = [
    ("import dsv4core", BOTH),
    ("import dsv4core.api", BOTH),
    ("import dsv4core.config", BOTH),
    ("import dsv4core.framework.binding, dsv4core.framework.request", BOTH),
    (SELECT, BOTH),
    (PLUGINS, BOTH),
    (HELP, BOTH),
    (COMPLETE, BOTH),
    (COMPUTE, ("hydra", "omegaconf")),
    (EXPLAIN, ("torch",)),
    (EXPLAIN.replace("acme", "reference"), ("torch",)),
]


@pytest.mark.parametrize(("program", "heavy"), PROGRAMS)
def test_nothing_heavy_is_imported(tmp_path: Path, program: str, heavy: tuple[str, ...]) -> None:
    install_backend(tmp_path, "acme")
    check = f"\nimport sys; print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "DSV4_DISABLE": ""}
    run = subprocess.run(
        [sys.executable, "-c", program + check], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "[]\n")
