# SPDX-License-Identifier: Apache-2.0
"""The merges of `flashplan.flashinfer.cascade`."""

from flashplan.flashinfer.cascade import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]
