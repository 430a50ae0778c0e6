# SPDX-License-Identifier: Apache-2.0
"""The plugin for SGLang: `--attention-backend flashplan` lets SGLang attend with flashplan.

SGLang finds `register` by the entry point `sglang.srt.plugins` of this package and calls it in each
of its processes. The backend is in `flashplan.sglang_backend`, which needs SGLang.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "flashplan"


def register() -> None:
    """Makes the backend of attention "flashplan" known to SGLang. May be called again.

    Raises:
        ModuleNotFoundError: SGLang is missing, or has no such registry.
    """
    try:
        registry: Any = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        arguments: Any = importlib.import_module("sglang.srt.server_args")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flashplan.sglang: expected SGLang (pip install sglang), got: {error}",
            name=error.name,
        ) from None
    if NAME not in registry.ATTENTION_BACKENDS:
        arguments.add_attention_backend_choices([NAME])
        registry.register_attention_backend(NAME)(_make)


def _make(runner: Any) -> Any:
    """SGLang calls this with its ModelRunner, at a time when modules of SGLang can be imported."""
    return importlib.import_module("flashplan.sglang_backend").FlashplanAttnBackend(runner)
