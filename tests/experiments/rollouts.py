"""The advantages that a perfect critic of a policy would give, measured by play.

    python tests/experiments/rollouts.py --model runs/base -k 4 --max_turns 6 --max_tokens 40 \
        --human tests/toy.py < runs/train.jsonl > runs/scored.jsonl

A candidate's advantage is 5 times its Q: the mean reward of -k episodes of --model that go on from
it, or the reward of its answer. The flags are collect.py's; the records are of functions.
"""
import asyncio
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
import collect
from colbench import Grader, agent_messages, needs, read_action
from utils import progress, read_jsonl


class Rollouts(collect.Players):
    async def q(self, task, history, turn, output, key):
        """The mean reward behind an output, which is the agent's message `turn`."""
        n = self.args.k if self.answer(output, turn)[1] is None else 1
        return sum([await self.reward(task, history, turn, output, (*key, i))
                    for i in range(n)]) / n

    def answer(self, output, turn):
        return read_action(output, last=turn == self.args.max_turns - 1)

    async def reward(self, task, history, turn, output, key):
        """The reward of one episode that goes on from an output."""
        content, answer = self.answer(output, turn)
        history = [{"role": m["role"], "content": m["content"]} for m in history]
        while answer is None:
            history.append({"role": "assistant", "content": content})
            history.append({"role": "user", "content": await self.human(task, history)})
            turn += 1
            message = await self.act(task, history, (self.args.seed, task["id"], key, turn), 0)
            content, answer = self.answer(message["output"], turn)
        return (await asyncio.to_thread(self.grader.grade, task, answer))["reward"]

    async def all(self, records):
        """Sets the candidates' advantages."""
        await self.load()
        alike = {}  # (record, message, output): its candidates
        for i, r in enumerate(records):
            for turn, m in enumerate(agent_messages(r)):
                for c in m.get("candidates", ()):
                    alike.setdefault((i, turn, c["output"]), []).append(c)
        jobs = progress("candidates", iter(alike.items()), len(alike))

        async def work():
            for (i, turn, output), candidates in jobs:
                task, history = records[i]["task"], records[i]["dialogue_history"][:2 * turn + 1]
                q = await self.q(task, history, turn, output, (i, output))
                for c in candidates:
                    c["advantage"] = 5 * q

        with Grader() as self.grader:
            await asyncio.gather(*(work() for _ in range(self.args.concurrency)))


if __name__ == "__main__":
    records = list(read_jsonl(sys.stdin, needs("dialogue_history", to_grade=True)))
    asyncio.run(Rollouts(collect.get_args()).all(records))
    for record in records:
        print(json.dumps(record))
