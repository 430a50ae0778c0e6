# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch of every sort. The C exchange API hands out their memory without a check."""

import functools

from frameworks import Torch
from misuse import note
from misuse.any_call import any_call
from misuse.calls import pick
from misuse.finding import Skip, kind


def fake(torch, tensor):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def without_storage(torch, tensor):
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def negated(torch, tensor):
    """x.conj().imag, a view whose memory holds the negated values."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def quantized(torch, tensor):
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


# For each tensor: what it is, how to make it, and whether it must be refused.
WAYS = {
    "plain": (lambda torch, x: x, False),
    "a subclass": (lambda torch, x: x.as_subclass(subclass(torch)), False),
    "a parameter": (lambda torch, x: torch.nn.Parameter(x), True),
    "negated": (negated, False),
    "with a gradient": (lambda torch, x: x.detach().requires_grad_() * 1, True),
    "fake": (fake, True),
    "meta": (lambda torch, x: x.to("meta"), True),
    "sparse": (lambda torch, x: x.to_sparse(), True),
    "opaque": (lambda torch, x: x.float().to_mkldnn(), True),
    "nested": (lambda torch, x: torch.nested.nested_tensor([x]), True),
    "functional": (lambda torch, x: torch._to_functional_tensor(x.clone()), False),
    "without storage": (without_storage, True),
    "quantized": (quantized, True),
    "of rank 0": (lambda torch, x: x.reshape(-1)[0], True),
    "double": (lambda torch, x: x.double(), True),
    "complex": (lambda torch, x: x.to(torch.complex64), True),
    "boolean": (lambda torch, x: x.bool(), True),
}
READ_ONLY_WAYS = ("a parameter", "negated", "with a gradient", "functional")


@functools.cache
def subclass(torch):
    return type("Mine", (torch.Tensor,), {})


@kind("torch", weight=2, needs="torch")
def torch_tensor(rng):
    import torch

    call = any_call(rng)
    name = pick(rng, *(n for n in call.tensors if n != "workspace"))
    array = call.array(name)
    way = pick(rng, *WAYS)
    make, must_refuse = WAYS[way]
    if way == "of rank 0" and name in call.parameters:
        raise Skip  # a number
    if way in READ_ONLY_WAYS and name in call.written:
        raise Skip  # a copy: what is written is not where it is looked for
    try:
        tensor = make(torch, Torch(torch).tensor(array))
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        raise Skip from None  # PyTorch does not have it in this dtype
    note(f"{type(call).__name__}: {name} is a tensor of torch, {way}, {array.dtype}")
    call.judge({name: tensor}, [name], must_refuse and array.size > 0)
