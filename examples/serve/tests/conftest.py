# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess
from tiny_model import write_tiny_model

SMOLLM2 = Path(__file__).parents[3] / "build" / "smollm2"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model, for tests that leave nothing behind in it. Texts that must be
    equal are, whatever is computed beside them."""
    server = ServerProcess(tiny_model, "--batch-invariant", "--num-pages", "4096")
    yield server
    server.close()


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers of the tiny model with other options."""
    servers = []

    def start(*options: str) -> ServerProcess:
        servers.append(ServerProcess(tiny_model, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[ServerProcess]:
    if not (SMOLLM2 / "config.json").exists() and not os.environ.get("CI"):
        pytest.skip("no model: make build/smollm2/config.json")
    server = ServerProcess(SMOLLM2, "--batch-invariant")
    yield server
    server.close()
