#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every decoder model of the installed transformers, with its own attention and with flashplan's.

    python tests/every_model.py                        all of them, which takes minutes
    python tests/every_model.py llama bert/decoder     these model types
    python tests/every_model.py --json outcomes.json   writes {model type: [outcome, why]}

The models are tiny and have random weights: what counts is what each one asks of the function for
attention, and what it does with the mask, since no test of a few chosen models can know that. The
outcome for a model is one of

    equal         the same logits, and flashplan computed the attention
    never called  the same logits, but the model never asked flashplan
    refused       flashplan said which argument it does not serve
    not built     nothing to compare with: the model fails with its own attention, too
    WRONG         other logits, or any other error; this program then ends with status 1
"""

import argparse
import collections
import contextlib
import json
import pathlib
import re
import signal
import sys
import traceback
import warnings

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import flashplan as fp
import flashplan.transformers as bridge

SECONDS = 20  # of the processor, for a model
TOLERANCE = 1e-4  # of the largest logit
VOCAB, LAYERS = 97, 4  # as many layers as any model has kinds of them
LENGTHS = (7, 14, 3)  # of the padded prompts; the window is shorter than the longest
NEW_TOKENS = 5

# Given to a configuration where it has such a value, and to those inside it.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("window_size", "attention_window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    "index_topk": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
# What is given in place of None, too; the other values may mean that a model does without.
NEEDED = ("head_dim", "num_key_value_heads")

# What some model types need beside that.
ALTERNATING = ["linear_attention", "full_attention"] * (LAYERS // 2)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
MODELS = {
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "initializer_range": 1.0,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "granitemoehybrid": {**MAMBA, "layer_types": ALTERNATING},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "phi3": {"sliding_window": 8},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}
# Padding changes their other layers: in its rows, sdpa and flashplan give other numbers than eager.
UNPADDED = ("recurrent_gemma",)


class TimeIsUp(BaseException):
    """No Exception, which models may catch."""


@contextlib.contextmanager
def time_limit(seconds):
    """Counts the process's own time, so that other processes use up none of it."""

    def stop(*_):
        raise TimeIsUp(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# Models.


def cut(values):
    """A list with an entry for each layer, cut to LAYERS entries of all kinds in it."""
    kinds = list(dict.fromkeys(map(str, values)))
    first = [values[list(map(str, values)).index(kind)] for kind in kinds]
    return [first[i % len(first)] for i in range(LAYERS)]


def small(config, **more):
    """A configuration of the same class, with SIZES where it has such values, and with `more`."""
    layers = getattr(config, "num_hidden_layers", None)
    given = {}
    for name, value in vars(config).items():
        if name in more:
            given[name] = more[name]
        elif isinstance(value, transformers.PreTrainedConfig):
            given[name] = small(value, **more)
        elif name in SIZES and (value is not None or name in NEEDED):
            given[name] = SIZES[name]
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            given[name] = cut(value)
    if "kv_lora_rank" in vars(config):  # one latent vector for all heads: as many for keys
        given["num_key_value_heads"] = given["num_attention_heads"]
    return type(config)(**given)


def model_types():
    """All of them; those that are encoders unless told otherwise also as, say, bert/decoder."""
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield kind
        if getattr(transformers.CONFIG_MAPPING[kind], "is_decoder", None) is False:
            yield f"{kind}/decoder"


def make_model(kind):
    """A tiny model of random weights, large enough for attention to matter."""
    kind, _, decoder = kind.partition("/")
    whole = transformers.CONFIG_MAPPING[kind]()
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    is_whole = isinstance(whole, model_class.config_class)
    config = whole if is_whole else whole.get_text_config(decoder=True)
    config = small(config, **MODELS.get(kind, {}))
    if decoder:
        config.is_decoder = True
    model = model_class._from_config(config, attn_implementation="eager")
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model.float().eval()


# What they compute.


def prompts():
    """(token ids, mask) of prompts padded on the left, and of five tokens each.

    Five, because that many numbers describe the keys that a sequence sees: a model that took those
    for a mask would not notice it by the shape.
    """
    random = torch.Generator().manual_seed(1)
    for lengths in (LENGTHS, (5, 5)):
        longest = max(lengths)
        ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=random)
        mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
        yield ids * mask, mask


def forward(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask == 1]


def generate(model, ids, mask):
    model.generation_config.eos_token_id = None
    result = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    return torch.stack(result.logits)


def logits(model, runs):
    """Those of each run (function, ids, mask)."""
    found = []
    for run, ids, mask in runs:
        torch.manual_seed(2)
        found.append(run(model, ids, mask))
    return found


def possible_runs(model):
    """The runs that the model can do with its own attention, and an error of another one."""
    runs, error = [], None
    for ids, mask in prompts():
        if model.config.model_type in UNPADDED and not mask.all():
            continue
        for run in (forward, generate):
            try:
                run(model, ids, mask)
                runs.append((run, ids, mask))
            except Exception as e:
                error = e
    return runs, error


def difference(actual, expected):
    """The largest difference of logits, in parts of the largest logit. NaN if there is a NaN."""
    parts = [(a - b).abs().max() / b.abs().max().clamp_min(1e-3) for a, b in zip(actual, expected)]
    return float(torch.stack(parts).max())  # unlike Python's max, of NaN, too


# Outcomes.


@contextlib.contextmanager
def counted_calls():
    """A counter of what flashplan runs."""
    calls = collections.Counter()
    run = fp.Attention.run

    def counted(*args, **kwargs):
        calls["run"] += 1
        return run(*args, **kwargs)

    fp.Attention.run = counted
    try:
        yield calls
    finally:
        fp.Attention.run = run


def is_refusal(error):
    """Whether flashplan raised it, and says for which argument."""
    if not isinstance(error, (fp.UnsupportedError, ValueError, TypeError)):
        return False
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_ours = pathlib.Path(fp.__file__).parent in raised_in.parents
    return is_ours and re.match(r"\w+: ", str(error)) is not None


def brief(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def expected_logits(kind):
    """(model, runs, their logits) with the model's own attention."""
    model = make_model(kind)
    runs, error = possible_runs(model)
    if not runs:
        raise error
    expected = logits(model, runs)
    if not difference(logits(model, runs), expected) <= TOLERANCE / 10:
        raise RuntimeError("its own attention gives other logits each time, or NaN")
    return model, runs, expected


@torch.no_grad()
def outcome(kind):
    """(outcome, why) of a model type."""
    try:
        with time_limit(SECONDS):
            model, runs, expected = expected_logits(kind)
    except (Exception, TimeIsUp) as error:
        return "not built", brief(error)
    with counted_calls() as calls:
        try:
            with time_limit(SECONDS):
                model.set_attn_implementation(bridge.register())
                error = difference(logits(model, runs), expected)
        except (Exception, TimeIsUp) as error:
            return "refused" if is_refusal(error) else "WRONG", brief(error)
    if not error <= TOLERANCE:
        return "WRONG", f"logits differ by {error:.1g} of the largest"
    return "equal" if calls["run"] else "never called", ", ".join(
        f"{run.__name__} {tuple(ids.shape)}" for run, ids, _ in runs
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="model type")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes = {}
    for kind in arguments.kinds or model_types():
        outcomes[kind] = outcome(kind)
        print(f"{kind:28}{outcomes[kind][0]:14}{outcomes[kind][1][:160]}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1))
    counts = collections.Counter(what for what, _ in outcomes.values())
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
