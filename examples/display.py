# SPDX-License-Identifier: Apache-2.0
"""Shows texts while they grow: live on a terminal, plain lines in a log."""

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from serving import Engine, Request

LOG_INTERVAL = 25  # steps between two lines of a log


class Display:
    """A progress bar and the last line of each running request; finished texts scroll by above."""

    def __init__(self, console: Console, tokenizer: Tokenizer, requests: list[Request]) -> None:
        self.live = Live(console=console, transient=True, refresh_per_second=10)
        self._console, self._tokenizer, self._requests = console, tokenizer, requests
        self._finished: list[Request] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("", total=None)

    def update(self, engine: Engine, finished: list[Request]) -> None:
        """To be called after each step of the engine, within `with display.live`."""
        self._finished += finished
        for request in finished:
            heading = Text(f"{request.name} ({request.num_prompt_tokens} prompt tokens)", "cyan")
            self._console.print(heading, self._text(request), "", sep="\n", markup=False)

        num_steps = len(engine.statistics.plan_us)
        num_tokens = sum(len(r.new_tokens) for r in self._requests)
        status = (
            f"step {num_steps}: {len(engine.running)} running, {len(engine.waiting)} waiting, "
            f"{engine.pool.num_used_pages} pages, {num_tokens} tokens"
        )
        if self._console.is_terminal:
            self._show_running(engine.running, status, num_tokens)
        elif num_steps % LOG_INTERVAL == 0:
            self._console.print(f"[{status}]", "", sep="\n", markup=False)

    def _show_running(self, running: list[Request], status: str, num_tokens: int) -> None:
        # How long a text gets is known once it has ended; until then, expect the most.
        num_saved = sum(r.max_new_tokens - len(r.new_tokens) for r in self._finished)
        total = sum(r.max_new_tokens for r in self._requests) - num_saved
        self._progress.update(self._task, completed=num_tokens, total=total, description=status)
        table = Table.grid(padding=(0, 1))
        table.add_column(style="cyan")
        for request in running:
            tail = self._text(request).replace("\n", " ")[-60:]
            table.add_row(request.name, Text(tail, no_wrap=True))
        self.live.update(Group(table, self._progress))

    def _text(self, request: Request) -> str:
        return self._tokenizer.decode(request.new_tokens)
