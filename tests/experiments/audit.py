"""Audits the human: how often its replies break the human's rules.

    cat runs/test-*.jsonl | python tests/experiments/audit.py > audit.jsonl
    ... | python tests/experiments/audit.py --faults 1              # prints each fault, to read it
    ... | python tests/experiments/audit.py --judge http://.../v1   # an LLM judges all replies, too

A system is a model with a human, as `meta` names them. Figures are % of its episodes:

    quoted        a reply has code of the reference: what colbench.redact replaces, or an expression
                  of 3 or more tokens, such as `x * 0.85`, that the dialogue did not have before
    told          a reply answers, and in another clause tells a value of another place of the
                  reference, none of whose names the agent has mentioned
    contradicted  a reply has a number that neither the reference nor the dialogue before has, or
                  gives a variable another value ("fee is 3", "fee=3")
    broke_off     a reply is empty, truncated or a refusal, or mentions the reference
    redacted      a reply has [...], by which collect.py replaces quotes
    tainted       share of the solved episodes that have a fault of the first four kinds

A value is a number but 0 and 1, also in words ("half", "20 % less"), or a string. Its place is an
if with its elifs and those on the same variables, a list or dict, a term of a sum, or a statement.

Left to the judge, as rules would guess: a wrong yes or no, a wrong string, a number of another
place; facts without a value; a value told instead of an answer; what is told after an open question
("which rules?", "how is it computed?"); "I do not mind" where the reference does.
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
                   "fifteen sixteen seventeen eighteen nineteen twenty".split(), range(2, 21)))
NUMBERS |= {"half": 0.5, "double": 2, "doubled": 2, "doubles": 2, "twice": 2, "triple": 3, "thirty": 30,
            "forty": 40, "fifty": 50, "hundred": 100}
NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?|(?:{'|'.join(NUMBERS)})(?![a-z]))"
                    r"(?: ?(%|percent|cent)|(?=[kcm]?[gm]\b)|(?!\w))[ -]*([a-z]*)")
UNITS = {"thousand": (1000,), "million": (10 ** 6,), "dozen": (12,), "week": (7,), "day": (24, 1 / 7),
         "hour": (60, 1 / 24), "minute": (60, 1 / 60), "second": (1 / 60,), "year": (12, 365),
         "month": (1 / 12, 30), "gram": (1 / 1000,), "watt": (1 / 1000,), "kilo": (1000,), "quarter": (0.25,)}
COUNTED = "level|tier|kind|type|categor|group|option|thing|way|case|step|factor|part|rule"
EXAMPLE = r"for (example|instance)|e\.g\.|\b(such as|would|imagine|so (with|if))\b"
STRICT = r"\b(than|over|under|above|below|exceed\w*|before|beyond|after)\b"
OPEN = (r"\b(all|any|anything|everything (about|i|you)|each|different|formula|criteria|rules?|logic|"
        r"tell me|explain|describe|how (do|does|should|is|are|would)|(comput|calculat|determin)\w+)\b")
PLURAL = r"\b(?!does|this|has|was|yes|always|perhaps)\w{2,}(?<!s)s\b"
CLAUSE = r"[;\n!?]+|\.(?!\d)|,(?!\d)|\s(?:and|but|also|plus|while|with|whereas)\s|\s(?=\w+=)"
DANGLING = r"(\b(the|an?|of|and|or|with|would|should|is|are|to|for|if|than|in|by)|,)\s*$"
REFUSAL = (r"\bas an ai\b|\ban? (ai|language) (assistant|model)\b|reference (function|solution|code)|"
           r"ground truth|hidden (function|information|reference|code)|function that i have|"
           r"(can't|cannot|can not|unable to|not able to|not allowed to|not supposed to|not to) "
           r"(help|assist|answer|discuss|share|provide|reveal|disclose)")
STOP = set("is it to of in on at by or if no do an as be we me my us so up the and for are has have "
           "had was not you per how what which who when does should that this with from than".split())
HOLDS = ast.Dict, ast.List, ast.Set, ast.Tuple
# "up to 5" is x < 6: {operator: (6 less 5, whether that needs a word such as "over")}
SHIFT = {ast.Lt: (1, False), ast.Gt: (-1, False), ast.LtE: (-1, True), ast.GtE: (1, True)}


def plain(text):
    """Returns a text in lower case, with 1.5 for "one and a half" and spaces for underscores."""
    text = text.lower().replace("’", "'").replace("_", " ").replace("per cent", "percent")
    return re.sub(r"\b(\w+) and a half\b", lambda m: f"{NUMBERS.get(m[1], 1) + 0.5}", text)


def numbers(text):
    """Returns [(number, whether it is a percentage, the next word)] of a plain text."""
    return [(NUMBERS.get(number) or float(number.replace(",", "")), bool(percent), unit)
            for number, percent, unit in NUMBER.findall(text)]


def stems(text):
    """Returns the beginnings of a text's words, such as {"overt", "pay"} for overtime_pay."""
    words = re.findall(r"\d?[a-z]+\d*", plain(re.sub("(?<=[a-z])(?=[A-Z])", " ", text)))
    return {re.sub("(?<!s)s$", "", re.sub("ies$", "y", word))[:4] for word in words if len(word) > 1 and word not in STOP}


def names(*nodes):
    """Returns the names and strings in syntax trees."""
    fields = [getattr(x, field, None) for node in nodes for x in ast.walk(node)
              for field in ("id", "arg", "attr", "value")]
    return {x for x in fields if isinstance(x, str)}


class Value(NamedTuple):
    """A number or string of the reference, and the operator if it is the right side of a limit."""
    value: object
    place: ast.AST
    name: str         # of the variable or parameter that has it, or ""
    operator: object

    def equals(self, number, percent, unit, text):
        """Whether a number of a text is this value: 20 % is 20, 0.2, 0.8 or 1.2."""
        if isinstance(self.value, str):
            return False
        said = [number]
        if self.is_number():
            said += [number * n for name, x in UNITS.items() if unit.startswith(name) for n in x]
            said += [number + 12] * (unit == "pm") + [2] * (number == 0.5)  # half is x / 2, too
            said += [number - 1, number + 1] * bool(re.search(r"\d ?(to|-|–) ?\d", text))
            said += [number / 100, 1 - number / 100, 1 + number / 100] * percent
        shift, strict = SHIFT.get(self.operator, (0, False))
        said += [number + shift] * (bool(re.search(STRICT, text)) == strict)
        return any(math.isclose(abs(self.value), x) for x in said)

    def is_number(self):
        return not isinstance(self.value, str) and self.value not in (0, 1)

    def is_in(self, text):
        if isinstance(self.value, str):
            return re.search(rf"(?<!\w){re.escape(plain(self.value))}s?(?!\w)", text)
        return any(self.equals(*found, text) for found in numbers(text))


class Reference:
    """The values of a reference, and the stems that tell its places apart."""

    def __init__(self, code):
        try:
            tree = ast.parse(textwrap.dedent(code))
        except (SyntaxError, ValueError):
            tree = ast.parse("")
        nodes = [*ast.walk(tree)]
        self.parent = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.first = {}  # {an if: the first one of its place}
        self.assigned, parameter = defaultdict(list), {}
        for node in nodes:
            blocks = [x for _, x in ast.iter_fields(node) if isinstance(x, list)]
            pairs = [pair for block in blocks for pair in pairwise(block)]
            if isinstance(node, ast.If):
                pairs += [(node, x) for x in node.orelse[:1]]  # an elif
            for a, b in pairs:
                if isinstance(a, ast.If) and isinstance(b, ast.If) and (
                        self.parent[b] is a or names(a.test) & names(b.test)):
                    self.first[b] = self.first.get(a, a)
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                self.assigned[getattr(target, "id", None)].append(node)
            if isinstance(node, ast.arguments):
                parameter |= zip(reversed(node.defaults), reversed(node.args))
        self.parameters = [stems(node.arg) for node in nodes if isinstance(node, ast.arg)]
        self.values, words = [], defaultdict(set)
        for node in nodes:
            up, value = self.parent.get(node), getattr(node, "value", None)
            if node in parameter:  # min in op=min is a value, too
                value = getattr(node, "id", value)
            if isinstance(up, (ast.Expr, ast.JoinedStr)) or isinstance(value, bool) or not isinstance(
                    value, (int, float, str)) or isinstance(value, str) and not (len(value) > 1 and stems(value)):
                continue
            named = parameter.get(node) or getattr(up, "targets", [None])[0]
            place = parameter.get(node) or self.place(node)
            if value not in (0, 1):
                words[place] |= self.words(place)
            operator = isinstance(up, ast.Compare) and up.left is not node and \
                type(up.ops[up.comparators.index(node)])
            self.values.append(Value(value, place, getattr(named, "id", None) or
                                     getattr(named, "arg", ""), operator))
        count = Counter(word for x in words.values() for word in x)
        self.stems = {place: {word for word in x if count[word] < max(2, len(words) / 2)}
                      for place, x in words.items()}

    def place(self, node):
        """Returns the node that is the place of a literal."""
        place = None
        while not isinstance(node, ast.stmt):
            up = self.parent[node]
            in_sum, is_sum = (isinstance(x, ast.BinOp) and isinstance(x.op, (ast.Add, ast.Sub))
                              for x in (up, node))
            alone = isinstance(node, ast.Constant) and in_sum and any(
                isinstance(x, ast.Name) for x in (up.left, up.right))  # x - 3
            if in_sum and not is_sum and not alone:  # the outermost term
                place = node
            if isinstance(node, HOLDS) and not isinstance(up, ast.Compare):
                return node
            if isinstance(up, ast.IfExp) and sum(
                    isinstance(x, ast.Constant) for x in ast.walk(node)) < 3:
                return up
            node = up
        place = place or node
        while node in self.parent and not isinstance(node, ast.If):
            node = self.parent[node]
        return self.first.get(node, node) if isinstance(node, ast.If) else place

    def words(self, place):
        """Returns the stems of the names at a place, and of those that define them."""
        if isinstance(place, ast.arg):
            return stems(place.arg)
        nodes, up = [place, *(x for x, first in self.first.items() if first is place)], place
        while isinstance(self.parent[nodes[0]], (ast.Subscript, ast.Attribute, ast.Call)):
            nodes[0] = self.parent[nodes[0]]  # {...}[key] or {...}.get(key)
        while not isinstance(up, ast.stmt):
            up = self.parent[up]
        found = names(*nodes)
        once = [self.assigned[x][0] for x in found if len(self.assigned[x]) == 1]
        nodes = [x.value for x in once if not isinstance(getattr(x, "value", None), (*HOLDS, None.__class__))]
        nodes += [getattr(up, "target", None), *getattr(up, "targets", [])]
        return set().union(*map(stems, found | names(*filter(None, nodes))))

    def mentioned(self, text, parameters=False):
        """Returns the places that a text mentions, or only those by parameters, half of each."""
        said = stems(text)
        if parameters:
            said = {w for x in self.parameters if 2 * len(x & said) >= len(x) for w in x & said}
        return {place for place, words in self.stems.items() if words & said}


def quotes(reply, task, before):
    """Whether a reply has code of the reference, as redact finds it or as an expression."""
    reply_tokens, reference, said = (
        re.findall(r"\w+(?:\.\d+)?|[-+*/=!<>]=|//|\*\*|[^\w\s]", text)
        for text in (reply, task["ground_truth"], before))
    reference, said = (f" {' '.join(x)} " for x in (reference, said))
    runs = (f" {' '.join(reply_tokens[i:j])} " for i in range(len(reply_tokens))
            for j in range(i + 3, min(i + 40, len(reply_tokens)) + 1))
    return redact(reply, task) != reply or any(
        x in reference and x not in said and is_code(x) for x in runs)


def tells(reply, reference, agent, before):
    """Whether a reply answers, and in another clause tells a value that nobody asked for."""
    question, asked = plain(agent[-1]), reference.mentioned("\n".join(agent))
    plural = re.search(PLURAL, re.sub(r"\b(many|number of) \w+", "", question))
    aimed = reference.mentioned(question)
    hidden = [v for v in reference.values if v.value not in (0, 1) and not v.is_in(plain(before))]
    clauses = []  # from the first that may be an answer: the places of each value in it
    for clause in re.split(CLAUSE, plain(reply)):
        if re.search(EXAMPLE, clause):
            continue
        places = [{v.place for v in hidden if v.equals(*x, clause)} for x in numbers(clause)]
        texts = {v.value for v in hidden if isinstance(v.value, str) and v.is_in(clause)}
        places += [{v.place for v in hidden if v.value == text} for text in texts]
        answers = re.search(r"\b(one|zero|\d+|know|mind|matter)\b", clause)
        if any(places) or not clauses and (answers or aimed and len(clause.split()) > 2):
            clauses.append([*filter(None, places)])
    if not clauses or re.search(OPEN, question) and not aimed:
        return False
    if clauses[0] and not clauses[0][0] & aimed:  # the question meant this in other words
        count = Counter(place for clause in clauses for places in clause for place in places)
        answer = max(clauses[0][0], key=count.get)
        if plural and not aimed and not isinstance(answer, HOLDS):
            return False
        asked = asked | {answer}
    return any(not places & asked for clause in clauses[1:] for places in clause)


def answers_elsewhere(reply, reference, agent, before):
    """Returns the fault of a reply whose first numbers are not of a place that was asked for.

    "told" if the reply mentions the other place, else "contradicted"; None if there is no fault.
    """
    asked, numbered = reference.mentioned("\n".join(agent)), {
        v.place for v in reference.values if v.is_number()}
    if not reference.mentioned(agent[-1], parameters=True) & numbered:
        return None
    known = {0, 1, *(x[0] for x in numbers(plain(before)))}
    for clause in re.split(CLAUSE, plain(reply)):
        found = [x for x in numbers(clause) if x[0] not in known]
        places = {v.place for v in reference.values for x in found if v.equals(*x, clause)}
        if places and not places & asked:
            return "told" if places & reference.mentioned(clause) else "contradicted"
        if found:
            return None
    return None


def contradicts(reply, reference, before):
    """Whether a number is new, or a variable has another value than in the reference."""
    known, named = {0, 1, *(x[0] for x in numbers(plain(before)))}, defaultdict(list)
    for v in reference.values:
        if v.name and len(reference.assigned[v.name]) < 2:
            named[plain(v.name)].append(v)
    for clause in re.split(CLAUSE, plain(reply)):
        if re.search(EXAMPLE, clause):
            continue
        for found in numbers(clause):
            new = found[0] not in known and found[:2] != (100, True)
            if new and not re.match(COUNTED, found[2]) and not any(
                    v.equals(*found, clause) for v in reference.values):
                return True
        for name, sign, said in re.findall(r"([\w ]+?) *(=|\bis\b) *([\w.]+)", clause):
            for variable, values in named.items():
                if re.search(rf"\b{re.escape(variable)}$", name) and (numbers(said) or sign == "="):
                    if not any(v.is_in(clause) for v in values):
                        return True
    return False


def breaks_off(reply, task):
    """Whether a reply is empty, truncated or a refusal, or mentions the reference."""
    text = plain(reply).strip()
    truncated = len(reply) >= environment(task).reply_chars and text[-1:] not in (*".!?\"'`)",)
    return not text or truncated or bool(re.search(DANGLING, text) or re.search(REFUSAL, text))


def faults(task, before, reply, reference):
    """Returns the kinds of faults of a reply. before: the dialogue; reference: a Reference."""
    agent = [m["content"] for m in before if m["role"] == "assistant"]
    said = "\n".join([task["problem_description"], *message_texts(before[1:])])
    elsewhere = answers_elsewhere(reply, reference, agent, said)
    told = elsewhere == "told" or tells(reply, reference, agent, said)
    found = (quotes(reply, task, said), told,
             elsewhere and not told or contradicts(reply, reference, said),
             breaks_off(reply, task), "[...]" in reply)
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


def main(args):
    emit, references = open_stdout(), cache(Reference)
    systems, replies, kinds = defaultdict(list), [], []  # kinds: of each reply's faults
    for record in read_records(sys.stdin, "dialogue_history"):
        task, history, meta = record["task"], record["dialogue_history"], record.get("meta", {})
        reference, start = references(task["ground_truth"]), len(kinds)
        for i in (i for i, m in enumerate(history) if i and m["role"] == "user"):
            replies.append((task, history[:i], history[i]["content"]))
            kinds.append(faults(*replies[-1], reference))
        name = " with ".join(str(meta.get(x, "?")).split(" ")[0] for x in ("model", "human"))
        systems[name].append((record, kinds[start:]))
    columns = KINDS
    if args.judge:
        columns += JUDGED
        for found, more in zip(kinds, asyncio.run(judge(args.judge, replies))):
            found += more
    if args.faults:
        for (task, before, reply), found in zip(replies, kinds):
            if found:
                emit({"task": task_id(task), "faults": found, "message": before[-1]["content"],
                      "reply": reply, "reference": task["ground_truth"]})
        return
    say("  ".join([f"{'% of episodes':30}", "episodes", *columns, "success", "tainted"]))
    for name, episodes in systems.items():
        found_in = [set().union(*found) for _, found in episodes]
        solved = [found for (record, _), found in zip(episodes, found_in)
                  if record.get("reward", 0) >= 1]
        row = {kind: percent(kind in found for found in found_in) for kind in columns}
        row |= {"success": percent(r.get("reward", 0) >= 1 for r, _ in episodes),
                "tainted": percent(bool(found - {"redacted"}) for found in solved)}
        say("  ".join([f"{name:30}", f"{len(episodes):8}",
                       *(f"{x:{len(column)}}" for column, x in row.items())]))
        emit({"system": name, "episodes": len(episodes), **row})


def percent(flags):
    """Returns the share of flags that are true, in %."""
    flags = [*flags]
    return round(100 * sum(flags) / max(1, len(flags)), 1)


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s [flags] < graded.jsonl > audit.jsonl")
    flag(p, "faults", 0, "1: write each faulty reply instead of the table", choices=[0, 1])
    flag(p, "judge", None, "https://.../v1 of an LLM that judges all replies", metavar="URL")
    run(main, p.parse_args())
