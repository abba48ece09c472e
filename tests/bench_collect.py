"""Collecting without barriers beside the lock-step loop of the released code.

    python tests/bench_collect.py [--model runs/base] [flags of collect.py]

Both have the same engine, seeds and slow human, who answers after a random time, log-normal as LLM
servers are: median --delay (by default about what the engine takes for a turn of 64), sigma 0.7.
Lock-step: all episodes of a batch sample, then all wait for the slowest reply; the next batch
starts when all have ended. Without --model an untrained tiny one plays. It never answers, so all
its episodes have --max_turns turns.
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
from timing import in_turn, parser, ratio, show  # noqa: E402
from utils import rng  # noqa: E402


def get_args():
    p = parser(__doc__, repeats=5)
    p.add_argument("--model", help="directory of the agent")
    p.add_argument("--episodes", type=int, default=64, help="played in one go, each of a task")
    p.add_argument("--batch", type=int, default=64, help="episodes under way at once, for both")
    p.add_argument("--delay", type=float, default=0.2, help="median seconds of a reply")
    args, flags = p.parse_known_args()
    return args, ["--max_turns", "6", "--max_tokens", "40", *flags]


class SlowHuman(collect.Players):
    """The scripted human, who takes a time that is a function of the message's place."""

    async def human(self, task, history):
        seconds = rng("delay", task["id"], task["sample"], len(history)).gauss(0, 0.7)
        await asyncio.sleep(self.delay * math.exp(seconds))
        return await super().human(task, history)


async def without_barriers(players, jobs, batch):
    async def player():
        for task in left:
            done.append(await players.run_episode(task, task["sample"]))
    done, left = [], iter(jobs)
    await asyncio.gather(*(player() for _ in range(batch)))
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
                    done.append({"sample": task["sample"], "dialogue_history": history})
            alive = going
            replies = await asyncio.gather(*(players.human(*a) for a in alive))
            for (_, history), reply in zip(alive, replies):
                history.append({"role": "user", "content": reply})
    return done


def compare(args, flags, tasks):
    loop = asyncio.new_event_loop()
    players = loop.run_until_complete(SlowHuman(collect.get_args(flags)).load())
    players.delay = args.delay
    jobs = [{**task, "sample": i} for i, task in enumerate(tasks)]
    seconds, gave = in_turn({
        way.__name__: lambda way=way: loop.run_until_complete(way(players, jobs, args.batch))
        for way in (lock_step, without_barriers)}, args.repeats)
    texts = [sorted((r["sample"], [m["content"] for m in r["dialogue_history"]]) for r in done)
             for done in gave.values()]
    time, least, most = ratio(seconds["lock_step"], seconds["without_barriers"])
    rate = len(jobs) / statistics.median(seconds["without_barriers"])
    show({"row": f"{len(jobs)} episodes by {args.batch}", "episodes_a_second": rate, "time": time,
          "least": least, "most": most, "same_text": sum(a == b for a, b in zip(*texts))})


if __name__ == "__main__":
    args, flags = get_args()
    made = toy.tasks("train", toy.get_args(["tasks"]))
    tasks = [next(made) for _ in range(args.episodes)]
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = os.path.join(folder, "model")
            save(toy.tiny(demos(200)), args.model)
        compare(args, ["--model", args.model, "--human", toy.__file__, *flags], tasks)
