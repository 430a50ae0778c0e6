# SPDX-License-Identifier: Apache-2.0
"""Makes flashplan importable under the name of FlashInfer."""

from __future__ import annotations

import importlib
import pkgutil
import sys

NAME = "flashinfer"
_OWN = "flashplan.flashinfer"


def install() -> None:
    """Lets `import flashinfer` and imports of its modules give `flashplan.flashinfer`.

    Call it before anything imports flashinfer. Programs that ask for an installed distribution, as
    SGLang and vLLM do, do not find one.

    Raises:
        RuntimeError: the program has imported the real flashinfer already. Nothing was changed.

    Examples:
        >>> import flashplan.flashinfer
        >>> flashplan.flashinfer.install()
        >>> import flashinfer
        >>> flashinfer.BatchDecodeWithPagedKVCacheWrapper.__module__
        'flashplan.flashinfer._decode'
    """
    package = sys.modules[_OWN]
    other = sys.modules.get(NAME, package)
    if other is not package:
        place = getattr(other, "__file__", None)
        raise RuntimeError(
            f"install: expected a process that has not imported {NAME}, got the one of {place}"
        )
    modules = [_OWN]
    for module in pkgutil.walk_packages(package.__path__, f"{_OWN}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            modules.append(module.name)
    for name in modules:
        sys.modules[NAME + name.removeprefix(_OWN)] = importlib.import_module(name)
