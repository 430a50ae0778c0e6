# SPDX-License-Identifier: Apache-2.0
"""Calls that must be refused: (what is wrong, exception, argument that the message names, call)."""

from bad_operators import APPEND, MERGE, OTHER
from bad_plans import OPTIONS, PLAN
from bad_runs import RUN

BAD = OPTIONS + PLAN + RUN + APPEND + MERGE + OTHER
