"""What vLLM's entry point calls in every process: hooks that wait for the model's modules."""

from __future__ import annotations

import wrapt

from dsv4_vllm.seams import SEAMS


def register() -> None:
    """Prepare the places where vLLM chooses the attention class of DeepSeek-V4.

    vLLM calls it more than once. No module of vLLM is imported here: a server of another model pays nothing.
    """
    for module, install in SEAMS.items():
        wrapt.register_post_import_hook(install, module)
