# SPDX-License-Identifier: Apache-2.0
"""flashplan.jax in programs on several devices: conftest.py lets JAX have several CPU devices."""

import functools
import gc
import inspect

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from sharded import AXIS, CASE, INDPTR, LENS, TABLE, WHOLE, Sharded, placed, small, small_arrays

HEADS = {"num_qo_heads": 8, "num_kv_heads": 4}
CASES = [
    CASE,
    Case(**BATCH, **HEADS, csr=True, kv_layout="HND"),
    Case(**BATCH, num_qo_heads=2, num_kv_heads=2, page_size=None, q_dtype="float16"),
    Case(**BATCH, num_qo_heads=6, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    Case(**BATCH, **HEADS, device_scales="heads", head_dim=(64, 32)),
    Case(**BATCH, **HEADS, device_scales="one", planned_lens=(40, 80, 40, 9)),
    Case(**BATCH, **HEADS, custom_mask="tree"),
]
TRANSFERS = ("all-gather", "all-to-all", "collective-permute", "all-reduce")


@pytest.fixture(params=CASES, ids=str)
def each(request, jax, devices, seed):
    return Sharded(jax, request.param, devices, seed)


@pytest.fixture
def sharded(jax, devices, seed):
    return Sharded(jax, CASE, devices, seed)


def transfers(jax, function, *args):
    """The transfers between devices in a compiled program."""
    text = function.lower(*args).compile().as_text()
    return [name for name in TRANSFERS if name in text]


@pytest.mark.parametrize("compiled", [True, False])
def test_under_shard_map(jax, each, compiled):
    """Arrays have the shapes of one device."""
    function = each.under_shard_map(each.run, each.mesh())
    with jax.disable_jit(not compiled):
        each.assert_right(*function(each.arrays))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
def test_heads_that_are_divided(jax, each, explicit, compiled):
    """Nothing is gathered, and the heads of results are divided too."""
    arrays = each.placed(each.mesh(explicit))
    function = jax.jit(each.run) if compiled else each.run
    o, lse = function(arrays)
    each.assert_right(o, lse)
    for result in (o, lse):
        assert tuple(result.sharding.spec)[:2] == (None, AXIS)
    assert transfers(jax, jax.jit(each.run), arrays) == []


def test_same_bits_as_on_one_device(jax, sharded):
    """Each device computes what an Attention of its heads does."""
    results = sharded.planned_rows(jax.jit(sharded.run)(sharded.placed(sharded.mesh())))
    one = fp.Attention(**sharded.options_of_one())
    one.plan(*sharded.inputs.plan_args())
    a = sharded.arrays
    for i in range(2):
        q, kv = slice(4 * i, 4 * i + 4), slice(2 * i, 2 * i + 2)
        expected = one.run(
            a["q"][:, q],
            a["k"][:, :, kv],
            a["v"][:, :, kv],
            block_table=a["block_table"],
            sinks=a["sinks"][q],
            return_lse=True,
        )
        for result, wanted in zip(results, sharded.planned_rows(expected)):
            assert result[:, q].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("divided", ["q", "k"])
@pytest.mark.parametrize("explicit", [False, True])
def test_heads_that_are_whole_are_cut(jax, sharded, divided, explicit):
    """One array says how the heads are divided; the others need no transfer either."""
    whole = {name: () for name in sharded.arrays if name != divided}
    arrays = sharded.placed(sharded.mesh(explicit), **whole)
    o, lse = jax.jit(sharded.run)(arrays)
    sharded.assert_right(o, lse)
    assert tuple(o.sharding.spec)[:2] == (None, AXIS)
    assert transfers(jax, jax.jit(sharded.run), arrays) == []


def test_results_that_are_wanted_otherwise(jax, sharded):
    """They say how heads are divided if no argument does, and may be sent anywhere."""
    mesh = sharded.mesh()
    for dimensions, specs in (((None, AXIS), WHOLE), ((AXIS,), {}), ((), {})):
        wanted = jax.sharding.NamedSharding(mesh, jax.P(*dimensions))
        results = jax.jit(sharded.run, out_shardings=wanted)(sharded.placed(mesh, **specs))
        sharded.assert_right(*results)
        assert all(result.sharding.spec == jax.P(*dimensions) for result in results)


def test_without_shardy(jax, sharded):
    """JAX's other partitioner asks for shardings in another way, and aborts if that fails."""
    mesh = sharded.mesh()
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        arrays = sharded.placed(mesh)
        sharded.assert_right(*jax.jit(sharded.run)(arrays))
        assert transfers(jax, jax.jit(sharded.run), arrays) == []
        q = sharded.arrays["q"]  # a constant has no sharding
        others = {name: array for name, array in arrays.items() if name != "q"}
        sharded.assert_right(*jax.jit(lambda others: sharded.run(others | {"q": q}))(others))
        with pytest.raises(jax.errors.JaxRuntimeError, match="k: expected no part but heads"):
            jax.jit(sharded.run)(sharded.placed(mesh, k=(AXIS,)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="q: expected heads divided"):
            jax.jit(sharded.run)(sharded.placed(mesh, **WHOLE))
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[2:4]), (AXIS,))
        with pytest.raises(jax.errors.JaxRuntimeError, match="attn: expected a program on its dev"):
            jax.jit(sharded.run)(sharded.placed(mesh))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_heads_that_are_divided_in_two_ways(jax, seed):
    case = Case(**BATCH, **HEADS, q_dtype="float32")
    sharded = Sharded(jax, case, jax.devices("cpu")[:4], seed)
    mesh = jax.sharding.Mesh(np.array(sharded.devices).reshape(2, 2), ("a", "b"))
    specs = {"q": (None, ("a", "b"))} | dict.fromkeys(("k", "v"), (None, None, ("b", "a")))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"k: expected heads divided as those of "):
        jax.jit(sharded.run)(sharded.placed(mesh, **specs))


def test_devices_of_a_mesh_in_any_order(jax, sharded):
    mesh = jax.sharding.Mesh(np.array(sharded.devices[::-1]).reshape(1, 2), ("one", AXIS))
    sharded.assert_right(*jax.jit(sharded.run)(sharded.placed(mesh)))
    sharded.assert_right(*sharded.under_shard_map(sharded.run, mesh)(sharded.arrays))


def test_four_devices_and_a_mesh_of_two_axes(jax, seed):
    case = Case(**BATCH, **HEADS, q_dtype="float32")
    sharded = Sharded(jax, case, jax.devices("cpu")[:4], seed)
    mesh = jax.sharding.Mesh(np.array(sharded.devices).reshape(2, 2), ("a", "b"))
    heads = ("a", "b")
    specs = {"q": (None, heads), "k": (None, None, heads), "v": (None, None, heads)}
    sharded.assert_right(*jax.jit(sharded.run)(sharded.placed(mesh, **specs)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="q: .* heads divided among 4 devices"):
        some = {"q": (None, "a"), "k": (None, None, "a"), "v": (None, None, "a")}
        jax.jit(sharded.run)(sharded.placed(mesh, **some))


def test_many_runs_of_512_tokens(jax, devices, seed):
    """Long enough for the runs of two devices to overlap."""
    case = Case((512,), (512,), 16, 4, q_dtype="float32", sinks=True)
    sharded = Sharded(jax, case, devices, seed)
    arrays = sharded.placed(sharded.mesh())
    function = jax.jit(sharded.run)
    mapped = sharded.under_shard_map(sharded.run, sharded.mesh())
    first = sharded.planned_rows(function(arrays))
    sharded.assert_right(*first)
    for _ in range(60):
        for results in (function(arrays), mapped(arrays)):
            pairs = zip(sharded.planned_rows(results), first)
            assert all(x.tobytes() == y.tobytes() for x, y in pairs)


def test_reductions_behind_it(jax, sharded):
    """Devices that wait for each other's results."""
    spec = jax.sharding.PartitionSpec()

    def total(arrays):
        return jax.lax.psum(sharded.run(arrays)[0].sum(axis=(1, 2)), AXIS)

    mapped = sharded.under_shard_map(total, sharded.mesh(), spec)
    by_jit = jax.jit(lambda arrays: sharded.run(arrays)[0].sum(axis=(1, 2)))
    arrays = sharded.placed(sharded.mesh())
    expected = sharded.expected[0][0].sum(axis=(1, 2))
    for _ in range(10):
        for sums in sharded.planned_rows((mapped(arrays), by_jit(arrays))):
            np.testing.assert_allclose(sums, expected, rtol=1e-3, atol=1e-3)


def test_one_function_serves_every_plan(jax, calls, devices, rng):
    attn = small(calls, devices)
    whole = fp.Attention(8, 4, 8, page_size=4, q_dtype="float32", device="cpu")
    q, _, caches = small_arrays(rng)
    traces = []

    @jax.jit
    def layer(q, k, v):
        traces.append(q)
        return calls.run(attn, q, k, v, block_table=TABLE)

    q = placed(jax, devices, q, None, AXIS)
    for indptr, lens in (([0, 1, 3], [5, 7]), ([0, 3], [6]), ([0, 2, 3], [8, 1])):
        plan = attn.plan(indptr, lens)
        assert plan.describe() == attn._attentions[1]._plan.describe()
        whole.plan(indptr, lens)
        expected = whole.run(np.asarray(q), *caches, block_table=TABLE)
        np.testing.assert_allclose(layer(q, *caches), expected, atol=1e-5)
    assert len(traces) == 1


def test_each_device_has_its_own_plan(jax, calls, devices, rng):
    attn = small(calls, devices)
    q, _, caches = small_arrays(rng)
    q = placed(jax, devices, q, None, AXIS)
    run = jax.jit(functools.partial(calls.run, attn, block_table=TABLE))
    before = np.asarray(run(q, *caches))
    attn._attentions[1].plan(INDPTR, [4, 7])  # which users can not do
    after = np.asarray(run(q, *caches))
    same = (before == after).all(axis=2)
    assert same[:, :4].all() and same[1:, 4:].all() and not same[0, 4:].any()


def test_handles_are_not_exchanged(jax, calls, devices, rng):
    """Of two handles with equal options, also after the first has gone."""
    q, _, caches = small_arrays(rng)
    q = placed(jax, devices, q, None, AXIS)

    def result(scale):
        attn = small(calls, devices, softmax_scale=scale)
        whole = fp.Attention(
            8, 4, 8, page_size=4, q_dtype="float32", device="cpu", softmax_scale=scale
        )
        whole.plan(INDPTR, LENS)
        layer = jax.jit(lambda q: calls.run(attn, q, *caches, block_table=TABLE))
        expected = whole.run(np.asarray(q), *caches, block_table=TABLE)
        np.testing.assert_allclose(layer(q), expected, atol=1e-5)

    for scale in (0.1, 0.5, 0.9):
        result(scale)


def test_a_handle_that_is_gone(jax, calls, devices, rng):
    q, _, caches = small_arrays(rng)
    q = placed(jax, devices, q, None, AXIS)
    handles = [small(calls, devices)]
    layer = jax.jit(lambda q: calls.run(handles[0], q, *caches, block_table=TABLE))
    layer(q).block_until_ready()
    handles.clear()
    gc.collect()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="attn: expected .* gone"):
        layer(q).block_until_ready()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_step_appends_and_attends(jax, calls, devices, rng, layout, explicit):
    """In place, and the caches are not gathered."""
    q, new, caches = small_arrays(rng)
    attn = small(calls, devices, kv_layout=layout)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,), axis_types=(kind,))
    cache_spec = jax.P(None, AXIS) if layout == "HND" else jax.P(None, None, AXIS)

    def put(array, spec):
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

    def arrays():
        tokens = [put(x, jax.P(None, AXIS)) for x in (q, *new)]
        return [*(put(x.copy(), cache_spec) for x in caches), *tokens]

    def pointers(arrays):
        return [x.data.unsafe_buffer_pointer() for y in arrays for x in y.addressable_shards]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache, q, k, v):
        k_cache, v_cache = calls.append_paged_kv(
            k, v, k_cache, v_cache, INDPTR, LENS, block_table=TABLE, kv_layout=layout
        )
        return calls.run(attn, q, k_cache, v_cache, block_table=TABLE), k_cache, v_cache

    whole = fp.Attention(8, 4, 8, page_size=4, q_dtype="float32", device="cpu", kv_layout=layout)
    whole.plan(INDPTR, LENS)
    expected = caches.copy()
    fp.append_paged_kv(*new, *expected, INDPTR, LENS, block_table=TABLE, kv_layout=layout)
    assert transfers(jax, step, *arrays()) == []
    given = arrays()
    before = pointers(given[:2])
    o, *written = step(*given)
    np.testing.assert_allclose(o, whole.run(q, *expected, block_table=TABLE), atol=1e-5)
    assert np.array_equal(written, expected)
    assert pointers(written) == before

    mapped = jax.shard_map(
        lambda k, v, a, b: calls.append_paged_kv(
            k, v, a, b, INDPTR, LENS, block_table=TABLE, kv_layout=layout
        ),
        mesh=mesh,
        in_specs=(jax.P(None, AXIS),) * 2 + (cache_spec,) * 2,
        out_specs=cache_spec,
    )
    k_cache, v_cache, _, k, v = arrays()
    assert np.array_equal(mapped(k, v, k_cache, v_cache), expected)


def test_caches_that_are_whole_on_each_device(jax, calls, devices, rng):
    _, new, caches = small_arrays(rng)
    arrays = [placed(jax, devices, x) for x in (*new, *caches)]
    written = jax.jit(lambda *x: calls.append_paged_kv(*x, INDPTR, LENS, block_table=TABLE))(
        *arrays
    )
    expected = caches.copy()
    fp.append_paged_kv(*new, *expected, INDPTR, LENS, block_table=TABLE)
    for cache, wanted in zip(written, expected):
        assert cache.sharding.is_fully_replicated
        assert np.array_equal(cache, wanted)


def test_shard_map_knows_that_results_differ(jax, sharded):
    """So it takes them as what a loop carries, and refuses them as what all devices have."""

    def layers(arrays):
        def layer(q, _):
            return sharded.run(arrays | {"q": q})[0], None

        return jax.lax.scan(layer, arrays["q"], None, length=2)[0]

    mesh = sharded.mesh()
    spec = jax.P(None, AXIS)
    actual = sharded.under_shard_map(layers, mesh, spec)(sharded.arrays)
    arrays = sharded.placed(mesh)
    o, _ = jax.jit(sharded.run)(arrays)
    second, _ = jax.jit(sharded.run)(arrays | {"q": o})
    np.testing.assert_array_equal(*sharded.planned_rows((actual, second)))
    with pytest.raises(ValueError, match="out_specs"):
        sharded.under_shard_map(sharded.run, mesh, jax.P())(sharded.arrays)


def test_vmap_runs_one_after_the_other(jax, calls, devices, rng):
    attn = small(calls, devices)
    q, _, caches = small_arrays(rng)
    run = jax.jit(lambda q: calls.run(attn, q, *caches, block_table=TABLE))
    queries = placed(jax, devices, np.stack([q, -q]), None, None, AXIS)
    expected = [run(placed(jax, devices, x, None, AXIS)) for x in (q, -q)]
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(queries), expected)


def test_handle(calls, devices):
    one = fp.Attention(4, 2, 8, q_dtype="float32", device="cpu", softcap=3.0, max_batch_size=2)
    attn = calls.on_devices(one, devices)
    assert attn.options == one.options
    assert attn.devices == tuple(devices)
    assert repr(attn).startswith("on_devices(Attention(num_qo_heads=4, ")
    planned = [inspect.signature(x.plan).parameters for x in (fp.Attention, type(attn))]
    assert list(planned[1]) == [name for name in planned[0] if name != "stream"]
