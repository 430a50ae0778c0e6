# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch that are more than memory: with gradients, negated, without data."""

import functools

import numpy as np
import pytest

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import Torch, bits
from inputs import make_inputs
from solve import run_arguments


@pytest.fixture
def call(torch):
    """A valid call: (run() with its keyword arguments, [q, k, v])."""
    case = Case(**BATCH, q_dtype="float32")
    inputs = make_inputs(case, seed=0)
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, Torch(torch))
    return functools.partial(attn.run, **kwargs), args


def same(actual, expected):
    return np.array_equal(bits(actual), bits(expected))


def test_parameters_and_tensors_that_require_grad_under_no_grad(torch, call):
    run, [q, k, v] = call
    expected = run(q, k, v).numpy()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = run(torch.nn.Parameter(q.clone()), k.clone().requires_grad_(), v)
        assert type(o) is torch.Tensor
        assert not o.requires_grad
        assert same(o.numpy(), expected)


def calls_of_torch(torch):
    """Valid calls (tensors by name, function) of all functions that take tensors of floats."""
    x, lse = torch.ones(1, 1, 4), torch.zeros(1, 1)
    attn = fp.Attention(1, 1, 4, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 1], [1])
    state = {"o_a": x, "lse_a": lse, "o_b": x.clone(), "lse_b": lse.clone()}
    lens = torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 2, dtype=torch.int32)
    new = {"k": x, "v": x, "k_cache": torch.ones(1, 1, 1, 4), "v_cache": torch.ones(1, 1, 1, 4)}
    indptr = torch.arange(2, dtype=torch.int32)
    append = functools.partial(fp.append_paged_kv, indptr=indptr, kv_lens=lens, block_table=table)
    return [
        ({"q": x, "k": x, "v": x, "out": x.clone(), "lse": lse}, attn.run),
        (state | {"out": x.clone(), "lse": lse.clone()}, fp.merge_states),
        (new, append),
    ]


def test_gradients_are_refused(torch):
    """They would be zero in silence: nothing here has a backward pass."""
    for tensors, call in calls_of_torch(torch):
        call(**tensors)
        for name, tensor in tensors.items():
            for bad in (tensor.clone().requires_grad_(), torch.nn.Parameter(tensor)):
                with pytest.raises(ValueError, match=rf"^{name}: .*inference.*no_grad.*detach"):
                    call(**tensors | {name: bad})
                with torch.no_grad():
                    call(**tensors | {name: bad})
                call(**tensors | {name: bad.detach()})


def test_gradients_of_numbers_are_refused(torch):
    """Tensors without dimensions are taken as numbers: they, too, would have no gradient."""
    q = torch.ones(1, 1, 4)
    options = {"page_size": None, "q_dtype": "float32", "device": "cpu"}
    variant = fp.Variant("scaled", logits="return x * p;", scalars={"p": 1.0})
    plain, own = (fp.Attention(1, 1, 4, **options, variant=v) for v in (None, variant))
    for attn in (plain, own):
        attn.plan([0, 1], [1])
    calls = (
        ("k_scale", functools.partial(plain.run, q, q, q)),
        ("p", functools.partial(own.run, q, q, q)),
        ("scale", functools.partial(fp.rmsnorm, q)),
        ("temperature", functools.partial(fp.softmax, q[0])),
    )
    for name, call in calls:
        number = torch.tensor(2.0, requires_grad=True)
        with pytest.raises(ValueError, match=rf"^{name}: .*inference.*no_grad.*detach"):
            call(**{name: number})
        with torch.no_grad():
            expected = call(**{name: number})
        assert torch.equal(call(**{name: number.detach()}), expected)


def test_subclass(torch, call):
    class Tagged(torch.Tensor):
        pass

    run, [q, k, v] = call
    o = run(q.as_subclass(Tagged), k, v)
    assert isinstance(o, torch.Tensor)
    assert same(o.numpy(), run(q, k, v).numpy())


def test_negated_views_are_refused(torch):
    """x.conj().imag is a view whose memory holds the negated values."""
    attn = fp.Attention(2, 2, 1, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 3], [3])
    z = torch.complex(torch.randn(3, 2, 1), torch.randn(3, 2, 1))
    tensors = dict.fromkeys("qkv", z.imag)
    expected = attn.run(**tensors)
    for name in "qkv":
        for negated in (z.conj().imag, z[..., 0].conj().imag.unsqueeze(-1)):
            with pytest.raises(ValueError, match=f"^{name}: expected .*, got a negated view"):
                attn.run(**tensors | {name: negated})
        assert not torch.equal(attn.run(**tensors | {name: z.conj().imag.resolve_neg()}), expected)
    lse = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="^out: expected .*, got a negated view"):
        fp.merge_states(z.imag, lse, z.imag, lse, out=z.conj().imag)


def test_views_of_negated_views_are_refused(torch):
    """All but those of as_strided() have the strides by which they are recognised."""
    attn = fp.Attention(4, 4, 8, page_size=None, q_dtype="float32", device="cpu")
    attn.plan([0, 8], [8])
    z = torch.randn(8, 8, 8, dtype=torch.complex64).conj().imag
    views = [
        z[:, :4],
        z.transpose(0, 2)[:, :4],
        z.permute(2, 0, 1)[:, :4],
        z[:, 0].unsqueeze(1).expand(8, 4, 8),
        z[:1, :4].expand(8, 4, 8),
        z.reshape(8, 4, 16)[..., ::2],
        z.diagonal(dim1=0, dim2=1).t().unsqueeze(1).expand(8, 4, 8),
        z.detach()[:, 4:],
    ]
    ordinary = torch.randn(8, 4, 8)
    for view in views:
        assert view.is_neg() and view.shape == ordinary.shape
        with pytest.raises(ValueError, match="^q: expected .*, got a negated view"):
            attn.run(view, ordinary, ordinary)


def test_dtypes_may_be_given(torch):
    attn = fp.Attention(
        1, 1, 4, page_size=None, q_dtype=torch.bfloat16, o_dtype=torch.float32, device="cpu"
    )
    attn.plan([0, 1], [1])
    x = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    assert attn.run(x, x, x).dtype == torch.float32


def test_meta_tensor_is_refused(call):
    run, [q, k, v] = call
    with pytest.raises((TypeError, ValueError), match=r"^q: .*(storage|meta)"):
        run(q.to("meta"), k, v)


def test_fake_tensor_is_refused(torch, call):
    from torch._subclasses.fake_tensor import FakeTensorMode

    run, [q, k, v] = call
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(k)
    with pytest.raises((TypeError, ValueError), match=r"^k: .*(storage|fake)"):
        run(q, fake, v)


def test_sparse_tensor_is_refused(call):
    run, [q, k, v] = call
    with pytest.raises((TypeError, ValueError), match=r"^q: expected .+, got .+"):
        run(q.to_sparse(), k, v)
