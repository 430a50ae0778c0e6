# SPDX-License-Identifier: Apache-2.0
"""flashplan.torch: operators that torch.compile, torch.export and CUDA graphs take."""

import gc
import inspect

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import Torch, TorchCuda
from inputs import make_inputs
from solve import run_arguments

CASES = [
    Case(**BATCH, q_dtype="float32"),
    Case(**BATCH, q_dtype="bfloat16", csr=True, kv_layout="HND"),
    Case(**BATCH, q_dtype="float16", page_size=None, o_dtype="float32", head_dim=(64, 32)),
    Case(**BATCH, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    Case(**BATCH, q_dtype="float32", variant="elements"),
    Case(**BATCH, kv_dtype="float8_e4m3fn", device_scales="heads", sinks=True),
]
BACKENDS = ("eager", "aot_eager")  # the second one makes functional graphs of mutating operators


@pytest.fixture
def ops(torch):
    import torch._dynamo.testing

    import flashplan.torch

    torch.compiler.reset()
    with torch.no_grad():
        yield flashplan.torch


def prepared(case, framework):
    """(attn, arguments of run) of a planned case."""
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    return attn, *run_arguments(case, inputs, framework)


@pytest.fixture(params=CASES, ids=str)
def call(request, torch):
    return prepared(request.param, Torch(torch))


def same_bits(torch, states, expected):
    """Of the planned rows."""
    return all(
        torch.equal(x[: len(y)].view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(states, expected, strict=True)
    )


def test_arguments_are_those_of_the_package(ops):
    def names(function):
        return list(inspect.signature(function).parameters)

    expected = names(fp.Attention.run)
    expected.remove("stream")
    assert names(ops.run) == ["attn", *expected[1:]]
    assert names(ops.append_paged_kv) == names(fp.append_paged_kv)[:-1]


def test_same_bits_as_run(torch, ops, call):
    attn, args, kwargs = call
    expected = attn.run(*args, **kwargs, return_lse=True)
    assert same_bits(torch, ops.run(attn, *args, **kwargs, return_lse=True), expected)
    assert same_bits(torch, [ops.run(attn, *args, **kwargs)], expected[:1])
    out, lse = (torch.full_like(x, float("nan")) for x in expected)
    assert ops.run(attn, *args, **kwargs, out=out, lse=lse) is out
    assert same_bits(torch, (out, lse), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph(torch, ops, call, backend):
    attn, args, kwargs = call

    def layer(q, k, v):
        o, lse = ops.run(attn, q, k, v, **kwargs, return_lse=True)
        return o * 2, lse

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for _ in range(2):
        o, lse = attn.run(*args, **kwargs, return_lse=True)
        assert same_bits(torch, compiled(*args), (o * 2, lse))
        attn.plan([0, 1], [1])  # another batch, the same graph
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_appends_and_attends(torch, ops, backend):
    """To a cache whose halves are views of one tensor."""
    attn = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", device="cpu")
    indptr, lens = torch.tensor([0, 1, 3]), torch.tensor([5, 7])
    attn.plan(indptr, lens)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    indptr, lens = indptr.int(), lens.int()

    def step(q, k, v, cache):
        k_cache, v_cache = cache.unbind(1)
        ops.append_paged_kv(k, v, k_cache, v_cache, indptr, lens, block_table=table)
        return ops.run(attn, q + 0, k_cache, v_cache, block_table=table)

    cache = torch.randn(5, 2, 4, 2, 8)
    copies = [cache.clone() for _ in range(2)]
    expected = step(q, k, v, copies[0])
    actual = torch.compile(step, backend=backend, fullgraph=True)(q, k, v, copies[1])
    assert torch.equal(actual, expected)
    assert torch.equal(*copies)
    assert not torch.equal(copies[0], cache)


def test_exports(torch, ops, call):
    attn, args, kwargs = call

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return ops.run(attn, q, k, v, **kwargs)

    program = torch.export.export(Layer(), tuple(args)).module()
    assert same_bits(torch, [program(*args)], [attn.run(*args, **kwargs)])


SCALES = (1.0, 1.0, 1.0)  # of q, k and v


def test_operators_are_what_they_say(torch, ops):
    attn, [q, k, v], kwargs = prepared(CASES[0], Torch(torch))
    table = kwargs["block_table"]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    torch.library.opcheck(
        torch.ops.flashplan.run.default,
        (attn._handle, q, k, v, None, None, table, *(None,) * 10, out, lse, *SCALES, False, [], []),
    )
    new = torch.randn(2, *k.shape[2:])
    indptr, lens = torch.tensor([[0, 2], [5, 0]], dtype=torch.int32)
    scales = (1.0, torch.ones(k.shape[2]), 0.5, None)
    torch.library.opcheck(
        torch.ops.flashplan.append_paged_kv.default,
        (new, new, k, v, indptr, lens[:1], table[:1], *(None,) * 5, "NHD", *(None, *scales)),
    )
    slots = torch.tensor([7, -1])
    torch.library.opcheck(
        torch.ops.flashplan.append_paged_kv.default,
        (new, new, k, v, *(None,) * 5, slots, None, None, "NHD", None, *scales),
    )


def test_errors_are_those_of_run(torch, ops, call):
    attn, [q, k, v], kwargs = call
    with pytest.raises(ValueError, match=r"^q: expected .+, got .+"):
        ops.run(attn, q[..., :-1], k, v, **kwargs)
    with torch.enable_grad(), pytest.raises(ValueError, match="^q: .*inference"):
        ops.run(attn, q.detach().requires_grad_(), k, v, **kwargs)
    with pytest.raises(ValueError, match="^kv_layout: "):
        ops.append_paged_kv(*[q] * 6, kv_layout="DNH")


def differentiated(torch, name, function, x):
    """What asks for a gradient of function(x), in each way that PyTorch has."""
    if name in ("eager", "aot_eager", "inductor"):
        compiled = torch.compile(function, backend=name, fullgraph=True)
        compiled(x.requires_grad_()).sum().backward()
    elif name == "export":
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.ones(()))
        module.forward = lambda x: function(x * module.weight)
        torch.export.export(module, (x,))
    elif name == "jvp":
        torch.func.jvp(function, (x,), (x,))
    elif name == "dual":
        with torch.autograd.forward_ad.dual_level():
            function(torch.autograd.forward_ad.make_dual(x, x))
    else:
        getattr(torch.func, name)(lambda x: function(x).sum())(x)


@pytest.mark.parametrize("argument", ["q", "k", "k_scales"])
@pytest.mark.parametrize(
    "name", ["eager", "aot_eager", "inductor", "export", "grad", "jacrev", "jacfwd", "jvp", "dual"]
)
def test_gradients_are_refused(torch, ops, name, argument):
    """Also where the tensors that reach `Attention.run` do not tell: tracing takes them off."""
    attn = fp.Attention(4, 2, 16, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 2], [9])
    q, k, scale = torch.randn(2, 4, 16), torch.randn(9, 2, 16), torch.ones(())

    def function(x):
        given = {"q": q, "k": k, "k_scales": scale, argument: x * 2}
        return ops.run(attn, given["q"], given["k"], k, k_scale=given["k_scales"])

    x = {"q": q, "k": k, "k_scales": scale}[argument].clone()
    with torch.enable_grad(), pytest.raises(Exception, match=f"{argument}: expected .*inference"):
        differentiated(torch, name, function, x)
    assert function(x.detach()).shape == q.shape


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_appends_with_scales_of_heads(torch, ops, random, backend):
    k, v = torch.randn(2, 3, 2, 8, generator=random)
    k_scale, v_scale = torch.tensor([0.3]), torch.tensor([0.7, 1.9])
    slots = torch.tensor([7, -1, 2])
    expected, caches = torch.zeros(2, 2, 2, 4, 2, 8).unbind()
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    fp.append_paged_kv(k, v, *expected, slot_mapping=slots, **scales)

    def step(k_cache, v_cache, k_scale, v_scale):
        ops.append_paged_kv(
            k, v, k_cache, v_cache, slot_mapping=slots, k_scale=k_scale, v_scale=v_scale
        )

    torch.compile(step, backend=backend, fullgraph=True)(*caches, k_scale, v_scale)
    assert same_bits(torch, caches.unbind(), expected.unbind())
    assert caches.any()


@pytest.mark.parametrize("name", ["aot_eager", "grad"])
def test_gradients_of_appended_keys_are_refused(torch, ops, name):
    def function(x):
        cache = torch.zeros(2, 1, 4, 2, 8)
        ops.append_paged_kv(x * 2, x, *cache, slot_mapping=torch.tensor([0]))
        return cache + x.sum()

    with torch.enable_grad(), pytest.raises(Exception, match="k: expected .*inference"):
        differentiated(torch, name, function, torch.ones(1, 2, 8))


def test_an_operator_keeps_no_attention_alive(torch, ops):
    attn, args, kwargs = prepared(CASES[0], Torch(torch))
    handle = attn._handle
    out = ops.run(attn, *args, **kwargs)
    del attn
    gc.collect()
    table = kwargs["block_table"]
    with pytest.raises(RuntimeError, match="^attn: expected .* got one that is gone"):
        torch.ops.flashplan.run(
            handle, *args, None, None, table, *(None,) * 10, out, None, *SCALES, False, [], []
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_on_a_gpu(torch, ops, mode):
    """By inductor, and captured into CUDA graphs that serve any batch."""
    case = Case(**BATCH)
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options() | {"device": "cuda:0"})
    args, kwargs = run_arguments(case, inputs, TorchCuda(torch))
    compiled = torch.compile(
        lambda q, k, v: ops.run(attn, q, k, v, **kwargs) + 1, mode=mode, fullgraph=True
    )
    lens = np.array(inputs.plan_args()[1])
    for shorter in range(4):
        attn.plan(inputs.plan_args()[0], np.maximum(lens - shorter, 0), *inputs.plan_args()[2:])
        expected = attn.run(*args, **kwargs) + 1
        assert torch.equal(compiled(*args)[: len(expected)], expected)
