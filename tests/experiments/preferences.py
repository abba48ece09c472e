"""Converts others' data to records: preference pairs, chats, ColBench's published trajectories.

    python tests/experiments/preferences.py < preferences.jsonl |
        python train_policy.py --loss mtdpo --model runs/base --out runs/mine
    python tests/experiments/preferences.py < chats.jsonl |
        python train_policy.py --loss rft --model runs/base --out runs/mine
    python tests/experiments/preferences.py < published.jsonl > episodes.jsonl

A pair becomes two trajectories, the chosen side with reward 1 and the rejected side with reward 0,
and a chat becomes one with reward 1. A task is what was said before the assistant's first message,
so that --held_out holds out all pairs of a prompt; the field `comparison` keeps them apart. Ids
are hashes of the content, so that converted files can be joined. The same pair again is dropped.

FORMATS lists the columns of each format. `system` becomes the first message, and `history`, a list
of [question, answer], what follows it. If the prompt ends with the beginning of an answer, the
sides continue that message. A column may hold messages (OpenAI's or ShareGPT's) or text. Text is
plain where a format has a prompt, whatever it looks like; a whole dialogue in text is HH-RLHF's
"Human: ... Assistant: ..." or messages as JSON. --dialogues 1 parses such texts in all columns.

The field reasoning_content becomes a <think> block in content. --thinking 1, or "meta":
{"thinking": 1} in a line, makes the trainers render prompts with the chat template's thinking
enabled, for answers that contain thoughts. Other columns and fields are named and dropped, or, if
they may change the prompt or the loss, refused. Any other line is an error.

A published trajectory (colbench_code_offline_15k_llama8b.jsonl) has `dialogue_history`. Its form is known only from the code that wrote it:
there the instructions are in each message's `input`, in another template, and the first message is
the description alone. Here the first message is first_message(task, --max_turns), `input` is
dropped, and a task's trajectories are numbered by `sample`. It has no candidates, which --loss dpo
needs: collect.py --candidates 16 adds them, sampled from its --model.
"""
import json
import os
import re
import sys
import textwrap
from collections import Counter
from itertools import takewhile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from colbench import (RECORD, check_dialogue, clean_shape, first_message,  # noqa: E402
                      task_id)
from utils import (add_warning, digest, fail, open_stdout, parse_json,  # noqa: E402
                   parser, print_warnings, read_jsonl, run)

FORMATS = {  # name: (columns of the prompt, column of the chosen side, of the rejected side)
    "UltraFeedback": (["prompt"], "chosen", "rejected"),
    "Orca": (["question"], "chosen", "rejected"),
    "Alpaca": (["instruction", "input"], "chosen", "rejected"),
    "ShareGPT": (["conversations"], "chosen", "rejected"),
    "Axolotl": (["messages"], "chosen", "rejected"),
    "ms-swift": (["messages"], None, "rejected_response"),  # chosen: the last of messages
    # without a prompt, sides are whole dialogues
    "HH-RLHF": ([], "chosen", "rejected"),
    "ms-swift's dialogues": ([], "messages", "rejected_messages"),
    "OpenAI's chats": ([], "messages", None),
    "ShareGPT's chats": ([], "conversations", None)}
SIDES = {"chosen", "rejected", "rejected_response", "rejected_messages", "label"}  # of no chat
# columns and fields with these words in their names, also in the plural, are refused
CONTEXT = {"history", "context", "image", "video", "audio", "document", "passage", "background",
           "knowledge", "article", "instruction", "system", "input", "reasoning", "tool"}
WEIGHTS = {"weight", "loss", "loss_mask", "train"}  # all messages weigh the same: 1
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
         "chatgpt": "assistant", "developer": "system"}


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < preferences.jsonl > records.jsonl")
    p.add_argument("--thinking", type=int, default=0, choices=[0, 1],
                   help="1: enable the chat template's thinking, for answers with thoughts")
    p.add_argument("--dialogues", type=int, default=0, choices=[0, 1],
                   help="1: parse texts that are dialogues, also where a format has a prompt")
    p.add_argument("--max_turns", type=int, default=10,
                   help="of published trajectories: the turns that the first message tells [10]")
    return p.parse_args(argv)


def main(args):
    emit, written = open_stdout(), set()  # written: (task id, sample) of each row's first record
    samples = Counter()  # {task id: number of published trajectories}
    for place, row in read_jsonl(sys.stdin):
        try:
            if "dialogue_history" in row:
                emit(published(row, args.max_turns, samples))
                continue
            converted = records(row, args)
        except ValueError as e:
            fail(f"{place}: {e}")
        key = converted[0]["task"]["id"], converted[0]["sample"]
        if key in written:
            add_warning("lines are dropped, as they repeat an earlier one", place)
            continue
        written.add(key)
        for record in converted:
            emit(record)
    print_warnings()


def published(record, max_turns, samples):
    """Returns the record of a published trajectory, and counts it in samples."""
    task, (first, *history) = record["task"], record["dialogue_history"]
    if first != {"role": "user", "content": task["problem_description"]}:
        raise ValueError("the first message is not the task's description: is this a file of "
                         "another kind?")
    history = [{name: m[name] for name in m if name != "input"} for m in history]
    sample = samples[task_id(task)]
    samples[task_id(task)] += 1
    return {"reward_by": "official rules", **record, "sample": sample,
            "dialogue_history": [first_message(task, max_turns), *history]}


def records(row, args):
    """Returns the records of a row, the chosen side's first; raises ValueError."""
    row = {name: value for name, value in row.items() if value is not None}
    thinking = args.thinking
    if isinstance(row.get("meta"), dict) and "thinking" in row["meta"]:
        thinking = int(bool(row.pop("meta")["thinking"] or thinking))
    sides = dialogues(row, args.dialogues)
    for name, dialogue in zip(("chosen", "rejected"), sides):
        clean_shape(dialogue, RECORD["dialogue_history"], name)
        check_dialogue(dialogue, name)
        roles = [m["role"] for m in dialogue]
        if ("assistant", "assistant") in zip(roles, roles[1:]):
            raise ValueError(f"{name} has two messages of the assistant in a row")
    if sides[1:] == sides[:1]:
        raise ValueError("chosen and rejected are the same")
    opening = list(takewhile(lambda m: m["role"] != "assistant", sides[0]))
    words = textwrap.shorten(opening[-1]["content"], 40, placeholder="...")
    task = {"id": f'"{words}" {digest(json.dumps(opening))}', "problem_description": "",
            "ground_truth": ""}
    content = json.dumps([sides, thinking])
    comparison = {"comparison": digest(content)} if len(sides) == 2 else {}
    return [{"task": task, "sample": int(digest(f"{reward} {content}")[:13], 16), **comparison,
             "dialogue_history": dialogue, "reward": reward, "meta": {"thinking": thinking}}
            for dialogue, reward in zip(sides, (1.0, 0.0))]


def dialogues(row, parse_texts):
    """Returns the whole dialogues [chosen, rejected] of a row, or [chat]; raises ValueError."""
    for columns, chosen, rejected in FORMATS.values():
        needed = {*columns[:1], chosen, rejected} - {None}
        if needed <= row.keys() and (rejected or not row.keys() & SIDES):
            break
    else:
        raise ValueError("neither a preference nor a chat in a known format: its columns are "
                         f"{', '.join(row)}")
    used = {*columns, chosen, rejected, "system"} | ({"history"} if columns else set())
    drop({name: row[name] for name in row if name not in used}, "column")

    def read(column, role):
        is_dialogue = not columns or column in ("messages", "conversations")
        return messages(row[column], None if is_dialogue else role, parse_texts)

    prompt = [m for name in columns if row.get(name) for m in read(name, "user")]
    if len(columns) == len(prompt) == 2:  # append Alpaca's input to its instruction
        prompt = [{"role": "user", "content": "\n\n".join(m["content"] for m in prompt)}]
    if columns:
        prompt = history_messages(row.get("history")) + prompt
    system = messages(row["system"], "system") if row.get("system") else []
    prompt = with_system(system, prompt)
    sides = []
    for name in (chosen, rejected) if rejected else (chosen,):
        if name:
            side = read(name, "assistant")
        else:
            prompt, side = prompt[:-1], prompt[-1:]
        if "assistant" not in [m["role"] for m in side]:
            raise ValueError(f"{name or 'chosen'} has no message of the assistant")
        sides.append(whole_dialogue(prompt, side))
    return sides


def whole_dialogue(prompt, side):
    """Joins prompt and side. The side may repeat the prompt, or continue its last message."""
    if side[0]["role"] != "assistant":  # it repeats the prompt, perhaps without system
        rest, own = ([m for m in part if m["role"] != "system"] for part in (prompt, side))
        if own[:len(rest)] != rest:
            raise ValueError("a side begins with the user, but with other messages than the prompt")
        return with_system(prompt, side)
    if prompt and prompt[-1]["role"] == "assistant":
        content = prompt[-1]["content"] + side[0]["content"]
        return [*prompt[:-1], {"role": "assistant", "content": content}, *side[1:]]
    return prompt + side


def with_system(earlier, later):
    """Returns the later messages, after the system messages of the earlier if they have none."""
    given, own = ([m for m in part if m["role"] == "system"] for part in (earlier, later))
    if given and own and given != own:
        raise ValueError("there are two different system messages: remove one")
    return later if own else given + later


def history_messages(history):
    """Returns the messages of LLaMA-Factory's column `history`, [[question, answer], ...]."""
    for turn in history or ():
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise ValueError(f"history has {str(turn)[:40]}, which is not [question, answer]")
    return [{"role": role, "content": text} for turn in history or ()
            for role, text in zip(("user", "assistant"), turn)]


def drop(fields, what):
    """Names fields that no format has; raises ValueError if the prompt or the loss needs one."""
    for name, value in fields.items():
        words = {word.removesuffix("s") for word in re.split("[^a-z]+", name.lower())}
        has_context = isinstance(value, (str, list, dict)) and value and words & CONTEXT
        if has_context or (name in WEIGHTS and value not in (None, 1)):
            raise ValueError(f"the {what} {name!r} may change the prompt or the loss: put its text "
                             "into the messages, or remove it")
        if value not in (None, "", [], {}):
            add_warning(f"times the {what} {name!r} is dropped", repr(value)[:40])


def messages(value, role=None, parse_texts=False):
    """Returns the messages in a column. Text is one of this role, or without it a dialogue."""
    if isinstance(value, str):
        if role and is_dialogue(value):
            role = None if parse_texts else role
            if role:
                add_warning("texts look like dialogues and are read as plain text (--dialogues 1 "
                            "parses them)", repr(value)[:40])
        value = {"role": role, "content": value} if role else from_text(value)
    return [message(m) for m in (value if isinstance(value, list) else [value])]


def from_text(text):
    """Parses a dialogue in a text, HH-RLHF's or messages as JSON; raises ValueError."""
    if re.match(r"\s*(Human|Assistant):", text):
        parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text.strip())[1:]
        contents = map(str.strip, parts[1::2])
        return [{"role": name, "content": text} for name, text in zip(parts[::2], contents)]
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} is no dialogue, and has no prompt before it") from None


def is_dialogue(text):
    """Returns whether a text can be parsed as messages."""
    try:
        parsed = from_text(text)
        parsed = parsed if isinstance(parsed, list) else [parsed]
        return bool(parsed) and all({"role", "content"} <= m.keys() or {"from", "value"} <= m.keys()
                                    for m in parsed)
    except (ValueError, AttributeError):
        return False


def message(m):
    """Converts a message of OpenAI's or ShareGPT's format to {"role", "content"}."""
    if not isinstance(m, dict):
        raise ValueError(f"{str(m)[:40]!r} is not a message")
    used = "role", "from", "content", "value", "reasoning_content", "token_ids"
    drop({name: m[name] for name in m if name not in used}, "field")
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
