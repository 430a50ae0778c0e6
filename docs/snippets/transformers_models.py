# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face transformers with flashplan's attention."""

import torch
from transformers import (
    ContinuousBatchingConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
)

import flashplan.transformers

config = Gemma2Config(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
    pad_token_id=0,
    eos_token_id=None,
)
model = Gemma2ForCausalLM(config)  # stands for from_pretrained()
prompts = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])

# --8<-- [start:transformers]
model.set_attn_implementation(flashplan.transformers.register())  # "fplan"
mask = (prompts != 0).long()  # the padding is 0
tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=20)
# --8<-- [end:transformers]
model.set_attn_implementation("eager")
expected = model.generate(prompts, attention_mask=mask, max_new_tokens=20)
assert torch.equal(tokens, expected)

# --8<-- [start:batching]
model.set_attn_implementation(flashplan.transformers.register())
outputs = model.generate_batch(
    [[5, 6, 7], [8, 9, 10, 11, 12]],
    generation_config=GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=-1),
    continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=16),
)
new_tokens = [output.generated_tokens for output in outputs.values()]
# --8<-- [end:batching]
assert new_tokens == [row[5:].tolist() for row in expected]
