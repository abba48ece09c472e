"""Writes a run's model card, README.md, and the chat template with which to serve a policy.

    python tests/experiments/card.py runs/sweet < runs/trained.jsonl

stdin: the records that the run was trained on, of which the card shows how a dialogue begins.
"""
import json
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from colbench import HIDDEN, hidden_information, read_records, task_id, task_kind  # noqa: E402
from model import STRFTIME_NOW, TODAY, find_model, turn_actions  # noqa: E402
from utils import digest, parser, read_metrics, run, writing  # noqa: E402

CARD = """\
---
{base_model}library_name: transformers
---

- base: {base}
- command: `{command}`
- code: {version}
- last metrics: `{metrics}`

## Serving

The dialogues of its training: `opening` is what colbench.py's `first_message(task, max_turns)`
writes for a task with these fields and its own `problem_description`, and the agent has at most
`max_turns` messages.
```json
{dialogue}
```
To serve the model with the prompts of training, in which any date is {date}:
```bash
vllm serve . --served-model-name {name} --generation-config vllm --chat-template serve.j2
```
"""


def example_dialogue(records):
    """Returns what a program must know to talk with an agent trained on these records."""
    first = min(records, key=lambda r: (task_id(r["task"]), r.get("sample", 0)))
    task = first["task"]
    history, _ = next(turn_actions(first))
    # a demonstration may show the agent what only the critic will see
    shown = HIDDEN.format(hidden=hidden_information(task))
    opening = [{"role": m["role"], "content": m["content"].removeprefix(shown)} for m in history]
    fields = {"kind": task_kind(task)}
    if "agent_prompt" in task:
        fields["agent_prompt"] = task["agent_prompt"]
    # collect.py's --max_turns; else the most that there are
    n_turns = [r.get("meta", {}).get("max_turns", sum(1 for _ in turn_actions(r))) for r in records]
    return {"opening": opening, "max_turns": max(n_turns), "task": fields,
            "thinking": first.get("meta", {}).get("thinking", 0)}


def main(args):
    rows = read_metrics(args.run)
    start = [row for row in rows if "args" in row][-1]
    last = [row for row in rows if "step" in row][-1]
    base = start["args"]["model"]
    dialogue = example_dialogue([*read_records(sys.stdin, "dialogue_history")])
    # so that records of two policies, which collect.py compares, can be told apart
    name = f"{os.path.basename(os.path.abspath(args.run))}-{digest(start)[:6]}"
    base_model = "" if os.path.isdir(base) else f"base_model: {base}\n"
    card = CARD.format(name=name, base_model=base_model, base=base,
                       command=shlex.join(start["argv"]), version=start["version"],
                       metrics=json.dumps(last), dialogue=json.dumps(dialogue, indent=1), date=TODAY)
    # what a template may take from its caller, date and thinking, is fixed to training's
    thinking = "true" if dialogue["thinking"] else "false"
    template = find_model(args.run)[1].tokenizer.get_chat_template()
    served = f"{{%- set enable_thinking = {thinking} -%}}\n{STRFTIME_NOW}{template}"
    for name, text in ("README.md", card), ("serve.j2", served):
        with writing(os.path.join(args.run, name)) as part:
            Path(part).write_text(text, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s RUN < in.jsonl")
    p.add_argument("run", metavar="RUN", help="the --out directory of train_policy.py")
    run(main, p.parse_args())
