"""Compares collect.py's independent episodes with the lock-step loop of the released code.

    python tests/bench_collect.py [--model runs/base] [flags of collect.py]

Lock-step: all episodes of a batch sample a message, then all wait for the slowest reply, and the
next batch starts when the last episode has ended. Both loops have the same engine, seeds and slow
human, whose delay is log-normal like an LLM server's: median --delay (by default about the engine's
time for 64 messages), sigma 0.7. The default agent is an untrained tiny model, which never answers,
so that every episode has --max_turns turns.
"""
import asyncio
import math
import os
import statistics
import sys
import tempfile

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [TESTS, os.path.dirname(TESTS)]
import collect  # noqa: E402
import colbench  # noqa: E402
import toy  # noqa: E402
from conftest import demos, save  # noqa: E402
from timing import parser, ratio, show, time_alternately  # noqa: E402
from utils import rng  # noqa: E402


def get_args():
    p = parser(__doc__, repeats=5)
    p.add_argument("--model", help="directory of the agent's model")
    p.add_argument("--episodes", type=int, default=64, help="number of episodes, one per task")
    p.add_argument("--batch", type=int, default=64, help="number of concurrent episodes")
    p.add_argument("--delay", type=float, default=0.2, help="median seconds until a reply")
    args, flags = p.parse_known_args()
    return args, ["--max_turns", "6", "--max_tokens", "40", *flags]


def slow(reply, delay):
    """Returns a human who delays reply() by a time that depends only on task, sample and turn."""
    async def slow_reply(task, history):
        seconds = rng("delay", task["id"], task["sample"], len(history)).gauss(0, 0.7)
        await asyncio.sleep(delay * math.exp(seconds))
        return reply(task, history)
    return slow_reply


async def without_barriers(runner, jobs, batch):
    async def worker():
        for task in remaining:
            records.append(await runner.run_episode(task, task["sample"]))
    records, remaining = [], iter(jobs)
    await asyncio.gather(*(worker() for _ in range(batch)))
    return records


async def lock_step(runner, jobs, batch):
    episodes = []
    for start in range(0, len(jobs), batch):
        running = [colbench.Episode(task, runner.args.max_turns)
                   for task in jobs[start:start + batch]]
        episodes += running
        while running:
            messages = await asyncio.gather(*(
                runner.next_message(e.task, e.history, (0, e.task["id"], e.task["sample"], e.turn))
                for e in running))
            for episode, message in zip(running, messages):
                episode.act(message)
            running = [episode for episode in running if not episode.ended]
            replies = await asyncio.gather(*(runner.reply(e.task, e.history) for e in running))
            for episode, reply in zip(running, replies):
                episode.reply(reply)
    return [{"sample": e.task["sample"], **e.fields()} for e in episodes]


def compare(args, flags, tasks):
    loop = asyncio.new_event_loop()
    runner = loop.run_until_complete(collect.EpisodeRunner(collect.get_args(flags)).load())
    runner.reply = slow(runner.reply, args.delay)
    jobs = [{**task, "sample": i} for i, task in enumerate(tasks)]
    seconds, results = time_alternately({
        fn.__name__: lambda fn=fn: loop.run_until_complete(fn(runner, jobs, args.batch))
        for fn in (lock_step, without_barriers)}, args.repeats)
    texts = [sorted((r["sample"], [m["content"] for m in r["dialogue_history"]]) for r in records)
             for records in results.values()]
    time, least, most = ratio(seconds["lock_step"], seconds["without_barriers"])
    rate = len(jobs) / statistics.median(seconds["without_barriers"])
    show({"row": f"{len(jobs)} episodes by {args.batch}", "episodes_a_second": rate, "time": time,
          "least": least, "most": most, "same_text": sum(a == b for a, b in zip(*texts))})


if __name__ == "__main__":
    args, flags = get_args()
    stream = toy.tasks("train", toy.get_args(["tasks"]))
    tasks = [next(stream) for _ in range(args.episodes)]
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = os.path.join(folder, "model")
            save(toy.tiny_model(demos(200)), args.model)
        compare(args, ["--model", args.model, "--human", toy.__file__, *flags], tasks)
