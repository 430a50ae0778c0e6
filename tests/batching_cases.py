# SPDX-License-Identifier: Apache-2.0
"""Models and prompts for continuous batching of transformers, on CPUs and GPUs."""

LENGTHS = (30, 7, 3, 41, 12)
PREFIX = 16  # tokens that all long prompts begin with: pages of 8 that they share
NEW_TOKENS = 14
MODELS = ("llama", "qwen3", "gemma3", "gpt_oss", "mistral")
FULL = ("llama", "qwen3")  # no layer has a sliding window: decodes read pages


def make_model(torch, name, seed, head_dim=16):
    """A model of random weights, large enough for attention to matter."""
    import transformers as hf

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    window = {"sliding_window": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    # All experts: a choice of some would be another one after a small error of rounding.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}
    config = {
        "llama": lambda: hf.LlamaConfig(**sizes),
        "qwen3": lambda: hf.Qwen3Config(**sizes),
        "gemma3": lambda: hf.Gemma3TextConfig(**sizes, **window, **kinds),
        "gpt_oss": lambda: hf.GptOssConfig(**sizes, **window, **kinds, **experts),
        "mistral": lambda: hf.MistralConfig(**sizes, **window),
    }[name]()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    random = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        mean = 1.0 if "norm" in key else 0.0
        parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=random))
    return model.eval()


def make_prompts(torch, random):
    prefix = torch.randint(2, 97, (PREFIX,), generator=random).tolist()
    drawn = [torch.randint(2, 97, (n,), generator=random).tolist() for n in LENGTHS]
    return [(prefix + ids)[: len(ids)] if len(ids) > PREFIX else ids for ids in drawn]


def batched_tokens(model, prompts, **options):
    """Of all prompts in batches of few tokens, so that long prompts are computed in parts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 24, **options}
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**batching),
        progress_bar=False,
    )
    for output in outputs.values():
        assert output.error is None, output.error
    return [output.generated_tokens for output in outputs.values()]
