"""Plots results, or the metrics of training runs. Needs matplotlib.

    python evaluate.py ... | tee -a runs/results.jsonl | python tests/experiments/plot.py FILE.png
    python tests/experiments/plot.py FILE.png --runs runs/critic runs/sweet   # also in training
    python tests/experiments/plot.py FILE.svg --table rounds < tests/experiments/RESULTS.md

Results are evaluate.py's: the success, or else the mean reward, with intervals. Systems NAME@X are
the points of a curve NAME over X, others are horizontal lines. Without curves all are bars.

Of --runs every metric has a plot of its own, but one plot has the changes of log-prob of both sides
of a policy's pairs, chosen and rejected (dashed). MANUAL.md says which curves to watch.

With --table NAME stdin is Markdown, and the table below the line <!-- NAME --> is plotted. Its
first column has the curves' names and its head the values of X. A cell is a percentage with its
interval, 86.8 [85.0, 88.2], or without one, or empty.
"""
import json
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import fail, parser, read_metrics, run  # noqa: E402

CELL = r"(\d+(?:\.\d+)?)(?: \[(\d+(?:\.\d+)?), (\d+(?:\.\d+)?)\])?"
BOTH_SIDES = "change of log-prob (dashed: rejected)"  # the title of their plot


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s FILE [--runs RUN ... | --table NAME < RESULTS.md | < results]")
    p.add_argument("out", metavar="FILE", help="picture to write, .png or .svg")
    p.add_argument("--runs", nargs="+", metavar="RUN", help="the --out directories of trainers")
    p.add_argument("--table", metavar="NAME", help="name of a Markdown table to plot")
    return p.parse_args(argv)


# --- training runs --------------------------------------------------------------------------------

def metrics_figure(outs):
    """Returns a figure of all metrics over the steps; each run has a color."""
    runs = {out: [row for row in read_metrics(out) if "step" in row] for out in outs}
    names_of = {}  # {title of a plot: [metric]}
    for name in sorted({name for rows in runs.values() for row in rows for name in row} - {"step"}):
        title = BOTH_SIDES if name in ("chosen_change", "rejected_change") else name
        names_of.setdefault(title, []).append(name)
    if not names_of:
        fail(f"no metrics in {', '.join(outs)} yet")
    figure = Figure(figsize=(16, 9), layout="constrained")
    for i, (title, names) in enumerate(names_of.items(), 1):
        axes = figure.add_subplot(-(-len(names_of) // 4), 4, i, title=title, xlabel="step")
        for number, (out, rows) in enumerate(runs.items()):
            for name in names:
                draw_metric(axes, rows, name, color=f"C{number}", label=out)
        axes.legend(fontsize="small")
    return figure


def draw_metric(axes, rows, name, color, label):
    """Draws a metric over the steps, if the run has it; dashed if it is of the rejected side."""
    values = {row["step"]: row[name] for row in rows if name in row}
    if values and "rejected" in name:
        axes.plot(values.keys(), values.values(), "--", color=color, lw=0.8)
    elif values:
        axes.plot(values.keys(), values.values(), ".-", color=color, label=label, ms=3, lw=0.8)


# --- results --------------------------------------------------------------------------------------

def table_results(text, name):
    """Returns (title, results): a Markdown table's first cell, its others like evaluate.py's."""
    table = text.partition(f"<!-- {name} -->\n")[2].partition("\n\n")[0]
    if not table:
        fail(f"stdin has no table below a line <!-- {name} -->")
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")]
            for line in table.splitlines()]
    (title, *xs), _, *rows = rows
    results = []
    for curve, *cells in rows:
        for x, cell in zip(xs, cells, strict=True):
            if not cell:
                continue
            found = re.fullmatch(CELL, cell)
            if not found:
                fail(f"the table {name} has a cell {cell!r}; write 86.8 [85.0, 88.2], 86.8 or "
                     "nothing")
            value, low, high = found.groups()
            interval = [float(low) / 100, float(high) / 100] if low else None
            results.append({"system": f"{curve}@{x}", "success": float(value) / 100,
                            "success_95": interval})
    return title, results


def curves_and_lines(results, metric):
    """Returns {name: [(x, value, low, high)]} and [(name, value, low, high)], in %."""
    curves, lines = {}, []
    for r in results:
        name, x = re.fullmatch(r"(?s)(.*?)(?:@(\d+\.?\d*))?", r["system"]).groups()
        low, high = r[f"{metric}_95"] or (r[metric], r[metric])
        numbers = 100 * r[metric], 100 * low, 100 * high
        if x:
            curves.setdefault(name, []).append((float(x), *numbers))
        else:
            lines.append((name, *numbers))
    return curves, lines


def draw_bars(axes, bars):
    for i, (name, value, low, high) in enumerate(bars):
        axes.bar(name, value, color=f"C{i}", yerr=[[value - low], [high - value]], capsize=4)
        axes.text(i, 2, f"{value:.1f}", ha="center", color="white")


def draw_curves(axes, curves, lines, with_values):
    for i, (name, value, _, _) in enumerate(lines):
        axes.axhline(value, label=name, color=f"C{i}", linestyle="--")
    for i, (name, points) in enumerate(curves.items(), len(lines)):
        x, value, low, high = np.array(sorted(points)).T
        axes.errorbar(x, value, [value - low, high - value], label=name, color=f"C{i}", marker="o",
                      capsize=3)
        for at, y in zip(x, value):
            if with_values:
                axes.annotate(f"{y:.1f}", (at, y), (6, -12), textcoords="offset points",
                              color=f"C{i}")
    xs = sorted({x for points in curves.values() for x, *_ in points})
    if xs[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.margins(x=0.1)
    axes.set_ylim(0, 100)
    axes.legend()


def results_figure(table):
    """Returns a figure of the results on stdin, or of the Markdown table of this name."""
    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    if table:
        title, results = table_results(sys.stdin.read(), table)
        axes.set_title(title, fontsize="medium")
    else:
        results = [json.loads(line) for line in sys.stdin]
    if not results:
        fail("stdin has no results; did the previous stage fail?")
    metric = "success" if "success" in results[0] else "reward"
    axes.set_ylabel("success %" if metric == "success" else "mean reward %")
    curves, lines = curves_and_lines(results, metric)
    if curves:
        draw_curves(axes, curves, lines, with_values=bool(table))
    else:
        draw_bars(axes, lines)
    return axes.figure


def main(args):
    # texts stay texts, and the same numbers make the same bytes
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plot"})
    figure = metrics_figure(args.runs) if args.runs else results_figure(args.table)
    metadata = {"Date": None} if args.out.endswith(".svg") else None
    figure.savefig(args.out, dpi=150, metadata=metadata)


if __name__ == "__main__":
    run(main, get_args())
