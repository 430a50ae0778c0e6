# SPDX-License-Identifier: Apache-2.0
"""What flashplan.jax refuses in programs on several devices, and with which words."""

import functools
import re

import numpy as np
import pytest

import flashplan as fp
from sharded import AXIS, CASE, INDPTR, LENS, TABLE, WHOLE, Sharded, placed, small, small_arrays


@pytest.fixture
def sharded(jax, devices, seed):
    return Sharded(jax, CASE, devices, seed)


DIVIDED_OTHERWISE = [
    ({"q": (AXIS,)}, r"q: expected no part but heads on each device, got P.*'heads'"),
    ({"q": (None, None, AXIS)}, "q: expected no part but heads"),
    ({"k": (AXIS,)}, "k: expected no part but heads"),
    ({"v": (None, AXIS)}, "v: expected no part but heads"),
    ({"v": (None, None, None, AXIS)}, "v: expected no part but heads"),
    ({"block_table": (AXIS,)}, "block_table: expected the whole array on each device, got P"),
    ({"block_table": (None, AXIS)}, "block_table: expected the whole array"),
]


@pytest.mark.parametrize("specs, text", DIVIDED_OTHERWISE, ids=lambda x: str(x)[:30])
def test_other_shardings_are_refused(jax, sharded, specs, text):
    """When the program is compiled; by axes of the kind Explicit already when it is traced."""
    table = sharded.arrays["block_table"]
    sharded.arrays["block_table"] = np.tile(table, (2, 2))  # of even numbers of rows and columns
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.jit(sharded.run).lower(sharded.placed(sharded.mesh(), **specs)).compile()
    with pytest.raises(ValueError, match=f"^{text}"):
        jax.jit(sharded.run).trace(sharded.placed(sharded.mesh(explicit=True), **specs))


def test_heads_that_are_not_divided_are_refused(jax, sharded):
    text = "q: expected heads divided among 2 devices"
    for explicit in (False, True):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.jit(sharded.run)(sharded.placed(sharded.mesh(explicit), **WHOLE))


def test_other_meshes_are_refused(jax, sharded):
    four = jax.devices("cpu")[:4]
    one = {name: jax.device_put(x, four[1]) for name, x in sharded.arrays.items()}

    def refused(text, function, *args):
        with pytest.raises(ValueError, match=text):
            function(*args)

    text = "attn: expected a program on its 2 devices, got one on "
    refused(text + "1", jax.jit(sharded.run), one)
    refused(text + "1", sharded.run, one)
    mesh = jax.sharding.Mesh(np.array(four), (AXIS,))
    refused(text + "4", jax.jit(sharded.run), sharded.placed(mesh))
    refused(text + "4", sharded.under_shard_map(sharded.run, mesh), sharded.arrays)
    text = "attn: expected a program on its devices .*0, .*1, got .*2, .*3"
    mesh = jax.sharding.Mesh(np.array(four[2:]), (AXIS,))
    refused(text, jax.jit(sharded.run), sharded.placed(mesh))
    refused(text, sharded.under_shard_map(sharded.run, mesh), sharded.arrays)
    mesh = jax.sharding.Mesh(np.array(four[:2]).reshape(2, 1), (AXIS, "other"))
    mapped = jax.shard_map(
        sharded.run,
        mesh=mesh,
        in_specs=(sharded.specs(),),
        out_specs=jax.P(None, AXIS),
        axis_names={AXIS},
    )
    refused(r"shard_map: expected all axes .*, got \('heads',\)", jax.jit(mapped), sharded.arrays)


def test_appends_under_a_shard_map_of_some_axes_are_refused(jax, calls, devices, rng):
    _, new, caches = small_arrays(rng)
    mapped = jax.shard_map(
        lambda *arrays: calls.append_paged_kv(*arrays, INDPTR, LENS, block_table=TABLE),
        mesh=jax.sharding.Mesh(np.array(devices).reshape(2, 1), (AXIS, "other")),
        in_specs=(jax.P(None, AXIS),) * 2 + (jax.P(None, None, AXIS),) * 2,
        out_specs=jax.P(None, None, AXIS),
        axis_names={AXIS},
    )
    with pytest.raises(ValueError, match="shard_map: expected all axes of the mesh"):
        jax.jit(mapped)(*new, *caches)


def test_one_attention_is_for_one_device(jax, calls, sharded):
    """Two devices would use its workspace at the same time."""
    text = (
        r"attn: expected an Attention for each device \(flashplan\.jax\.on_devices\) .* 2 devices"
    )
    mesh = sharded.mesh()
    one = fp.Attention(**sharded.options_of_one())
    one.plan(*sharded.inputs.plan_args())
    with pytest.raises(ValueError, match=text):
        mapped = sharded.under_shard_map(lambda x: calls.run(one, **x), mesh)
        mapped(sharded.arrays)
    whole = fp.Attention(**CASE.options())
    whole.plan(*sharded.inputs.plan_args())
    with pytest.raises(ValueError, match=text):
        jax.jit(lambda x: calls.run(whole, **x))(sharded.placed(mesh))
    second = {name: jax.device_put(x, sharded.devices[1]) for name, x in sharded.arrays.items()}
    run = jax.jit(lambda x: calls.run(whole, **x, return_lse=True))
    sharded.assert_right(*run(second))


def test_shapes_are_those_of_all_devices(jax, calls, sharded):
    arrays = sharded.arrays

    def refused(text, **others):
        with pytest.raises(ValueError, match=text):
            jax.jit(sharded.run).trace(arrays | others)

    refused(r"^q: expected shape \[any, 8, any\], got ", q=arrays["q"][:, :4])
    refused(r"^k: expected 4 heads in dimension 2, got shape ", k=arrays["k"][:, :, :2])
    refused(r"^v: expected 4 heads in dimension 2, got shape ", v=arrays["v"][0, 0])
    refused(r"^sinks: expected 8 heads in dimension 0, got shape \[4\]", sinks=arrays["sinks"][:4])
    refused(r"^k_scale: expected 4 heads .*, got shape \[2\]", k_scale=np.ones(2, np.float32))
    mapped = sharded.under_shard_map(sharded.run, sharded.mesh())
    with pytest.raises(ValueError, match=r"^q: expected shape \[any, 4, any\], got "):
        mapped(arrays | {"q": arrays["q"][:, :4]})


def test_appended_tokens_have_the_heads_of_the_caches(calls, rng):
    _, (k, v), (k_cache, v_cache) = small_arrays(rng)

    def refused(text, *arrays):
        with pytest.raises(ValueError, match=text):
            calls.append_paged_kv(*arrays, INDPTR, LENS, block_table=TABLE)

    refused(r"^k: expected shape \[any, any, any\], got \[4, 8\]", k[0], v, k_cache, v_cache)
    refused(r"^v: expected shape \[any, 4, any\], got ", k, v[:, :2], k_cache, v_cache)
    text = r"expected shape \[any, any, 4, any\], got "
    refused(f"^k_cache: {text}", k, v, k_cache[:, :, :2], v_cache)
    refused(f"^v_cache: {text}", k, v, k_cache, v_cache[0])


def test_appends_that_divide_pages_are_refused(jax, calls, devices, rng):
    _, new, caches = small_arrays(rng)
    cache = placed(jax, devices, caches[0], None, AXIS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="k_cache: expected no part but heads"):
        jax.jit(lambda x: calls.append_paged_kv(*new, x, x, INDPTR, LENS, block_table=TABLE))(cache)


def test_a_call_on_a_device_without_a_plan(jax, calls, devices, rng):
    """Which only a call that is not of this package can make."""
    attn = small(calls, devices)
    third = jax.devices("cpu")[2]
    q, _, caches = small_arrays(rng)
    arrays = [jax.device_put(x, third) for x in (q[:, :4], *(c[:, :, :2] for c in caches), TABLE)]
    call = jax.ffi.ffi_call("flashplan_run", [jax.ShapeDtypeStruct((3, 4, 8), np.float32)])
    attributes = {"attention": np.int64(attn._handle), "given": np.int64(1)}
    scales = {f"{name}_scale": np.float32(1) for name in "qkv"}
    text = r"attn: expected a call on a device with a number of \[0, 1\], got 2"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(*arrays, **attributes, **scales))


def test_gradients_are_refused(jax, sharded):
    arrays = sharded.placed(sharded.mesh())
    with pytest.raises(fp.UnsupportedError, match=r"^flashplan\.jax\.run: expected no gradient"):
        jax.grad(lambda q: sharded.run(arrays | {"q": q})[0].sum())(arrays["q"])


def test_a_plan_that_is_refused_changes_nothing(jax, calls, devices, rng):
    attn = small(calls, devices)
    q, _, caches = small_arrays(rng)
    q = placed(jax, devices, q, None, AXIS)
    run = jax.jit(functools.partial(calls.run, attn, block_table=TABLE))
    before = np.asarray(run(q, *caches))
    with pytest.raises(ValueError, match=re.escape("kv_lens[1]: expected")):
        attn.plan(INDPTR, [5, -1])
    np.testing.assert_array_equal(run(q, *caches), before)


def test_wrong_devices_are_refused(jax, calls, devices, monkeypatch):
    one = fp.Attention(4, 2, 8, q_dtype="float32", device="cpu")

    def refused(kind, text, *args):
        with pytest.raises(kind, match=text):
            calls.on_devices(*args)

    refused(TypeError, "^attn: expected an Attention, got dict", {}, devices)
    refused(ValueError, "^devices: expected one or more devices of JAX, got none", one, [])
    refused(
        TypeError, r"^devices\[1\]: expected a device of JAX, got str", one, [devices[0], "cpu"]
    )
    refused(ValueError, r"^devices\[1\]: expected each device once, got ", one, [devices[0]] * 2)
    variant = fp.Attention(
        4, 2, 8, page_size=None, q_dtype="float32", device="cpu", variant=fp.variants.alibi
    )
    with pytest.raises(fp.UnsupportedError, match="^attn: expected a variant without tensors"):
        attn = calls.on_devices(variant, devices)
        calls.run(attn, *np.ones((3, 1, 8, 8), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        text = r"^devices\[0\]: expected a device of this process, got "
        refused(ValueError, text, one, devices)
    with monkeypatch.context() as patch:
        patch.setattr("flashplan.jax_devices.to_cuda_device", lambda device: device.id)
        text = r"^devices\[0\]: expected a CPU, as attn is for, got "
        refused(ValueError, text, one, devices)
