# SPDX-License-Identifier: Apache-2.0
"""A small benchmark of an installed package: `python -m flashplan.bench`."""
