# SPDX-License-Identifier: Apache-2.0
"""Every decoder model of the installed transformers, tiny and of random weights, with its own
attention and with flashplan's.

Each one is `equal`, `refused` (flashplan names the keyword, mask or shape), `never called` (it does
not take its attention from transformers' registry), `not built` (it fails without flashplan, too),
or WRONG, which ends this program with status 1.

    python tests/every_model.py            python tests/every_model.py llama gemma3_text
"""

import collections
import contextlib
import os
import signal
import sys
import warnings

import torch
import transformers
from transformers.models.auto import modeling_auto

import flashplan as fp
import flashplan.transformers as bridge

SECONDS = 30  # for one model
# Given where a configuration has the attribute. Lists of a kind for each layer are cut to two.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_inner": 64,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "attention_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "first_k_dense_replace": 1,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Timeout(Exception):
    pass


@contextlib.contextmanager
def limit(seconds):
    def stop(*_):
        raise Timeout

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


# What a model needs besides.
OF_MODELS = {
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
}


def config_of(kind):
    """A small configuration of a model type."""
    whole = transformers.AutoConfig.for_model(kind)
    defaults = whole.get_text_config(decoder=True)
    given = vars(defaults)
    sizes = {
        name: size
        for name, size in SIZES.items()
        if given.get(name) is not None or (name == "head_dim" and name in given)
    }
    if "qk_rope_head_dim" in sizes:  # latent attention rotates apart, and has all heads
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    for name, value in given.items():
        if isinstance(value, list) and len(value) == given.get("num_hidden_layers"):
            kinds = sorted(set(value), key=value.index) if isinstance(value[0], str) else value
            sizes[name] = (kinds * 2)[:2]
    return type(defaults)(**sizes | OF_MODELS.get(kind, {}))


def model_of(kind):
    config = config_of(kind)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model.float().eval()


def batches():
    """Token ids and masks: padding on the left, and exactly five tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (3, 14))
    mask = torch.ones_like(ids)
    for row, length in enumerate((7, 14, 3)):
        mask[row, : 14 - length] = 0
    yield ids * mask, mask
    five = torch.randint(3, 97, (2, 5))
    yield five, torch.ones_like(five)


def logits_of(model):
    """Of all tokens that are no padding, and of greedy steps."""
    found = []
    for ids, mask in batches():
        found.append(model(ids, attention_mask=mask, use_cache=False).logits[mask == 1])
        steps = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
        found.append(torch.stack(steps.logits))
    return found


def outcome(kind):
    """(what it is, why)"""
    try:
        with limit(SECONDS):
            model = model_of(kind)
            expected = logits_of(model)
            again = logits_of(model)
    except (Exception, Timeout) as error:  # noqa: BLE001 - whatever a model of others raises
        return "not built", f"{type(error).__name__}: {error}"
    if not all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(expected, again)):
        return "not built", "two runs of its own attention differ"
    calls = collections.Counter()
    run = fp.Attention.run

    def counted(*args, **kwargs):
        calls["run"] += 1
        return run(*args, **kwargs)

    fp.Attention.run = counted
    try:
        with limit(SECONDS):
            model.set_attn_implementation(bridge.register())
            actual = logits_of(model)
    except (fp.UnsupportedError, ValueError, TypeError) as error:
        is_ours = ": expected " in str(error)
        return "refused" if is_ours else "WRONG", f"{type(error).__name__}: {error}"
    except (Exception, Timeout) as error:  # noqa: BLE001
        return "WRONG", f"{type(error).__name__}: {error}"
    finally:
        fp.Attention.run = run
    for a, b in zip(actual, expected):
        error = (a - b).abs().max() / b.abs().max().clamp_min(1)
        if not error <= 1e-4:
            return "WRONG", f"logits differ by {error:.2g} of the largest"
    return ("equal", "") if calls["run"] else ("never called", "")


def main(kinds):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    counts = collections.Counter()
    for kind in kinds or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what, why = outcome(kind)
        counts[what] += 1
        print(f"{kind:32}{what:14}{' '.join(why.split())[:120]}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
