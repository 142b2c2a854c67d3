"""The page of the benchmark, made from rows."""

from collections.abc import Sequence
from pathlib import Path

from evaluation.bench import figure, report
from evaluation.bench.records import AllReduceTask, BenchRow, TrainingTask

_INTRODUCTION = """\
# Time over slow links

Hosts are network namespaces on one machine, joined by a switch; each sends at most at the given
rate. A run measures its methods in turn, round after round, and its ratios are medians of the
rounds' ratios. A call lasts as long as on the slowest rank. "Share of link rate" is what the rank
that sends most would take to send its bytes at line rate, over the median time; bytes are those of
the network interface, of which TCP leaves 96 % of the rate for payloads; but a link lets the first
72 KiB through at once, which is much of what small calls send. "Cores" are processors that all
ranks together kept busy. "Exposed" is a step's time beyond that of a step that does not
communicate. "Codec" and "wire" are the mean rank's times in a pipeline of ours.
"""


def write_page(rows: Sequence[BenchRow], output: Path, command: str) -> list[Path]:
    """Write the page and, beside it, its pictures; return all their paths.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows: do some runs first")
    text, written = [_INTRODUCTION], [output]
    for heading, kind, name, draw in (
        ("All-reduces", AllReduceTask, "all-reduce", figure.draw_all_reduces),
        ("Training steps", TrainingTask, "steps", figure.draw_steps),
    ):
        group = [row for row in rows if isinstance(row.settings, kind)]
        if group:
            picture = output.with_name(f"{output.stem}-{name}.png")
            draw(group, picture)
            written.append(picture)
            text.append(f"## {heading}\n\n![{heading.lower()}]({picture.name})\n")
            text += [_section(row) for row in group]
    text.append(_origin(rows, command))
    output.write_text("\n".join(text), "utf-8")
    return written


def _section(row: BenchRow) -> str:
    head, lines = report.cells(row)
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ruler, *lines))
    return f"### {report.title(row)}\n\n{report.note(row)}\n\n{table}\n\n`{row.command}`\n"


def _origin(rows: Sequence[BenchRow], command: str) -> str:
    commits = sorted({row.commit or "no checkout" for row in rows})
    facts = rows[-1].environment
    return (
        f"## How it was made\n\n{len(rows)} runs at {', '.join(commits)}, on {facts['processor']} "
        f"({facts['cpus']} processors), with torch {facts['packages']['torch']}. The page is made "
        f"from their rows by\n\n    {command}\n"
    )
