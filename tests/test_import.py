# SPDX-License-Identifier: Apache-2.0
"""Importing flashplan: quick, without frameworks, and clear about what a module needs."""

import os
import subprocess
import sys

import pytest


def test_import_needs_no_framework():
    """Nor does it import one that is installed."""
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'cupy', 'ml_dtypes'): sys.modules[name] = None\n"
        "import flashplan as fp, numpy as np\n"
        "attn = fp.Attention(1, 1, 4, page_size=None, q_dtype='float32', device='cpu')\n"
        "attn.plan([0, 1], [1])\n"
        "x = np.ones((1, 1, 4), np.float32)\n"
        "assert (attn.run(x, x, x) == 1).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, flashplan; assert not {'torch', 'jax', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_takes_no_time():
    """At most 30 ms of a processor beyond the import of NumPy; 11 to 14 where nothing else runs."""
    code = (
        "import numpy, time\n"
        "start = time.process_time()\n"
        "import flashplan\n"
        "print(time.process_time() - start)\n"
    )

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the first import compiles

    def seconds():
        command = [sys.executable, "-c", code]
        child = subprocess.run(command, env=environment, check=True, capture_output=True)
        return float(child.stdout)

    assert any(seconds() <= 0.03 for _ in range(5))  # other programs may fill the caches


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("jax", "jax", "pip install jax"),
        ("torch", "torch", "pip install torch"),
        ("transformers", "torch", "pip install torch transformers"),
        ("transformers", "transformers", "pip install torch transformers"),
    ],
)
def test_modules_name_what_is_missing(module, package, command):
    code = f"import sys; sys.modules[{package!r}] = None; import flashplan.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ModuleNotFoundError: flashplan.{module}: expected ")
    assert f"({command}), got: " in error
    assert package in error.partition("got: ")[2]
