# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers: small models of random weights beside its own implementations."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flashplan as fp

BATCH, KV_HEADS, GROUP, DIM = 3, 2, 2, 8


@pytest.fixture
def bridge(torch, transformers):
    """The module under test."""
    import flashplan.transformers

    with torch.no_grad():
        yield flashplan.transformers


@pytest.fixture
def random(torch, seed):
    return torch.Generator().manual_seed(seed)


# Masks.


def padding(torch, kind, length):
    """A 2-dim attention mask of BATCH sequences, or None."""
    if kind == "none":
        return None
    mask = torch.ones(BATCH, length, dtype=torch.bool)
    if kind == "left":
        mask[0, :3] = mask[1, : length - 1] = False
    elif kind == "right":
        mask[0, -3:] = mask[1, 1:] = False
    elif kind == "gap":
        mask[2, 2:4] = False
    elif kind == "nothing seen":
        mask[1] = False
    elif kind == "short":  # of a static cache: later keys do not exist yet
        mask = mask[:, :-2]
    return mask


PADDINGS = ("none", "all", "left", "right", "gap", "nothing seen", "short")


def mask_function(kind, torch, length):
    """(function, local_size) as transformers makes them."""
    from transformers import masking_utils as masking

    if kind == "causal":
        return masking.causal_mask_function, None
    if kind == "sliding":
        return masking.sliding_window_causal_mask_function(4), 4
    if kind == "bidirectional":
        return masking.bidirectional_mask_function, None
    if kind == "bidirectional window":
        return masking.sliding_window_bidirectional_mask_function(2), 2
    if kind == "chunked":
        return masking.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int)), 4
    if kind == "packed":
        positions = torch.arange(length).expand(BATCH, -1) % 5
        sequences = torch.arange(length).expand(BATCH, -1) // 5
        causal = masking.causal_mask_function
        return masking.packed_sequence_compatibility_function(causal, positions, sequences), None
    another_window = masking.sliding_window_causal_mask_function(3)
    return masking.or_masks(another_window, lambda b, h, q, k: k == 0), 4


FUNCTIONS = {  # whether one range of keys describes it
    "causal": True,
    "sliding": True,
    "bidirectional": True,
    "bidirectional window": False,
    "chunked": False,
    "packed": False,
    "another": False,
}


def bools_of(torch, mask, q_length, kv_length):
    """[batch, q_length, kv_length]: what a mask of the bridge lets each query see."""
    if mask.dtype == torch.uint32:
        words = mask[:, 0].numpy()
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits[..., :kv_length]).bool()
    q, k = torch.arange(q_length)[:, None], torch.arange(kv_length)
    visible = []
    for first, end, q_begin, is_causal, window_left in mask[:, 0, 0].tolist():
        seen = (k >= first) & (k < end) & (q >= 0)
        if is_causal:
            seen &= k <= q + q_begin
            if window_left >= 0:
                seen &= k >= q + q_begin - window_left
        visible.append(seen)
    return torch.stack(visible)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("pad", PADDINGS)
def test_masks_are_those_of_transformers(torch, bridge, kind, pad):
    from transformers.masking_utils import sdpa_mask

    for q_length, kv_length, q_offset, kv_offset in ((11, 11, 0, 0), (3, 11, 8, 0), (1, 9, 14, 6)):
        total = kv_offset + kv_length
        function, local_size = mask_function(kind, torch, total)
        arguments = {
            "batch_size": BATCH,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": torch.tensor(q_offset) if kv_offset else q_offset,
            "kv_offset": kv_offset,
            "mask_function": function,
            "attention_mask": padding(torch, pad, total),
            "local_size": local_size,
        }
        mask = bridge.mask(**arguments, dtype=torch.float32, config=None)
        assert mask.ndim == 4
        has_ranges = FUNCTIONS[kind] and (pad != "gap" or kv_offset > 0)
        assert mask.dtype == (torch.int32 if has_ranges else torch.uint32)
        expected = sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
        assert torch.equal(bools_of(torch, mask, q_length, kv_length), expected)


# Attention.


def tensor(torch, random, layout, heads, tokens, dtype=None):
    """[BATCH, heads, tokens, DIM] of random numbers, as a cache or a model may lay it out."""
    dtype = dtype or torch.float32
    if layout == "cache":
        return torch.randn(BATCH, heads, tokens, DIM, generator=random).to(dtype)
    if layout == "projection":
        x = torch.randn(BATCH, tokens, heads, DIM, generator=random).to(dtype)
        return x.transpose(1, 2)
    if layout == "slice":  # of a longer static cache
        x = torch.randn(BATCH, heads, tokens + 5, DIM, generator=random).to(dtype)
        return x[:, :, 2 : tokens + 2]
    if layout == "shared":  # by all sequences
        x = torch.randn(1, heads, tokens, DIM, generator=random).to(dtype)
        return x.expand(BATCH, -1, -1, -1)
    x = torch.randn(BATCH, heads, DIM, tokens, generator=random).to(dtype)
    return x.transpose(2, 3)  # "columns"


LAYOUTS = ("cache", "projection", "slice", "shared", "columns")


def expected_attention(torch, q, k, v, visible, scale, softcap):
    """[batch, tokens, heads, dim] in float64; what a query does not see may be anything."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.where(visible[:, None], logits, -torch.inf).softmax(-1).nan_to_num(0.0)
    unseen = ~visible.any(1)[:, None, :, None]
    return torch.einsum("bhij,bhjd->bihd", weights, v.masked_fill(unseen, 0.0))


class Layer:
    """What `attention` asks of a module."""

    def __init__(self, is_causal=True):
        self.is_causal = is_causal


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("kind", ["causal", "sliding", "bidirectional", "chunked"])
def test_attention_over_what_the_mask_shows(torch, bridge, random, layout, pad, kind):
    """Keys that nobody sees are NaN: a static cache has such behind the last token."""
    for q_length, q_offset in ((11, 0), (3, 6), (1, 10)):
        kv_length = 11 if q_length > 1 else 14
        function, local_size = mask_function(kind, torch, kv_length)
        attention_mask = padding(torch, pad, kv_length)
        mask = bridge.mask(
            batch_size=BATCH,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            mask_function=function,
            attention_mask=attention_mask,
            local_size=local_size,
        )
        visible = bools_of(torch, mask, q_length, kv_length)
        q = tensor(torch, random, "projection", KV_HEADS * GROUP, q_length)
        k, v = (tensor(torch, random, layout, KV_HEADS, kv_length) for _ in range(2))
        if layout != "shared":
            for x in (k, v):
                x.masked_fill_(~visible.any(1)[:, None, :, None], float("nan"))
        softcap = 2.0 if kind == "sliding" else None
        o, weights = bridge.attention(Layer(), q, k, v, mask, scaling=0.4, softcap=softcap)
        assert weights is None
        assert o.shape == (BATCH, q_length, KV_HEADS * GROUP, DIM)
        expected = expected_attention(torch, q, k, v, visible, 0.4, softcap)
        if mask.dtype == torch.int32 and kind != "bidirectional":
            # Queries of padding on the right have no result.
            for sequence, (_, end, q_begin, _, _) in enumerate(mask[:, 0, 0].tolist()):
                expected[sequence, max(end - q_begin, 0) :] = 0
        torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)


def test_masks_of_the_caller(torch, bridge, random):
    """Bool or float, of one sequence or all of them."""
    q = tensor(torch, random, "projection", KV_HEADS * GROUP, 5)
    k, v = (tensor(torch, random, "cache", KV_HEADS, 40) for _ in range(2))
    for sequences in (1, BATCH):
        visible = torch.rand(sequences, 1, 5, 40, generator=random) < 0.3
        expected = expected_attention(
            torch, q, k, v, visible[:, 0].expand(BATCH, -1, -1), DIM**-0.5, None
        )
        lowest = torch.finfo(torch.float32).min
        for mask in (
            visible,
            torch.where(visible, 0.0, lowest),
            torch.where(visible, 0.0, -torch.inf),
        ):
            o, _ = bridge.attention(Layer(), q, k, v, mask)
            torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)


def test_without_a_mask(torch, bridge, random):
    q = tensor(torch, random, "projection", KV_HEADS * GROUP, 7)
    k, v = (tensor(torch, random, "cache", KV_HEADS, 7) for _ in range(2))
    everything = torch.ones(BATCH, 7, 7, dtype=torch.bool)
    for module, is_causal, visible in (
        (Layer(), None, everything.tril()),
        (Layer(False), None, everything),
        (Layer(), False, everything),
        (Layer(False), True, everything.tril()),
    ):
        o, _ = bridge.attention(module, q, k, v, None, is_causal=is_causal)
        expected = expected_attention(torch, q, k, v, visible, DIM**-0.5, None)
        torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    o, _ = bridge.attention(Layer(), q[:, :, -1:], k, v, None)  # sees all keys
    expected = expected_attention(torch, q[:, :, -1:], k, v, everything[:, :1], DIM**-0.5, None)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    o, _ = bridge.attention(Layer(), q[:0], k[:0], v[:0], None)
    assert o.shape == (0, 7, KV_HEADS * GROUP, DIM)


def test_sinks(torch, bridge, random):
    """Attention over one key more, whose value is 0."""
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))
    sinks = torch.nn.Parameter(torch.randn(KV_HEADS * GROUP, generator=random).bfloat16())
    visible = torch.ones(BATCH, 9, 9, dtype=torch.bool).tril()
    expected = expected_attention(torch, q, k, v, visible, 0.5, None)
    logits = torch.einsum("bhid,bhjd->bihj", q, k.repeat_interleave(GROUP, 1)).double() * 0.5
    lse = logits.masked_fill(~visible[:, :, None], -torch.inf).logsumexp(-1)
    expected = expected * torch.sigmoid(lse - sinks.double())[..., None]
    o, _ = bridge.attention(Layer(), q, k, v, None, scaling=0.5, s_aux=sinks)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6])
def test_any_two_layouts(torch, bridge, random, tokens):
    visible = torch.ones(BATCH, tokens, tokens, dtype=torch.bool).tril()
    for k_layout in LAYOUTS:
        for v_layout in LAYOUTS:
            q = tensor(torch, random, k_layout, KV_HEADS * GROUP, tokens)
            k = tensor(torch, random, k_layout, KV_HEADS, tokens)
            v = tensor(torch, random, v_layout, KV_HEADS, tokens)
            for b in (1, BATCH):
                o, _ = bridge.attention(Layer(), q[:b], k[:b], v[:b], None)
                x = expected_attention(torch, q[:b], k[:b], v[:b], visible[:b], DIM**-0.5, None)
                torch.testing.assert_close(o.double(), x, atol=1e-5, rtol=1e-5)


def test_dims_of_keys_and_values_differ(torch, bridge, random):
    q, k = (tensor(torch, random, "cache", heads, 7) for heads in (KV_HEADS * GROUP, KV_HEADS))
    v = tensor(torch, random, "cache", KV_HEADS, 7)[..., :5]
    o, _ = bridge.attention(Layer(), q, k, v, None)
    visible = torch.ones(BATCH, 7, 7, dtype=torch.bool).tril()
    expected = expected_attention(torch, q, k, v, visible, DIM**-0.5, None)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)


def test_threads_have_plans_of_their_own(torch, bridge, random):
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))
    expected, _ = bridge.attention(Layer(), q, k, v, None)

    def work(_):
        for tokens in [9, 4] * 100:
            o, _ = bridge.attention(Layer(), *(x[:, :, :tokens] for x in (q, k, v)), None)
            assert torch.equal(o, expected[:, :tokens])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


@pytest.mark.parametrize("name", ["output_attentions", "position_bias", "cache"])
def test_what_is_not_supported_is_refused(torch, bridge, random, name):
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))
    value = True if name == "output_attentions" else torch.zeros(4)
    with pytest.raises(fp.UnsupportedError, match=f"^{name}: expected .+, got "):
        bridge.attention(Layer(), q, k, v, None, **{name: value})
    bridge.attention(Layer(), q, k, v, None, **{name: None}, unknown=1)


def test_wrong_arguments_are_refused(torch, bridge, random):
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))

    def refused(kind, text, mask=None, queries=q, **kwargs):
        with pytest.raises(kind, match=text):
            bridge.attention(Layer(), queries, k, v, mask, **kwargs)

    refused(ValueError, "^dropout: expected 0 .*, got 0.5", dropout=0.5)
    refused(ValueError, "^attention_mask: expected one where 3 .*, got None", queries=q[:, :, :3])
    ones = torch.ones(BATCH, 1, 9, 9)
    bias = ones.tril()
    refused(fp.UnsupportedError, "^attention_mask: expected 0 and .*, got others", bias)
    heads = ones.expand(-1, 4, -1, -1).bool()
    refused(fp.UnsupportedError, "^attention_mask: expected one for all heads, got 4", heads)
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[..., :8].bool())
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[:2].bool())
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[:, 0].bool())
    with torch.enable_grad():
        refused(ValueError, "^q: .*inference", queries=q.clone().requires_grad_())


# Models.


def make_model(torch, name, seed):
    """A model of random weights, large enough for attention to matter."""
    import transformers as hf

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    if name == "llama":
        config = hf.LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=16)
        model = hf.LlamaForCausalLM(config)
    elif name == "gemma2":
        config = hf.Gemma2Config(
            **sizes,
            num_hidden_layers=4,  # sliding, full, sliding, full
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=8,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
        )
        model = hf.Gemma2ForCausalLM(config)
    else:
        model = hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False)
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model.eval()


@pytest.fixture
def model(request, torch, transformers, seed):
    with torch.no_grad():
        return make_model(torch, request.param, seed)


def with_implementation(model, name):
    model.set_attn_implementation(name)
    return model


def prompts(torch, random, lengths, side):
    """Token ids and the mask of prompts padded on a side."""
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=random)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        pads = slice(0, -length or None) if side == "left" else slice(length, None)
        if length < max(lengths):
            mask[row, pads] = 0
    return ids * mask, mask


def generated(torch, model, ids, mask, **options):
    """(tokens, logits) of twelve steps."""
    result = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_generates_the_same(torch, bridge, model, random, cache):
    """From prompts of several lengths, beyond the sliding window."""
    ids, mask = prompts(torch, random, (7, 14, 3), "left")
    tokens, logits = generated(
        torch, with_implementation(model, "eager"), ids, mask, cache_implementation=cache
    )
    model.set_attn_implementation(bridge.register())
    actual = generated(torch, model, ids, mask, cache_implementation=cache)
    torch.testing.assert_close(actual[1], logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(actual[0], tokens)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["llama", "gemma2", "bert"], indirect=True)
def test_a_forward_pass_is_the_same(torch, bridge, model, random, side):
    ids, mask = prompts(torch, random, (7, 14, 3), side)
    reference = "eager" if model.config.model_type == "gemma2" else "sdpa"
    expected = with_implementation(model, reference)(ids, attention_mask=mask)[0]
    actual = with_implementation(model, bridge.register())(ids, attention_mask=mask)[0]
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_a_prompt_in_chunks(torch, bridge, model, random):
    """Right padding of a first turn is a gap in the second one."""
    from transformers import DynamicCache

    ids, mask = prompts(torch, random, (16, 16, 12), "right")
    logits = {}
    for name in ("eager", bridge.register()):
        cache = DynamicCache(config=model.config)
        model.set_attn_implementation(name)
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
            for a, b in ((0, 9), (9, 12), (12, 13), (13, 16))
        ]
        new = torch.full_like(ids[:, :4], 5)
        after_gap = torch.cat([mask, torch.ones_like(new)], 1)
        logits[name] = (
            torch.cat(parts, 1)[mask == 1],
            model(new, attention_mask=after_gap, past_key_values=cache).logits,
        )
    for actual, expected in zip(logits[bridge.NAME], logits["eager"]):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_plans_once_per_step_and_copies_no_keys(torch, bridge, model, random, cache, monkeypatch):
    plans, keys = [], []
    plan, run = fp.Attention.plan, fp.Attention.run
    monkeypatch.setattr(fp.Attention, "plan", lambda *a, **k: plans.append(a) or plan(*a, **k))
    monkeypatch.setattr(
        fp.Attention, "run", lambda *a, **k: keys.append(a[2].data_ptr()) or run(*a, **k)
    )
    ids, mask = prompts(torch, random, (5, 9), "left")
    model.set_attn_implementation(bridge.register())
    result = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
    )
    kinds = len(set(getattr(model.config, "layer_types", None) or [""]))
    layers = result.past_key_values.layers
    # Fewer where a full window makes steps alike.
    assert 6 <= len(plans) <= 6 * kinds
    assert len(keys) == 6 * len(layers)
    full = [i for i, layer in enumerate(layers) if not layer.is_sliding]
    assert [keys[-len(layers) :][i] for i in full] == [layers[i].keys.data_ptr() for i in full]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_gradients_are_refused(torch, bridge, model, random):
    ids, mask = prompts(torch, random, (5, 9), "left")
    model.set_attn_implementation(bridge.register())
    with torch.enable_grad(), pytest.raises(ValueError, match="^q: .*no_grad"):
        model(ids, attention_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_generates_the_same_on_a_gpu(torch, bridge, model, random, cache):
    """In bfloat16 within the rounding of a few layers, and the same tokens in most places."""
    model = model.to("cuda", torch.bfloat16)
    ids, mask = (x.cuda() for x in prompts(torch, random, (7, 14, 3), "left"))
    eager = with_implementation(model, "eager")
    tokens, logits = generated(torch, eager, ids, mask, cache_implementation=cache)
    model.set_attn_implementation(bridge.register())
    actual = generated(torch, model, ids, mask, cache_implementation=cache)
    # Until a tie of logits is broken differently, both see the same tokens.
    same = (actual[0] == tokens).all(0)[ids.shape[1] :].int().cumprod(0).sum()
    assert same > 0
    steps = slice(0, min(int(same) + 1, len(logits)))
    torch.testing.assert_close(actual[1][steps], logits[steps], atol=0.15, rtol=0.1)
