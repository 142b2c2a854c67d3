"""The picture of a comparison: training loss against the seconds it took to get there."""

from pathlib import Path

from evaluation.records import Link, Run


def draw_loss_vs_time(reference: Run, compressed: Run, link: Link, folder: Path) -> Path:
    """Write ``loss_vs_time.png`` and returns its path. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for run, colour, marker in ((reference, "0.45", "s"), (compressed, "tab:blue", "o")):
        seconds = [row.elapsed_s for row in run.rows]
        losses = [row.loss for row in run.rows]
        label = f"{run.plan.label}: {len(run.rows)} steps in {seconds[-1]:.0f} s"
        axes.plot(seconds, losses, color=colour, marker=marker, markersize=3.5, label=label)
    axes.set_xlabel("wall-clock time of training (s)")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title(_title(reference, link), fontsize="medium")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss_vs_time.png"
    FigureCanvasAgg(figure).print_figure(path, dpi=150)
    return path


def _title(run: Run, link: Link) -> str:
    ranks = f"The same training on {run.plan.world_size} ranks"
    if link.kind == "loopback":
        return f"{ranks} over loopback: no slow link, the times say nothing about one"
    return f"{ranks}, joined by links of {link.rate_mbit:g} Mbit/s"
