# SPDX-License-Identifier: Apache-2.0
"""Numbers that stand for `Attention` objects in PyTorch's operators and XLA's calls.

These take no Python objects. `AttentionOnDevices` has such a number, too.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

_handles = itertools.count()
_attentions: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(attn: Any) -> int:
    """A number for `attn`, which it does not keep alive."""
    handle = next(_handles)
    _attentions[handle] = attn
    return handle


def attention_of(handle: int) -> Any:
    """The object that has this handle; RuntimeError once it is gone."""
    attn = _attentions.get(handle)
    if attn is None:
        raise RuntimeError("attn: expected an Attention of this process, got one that is gone")
    return attn
