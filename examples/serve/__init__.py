# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's endpoints over the engine in C++: python -m serve --help."""
