# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM, with stand-ins of vLLM's classes."""

import importlib
import pathlib
import sys
import types

import pytest

import flashplan as fp
import flashplan.vllm
import vllm_stub

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 12
SCALE, WINDOW, SOFTCAP = 0.3, 6, 4.0


@pytest.fixture
def registered(torch, monkeypatch):
    return vllm_stub.install(monkeypatch)


@pytest.fixture
def vllm(torch, registered):
    """flashplan.vllm_backend."""
    with torch.no_grad():
        yield importlib.import_module("flashplan.vllm_backend")


def test_registers_a_class_that_can_be_imported(registered):
    for _ in range(2):
        flashplan.vllm.register()
    assert list(registered) == [vllm_stub.AttentionBackendEnum.CUSTOM]
    module, _, name = registered.popitem()[1].rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "CUSTOM"


def test_the_package_names_the_plugin():
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nflashplan = "flashplan.vllm:reg' in text


def test_says_that_vllm_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"^flashplan\.vllm: expected vLLM from 0\.12"):
        flashplan.vllm.register()


def layer_of(torch, vllm, random, **options):
    """A layer of vLLM with an implementation."""
    given = {"scale": SCALE, "num_kv_heads": KV_HEADS, **options}
    impl = vllm.FlashplanImpl(HEADS, DIM, **given)
    return types.SimpleNamespace(
        impl=impl, _k_scale=torch.tensor([0.5]), _v_scale=torch.tensor([0.25])
    )


def builder_of(torch, vllm, layers, dtype="float32"):
    names = [f"layers.{i}" for i in range(len(layers))]
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context=dict(zip(names, layers))),
        model_config=types.SimpleNamespace(dtype=getattr(torch, dtype)),
        scheduler_config=types.SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
    )
    spec = types.SimpleNamespace(block_size=BLOCK)
    return vllm.FlashplanBuilder(spec, names, config, torch.device("cpu"))


def caches(torch, release, dtype, bytes_of=None):
    """An empty cache as a release of vLLM shapes it: up to 0.24, later, and later in HND memory."""
    stored = torch.uint8 if bytes_of else getattr(torch, dtype)
    if release == "0.24":
        return torch.zeros(BLOCKS, 2, BLOCK, KV_HEADS, DIM, dtype=stored)
    if release == "0.33":
        return torch.zeros(BLOCKS, BLOCK, KV_HEADS, 2 * DIM, dtype=stored).transpose(1, 2)
    return torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * DIM, dtype=stored)


def dense(torch, q, k, v, window=None, softcap=None, sinks=None, causal=True):
    """[tokens, heads, dim] in float64, where the last query is at the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window:
        hidden |= ahead <= -window
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : len(k)]
    return torch.einsum("hij,jhd->ihd", weights, v)


class Engine:
    """Requests whose keys are in blocks, and the steps that vLLM makes of them."""

    def __init__(self, torch, random, exact):
        self.torch, self.random, self.exact = torch, random, exact
        self.blocks = [[7, 2, 5], [0, 9, 1], [3, 11, 4]]
        self.lens = [0, 0, 0]

    def step(self, new_tokens, bound=0, padding=0, **options):
        """CommonAttentionMetadata; rows that pad it have the slot -1, requests no tokens."""
        torch = self.torch
        slots = []
        for r, new in enumerate(new_tokens):
            span = range(self.lens[r], self.lens[r] + new)
            slots += [self.blocks[r][i // BLOCK] * BLOCK + i % BLOCK for i in span]
            self.lens[r] += new
        lens = torch.tensor(self.lens + [0] * padding, dtype=torch.int32)
        starts = torch.tensor([0, *new_tokens] + [0] * padding).cumsum(0).int()
        bounds = "seq_lens_cpu" if self.exact else "seq_lens_cpu_upper_bound"
        return vllm_stub.CommonAttentionMetadata(
            query_start_loc_cpu=starts,
            seq_lens=lens,
            block_table_tensor=torch.tensor([*self.blocks, *[[-1] * 3] * padding]).int(),
            slot_mapping=torch.tensor(slots + [-1] * padding),
            **{bounds: lens if self.exact else lens + bound},
            **options,
        )


LAYERS = {
    "plain": {},
    "window": {"sliding_window": WINDOW},
    "softcap": {"logits_soft_cap": SOFTCAP},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("release", ["0.24", "0.33", "0.33 HND"])
def test_steps_of_a_group_of_layers(torch, vllm, random, release):
    """Prompts, then a chunk beside decodes; bounds above the lengths; padded requests and rows."""
    sinks = torch.randn(HEADS, generator=random)
    layers = []
    for options in LAYERS.values():
        given = {**options, "sinks": sinks} if "sinks" in options else options
        layers.append(layer_of(torch, vllm, random, **given))
    builder = builder_of(torch, vllm, layers)
    engine = Engine(torch, random, exact=release == "0.24")
    kv_caches = [caches(torch, release, "float32") for _ in layers]
    keys = [[torch.empty(2, 0, KV_HEADS, DIM) for _ in range(3)] for _ in layers]
    for new_tokens, padding in (([9, 5, 2], 0), ([1, 7, 1], 1), ([1, 1, 1], 1)):
        metadata = builder.build(0, engine.step(new_tokens, bound=3, padding=padding))
        num_tokens = sum(new_tokens) + padding
        for i, (layer, options) in enumerate(zip(layers, LAYERS.values())):
            q = torch.randn(num_tokens, HEADS, DIM, generator=random)
            k, v = torch.randn(2, num_tokens, KV_HEADS, DIM, generator=random)
            output = torch.full((num_tokens, HEADS * DIM), float("nan"))
            result = layer.impl.forward(layer, q, k, v, kv_caches[i], metadata, output)
            assert result is output
            begin = 0
            for r, new in enumerate(new_tokens):
                rows = slice(begin, begin + new)
                begin += new
                keys[i][r] = torch.cat([keys[i][r], torch.stack([k[rows], v[rows]])], 1)
                expected = dense(
                    torch,
                    q[rows],
                    *keys[i][r],
                    window=options.get("sliding_window"),
                    softcap=options.get("logits_soft_cap"),
                    sinks=sinks if "sinks" in options else None,
                )
                actual = output[rows].view(-1, HEADS, DIM).double()
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
            assert output[begin:].isnan().all()


@pytest.mark.parametrize("release", ["0.24", "0.33"])
def test_a_cache_of_8_bits(torch, vllm, random, release):
    """Of bytes, with the scales of the layer."""
    layer = layer_of(torch, vllm, random, kv_cache_dtype="fp8")
    builder = builder_of(torch, vllm, [layer], "bfloat16")
    q = torch.randn(9, HEADS, DIM, generator=random).bfloat16()
    k, v = torch.randn(2, 9, KV_HEADS, DIM, generator=random).bfloat16()
    output = torch.empty_like(q)
    kv_cache = caches(torch, release, "bfloat16", bytes_of="fp8")
    metadata = builder.build(0, Engine(torch, random, True).step([4, 3, 2]))
    layer.impl.forward(layer, q, k, v, kv_cache, metadata, output)
    k, v = (
        (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
        for x, scale in ((k, 0.5), (v, 0.25))
    )
    for begin, end in ((0, 4), (4, 7), (7, 9)):
        expected = dense(torch, q[begin:end], k[begin:end], v[begin:end])
        torch.testing.assert_close(output[begin:end].double(), expected, atol=0.02, rtol=0.02)


def test_drafts_that_see_each_other(torch, vllm, random):
    layer = layer_of(torch, vllm, random)
    builder = builder_of(torch, vllm, [layer])
    q = torch.randn(9, HEADS, DIM, generator=random)
    k, v = torch.randn(2, 9, KV_HEADS, DIM, generator=random)
    output = torch.empty_like(q)
    step = Engine(torch, random, False).step([4, 3, 2], causal=False)
    kv_cache = caches(torch, "0.33", "float32")
    layer.impl.forward(layer, q, k, v, kv_cache, builder.build(0, step), output)
    expected = dense(torch, q[:4], k[:4], v[:4], causal=False)
    torch.testing.assert_close(output[:4].double(), expected, atol=1e-5, rtol=1e-5)
    step.causal = torch.ones(3, dtype=torch.bool)
    with pytest.raises(fp.UnsupportedError, match="^causal: expected a bool for all requests"):
        builder.build(0, step)


def test_a_layer_that_shares_the_cache_of_another(torch, vllm, random):
    layer = layer_of(torch, vllm, random, kv_sharing_target_layer_name="layers.0")
    builder = builder_of(torch, vllm, [layer])
    q = torch.randn(9, HEADS, DIM, generator=random)
    kv_cache = caches(torch, "0.33", "float32")
    kv_cache.normal_(generator=random)
    before = kv_cache.clone()
    metadata = builder.build(0, Engine(torch, random, False).step([4, 3, 2]))
    output = torch.empty_like(q)
    layer.impl.forward(layer, q, q[:, :2], q[:, :2], kv_cache, metadata, output)
    assert torch.equal(kv_cache, before)
    k, v = (x[7, :4] for x in vllm.halves(kv_cache, DIM))
    expected = dense(torch, q[:4], k, v)
    torch.testing.assert_close(output[:4].double(), expected, atol=1e-5, rtol=1e-5)


def test_measuring_memory_computes_nothing(torch, vllm, random):
    layer = layer_of(torch, vllm, random)
    output = torch.ones(3, HEADS * DIM)
    layer.impl.forward(layer, None, None, None, torch.empty(0), None, output)
    assert not output.any()


def test_what_is_refused(torch, vllm, random):
    def refused(text, **options):
        with pytest.raises(fp.UnsupportedError, match=text):
            layer_of(torch, vllm, random, **options)

    refused("^alibi_slopes: expected None", alibi_slopes=[0.5] * HEADS)
    refused("^attn_type: expected 'decoder', got 'encoder'", attn_type="encoder")
    layer = layer_of(torch, vllm, random)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(fp.UnsupportedError, match=f"^{name}: expected None"):
            layer.impl.forward(layer, *[None] * 6, **{name: torch.ones(1)})


def test_what_vllm_asks_of_the_backend(torch, vllm):
    backend = vllm.FlashplanBackend
    assert backend.get_kv_cache_shape(3, 16, 2, 64) == (3, 2, 16, 2, 64)
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [8]
    assert [backend.supports_head_size(size) for size in (64, 512, 520)] == [True, True, False]
    for name in ("sink", "sliding_window", "non_causal", "batch_invariance"):
        assert getattr(backend, f"supports_{name}")()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    for major, supported in ((7, False), (8, True), (9, True)):
        capability = types.SimpleNamespace(major=major)
        assert backend.supports_compute_capability(capability) is supported
    assert backend.supports_combination(64, torch.bfloat16, "fp8", 16) is None
    other = backend.supports_combination(64, torch.bfloat16, "float16", 16)
    assert other.startswith("kv_dtype: expected")


def test_batch_invariance_is_asked_of_the_environment(torch, vllm, random, monkeypatch):
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        builder = builder_of(torch, vllm, [layer_of(torch, vllm, random)])
        metadata = builder.build(0, Engine(torch, random, False).step([1, 1, 1]))
        (attn,) = metadata.attentions.values()
        assert attn.options["batch_invariant"] is expected
