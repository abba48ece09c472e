"""Pages drawn per second, with one worker and with two, beside a fresh tab with the whole style sheet for each page,
and by one worker that takes no pictures, as the likeness of blocks needs none.

    python tests/bench_render.py [--rounds 3] [--pages 24]

All draw the same pages, round after round in turn, and give the same bytes; the figures are medians over the rounds.
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
LINK = '<link href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css" rel="stylesheet">'


def few(n):
    """Stand-ins, where the real tasks are not beside this checkout."""
    return [f'<html>{LINK}<body class="bg-gray-{i % 8 + 1}00">' + f'<p class="p-{i % 9} text-xl">text {i}</p>' * 20
            for i in range(n)]


class Fresh(Renderer):
    """A new tab for each page, which gets the whole sheet."""

    async def shoot(self, opened, page):
        self.idle.clear()
        out = await super().shoot(opened, page)
        await self.idle.pop()[1].context.close()
        return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--pages", type=int, default=24)
    args = p.parse_args()
    pages = few(args.pages)
    if os.path.exists(REAL):
        pages = [json.loads(line)["ground_truth"] for line in open(REAL)][:args.pages]
    ways = {"fresh": Fresh(workers=1), "one": Renderer(workers=1), "two": Renderer(workers=2),
            "one, blocks alone": Renderer(workers=1, pictures=0)}
    whole = open(os.path.join(CACHE, "tailwind.min.css"), encoding="utf-8").read()
    ways["fresh"].sheet = lambda page: whole
    rates, first = {name: [] for name in ways}, None
    for r in range(-1, args.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            with ThreadPoolExecutor(way.workers) as pool:
                drawn = list(pool.map(way.render, pages))
            if r >= 0:
                rates[name].append(len(pages) / (time.perf_counter() - start))
            first = first or drawn
            assert drawn == first if way.pictures else [{**d, "png": f["png"]} for d, f in zip(drawn, first)] == first
    for way in ways.values():
        way.__exit__()
    middle = {name: round(statistics.median(x), 2) for name, x in rates.items()}
    print(json.dumps({"pages": len(pages), "pages_per_second": middle, "times_fresh": {
        name: round(statistics.median(a / b for a, b in zip(rates[name], rates["fresh"])), 2) for name in rates}}))


if __name__ == "__main__":
    main()
