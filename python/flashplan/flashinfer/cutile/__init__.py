# SPDX-License-Identifier: Apache-2.0
"""The module in which programs ask whether FlashInfer's kernels in cuTile can run."""
