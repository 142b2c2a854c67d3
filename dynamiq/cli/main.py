"""The command ``dynamiq``: what the library knows about itself, for people and for scripts."""

import typer

from dynamiq.cli.kernels import kernels
from dynamiq.cli.roofline import roofline
from dynamiq.cli.simulate import simulate

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command()(kernels)
app.command()(roofline)
app.command()(simulate)


@app.callback()
def main() -> None:
    """Compressed multi-hop all-reduce for PyTorch."""
