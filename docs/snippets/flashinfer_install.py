# SPDX-License-Identifier: Apache-2.0
"""flashplan under the name of FlashInfer."""

import sys

# --8<-- [start:install]
import flashplan.flashinfer

flashplan.flashinfer.install()
# --8<-- [end:install]
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper  # noqa: E402
from flashinfer.norm import rmsnorm  # noqa: E402

assert BatchDecodeWithPagedKVCacheWrapper is flashplan.flashinfer.BatchDecodeWithPagedKVCacheWrapper
assert rmsnorm is flashplan.flashinfer.rmsnorm
for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
    del sys.modules[name]
