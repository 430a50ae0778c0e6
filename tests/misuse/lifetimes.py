# SPDX-License-Identifier: Apache-2.0
"""Copies, pickles, cycles, and memory that must not grow."""

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import sys
import weakref

import numpy as np

import flashplan as fp
from misuse import note
from misuse.any_call import any_call
from misuse.arguments import changing_lengths, numbers, options, plan_lengths
from misuse.calls import Run, pick
from misuse.finding import Finding, Skip, kind
from misuse.tensors import array_interface, capsule, device_of_an_export, export, odd_array


@kind("copies")
def copies(rng):
    """A copy is refused, or works like the original and is independent of it."""
    call = Run(rng)
    way = pick(rng, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))
    what = pick(rng, call.attn, call.attn._plan, call.attn._plan.options)
    note(f"copying {type(what).__name__}")
    try:
        other = way(what)
    except TypeError as error:
        if type(what).__name__ not in str(error) and "flashplan" not in str(error):
            raise Finding(f"a copy was refused without a reason: {error}") from error
        return
    if isinstance(other, fp.Attention):
        other.plan(np.array([0], np.int32), np.array([], np.int32))
    if not call.judge({}, []):
        raise Finding("an object cannot be used after it was copied")


class Array(np.ndarray):
    pass


@kind("cycles")
def cycles(rng):
    """The garbage collector frees an object that only refers to itself."""
    call = Run(rng)
    size = call.attn.workspace_bytes + 512
    memory = np.zeros(size, np.uint8).view(Array)
    attn = fp.Attention(**call.case.options(), workspace=memory)
    way = pick(rng, "the workspace", "an attribute", "a bound method", "the plan")
    note(f"a cycle through {way}")
    if way == "the workspace":
        memory.attn = attn
    elif way == "an attribute":
        attn.me = attn
    elif way == "a bound method":
        attn.method = attn.run
    else:
        memory.plan = attn._plan
    gone = weakref.ref(memory)
    del memory, attn
    gc.collect()
    if gone() is not None:
        raise Finding(f"a cycle through {way} is never collected")


@kind("types")
def types(rng):
    """The library does not keep the classes of arguments alive."""
    call = any_call(rng)
    name = pick(rng, *(n for n in call.tensors if n != "workspace"))
    mine = type("Mine", (np.ndarray,), {})
    note(f"{type(call).__name__}: {name} of a class of the caller's")
    call.judge({name: call.array(name).view(mine)}, [name])
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    if gone() is not None:
        raise Finding("the class of an argument is kept for ever")


class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]  # fmt: skip


def memory_in_use():
    """(bytes of malloc in use, blocks of Python in use)"""
    gc.collect()
    info = _mallinfo()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


_libc = ctypes.CDLL(None)
_mallinfo = getattr(_libc, "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = Allocated

REPEATED = (options, plan_lengths, changing_lengths, numbers, capsule, array_interface, odd_array,
            export, device_of_an_export)  # fmt: skip
TIMES, WINDOWS = 60, 15


@kind("growth", weight=0.3)
def growth(rng):
    """The same call again and again, refused or not, needs no more memory."""
    if _mallinfo is None or os.environ.get("ASAN_OPTIONS"):
        raise Skip
    body = pick(rng, *REPEATED)
    seed = int(rng.integers(2**31))

    def repeat(times):
        for _ in range(times):
            with contextlib.suppress(Finding, Skip):
                body(np.random.default_rng(seed))

    note(f"growth of {body.__name__} with seed {seed}")
    for _ in range(WINDOWS):  # what leaks does so in each of them; caches are full sooner or later
        before = memory_in_use()
        repeat(TIMES)
        num_bytes, num_blocks = (b - a for a, b in zip(before, memory_in_use()))
        if num_bytes < 12 * TIMES and num_blocks < 0.9 * TIMES:
            return
    raise Finding(
        f"memory grows in {body.__name__}\n{num_bytes} bytes and {num_blocks} blocks of Python in "
        f"the last {TIMES} calls"
    )
