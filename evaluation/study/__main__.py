"""The command line: ``run`` adds rows, ``page`` shows them."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import get_args

from dynamiq.core.errors import DynamiqError
from evaluation.reviews import MissingDataError
from evaluation.rows import read_rows
from evaluation.study import recipes
from evaluation.study.page import write_page
from evaluation.study.records import OptimizerName, Row
from evaluation.study.runs import Grid, run_missing
from evaluation.study.workloads import WORKLOADS


def main(arguments: list[str] | None = None) -> None:
    """Do one command."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(words)
    command = f"python -m evaluation.study {shlex.join(words)}"
    try:
        if options.command == "run":
            for row in run_missing(_grid(options), options.output):
                print(_summary(row), flush=True)
        else:
            picture = write_page(read_rows(options.rows, Row), options.output, command)
            print(f"{options.output} and {picture}")
    except (DynamiqError, MissingDataError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, unless the row is there already")
    run.add_argument("--workload", required=True, choices=WORKLOADS)
    run.add_argument("--recipes", nargs="+", default=[*recipes.NAMES], choices=recipes.NAMES)
    run.add_argument("--bits", nargs="+", type=float, default=[], help="per entry, all included")
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--optimizer", default="adamw", choices=get_args(OptimizerName))
    run.add_argument("--steps", required=True, type=int)
    run.add_argument("--topology", default="ring")
    run.add_argument("--learning-rate", type=float, help="by default the workload's")
    run.add_argument("--output", required=True, type=Path, help="file of rows, added to")
    page = commands.add_parser("page", help="make the page from rows")
    page.add_argument("rows", type=Path)
    page.add_argument("--output", required=True, type=Path)
    return parser


def _grid(options: argparse.Namespace) -> Grid:
    return Grid(
        options.workload,
        options.recipes,
        options.bits,
        options.seeds,
        options.optimizer,
        options.steps,
        options.topology,
        options.learning_rate,
    )


def _summary(row: Row) -> str:
    accuracy = "" if row.final.accuracy is None else f", accuracy {row.final.accuracy:.1%}"
    return (
        f"{row.settings.label}: loss {row.final.loss:.4f}{accuracy}, vNMSE {row.vnmse:.2e}, "
        f"{row.training_s:.0f} s"
    )


if __name__ == "__main__":
    main()
