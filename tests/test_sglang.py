# SPDX-License-Identifier: Apache-2.0
"""The plugin for SGLang, with stand-ins of SGLang's classes."""

import pathlib
import sys
import types

import pytest

import flashplan as fp
import flashplan.sglang
import sglang_stub
from sglang_stub import ForwardBatch, ForwardMode, RadixAttention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3
REQUESTS, CONTEXT, SLOTS = 4, 32, 130
LAYERS = ({}, {"sliding_window_size": 5}, {"logit_cap": 4.0}, {})  # the last one has sinks


@pytest.fixture
def registered(torch, monkeypatch):
    with torch.no_grad():
        yield sglang_stub.install(monkeypatch)


def test_registers_once(registered):
    backends, names = registered
    for _ in range(2):
        flashplan.sglang.register()
    assert list(backends) == ["flashplan"]
    assert names == ["triton", "flashplan"]


def test_the_package_names_the_plugin():
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nflashplan = "flashplan.sglang:reg' in text


def test_says_that_sglang_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ModuleNotFoundError, match=r"^flashplan\.sglang: expected SGLang"):
        flashplan.sglang.register()


def runner_of(torch, page_size=1, dtype="float32", kv_dtype=None, **others):
    kv_dtype = getattr(torch, kv_dtype or dtype)
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    given = {
        "use_mla_backend": False,
        "model_config": types.SimpleNamespace(is_encoder_decoder=False),
        "req_to_token_pool": types.SimpleNamespace(req_to_token=table, size=REQUESTS),
        "token_to_kv_pool": sglang_stub.KVPool(torch, len(LAYERS), SLOTS, KV_HEADS, DIM, kv_dtype),
        "page_size": page_size,
        "dtype": getattr(torch, dtype),
        "kv_cache_dtype": kv_dtype,
        "device": "cpu",
    }
    return types.SimpleNamespace(**{**given, **others})


def backend_of(registered, runner):
    flashplan.sglang.register()
    return registered[0]["flashplan"](runner)


def layers_of(**options):
    return [
        RadixAttention(HEADS, KV_HEADS, DIM, DIM, SCALE, i, **given, **options)
        for i, given in enumerate(LAYERS)
    ]


def dense(torch, q, k, v, layer, sinks):
    """[tokens, heads, dim] in float64, where the last query is at the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    if layer.logit_cap:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = ahead > 0
    if layer.sliding_window_size >= 0:
        hidden |= ahead < -layer.sliding_window_size
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1)[..., : len(k)], v)


class Engine:
    """Requests whose tokens are in slots, and the steps that SGLang makes of them."""

    def __init__(self, torch, random, runner, page_size):
        self.torch, self.random = torch, random
        self.table = runner.req_to_token_pool.req_to_token
        self.free = torch.randperm(SLOTS // page_size, generator=random).tolist()
        self.page_size = page_size
        self.rows, self.lens = [3, 0, 2], [0, 0, 0]

    def step(self, new_tokens, padding=0):
        """A ForwardBatch; requests that pad a graph have length 1, and write to slot 0."""
        torch = self.torch
        slots = []
        for r, new in enumerate(new_tokens):
            for position in range(self.lens[r], self.lens[r] + new):
                if position % self.page_size == 0:
                    first = self.free.pop() * self.page_size
                    pages = torch.arange(first, first + self.page_size)
                    end = min(position + self.page_size, CONTEXT)
                    self.table[self.rows[r], position:end] = pages[: end - position].int()
                slots.append(int(self.table[self.rows[r], position]))
            self.lens[r] += new
        lens = torch.tensor(self.lens + [1] * padding)
        decodes = set(new_tokens) == {1}
        return ForwardBatch(
            ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            torch.tensor(self.rows + [REQUESTS] * padding),
            lens,
            lens,
            None if decodes else new_tokens,
            torch.tensor(slots + [self.free[0] * self.page_size] * padding),
        )


class Checked:
    """Computes steps in all layers, and compares every row with dense attention."""

    def __init__(self, torch, random, backend):
        self.torch, self.random, self.backend = torch, random, backend
        self.layers = layers_of()
        self.sinks = torch.randn(HEADS, generator=random)
        self.keys = [[torch.empty(2, 0, KV_HEADS, DIM) for _ in range(3)] for _ in self.layers]

    def compute(self, batch, new_tokens, padding=0, replay=None):
        torch = self.torch
        num_tokens = sum(new_tokens) + padding
        for i, layer in enumerate(self.layers):
            q = torch.randn(num_tokens, HEADS * DIM, generator=self.random)
            k, v = torch.randn(2, num_tokens, KV_HEADS, DIM, generator=self.random)
            sinks = {"sinks": self.sinks} if i == 3 else {}
            o = self.backend.forward(q, k, v, layer, replay or batch, **sinks)
            assert o.shape == (num_tokens, HEADS * DIM)
            begin = 0
            for r, new in enumerate(new_tokens):
                rows = slice(begin, begin + new)
                begin += new
                self.keys[i][r] = torch.cat([self.keys[i][r], torch.stack([k[rows], v[rows]])], 1)
                expected = dense(
                    torch,
                    q[rows].view(-1, HEADS, DIM),
                    *self.keys[i][r],
                    layer,
                    *(sinks.values() or [None]),
                )
                actual = o[rows].view(-1, HEADS, DIM).double()
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4])
def test_steps_of_layers(torch, registered, random, page_size):
    """Prompts, then parts of them, then decodes; one plan for each kind of layer in each step."""
    runner = runner_of(torch, page_size)
    backend = backend_of(registered, runner)
    engine = Engine(torch, random, runner, page_size)
    checked = Checked(torch, random, backend)
    for new_tokens in ([9, 5, 2], [1, 7, 1], [1, 1, 1], [1, 1, 1], [2, 1, 8]):
        batch = engine.step(new_tokens)
        backend.init_forward_metadata(batch)
        checked.compute(batch, new_tokens)


def test_plans_once_for_each_kind_of_layer(torch, registered, random, monkeypatch):
    runner = runner_of(torch)
    backend = backend_of(registered, runner)
    engine = Engine(torch, random, runner, 1)
    checked = Checked(torch, random, backend)
    plans, plan = [], fp.Attention.plan
    monkeypatch.setattr(fp.Attention, "plan", lambda *a, **k: plans.append(a) or plan(*a, **k))
    for new_tokens in ([9, 5, 2], [1, 7, 1]):
        plans.clear()
        batch = engine.step(new_tokens)
        backend.init_forward_metadata(batch)
        checked.compute(batch, new_tokens)
        assert len(plans) == 3  # the first and the last layer are of one kind


def test_a_graph_computes_what_was_planned(torch, registered, random, monkeypatch):
    """The calls inside of a graph see the tensors of the capture, and plan nothing."""
    runner = runner_of(torch)
    backend = backend_of(registered, runner)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    engine = Engine(torch, random, runner, 1)
    checked = Checked(torch, random, backend)
    prompts = engine.step([9, 5, 2])
    backend.init_forward_metadata(prompts)
    checked.compute(prompts, [9, 5, 2])

    batch = engine.step([1, 1, 1], padding=1)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    table = backend._block_table
    checked.compute(batch, [1, 1, 1], padding=1)
    for _ in range(3):
        batch = engine.step([1, 1, 1], padding=1)
        backend.init_forward_metadata_out_graph(batch)
        assert backend._block_table.data_ptr() == table.data_ptr()
        backend._block_table = table  # what the graph has
        with monkeypatch.context() as inside:
            inside.setattr(fp.Attention, "plan", lambda *_: pytest.fail("planned in a graph"))
            checked.compute(batch, [1, 1, 1], padding=1)


def test_a_cache_of_8_bits(torch, registered, random):
    runner = runner_of(torch, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    backend = backend_of(registered, runner)
    batch = Engine(torch, random, runner, 1).step([4, 3, 2])
    q = torch.randn(9, HEADS, DIM, generator=random).bfloat16()
    k, v = torch.randn(2, 9, KV_HEADS, DIM, generator=random).bfloat16()
    layer = layers_of(k_scale_float=0.5, v_scale_float=0.25)[0]
    backend.init_forward_metadata(batch)
    o = backend.forward(q.flatten(1), k, v, layer, batch).view(-1, HEADS, DIM)
    k, v = (
        (x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in ((k, 0.5), (v, 0.25))
    )
    for rows in (slice(0, 4), slice(4, 7), slice(7, 9)):
        expected = dense(torch, q[rows], k[rows], v[rows], layer, None)
        torch.testing.assert_close(o[rows].double(), expected, atol=0.02, rtol=0.02)


def test_keys_that_another_layer_wrote(torch, registered, random):
    runner = runner_of(torch)
    backend = backend_of(registered, runner)
    batch = Engine(torch, random, runner, 1).step([4, 3, 2])
    layer = layers_of()[0]
    runner.token_to_kv_pool.buffers[0].normal_(generator=random)
    before = runner.token_to_kv_pool.buffers[0].clone()
    q = torch.randn(9, HEADS * DIM, generator=random)
    k = torch.randn(9, KV_HEADS, DIM, generator=random)
    backend.init_forward_metadata(batch)
    results = [
        backend.forward(q, None, None, layer, batch),
        backend.forward(q, k, k, layer, batch, save_kv_cache=False),
    ]
    assert torch.equal(runner.token_to_kv_pool.buffers[0], before)
    assert torch.equal(*results)
    k, v = before[:, batch.out_cache_loc[:4]]
    expected = dense(torch, q[:4].view(-1, HEADS, DIM), k, v, layer, None)
    actual = results[0][:4].view(-1, HEADS, DIM).double()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_idle_rank(torch, registered):
    backend = backend_of(registered, runner_of(torch))
    batch = ForwardBatch(ForwardMode.IDLE)
    backend.init_forward_metadata(batch)
    q = torch.empty(0, HEADS * DIM)
    assert backend.forward(q, None, None, layers_of()[0], batch).shape == q.shape


def test_what_is_refused(torch, registered, random):
    def refused(text, **options):
        with pytest.raises(fp.UnsupportedError, match=text):
            backend_of(registered, runner_of(torch, **options))

    refused("^model: expected no multi-head latent", use_mla_backend=True)
    both = types.SimpleNamespace(is_encoder_decoder=True)
    refused("^model: expected a decoder alone", model_config=both)
    two_caches = types.SimpleNamespace(translate_loc_from_full_to_swa=None)
    refused("^token_to_kv_pool: expected one cache for all", token_to_kv_pool=two_caches)
    runner = runner_of(torch)
    backend = backend_of(registered, runner)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        with pytest.raises(fp.UnsupportedError, match="^forward_mode: expected no speculative"):
            backend.init_forward_metadata(ForwardBatch(mode))
    batch = Engine(torch, random, runner, 1).step([4, 3, 2])
    backend.init_forward_metadata(batch)
    x = torch.ones(9, HEADS * DIM)
    encoder = layers_of(attn_type=sglang_stub.AttentionType.ENCODER_ONLY)[0]
    with pytest.raises(fp.UnsupportedError, match="^attn_type: expected 'decoder', got 'encoder"):
        backend.forward(x, None, None, encoder, batch)
    with pytest.raises(fp.UnsupportedError, match="^q_rope: expected None with flashplan"):
        backend.forward(x, None, None, layers_of()[0], batch, q_rope=x)
