"""``onboard completion``: the script that completes commands in a shell."""

from __future__ import annotations

import click

from onboard.cli._group import COMPLETE_VARIABLE, State, declare_command, root


@declare_command(
    "completion",
    examples=(
        'eval "$(onboard completion bash)"      # in ~/.bashrc',
        'eval "$(onboard completion zsh)"       # in ~/.zshrc',
        "onboard completion fish > ~/.config/fish/completions/onboard.fish",
    ),
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(state: State, shell: str) -> int:
    """Print the completion script for a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # The template alone: click's `source` would also start a bash to ask for its version.
    completer = found(root, {}, "onboard", COMPLETE_VARIABLE)
    script = completer.source_template % completer.source_vars()
    output = state.output
    if output.format == "json":
        output.json({"shell": shell, "script": script})
    else:
        output.raw(script)
    return 0
