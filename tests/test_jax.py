# SPDX-License-Identifier: Apache-2.0
"""flashplan.jax: attention and appending as calls of XLA."""

import functools
import gc
import inspect
import os
import pathlib
import subprocess
import sys
import weakref

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import Jax
from inputs import make_inputs
from solve import run_arguments

CASES = [
    Case(**BATCH, q_dtype="float32"),
    Case(**BATCH, q_dtype="bfloat16", csr=True, kv_layout="HND"),
    Case(**BATCH, q_dtype="float16", page_size=None, o_dtype="float32", head_dim=(64, 32)),
    Case(**BATCH, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    Case(**BATCH, device_scales="heads"),
    Case(**BATCH, kv_dtype="float8_e5m2"),
]
INDPTR, LENS = np.array([[0, 1, 3], [5, 7, 0]], np.int32)
TABLE = np.array([[4, 1], [2, 0]], np.int32)


@pytest.fixture(params=CASES, ids=str)
def call(request, jax):
    """(attn, arguments of run) of a planned case."""
    case = request.param
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    return attn, *run_arguments(case, inputs, Jax(jax))


@pytest.fixture
def small(seed):
    """(attn, q, cache): three tokens of two requests over five pages, planned."""
    random = np.random.default_rng(seed)
    attn = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", device="cpu")
    attn.plan(INDPTR, LENS[:2])
    return attn, *(
        random.standard_normal(shape, np.float32) for shape in ((3, 4, 8), (2, 5, 4, 2, 8))
    )


def same_bits(states, expected):
    """Of the planned rows."""
    pairs = [(np.asarray(x)[: len(y)], np.asarray(y)) for x, y in zip(states, expected)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def test_arguments_are_those_of_the_package(calls):
    def names(function):
        return list(inspect.signature(function).parameters)

    left_out = {"out", "lse", "stream", "pdl", "variant_arguments"}
    expected = [x for x in names(fp.Attention.run)[1:] if x not in left_out]
    assert names(calls.run) == ["attn", *expected]
    left_out = {"slot_mapping", "batch_indices", "positions", "kv_dtype", "stream"}
    expected = [x for x in names(fp.append_paged_kv) if x not in left_out]
    assert names(calls.append_paged_kv) == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_same_bits_as_run(jax, calls, call, compiled):
    attn, args, kwargs = call
    arrays = {name: value for name, value in kwargs.items() if not isinstance(value, float)}
    numbers = {name: value for name, value in kwargs.items() if isinstance(value, float)}

    def both(args, arrays):
        return calls.run(attn, *args, **arrays, **numbers, return_lse=True)

    def alone(args, arrays):
        return calls.run(attn, *args, **arrays, **numbers)

    if compiled:
        both, alone = jax.jit(both), jax.jit(alone)
    expected = attn.run(*args, **kwargs, return_lse=True)
    assert same_bits(both(args, arrays), expected)
    assert same_bits([alone(args, arrays)], expected[:1])


def test_every_array_that_may_be_given(jax, calls, small):
    """Masks, real lengths and sinks, alone and together."""
    _, q, (k, v) = small
    attn = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", custom_mask=True, device="cpu")
    attn.plan(INDPTR, LENS[:2])
    mask = fp.pack_mask(np.array([[1, 0], [1, 0], [0, 1]], bool))
    lens, sinks = np.array([4, 6], np.int32), np.array([0.5, -1, 2, 0], np.float32)
    run = jax.jit(functools.partial(calls.run, attn))
    for kwargs in ({}, {"kv_lens": lens}, {"sinks": sinks}, {"kv_lens": lens, "sinks": sinks}):
        kwargs = kwargs | {"block_table": TABLE, "mask": mask}
        assert same_bits([run(q, k, v, **kwargs)], [attn.run(q, k, v, **kwargs)])


def test_one_function_serves_every_batch(jax, calls, small):
    attn, q, (k, v) = small
    traces = []

    @jax.jit
    def layer(q, k, v):
        traces.append(q)
        return calls.run(attn, q, k, v, block_table=TABLE)

    for indptr, lens in (([0, 1, 3], [5, 7]), ([0, 3], [6]), ([0, 2, 3], [8, 1])):
        attn.plan(indptr, lens)
        expected = attn.run(q, k, v, block_table=TABLE)
        assert same_bits([layer(q, k, v)], [expected])
    assert len(traces) == 1


def test_layers_of_a_scan(jax, calls, small):
    attn, q, caches = small
    layers = np.stack([caches, 2 * caches, -caches])

    @jax.jit
    def model(q, layers):
        def layer(q, cache):
            o = calls.run(attn, q, *cache, block_table=TABLE)
            return q + o, o

        return jax.lax.scan(layer, q, layers)

    x, expected = q, []
    for cache in layers:
        expected.append(attn.run(x, *cache, block_table=TABLE))
        x = x + expected[-1]
    actual, outputs = model(q, layers)
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(actual, x, atol=1e-5, rtol=1e-5)


def test_under_shard_map(jax, calls, small):
    from jax.sharding import Mesh, PartitionSpec

    attn, q, (k, v) = small
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    rows = PartitionSpec("x")

    def layer(q, k, v):
        return calls.run(attn, q, k, v, block_table=TABLE)

    specs = (rows, PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=rows))
    assert same_bits([mapped(q, k, v)], [attn.run(q, k, v, block_table=TABLE)])


def test_vmap_runs_one_after_the_other(jax, calls, small):
    attn, q, (k, v) = small
    queries = np.stack([q, -q])
    mapped = jax.vmap(lambda q: calls.run(attn, q, k, v, block_table=TABLE))(queries)
    assert same_bits(mapped, [attn.run(x, k, v, block_table=TABLE) for x in queries])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("donated", [True, False])
def test_appends(jax, calls, seed, kv_layout, dtype, donated):
    """In place where the caches are donated; otherwise the old ones stay as they are."""
    random = np.random.default_rng(seed)
    new = random.standard_normal((2, 3, 2, 8), np.float32)
    shape = (2, 5, 4, 2, 8) if kv_layout == "NHD" else (2, 5, 2, 4, 8)
    old = random.standard_normal(shape).astype(dtype)
    options = {"kv_layout": kv_layout, "k_scale": 0.5, "v_scale": 2.0}
    csr = {"page_indptr": np.array([0, 2, 4], np.int32), "page_indices": TABLE.ravel()}
    for pages in ({"block_table": TABLE}, csr):

        @functools.partial(jax.jit, donate_argnums=(0, 1) if donated else ())
        def step(k_cache, v_cache, k, v, pages):
            return calls.append_paged_kv(
                k, v, k_cache, v_cache, INDPTR, LENS[:2], **pages, **options
            )

        expected = old.copy()
        fp.append_paged_kv(*new, *expected, INDPTR, LENS[:2], **pages, **options)
        caches = [jax.numpy.array(x) for x in old]
        pointers = [x.unsafe_buffer_pointer() for x in caches]
        written = step(*caches, *new, pages)
        assert same_bits(written, expected)
        in_place = [x.unsafe_buffer_pointer() for x in written] == pointers
        assert in_place == donated
        if not donated:
            assert same_bits(caches, old)


def test_appends_with_scales_of_heads(jax, calls, seed):
    """The scales are arguments of the compiled function; one may be a number."""
    random = np.random.default_rng(seed)
    new = random.standard_normal((2, 3, 2, 8), np.float32)
    old = random.standard_normal((2, 5, 4, 2, 8)).astype(np.float32)

    @jax.jit
    def step(scales):
        return calls.append_paged_kv(
            *new, *map(jax.numpy.asarray, old), INDPTR, LENS[:2], block_table=TABLE, **scales
        )

    heads = random.uniform(0.1, 3, 2).astype(np.float32)
    for scales in (
        {"k_scale": heads, "v_scale": np.float32([0.7])},
        {"k_scale": np.float32([0.3]), "v_scale": heads},
        {"v_scale": heads},
    ):
        expected = old.copy()
        fp.append_paged_kv(*new, *expected, INDPTR, LENS[:2], block_table=TABLE, **scales)
        assert same_bits(step(scales), expected)
    with pytest.raises(jax.errors.JaxRuntimeError, match="k_scale: expected shape"):
        jax.block_until_ready(step({"k_scale": np.ones(3, np.float32)}))


def test_a_step_appends_and_attends(jax, calls, small, seed):
    attn, q, caches = small
    k, v = np.random.default_rng(seed + 1).standard_normal((2, 3, 2, 8), np.float32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache):
        k_cache, v_cache = calls.append_paged_kv(
            k, v, k_cache, v_cache, INDPTR, LENS[:2], block_table=TABLE
        )
        return calls.run(attn, q, k_cache, v_cache, block_table=TABLE), k_cache, v_cache

    expected = caches.copy()
    fp.append_paged_kv(k, v, *expected, INDPTR, LENS[:2], block_table=TABLE)
    o, *written = step(*map(jax.numpy.array, caches))
    assert same_bits([o, *written], [attn.run(q, *expected, block_table=TABLE), *expected])


def test_gradients_are_refused(jax, calls, small):
    attn, q, (k, v) = small
    with pytest.raises(fp.UnsupportedError, match=r"^flashplan\.jax\.run: expected no gradient"):
        jax.grad(lambda q: calls.run(attn, q, k, v, block_table=TABLE).sum())(q)
    name = r"^flashplan\.jax\.append_paged_kv: expected no gradient"
    with pytest.raises(fp.UnsupportedError, match=name):
        jax.grad(
            lambda k: calls.append_paged_kv(
                q[:, :2], q[:, :2], k, v, INDPTR, LENS[:2], block_table=TABLE
            )[0].sum()
        )(k)


def test_traced_arrays_are_refused_by_the_package(jax, small):
    attn, q, (k, v) = small
    with pytest.raises(TypeError, match=r"^q: .*flashplan\.jax\.run"):
        jax.jit(lambda q: attn.run(q, k, v, block_table=TABLE))(q)


def test_caches_that_the_package_can_not_write(jax, small):
    _, q, caches = small
    k_cache, v_cache = map(jax.numpy.array, caches)
    with pytest.raises(TypeError, match=r"^k_cache: .*flashplan\.jax.*, got a JAX array"):
        fp.append_paged_kv(
            q[:, :2], q[:, :2], k_cache, v_cache, INDPTR, LENS[:2], block_table=TABLE
        )


def test_wrong_arguments_are_refused(jax, calls, small):
    attn, q, (k, v) = small

    def refused(kind, text, *args, **kwargs):
        with pytest.raises(kind, match=text):
            jax.block_until_ready(calls.run(attn, *args, **kwargs))

    at_run = jax.errors.JaxRuntimeError
    refused(ValueError, r"^q: expected shape \[any, 4, any\], got \[3, 3, 8\]", q[:, :3], k, v)
    refused(ValueError, r"^q: expected shape .*, got \[12, 8\]", q.reshape(12, 8), k, v)
    refused(at_run, "q: expected shape .*, got ", q[..., :4], k, v, block_table=TABLE)
    refused(at_run, "k: expected shape .*, got ", q, k[:, :2], v, block_table=TABLE)
    refused(at_run, "block_table: expected ", q, k, v)
    refused(at_run, "block_table: expected dtype int32", q, k, v, block_table=q)
    refused(at_run, "v: expected dtype ", q, k, v.astype("bfloat16"), block_table=TABLE)
    refused(at_run, "mask: expected ", q, k, v, block_table=TABLE, mask=np.uint32([[1]] * 3))
    refused(TypeError, r"^v: expected a dtype among .*, got bool", q, k, v > 0, block_table=TABLE)
    short = TABLE.astype(np.int16)
    refused(TypeError, r"^block_table: expected a dtype .*, got int16", q, k, v, block_table=short)
    refused(
        ValueError, r"^kv_lens: expected 1 to 4 .*, got shape \[\]", q, k, v, kv_lens=np.int32(1)
    )
    refused(
        ValueError, r"^v: expected 1 to 4 .*, got shape \[1, ", q, k, v[None], block_table=TABLE
    )
    refused(TypeError, "^k_scale: expected a number, got ", q, k, v, k_scale="1")
    refused(at_run, "k_scale: expected ", q, k, v, block_table=TABLE, k_scale=-1.0)
    with pytest.raises(ValueError, match="^kv_layout: expected "):
        calls.append_paged_kv(q, q, k, v, INDPTR, LENS, kv_layout="DNH")
    with pytest.raises(at_run, match=r"indptr: expected .*, got"):
        calls.append_paged_kv(q[:, :2], q[:, :2], k, v, INDPTR, LENS, block_table=TABLE)
    expected = attn.run(q, k, v, block_table=TABLE)
    assert same_bits([calls.run(attn, q, k, v, block_table=TABLE)], [expected])


def test_variants_may_have_scalars_and_no_tensors(jax, calls):
    q, k, v = np.ones((1, 4, 8), np.float32), *np.ones((2, 3, 2, 8), np.float32)
    options = {"page_size": None, "q_dtype": "float32", "device": "cpu"}
    attn = fp.Attention(4, 2, 8, variant=fp.variants.sink_tokens(1, window=0), **options)
    attn.plan([0, 1], [3])
    assert same_bits([calls.run(attn, q, k, v)], [attn.run(q, k, v)])
    attn = fp.Attention(4, 2, 8, variant=fp.variants.alibi, **options)
    attn.plan([0, 1], [3])
    with pytest.raises(
        fp.UnsupportedError, match=r"^attn: expected a variant without tensors, got "
    ):
        calls.run(attn, q, k, v)


def test_calls_that_are_not_of_this_package(jax, calls, small):
    """Arrays and attributes may be missing, or of another type."""
    attn, q, (k, v) = small
    handle = np.int64(attn._handle)
    good = {
        "attention": handle,
        "given": np.int64(0b1001),  # v and block_table
        "q_scale": np.float32(1),
        "k_scale": np.float32(1),
        "v_scale": np.float32(1),
    }
    result = [jax.ShapeDtypeStruct(q.shape, q.dtype)]

    def refused(text, *arrays, results=result, name="flashplan_run", **attributes):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.ffi.ffi_call(name, results)(*arrays, **attributes))

    refused("attention: expected an attribute", q, k, v, TABLE)
    another = {"a" if name == "attention" else name: value for name, value in good.items()}
    refused("attention: expected an attribute", q, k, v, TABLE, **another)
    refused("given: expected an attribute", q, k, v, TABLE, **good | {"given": "1"})
    refused("k_scale: expected an attribute", q, k, v, TABLE, **good | {"k_scale": np.int64(1)})
    refused("call: expected more than 3 arrays, got no more", q, k, v, **good)
    refused("attn: expected .* gone", q, k, v, TABLE, **good | {"attention": np.int64(1 << 40)})
    refused("attn: expected .* gone", q, k, v, TABLE, **good | {"attention": np.int64(-1)})
    caches = [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2
    arrays = (q[:, :2], q[:, :2], k, v, INDPTR, LENS[:2], TABLE)
    good = {"hnd": np.int64(0), **good, "given": np.int64(1)}
    name = "flashplan_append_paged_kv"  # without aliases
    refused("k_cache: expected .* memory of", *arrays, results=caches, name=name, **good)


def test_a_call_keeps_no_attention_alive(jax, calls, small):
    _, q, (k, v) = small
    attn = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", device="cpu")
    attn.plan(INDPTR, LENS[:2])
    layer = jax.jit(lambda q: calls.run(attn_of(), q, k, v, block_table=TABLE))
    attn_of = weakref.ref(attn)
    layer(q).block_until_ready()
    del attn
    gc.collect()
    assert attn_of() is None
    error = (jax.errors.JaxRuntimeError, ValueError)  # as JAX likes
    with pytest.raises(error, match="attn: expected .* gone"):
        layer(q).block_until_ready()


def test_layouts_are_those_of_jaxlib(jax, tmp_path):
    compiler = os.environ.get("CXX", "c++")
    source = pathlib.Path(__file__).parent / "cpp" / "xla_layout.cpp"
    flags = ["-std=c++17", "-Wno-invalid-offsetof", "-fsyntax-only"]
    command = [compiler, *flags, "-isystem", jax.ffi.include_dir(), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exits_while_calls_are_under_way():
    code = """
import jax, jax.numpy as jnp
import flashplan as fp, flashplan.jax
attn = fp.Attention(8, 8, 64, page_size=None, q_dtype="float32", device="cpu")
attn.plan([0, 1024], [1024])
x = jnp.ones((1024, 8, 64))
run = jax.jit(lambda x: flashplan.jax.run(attn, flashplan.jax.run(attn, x, x, x), x, x))
run(x)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},  # it warns of GPUs that it has no package for
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
def test_on_a_gpu(jax, calls):
    """On XLA's stream, after a plan on another one."""
    gpu = Jax(jax, "gpu")
    case = Case(**BATCH)
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options() | {"device": "cuda:0"})
    args, kwargs = run_arguments(case, inputs, gpu)
    run = jax.jit(functools.partial(calls.run, attn))
    for shorter in range(4):
        lens = np.maximum(np.array(inputs.plan_args()[1]) - shorter, 0)
        attn.plan(inputs.plan_args()[0], lens, *inputs.plan_args()[2:])
        expected = attn.run(*args, **kwargs)
        assert same_bits([run(*args, **kwargs)], [expected])

    new = jax.device_put(np.ones((3, 2, 8), np.float16), gpu.device)
    old = np.zeros((2, 5, 4, 2, 8), np.float16)
    expected = old.copy()
    fp.append_paged_kv(*map(np.asarray, (new, new)), *expected, INDPTR, LENS[:2], block_table=TABLE)
    caches = [jax.device_put(x, gpu.device) for x in old]
    indices = [jax.device_put(x, gpu.device) for x in (INDPTR, LENS[:2], TABLE)]
    step = jax.jit(
        lambda k, v, i, n, t: calls.append_paged_kv(new, new, k, v, i, n, block_table=t),
        donate_argnums=(0, 1),
    )
    assert same_bits(step(*caches, *indices), expected)


def test_seeds_may_be_those_of_numpy(jax):
    """Since JAX makes no int64 arrays by itself."""
    logits = jax.numpy.zeros((2, 50))
    with pytest.raises(TypeError, match="^seed: expected dtype int64, got int32"):
        fp.sample(logits, seed=jax.numpy.array([1, 2]))
    ids = fp.sample(logits, seed=np.array([1, 2]))
    assert ids.tolist() == fp.sample(np.zeros((2, 50), np.float32), seed=np.array([1, 2])).tolist()
