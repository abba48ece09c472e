"""Scores candidates like a perfect critic of --model would: by rollouts.

    python tests/experiments/rollouts.py --model runs/base -k 4 --max_turns 6 --max_tokens 40 \
        --human tests/toy.py < runs/train.jsonl > runs/scored.jsonl

A candidate's advantage is 5 times its Q value: the reward if it is an answer, else the mean reward
of -k episodes that continue from it. Flags are those of collect.py. For backend tasks only.
"""
import asyncio
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
import collect
from colbench import Grader, agent_messages, read_action, read_records
from utils import open_stdout, progress


class Rollouts(collect.EpisodeRunner):
    async def q(self, task, history, turn, output, key):
        """Returns the Q value of an output, which is the agent's message number `turn`."""
        n = self.args.k if self.answer(output, turn)[1] is None else 1
        return sum([await self.reward(task, history, turn, output, (*key, i))
                    for i in range(n)]) / n

    def answer(self, output, turn):
        return read_action(self.opening + output, last=turn == self.args.max_turns - 1)

    async def reward(self, task, history, turn, output, key):
        """Returns the reward of one episode that continues from an output."""
        content, answer = self.answer(output, turn)
        history = [{"role": m["role"], "content": m["content"]} for m in history]
        while answer is None:
            history.append({"role": "assistant", "content": content})
            history.append({"role": "user", "content": await self.human_reply(task, history)})
            turn += 1
            turn_key = self.args.seed, task["id"], key, turn
            message = await self.next_message(task, history, turn_key)
            content, answer = self.answer(message["output"], turn)
        return (await asyncio.to_thread(self.grader.grade, task, answer))["reward"]

    async def score(self, records):
        """Sets the candidates' advantages. Equal candidates of a turn are scored once."""
        await self.load()
        candidates_of = {}  # {(record number, turn, output): [candidate]}
        for i, r in enumerate(records):
            for turn, m in enumerate(agent_messages(r)):
                for c in m.get("candidates", ()):
                    candidates_of.setdefault((i, turn, c["output"]), []).append(c)
        jobs = progress("candidates", iter(candidates_of.items()), len(candidates_of))

        async def worker():
            for (i, turn, output), candidates in jobs:
                task, history = records[i]["task"], records[i]["dialogue_history"][:2 * turn + 1]
                q = await self.q(task, history, turn, output, (i, output))
                for c in candidates:
                    c["advantage"] = 5 * q

        with Grader() as self.grader:
            await asyncio.gather(*(worker() for _ in range(self.args.concurrency)))


if __name__ == "__main__":
    emit = open_stdout()
    records = [*read_records(sys.stdin, "dialogue_history", to_grade=True)]
    asyncio.run(Rollouts(collect.get_args()).score(records))
    for record in records:
        emit(record)
