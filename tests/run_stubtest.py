# SPDX-License-Identifier: Apache-2.0
"""mypy's stubtest with stand-ins for vLLM and SGLang, which the package's plugins derive from."""

import sys

import pytest
import sglang_stub
import vllm_stub
from mypy import stubtest

with pytest.MonkeyPatch.context() as patch:
    vllm_stub.install(patch)
    sglang_stub.install(patch)
    sys.exit(stubtest.main())
