# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions in Triton; those of flashplan are not."""

from flashplan.flashinfer.triton import cascade

__all__ = ["cascade"]
