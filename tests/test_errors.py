# SPDX-License-Identifier: Apache-2.0
"""Bad input: each with its own message, nothing written, everything usable afterwards."""

import collections
import re
import sys
import threading

import numpy as np
import pytest

import flashplan as fp
from bad_inputs import BAD, GROUPS
from case import Case
from frameworks import NumPy
from inputs import make_inputs
from scene import Scene, zeros
from solve import run_arguments


def message(bad):
    _, exception, _, call = bad
    with pytest.raises(exception) as caught:
        call(Scene())
    return str(caught.value)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[0].replace(" ", "_"))
def test_bad_input_is_refused(bad):
    _, exception, argument, call = bad
    scene = Scene()
    with pytest.raises(exception) as caught:
        call(scene)
    assert type(caught.value) is exception
    assert re.match(rf"{argument}(?!\w).*: expected .+, got .+", str(caught.value))
    scene.assert_unharmed()


def test_messages_differ():
    """Two mistakes never read alike."""
    assert len(BAD) >= 60
    for group in GROUPS:
        times = collections.Counter(message(bad) for bad in group)
        assert [text for text, count in times.items() if count > 1] == []


def test_scene_is_valid():
    """Without a change no call of the scene is refused."""
    scene = Scene()
    scene.attention()
    scene.plan()
    scene.plan_ragged()
    scene.run()
    scene.run_csr()
    scene.run_ragged()
    scene.plan_masked()
    scene.run_masked()
    scene.append()
    scene.append_csr()
    scene.append_slots()
    scene.check()
    scene.check_ragged()
    scene.rope_append()
    scene.merge()
    scene.merge_stacked(zeros(3, 4, 4, 8), zeros(3, 4, 4))
    scene.rmsnorm()
    scene.layernorm()
    scene.add_rmsnorm()
    scene.silu()
    scene.rope()
    scene.sample()
    scene.softmax()
    scene.verify()
    scene.penalties()


def test_limit_of_dimensions_is_named_where_it_is_exceeded():
    with pytest.raises(ValueError, match=r"^logits: expected shape \(\*, >=1\), got \(8\)$"):
        fp.sample(zeros(8))
    many = np.broadcast_to(zeros(1, 1), (2**31, 1))
    with pytest.raises(
        ValueError, match=r"^logits: .* \(<=2147483647, >=1\), got \(2147483648, 1\)$"
    ):
        fp.softmax(many, out=zeros(1, 1))


@pytest.mark.parametrize(
    "name, call",
    [
        ("temperature", lambda s: s.sample(temperature=np.ones(4))),
        ("logit_bias", lambda s: s.sample(logit_bias=np.ones(8))),
        ("lse", lambda s: s.run(lse=np.ones((4, 4)))),
        ("k_scale", lambda s: s.run(k_scale=np.ones(2))),
    ],
)
def test_dtype_of_float32_arguments_is_named(name, call):
    """NumPy's default is float64."""
    with pytest.raises(TypeError, match=f"^{name}: expected dtype float32, got float64$"):
        call(Scene())


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_the_planned_dtype_is_named(name, dtype):
    """Also where what came is none that any plan has."""
    scene = Scene()
    wrong = np.zeros((4, 4, 8), dtype)
    text = f"^{name}: expected dtype float32 \\(as planned\\), got {np.dtype(dtype)}$"
    with pytest.raises(TypeError, match=text):
        scene.run(**{name: wrong})


def test_tensors_of_run_are_counted():
    """The Python functions pass a tuple to the core."""
    plan = Scene().attn._plan
    for tensors in ((), (None,) * 14):
        with pytest.raises(TypeError, match=f"^tensors: expected 18, got {len(tensors)}$"):
            plan.run(tensors, None, False, None)


def test_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="sliding_window"):
        Scene().attention(sliding_window=3)


def things_that_are_no_tensor(torch):
    torn = [torch.ones(2, 8), torch.ones(3, 8)]
    yield from (5, "text", object(), np.ndarray, np.float32, torch.Tensor)
    yield torch.nested.nested_tensor(torn)  # has no shape
    yield torch.nested.nested_tensor(torn, layout=torch.jagged)  # has one with a symbol


def test_shapes_of_new_outputs_come_from_tensors(torch):
    """Where an output is made before the core looks at the input, the error names the input."""
    scene = Scene()
    o, lse = zeros(2, 3, 1, 8), zeros(2, 3, 1)
    calls = {
        "q": lambda x: scene.run_ragged(q=x, out=None, lse=None),
        "x": lambda x: fp.rmsnorm(x, zeros(8)),
        "logits": fp.sample,
        "o_a": lambda x: fp.merge_states(x, lse),
        "lse_a": lambda x: fp.merge_states(o, x),
    }
    for thing in things_that_are_no_tensor(torch):
        for name, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got "):
                call(thing)


def test_numbers_are_read_once():
    """A number's own truth is not asked for."""

    class Number(float):
        def __bool__(self):
            raise AssertionError

    with pytest.raises(ValueError, match="^softcap: expected 0 or a normal float32 > 0, got 1e-60"):
        fp.Attention(1, 1, 8, device="cpu", softcap=Number(1e-60))


def test_exception_types():
    assert issubclass(fp.UnsupportedError, NotImplementedError)
    assert issubclass(fp.CudaError, RuntimeError)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"q_dtype": "int32"}, "q_dtype: "),
        ({"q_dtype": "float8_e4m3fn", "kv_dtype": "float16"}, "kv_dtype: "),
        ({"device": "cuda:0"}, "(device|q_dtype): "),
        ({"head_dim": 4096}, ""),
        ({"head_dim": 4097}, "head_dim_qk: expected <= 4096, got 4097"),
        ({"head_dim": (8, 5000)}, "head_dim_vo: expected <= 4096, got 5000"),
    ],
)
def test_is_supported_gives_the_reason(change, reason):
    supported, why = fp.is_supported(**Scene().options | change)
    assert supported is (reason == "")
    assert re.match(reason, why)
    assert bool(why) == bool(reason)


def test_a_number_just_out_of_range_is_not_rounded_into_it():
    with pytest.raises(
        ValueError, match=r"^top_p: expected a number in \(0, 1\], got 1\.00000012$"
    ):
        fp.sample(np.zeros((1, 8), np.float32), top_p=1.0000001)


def test_errors_of_python_name_the_class_that_users_have():
    attn = fp.Attention(**Scene().options)
    with pytest.raises(TypeError, match=r"^Attention\.run\(\) missing"):
        attn.run(1)
    with pytest.raises(TypeError, match=r"^Attention\.bind\(\) takes"):
        attn.bind(1, 2, 3, 4, 5)


def test_two_threads_in_one_attention_are_refused():
    case = Case((256,), (10000,), q_dtype="float32", num_qo_heads=8, page_size=None, head_dim=128)
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    expected = attn.run(*args, **kwargs)
    results, errors = [], []

    def work():
        while not results:
            try:
                results.append(attn.run(*args, **kwargs))
            except RuntimeError as error:
                errors.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    # Plan until one thread has been refused. If both went on, they could refuse each other in turn
    # for minutes on a busy machine.
    while worker.is_alive() and not errors:
        try:
            attn.plan(*inputs.plan_args())
        except RuntimeError as error:
            errors.append(str(error))
    worker.join()
    assert errors
    assert "one thread at a time" in errors[0]
    attn.plan(*inputs.plan_args())
    assert np.array_equal(results[0], expected)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.complex64])
def test_refused_tensors_are_released(dtype):
    scene = Scene()
    tensors = {name: zeros(4, 4, 8, dtype=dtype) for name in ("q", "k", "v", "out")}

    def references():
        return {name: sys.getrefcount(tensors[name]) for name in tensors}

    before = references()
    for name in tensors:
        for _ in range(10):
            with pytest.raises(TypeError):
                scene.run(**{name: tensors[name]})
    assert references() == before
