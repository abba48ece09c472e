"""Audits the human: in how many episodes did it break its rules?

    cat runs/test-*.jsonl | python tests/experiments/audit.py > audit.jsonl
    ... | python tests/experiments/audit.py --faults 1              # writes each faulty reply
    ... | python tests/experiments/audit.py --judge http://.../v1   # an LLM judges all replies, too

A system is a model with a human, as `meta` names them. Figures are % of its episodes:

    quoted        a reply has code of the reference: what colbench.redact replaces, or an expression
                  of 3 or more tokens, such as `x * 0.85`, that the dialogue did not have before
    told          asked about one parameter, a reply names another one, which no message of the
                  agent has named, beside a value that the reference uses with it alone
    contradicted  a reply has a number that neither the reference nor the dialogue before has, or
                  gives a variable another value ("fee is 3", "fee=3")
    broke_off     a reply is empty, truncated or a refusal, or mentions the reference
    redacted      a reply has [...], by which collect.py replaces quotes
    tainted       share of the solved episodes that have a fault of the first four kinds

A value is a string, or a number other than 0 and 1, also in words (half, 20 % less). Rules can't
tell whether a reply answers its question, so `told` and `contradicted` are lower bounds. Left to
the judge: values without their parameter's name, and after a question that names no parameter; a
number of another part of the reference; a wrong yes, no or string; facts without a value; "I do not
mind" where the reference does. RESULTS.md has the share that the rules find.
"""
import ast
import asyncio
import math
import os
import re
import sys
import textwrap
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from colbench import (environment, fill, hidden_information, is_code, message_texts, read_records,
                      redact, task_id)
from utils import flag, open_stdout, parser, run, say

KINDS = "quoted", "told", "contradicted", "broke_off", "redacted"
JUDGED = "leaked", "contradictory", "evasive"
PROMPT = """A colleague knows exactly which function they want. An assistant asks them about it.

What the colleague wants:
{hidden}

How they described it:
{description}

The conversation so far:
{dialogue}

The colleague's reply, which you judge:
{reply}

Write those of these words that hold for the reply, or "fine":
leaked: it has code, or tells a detail that the last message did not ask for
contradictory: it says something that differs from what the colleague wants
evasive: it does not answer, breaks off, or says that it does not mind what is settled above"""
NUMBERS = dict(zip("two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                   "fifteen sixteen seventeen eighteen nineteen twenty".split(), range(2, 21)),
               half=0.5, quarter=0.25, double=2, doubles=2, doubled=2, twice=2, triple=3, thirty=30,
               forty=40, fifty=50, hundred=100)
NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?|(?:{'|'.join(NUMBERS)})(?![a-z]))"
                    r"(?: ?(%|percent|cent)|(?=[kcm]?[gm]\b)|(?!\w))[ -]*([a-z]*)")
UNITS = {"thousand": (1000,), "million": (10 ** 6,), "dozen": (12,), "week": (7,), "day": (24,),
         "hour": (60,), "minute": (60, 1 / 60), "second": (1 / 60,), "year": (12, 365),
         "month": (1 / 12, 30), "quarter": (0.25,), "gram": (1 / 1000,), "watt": (1 / 1000,)}
COUNTED = "level|tier|kind|type|categor|group|option|thing|way|case|step|factor|part|rule"
EXAMPLE = r"for (example|instance)|e\.g\.|such as|\b(would|imagine|half past|so (with|if))\b"
STRICT = r"\b(than|over|under|above|below|exceed\w*|before|beyond|after)\b"
# "up to 5" is x < 6: {operator: (6 less 5, whether that needs a word of STRICT)}
SHIFT = {ast.Lt: (1, False), ast.Gt: (-1, False), ast.LtE: (-1, True), ast.GtE: (1, True)}
CLAUSE = r"[;\n!?]+|\.(?!\d)|,(?!\d)|\s(?:and|but|also|plus|while|with|whereas)\s|\s(?=\w+=)"
DANGLING = r"(\b(the|an?|of|and|or|with|would|should|is|are|to|for|if|than|in|by)|,)\s*$"
REFUSAL = (r"\bas an ai\b|\ban? (ai|language) (assistant|model)\b|function that i have|"
           r"ground truth|reference (function|solution|code)|"
           r"hidden (function|information|reference|code)|"
           r"(can't|cannot|can not|unable to|not able to|not allowed to|not supposed to|not to) "
           r"(help|assist|answer|discuss|share|provide|reveal|disclose)")
STOP = {"is", "has", "the", "of", "in", "to", "a", "an", "and", "or", "per", "for", "num", "number"}


def plain(text):
    """Returns a text in lower case, with 1.5 for "one and a half" and spaces for underscores."""
    text = text.lower().replace("’", "'").replace("_", " ").replace("per cent", "percent")
    return re.sub(r"\b(\w+) and a half\b", lambda m: f"{NUMBERS.get(m[1], 1) + 0.5}", text)


def numbers(text):
    """Returns [(number, whether it is a percentage, the next word)] of a plain text."""
    return [(NUMBERS.get(number) or float(number.replace(",", "")), bool(percent), unit)
            for number, percent, unit in NUMBER.findall(text)]


def stems(text):
    """Returns the first four letters of a text's words: {"over", "pay"} of overtime_pay."""
    return {re.sub("(?<!s)s$", "", re.sub("ies$", "y", word))[:4]
            for word in re.findall(r"\d?[a-z]+\d*", plain(text)) if word not in STOP}


class Value(NamedTuple):
    """A number or string of the reference."""
    value: object
    parameters: set   # those in its term of a sum, else its statement, and in conditions of that
    variable: str     # the variable or parameter that has it, or ""
    operator: object  # of the comparison that it is the right side of, or None

    def is_in(self, text):
        """Whether a plain text has the value."""
        if isinstance(self.value, str):
            return re.search(rf"(?<!\w){re.escape(plain(self.value))}s?(?!\w)", text)
        return any(self.equals(*found, text) for found in numbers(text))

    def equals(self, number, percent, unit, text):
        """Whether a number of a text is this value: 20 % is 20, 0.2, 0.8 or 1.2."""
        if isinstance(self.value, str):
            return False
        said = [number]
        if self.value not in (0, 1):
            said += [number * n for name, x in UNITS.items() if unit.startswith(name) for n in x]
            said += [number + 12] * (unit == "pm") + [2] * (number == 0.5)  # half is x / 2, too
            share = number / 100 if percent else number
            said += [share, 1 - share, 1 + share] * (percent or number in (0.25, 0.5))
            said += [number - 1, number + 1] * bool(re.search(r"\d ?(to|-|–) ?\d", text))
        shift, strict = SHIFT.get(self.operator, (0, False))
        said += [number + shift] * (not percent and strict == bool(re.search(STRICT, text)))
        return any(math.isclose(abs(self.value), x) for x in said)


def is_sum(node):
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))


@cache
def values(code):
    """Returns ([Value] of a reference, the names of its parameters)."""
    try:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(code)))]
    except (SyntaxError, ValueError):
        return [], set()
    parent = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    default = {}  # {node: its parameter}
    for node in nodes:
        if isinstance(node, ast.arguments):
            default |= zip(reversed(node.defaults), reversed(node.args))
    stored = Counter(x.id for x in nodes if isinstance(getattr(x, "ctx", None), ast.Store)
                     and isinstance(x, ast.Name))
    found = []
    for node in nodes:
        up, value = parent.get(node), getattr(node, "value", None)
        if node in default:  # op=min has a name as its value
            value = getattr(node, "id", value)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or isinstance(
                up, (ast.Expr, ast.JoinedStr)) or value == "" or value in parameters:
            continue
        variable = getattr(default.get(node), "arg", "")
        if isinstance(up, ast.Assign):
            variable = getattr(up.targets[0], "id", "")
        above = [node]  # the node and all that it is in
        while above[-1] in parent:
            above.append(parent[above[-1]])
        terms = [x for x, y in pairwise(above) if is_sum(y) and not is_sum(x) and x is not node]
        whole = terms[-1:] or [x for x in above if isinstance(x, ast.stmt)][:1]
        parts = [x.test if isinstance(x, ast.If) else x for x in whole if node not in default]
        parts += [x.test for x in above if isinstance(x, (ast.If, ast.IfExp))]
        used = {getattr(x, "id", None) for part in parts for x in ast.walk(part)} | {variable}
        operator = isinstance(up, ast.Compare) and node is not up.left and \
            type(up.ops[up.comparators.index(node)])
        variable = variable if stored[variable] < 2 else ""  # else it changes
        found.append(Value(value, used & parameters, variable, operator))
    return found, parameters


def quotes(reply, task, before):
    """Whether a reply has code of the reference, as redact finds it or as an expression."""
    reply = re.sub(r"\breturn (['\"])[^'\"]*\1", "", reply)  # prose, too
    tokens, reference, said = (re.findall(r"\w+(?:\.\d+)?|[-+*/=!<>]=|//|\*\*|[^\w\s]", text)
                               for text in (reply, task["ground_truth"], before))
    reference, said = f" {' '.join(reference)} ", f" {' '.join(said)} "
    runs = (f" {' '.join(tokens[i:j])} " for i in range(len(tokens))
            for j in range(i + 3, min(i + 40, len(tokens)) + 1))
    return not environment(task).shows_pages and redact(reply, task) != reply or any(
        x in reference and x not in said and is_code(x) for x in runs)


def named(text, parameters):
    """Returns the parameters of whose words a text has at least half."""
    return {x for x in parameters if 0 < len(stems(x)) <= 2 * len(stems(x) & stems(text))}


def tells(reply, code, agent, before):
    """Whether a reply names a parameter that the agent has not named, and a value of it."""
    found, parameters = values(code)
    asked = named("\n".join(agent), parameters)
    hidden = [v for v in found if v.value not in (0, 1) and not v.is_in(before)]
    return bool(named(agent[-1], parameters)) and any(
        v.parameters & named(clause, parameters) and not v.parameters & asked and v.is_in(clause)
        for clause in re.split(CLAUSE, plain(reply)) for v in hidden)


def contradicts(reply, code, before):
    """Whether a number is new, or a variable has another value than in the reference."""
    found, parameters = values(code)
    if not parameters:  # no function, but a page or a word
        return False
    known = {0, 1, *(x[0] for x in numbers(before))}
    for clause in re.split(CLAUSE, plain(reply)):
        for x in numbers(clause) if not re.search(EXAMPLE, clause) else ():
            if not (x[0] in known or x[:2] == (100, True) or re.match(COUNTED, x[2])
                    or any(v.equals(*x, clause) for v in found)):
                return True
        for name, sign, said in re.findall(r"([\w ]+?) *(=|\bis\b) *([\w.]+)", clause):
            own = [v for v in found if v.variable and (numbers(said) or sign == "=")
                   and re.search(rf"\b{re.escape(plain(v.variable))}$", name)]
            if own and not any(v.is_in(clause) for v in own):
                return True
    return False


def breaks_off(reply, task):
    """Whether a reply is empty, truncated or a refusal, or mentions the reference."""
    text = plain(reply).strip()
    truncated = len(reply) >= environment(task).reply_chars and text[-1:] not in (*".!?\"'`)",)
    return not text or truncated or bool(re.search(DANGLING, text) or re.search(REFUSAL, text))


def faults(task, before, reply):
    """Returns the kinds of faults of a reply to a dialogue."""
    agent = [m["content"] for m in before if m["role"] == "assistant"]
    said = "\n".join([task["problem_description"], *message_texts(before[1:])])
    code, text = task["ground_truth"], plain(said)
    found = (quotes(reply, task, said), tells(reply, code, agent, text),
             contradicts(reply, code, text), breaks_off(reply, task), "[...]" in reply)
    return [kind for kind, is_found in zip(KINDS, found) if is_found]


async def judge(url, replies):
    """Returns the judge's kinds of faults of each of the replies, (task, before, reply)."""
    from collect import Endpoint, reply_text  # not above, because it imports torch
    server = Endpoint(url, SimpleNamespace(retries=8, timeout=600), {"temperature": 0})
    await server.find_served_model()
    few = asyncio.Semaphore(64)

    async def ask(task, before, reply):
        dialogue = "\n".join(f"{m['role']}: {m['content']}" for m in before[1:])
        content = fill(PROMPT, description=task["problem_description"], dialogue=dialogue,
                       hidden=hidden_information(task), reply=reply)
        async with few:
            text = await server.request("/chat/completions", reply_text,
                                        messages=[{"role": "user", "content": content}])
        return [kind for kind in JUDGED if re.search(rf"\b{kind}\b", text.lower())]

    return await asyncio.gather(*(ask(*reply) for reply in replies))


def percent(flags):
    """Returns the share of flags that are true, in %."""
    flags = [*flags]
    return round(100 * sum(flags) / max(1, len(flags)), 1)


def main(args):
    emit, systems, replies, found = open_stdout(), defaultdict(list), [], []
    for record in read_records(sys.stdin, "dialogue_history"):
        task, history, meta = record["task"], record["dialogue_history"], record.get("meta", {})
        start = len(replies)
        for i, message in enumerate(history):
            if i and message["role"] == "user":
                replies.append((task, history[:i], message["content"]))
                found.append(faults(*replies[-1]))
        agent = meta.get("agent_model") or meta.get("agent") or meta.get("model", "?")
        name = " with ".join(str(x).split(" ")[0] for x in (agent, meta.get("human", "?")))
        systems[name].append((record.get("reward", 0) >= 1, found[start:]))
    columns = KINDS
    if args.judge:
        columns += JUDGED
        for kinds, more in zip(found, asyncio.run(judge(args.judge, replies))):
            kinds += more
    for (task, before, reply), kinds in zip(replies, found) if args.faults else ():
        if kinds:
            emit({"task": task_id(task), "faults": kinds, "message": before[-1]["content"],
                  "reply": reply, "reference": task["ground_truth"]})
    say("  ".join([f"{'% of episodes':30}", "episodes", *columns, "success", "tainted"]))
    for name, episodes in systems.items():
        kinds = [{kind for reply in episode for kind in reply} for _, episode in episodes]
        row = {column: percent(column in x for x in kinds) for column in columns}
        row["success"] = percent(solved for solved, _ in episodes)
        row["tainted"] = percent(bool(x & {*KINDS[:4]}) for x, (solved, _) in zip(kinds, episodes)
                                 if solved)
        say("  ".join([f"{name:30}", f"{len(episodes):8}",
                       *(f"{x:{len(column)}}" for column, x in row.items())]))
        if not args.faults:
            emit({"system": name, "episodes": len(episodes), **row})


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s [flags] < graded.jsonl > audit.jsonl")
    flag(p, "faults", 0, "1: write each faulty reply, not the figures", choices=[0, 1])
    flag(p, "judge", None, "https://.../v1 of an LLM that judges all replies", metavar="URL")
    run(main, p.parse_args())
