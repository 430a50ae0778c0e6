# SPDX-License-Identifier: Apache-2.0
"""What a plan decided: as text, as a picture, and in the log."""

import logging
import pathlib
import tempfile

import flashplan as fp

folder = tempfile.TemporaryDirectory()
page = pathlib.Path(folder.name) / "plan.html"

# --8<-- [start:plan]
attn = fp.Attention(8, 2, 64, q_dtype="float32", device="cpu", num_ctas=4)
plan = attn.plan([0, 1, 2, 34], [3000, 200, 32])  # two decodes, and a prompt of 32 tokens
print(plan.describe())
page.write_text(plan._repr_html_())  # what a notebook shows for a cell that ends with `plan`
# --8<-- [end:plan]

assert "3 requests, 34 query tokens, 3232 keys" in plan.describe()
assert "<svg" in page.read_text()

# --8<-- [start:log]
logging.basicConfig()  # an engine configures logging in its own way
logging.getLogger("flashplan").setLevel(logging.DEBUG)
attn.plan([0, 1], [500])  # DEBUG:flashplan:planned: kernel ...
# --8<-- [end:log]

logging.getLogger("flashplan").setLevel(logging.NOTSET)
