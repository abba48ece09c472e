"""Plots all metrics of training runs, also while they train, into one picture. Needs matplotlib.

    python tests/experiments/watch.py runs/critic runs/sweet --every 10    # seconds, until Ctrl-C
"""
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from utils import fail_on_error, flag, parser, rows_of, run, say, writing


def main(args):
    with fail_on_error("plots need matplotlib (pip install matplotlib)"):
        from matplotlib.figure import Figure
    while True:
        runs = {out: rows_of(out) for out in args.runs if os.path.exists(f"{out}/metrics.jsonl")}
        for out in set(args.runs) - runs.keys():
            say(f"warning: {out} has no metrics.jsonl yet")
        names = {name for rows in runs.values() for row in rows if "step" in row for name in row}
        figure = Figure(figsize=(16, 9), layout="constrained")
        for i, name in enumerate(sorted(names - {"step"})):
            axes = figure.add_subplot((len(names) + 2) // 4, 4, i + 1, title=name, xlabel="step")
            for out, rows in runs.items():
                values = {row["step"]: row[name] for row in rows if {"step", name} <= row.keys()}
                axes.plot(values.keys(), values.values(), ".-", label=out, ms=3, lw=0.8)
            axes.legend()
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
