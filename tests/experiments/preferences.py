"""Preferences, in the commonest forms of public files, to records that train_policy.py reads.

    python tests/experiments/preferences.py < theirs.jsonl |
        python train_policy.py --loss mtdpo --model runs/base --out runs/mine

A line becomes two trajectories of a task of its own: the chosen one, solved, and the rejected one.
FORMS says in which columns a form has what was said before, and the sides. In each may stand
messages of OpenAI's or ShareGPT's kind, one message, text, the text "Human: ... Assistant: ..." of
HH-RLHF, or JSON of these in a string. A column `system` becomes the first message,
reasoning_content a thought in content, and an answer that the prompt begins a part of the message
that goes on. Other columns and fields are dropped.

A line of another form ends the program, and the error names it. --thinking 1, or a line's own
"meta": {"thinking": 1}, says that the model's template shall think, for answers with thoughts.
"""
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from utils import (RECORD, check_dialogue, check_shape, fail, flag, open_stdout,  # noqa: E402
                   parser, reject_unsupported, run)

FORMS = {  # name: (columns of what was said before, the chosen side, the rejected side)
    "UltraFeedback": (["prompt"], "chosen", "rejected"),
    "Orca": (["question"], "chosen", "rejected"),
    "Alpaca": (["instruction", "input"], "chosen", "rejected"),
    "ShareGPT": (["conversations"], "chosen", "rejected"),
    "Axolotl": (["messages"], "chosen", "rejected"),
    "ms-swift": (["messages"], None, "rejected_response"),  # messages end with the chosen answer
    "HH-RLHF": ([], "chosen", "rejected")}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
         "chatgpt": "assistant", "developer": "system"}


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < theirs.jsonl > ours.jsonl")
    flag(p, "thinking", 0, "1: answers have thoughts, and the template shall think",
         choices=[0, 1])
    return p.parse_args(argv)


def main(args):
    emit = open_stdout()
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            pair = records(record_in(line), number, args.thinking) if line.strip() else ()
        except ValueError as e:
            fail(f"stdin, line {number}: {e}")
        for record in pair:
            emit(record)


def records(row, number, thinking=0):
    """[the chosen side, the rejected side] of a line, as records; else ValueError."""
    sides, meta = preference(row), row.get("meta")
    for name, said in zip(("chosen", "rejected"), sides):
        check_shape(said, RECORD["dialogue_history"], name)
        check_dialogue(said, name)
        roles = [m["role"] for m in said]
        if ("assistant", "assistant") in zip(roles, roles[1:]):
            raise ValueError(f"{name} has two messages of the assistant in a row")
    if sides[0] == sides[1]:
        raise ValueError("chosen and rejected are the same")
    task = {"id": f"of line {number}", "problem_description": "", "ground_truth": ""}
    thinking = int(bool(thinking or isinstance(meta, dict) and meta.get("thinking")))
    return [{"task": task, "dialogue_history": said, "reward": reward,
             "meta": {"thinking": thinking}} for said, reward in zip(sides, (1.0, 0.0))]


def record_in(line):
    """The JSON object in a line; ValueError if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object with fields")
    return row


def preference(row):
    """[chosen, rejected], whole conversations, of a line of one of FORMS; else ValueError."""
    row = {name: value for name, value in row.items() if value is not None}
    for before, chosen, rejected in FORMS.values():
        if rejected in row and {*before[:1], chosen or rejected} <= row.keys():
            break
    else:
        raise ValueError(f"no preference of a known form: its columns are {', '.join(row)}")
    reject_unsupported({name: row[name] for name in row if name not in ("system", *before)}, ())
    said = [m for name in before if row.get(name) for m in messages(row[name], "user")]
    if len(before) == len(said) == 2:  # Alpaca's input belongs to its instruction
        said = [{"role": "user", "content": "\n\n".join(m["content"] for m in said)}]
    if row.get("system") and not any(m["role"] == "system" for m in said):
        said = messages(row["system"], "system") + said
    sides = []
    for name in (chosen, rejected):
        if not name:
            said, own = said[:-1], said[-1:]
        else:
            own = messages(row[name], "assistant")
        if "assistant" not in [m["role"] for m in own]:
            raise ValueError(f"{name or 'chosen'} has no message of the assistant")
        sides.append(conversation(said, own))
    return sides


def conversation(said, side):
    """The whole of what was said before and a side, which may begin with it or go on in a word."""
    if side and side[0]["role"] != "assistant":  # it is whole, but the system text may be missing
        system = [m for m in said if m["role"] == "system"]
        rest = [m for m in said if m not in system]
        own = [m for m in side if m["role"] != "system"]
        if own[:len(rest)] != rest:
            raise ValueError("a side begins with the user, but with other messages than the prompt")
        return side if len(own) < len(side) else system + side
    if said and side and said[-1]["role"] == "assistant":
        begun = said[-1]["content"] + side[0]["content"]
        return [*said[:-1], {"role": "assistant", "content": begun}, *side[1:]]
    return said + side


def messages(value, role):
    """The messages in a column; role: that of a text without one."""
    if isinstance(value, str):
        value = from_text(value, role)
    return [message(m) for m in (value if isinstance(value, list) else [value])]


def from_text(text, role):
    """The messages that a text holds: JSON of them, HH-RLHF's, or itself as one."""
    try:
        value = json.loads(text)
        found = value if isinstance(value, list) else [value]
        if found and all(({"role", "content"} <= m.keys() or {"from", "value"} <= m.keys())
                         for m in found):
            return found
    except (ValueError, AttributeError):  # it is no JSON, or that of something else
        pass
    if re.match(r"\s*(Human|Assistant):", text):
        parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text.strip())[1:]
        said = map(str.strip, parts[1::2])
        return [{"role": who, "content": text} for who, text in zip(parts[::2], said)]
    return [{"role": role, "content": text}]


def message(m):
    """{"role", "content"} of a message of OpenAI's or ShareGPT's kind."""
    if not isinstance(m, dict):
        raise ValueError(f"{str(m)[:40]!r} is no message")
    reject_unsupported({name: m[name] for name in m if name != "reasoning_content"}, ())
    role = str(m.get("role") or m.get("from")).lower()
    content = m.get("content", m.get("value"))
    if isinstance(content, list):
        others = [part for part in content
                  if not isinstance(part, dict) or not isinstance(part.get("text"), str)]
        if others:
            raise ValueError(f"a part of content is no text: {str(others[0])[:40]}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or ROLES.get(role, role) not in ("system", "user", "assistant"):
        raise ValueError(f"{str(m)[:60]} is no message with a text, or of an unknown role")
    if thought := m.get("reasoning_content"):
        content = f"<think>\n{str(thought).strip()}\n</think>\n\n{content}"
    sampled = {"token_ids": m["token_ids"]} if m.get("token_ids") else {}
    return {"role": ROLES.get(role, role), "content": content, **sampled}


if __name__ == "__main__":
    run(main, get_args())
