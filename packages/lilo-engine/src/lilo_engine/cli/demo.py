"""`lilo demo`: a small model learns arithmetic by reinforcement learning, on this machine, in about a minute.

Presentation only: progress bar, table, picture, the last line. What happens is in `lilo_engine.demo.run`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from lilo_volume import open_named
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lilo_engine.config import DataFolder
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.storage import open_checkpoints

if TYPE_CHECKING:
    from lilo_engine.demo.rl_arithmetic import StepReport
    from lilo_engine.demo.run import Outcome

HONEST = (
    "The model has 0.8 million parameters and has partly memorised two-digit sums; most of the lines it was "
    "pretrained on had a wrong answer. The loop brings out what it half knows."
)


def demo(
    seed: Annotated[int, typer.Option(help="Of the adapter, the questions and the samples.")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="Training steps in all.")] = 25,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("reward.png"),
) -> None:
    """Watch a small model learn arithmetic through the `tinker` SDK, on a server of its own."""
    if missing := _missing():
        _fail(f"lilo demo: {missing}")
    if not out.absolute().parent.is_dir():
        _fail(f"lilo demo: --out {out}: there is no folder {out.absolute().parent}; make it first")

    import tinker

    from lilo_engine.demo.picture import draw_reward
    from lilo_engine.demo.run import run_demo
    from lilo_engine.demo.server import LocalServer, ServerFailed

    # SIGTERM unwinds like Ctrl-C, so that the server does not outlive us.
    signal.signal(signal.SIGTERM, _terminated)
    folder = Path(tempfile.mkdtemp(prefix="lilo-demo-"))
    console = Console(highlight=False, emoji=False)
    console.print(HONEST)
    server = LocalServer("tiny", folder)
    try:
        with _Bar(console, steps) as bar:
            outcome = run_demo(server, seed=seed, steps=steps, watch=bar)
    except KeyboardInterrupt:
        _fail(f"lilo demo: stopped; what was saved so far lies in {folder}", code=130)
    except ServerFailed as error:
        _fail(f"lilo demo: {error}\nlogs: {folder / 'logs'}")
    except tinker.TinkerError as error:
        _fail(f"lilo demo: the server answered with an error: {error}\nlogs: {folder / 'logs'}")
    draw_reward(
        out,
        rewards=outcome.rewards,
        before=outcome.before,
        after=outcome.after,
        restart_after=outcome.restart_after,
    )
    _report(console, outcome, folder, out)
    print(
        f"demo: reward {outcome.before:.3f} -> {outcome.after:.3f} "
        f"in {len(outcome.rewards)} steps, {outcome.seconds:.1f} s",
        flush=True,
    )


class _Bar(Progress):
    """The progress bar; on anything but a terminal, a line now and then instead."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = steps
        self._done = 0
        self._step_s: list[float] = []
        self._task = self.add_task("", total=steps, figures="")

    def phase(self, text: str) -> None:
        """See `Watch`."""
        self.update(self._task, description=text)
        if not self.console.is_terminal:
            self.console.print(text)

    def step(self, report: StepReport) -> None:
        """See `Watch`."""
        self._done += 1
        self._step_s.append(report.seconds)
        figures = (
            f"reward {report.reward:.3f}  {report.num_tokens / report.seconds:,.0f} tokens/s  "
            f"{statistics.median(self._step_s[-5:]):.2f} s/step"
        )
        self.update(self._task, completed=self._done, figures=figures)
        if not self.console.is_terminal and (self._done % 5 == 0 or self._done == self._steps):
            self.console.print(f"step {self._done:3d} of {self._steps}  {figures}")


def _report(console: Console, outcome: Outcome, folder: Path, picture: Path) -> None:
    """The table of accuracies and answers, and where things lie."""
    table = Table(title="Sampled at temperature 1")
    table.add_column("question")
    for name in ("right answer", "before", "after"):
        table.add_column(name, justify="right")
    for shown in outcome.answers:
        question = shown.question
        said = (_marked(text, question.answer) for text in (shown.before, shown.after))
        table.add_row(question.prompt, question.answer, *said)
    table.add_section()
    table.add_row("256 exam questions", "", f"{outcome.before:.1%}", f"{outcome.after:.1%}")
    console.print(table)
    console.print(f"picture:    {picture.absolute()}", soft_wrap=True)
    for name, path in (("checkpoint", outcome.checkpoint), ("adapter", outcome.adapter)):
        console.print(f"{name + ':':11} {path}", soft_wrap=True)
        console.print(f"{'':11} in {_folder_of(path, folder)}", soft_wrap=True)
    console.print(f"go on with: lilo serve tiny --data-dir {folder}", soft_wrap=True)


def _folder_of(path: str, data_dir: Path) -> Path:
    """Where the files of a checkpoint lie; their digests are checked on the way."""
    ref = CheckpointRef.parse(path)
    volume = open_checkpoints(DataFolder(root=data_dir).checkpoints)
    return open_named(volume, ref.run_id, ref.kind, ref.name, verify="full").folder


def _marked(text: str, answer: str) -> str:
    """What the model said, readable even if it is not text, coloured by whether it is right."""
    shown = ascii(text)[1:-1].replace("[", r"\[")
    return f"[green]{shown}[/green]" if text == answer else f"[red]{shown}[/red]"


def _missing() -> str | None:
    """What must be installed first, in one sentence."""
    absent = [name for name in ("tinker", "matplotlib") if importlib.util.find_spec(name) is None]
    if absent:
        return (
            f"{' and '.join(absent)} not found; install them with: pip install 'lilo-engine[demo]'"
        )
    for group in ("lilo.backends", "lilo.samplers"):
        if not importlib.metadata.entry_points(group=group):
            return f"nothing is registered under {group}; install: pip install lilo-miles-backend"
    return None


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code)
