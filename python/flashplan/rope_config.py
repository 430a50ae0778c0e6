# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of a `Rope` from a model configuration of Hugging Face transformers."""

from __future__ import annotations

import math
from typing import Any

from flashplan._core import UnsupportedError

# Model types that rotate neighbouring dims (2 i, 2 i + 1) as a pair. They are listed because their
# configurations do not say so: the models do it in their code.
_INTERLEAVED = frozenset(
    ("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe")
    + ("glm", "glm4", "helium", "llama4_text")
)
# Parameters of rotations that give each token several positions, such as time, height and width,
# which a Rope can not express.
_SEVERAL_COORDINATES = ("mrope_section", "mrope_interleaved", "xdrope_section")


def rope_arguments(config: Any, layer_type: str | None, length: int | None) -> dict[str, Any]:
    parameters = _parameters(config, layer_type)
    for name in _SEVERAL_COORDINATES:
        if parameters.get(name):
            raise UnsupportedError(f"config: expected one position for each token, got {name}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * (1.0 if partial is None else partial))
    arguments = {
        "rotary_dim": rotary_dim,
        "interleaved": getattr(config, "model_type", "") in _INTERLEAVED
        or bool(getattr(config, "rope_interleave", False)),
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    rest = _of_kind(kind, parameters, config, rotary_dim, length)
    return arguments | {name: value for name, value in rest.items() if value is not None}


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The parameters of RoPE for one kind of layer. Before transformers 5 they do not contain
    `rope_theta`, which is a value of the configuration itself."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {name: value for name, value in found.items() if isinstance(value, dict)}
    if by_layer:
        names = ", ".join(map(repr, by_layer))
        if layer_type is None and len(by_layer) > 1:
            raise ValueError(f"layer_type: expected one of {names}, got None")
        found = by_layer.get(layer_type) if layer_type else next(iter(by_layer.values()))
        if found is None:
            raise ValueError(f"layer_type: expected one of {names}, got {layer_type!r}")
    return {"rope_theta": getattr(config, "rope_theta", 10000.0)} | found


def _of_kind(
    kind: str, parameters: dict[str, Any], config: Any, rotary_dim: int, length: int | None
) -> dict[str, Any]:
    theta = parameters["rope_theta"]
    most: Any = getattr(config, "max_position_embeddings", None)
    original: Any = parameters.get(
        "original_max_position_embeddings",
        getattr(config, "original_max_position_embeddings", None) or most,
    )
    if kind == "default":
        return {"theta": theta}
    if kind == "longrope":
        return _longrope(parameters, theta, most, original, rotary_dim, length)
    factor = parameters.get("factor")
    if factor is None:
        factor = most / original
    if kind == "linear":
        return {"theta": theta, "scale": factor}
    if kind == "dynamic":
        # Dynamic NTK scaling: a longer context gets a larger theta; positions are not scaled.
        stretch = factor * max(length or most, most) / most - (factor - 1)
        return {"theta": theta * stretch ** (rotary_dim / (rotary_dim - 2))}
    scaled = {"theta": theta, "scale": factor, "scaling": kind, "original_length": original}
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaled[name] = parameters.get(name)
        return scaled
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow", "truncate", "attention_factor"):
            scaled[name] = parameters.get(name)
        mscales = {name: parameters.get(name) for name in ("mscale", "mscale_all_dim")}
        if scaled["attention_factor"] is None and all(mscales.values()):
            scaled |= mscales
        return scaled
    raise UnsupportedError(
        "config: expected rope_type default, linear, dynamic, llama3, longrope or yarn, "
        f"got {kind!r}"
    )


def _longrope(
    parameters: dict[str, Any],
    theta: float,
    most: int,
    original: int,
    rotary_dim: int,
    length: int | None,
) -> dict[str, Any]:
    is_long = length is not None and length > original
    factors = parameters["long_factor" if is_long else "short_factor"]
    gain = parameters.get("attention_factor")
    if gain is None:
        scale = parameters.get("factor") or most / original
        gain = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    frequencies = [
        theta ** (-2 * pair / rotary_dim) / factor for pair, factor in enumerate(factors)
    ]
    return {"frequencies": frequencies, "attention_factor": gain}
