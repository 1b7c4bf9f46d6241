"""The commands, found when they are needed, and the options that all of them share."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import click

from onboard.cli._output import Output, as_json_text, silence, write

FORMATS = ("auto", "human", "json", "quiet")
# In the order of use, which is the order of the help. The value is the module, which defines `command`.
_COMMANDS = {
    "new": "onboard.cli.new",
    "inspect": "onboard.cli.inspect",
    "verify": "onboard.cli.verify",
    "check": "onboard.cli.check",
    "packing": "onboard.cli.packing",
    "doctor": "onboard.cli.doctor",
    "completion": "onboard.cli.completion",
}
COMPLETE_VARIABLE = "_ONBOARD_COMPLETE"

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass
class State:
    """What the common options said, on the group or on the command."""

    argv: Sequence[str] = ()
    format: str = "auto"
    debug: bool = False
    started: bool = False
    """Whether the whole command line has been read."""
    stdout: TextIO | None = None
    """Where results go while a command runs."""

    @property
    def output(self) -> Output:
        """Where the running command prints."""
        # Human also in a pipe: what a person saw is what `| less` and `| grep` show.
        format = "human" if self.format == "auto" else self.format
        return Output(format, self.stdout if self.started else sys.stdout, sys.stderr)

    @property
    def wants_json(self) -> bool:
        """Whether errors are JSON too: the options say so, or a look at what could not be read to its end does."""
        return self.format == "json" or (not self.started and _asks_for_json(self.argv))


def _asks_for_json(argv: Sequence[str]) -> bool:
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    pairs = itertools.pairwise(words)
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairs


def _set_format(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(State).format = value


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(State).format = "json"


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(State).debug = True


class _CommonOption(click.Option):
    """An option that every command has; the help lists these apart."""


def common_options(function: _Decorated) -> _Decorated:
    """The options that the group and every command take; the later one wins."""
    decorators = (
        click.option(
            "--format",
            cls=_CommonOption,
            type=click.Choice(FORMATS),
            callback=_set_format,
            expose_value=False,
            help="How to print. auto: for people, in colour on a terminal.",
        ),
        click.option(
            "--json",
            cls=_CommonOption,
            is_flag=True,
            callback=_set_json,
            expose_value=False,
            help="Short for --format json.",
        ),
        click.option(
            "--debug",
            cls=_CommonOption,
            is_flag=True,
            callback=_set_debug,
            expose_value=False,
            help="Show the traceback of an error.",
        ),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Output": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        # Arguments are in the usage line, and explained by the text.
        if record is not None and isinstance(param, click.Option):
            sections["Output" if isinstance(param, _CommonOption) else "Options"].append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Write examples, unwrapped so that they can be pasted."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class Command(click.Command):
    """A command with examples in its help, whose stdout carries its result and nothing else."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then those of every command."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(formatter, self.examples)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, the command line having been read."""
        state = ctx.ensure_object(State)
        with _only_results_on_stdout(state):
            return super().invoke(ctx)


def declare_command(name: str, *, examples: Sequence[str]) -> Callable[[Callable[..., int]], Command]:
    """Declare a command: a function that gets a :class:`State` and its options, and returns the exit status."""

    def declare(function: Callable[..., int]) -> Command:
        with_options = common_options(click.pass_obj(function))
        return click.command(name, cls=Command, examples=examples)(with_options)

    return declare


@contextlib.contextmanager
def _only_results_on_stdout(state: State) -> Iterator[None]:
    """Send what libraries and child processes print to stderr, since one stray line spoils the JSON."""
    with contextlib.ExitStack() as undo:
        state.stdout = sys.stdout
        duplicate = _take_over_stdout(undo)
        if duplicate is not None:
            state.stdout = duplicate
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        state.started = True
        yield


def _take_over_stdout(undo: contextlib.ExitStack) -> TextIO | None:
    """Point the file descriptor of stdout at stderr, and return a stream on what it was before."""
    stdout = sys.stdout
    try:
        number = stdout.fileno()
        stdout.flush()
        real = os.dup(number)
    except (AttributeError, OSError, ValueError):  # no stdout, or one without a descriptor (in tests)
        return None
    try:
        os.dup2(sys.stderr.fileno(), number)
    except (AttributeError, OSError, ValueError):
        os.close(real)
        return None
    # Closed by `restore`.
    stream = open(  # noqa: SIM115
        real, "w", encoding=stdout.encoding, errors="backslashreplace", closefd=False
    )

    def restore() -> None:
        try:
            stream.close()
        except OSError:  # reported where it was written
            silence(stream)
        with contextlib.suppress(OSError):
            stdout.flush()
        os.dup2(real, number)
        os.close(real)

    undo.callback(restore)
    return stream


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed."""

    modules: Mapping[str, str] = {}
    """Each command's name and its module, which defines ``command``; in the order of the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in the order of use."""
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        module = self.modules.get(cmd_name)
        if module is None:
            return None
        found = importlib.import_module(module).command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where there is none, name the one that was probably meant."""
        if args and args[0] not in self.modules and not args[0].startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.modules, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" The commands are {', '.join(self.modules)}."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words before the command; without any, show the help, as a usage error."""
        if not args and not ctx.resilient_parsing:
            write(sys.stderr, ctx.get_help() + "\n")
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


class Root(LazyGroup):
    """The group. Its :meth:`main` gives the exit statuses and the shape of errors."""

    modules = _COMMANDS

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what every command has in common, and how to begin."""
        with formatter.section("Exit status"):
            formatter.write_dl(
                [
                    ("0", "fine"),
                    ("1", "verification failed, or drift"),
                    ("2", "usage"),
                    ("3", "the model is not supported"),
                    ("4", "the Hub did not answer as needed"),
                    ("5", "a bug in onboard"),
                    ("130", "interrupted"),
                ]
            )
        examples = (
            "onboard inspect Qwen/Qwen3-0.6B",
            "onboard new Qwen/Qwen3-0.6B",
            "onboard new ./my-model --json > result.json",
        )
        write_examples(formatter, examples)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command line and exit. Takes what :meth:`click.Command.main` takes."""
        if COMPLETE_VARIABLE in os.environ:
            return super().main(prog_name="onboard", complete_var=COMPLETE_VARIABLE)
        from onboard.cli._run import run

        given = args[0] if args else kwargs.get("args")
        sys.exit(run(self, sys.argv[1:] if given is None else [given] if isinstance(given, str) else list(given)))


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from onboard import __version__

    wants_json = ctx.ensure_object(State).wants_json
    text = as_json_text({"version": __version__}) if wants_json else f"onboard {__version__}\n"
    write(sys.stdout, text)
    ctx.exit()


@click.group(cls=Root, name="onboard", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def root() -> None:
    """Write a model's NVIDIA NeMo AutoModel support, and prove it.

    SOURCE is a Hugging Face model id, a directory with a config.json, or a config.json.
    """


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Shell completion for SOURCE: files and directories, since ids cannot be listed offline."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
