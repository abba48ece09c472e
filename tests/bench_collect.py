"""Collecting without barriers beside the lock-step loop of the released code; its memory; what kills change.

    python tests/bench_collect.py [--model runs/base]    # same engine, same seeds, same slow human; a table on stderr
    python tests/bench_collect.py --memory 10000         # resident memory of collect.py along so many episodes
    python tests/bench_collect.py --kills 8              # the same episodes with kill -9 and --resume: how many differ

The human answers after a time drawn from a log-normal distribution, as the latencies of LLM servers are spread: median
--delay (by default about what the engine takes for a turn of 64), sigma --sigma. Lock-step: all episodes of a batch
sample, then all wait for the slowest reply; the next batch starts when all have ended. Figures are medians, as JSON on
stdout. Without --model it makes an untrained tiny one, which never answers: all episodes have --max_turns turns.
"""
import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import collect  # noqa: E402
import colbench  # noqa: E402
from conftest import ROOT, demos, lines  # noqa: E402
from utils import rng  # noqa: E402


def get_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="directory of the agent")
    p.add_argument("--episodes", type=int, nargs="+", default=[64, 256], help="played in one go")
    p.add_argument("--batch", type=int, default=64, help="episodes under way at once, for both")
    p.add_argument("--delay", type=float, default=0.2, help="median seconds of a reply")
    p.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of a reply's seconds")
    p.add_argument("--max_turns", type=int, default=6)
    p.add_argument("--max_tokens", type=int, default=40)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--memory", type=int, default=0, help="episodes; measures memory instead")
    p.add_argument("--kills", type=int, default=0, help="kills of a run of 1,000 episodes; measures what they change")
    return p.parse_args()


class SlowHuman(collect.Players):
    """The scripted human of the built-in tasks, who takes his time; how long is a function of the message's place."""

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
        alive = [(task, [colbench.first_message(task, players.args.max_turns)]) for task in jobs[at:at + batch]]
        for turn in range(players.args.max_turns):
            messages = await asyncio.gather(*(players.act(task, history, (0, task["id"], task["sample"], turn), 0)
                                              for task, history in alive))
            going = []
            for (task, history), message in zip(alive, messages):
                message["content"], answer = colbench.read_action(message["output"], turn == players.args.max_turns - 1)
                history.append(message)
                if answer is None:
                    going.append((task, history))
                else:
                    done.append({"sample": task["sample"], "dialogue_history": history, "answer": answer})
            alive = going
            for (_, history), reply in zip(alive, await asyncio.gather(*(players.human(*a) for a in alive))):
                history.append({"role": "user", "content": reply})
    return done


async def speed(args, flags):
    players = await SlowHuman().make(collect.get_args(flags))
    players.delay, players.sigma = args.delay, args.sigma
    for episodes in args.episodes:
        tasks = colbench.builtin_tasks("train", 0, 2, 4, 0.65)
        jobs = [{**next(tasks), "sample": i} for i in range(episodes)]
        times, texts = {lock_step: [], without_barriers: []}, {}
        for repeat in range(args.repeats):
            for way in times:
                start = time.perf_counter()
                done = await way(players, jobs, args.batch)
                times[way].append(time.perf_counter() - start)
                texts[way] = {r["sample"]: [m["content"] for m in r["dialogue_history"]] for r in done}
                assert len(done) == episodes
        same = sum(texts[lock_step][i] == texts[without_barriers][i] for i in range(episodes))
        ratios = [a / b for a, b in zip(times[lock_step], times[without_barriers])]
        out = {"episodes": episodes, "batch": args.batch, "delay": args.delay, "sigma": args.sigma,
               "episodes_per_second": {way.__name__: round(episodes / statistics.median(t), 2)
                                       for way, t in times.items()},
               "ratio": round(statistics.median(ratios), 2), "ratios": [round(r, 2) for r in sorted(ratios)],
               "same_text": same}
        print(json.dumps(out), flush=True)


def start(flags, out, stdin):
    return subprocess.Popen([sys.executable, "collect.py", *flags], cwd=ROOT, stdin=open(stdin), stdout=out,
                            stderr=subprocess.DEVNULL)


def memory(args, flags, folder):
    """MB resident in collect.py's process, at each tenth of the episodes."""
    with open(os.path.join(folder, "tasks"), "w") as f:
        tasks = colbench.builtin_tasks("train", 0, 2, 4, 0.65)
        f.write(lines({"task": {**next(tasks), "id": str(i)}} for i in range(args.memory // 10)))
    process, seen = start([*flags, "-k", "10", "--max_tokens", "8", "--max_turns", "3"], subprocess.PIPE, f.name), []
    for n, _ in enumerate(process.stdout, 1):
        if n % (args.memory // 10) == 0:
            status = open(f"/proc/{process.pid}/status").read()
            seen.append(round(int(status.split("VmRSS:")[1].split()[0]) / 1024))
    assert process.wait() == 0 and n == args.memory
    print(json.dumps({"episodes": n, "resident_mb_at_each_tenth": seen}))


def kills(args, flags, folder):
    """Plays 1,000 episodes undisturbed, then again with kills at random moments; counts keys and texts that differ."""
    with open(os.path.join(folder, "tasks"), "w") as f:
        tasks = colbench.builtin_tasks("train", 0, 2, 4, 0.65)
        f.write(lines({"task": {**next(tasks), "id": str(i)}} for i in range(250)))
    path, flags, random_ = os.path.join(folder, "all"), [*flags, "-k", "4", "--max_turns", "6"], random.Random(0)
    with open(path + "-whole", "w") as out:
        assert start(flags, out, f.name).wait() == 0
    written = lambda: open(path, "rb").read().count(b"\n")
    for kill in range(args.kills + 1):
        with open(path, "a") as out:
            process = start([*flags, "--resume", path], out, f.name)
        at = written() + random_.randrange(1, 1600 // args.kills) if kill < args.kills else 10 ** 9
        while process.poll() is None and written() < at:
            time.sleep(0.01)
        process.kill()
        process.wait()
    whole, again = ([json.loads(line) for line in open(p)] for p in (path + "-whole", path))
    key = lambda r: (r["task"]["id"], r["sample"])
    text = lambda r: [m["content"] for m in r["dialogue_history"]]
    assert sorted(map(key, whole)) == sorted(map(key, again)), "not the same episodes, each once"
    whole = {key(r): text(r) for r in whole}
    print(json.dumps({"episodes": len(whole), "kills": args.kills,
                      "texts_that_differ": sum(text(r) != whole[key(r)] for r in again)}))


if __name__ == "__main__":
    args = get_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            import model
            args.model = os.path.join(folder, "model")
            model.save(*model.tiny(demos(200), seed=0, pieces=colbench.PIECES), args.model)
        flags = ["--model", args.model, "--engine", "transformers", "--max_turns", str(args.max_turns),
                 "--max_tokens", str(args.max_tokens)]
        if args.memory:
            memory(args, flags, folder)
        elif args.kills:
            kills(args, flags, folder)
        else:
            asyncio.run(speed(args, flags))
