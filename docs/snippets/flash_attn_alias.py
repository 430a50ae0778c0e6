# SPDX-License-Identifier: Apache-2.0
"""flashplan under the name of FlashAttention."""

# --8<-- [start:alias]
import sys

import flashplan.flash_attn

sys.modules["flash_attn"] = flashplan.flash_attn
# --8<-- [end:alias]
from flash_attn import flash_attn_func  # noqa: E402

assert flash_attn_func is flashplan.flash_attn.flash_attn_func
del sys.modules["flash_attn"]
