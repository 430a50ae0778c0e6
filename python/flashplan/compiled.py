# SPDX-License-Identifier: Apache-2.0
"""Marks functions that torch.compile can not trace, with the reason that it then gives."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(instead: str) -> Callable[[_Function], _Function]:
    """Decorates a function that reads the memory of tensors: traced tensors have none.

    In a compiled function it breaks the graph; with fullgraph=True, the error of PyTorch gives
    `instead` as the reason. Like torch.compiler.disable() it sets two attributes of the function,
    but it needs no import of PyTorch, and no time in calls.
    """

    def decorated(function: _Function) -> _Function:
        marked = cast("Any", function)
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = f"flashplan: in a compiled function {instead}"
        return function

    return decorated
