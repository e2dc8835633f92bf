"""What vLLM's entry point calls in every process: hooks that wait for the model's modules."""

from __future__ import annotations


def register() -> None:
    """Prepare the places where vLLM chooses the attention class of DeepSeek-V4.

    vLLM calls it more than once. No module of vLLM is imported here: a server of another model pays nothing.
    What is imported is imported within: vLLM goes on without a plugin whose import fails, and not without one
    whose call does.
    """
    import wrapt

    from dsv4_vllm.seams import SEAMS

    for module, install in SEAMS.items():
        wrapt.register_post_import_hook(install, module)
