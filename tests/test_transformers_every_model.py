# SPDX-License-Identifier: Apache-2.0
"""Some of the models of every_model.py, and what it says of them."""

import pytest

EXPECTED = {
    "llama": ("equal", ""),
    "mistral": ("equal", ""),
    "qwen3": ("equal", ""),
    "gemma2": ("equal", ""),
    "gemma3_text": ("equal", ""),
    "gpt_oss": ("equal", ""),
    "phi3": ("equal", ""),
    "deepseek_v3": ("equal", ""),
    "llama4_text": ("equal", ""),
    "gpt2": ("equal", ""),
    "opt": ("equal", ""),
    "bert": ("equal", ""),
    "bert/decoder": ("equal", ""),
    "deepseek_v32": ("refused", "attention_mask: expected a model that leaves it"),
    "git": ("refused", "attention_mask: expected a model that leaves it"),
    "inkling_text": ("refused", "position_bias: expected none"),
    "doge": ("refused", "attention_mask: expected a model that leaves it"),
    "bloom": ("never called", ""),
    "falcon": ("never called", ""),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_model(torch, bridge, kind):
    import every_model

    expected, reason = EXPECTED[kind]
    what, why = every_model.outcome(kind)
    assert what == expected, why
    assert reason in why
