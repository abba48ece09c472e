"""Plots all metrics of training runs, also while they train, into one picture. Needs matplotlib.

    python tests/experiments/watch.py runs/critic runs/sweet --every 10    # seconds, until Ctrl-C

One plot has the changes of log-prob of both sides of a policy's pairs, chosen and rejected
(dashed). MANUAL.md, "Reports and figures", says which curves to watch.
"""
import os
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from utils import fail_on_error, flag, parser, rows_of, run, say, writing


def plots_of(names):
    """Returns {title: metrics drawn in one plot}: those of the chosen and the rejected side."""
    plots = {}
    for name in sorted(names):
        title = re.sub("(chosen|rejected)_change", "change of log-prob (dashed: rejected)", name)
        plots.setdefault(title, []).append(name)
    return plots


def draw(axes, rows, name, color, label):
    """Draws a metric over the steps, if the run has it; dashed if it is of the rejected side."""
    values = {row["step"]: row[name] for row in rows if {"step", name} <= row.keys()}
    if not values:
        return
    if "rejected" in name:
        axes.plot(values.keys(), values.values(), "--", color=color, lw=0.8)
    else:
        axes.plot(values.keys(), values.values(), ".-", color=color, label=label, ms=3, lw=0.8)


def main(args):
    with fail_on_error("plots need matplotlib (pip install matplotlib)"):
        from matplotlib.figure import Figure
    while True:
        runs = {out: rows_of(out) for out in args.runs if os.path.exists(f"{out}/metrics.jsonl")}
        for out in set(args.runs) - runs.keys():
            say(f"warning: {out} has no metrics.jsonl yet")
        names = {name for rows in runs.values() for row in rows if "step" in row for name in row}
        plots = plots_of(names - {"step"})
        figure = Figure(figsize=(16, 9), layout="constrained")
        for i, (title, names) in enumerate(plots.items()):
            axes = figure.add_subplot(-(-len(plots) // 4), 4, i + 1, title=title, xlabel="step")
            for number, (out, rows) in enumerate(runs.items()):
                for name in names:
                    draw(axes, rows, name, f"C{number}", label=out)
            axes.legend(fontsize="small")
        with writing(args.png) as part:  # atomically, for viewers that reload it
            figure.savefig(part, format="png")
        if not args.every:
            break
        time.sleep(args.every)


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s RUN ... [flags]")
    p.add_argument("runs", nargs="+", metavar="RUN", help="the --out directory of a trainer")
    flag(p, "png", "metrics.png", "the picture to write", metavar="FILE")
    flag(p, "every", 0.0, "seconds between updates of the picture; 0: write it once")
    run(main, p.parse_args())
