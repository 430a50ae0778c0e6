# SPDX-License-Identifier: Apache-2.0
"""A server as its clients see it: a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = Path(__file__).parents[2]
START_SECONDS = 60
COMMAND = [sys.executable, "-m", "serve"]
MORE_OPTIONS = os.environ.get("SERVE_OPTIONS", "").split()  # for all servers
ENVIRONMENT = os.environ | {"PYTHONPATH": str(EXAMPLES)}


class ServerProcess:
    def __init__(self, model: Path, *options: str) -> None:
        self.model, self.log = model, ""
        self._has_started = threading.Event()
        self._process = subprocess.Popen(
            [*COMMAND, *self._arguments(model), *options],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._has_started.wait(START_SECONDS), self.log
        address = re.search(r"at (http://\S+)/v1", self.log)
        assert address, self.log
        self.url = address[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @staticmethod
    def _arguments(model: Path) -> list[str]:
        return ["--model", str(model), "--port", "0", "--log-level", "warning", *MORE_OPTIONS]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log += line
            if "until Ctrl-C" in line:
                self._has_started.set()
        self._has_started.set()  # it has failed

    def metrics(self) -> dict[str, float]:
        """Every sample by its name; labels as in Prometheus' text."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            sample.name + "".join(f"[{k}={v}]" for k, v in sample.labels.items()): sample.value
            for family in families
            for sample in family.samples
        }

    def wait_for(self, condition: Callable[[dict[str, float]], bool], seconds: float = 60) -> None:
        """Until the metrics meet a condition."""
        end = time.monotonic() + seconds
        while not condition(self.metrics()):
            assert time.monotonic() < end, self.metrics()
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        self.wait_for(is_idle)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 60) -> int:
        """The exit status."""
        status = self._process.wait(seconds)
        self._reader.join()
        return status

    def close(self) -> None:
        """Ends it, wherever a test has left it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.http.close()
        self.openai.close()


def is_idle(metrics: dict[str, float]) -> bool:
    names = ("sequences_running", "sequences_waiting", "pages_used")
    return all(metrics[f"flashplan_{name}"] == 0 for name in names)
