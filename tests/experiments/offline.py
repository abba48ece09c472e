"""Converts ColBench's published offline trajectories to records that both trainers read.

    python tests/experiments/offline.py < colbench_code_offline_15k_llama8b.jsonl > episodes.jsonl
    python train_critic.py --model MODEL < episodes.jsonl > scored.jsonl
    python train_policy.py --loss mtdpo --model MODEL < episodes.jsonl

The file was not at hand: its form is known from the code that wrote it. There the instructions are
in each message's `input`, in another template, and the first message has the description alone.
Here the first message is first_message(task, --max_turns), and `input` is dropped. Trajectories of
a task, which are not in a row, are numbered by `sample`. What they lack for train_policy.py's
--loss dpo are candidates: collect.py --candidates 16 adds them, sampled from its --model.
"""
import os
import sys
from collections import Counter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from colbench import first_message, read_records, task_id  # noqa: E402
from utils import fail, flag, open_stdout, parser, run, say  # noqa: E402

USES = {"output": "the agent's thought", "token_ids": "what was sampled; the text is tokenized",
        "candidates": "for --loss dpo"}  # {field of the agent's messages: what it is for}


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < offline.jsonl > episodes.jsonl")
    flag(p, "max_turns", 10, "the number of turns that the first message tells", least=1)
    return p.parse_args(argv)


def main(args):
    emit, samples, lacking = open_stdout(), Counter(), Counter()
    for record in read_records(sys.stdin, "dialogue_history", "reward"):
        task, history = record["task"], record["dialogue_history"]
        if history[0] != {"role": "user", "content": task["problem_description"]}:
            fail(f"the first message of the task {task_id(task)} is not its description: is this "
                 "a file of another kind?")
        messages = [{name: m[name] for name in m if name != "input"} for m in history[1:]]
        emit({"reward_by": "official rules", **record, "sample": samples[task_id(task)],
              "dialogue_history": [first_message(task, args.max_turns), *messages]})
        samples[task_id(task)] += 1
        lacking["test_cases (to grade them again)"] += "test_cases" not in task
        agent = [m for m in messages if m["role"] == "assistant"]
        for name, use in USES.items():
            lacking[f"{name} ({use})"] += any(name not in m for m in agent)
    say(f"{sum(samples.values())} trajectories of {len(samples)} tasks")
    for name, count in lacking.items():
        if count:
            say(f"{count} lack {name}")


if __name__ == "__main__":
    run(main, get_args())
