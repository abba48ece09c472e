"""The text of an answer: which part of it is code, to a person, and to the released scorer.

One text that a person understands is read otherwise: code in prose without a fence is none.
"""
import contextlib
import itertools
import random
import textwrap

import pytest

from conftest import DOUBLE, SIGNALS, end_grading, lines, task
from test_colbench_claims import VALUES
from test_colbench_grader import ODDITIES

RIGHT, WRONG = "def f(x):\n    return x * 2\n", "def f(x):\n    return x * 3\n"
# An answer with {} where its code stands: a person finds it at a glance.
BEFORE = ["", "It's what you're after:\n", "From what you said, import nothing:\n",
          "rate = 2\n\nSo it is:\n\n", "```python\n```\nIt is:\n\n",
          "To get\n```text\n4\n```\nfrom 2, take\n```bash\npip install x\n```\n"]
FENCES = ["```python\n{}```", "```\n{}```", "~~~python\n{}~~~", "````python\n{}````",
          "```python title='double.py'\n{}```", "Code: ```python\n{}```"]
AFTER = ["", "\nHope that helps, and don't\nhesitate to ask.", " as you said.",
         "\nUsage:\n```python\nprint(f(2))\n```\n```\n4\n```"]
COMMON = list(map("".join, itertools.product(BEFORE, FENCES, AFTER)))
ODD = ["{}", "```python\n{}", "It is\n\u200b```python\n\u200b{}\u200b```",
       "1. First:\n\n   ```python\n{indented}   ```\n2. Done.",
       "````markdown\nSo:\n```python\n{}```\n````", "```md\n# So\n```python\n{}```\n```\nIt's so.",
       "```\n```python\n{}```\n```", "~~~\n```python\n{}```\n~~~", "Use ``` so.\n```python\n{}```",
       "```sh\npip install x```\nThen\n```python\n{}```", "```\nno code\n```\nThen\n```\n{}```",
       "```python\ny = 1  # a ``` here\n{}```\nIt's so.", "```python\ny = 1  # a ``` here\n{}",
       'So:\n```python\n"""Use:\n```\nf(1)\n```\n"""\ny = "```"\n{}```\nI don\'t ask.',
       "````\n" * 99 + "``` ~~~\n" * 99 + "```python\n{}```"]
ENDING = [  # the program, before a test can run
    "{}\nexit()",
    "import unittest\n{}\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertEqual(f(2), 4)\n\nunittest.main()",
    "import argparse\n{}\np = argparse.ArgumentParser()\np.add_argument('x', type=int)\n"
    "print(f(p.parse_args().x))"]
SPELLED = (str, lambda text: text.replace("\n", "\r\n"),
           lambda text: textwrap.indent(text, "    "), lambda text: textwrap.indent(text, "\t"))
UNSEEN = (lambda text: "\ufeff" + text, lambda text: text.replace(" ", "\xa0"),
          lambda text: text.replace("return", "\u200bre\xadturn\u2060"),
          lambda text: text.replace("    ", "\u3000\t\u202f"))  # what no one sees
MORE = "\ndef g(x):\n    return f(x)\n"  # a second function


def written(form, code):
    """An answer: the code in a form."""
    return form.format(code, indented=textwrap.indent(code, "   "))


def test_a_form_is_read_as_a_person_would_and_wrong_code_in_it_stays_wrong(grader):
    """Also where a fence is indented, and where a second function follows."""
    r = random.Random("forms")
    cases = [(form, r.choice(SPELLED), code) for form in COMMON
             for code in (RIGHT, WRONG, RIGHT + MORE)]
    cases += itertools.product([*ODD, *ENDING], SPELLED[:2], (RIGHT, WRONG, RIGHT + MORE))
    for form, spelled, code in cases:
        answer = spelled(written(form, code))
        assert grader.grade(DOUBLE, answer)["reward"] == (code != WRONG), answer


def test_characters_that_no_one_sees_and_a_margin_change_no_verdict(grader):
    """In a fence or not. They are kept where the text is Python with them, as in strings."""
    fence = "Don't:\n```\n{}```"
    for form, code, one, two in itertools.product(
            ("{}", fence), (RIGHT, WRONG), UNSEEN, [*SPELLED, *UNSEEN]):
        answer = form.format(two(one(code + MORE)))
        assert grader.grade(DOUBLE, answer)["reward"] == (code == RIGHT), answer
    for form, code in itertools.product(("{}", fence), (RIGHT, WRONG)):
        answer = form.format(code.replace("x *", "len('\u200b\xa0'.strip('\xa0')) * x *"))
        assert grader.grade(DOUBLE, answer)["reward"] == (code == RIGHT), answer


FAILING = [  # statements that raise an error here
    "import no_such_module", "from no_such_module import (\n    one,\n    two)", "n = int(input())",
    "rows = dict(\n    a=1,\n    b=open('rows.csv').read())", "assert 1 == 2, 'one'", "1 / 0",
    "import locale\nlocale.setlocale(locale.LC_ALL, 'de_DE.UTF-8')", "print(no_such_name)",
    "class Net(no_such_module.Module):\n    pass", "@no_such_decorator\ndef g(x):\n    return x",
    "import no_such_module; k = 2; import nor_this",
    "@no_such_decorator\nclass Net:\n    pass", "@(lambda y: 1 / 0)\n@staticmethod\ndef h(): pass",
    "def four(x=(\n    1 / 0)): pass", "@(lambda y: y)\ndef five(x=1 / 0): pass",
    "@fails\ndef six(): pass", "@fails\n@staticmethod\nasync def seven(): pass",
    "with open('rows.csv') as rows:\n    pass", "for k in [\n    1, no_such_name]:\n    pass",
    "k = [1 / 0 for k in range(3)]", "k = lambda: 0; k(1)", "try:\n    1 / 0\nfinally:\n    k = 1"]
PROGRAM = ['"""Doubles."""', "from __future__ import annotations", "import math; PI = 3",
           "def half(x: no_such_type):\n    return x / 2", "count = globals().get('count', 0) + 1",
           "def counts(y):\n    global decorated\n"
           "    decorated = globals().get('decorated', 0) + 1\n    return y",
           "def fails(y):\n    global failed\n"
           "    failed = globals().get('failed', []) + [y.__name__]\n    1 / 0",
           "@counts\n@counts\ndef one(): pass", "@counts\nclass Two:\n    def g(self): pass",
           "@ (\n    counts)\nasync def three(): pass",
           "failed = globals().get('failed', [])",
           "if count == 1 and decorated == 4 and len(failed) == len({*failed}):\n"
           "    def f(x):\n        return math.floor(half(4 * x))"]


def test_a_statement_that_raises_leaves_the_others_as_they_are(grader):
    """Wherever it stands, and however many of them; each of the others runs exactly once."""
    r = random.Random("failing")
    for number in range(80):
        parts = PROGRAM[:]
        for failing in r.sample(FAILING, r.randint(1, 3)):
            parts.insert(r.randint(2, len(parts)), failing)
        code = r.choice(["{}", "It's:\n```python\n{}\n```"]).format("\n".join(parts))
        assert grader.grade(DOUBLE, code)["reward"] == 1, code
        assert grader.grade(DOUBLE, code.replace("4 * x", "6 * x"))["reward"] == 0, code
    verdicts = grader.grade(DOUBLE, "import no_such_module as m\ndef f(x):\n    return m.g(y)")
    assert {*verdicts["tests"].values()} == {'raised "ModuleNotFoundError: no_such_module"'}


def fenced(*blocks):
    return "\nthen\n".join(f"```python\n{block}\n```" for block in blocks)


DOCSTRING = ('def f(x):\n    """Doubles.\n\n    ```python\n    def f(x): return {}\n'
             '    ```\n    """\n    return {}\n')
USES = "def f(x):\n    return g(x)"
READINGS = [  # an answer and its reward
    (fenced("import math", "def g(x): return math.floor(x * 2)", USES), 1),
    (fenced("def g(x): return 3 * x", USES), 0),  # the helper is wrong
    (fenced(USES, "def g(x): return 2 * x"), 1),
    (fenced("exit()", RIGHT), 1), (fenced(f"exit()\n{RIGHT}"), 0),
    (fenced(WRONG, RIGHT), 1),  # the last version counts, never the better one
    (fenced(RIGHT, WRONG), 0), ("It is ```def f(x): return x * 2```.", 1),
    (fenced("g = 1 / 0", USES), 0), (fenced("import no_such_module as g", USES), 0),
    (f"{WRONG}\n'''\n```python\n{RIGHT}```\n'''\n", 0),  # it is Python
    (f"```python\n{WRONG}```\n\n{RIGHT}", 0),  # a fence is what is meant
    (f"{WRONG}\n```python\n{RIGHT}```", 1), (f"{RIGHT}\n```python\n{WRONG}```", 0)]
for other in ("print(f(1))", "g = 1 / 0", "import no_such_module"):  # nothing else uses them
    READINGS += [(fenced(other, RIGHT), 1), (fenced(RIGHT, other), 1), (fenced(other, WRONG), 0)]
READINGS.append((f"As agreed:\n{RIGHT}", 0))  # prose, and no fence
for reward, code in enumerate([("x * 2", "x * 3"), ("x * 3", "x * 2")]):
    READINGS += [(form.format(DOCSTRING.format(*code)), reward)
                 for form in ("{}", "So:\n```\n{}```\nIt's so.", "````md\n```\n{}```\n````")]
READINGS += [  # errors before, between and in definitions
    (f"import nosuch\n{WRONG}", 0), (f"{RIGHT}\n1 / 0\n{WRONG}", 0),
    (f"{WRONG}\n1 / 0\n{RIGHT}", 1),
    (f"1 / 0\nexit()\n{RIGHT}", 0), (f"{WRONG}\n1 / 0\nraise SystemExit\n{RIGHT}", 0),
    (f"1 / 0\n{RIGHT}\ndel f", 0), ("def f(x, y=nosuch): return x * 2", 0),
    ("n = 1; n += 1; import nosuch\ndef f(x): return x * n", 1),
    ("import nosuch; n = 2\ndef f(x): return x * n", 1),
    ("n = 0\nfor n in range(9): 1 / (n - 3)\ndef f(x): return x * 2 if n > 7 else 0", 0),
    ("try:\n    import nosuch\n    def f(x): return x * 2\nexcept ImportError:\n    f = abs", 0),
    ("class A:\n    import nosuch\n    def f(x): return x * 2\nf = A.f", 0),
    ("class E(Exception):\n    __traceback__ = None\nraise E\n" + WRONG, 0),
    (f"```\nno code\n```\n{RIGHT}\n```\nno code\n```", 0), (f"```js\nf(\n```\n{RIGHT}", 0)]


@pytest.mark.parametrize("answer, reward", READINGS)
def test_what_is_code_is_settled_before_any_of_it_runs(grader, answer, reward):
    """No answer has two tries: it can't be read in two ways."""
    assert grader.grade(DOUBLE, answer)["reward"] == reward


DOUBLES, TABLE = "def f(x):\n    return T[x]", "T = {}\nfor i in range(99):\n    T[i] = 2 * i"
USAGES = [  # what may follow a function, and must not cost it its reward
    "while True: pass", "import time\nwhile True:\n    print(f(2))\n    time.sleep(60)",
    "import timeit\nt = timeit.timeit(lambda: f(5), number=10 ** 12)", "assert f(2) == 5, 'no'",
    "n = int(input())\nprint(f(n))", "import sys\nsys.exit(f(2))",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\nunittest.main()",
    "from my_module import f\nprint(f(2))", "for k in [1, 2]: print(f(k))", "f.cache = {}\nf.x"]
LATER = [  # blocks that need one another, and the reward
    ((TABLE, DOUBLES), 1), (("def f(x): return g(x)", "def g(x): return 2 * x"), 1),
    (("def f(x): return g(x)", "try:\n    from nosuch import g\nexcept ImportError:\n"
      "    def g(x): return 2 * x", "def h(): pass"), 1),
    (("print(f(1))", "k = 1\nfor i in range(1): k += 1", "def f(x): return k * x"), 1),
    ((RIGHT, f"{RIGHT}\n{WRONG}"), 0), ((f"{RIGHT}\nwhile True: pass",), 0)]
LATER += [((RIGHT, usage), 1) for usage in USAGES]


def test_behind_the_final_version_nothing_is_run_but_what_it_lacks(grader, quick):
    for blocks, reward in LATER:
        answer = fenced(*blocks) if len(blocks) > 1 else blocks[0]
        assert grader.grade(DOUBLE, answer)["reward"] == reward, answer
    of_max = task("def f(x): return x * 2", "f(max(1, 2))", "[f(x) for x in [2]]")
    example = fenced(RIGHT, "max = x = 3\nprint(f(max))\nwhile True: pass")
    assert grader.grade(of_max, example)["reward"] == 1


BINDINGS = [  # statements that bind f to a lambda
    "f = {}", "f: object = {}", "if len('a'):\n    f = {}", "try:\n    f = {}\nfinally:\n    pass",
    "try:\n    import no_such_module\nexcept ImportError:\n    f = {}", "for f in [{}]: pass",
    "import contextlib\nwith contextlib.nullcontext({}) as f: pass", "f, k = {}, 1",
    "print(f := {})", "def f(x):\n    return ({})(x)", "while True:\n    f = {}\n    break",
    "if len('a'):\n    def f(x):\n        return ({})(x)", "match {}:\n    case f: pass",
    "class F:\n    def __call__(self, x):\n        return ({})(x)\nf = F()",
    "@keep\ndef f(x):\n    return ({})(x)", "f = keep(g := {})"]
BETWEEN = ["print(f(1))", "T = {1: 2}", "k = 0", "import math", "def h(x):\n    return 3 * x"]
MISSING = ["def twice(x):\n    return 2 * x",
           "from operator import mul\ntwice = lambda x: mul(2, x)"]


def test_the_last_block_that_binds_the_function_is_its_final_version(grader):
    """Drafts before it, uses and helpers around it; what comes after it adds what it lacks."""
    r = random.Random("versions")
    for number in range(80):
        right, lacks = r.random() < 0.5, r.random() < 0.3
        final = f"lambda x: {2 if right else 3} * x"
        if lacks:
            final = "lambda x: twice(x) + ZERO"
        drafts = [r.choice(BINDINGS).format(f"lambda x: {r.choice(['2 * x', '3 * x', 'y'])}")
                  for _ in range(r.randrange(3))]
        blocks = ["def keep(g): return g\nk, ZERO = 1, 0",
                  *r.sample([*drafts, *BETWEEN], len(drafts) + 2),
                  r.choice(BINDINGS).format(final)]
        after = ["while True: pass", "print(f(2))\nassert 0", "twice = 5", *BETWEEN]
        if lacks:  # what it lacks comes before anything that never ends
            first = r.choice(MISSING) if right else "def twice(x):\n    return 3 * x"
            helpers = ["ZERO = 1", first, r.choice(MISSING)]
            blocks += [*r.sample(BETWEEN, 2), *helpers]
        else:
            blocks += r.sample(after, r.randrange(3))
        answer = fenced(*blocks)
        assert grader.grade(DOUBLE, answer)["reward"] == right, answer


FALSY = ["__bool__ = lambda e: False", "__len__ = lambda e: 0", "__bool__ = lambda e: 1 / 0",
         "__eq__ = lambda e, x: True", "__eq__ = lambda e, x: x is None"]


@pytest.mark.parametrize("attribute", FALSY)
def test_an_exception_counts_whatever_its_truth_value_is(attribute, graders):
    """Under the official rules any error ends an answer; under ours its name is in the verdict."""
    raising = f"class E(Exception):\n    {attribute}\n    __hash__ = None\n"
    for failing in ("raise E", "def g(x=1 / 0): pass\nraise E"):
        honest, official = (grader.grade(DOUBLE, f"{raising}{RIGHT}{failing}")["tests"]
                            for grader in graders)
        assert {*honest.values()} == {"pass"} and "pass" not in official.values()
    lacking = graders[0].grade(DOUBLE, f"{raising}raise E\nf = g")["tests"]
    assert {*lacking.values()} == {'raised "E"'}


# --- the released scorer --------------------------------------------------------------------------

def released(reference, answer, tests):
    """What the released scorer does, in our words: the share of tests passed, in this process."""
    words = ("import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(",
             "quit(", "argparse")
    if any(word in answer for word in words):
        return 0.0
    for mark in ("```python", "```"):
        if mark in answer:
            answer = answer.split(mark)[1].split("```")[0]

    def value(code, test):
        names = {}, {}  # locals apart, as in the function of the scorer before Python 3.13
        try:
            exec(code, *names)
            return eval(test, *names)
        except Exception:  # any error of an answer is no value, as in the released scorer
            return None

    passed = 0
    for test in tests:
        wanted, got = value(reference, test), value(answer, test)
        with contextlib.suppress(ValueError):  # arrays
            passed += bool(wanted == got and wanted is not None)
    return passed / len(tests)


def test_official_rules_refuse_what_the_released_scorer_refuses(graders):
    """A copy of its list: each word, wherever it stands, and nothing that is almost one."""
    words = ("import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(",
             "quit(", "argparse")
    for word in words:
        honest, official = (grader.grade(DOUBLE, f"{RIGHT}# {word}")["tests"]
                            for grader in graders)
        assert {*official.values()} == {f"not run: the official rules refuse {word!r}"}
        assert {*honest.values()} == {"pass"}
        almost = word.replace("(", "").upper() if "(" in word else word[:-1]
        assert graders[1].grade(DOUBLE, f"{RIGHT}# {almost}")["reward"] == 1, almost


def test_official_rules_give_the_released_scorers_verdicts(graders):
    """Of forms, oddities and values, right and wrong; forms of ENDING would end that scorer."""
    cases = [(DOUBLE, written(form, code)) for form in [*COMMON[::7], *ODD, "{}\n1 / 0"]
             for code in (RIGHT, WRONG)]
    cases += [(DOUBLE, answer) for answer in (*ODDITIES.values(), f"import argparse\n{RIGHT}")]
    imports = "import collections, datetime, decimal, fractions, math, numpy"
    values = [f"[{text}, x]" for text in VALUES if "mine(" not in text]
    for text in [*values, *(f"numpy.array({data})" for data in ("[x]", "[x, x]", "[]", "x"))]:
        code = f"def f(x):\n    {imports}\n    return {text}"
        cases.append((task(code, "f(1)", "f(2)"), code))
    wanted = [released(t["ground_truth"], answer, t["test_cases"].values()) for t, answer in cases]
    for (t, answer), reward in zip(cases, wanted):
        assert graders[1].grade(t, answer)["reward"] == reward, answer
    assert len(cases) > 140 and 0.3 < sum(wanted) / len(cases) < 0.9


# --- answers on stdin -----------------------------------------------------------------------------

def test_any_text_is_graded_and_the_answers_after_it_as_if_it_had_not_been_there(grading):
    """Nothing of an earlier verdict stays; a bad last line costs no verdict before it."""
    old = {"reward": 0.5, "tests": {"test9": "old"}, "failure": "old", "note": "\ud800 \udc00"}
    texts = ["\ud800", f"{RIGHT}# \ud800 \udfff", "\udc00\ud800", "def f(x): return '\ud800' * x",
             "\0", "x" * 300_000, "", "\u2028", WRONG]
    given = [{"task": DOUBLE, **old, "answer": text} for odd in texts for text in (odd, RIGHT)]
    got, _, end = grading(lines(given) + "{\n")
    assert str(end).startswith("error: stdin, line 19: not JSON")
    assert [r["reward"] for r in got] == [0, 1, 1, 1] + [0, 1] * 7
    assert all(r["tests"].keys() == DOUBLE["test_cases"].keys() for r in got)
    assert not any("failure" in r for r in got) and {r["note"] for r in got} == {"\ud800 \udc00"}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_grading_of_a_hostile_answer_long_before_its_time_is_up(number):
    """Ten answers that never end, of up to 6 s each; half of that is allowed, on a busy machine."""
    answers = [RIGHT] + ["while True: pass"] * 10
    end_grading([{"task": DOUBLE, "answer": answer} for answer in answers], number)
