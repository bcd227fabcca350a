"""`lilo`: one typer app; each sub-command is a function or a group in a module of its own.

Only the module of the command that was typed is imported; `lilo --help` imports none and lists the lines kept here.
One that cannot be imported, because an extra or another package is not installed, becomes a command that says what to
install. Other packages add theirs through the entry-point group `lilo.commands`: a function, or a `typer.Typer` for a
group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

import typer

from lilo_engine.config import log_level
from lilo_engine.log import begin_log

GROUP = "lilo.commands"
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("lilo_engine.cli.serve:serve", "Serve a definition until Ctrl-C."),
        "engine": (
            "lilo_engine.cli.engine:engine",
            "The trainer and the sampler, for fronts in other processes.",
        ),
        "front": (
            "lilo_engine.cli.front:front",
            "Answer clients for an engine in another process.",
        ),
        "demo": ("lilo_engine.cli.demo:demo", "Watch a small model learn sums through the SDK."),
        "definitions": (
            "lilo_engine.cli.definitions:app",
            "What can be trained: list the definitions, show one.",
        ),
        "plan": (
            "lilo_engine.cli.plan:plan",
            "What a definition needs: memory, time, price.",
        ),
        "deploy": (
            "lilo_engine.cli.deploy:deploy",
            "Rent machines for a definition; --dry-run prints what would be created.",
        ),
        "bench": (
            "lilo_engine.cli.bench:app",
            "Measure the engine, the trainer, the sampler; --simulate: many clients.",
        ),
        "trace": ("lilo_engine.cli.trace:trace", "Write the timeline of a server's lanes."),
        "report": ("lilo_engine.cli.report:report", "Where the time of a run went."),
        "keys": ("lilo_engine.cli.keys:app", "API keys: make, list, revoke."),
        "doctor": (
            "lilo_engine.cli.doctor:doctor",
            "Check this machine, and say what to mend.",
        ),
    }
)
"""Name -> where its function or group is, and its line in `lilo --help`."""
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "pip install 'lilo-engine[demo]' lilo-miles-backend",
        "deploy": "pip install 'lilo-engine[modal]'",
    }
)
"""What to install for a command that cannot be imported; for others the missing module is named."""


def build(typed: str | None = None) -> typer.Typer:
    """The app.

    Args:
        typed: The command that was typed, if one was: then only it is imported.
    """
    app = _empty()
    if typed is not None and typed in COMMANDS:
        # Ours by name: looking through everything that is installed takes longer than most of them.
        _add(app, typed, _finder(typed))
        return app
    finders = _finders()
    for name, find in finders.items():
        if typed not in finders or name == typed:
            _add(app, name, find)
    return app


def index() -> typer.Typer:
    """The app for `lilo --help`: names and their lines, nothing behind them, nothing imported."""
    app = _empty()
    for name, (_, line) in COMMANDS.items():
        app.command(name, help=line)(_nothing)
    for point in _points():
        app.command(point.name, help=f"From {point.module}.")(_nothing)
    return app


def _empty() -> typer.Typer:
    app = typer.Typer(
        name="lilo",
        help="Lilo: a self-hosted fine-tuning service that speaks the Tinker API.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Plain help: drawing boxes imports rich with Markdown and highlighting, which takes longer than all else.
        rich_markup_mode=None,
    )
    # Keeps a lone command a sub-command: typer would make it the whole app.
    app.callback()(_nothing)
    return app


def main() -> None:
    """Run the command line."""
    try:
        begin_log(log_level())
    except ValueError as error:
        typer.echo(f"lilo: {error}", err=True)
        sys.exit(1)
    typed = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        if typed in (None, "--help"):
            index()()
        else:
            build(typed)()
    except KeyboardInterrupt:
        # Ctrl-C while modules are still imported; a command that runs has its own way to stop.
        sys.exit(130)


def _nothing() -> None:
    """Lilo: a self-hosted fine-tuning service that speaks the Tinker API."""


def _finders() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {name: _finder(name) for name in COMMANDS}
    found.update({point.name: point.load for point in _points()})
    return found


def _finder(name: str) -> Callable[[], object]:
    place, _ = COMMANDS[name]
    return lambda: _load(place)


def _points() -> list[EntryPoint]:
    """Commands of other packages; our names are ours."""
    found = [point for point in entry_points(group=GROUP) if point.name not in COMMANDS]
    return sorted(found, key=lambda point: point.name)


def _load(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _add(app: typer.Typer, name: str, find: Callable[[], object]) -> None:
    try:
        command = find()
    except ImportError as error:
        hint = _HINTS.get(name, f"install what provides {error.name!r}")
        _add_missing(app, name, f"lilo {name} is not complete here ({error}): {hint}")
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        assert callable(command), f"the command {name} is a {type(command).__name__}"
        app.command(name)(command)


def _add_missing(app: typer.Typer, name: str, words: str) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, help=words, context_settings=settings)
    def missing() -> None:  # pyright: ignore[reportUnusedFunction]  # typer keeps it
        typer.echo(words, err=True)
        raise typer.Exit(1)
