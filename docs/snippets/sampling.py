# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, for requests of different wishes."""

import numpy as np

import flashplan as fp

logits = np.random.default_rng(0).standard_normal((3, 1000), np.float32)

# --8<-- [start:sample]
tokens, logprobs = fp.sample(
    logits,  # [batch, vocab]
    temperature=np.array([0.0, 0.8, 1.0], np.float32),  # 0: the most likely token
    top_k=np.array([1000, 50, 1000], np.int32),
    top_p=0.95,
    seed=np.array([11, 22, 33], np.int64),  # of each request
    offset=np.array([5, 9, 0], np.int64),  # another for each token: its position, for example
    return_logprobs=True,
)
# --8<-- [end:sample]
assert tokens[0] == logits[0].argmax() and logprobs.shape == (3,)
