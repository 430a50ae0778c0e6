# SPDX-License-Identifier: Apache-2.0
"""The functions of flashplan.torch other than run(): norms, rotation, activations, tokens."""

import gc
import inspect

import pytest

import flashplan as fp
from torch_calls import CALLS, DIM, HEADS, KV_HEADS, ROPE, TOKENS, calls

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


@pytest.fixture
def ops(torch):
    import torch._dynamo.testing

    import flashplan.torch

    torch.compiler.reset()
    with torch.no_grad():
        yield flashplan.torch


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
