# SPDX-License-Identifier: Apache-2.0
"""Numbers that stand for Python objects in PyTorch's operators and XLA's calls.

Operators and calls take no Python objects, so each `Attention`, `AttentionOnDevices` and `Rope` has
a number, by which they find it.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

_handles = itertools.count()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(named: Any) -> int:
    """A number that stands for an object, and does not keep it alive."""
    handle = next(_handles)
    _objects[handle] = named
    return handle


def attention_of(handle: int) -> Any:
    """The object with this handle. Raises RuntimeError if the object has been deleted."""
    attn = _objects.get(handle)
    if attn is None:
        raise RuntimeError("attn: expected an Attention of this process, got one that is gone")
    return attn


def rope_of(handle: int) -> Any:
    """The `Rope` with this handle. Raises RuntimeError if it has been deleted."""
    rope = _objects.get(handle)
    if rope is None:
        raise RuntimeError("rope: expected a Rope of this process, got one that is gone")
    return rope
