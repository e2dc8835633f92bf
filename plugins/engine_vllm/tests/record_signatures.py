"""Record what the adapter touches of a vLLM, from its sources: no platform has to be there.

python record_signatures.py SITE_PACKAGES > recorded/signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from dsv4_vllm import drift


def names(node: ast.AST) -> list[str]:
    """Parameters of a function, or the fields and methods of a class."""
    if isinstance(node, ast.ClassDef):
        annotated = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        names = [target.id for target in annotated if isinstance(target, ast.Name)]
        return names + [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
    assert isinstance(node, ast.FunctionDef)
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def find(tree: ast.AST, path: list[str]) -> ast.AST:
    """The definition at a dotted path."""
    for name in path:
        tree = next(one for one in ast.walk(tree) if getattr(one, "name", None) == name)
    return tree


def main(root: Path) -> None:
    """Print the record."""
    found = {}
    for one in (*drift.COMMON, *drift.CPU, *drift.CUDA, *drift.ROCM):
        source = (root / Path(*one.module.split("."))).with_suffix(".py").read_text()
        seen = names(find(ast.parse(source), one.name.split(".")))
        found[f"{one.module}:{one.name}"] = [name for name in seen if not one.fields or name in one.fields]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
