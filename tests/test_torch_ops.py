# SPDX-License-Identifier: Apache-2.0
"""The functions of flashplan.torch other than run(): norms, rotation, activations, tokens."""

import gc
import inspect

import pytest

import flashplan as fp

TOKENS, HEADS, KV_HEADS, DIM, VOCAB = 5, 4, 2, 16, 33
NAMES = (
    "add_rmsnorm",
    "append_paged_kv",
    "apply_penalties",
    "apply_rope",
    "filtered_probs",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layernorm",
    "merge_states",
    "quantize_fp8",
    "rmsnorm",
    "rope_append_paged_kv",
    "sample",
    "silu_and_mul",
    "softmax",
    "top_k_mask",
)
ROPE = fp.Rope(theta=500.0)


@pytest.fixture
def ops(torch):
    import torch._dynamo.testing

    import flashplan.torch

    torch.compiler.reset()
    with torch.no_grad():
        yield flashplan.torch


class Call:
    """A call of a function: its tensors, and what it gets from them.

    Args:
        function: of the name in a module, and tensors to what the module's function returns.
        written: names of tensors that it changes.
    """

    def __init__(self, function, tensors, written=()):
        self.function, self.tensors, self.written = function, tensors, written

    def results(self, module, compile=lambda function: function):
        """What the function returns, and the tensors that it may have changed."""
        given = {name: tensor.clone() for name, tensor in self.tensors.items()}
        returned = compile(lambda tensors: self.function(module, **tensors))(given)
        for name, tensor in given.items():
            if name not in self.written:
                assert tensor.equal(self.tensors[name]), f"{name} was changed"
        returned = returned if isinstance(returned, tuple) else (returned,)
        return [x for x in returned if x is not None] + [given[name] for name in self.written]


def calls(torch, random):
    def draw(*shape):
        return torch.randn(*shape, generator=random)

    def ints(high, *shape, dtype=torch.int32):
        return torch.randint(high, shape, generator=random, dtype=dtype)

    x, weight = draw(TOKENS, DIM), draw(DIM)
    q, k, v = draw(TOKENS, HEADS, DIM), draw(TOKENS, KV_HEADS, DIM), draw(TOKENS, KV_HEADS, DIM)
    positions = ints(90, TOKENS)
    cache = {name: draw(4, 4, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    lengths = {
        "indptr": torch.tensor([0, 1, 5], dtype=torch.int32),
        "kv_lens": torch.tensor([7, 4], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1], [0, -1]], dtype=torch.int32),
    }
    new = {"k": k, "v": v}
    logits = draw(TOKENS, VOCAB)
    of_rows = {
        "temperature": 0.5 + torch.rand(TOKENS, generator=random),
        "top_k": 1 + ints(9, TOKENS),
        "top_p": 0.5 + 0.5 * torch.rand(TOKENS, generator=random),
        "min_p": 0.1 * torch.rand(TOKENS, generator=random),
        "seed": ints(10**9, TOKENS, dtype=torch.int64),
        "offset": ints(10**9, TOKENS, dtype=torch.int64),
    }
    history = {
        "history": ints(VOCAB, TOKENS, 6),
        "history_lens": ints(7, TOKENS),
        "repetition": 1 + torch.rand(TOKENS, generator=random),
    }
    states = {"o": draw(3, TOKENS, HEADS, DIM), "lse": draw(3, TOKENS, HEADS)}
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0, 0.25])}
    made = {
        "rmsnorm": Call(
            lambda m, **t: m.rmsnorm(**t, eps=0.1, gemma=True), {"x": x, "weight": weight}
        ),
        "rmsnorm in place": Call(lambda m, x: m.rmsnorm(x, out=x), {"x": x}, ["x"]),
        "add_rmsnorm": Call(
            lambda m, **t: m.add_rmsnorm(**t),
            {"x": x, "residual": draw(TOKENS, DIM), "weight": weight},
            ["x", "residual"],
        ),
        "add_rmsnorm to a tensor": Call(
            lambda m, **t: m.add_rmsnorm(**t),
            {
                "x": x,
                "residual": draw(TOKENS, DIM),
                "out": torch.zeros(TOKENS, DIM),
                "scale": torch.tensor([0.5]),
            },
            ["residual", "out"],
        ),
        "rmsnorm to 8 bits": Call(
            lambda m, **t: m.rmsnorm(**t, out_dtype="float8_e4m3fn", scale=0.5),
            {"x": x, "weight": weight},
        ),
        "layernorm": Call(
            lambda m, **t: m.layernorm(**t), {"x": x, "weight": weight, "bias": draw(DIM)}
        ),
        "rope": Call(
            lambda m, **t: m.apply_rope(**t, rope=ROPE), {"q": q, "k": k, "positions": positions}
        ),
        "rope in place": Call(
            lambda m, q, k, positions: m.apply_rope(q, k, positions, ROPE, out_q=q, out_k=k),
            {"q": q, "k": k, "positions": positions},
            ["q", "k"],
        ),
        "rope of a table": Call(
            lambda m, **t: m.apply_rope(**t, interleaved=True),
            {"q": q, "k": k, "positions": positions, "cos_sin_cache": draw(90, 8)},
        ),
        "append_paged_kv": Call(
            lambda m, **t: m.append_paged_kv(**t),
            {**new, **cache, **lengths, **scales},
            list(cache),
        ),
        "append_paged_kv to slots": Call(
            lambda m, **t: m.append_paged_kv(**t, k_scale=0.5),
            {**new, **cache, "slot_mapping": torch.tensor([7, -1, 2, 9, 15])},
            list(cache),
        ),
        "rope_append_paged_kv": Call(
            lambda m, **t: m.rope_append_paged_kv(**t, rope=ROPE),
            {"q": q, **new, **cache, **lengths, **scales},
            list(cache),
        ),
        "merge_states of a stack": Call(
            lambda m, o, lse: m.merge_states(o, lse, base2=True), states
        ),
        "merge_states": Call(lambda m, o, lse: m.merge_states(o[0], lse[0], o[1], lse[1]), states),
        "softmax": Call(lambda m, logits: m.softmax(logits, 0.5), {"logits": logits}),
        "softmax of rows": Call(
            lambda m, **t: m.softmax(**t),
            {"logits": logits, "temperature": of_rows["temperature"]},
        ),
        "sample": Call(
            lambda m, logits: m.sample(logits, temperature=0.7, top_k=9, top_p=0.9, seed=5),
            {"logits": logits},
        ),
        "sample with parameters of rows": Call(
            lambda m, **t: m.sample(**t, return_logprobs=True), {"logits": logits, **of_rows}
        ),
        "sample into tensors": Call(
            lambda m, **t: m.sample(**t, from_probs=True, seed=3) and None,
            {
                "logits": logits.softmax(-1),
                "out": ints(9, TOKENS),
                "logprobs": draw(TOKENS),
                "status": ints(9, TOKENS),
            },
            ["out", "logprobs", "status"],
        ),
        "sample with the likeliest tokens": Call(
            lambda m, **t: m.sample(**t, top_k=9, top_logprobs=3, logprobs_of="raw"),
            {"logits": logits, "rows": ints(TOKENS, 7)},
        ),
        "sample with joint filters": Call(
            lambda m, logits: m.sample(logits, top_k=9, top_p=0.5, joint=True, seed=2),
            {"logits": logits},
        ),
        "filtered_probs": Call(
            lambda m, logits: m.filtered_probs(logits, top_p=0.8, min_p=0.1), {"logits": logits}
        ),
        "filtered_probs of rows": Call(
            lambda m, **t: m.filtered_probs(**t),
            {
                "logits": logits,
                **{n: t for n, t in of_rows.items() if n not in ("seed", "offset")},
            },
        ),
        "top_k_renorm": Call(
            lambda m, probs: m.top_k_renorm(probs, 5), {"probs": logits.softmax(-1)}
        ),
        "top_p_renorm": Call(
            lambda m, probs: m.top_p_renorm(probs, 0.5), {"probs": logits.softmax(-1)}
        ),
        "top_k_mask": Call(lambda m, logits: m.top_k_mask(logits, 5), {"logits": logits}),
        "apply_penalties": Call(
            lambda m, **t: m.apply_penalties(**t, presence=0.5),
            {"logits": logits, **history},
            ["logits"],
        ),
    }
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        made[name] = Call(lambda m, x, name=name: getattr(m, name)(x), {"x": x})
    made["silu_and_mul to 8 bits"] = Call(
        lambda m, x: m.silu_and_mul(x, out_dtype="float8_e4m3fn", scale=0.5), {"x": x}
    )
    made["quantize_fp8"] = Call(lambda m, x: m.quantize_fp8(x, per_head=True), {"x": k})
    made["rope to 8 bits"] = Call(
        lambda m, q_scale, **t: m.apply_rope(
            **t, rope=ROPE, out_dtype="float8_e4m3fn", q_scale=q_scale, k_scale=0.5
        ),
        {"q": q, "k": k, "positions": positions, "q_scale": draw(KV_HEADS).abs() + 1},
    )
    made["quantize_fp8 by a scale"] = Call(
        lambda m, **t: m.quantize_fp8(**t)[0], {"x": k, "scale": draw(1).abs() + 1}
    )
    return made


CALLS = (
    "rmsnorm",
    "rmsnorm in place",
    "add_rmsnorm",
    "add_rmsnorm to a tensor",
    "rmsnorm to 8 bits",
    "layernorm",
    "rope",
    "rope in place",
    "rope of a table",
    "append_paged_kv",
    "append_paged_kv to slots",
    "rope_append_paged_kv",
    "merge_states of a stack",
    "merge_states",
    "softmax",
    "softmax of rows",
    "sample",
    "sample with parameters of rows",
    "sample into tensors",
    "sample with the likeliest tokens",
    "sample with joint filters",
    "filtered_probs",
    "filtered_probs of rows",
    "top_k_renorm",
    "top_p_renorm",
    "top_k_mask",
    "apply_penalties",
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "silu_and_mul to 8 bits",
    "quantize_fp8",
    "rope to 8 bits",
    "quantize_fp8 by a scale",
)


@pytest.fixture(params=CALLS)
def call(request, torch, random):
    made = calls(torch, random)
    assert tuple(made) == CALLS
    return made[request.param]


def same_bits(torch, actual, expected):
    return all(
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_the_package(ops, name):
    def arguments(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    assert arguments(getattr(ops, name)) == arguments(getattr(fp, name))[:-1]  # but stream


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_same_bits_as_in_the_package(torch, ops, call, backend):
    """Also in one graph: "aot_eager" makes functional graphs of operators that write."""
    expected = call.results(fp)
    if backend is None:
        assert same_bits(torch, call.results(ops), expected)
        return
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    actual = call.results(ops, lambda f: torch.compile(f, backend=counter, fullgraph=True))
    assert same_bits(torch, actual, expected)
    assert counter.frame_count == 1


def test_operators_are_what_they_say(torch, ops, call):
    """Fakes, mutation, and what is recorded of gradients, of every operator that a call uses."""
    from torch.utils._python_dispatch import TorchDispatchMode

    used = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "flashplan":
                used.append((operator, args))
            return operator(*args, **(kwargs or {}))

    with Record():
        call.results(ops)
    assert len(used) == 1
    operator, args = used[0]
    # A tensor that is also an output gets memory of its own: a schema has no such pairs.
    distinct = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    tensors = [x for x in distinct if isinstance(x, torch.Tensor)]
    checks = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]
    if any(x.dtype == torch.float8_e4m3fn for x in tensors):
        checks.remove("test_schema")  # PyTorch's comparison multiplies, which float8 does not have
    torch.library.opcheck(operator, tuple(distinct), test_utils=checks)


def test_gradients_are_refused(torch, ops, call):
    """Of the first floating-point tensor, where tracing takes the gradient off."""
    name = next(name for name, x in call.tensors.items() if x.is_floating_point())

    def function(x):
        given = {key: tensor.clone() for key, tensor in call.tensors.items()}
        given[name] = x * 2
        result = call.function(ops, **given)
        first = result[0] if isinstance(result, tuple) else result
        return given[call.written[0]] if first is None else first.float()

    x = call.tensors[name].clone().requires_grad_()
    with torch.enable_grad():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for differentiated in (function, compiled):
            with pytest.raises(Exception, match="expected .*inference"):
                differentiated(x)


class Layer:
    """A layer of Llama over a paged cache."""

    def __init__(self, torch, random, attn):
        def weight(*shape):
            return 0.2 * torch.randn(*shape, generator=random)

        width = HEADS * DIM
        self.attn = attn
        self.norms = weight(2, width)
        self.qkv = weight(width, (HEADS + 2 * KV_HEADS) * DIM)
        self.o = weight(width, width)
        self.up, self.down = weight(width, 2 * width), weight(width, width)

    def __call__(self, m, x, residual, k_cache, v_cache, positions, slots, table):
        m.add_rmsnorm(x, residual, self.norms[0])
        qkv = (x @ self.qkv).view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = m.apply_rope(q, k, positions, ROPE)
        m.append_paged_kv(k, v, k_cache, v_cache, slot_mapping=slots)
        x = self.attend(m, q, k_cache, v_cache, table).flatten(1) @ self.o
        m.add_rmsnorm(x, residual, self.norms[1])
        return m.silu_and_mul(x @ self.up) @ self.down

    def attend(self, m, *tensors):
        *tensors, table = tensors
        if m is fp:
            return self.attn.run(*tensors, block_table=table)
        return m.run(self.attn, *tensors, block_table=table)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_layer_is_one_graph(torch, ops, random, backend):
    """Of every batch of as many tokens, without another compilation."""
    attn = fp.Attention(HEADS, KV_HEADS, DIM, page_size=4, q_dtype="float32", device="cpu")
    layer = Layer(torch, random, attn)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer.__call__, backend=counter, fullgraph=True)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    for qo_lens, kv_lens in (([1, 4], [7, 4]), ([3, 2], [3, 8])):
        attn.plan([0, qo_lens[0], TOKENS], kv_lens)
        positions = torch.cat([torch.arange(kv - qo, kv) for qo, kv in zip(qo_lens, kv_lens)]).int()
        requests = torch.tensor([0] * qo_lens[0] + [1] * qo_lens[1])
        slots = table[requests, positions // 4].long() * 4 + positions % 4
        tensors = [torch.randn(TOKENS, HEADS * DIM, generator=random) for _ in range(2)]
        tensors += [torch.randn(4, 4, KV_HEADS, DIM, generator=random) for _ in range(2)]
        copies = [x.clone() for x in tensors]
        expected = layer(fp, *tensors, positions, slots, table)
        actual = compiled(ops, *copies, positions, slots, table)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        for copy, tensor in zip(copies[1:], tensors[1:]):
            torch.testing.assert_close(copy, tensor, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_package_says_what_to_call(torch, ops, name):
    x = torch.ones(2, 4)
    function = getattr(fp, name)
    compiled = torch.compile(lambda x: function(x), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"call flashplan\.torch\.{name}\)"):
        compiled(x)


def test_an_attention_says_what_to_call(torch, ops, random):
    attn = fp.Attention(HEADS, KV_HEADS, DIM, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 2], [3])
    q, k = torch.randn(2, HEADS, DIM, generator=random), torch.randn(3, KV_HEADS, DIM)

    def run(q):
        return attn.run(q, k, k) + 1

    told = (
        (run, r"call flashplan\.torch\.run\)"),
        (lambda q: attn.bind(q, k, k)() + 1, r"call flashplan\.torch\.run\)"),
        (lambda q: attn.plan([0, 2], [3]) and q, r"call it before\)"),
    )
    for function, text in told:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            torch.compile(function, backend="eager", fullgraph=True)(q)
        torch.compiler.reset()
    # Without fullgraph the call breaks the graph, and computes.
    assert torch.equal(torch.compile(run, backend="eager")(q), run(q))


def test_a_rope_that_is_gone(torch, ops):
    q, positions = torch.ones(1, 1, DIM), torch.zeros(1, dtype=torch.int32)
    rope = fp.Rope()
    handle = rope._handle
    del rope
    gc.collect()
    with pytest.raises(RuntimeError, match="^rope: expected a Rope of this process, got one that"):
        torch.ops.flashplan.apply_rope(
            q, q, positions, handle, None, False, q + 0, q + 0, None, 1.0, None, 1.0, None
        )


def test_errors_are_those_of_the_package(torch, ops):
    x = torch.ones(2, 5)
    for module in (fp, ops):
        with pytest.raises(ValueError, match="^x: expected"):
            module.silu_and_mul(x)
        with pytest.raises(TypeError, match="^rope: expected a Rope, got str"):
            module.apply_rope(x, x, x, "rope")
        with pytest.raises(ValueError, match="^top_p: expected"):
            module.sample(x, top_p=2.0)
