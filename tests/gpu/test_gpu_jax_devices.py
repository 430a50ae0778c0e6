# SPDX-License-Identifier: Apache-2.0
"""flashplan.jax in programs on two GPUs, which wait for each other's results."""

import functools

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from flashplan import _core
from sharded import AXIS, Sharded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_core.cuda_device_count() < 2, reason="needs two GPUs"),
]

HEADS = {"num_qo_heads": 16, "num_kv_heads": 4, "head_dim": 128}
CASES = [
    Case(**BATCH, **HEADS, sinks=True),
    Case((512,), (512,), **HEADS),
    Case((1,) * 8, (3000, 1, 64, 65, 130, 700, 900, 8), **HEADS, csr=True, kv_layout="HND"),
]
TRANSFERS = ("all-gather", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def current_device_stays():
    """Replaces the check of conftest.py: JAX leaves any GPU current after a program on several."""


def test_current_device_stays(jax, torch, seed):
    devices = jax.devices("gpu")[:2]
    for device in range(2):
        torch.cuda.set_device(device)
        sharded = Sharded(jax, CASES[0], devices, seed)
        sharded.attn.plan(*sharded.inputs.plan_args())
        assert torch.cuda.current_device() == device
    torch.cuda.set_device(0)


@pytest.fixture(params=CASES, ids=str)
def sharded(request, jax, seed):
    return Sharded(jax, request.param, jax.devices("gpu")[:2], seed)


@pytest.mark.parametrize("explicit", [False, True])
def test_equal_to_one_device(jax, sharded, explicit):
    """Under jit and under shard_map, and the cache is not gathered."""
    mesh = sharded.mesh(explicit)
    arrays = sharded.placed(mesh)
    run = jax.jit(sharded.run)
    mapped = sharded.under_shard_map(sharded.run, mesh)
    results = [run(arrays), mapped(arrays)]
    for o, lse in results:
        sharded.assert_right(o, lse)
        assert tuple(o.sharding.spec)[:2] == (None, AXIS)
    text = run.lower(arrays).compile().as_text()
    assert [name for name in TRANSFERS if name in text] == []
    # The same heads on the first GPU alone.
    one = fp.Attention(**sharded.options_of_one())
    one.plan(*sharded.inputs.plan_args())
    alone = jax.jit(lambda arrays: sharded.calls.run(one, **arrays, return_lse=True))
    specs = sharded.specs()
    for i in range(2):

        def part(array, spec, i=i):
            if AXIS not in spec:
                return array
            dimension = tuple(spec).index(AXIS)
            return np.split(array, 2, axis=dimension)[i]

        heads = {name: part(array, specs[name]) for name, array in sharded.arrays.items()}
        expected = sharded.planned_rows(alone(jax.device_put(heads, sharded.devices[0])))
        for result in results:
            for actual, wanted in zip(sharded.planned_rows(result), expected):
                assert np.split(actual, 2, axis=1)[i].tobytes() == wanted.tobytes()


def test_many_runs_with_a_reduction_behind(jax, sharded):
    """GPUs that wait for each other's results, and a plan before each step."""
    by_jit = jax.jit(lambda arrays: sharded.run(arrays)[0].astype("float32").sum(axis=1))
    by_psum = sharded.under_shard_map(
        lambda x: jax.lax.psum(sharded.run(x)[0].astype("float32").sum(axis=1), AXIS),
        sharded.mesh(),
        jax.P(),
    )
    arrays = sharded.placed(sharded.mesh())
    o, _ = sharded.planned_rows(jax.jit(sharded.run)(arrays))
    expected = o.astype(np.float32).sum(axis=1)
    for _ in range(60):
        sharded.attn.plan(*sharded.inputs.plan_args())
        for sums in sharded.planned_rows((by_jit(arrays), by_psum(arrays))):
            np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)


def test_a_step_appends_in_place(jax, seed):
    case = Case(**BATCH, **HEADS)
    sharded = Sharded(jax, case, jax.devices("gpu")[:2], seed)
    inputs = sharded.inputs
    arrays = sharded.placed(sharded.mesh())
    rows = inputs.qo_indptr[-1]
    new = np.random.default_rng(seed).standard_normal((2, rows, 4, 128)).astype("bfloat16")
    caches = np.stack([inputs.k, inputs.v])
    lens = (inputs.qo_indptr, inputs.kv_lens.astype(np.int32))
    fp.append_paged_kv(*new, *caches, *lens, block_table=inputs.block_table)
    whole = fp.Attention(**case.options())
    whole.plan(*inputs.plan_args())
    expected = whole.run(inputs.q[:rows], *caches, block_table=inputs.block_table)

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def step(k, v, k_cache, v_cache, q, indptr, kv_lens, table):
        k_cache, v_cache = sharded.calls.append_paged_kv(
            k, v, k_cache, v_cache, indptr, kv_lens, block_table=table
        )
        o = sharded.calls.run(sharded.attn, q, k_cache, v_cache, block_table=table)
        return o, k_cache, v_cache

    def put(array, *spec):
        sharding = jax.sharding.NamedSharding(sharded.mesh(), jax.P(*spec))
        return jax.device_put(array, sharding)

    given = [put(x, None, AXIS) for x in new] + [arrays["k"], arrays["v"], arrays["q"]]
    given += [put(x) for x in lens] + [arrays["block_table"]]
    pointers = [x.data.unsafe_buffer_pointer() for y in given[2:4] for x in y.addressable_shards]
    text = step.lower(*given).compile().as_text()
    assert [name for name in TRANSFERS if name in text] == []
    o, *written = step(*given)
    for cache, wanted in zip(written, caches):
        assert np.asarray(cache).tobytes() == wanted.tobytes()
    assert pointers == [
        x.data.unsafe_buffer_pointer() for y in written for x in y.addressable_shards
    ]
    o, expected = (np.asarray(x)[:rows].astype(np.float32) for x in (o, expected))
    np.testing.assert_allclose(o, expected, rtol=2e-2, atol=2e-2)
