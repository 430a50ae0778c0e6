# SPDX-License-Identifier: Apache-2.0
"""Functions that FlashInfer has in Triton. Here they are operations of PyTorch and flashplan."""

from flashplan.flashinfer.triton import cascade

__all__ = ["cascade"]
