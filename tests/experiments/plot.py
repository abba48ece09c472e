"""Plots evaluate.py's results with intervals: success, or the mean reward if there is no success.

    python evaluate.py ... | tee -a runs/results.jsonl | python tests/experiments/plot.py FILE.png

Systems NAME@X are the points of a curve NAME over X, other systems are horizontal lines. Without
curves, all systems are bars. Requires matplotlib.
"""
import json
import re
import sys

from matplotlib.figure import Figure


def main(path):
    results = [json.loads(line) for line in sys.stdin]
    metric = "success" if "success" in results[0] else "tests_passed"
    axes, curves, lines = Figure(figsize=(6, 4), layout="constrained").subplots(), {}, []
    for r in results:
        name, x = re.fullmatch(r"(?s)(.*?)(?:@(\d+\.?\d*))?", r["system"]).groups()
        value, low, high = (100 * v for v in (r[metric], *(r[f"{metric}_95"] or [r[metric]] * 2)))
        if x:
            curves.setdefault(name, []).append((float(x), value, low, high))
        else:
            lines.append((name, value, low, high))
    for i, (name, value, low, high) in enumerate(lines):
        if curves:
            axes.axhline(value, label=name, color=f"C{i}", linestyle="--")
        else:
            axes.bar(name, value, color=f"C{i}", yerr=[[value - low], [high - value]], capsize=4)
            axes.text(i, 2, f"{value:.1f}", ha="center", color="white")
    for name, points in curves.items():
        x, value, low, high = zip(*sorted(points))
        color = f"C{len(axes.lines)}"
        axes.plot(x, value, marker="o", label=name, color=color)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.set_ylabel(f"{metric.replace('_', ' ')} %")
    if curves:
        axes.legend()
    axes.figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
