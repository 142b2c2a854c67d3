"""The command ``dynamiq``: what the library knows about itself, for people and for scripts."""

from importlib.metadata import version
from typing import Annotated

import typer

from dynamiq.cli.kernels import kernels
from dynamiq.cli.plan import plan
from dynamiq.cli.probe import probe
from dynamiq.cli.roofline import roofline
from dynamiq.cli.simulate import simulate

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command()(kernels)
app.command()(plan)
app.command()(probe)
app.command()(roofline)
app.command()(simulate)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version("dynamiq-allreduce"))
        raise typer.Exit


@app.callback()
def main(
    show: Annotated[
        bool, typer.Option("--version", help="Print it.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Compressed multi-hop all-reduce for PyTorch."""
