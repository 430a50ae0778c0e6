# SPDX-License-Identifier: Apache-2.0
"""Two arguments of one call in the same memory."""

import numpy as np

import flashplan as fp
from misuse import note
from misuse.any_call import any_call, any_writing_call
from misuse.calls import MergeStack, Run, pick
from misuse.finding import Finding, Skip, kind
from misuse.memory import Pages, Placed, extent, view_at


def elements(array):
    """Addresses of all elements."""
    offsets = sum(np.ix_(*(np.arange(n) * s for n, s in zip(array.shape, array.strides))))
    return array.ctypes.data + np.ravel(offsets)


def share_bytes(a, b):
    if a.size == 0 or b.size == 0:
        return False
    of_a, of_b = (np.ravel(elements(x)[:, None] + np.arange(x.itemsize)) for x in (a, b))
    first = min(of_a.min(), of_b.min())
    is_touched = np.zeros(max(of_a.max(), of_b.max()) - first + 1, bool)
    is_touched[of_a - first] = True
    return bool(is_touched[of_b - first].any())


def is_allowed(call, name, other):
    """Some outputs may lie exactly as an input does."""
    if (name, other) not in call.in_place:
        return False
    output, given = call.array(name), call.array(other)
    inputs = given if isinstance(call, MergeStack) else [given]
    return any(lies_as(output, one) for one in inputs)


def lies_as(a, b):
    strides = [(s, t) for n, s, t in zip(a.shape, a.strides, b.strides) if n > 1]
    return a.ctypes.data == b.ctypes.data and all(s == t for s, t in strides)


@kind("aliasing", weight=6)
def aliasing(rng):
    """A written argument over another one: exactly, in part, by one element, or in its gaps."""
    call = any_writing_call(rng)
    written = [n for n in call.tensors if n in (*call.written, "workspace")]
    name = pick(rng, *written)
    other = pick(rng, *(n for n in call.tensors if n != name))
    a, b = call.array(name), call.array(other)
    if a.size == 0 or b.size == 0:
        raise Skip
    bytes_a = extent(a.shape, a.strides, a.itemsize)
    bytes_b = extent(b.shape, b.strides, b.itemsize)
    item = max(a.itemsize, b.itemsize)
    align = 256 if "workspace" in (name, other) else item
    # Where b begins, from a's beginning: from wholly before to wholly behind.
    places = [0, bytes_a - b.itemsize, a.itemsize - bytes_b, bytes_a, -bytes_b]
    places += [int(rng.integers(-bytes_b, bytes_a + 1)) for _ in range(4)]
    offset = pick(rng, *places) // item * item
    base = -(-(bytes_b + align) // 256) * 256
    pages = Pages(base + bytes_a + bytes_b + 512)
    if name == "workspace" or other != "workspace":
        at_a, at_b = base, base + offset
    else:
        at_a, at_b = base - offset, base
    moved_a = view_at(pages, at_a, a.shape, a.strides, a.dtype)
    moved_b = view_at(pages, at_b, b.shape, b.strides, b.dtype)
    moved_a[...] = a
    moved_b[...] = b
    call.tensors[name], call.tensors[other] = Placed(moved_a, pages), Placed(moved_b, pages)
    overlap = share_bytes(moved_a, moved_b) and not is_allowed(call, name, other)
    share = "share" if overlap else "share no"
    note(f"{type(call).__name__}: {name} over {other} at {offset} of {bytes_a}; they {share} bytes")
    if "workspace" in (name, other):
        call.attn = fp.Attention(**call.case.options(), workspace=call.array("workspace"))
        call.attn.plan(*call.inputs.plan_args())
    call.judge({}, [name, other], must_refuse=overlap)


@kind("overlapping outputs", weight=2)
def overlapping_outputs(rng):
    """An output whose own elements overlap, by NumPy strides."""
    call = any_writing_call(rng)
    name = pick(rng, *call.written)
    array = call.array(name)
    wide = [d for d in range(array.ndim - 1) if array.shape[d] > 1]
    if not wide or array.size == 0:
        raise Skip
    strides = list(array.strides)
    for d in wide:
        if rng.integers(2):
            strides[d] = array.itemsize * int(rng.integers(1, 2 * array.shape[-1] + 1))
    num_bytes = extent(array.shape, strides, array.itemsize)
    pages = Pages(num_bytes)
    moved = view_at(pages, 0, array.shape, strides, array.dtype)
    overlap = len(np.unique(elements(moved))) < array.size
    if not overlap:
        moved[...] = array
    call.tensors[name] = Placed(moved, pages)
    note(f"{type(call).__name__}: {name} of shape {array.shape} with strides {strides}")
    call.judge({}, [name], must_refuse=overlap)


@kind("same object")
def same_object(rng):
    """The same array as two arguments."""
    call = any_call(rng)
    name, other = (pick(rng, *(n for n in call.tensors if n != "workspace")) for _ in range(2))
    if name == other:
        raise Skip
    a, b = call.array(name), call.array(other)
    note(f"{type(call).__name__}: {name} is {other}")
    compatible = a.dtype == b.dtype and a.ndim == b.ndim
    written = name in call.written or other in call.written
    if not written and compatible:
        call.verify = lambda: None  # reads other values
        call.written_part = call.array  # and may write more rows
    if call.in_place and written:
        call.verify = lambda: None  # an output over an input is allowed
        call.written = {*call.written, *(i for _, i in call.in_place)} & call.tensors.keys()
        call.judge({name: b}, [name, other])
        return
    call.judge({name: b}, [name, other], must_refuse=written and a.size > 0 and b.size > 0)


@kind("one workspace")
def one_workspace(rng):
    """Objects that take turns with one workspace."""
    call = Run(rng)
    options = call.case.options()
    attn = fp.Attention(**options)
    memory = Pages(attn.workspace_bytes + 512)
    skip = -memory.address % 256
    workspace = memory.bytes[skip : skip + attn.workspace_bytes]
    first, second = (fp.Attention(**options, workspace=workspace) for _ in range(2))
    note("two objects with one workspace take turns")
    for call.attn in (first, second, first, second):
        call.attn.plan(*call.inputs.plan_args())
        call.tensors.pop("workspace", None)
        if not call.judge({}, ["workspace"]):
            raise Finding("a second object with the workspace was refused")
