# SPDX-License-Identifier: Apache-2.0
"""Records calls as events in profiles of PyTorch, unless FLASHPLAN_PROFILE is unset, empty or 0."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

_IS_WANTED = os.environ.get("FLASHPLAN_PROFILE", "0") not in ("", "0")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def event(name: str) -> Callable[[_Function], _Function]:
    """Decorates a function: its calls are events `name` of torch.profiler.

    Within torch.autograd.profiler.emit_nvtx() the calls are ranges of NVTX, too. If
    FLASHPLAN_PROFILE is unset, empty or 0, the function stays as it is, so the decorator costs
    nothing.
    """

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is None:  # nobody can be profiling with it
                return function(*args, **kwargs)
            with torch.autograd.profiler.record_function(name):
                return function(*args, **kwargs)

        return cast("_Function", call)

    return decorated if _IS_WANTED else lambda function: function
