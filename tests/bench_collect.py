"""Collecting without barriers beside the lock-step loop of the released code, or another checkout.

    python tests/bench_collect.py [--model runs/base]  # speed: same engine, seeds, slow human
    python tests/bench_collect.py --sampling DIR --model DIR  # tokens a second of the embedded
                                                       # engine, beside another checkout's, in DIR
    python tests/bench_collect.py --ceiling DIR --model DIR  # turns a CPU second, beside those
                                                       # of another checkout, in DIR

The human answers after a random time, log-normal as LLM servers are: median --delay (by default
about what the engine takes for a turn of 64), sigma --sigma. Lock-step: all episodes of a batch
sample, then all wait for the slowest reply; the next batch starts when all have ended. Medians
go to stdout as JSON. Without --model an untrained tiny one plays. It never answers, so all its
episodes have --max_turns turns.

--sampling: --tasks English tasks, --candidates at every turn. Loading the model is not counted.

--ceiling: 16 episodes of up to 10 turns with 16 candidates each, replies of 390 characters, draws
of English and Python that cost nothing. It counts the CPU seconds of collect.py's own process:
prompts, texts, records, JSON. Both checkouts must write the same records.
"""
import argparse
import asyncio
import io
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [TESTS, os.environ.get("CHECKOUT", os.path.dirname(TESTS))]
import collect  # noqa: E402
import colbench  # noqa: E402
import model  # noqa: E402
from conftest import ROOT, demos, lines  # noqa: E402
from utils import rng  # noqa: E402


def get_args():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="directory of the agent")
    p.add_argument("--episodes", type=int, nargs="+", default=[64, 256], help="played in one go")
    p.add_argument("--batch", type=int, default=64, help="episodes under way at once, for both")
    p.add_argument("--delay", type=float, default=0.2, help="median seconds of a reply")
    p.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of a reply's seconds")
    p.add_argument("--max_turns", type=int, default=6)
    p.add_argument("--max_tokens", type=int, default=40)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--sampling", metavar="DIR", help="another checkout, to compare this one with")
    p.add_argument("--tasks", type=int, default=4, help="--sampling: English tasks")
    p.add_argument("--dtype", default="fp32", help="--sampling: this checkout's; the other's: fp32")
    p.add_argument("--candidates", type=int, default=16, help="--sampling: at every turn")
    p.add_argument("--ceiling", metavar="DIR", help="another checkout, to compare this one with")
    p.add_argument("--description", type=int, default=1000, help="--ceiling: tokens of a task")
    p.add_argument("--message", type=int, default=200, help="--ceiling: mean tokens of a draw")
    return p.parse_args()


class SlowHuman(collect.Players):
    """The scripted human, who takes a time that is a function of the message's place."""

    async def human(self, task, history):
        seconds = rng("delay", task["id"], task["sample"], len(history)).gauss(0, self.sigma)
        await asyncio.sleep(self.delay * math.exp(seconds))
        return await super().human(task, history)


async def without_barriers(players, jobs, batch):
    async def player(jobs):
        for task in jobs:
            done.append(await players.play(task, task["sample"]))
    done, jobs = [], iter(jobs)
    await asyncio.gather(*(player(jobs) for _ in range(batch)))
    return done


async def lock_step(players, jobs, batch):
    done = []
    for at in range(0, len(jobs), batch):
        alive = [(task, [colbench.first_message(task, players.args.max_turns)])
                 for task in jobs[at:at + batch]]
        for turn in range(players.args.max_turns):
            messages = await asyncio.gather(*(
                players.act(task, history, (0, task["id"], task["sample"], turn), 0)
                for task, history in alive))
            going = []
            for (task, history), message in zip(alive, messages):
                last = turn == players.args.max_turns - 1
                message["content"], answer = colbench.read_action(message["output"], last)
                history.append(message)
                if answer is None:
                    going.append((task, history))
                else:
                    done.append({"sample": task["sample"], "dialogue_history": history,
                                 "answer": answer})
            alive = going
            replies = await asyncio.gather(*(players.human(*a) for a in alive))
            for (_, history), reply in zip(alive, replies):
                history.append({"role": "user", "content": reply})
    return done


async def speed(args, flags):
    players = await SlowHuman(collect.get_args(flags)).load()
    players.delay, players.sigma = args.delay, args.sigma
    for episodes in args.episodes:
        tasks = colbench.ENVIRONMENTS["backend"].tasks("train", colbench.get_args(["tasks"]))
        jobs = [{**next(tasks), "sample": i} for i in range(episodes)]
        times, texts = {lock_step: [], without_barriers: []}, {}
        for repeat in range(args.repeats):
            for way in times:
                start = time.perf_counter()
                done = await way(players, jobs, args.batch)
                times[way].append(time.perf_counter() - start)
                texts[way] = {r["sample"]: [m["content"] for m in r["dialogue_history"]]
                              for r in done}
                assert len(done) == episodes
        same = sum(texts[lock_step][i] == texts[without_barriers][i] for i in range(episodes))
        ratios = [a / b for a, b in zip(times[lock_step], times[without_barriers])]
        out = {"episodes": episodes, "batch": args.batch, "delay": args.delay, "sigma": args.sigma,
               "episodes_per_second": {way.__name__: round(episodes / statistics.median(t), 2)
                                       for way, t in times.items()},
               "ratio": round(statistics.median(ratios), 2),
               "ratios": [round(r, 2) for r in sorted(ratios)], "same_text": same}
        print(json.dumps(out), flush=True)


def measured(flags, tasks, engine=None):
    """Records that collect.py writes of these tasks; its seconds and CPU seconds without loading.

    engine: in the place of the embedded one.
    """
    embedded, records, began = collect.TransformersEngine, [], []

    def loaded(args, stop):
        made = engine or embedded(args, stop)
        began[:] = time.perf_counter(), time.process_time()
        return made

    collect.TransformersEngine, collect.open_stdout = loaded, lambda: records.append
    sys.stdin = io.BytesIO(lines({"task": task} for task in tasks).encode())
    collect.main(collect.get_args(flags))
    return records, time.perf_counter() - began[0], time.process_time() - began[1]


def no_engine(args, flags):
    """Plays episodes whose draws cost nothing; prints them and {"turns", "cpu_seconds", ...}."""
    random_, tokenizer = random.Random(0), model.find_model(args.model)[1]
    flags = [*flags, "--candidates", "16", "--max_turns", "10"]
    flags += ["--human", "fixed:" + "It is so. " * 39]
    names = "README.md", "colbench.py", "model.py", "utils.py"
    texts = [open(os.path.join(ROOT, name), encoding="utf-8").read() for name in names]
    ids = tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"]

    def piece(tokens):
        at = random_.randrange(len(ids) - tokens)
        return ids[at:at + tokens]

    drawn = [piece(random_.randrange(args.message // 5, 2 * args.message)) for _ in range(4000)]
    drawn = [(ids, [round(-random_.random(), 6) for _ in ids]) for ids in drawn]
    lengths = []

    async def engine(prompt, draws):
        lengths.append(len(prompt))
        await asyncio.sleep(0)
        at = rng(*draws[0]).randrange(len(drawn) - len(draws))
        return drawn[at:at + len(draws)]

    tasks = [{"id": f"t{i:02}", "ground_truth": "def f(x): return x", "test_cases": {"a": "f(1)"},
              "problem_description": tokenizer.decode(piece(args.description))} for i in range(16)]
    records, _, cpu = measured(flags, tasks, engine)
    print(lines(records) + json.dumps({"turns": len(lengths), "cpu_seconds": cpu,
                                       "longest_prompt": max(lengths)}))


def in_both(args, other):
    """For each repeat what both checkouts wrote, this one's first: two lists of records."""
    for repeat in range(args.repeats):
        both = []
        for checkout in (ROOT, other):
            done = subprocess.run([sys.executable, *sys.argv], stdout=subprocess.PIPE, check=True,
                                  env={**os.environ, "CHECKOUT": os.path.abspath(checkout)})
            both.append([json.loads(line) for line in done.stdout.splitlines()])
        yield both


def ceiling(args):
    """Both checkouts in turn: turns a CPU second, and their ratio."""
    rates, written = [], set()
    for both in in_both(args, args.ceiling):
        rates.append([last["turns"] / last["cpu_seconds"] for *_, last in both])
        for *episodes, last in both:
            played = sorted((r["task"]["id"], r["dialogue_history"]) for r in episodes)
            written.add(json.dumps(played))
    assert len(written) == 1, "the checkouts do not write the same records"
    print(json.dumps({"message": args.message, "longest_prompt": last["longest_prompt"],
                      **compared("turns_a_cpu_second", rates)}))


def compared(name, rates):
    """Medians of [(this checkout's rate, the other's)], and of their ratios."""
    here, other = zip(*rates)
    ratios = sorted(round(a / b, 2) for a, b in rates)
    return {name: round(statistics.median(here)), "other": round(statistics.median(other)),
            "ratio": round(statistics.median(ratios), 2), "ratios": ratios}


def sample(args, flags):
    """Plays English tasks; prints {"second", "cpu_second"}: tokens of all draws in one."""
    flags = [*flags, "--candidates", str(args.candidates)]
    if os.environ["CHECKOUT"] == ROOT:
        flags += ["--dtype", args.dtype]
    given = colbench.get_args(["tasks", "--kind", "english"])
    tasks = colbench.ENVIRONMENTS["english"].tasks("train", given)
    records, seconds, cpu = measured(flags, itertools.islice(tasks, args.tasks))
    drawn = [len(action["token_ids"]) for r in records for m in r["dialogue_history"]
             if m["role"] == "assistant" for action in (m, *m.get("candidates", ()))]
    print(json.dumps({"second": sum(drawn) / seconds, "cpu_second": sum(drawn) / cpu}))


def sampling(args):
    """Both checkouts in turn: tokens a second, and a CPU second, and their ratios."""
    both = [[last for [last] in pair] for pair in in_both(args, args.sampling)]
    of = {name: compared(f"tokens_a_{name}", [[last[name] for last in pair] for pair in both])
          for name in ("second", "cpu_second")}
    print(json.dumps({"tasks": args.tasks, "candidates": args.candidates,
                      "max_tokens": args.max_tokens, "runs": list(of.values())}))


if __name__ == "__main__":
    args = get_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = os.path.join(folder, "model")
            model.save(*model.tiny(demos(200), 0, colbench.PIECES), args.model)
        flags = ["--model", args.model, "--engine", "transformers",
                 "--max_turns", str(args.max_turns), "--max_tokens", str(args.max_tokens)]
        if "CHECKOUT" in os.environ:
            (no_engine if args.ceiling else sample)(args, flags)
        elif args.sampling:
            sampling(args)
        elif args.ceiling:
            ceiling(args)
        else:
            asyncio.run(speed(args, flags))
