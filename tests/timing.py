"""Shared by the benchmarks: flags, timing, output."""
import argparse
import os
import statistics
import time


def parser(doc, repeats):
    """Returns an ArgumentParser with --repeats, whose --help shows a docstring."""
    p = argparse.ArgumentParser(description=doc,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeats", type=int, default=repeats, help="number of measurements of each")
    return p


def time_alternately(functions, repeats, clock=time.perf_counter):
    """Returns ({name: [seconds]}, {name: last result}); each repeat calls all {name: function}."""
    seconds, results = {name: [] for name in functions}, {}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            results[name] = function()
            seconds[name].append(clock() - start)
    return seconds, results


def ratio(seconds, baseline):
    """Returns (median, minimum, maximum) of seconds / baseline, repeat by repeat."""
    ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def show(row):
    """Prints a row {"row": name, figure: value, ...} of a markdown table, on rank 0 only."""
    figures = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
               for name, value in row.items() if name != "row"]
    if not int(os.environ.get("RANK", 0)):
        print(f"| {row['row']} | {', '.join(figures)} |", flush=True)
