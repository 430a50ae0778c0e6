# SPDX-License-Identifier: Apache-2.0
"""Serves a language model with OpenAI's endpoints, by the engine in C++.

PYTHONPATH=examples python -m serve --model build/smollm2
"""

import argparse
import asyncio
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# BLAS threads wait in a spin: beside other work on a few cores they cost far more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when the library is loaded

try:
    import uvicorn

    from .app import Api, make_app
    from .library import DEVICES, Engine, Options
    from .model import load_model
    from .service import Service
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install --group serve") from None

ROOT = Path(__file__).parents[2]


def main() -> int:
    arguments = parse_arguments()
    start = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    options = Options(
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        max_batch_size=arguments.max_batch_size,
        max_step_tokens=arguments.max_step_tokens,
        batch_invariant=arguments.batch_invariant,
        device=DEVICES.index(arguments.device),
        has_8bit_cache=arguments.kv_dtype == "e4m3",
    )
    if arguments.device == "cuda":
        name_cublaslt()
    try:
        listener = bind(arguments.host, arguments.port)
        progress(f"reading the tokenizer of {arguments.model}")
        model = load_model(arguments.model, arguments.name)
        progress("loading the weights")
        engine = Engine(arguments.library, arguments.model, options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    service = Service(engine, arguments.max_batch_size + arguments.max_queue)
    config = uvicorn.Config(
        make_app(Api(model, service, options)),
        log_level=arguments.log_level,
        timeout_graceful_shutdown=arguments.grace + 5,
    )
    server = Server(config, service, arguments.grace)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    progress(f"serving {model.name} at http://{address}:{port}/v1, until Ctrl-C")
    server.run(sockets=[listener])
    progress("stopped")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder in Hugging Face's format")
    add("--name", help="of the model, for clients; default: that of the folder")
    add("--device", default="cpu", choices=DEVICES, help="default: %(default)s")
    add("--kv-dtype", default="auto", choices=("auto", "e4m3"), help="of the cache")
    add("--host", default="127.0.0.1", help="the address to listen at; default: %(default)s")
    add(
        "--port", type=between(0, 65535), default=8000, help="0: any free one; default: %(default)s"
    )
    add("--page-size", type=int, default=16, help="tokens; default: %(default)s")
    add("--num-pages", type=int, default=1024, help="of the cache; default: %(default)s")
    add("--max-batch-size", type=int, default=64, help="sequences; default: %(default)s")
    add("--max-step-tokens", type=int, default=512, help="default: %(default)s")
    add(
        "--max-queue",
        type=between(0, 1 << 31),
        default=256,
        help="choices that may wait; default: %(default)s",
    )
    add("--batch-invariant", action="store_true", help="results do not depend on other requests")
    add(
        "--grace",
        type=between(0, 1 << 31),
        default=5,
        help="seconds for requests that run at Ctrl-C; default: %(default)s",
    )
    add("--log-level", default="info", choices=("error", "warning", "info", "debug"))
    library = ROOT / "build" / "engine" / "libengine_c.so"
    add("--library", type=Path, default=library, help="the engine; default: %(default)s")
    return parser.parse_args()


def between(least: int, most: int) -> Callable[[str], int]:
    """Reads an argument that is an integer within these bounds."""

    def integer(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {value}")
        return value

    return integer


def bind(host: str, port: int) -> socket.socket:
    """A socket for this address, at which nobody can connect yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def name_cublaslt() -> None:
    """Tells the engine of the library in PyPI's package nvidia-cublas, if that is installed."""
    packages = importlib.util.find_spec("nvidia")
    folders = packages.submodule_search_locations if packages else None
    for folder in folders or ():
        for path in Path(folder).glob("cu*/lib/libcublasLt.so.*"):
            os.environ.setdefault("ENGINE_CUBLASLT", str(path))


class Server(uvicorn.Server):
    """At the first Ctrl-C it takes no more requests, and those that run have some seconds to
    finish. At the second one they are aborted; at the third one nothing is waited for."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service, self._grace = service, grace
        self._num_exits = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        self._service.is_stopping = True
        self._num_exits += 1
        self.force_exit = self._num_exits >= 3
        if self._loop is None:
            return
        if self._num_exits == 1:
            self._loop.call_soon_threadsafe(
                self._loop.call_later, self._grace, self._service.abort_all
            )
        else:
            self._loop.call_soon_threadsafe(self._service.abort_all)


if __name__ == "__main__":
    sys.exit(main())
