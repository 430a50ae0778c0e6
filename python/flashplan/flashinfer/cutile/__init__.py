# SPDX-License-Identifier: Apache-2.0
"""Programs ask here whether FlashInfer's kernels in cuTile can run."""
