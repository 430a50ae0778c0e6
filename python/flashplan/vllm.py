# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM: `vllm serve MODEL --attention-backend CUSTOM` lets it attend with flashplan.

vLLM finds `register` by the entry point `vllm.general_plugins` of this package and calls it in each
of its processes. The backend is in `flashplan.vllm_backend`, which needs vLLM.
"""

from __future__ import annotations

import importlib
from typing import Any


def register() -> None:
    """Makes flashplan the backend of attention that vLLM calls CUSTOM. May be called again.

    Raises:
        ModuleNotFoundError: vLLM is missing, or has no such registry (before 0.12).
    """
    try:
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flashplan.vllm: expected vLLM from 0.12 on (pip install vllm), got: {error}",
            name=error.name,
        ) from None
    registry.register_backend(
        registry.AttentionBackendEnum.CUSTOM, "flashplan.vllm_backend.FlashplanBackend"
    )
