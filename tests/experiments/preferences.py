"""Converts preference pairs, in the common formats of public datasets, to records for training.

    python tests/experiments/preferences.py < preferences.jsonl |
        python train_policy.py --loss mtdpo --model runs/base --out runs/mine

Each line becomes two trajectories of a task of its own: the chosen side with reward 1, the rejected
side with reward 0. FORMATS lists the columns of each format. A column may hold messages or one
message (OpenAI's or ShareGPT's), plain text, HH-RLHF's "Human: ... Assistant: ...", or messages as
JSON in a string. The column `system` becomes the first message, and the field reasoning_content a
<think> block in content. If the prompt ends with the beginning of an answer, the sides continue
that message. Other columns and fields are dropped.

Any other line is an error. --thinking 1, or "meta": {"thinking": 1} in a line, makes the trainers
render prompts with the chat template's thinking enabled, for answers that contain thoughts.
"""
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from utils import (RECORD, check_dialogue, check_shape, fail, flag, open_stdout,  # noqa: E402
                   parser, reject_unsupported, run)

FORMATS = {  # name: (columns of the prompt, column of the chosen side, of the rejected side)
    "UltraFeedback": (["prompt"], "chosen", "rejected"),
    "Orca": (["question"], "chosen", "rejected"),
    "Alpaca": (["instruction", "input"], "chosen", "rejected"),
    "ShareGPT": (["conversations"], "chosen", "rejected"),
    "Axolotl": (["messages"], "chosen", "rejected"),
    "ms-swift": (["messages"], None, "rejected_response"),  # chosen: the last of messages
    "HH-RLHF": ([], "chosen", "rejected")}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
         "chatgpt": "assistant", "developer": "system"}


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < preferences.jsonl > records.jsonl")
    flag(p, "thinking", 0, "1: enable the chat template's thinking, for answers with thoughts",
         choices=[0, 1])
    return p.parse_args(argv)


def main(args):
    emit = open_stdout()
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            pair = records(parse_row(line), number, args.thinking) if line.strip() else ()
        except ValueError as e:
            fail(f"stdin, line {number}: {e}")
        for record in pair:
            emit(record)


def records(row, number, thinking=0):
    """Returns the records of both sides of a row, chosen first; raises ValueError."""
    sides, meta = dialogues(row), row.get("meta")
    for name, dialogue in zip(("chosen", "rejected"), sides):
        check_shape(dialogue, RECORD["dialogue_history"], name)
        check_dialogue(dialogue, name)
        roles = [m["role"] for m in dialogue]
        if ("assistant", "assistant") in zip(roles, roles[1:]):
            raise ValueError(f"{name} has two messages of the assistant in a row")
    if sides[0] == sides[1]:
        raise ValueError("chosen and rejected are the same")
    task = {"id": f"of line {number}", "problem_description": "", "ground_truth": ""}
    thinking = int(bool(thinking or isinstance(meta, dict) and meta.get("thinking")))
    return [{"task": task, "dialogue_history": dialogue, "reward": reward,
             "meta": {"thinking": thinking}} for dialogue, reward in zip(sides, (1.0, 0.0))]


def parse_row(line):
    """Returns a line's JSON object as a dict; raises ValueError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def dialogues(row):
    """Returns [chosen, rejected] of a row, two whole dialogues; raises ValueError."""
    row = {name: value for name, value in row.items() if value is not None}
    for columns, chosen, rejected in FORMATS.values():
        if rejected in row and {*columns[:1], chosen or rejected} <= row.keys():
            break
    else:
        raise ValueError(f"not a preference in a known format: its columns are {', '.join(row)}")
    reject_unsupported({name: row[name] for name in row if name not in ("system", *columns)}, ())
    prompt = [m for name in columns if row.get(name) for m in messages(row[name], "user")]
    if len(columns) == len(prompt) == 2:  # append Alpaca's input to its instruction
        prompt = [{"role": "user", "content": "\n\n".join(m["content"] for m in prompt)}]
    if row.get("system") and not any(m["role"] == "system" for m in prompt):
        prompt = messages(row["system"], "system") + prompt
    sides = []
    for name in (chosen, rejected):
        if not name:
            prompt, side = prompt[:-1], prompt[-1:]
        else:
            side = messages(row[name], "assistant")
        if "assistant" not in [m["role"] for m in side]:
            raise ValueError(f"{name or 'chosen'} has no message of the assistant")
        sides.append(whole_dialogue(prompt, side))
    return sides


def whole_dialogue(prompt, side):
    """Joins prompt and side. The side may repeat the prompt, or continue its last message."""
    if side and side[0]["role"] != "assistant":  # it repeats the prompt, perhaps without system
        system = [m for m in prompt if m["role"] == "system"]
        rest = [m for m in prompt if m not in system]
        without_system = [m for m in side if m["role"] != "system"]
        if without_system[:len(rest)] != rest:
            raise ValueError("a side begins with the user, but with other messages than the prompt")
        return side if len(without_system) < len(side) else system + side
    if prompt and side and prompt[-1]["role"] == "assistant":
        content = prompt[-1]["content"] + side[0]["content"]
        return [*prompt[:-1], {"role": "assistant", "content": content}, *side[1:]]
    return prompt + side


def messages(value, role):
    """Returns the messages in a column; plain text becomes a message of this role."""
    if isinstance(value, str):
        value = from_text(value, role)
    return [message(m) for m in (value if isinstance(value, list) else [value])]


def from_text(text, role):
    """Parses text into messages: JSON, HH-RLHF's format, or else one message of this role."""
    try:
        value = json.loads(text)
        parsed = value if isinstance(value, list) else [value]
        if parsed and all(({"role", "content"} <= m.keys() or {"from", "value"} <= m.keys())
                          for m in parsed):
            return parsed
    except (ValueError, AttributeError):  # not JSON, or not messages
        pass
    if re.match(r"\s*(Human|Assistant):", text):
        parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text.strip())[1:]
        contents = map(str.strip, parts[1::2])
        return [{"role": name, "content": text} for name, text in zip(parts[::2], contents)]
    return [{"role": role, "content": text}]


def message(m):
    """Converts a message of OpenAI's or ShareGPT's format to {"role", "content"}."""
    if not isinstance(m, dict):
        raise ValueError(f"{str(m)[:40]!r} is not a message")
    reject_unsupported({name: m[name] for name in m if name != "reasoning_content"}, ())
    role = str(m.get("role") or m.get("from")).lower()
    content = m.get("content", m.get("value"))
    if isinstance(content, list):
        others = [part for part in content
                  if not isinstance(part, dict) or not isinstance(part.get("text"), str)]
        if others:
            raise ValueError(f"a part of content is not text: {str(others[0])[:40]}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or ROLES.get(role, role) not in ("system", "user", "assistant"):
        raise ValueError(f"{str(m)[:60]} has no text as content, or an unknown role")
    if thought := m.get("reasoning_content"):
        content = f"<think>\n{str(thought).strip()}\n</think>\n\n{content}"
    sampled = {"token_ids": m["token_ids"]} if m.get("token_ids") else {}
    return {"role": ROLES.get(role, role), "content": content, **sampled}


if __name__ == "__main__":
    run(main, get_args())
