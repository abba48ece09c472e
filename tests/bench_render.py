"""Pages drawn per second: with one worker, with two, and by one that takes no pictures.

    python tests/bench_render.py [--rounds 3] [--pages 24]

Beside them one worker whose pages load the whole style sheet. All draw the same pages, round after
round in turn, and give the same bytes. The figures are medians over the rounds.
"""
import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
from conftest import ROOT  # noqa: E402
from colbench import CACHE, Renderer  # noqa: E402

REAL = os.path.join(ROOT, "..", "shared", "colbench", "frontend_tasks.jsonl")
SHEET = os.path.join(CACHE, "tailwind.min.css")


def stand_ins(n):
    """Pages, where the real tasks are not beside this checkout."""
    return [f'<html><link rel="stylesheet" href="tailwind.css"><body class="bg-gray-{i % 8 + 1}00">'
            + f'<p class="p-{i % 9} text-xl">text {i}</p>' * 20 for i in range(n)]


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--pages", type=int, default=24)
    args = p.parse_args()
    pages = stand_ins(args.pages)
    if os.path.exists(REAL):
        with open(REAL, encoding="utf-8") as f:
            pages = [json.loads(line)["ground_truth"] for line in f][:args.pages]
    ways = {"whole sheet": Renderer(workers=1), "one": Renderer(workers=1),
            "two": Renderer(workers=2), "one, blocks alone": Renderer(workers=1, pictures=0)}
    with open(SHEET, encoding="utf-8") as f:
        whole = f.read()
    ways["whole sheet"].sheet = lambda page: whole
    rates, want = {name: [] for name in ways}, None
    for r in range(-1, args.rounds):  # the first round warms up
        for name, way in ways.items():
            start = time.perf_counter()
            with ThreadPoolExecutor(way.workers) as pool:
                drawn = list(pool.map(way.render, pages))
            if r >= 0:
                rates[name].append(len(pages) / (time.perf_counter() - start))
            want = want or drawn
            if not way.pictures:
                drawn = [{**d, "png": w["png"]} for d, w in zip(drawn, want)]
            assert drawn == want
    for way in ways.values():
        way.__exit__()
    middle = {name: round(statistics.median(x), 2) for name, x in rates.items()}
    times = {name: round(x / middle["whole sheet"], 2) for name, x in middle.items()}
    print(json.dumps({"pages": len(pages), "pages_per_second": middle, "times_whole_sheet": times}))


if __name__ == "__main__":
    main()
