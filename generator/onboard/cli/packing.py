"""``onboard packing``: sequence packing in Megatron-Bridge."""

from __future__ import annotations

import click

from onboard.cli._group import LazyGroup, common_options, write_examples


class _Packing(LazyGroup):
    modules = {  # noqa: RUF012
        "check": "onboard.cli.packing_check",
        "plan": "onboard.cli.packing_plan",
        "inspect": "onboard.cli.packing_inspect",
    }

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write how to begin."""
        examples = (
            "onboard packing plan Qwen/Qwen3-8B --tp 2 --cp 2 --seq-length 8192",
            "onboard packing check train.yaml --strict",
            "onboard packing inspect packed/training_8192.idx.parquet",
        )
        write_examples(formatter, examples)


@click.group("packing", cls=_Packing)
@common_options
def command() -> None:
    """Plan and check packed sequences in Megatron-Bridge.

    Reads configurations and packed data; needs neither Megatron-Bridge nor a GPU.
    """
