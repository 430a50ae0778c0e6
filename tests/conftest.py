# SPDX-License-Identifier: Apache-2.0
import os
import secrets
import tempfile

import numpy as np
import pytest

import flashplan as fp
import frameworks
from flashplan import _core

# Without this JAX takes most of a GPU's memory at its first use, but the tests share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX divides the CPU into as many devices, for programs on several. It reads this when it starts.
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4")
)

# Inputs differ in every run, and are the same in all workers. The header of the report says how to
# get them again.
SEED = int(os.environ.setdefault("FLASHPLAN_TEST_SEED", str(secrets.randbits(31))))

# Variants are compiled by the tests that use them, and not taken from what the user has kept.
CACHE = tempfile.TemporaryDirectory(prefix="flashplan-tests-")
os.environ.setdefault("FLASHPLAN_CACHE_DIR", CACHE.name)


def pytest_configure(config):
    # Each worker would have as many threads as there are cores, and all would wait for each other.
    # flashplan's own threads are what is tested.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("FLASHPLAN_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def why_no_gpu():
    if _core.cuda_device_count():
        return ""
    return fp.is_supported(1, 1, 64, device="cuda:0")[1]


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="GPU tests fail where they cannot run"
    )


def pytest_report_header():
    return [f"inputs: FLASHPLAN_TEST_SEED={SEED}", f"gpu tests: {why_no_gpu() or 'on'}"]


def pytest_collection_modifyitems(config, items):
    reason = why_no_gpu()
    if not reason:
        return
    if config.getoption("require_gpu"):
        raise pytest.UsageError(f"--require-gpu: {reason}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips tests of options that the kernel family of FLASHPLAN_KERNEL_FAMILY does not serve."""
    try:
        return (yield)
    except fp.UnsupportedError as error:
        if "FLASHPLAN_KERNEL_FAMILY" in os.environ and item.get_closest_marker("gpu"):
            pytest.skip(str(error))
        raise


def _import(name, request):
    if os.environ.get("CI") or request.config.getoption("require_gpu"):
        return __import__(name)  # a missing framework is a failure there
    return pytest.importorskip(name)


@pytest.fixture(autouse=True)
def current_device_stays(request):
    """Checks that the library does not change the current GPU, even if a test uses other ones."""
    if not request.node.get_closest_marker("gpu") or _core.cuda_device_count() < 2:
        yield
        return
    cuda = request.getfixturevalue("torch").cuda
    before = cuda.current_device()
    yield
    assert cuda.current_device() == before


@pytest.fixture(scope="session")
def seed():
    return SEED


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture
def cuda(torch):
    return frameworks.TorchCuda(torch)


@pytest.fixture(scope="session")
def torch(request):
    return _import("torch", request)


@pytest.fixture
def flash(torch):
    """flashplan.flash_attn, without gradients."""
    import flashplan.flash_attn

    with torch.no_grad():
        yield flashplan.flash_attn


@pytest.fixture(scope="session")
def transformers(request):
    return _import("transformers", request)


@pytest.fixture
def bridge(torch, transformers):
    """flashplan.transformers."""
    import flashplan.transformers

    with torch.no_grad():
        yield flashplan.transformers


@pytest.fixture
def random(torch, seed):
    """PyTorch's random numbers from the seed of this run."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def cupy(request):
    return _import("cupy", request)


@pytest.fixture(scope="session")
def jax(request):
    jax = _import("jax", request)
    # Looking for devices makes the last GPU the current one.
    torch = request.getfixturevalue("torch") if _core.cuda_device_count() > 1 else None
    device = torch.cuda.current_device() if torch else 0
    jax.config.update("jax_default_device", jax.devices("cpu")[0])  # also where there is a GPU
    if torch:
        torch.cuda.set_device(device)
    return jax


@pytest.fixture
def calls(jax):
    """flashplan.jax."""
    import flashplan.jax

    return flashplan.jax


@pytest.fixture(scope="session")
def devices(jax):
    """Two devices of a CPU, for programs of JAX."""
    return jax.devices("cpu")[:2]


# With function scope pytest runs a case in all frameworks before the next case.
@pytest.fixture(params=frameworks.NAMES)
def framework(request):
    if request.param == "numpy":
        return frameworks.NumPy()
    make = {"torch": frameworks.Torch, "jax": frameworks.Jax}[request.param]
    return make(request.getfixturevalue(request.param))


@pytest.fixture(params=frameworks.GPU_NAMES)
def gpu_framework(request):
    return frameworks.gpu_framework(request.param, request.getfixturevalue(request.param))
