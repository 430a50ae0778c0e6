# SPDX-License-Identifier: Apache-2.0
"""Tensors of every kind: what is accepted, what is refused, and with which words."""

import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import Jax, NumPy, Torch, bits
from inputs import make_inputs
from solve import run_arguments

CASE = Case(**BATCH, q_dtype="float32")


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(CASE, seed=0)


@pytest.fixture(scope="module")
def attn(inputs):
    attn = fp.Attention(**CASE.options())
    attn.plan(*inputs.plan_args())
    return attn


@pytest.fixture(scope="module")
def expected(attn, inputs):
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    return attn.run(*args, **kwargs)


def same(actual, expected):
    return np.array_equal(bits(actual), bits(expected))


@pytest.mark.parametrize("make", [NumPy, Torch])
def test_views_without_copies(make, request, attn, inputs, expected):
    """Slices of a fused [tokens, q + k + v heads] tensor, of a larger cache, of a wider table."""
    framework = make() if make is NumPy else make(request.getfixturevalue("torch"))
    qkv = np.full((len(inputs.q), 9, 64), np.nan, np.float32)
    qkv[:, 2:6] = inputs.q
    cache = np.full((2, len(inputs.k) + 2, *inputs.k.shape[1:]), np.nan, np.float32)
    cache[0, 1:-1], cache[1, 1:-1] = inputs.k, inputs.v
    table = np.pad(inputs.block_table, ((1, 1), (2, 2)), constant_values=-1)
    qkv, cache, table = (framework.tensor(x) for x in (qkv, cache, table))
    o = attn.run(qkv[:, 2:6], cache[0, 1:-1], cache[1, 1:-1], block_table=table[1:-1, 2:-2])
    assert same(framework.array(o), expected)


def test_broadcast_keys(torch):
    """Stride 0: one head of keys for all heads."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape, np.float32) for shape in ((5, 4, 8), (5, 1, 8)))
    attn = fp.Attention(4, 4, 8, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 5], [5])
    expected = attn.run(q, np.repeat(k, 4, axis=1), np.repeat(k, 4, axis=1))
    wide = np.broadcast_to(k, q.shape)
    assert same(attn.run(q, wide, wide), expected)
    wide = torch.from_numpy(k).expand(5, 4, 8)
    assert same(attn.run(torch.from_numpy(q), wide, wide).numpy(), expected)


def test_frameworks_may_be_mixed(torch, jax, attn, inputs, expected):
    """The result comes back in the framework of q."""
    table = torch.from_numpy(inputs.block_table)
    o = attn.run(
        jax.numpy.asarray(inputs.q), torch.from_numpy(inputs.k), inputs.v, block_table=table
    )
    assert isinstance(o, jax.Array)
    assert same(np.asarray(o), expected)
    o = attn.run(torch.from_numpy(inputs.q), inputs.k, inputs.v, block_table=inputs.block_table)
    assert isinstance(o, torch.Tensor)
    assert same(o.numpy(), expected)
    out = torch.full(expected.shape, float("nan"))
    assert attn.run(inputs.q, inputs.k, inputs.v, block_table=table, out=out) is out
    assert same(out.numpy(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_workspace_of_any_framework_and_dtype(dtype, torch, inputs, expected):
    num_bytes = fp.Attention(**CASE.options()).workspace_bytes + 256  # room to align it
    for module in (np, torch):
        memory = module.empty(num_bytes // np.dtype(dtype).itemsize, dtype=getattr(module, dtype))
        attn = fp.Attention(**CASE.options(), workspace=memory)
        attn.plan(*inputs.plan_args())
        args, kwargs = run_arguments(CASE, inputs, NumPy())
        assert same(attn.run(*args, **kwargs), expected)


def test_read_only_inputs_are_fine(attn, inputs, expected):
    def frozen(array):
        array = array.copy()
        array.flags.writeable = False
        return array

    args = [frozen(x) for x in (inputs.q, inputs.k, inputs.v)]
    assert same(attn.run(*args, block_table=frozen(inputs.block_table)), expected)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_read_only_outputs_are_refused(name, attn, inputs):
    outputs = {
        "out": np.zeros_like(inputs.q[: inputs.qo_indptr[-1]]),
        "lse": np.zeros(inputs.q.shape[:2], np.float32),
    }
    outputs[name].flags.writeable = False
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    with pytest.raises(TypeError, match=rf"^{name}: .*read-only"):
        attn.run(*args, **kwargs, **outputs)
    assert not outputs["out"].any()


@pytest.mark.parametrize("name", ["out", "lse"])
def test_jax_outputs_are_refused(name, jax, attn, inputs):
    args, kwargs = run_arguments(CASE, inputs, Jax(jax))
    shape = inputs.q.shape if name == "out" else inputs.q.shape[:2]
    frozen = jax.numpy.zeros(shape)
    with pytest.raises(TypeError, match=rf"^{name}: .*JAX"):
        attn.run(*args, **kwargs, **{name: frozen})
    assert not np.asarray(frozen).any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_jax_caches_are_refused(name, jax, inputs):
    caches = {"k_cache": inputs.k.copy(), "v_cache": inputs.v.copy()}
    frozen = caches[name] = jax.numpy.zeros_like(caches[name])
    new = np.ones((1, 2, 64), np.float32)
    with pytest.raises(TypeError, match=rf"^{name}: .*JAX"):
        fp.append_paged_kv(
            new,
            new,
            caches["k_cache"],
            caches["v_cache"],
            np.array([0, 1], np.int32),
            np.array([1], np.int32),
            block_table=np.array([[0]], np.int32),
        )
    assert not np.asarray(frozen).any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("kv_dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_dtypes_may_be_given_as_types(dtype, kv_dtype):
    """Strings are the names; NumPy dtypes and scalar types mean the same."""
    q, k = np.ones((1, 2, 4), dtype), np.ones((1, 1, 4), kv_dtype)
    for q_dtype, cache_dtype in ((dtype, kv_dtype), (np.dtype(dtype), np.dtype(kv_dtype))):
        attn = fp.Attention(
            2, 1, 4, page_size=None, q_dtype=q_dtype, kv_dtype=cache_dtype, device="cpu"
        )
        attn.plan([0, 1], [1])
        o = attn.run(q, k, k)
        assert o.dtype == dtype
        assert (o == 1).all()


def test_jax_tracers_are_refused(jax, attn, inputs):
    args, kwargs = run_arguments(CASE, inputs, Jax(jax))
    for position, name in enumerate("qkv"):

        def call(tensor, position=position):
            return attn.run(*args[:position], tensor, *args[position + 1 :], **kwargs).sum()

        for transform in (jax.jit, jax.vmap, jax.grad):
            with pytest.raises(TypeError, match=f"^{name}: .*flashplan.* got one that JAX traces"):
                transform(call)(args[position])
    o, lse = jax.numpy.ones((1, 1, 4)), jax.numpy.zeros((1, 1))
    with pytest.raises(TypeError, match="^o_a: .*got one that JAX traces"):
        jax.jit(fp.merge_states)(o, lse, o, lse)


@pytest.mark.parametrize("thing", [None, 3, "q", [[[0.0]]], object(), bytearray(64), np.float32(1)])
def test_what_is_no_tensor_is_refused(thing, attn, inputs):
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    with pytest.raises((TypeError, ValueError), match=r"^q: expected .+, got .+"):
        attn.run(thing, *args[1:], **kwargs)


def test_masked_arrays_are_refused(attn, inputs):
    """DLPack would leave out the mask."""
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    for position, name in enumerate("qkv"):
        masked = [np.ma.masked_array(x) if i == position else x for i, x in enumerate(args)]
        with pytest.raises(TypeError, match=f"^{name}: expected an array without a mask"):
            attn.run(*masked, **kwargs)
    lengths = np.ma.masked_array([0, 1], mask=[False, True])
    with pytest.raises(TypeError, match=r"^qo_indptr: expected an array without a mask"):
        attn.plan(lengths, [5])


def test_broken_dlpack_producer_is_refused(attn, inputs):
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **kwargs):
            raise BufferError("the buffer is on holiday")

    args, kwargs = run_arguments(CASE, inputs, NumPy())
    with pytest.raises((TypeError, ValueError, BufferError), match="q: |on holiday"):
        attn.run(Broken(), *args[1:], **kwargs)


def test_foreign_dlpack_producer_is_accepted(attn, inputs, expected):
    """Anything with __dlpack__; also an old one that knows no max_version."""

    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

    args, kwargs = run_arguments(CASE, inputs, NumPy())
    o = attn.run(args[0], *(Foreign(x) for x in args[1:]), **kwargs)
    assert same(o, expected)


def test_inputs_are_released(attn, inputs):
    """No reference to a tensor is kept after the call."""
    args, kwargs = run_arguments(CASE, inputs, NumPy())
    q = args[0].copy()
    attn.run(q, *args[1:], **kwargs)  # the first call may fill caches
    before = sys.getrefcount(q)
    out = attn.run(q, *args[1:], **kwargs)
    attn.run(q, *args[1:], **kwargs, out=out)
    assert sys.getrefcount(q) == before
    assert ctypes.c_ssize_t.from_address(id(out)).value == sys.getrefcount(out) - 1


def test_output_outlives_the_engine(inputs, framework):
    attn = fp.Attention(**CASE.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(CASE, inputs, framework)
    o = attn.run(*args, **kwargs)
    before = framework.array(o).copy()
    del attn, args, kwargs
    other = fp.Attention(**CASE.options())
    other.plan(*inputs.plan_args())
    args, kwargs = run_arguments(CASE, inputs, framework)
    other.run(-args[0], *args[1:], **kwargs)
    assert same(framework.array(o), before)
