"""Helpers of models."""


def extract_layer_index(layer_name, num_attn_module=1):
    """The number in `model.layers.3.attn`."""
    return int(layer_name.split(".")[2])
