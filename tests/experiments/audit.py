"""Audits the human: in how many episodes did it break its rules?

    cat runs/test-*.jsonl | python tests/experiments/audit.py > audit.jsonl
    ... | python tests/experiments/audit.py --faults 1              # writes each faulty reply
    ... | python tests/experiments/audit.py --judge http://.../v1   # an LLM judges all replies, too

A system is a model with a human, as `meta` names them. Figures are % of its episodes:

    quoted        a reply has code of the reference: what collect.redact replaces, or an expression
                  of 3 or more tokens, such as `x * 0.85`, that the dialogue did not have before
    told          asked about one parameter, a reply names another one, which no message of the
                  agent has named, beside a value that the reference uses with it
    contradicted  a reply has a number that neither the reference nor the dialogue before has, or
                  gives a variable another value ("fee is 3", "fee=3")
    broke_off     a reply is empty, truncated or a refusal, or mentions the reference
    both_sides    a reply begins with a speaker's name, or speaks for the agent, too; of replies of
                  an LLM collect.py removes that
    redacted      a reply has [...], by which collect.py replaces quotes
    tainted       share of the solved episodes that have a fault of the first five kinds

A value is a string, or a number other than 0 and 1, also in words (half, 20 % less).

On ColBench's tasks quoted, broke_off, both_sides and redacted can be trusted. told and contradicted
are lower bounds, because rules can't tell whether a reply answers its question. In 65 dialogues on
real tasks that the rules had not seen they found 9 of 10 quotes, 7 of 8 contradictions and 2 of 7
leaks (told), and accused 6 of 36 clean dialogues, all of a contradiction (RESULTS.md). So read what
--faults 1 writes before you cite `contradicted`. Left to the judge: values without their
parameter's name, and after a question that names no parameter; a number of another part of the
reference; a wrong yes, no or string; facts without a value; "I do not mind" where the reference
does. Of LLMs only SmolLM2-135M was tried as the judge, which is too small: it accuses nobody.
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
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from colbench import (environment, fill, hidden_information, message_texts, read_records,
                      task_id)
from collect import own_words, redact
from utils import flag, open_stdout, parser, run, say

KINDS = "quoted", "told", "contradicted", "broke_off", "both_sides", "redacted"
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
ONES = dict(zip("one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                "fifteen sixteen seventeen eighteen nineteen".split(), range(1, 20)))
TENS = dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 99, 10)))
LARGE = {"dozen": 12, "hundred": 100, "k": 1000, "thousand": 1000, "million": 10 ** 6}
PARTS = dict(zip("third quarter fifth sixth seventh eighth ninth tenth".split(), range(3, 11)))
MULTIPLES = {"half": 0.5, "quarter": 0.25, "double": 2, "doubles": 2, "doubled": 2, "twice": 2,
             "triple": 3}
DIGITS = r"\d[\d,]*(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\w.])(?<![a-z]-)({DIGITS})"  # not that of UTF-8
                    r"(?: ?(%|percent|cent)|(?=[kcm]?[gm]\b)|(?!\w))[ -]*([a-z]*)")
UNITS = {"week": (7,), "day": (24,), "hour": (60,), "minute": (60, 1 / 60), "second": (1 / 60,),
         "year": (12, 365), "month": (1 / 12, 30), "gram": (1 / 1000,), "watt": (1 / 1000,)}
COUNTED = ("level|tier|kind|type|categor|group|option|thing|way|case|step|factor|part|rule|"
           "threshold|parameter|input|argument|name|item|weight|condition")
COUNT = r"\W*\d+( of (them|these|those))?\s*([,:.!]|$)"  # "Six: ..."
EXAMPLE = re.compile(r"""
    ( \b(for[ ](example|instance) | such[ ]as | say,?[ ]\d+ | imagine | half[ ]past
         | so[ ](with|if|at|\d+))\b
    | \d+,[ ](say|for[ ](example|instance))\b
    | (^|[:,;][ ])\d\S*([ ]\S+)?[ ](would[ ]mean|means|becomes?)\b )  # 5 means 5 %
    ([^.!?\n]|\.(?=\d))*  # up to the end of the sentence""", re.X)
STRICT = r"\b(than|over|under|above|below|exceed\w*|before|beyond|after)\b"
# "up to 5" is x < 6: {operator: (6 less 5, whether that needs a word of STRICT)}
SHIFT = {ast.Lt: (1, False), ast.Gt: (-1, False), ast.LtE: (-1, True), ast.GtE: (1, True)}
CLAUSE = r"[;\n!?]+|\.(?!\d)|,(?!\d)|\s(?:and|but|also|plus|while|with|whereas)\s|\s(?=\w+=)"
DANGLING = (r"(\b(the|an?|of|and|or|with|would|should|is|are|to|for|if|than|in|by|who|which|"
            r"because)|,)\s*$")
REFUSAL = (r"\bas an ai\b|\ban? (ai|language) (assistant|model)\b|function that i have|"
           r"ground truth|reference (function|solution|code)|"
           r"hidden (function|information|reference|code)|"
           r"(can't|cannot|can not|unable to|not able to|not allowed to|not supposed to|not to) "
           r"(help|assist|answer|discuss|share|provide|reveal|disclose)")
STOP = {"is", "has", "the", "of", "in", "to", "a", "an", "and", "or", "per", "for", "num", "number"}


def plain(text):
    """Returns a text in lower case, with spaces for underscores and digits for number words."""
    text = text.lower().replace("’", "'").replace("_", " ").replace("per cent", "percent")
    text = re.sub(r"\be\.g\.", "for example", text)
    text = re.sub(rf"\b({'|'.join(TENS)})(?:[ -]({'|'.join([*ONES][:9])}))?\b",
                  lambda m: str(TENS[m[1]] + ONES.get(m[2], 0)), text)
    text = re.sub(rf"\b({'|'.join(ONES)})\b", lambda m: str(ONES[m[0]]), text)
    text = re.sub(r"\b(\d+) hundred and (\d\d?)\b", lambda m: f"{m[1]}{m[2]:>02}", text)
    for _ in range(2):  # one hundred thousand
        text = re.sub(rf"\b({DIGITS}|an?) ?({'|'.join(LARGE)})\b",
                      lambda m: f"{amount(m[1]) * LARGE[m[2]]:.10g}", text)
    text = re.sub(r"\b(\w+) and a half\b", lambda m: f"{amount(m[1]) + 0.5}", text)
    fraction = rf"\b(\d+|an?) ({'|'.join(PARTS)})(?:s\b|(?= (?:of|off|less|more)\b|[,;]|\W*$))"
    text = re.sub(fraction, lambda m: f"{amount(m[1]) / PARTS[m[2]]:.10g}", text)
    return re.sub(rf"\b({'|'.join(MULTIPLES)})\b", lambda m: str(MULTIPLES[m[0]]), text)


def amount(word):
    """Returns the number that a word is; "a", "an" and "hour" (in "hour and a half") are 1."""
    return float(word.replace(",", "")) if word[0].isdigit() else 1


def numbers(text):
    """Returns [(number, whether it is a percentage, the next word)] of a plain text."""
    return [(amount(digits), bool(percent), unit)
            for digits, percent, unit in NUMBER.findall(text)]


def stems(text):
    """Returns the first four letters of a text's words: {"over", "pay"} of overtime_pay."""
    words = re.findall(r"\d?[a-z]+\d*", text.lower().replace("_", " "))
    return {re.sub("(?<!s)s$", "", re.sub("ies$", "y", word))[:4]
            for word in words if word not in STOP}


class Value(NamedTuple):
    """A number or string of the reference."""
    value: object
    parameters: set   # those in its term of a sum or condition, and in the conditions on that
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
            if unit == "pm":
                said.append(number + 12)
            if number == 0.5:  # x / 2, too
                said.append(2)
            if percent or number in (0.25, 0.5):
                share = number / 100 if percent else number
                said += [share, 1 - share, 1 + share]
            if re.search(r"\d ?(to|-|–) ?\d", text):  # "5 to 7" is below 8
                said += [number - 1, number + 1]
            if str(number).endswith(".9"):  # "up to 7.9", too
                said.append(math.ceil(number))
        shift, strict = SHIFT.get(self.operator, (0, False))
        if not percent and strict == bool(re.search(STRICT, text)):
            said.append(number + shift)
        return any(math.isclose(abs(self.value), x) for x in said)


class Reference:
    """A reference's .parameters, a set of names, its .values, [Value], and .counts.

    .counts has the numbers of its parameters, of different results, of the items of each
    collection, and of the decimals of each number.
    """

    def __init__(self, code):
        try:
            nodes = [*ast.walk(ast.parse(textwrap.dedent(code)))]
        except (SyntaxError, ValueError):
            nodes = [ast.Module(body=[])]
        self.parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self.stored = Counter(node.id for node in nodes if isinstance(node, ast.Name)
                              and isinstance(node.ctx, ast.Store))
        self.default_of = {}  # {node: the parameter whose default it is}
        for node in nodes:
            if isinstance(node, ast.arguments):
                names = reversed([*node.posonlyargs, *node.args])
                self.default_of |= zip(reversed(node.defaults), names)
                self.default_of |= zip(node.kw_defaults, node.kwonlyargs)
        self.sources = {name: {name} for name in self.parameters}  # {variable: parameters in it}
        for node in nodes:
            if isinstance(node, ast.Assign):
                self.add_source(node.targets[0], node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self.add_source(node.target, node.iter)
        self.values = []
        self.add_values(nodes[0], set(), set())
        results = {ast.dump(node) for node in nodes if isinstance(node, ast.Return)}
        items = [getattr(node, "elts", getattr(node, "keys", ())) for node in nodes]
        floats = [v.value for v in self.values if isinstance(v.value, float)]
        decimals = [str(value).partition(".")[2] for value in floats]
        self.counts = {len(x) for x in (self.parameters, results, *items, *decimals)}

    def add_source(self, target, source):
        """Notes which parameters are in a variable, if it is assigned once."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and self.stored[node.id] == 1:
                self.sources[node.id] = self.parameters_in(source)

    def parameters_in(self, node):
        """Returns the parameters in a syntax node, and those in its variables."""
        return set().union(*(self.sources.get(getattr(x, "id", ""), ()) for x in ast.walk(node)))

    def add_values(self, node, beside, tests, in_term=False):
        """Adds the values in a syntax node.

        beside: the parameters in its statement, or if in_term in its term of a sum or condition.
        tests: the parameters in the conditions on it, which for an `elif` are only its own.
        """
        if isinstance(node, ast.stmt):
            beside, in_term = self.parameters_in(node), False
        for child in ast.iter_child_nodes(node):
            near, on, is_term = beside, tests, in_term
            if isinstance(node, (ast.If, ast.IfExp)) and child is node.test:
                near = self.parameters_in(child)
            elif isinstance(node, (ast.If, ast.IfExp)):
                is_elif = isinstance(child, ast.If) and [child] == node.orelse
                on = tests if is_elif else tests | self.parameters_in(node.test)
            elif joins_terms(node) and not in_term:
                near, is_term = self.parameters_in(child), not joins_terms(child)
            is_name = child in self.default_of and isinstance(child, ast.Name)  # op=min
            if isinstance(child, ast.Constant) or is_name:
                self.add_value(child, node, beside | on)
            else:
                self.add_values(child, near, on, is_term)

    def add_value(self, node, parent, parameters):
        """Adds the value of a constant, unless it is a docstring or in an f-string."""
        value = node.id if isinstance(node, ast.Name) else node.value
        variable, operator = "", None
        if node in self.default_of:
            variable = self.default_of[node].arg
            parameters = {variable}
        if isinstance(parent, ast.Assign):
            variable = getattr(parent.targets[0], "id", "")
        if isinstance(parent, ast.Compare) and node is not parent.left:
            operator = type(parent.ops[parent.comparators.index(node)])
        if isinstance(parent, (ast.Expr, ast.JoinedStr)) or isinstance(value, bool) or value == "":
            return
        if isinstance(value, (int, float, str)) and value not in self.parameters:
            variable = variable if self.stored[variable] < 2 else ""  # else it changes
            self.values.append(Value(value, parameters, variable, operator))


reference = cache(Reference)


def joins_terms(node):
    """Whether a syntax node joins terms that can be told apart: a sum, `and`, `or`."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))
    return is_sum or isinstance(node, ast.BoolOp)


def tokens(text, strings):
    """Returns [(token, its start, its end)]. Each of the strings is one token, in any quotes."""
    literal = "|".join(map(re.escape, sorted(strings, key=len, reverse=True)))
    token = rf"(['\"])({literal})\1|\w+(?:\.\d+)?|[-+*/=!<>]=|//|\*\*|[^\w\s]"
    return [(repr(m[2]) if m[1] else m[0], *m.span()) for m in re.finditer(token, text)]


# What shows that a line which Python can parse is code, and not a word or a fact such as rate = 4.
OPERATION = re.compile(r"""
    [<>] | [-+*/%|&=!]=                             # x < 5, x == y, x *= 2
    | [\w)\]][(\[]                                  # f(x), x[0], unlike "Height (cm)"
    | ^(def|if|for|while)\b | \bif\b.*\belse\b
    | ^return\b.*([^\W\d][_.\d]|f')                 # return total_price, unlike "return the"
    | \bis\ (not\ )?None\b
    | ['_(].*\bin\b | \bin\b.*['_(]                 # 'a' in letters, unlike "fee in euros"
    | [^\W\d]\w*[)\]]*\ ([-+*/%]|//|\*\*)\  | '\ %\   # x - 1, unlike "20 % off" and "24 / 7"
    | \ ([-+*/]|//|\*\*)\ [(\[]*[^\W\d]             # 1 - x
    | [^\W\d]\w*[)\]]*[*+]\w | \d[*+][^\W\d] | \)[-+*/]  # x*2, 2*x, (x)*2
    | _\w*[-/] | [-/]\w*_ | (?<![\w-])[a-z][-/]([a-z]|\d+)(?![\w-])  # x-1, unlike "t-shirt"
    """, re.X)


def is_code(line):
    """Whether a line is Python that computes, compares, calls or controls."""
    line = line.strip()
    statement = f"{line} pass" if line.endswith(":") else line
    try:
        ast.parse(statement)
    except (SyntaxError, ValueError):
        return False
    without_texts = re.sub(r"""("|').*?\1|#.*""", "''", line)
    return bool(OPERATION.search(without_texts))


def quotes(reply, task, before):
    """Whether a reply has code of the reference, as redact finds it or as an expression."""
    code = task["ground_truth"]
    if environment(task).shows_pages:
        return False
    reply = re.sub(r"\breturn (['\"])[^'\"]*\1", "", reply)  # prose, too
    strings = {v.value for v in reference(code).values if isinstance(v.value, str)}
    words = tokens(reply, strings)
    known, said = (f" {' '.join(word for word, *_ in tokens(text, strings))} "
                   for text in (code, before))
    for i, (_, start, _) in enumerate(words):
        for j in range(i + 3, len(words) + 1):
            run = f" {' '.join(word for word, *_ in words[i:j])} "
            if run not in known:
                break
            if run not in said and is_code(reply[start:words[j - 1][2]]):
                return True
    return redact(reply, task) != reply


def named(text, parameters):
    """Returns the parameters of whose words a text has at least half."""
    return {x for x in parameters if 0 < len(stems(x)) <= 2 * len(stems(x) & stems(text))}


def tells(reply, code, agent, before):
    """Whether a reply names a parameter that the agent has not named, and a value of it."""
    known = reference(code)
    asked = named("\n".join(agent), known.parameters)
    hidden = [v for v in known.values
              if v.value not in (0, 1) and not v.parameters & asked and not v.is_in(before)]
    return bool(named(agent[-1], known.parameters)) and any(
        v.parameters & named(clause, known.parameters) and v.is_in(clause)
        for clause in re.split(CLAUSE, plain(reply)) for v in hidden)


def contradicts(reply, code, before):
    """Whether a number is new, or a variable has another value than in the reference."""
    known = reference(code)
    if not known.parameters:  # no function, but a page or a word
        return False
    said = {0, 1, *(number for number, *_ in numbers(before))}
    text = plain(reply)
    if re.match(COUNT, text):
        said |= known.counts
    return any(has_new_number(clause, said, known) or gives_other_value(clause, known)
               for clause in re.split(CLAUSE, EXAMPLE.sub("", text)))


def has_new_number(clause, said, known):
    """Whether a plain clause has a number that is neither in `said` nor in the reference."""
    for number, percent, unit in numbers(clause):
        is_count = re.match(COUNTED, unit) or unit.startswith("decimal") and number in known.counts
        is_whole = percent and number == 100
        if not (number in said or is_count or is_whole
                or any(v.equals(number, percent, unit, clause) for v in known.values)):
            return True
    return False


def gives_other_value(clause, known):
    """Whether a plain clause gives a variable another value than the reference, such as fee=3."""
    for name, sign, value in re.findall(r"([\w ]+?) *(=|\bis\b) *([\w.]+)", clause):
        own = [v for v in known.values if v.variable and (numbers(value) or sign == "=")
               and re.search(rf"\b{re.escape(plain(v.variable))}$", name)]
        if own and not any(v.is_in(clause) for v in own):
            return True
    return False


def breaks_off(reply, task):
    """Whether a reply is empty, truncated or a refusal, or mentions the reference."""
    text = plain(reply).strip()
    truncated = len(reply) >= environment(task).reply_chars and text[-1:] not in (*".!?\"'`)",)
    return not text or truncated or bool(re.search(DANGLING, text) or re.search(REFUSAL, text))


def both_sides(reply):
    """Whether a reply begins with a speaker's name, or speaks for the agent, too."""
    return own_words(reply) != reply.strip()


def faults(task, before, reply):
    """Returns the kinds of faults of a reply to a dialogue."""
    agent = [m["content"] for m in before if m["role"] == "assistant"]
    said = "\n".join([task["problem_description"], *message_texts(before[1:])])
    code, text = task["ground_truth"], plain(said)
    is_quote = quotes(reply, task, said)
    found = (is_quote, not is_quote and tells(reply, code, agent, text),
             contradicts(reply, code, text), breaks_off(reply, task), both_sides(reply),
             "[...]" in reply)
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
        row["tainted"] = percent(bool(x & {*KINDS[:5]}) for x, (solved, _) in zip(kinds, episodes)
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
