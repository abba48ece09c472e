"""What the benchmarks share: flags, and ways to do the same that run in turn."""
import argparse
import os
import statistics
import time


def parser(doc, repeats):
    """An ArgumentParser that shows the docstring, with --repeats."""
    p = argparse.ArgumentParser(description=doc,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeats", type=int, default=repeats, help="of all that is timed, in turn")
    return p


def in_turn(ways, repeats, clock=time.perf_counter):
    """({name: seconds of each repeat}, {name: what it gave last}) of {name: function}."""
    seconds, gave = {name: [] for name in ways}, {}
    for _ in range(repeats):
        for name, way in ways.items():
            start = clock()
            gave[name] = way()
            seconds[name].append(clock() - start)
    return seconds, gave


def ratio(seconds, of):
    """(median, least, most) of the quotients of two lists of seconds, repeat by repeat."""
    quotients = [a / b for a, b in zip(seconds, of, strict=True)]
    return statistics.median(quotients), min(quotients), max(quotients)


def show(row):
    """Prints a row, {"row": its name, figure: value}, as a line of a markdown table; on rank 0."""
    figures = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
               for name, value in row.items() if name != "row"]
    if not int(os.environ.get("RANK", 0)):
        print(f"| {row['row']} | {', '.join(figures)} |", flush=True)
