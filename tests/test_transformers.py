# SPDX-License-Identifier: Apache-2.0
"""flashplan.transformers called by itself: masks and attention beside those of transformers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flashplan as fp

BATCH, KV_HEADS, GROUP, DIM = 3, 2, 2, 8


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
        in_sequence = masking.remap_positions_for_packed_sequence(causal, positions)
        same_sequence = masking.packed_sequence_mask_function(sequences)
        return masking.and_masks(same_sequence, in_sequence), None
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
    described = mask.described
    if described.dtype == torch.uint32:
        words = described.numpy()
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits[..., :kv_length]).bool()
    q, k = torch.arange(q_length)[:, None], torch.arange(kv_length)
    visible = []
    for first, end, q_begin, is_causal, window_left in described.tolist():
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
        assert mask.shape == (BATCH, 1, q_length, kv_length)
        has_ranges = FUNCTIONS[kind] and (pad != "gap" or kv_offset > 0)
        assert mask.described.dtype == (torch.int32 if has_ranges else torch.uint32)
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
        if mask.described.dtype == torch.int32 and kind != "bidirectional":
            # Queries of padding on the right have no result.
            for sequence, (_, end, q_begin, _, _) in enumerate(mask.described.tolist()):
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
            torch.where(visible, 0.0, torch.finfo(torch.float16).min),
            torch.where(visible, 0.0, -1e4),
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


@pytest.mark.parametrize("keys", [5, 9])
def test_a_model_cannot_compute_with_a_mask(torch, bridge, keys):
    """Of five keys, too, for which the shape of five numbers would fit."""
    mask = bridge.mask(BATCH, 3, keys, keys - 3)
    for compute in (
        lambda: mask + 1,
        lambda: torch.randn(BATCH, 1, 3, keys) + mask,
        lambda: torch.where(mask, 0, 1),
        lambda: mask == 0,
        lambda: ~mask,
        lambda: mask[:, 0],
        lambda: mask[..., : keys - 1],
        lambda: mask.float(),
        lambda: mask.view(-1),
        lambda: torch.zeros(BATCH, 1, 3, keys).masked_fill(mask, 1),
    ):
        with pytest.raises(fp.UnsupportedError, match="^attention_mask: expected .* leaves it"):
            compute()
    assert mask[:, :, :, :keys] is mask.to("cpu") is mask.contiguous() is mask
    assert (mask.dim(), mask.device.type, len(mask.shape)) == (4, "cpu", 4)


def test_a_mask_of_one_key_is_that_of_all(torch, bridge, random):
    """Encoders that generate with a cache: their masks are made for the new token alone."""
    from transformers.masking_utils import bidirectional_mask_function

    q = tensor(torch, random, "projection", KV_HEADS * GROUP, 1)
    k, v = (tensor(torch, random, "cache", KV_HEADS, 7) for _ in range(2))
    everything = torch.ones(BATCH, 1, 7, dtype=torch.bool)
    mask = bridge.mask(BATCH, 1, 1, mask_function=bidirectional_mask_function)
    o, _ = bridge.attention(Layer(False), q, k, v, mask)
    expected = expected_attention(torch, q, k, v, everything, DIM**-0.5, None)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    mask = bridge.mask(BATCH, 1, 5, mask_function=bidirectional_mask_function)
    with pytest.raises(ValueError, match="^attention_mask: expected one of 7 keys, got 5"):
        bridge.attention(Layer(False), q, k, v, mask)


def test_dtypes_of_autocast(torch, bridge, random):
    """Rotated queries and keys are float32 there, and values of 16 bits."""
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))
    low = [x.bfloat16() for x in (q, k, v)]
    expected, _ = bridge.attention(Layer(), *low, None)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k, v), (q, k, low[2]), low):
            o, _ = bridge.attention(Layer(), *given, None)
            assert torch.equal(o, expected)
    o, _ = bridge.attention(Layer(), q, k, low[2], None)
    assert torch.equal(o, expected)


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


REFUSED = (
    "output_attentions position_bias cache indices block_indices sinks cu_seq_lens_q cu_seq_lens_k "
    "block_table k_cache a_keyword_of_tomorrow"
)


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_is_not_supported_is_refused(torch, bridge, random, name):
    q, k, v = (tensor(torch, random, "cache", heads, 9) for heads in (KV_HEADS * GROUP, 2, 2))
    value = True if name == "output_attentions" else torch.zeros(4)
    with pytest.raises(fp.UnsupportedError, match=f"^{name}: expected .+, got "):
        bridge.attention(Layer(), q, k, v, None, **{name: value})
    bridge.attention(Layer(), q, k, v, None, **{name: None}, sliding_window=3, position_ids=q)


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
    for dtype in (torch.int32, torch.int64, torch.uint8):
        text = f"^attention_mask: expected dtype bool or a float, got {str(dtype)[6:]}"
        refused(TypeError, text, ones.to(dtype))
    heads = ones.expand(-1, 4, -1, -1).bool()
    refused(fp.UnsupportedError, "^attention_mask: expected one for all heads, got 4", heads)
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[..., :8].bool())
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[:2].bool())
    refused(ValueError, "^attention_mask: expected shape .*, got", ones[:, 0].bool())
    with torch.enable_grad():
        refused(ValueError, "^q: .*inference", queries=q.clone().requires_grad_())
