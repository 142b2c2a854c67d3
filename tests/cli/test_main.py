"""The command without a subcommand."""

from importlib.metadata import version

from typer.testing import CliRunner

from dynamiq.cli.main import app


def test_the_version_is_that_of_the_distribution():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, version("dynamiq-allreduce"))


def test_the_help_names_every_subcommand():
    result = CliRunner().invoke(app, [])
    for name in ("kernels", "plan", "probe", "roofline", "simulate"):
        assert name in result.output
