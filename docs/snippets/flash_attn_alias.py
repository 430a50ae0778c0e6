# SPDX-License-Identifier: Apache-2.0
"""flashplan under the name of FlashAttention."""

# --8<-- [start:alias]
import flashplan.flash_attn

flashplan.flash_attn.install()
# --8<-- [end:alias]
import sys  # noqa: E402

from flash_attn import flash_attn_func  # noqa: E402

assert flash_attn_func is flashplan.flash_attn.flash_attn_func
for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
    del sys.modules[name]
