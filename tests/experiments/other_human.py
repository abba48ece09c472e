"""Two other humans for the toy, to see how far a result depends on the human (RESULTS.md).

    python collect.py --human tests/experiments/other_human.py ...                 # leaky
    HUMAN=careless python collect.py --human tests/experiments/other_human.py ...

Both reply as tests/toy.py does, in the world `slots`. The leaky human adds the value of a slot that
nobody has mentioned yet. The careless one tells a wrong value in one of four replies.
"""
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import toy
from colbench import hidden_information, message_texts, task_id
from utils import rng

HUMAN = os.environ.get("HUMAN", "leaky")


def reply(task, history):
    text, slots = toy.reply(task, history), toy.slots_of(hidden_information(task))
    slot = text.partition("=")[0]
    if slot not in slots:
        return text  # "i do not know"
    r = rng("other human", task_id(task), len(history))
    if HUMAN == "careless":
        others = [value for value in toy.SLOTS[slot] if str(value) != slots[slot]]
        return f"{slot}={r.choice(others)}" if r.random() < 0.25 else text
    said = " ".join(message_texts(history[1:]))
    hidden = [x for x in slots if not re.search(rf"\b{x}\b", said)]
    return f"{text} {(name := r.choice(hidden))}={slots[name]}" if hidden else text
