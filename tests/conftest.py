# SPDX-License-Identifier: Apache-2.0
import os
import secrets

import pytest

import frameworks

# Fresh inputs every run; the header of the report says how to see them again.
SEED = int(os.environ.get("FLASHPLAN_TEST_SEED", secrets.randbits(31)))


def pytest_report_header():
    return f"inputs: FLASHPLAN_TEST_SEED={SEED}"


def _import(name):
    if os.environ.get("CI"):
        return __import__(name)  # in CI a missing framework is a failure
    return pytest.importorskip(name)


@pytest.fixture(scope="session")
def seed():
    return SEED


@pytest.fixture(scope="session")
def torch():
    return _import("torch")


@pytest.fixture(scope="session")
def jax():
    return _import("jax")


# Of function scope: pytest then runs one case in all frameworks before it goes on to the next.
@pytest.fixture(params=frameworks.NAMES)
def framework(request):
    if request.param == "numpy":
        return frameworks.NumPy()
    make = {"torch": frameworks.Torch, "jax": frameworks.Jax}[request.param]
    return make(request.getfixturevalue(request.param))
