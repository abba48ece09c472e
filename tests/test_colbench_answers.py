"""The text of an answer: which part of it is code, to a person, and to the released scorer.

Two texts that a person understands are read otherwise: a stub of the function in an earlier block
counts as its first version, and a fence in the docstring of code without a fence counts as a fence.
"""
import builtins
import contextlib
import multiprocessing
import random
import signal
import subprocess
import sys
import textwrap

import pytest

import colbench
from conftest import CPU, ROOT, descendants, gone, lines, records, script
from test_colbench_claims import VALUES
from test_colbench_grader import DOUBLE, HONEST, ODDITIES, task
from utils import read_jsonl

RIGHT, WRONG = "def f(x):\n    return x * 2\n", "def f(x):\n    return x * 3\n"


DOCSTRING = ('def f(x):\n    """Doubles.\n\n    ```python\n    def f(x): return {inner}\n'
             '    ```\n    """\n    return {outer}\n')
FORMS = {  # each with {} where the code stands; a person finds it at a glance
    "bare": "{}", "fence": "Here:\n```python\n{}```\nDone.", "unclosed": "```python\n{}",
    "no language": "```\n{}```", "py": "```py\n{}```", "space": "```  Python3 \n{}```",
    "tildes": "Code:\n\n~~~python\n{}~~~\n", "four ticks": "````python\n{}````",
    "prose before": "Here is the function you asked for.\n\n{}",
    "prose after": "{}\nThis doubles its argument.",
    "prose around": "Sure! It doubles.\n\n{}\nHope that helps, and don't\nhesitate to ask.",
    "prose that names code": "From what you said, import nothing:\n{}",
    "constants in prose": "As agreed:\n\nTWO = 2\n\n{}", "much prose": "{}\n" + "and more\n" * 300,
    "shell fence first": "```bash\npip install x\n```\n" * 9 + "```python\n{}```",
    "usage after": "```python\n{}```\nUsage:\n```python\nprint(f(2))\n```\n```\n4\n```",
    "imports in an earlier block": "```python\nimport math\n```\nand\n```python\n{}```",
    "heading and fence": "### Answer\n\n```python\n{}```\n\n**Note:** it's simple.",
    "inline fence": "The code is ```python\n{}```",
    "info": "```python title=\"double.py\"\n{}```", "braces": "```{{.python}}\n{}```",
    "unclosed and prose": "```python\n{}\nThis doubles x, as you wished.",
    "quote in prose": "It's what you're after:\n```python\n{}```\nIsn't it?",
    "an empty fence": "```python\n```\nIt is:\n\n{}",
    "a fence with output": "{}\nIt prints\n```\n4\n```\nfor 2.",
    "a fence with usage": "So:\n\n{}\nUse it as\n```python\nprint(f(2))\n```",
    "output before": "To get\n```text\n4\n```\nfrom 2, take\n```python\n{}```",
    "a command": "```\npip\n```\nand then\n\n{}", "a foreign name": "```Python 3.12\n{}```",
    "prose that is Python": "rate = 2\n\nSo it is:\n\n{}",
    "prose that imports": "import math\n\nSo it is:\n\n{}",
    "prose that begins so": "import duties are a matter\nclass is another: f = 2\n\n{}",
    "a fence ends in a line": "Here: ```python\n{}``` as you said.",
    "an open fence in prose": "I use ``` for code.\n```python\n{}```\nRight?",
    "a type": "Well:\nRATE: int = 2\n\n{}", "a pair": "Well:\nA, B = 2, 0\n{}",
    "try": "Well:\ntry:\n    import numpy\nexcept ImportError:\n    numpy = None\n\n{}\nOK?",
    "no spaces": "Well:\nRATE=2\n{}", "a mark of order": "\ufeff{}", "no width": "\u200b{}",
    "no width, in a fence": "It is\n\u200b```python\n\u200b{}\u200b```",
    "a tag": "<answer>\n{}</answer>",
    "a list": "1. First:\n\n   ```python\n{indented}   ```\n2. Done.",
    "hard spaces": "It is:\n{hard}\nDone.",
    "cut off": "```python\n{}\ndef more(y):\n    return (y +",
    "it exits": "{}\nexit()", "it quits": "```python\nimport sys\n{}\nsys.exit(f(2))\n```",
    "it tests itself": "import unittest\n{}\nclass T(unittest.TestCase):\n    def test_f(self):\n"
                       "        self.assertEqual(f(2), 4)\n\nunittest.main()",
    "it reads its arguments": "import argparse\n{}\np = argparse.ArgumentParser()\n"
                              "p.add_argument('x', type=int)\nprint(f(p.parse_args().x))",
    "it reads its input": "{}\nprint(f(int(input())))"}


def written(form, code):
    """An answer: the code in a form."""
    indented = textwrap.indent(code, "   ")
    return FORMS[form].format(code, indented=indented, hard=code.replace(" ", "\xa0"))


SPELLED = (str, lambda text: text.replace("\n", "\r\n"),
           lambda text: textwrap.indent(text, "    "), lambda text: textwrap.indent(text, "\t"))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_a_person_would_and_wrong_code_in_it_stays_wrong(graders, form):
    """Also where the whole of it is indented, and where a second function follows."""
    more = "\ndef g(x):\n    return f(x)\n"
    for code, reward in ((RIGHT, 1), (WRONG, 0), (RIGHT + more, 1)):
        for spell in SPELLED:
            answer = spell(written(form, code))
            assert graders[0].grade(DOUBLE, answer)["reward"] == reward, answer


@pytest.mark.parametrize("form", ["{}", "```python\n{}```", "```\n{}\n```", "~~~python\n{}~~~"])
def test_a_fence_in_a_docstring_is_text(graders, form):
    for inner, outer, reward in (("x * 3", "x * 2", 1), ("x * 2", "x * 3", 0)):
        answer = form.format(DOCSTRING.format(inner=inner, outer=outer))
        assert graders[0].grade(DOUBLE, answer)["reward"] == reward


USES = "def f(x):\n    return g(x)"
BLOCKS = [  # the blocks of an answer, and its reward
    (["def g(x): return 2 * x", USES], 1),
    (["import math", "def g(x): return math.floor(x * 2)", USES], 1),
    (["def g(x): return 3 * x", USES], 0),  # the helper is wrong
    ([USES, "def g(x): return 2 * x"], 0),  # the first block that defines f is the last to run
    ([USES, "def g(x): return 3 * x"], 0),
    (["def g(x): return 3 * x", USES, "def g(x): return 2 * x"], 0),  # nothing is defined twice
    (["exit()", RIGHT], 1), ([f"{RIGHT}exit()", WRONG], 1), ([f"exit()\n{RIGHT}"], 0),
    ([WRONG, RIGHT], 0),  # the first version counts, never the better one
    ([RIGHT, WRONG], 1),
    (["g = 1 / 0", USES], 0),
    (["import no_such_module as g", USES], 0),
    (["BASE = 1", "TWO = BASE + 1", "def g(x):\n    return x * TWO", USES], 1),
    (["BASE = 2", "TWO = BASE + 1", "def g(x):\n    return x * TWO", USES], 0),
]
for OTHER in ("print(f(1))", "g = 1 / 0", "cost = rates.get(zone) * x", "import no_such_module",
              "x = 9\nprint(f(x))"):  # blocks that nothing else uses
    BLOCKS += [([OTHER, RIGHT], 1), ([RIGHT, OTHER], 1), ([OTHER, WRONG], 0)]


@pytest.mark.parametrize("blocks, reward", BLOCKS)
def test_blocks_that_the_answer_uses_are_run_and_no_others(graders, blocks, reward):
    answer = "\nthen\n".join(f"```python\n{block}\n```" for block in blocks)
    assert graders[0].grade(DOUBLE, answer)["reward"] == reward


@pytest.mark.parametrize("test", ["(f(3))", "sorted([f(3), 1])", "not f(3)", "[f(x) for x in [1]]"])
def test_what_is_tested_may_stand_within_an_expression(graders, test):
    """It is then defined, and the block that raises is no matter."""
    answer = f"```python\n{RIGHT}```\nso\n```python\nprint(rate * f(2))\n```"
    assert graders[0].grade(task(RIGHT, test), answer)["reward"] == 1


@pytest.mark.parametrize("answer, reward", [
    (f"{WRONG}\n'''\n```python\n{RIGHT}```\n'''\n", 0),  # it is Python
    (f"```python\n{WRONG}```\n\n{RIGHT}", 0),
    (f"{WRONG}\n```python\n{RIGHT}```", 1),  # a fence is what is meant
    (f"{RIGHT}\n```python\n{WRONG}```", 0)])
def test_no_answer_has_two_tries(graders, answer, reward):
    """What is code is settled before any of it runs: an answer can't be read in two ways."""
    assert graders[0].grade(DOUBLE, answer)["reward"] == reward


@pytest.mark.parametrize("text", [
    "```" * 9000, "~~~python\n" * 9000, "def f(\n" * 900, " \n" * 99_000, "'''" * 30_001,
    "(" * 99_000, "```python\n" + "x = '''\n```\n" * 5000, "\tdef f(x):\n  @\n" * 5000,
    "-" * 9999 + "1", "\ud800" * 99, "\0"])
def test_odd_texts_get_nothing_and_the_next_answer_its_due(graders, text):
    for grader in graders:
        assert grader.grade(DOUBLE, text)["reward"] == 0
        assert grader.grade(DOUBLE, HONEST)["reward"] == 1


PIECES = ["@x\n", "def f(\n", "import a b\n", "x = '''\n", "a = 1\n", "try:\n a\n", "```\n",
          "a, a, ", "  def f(x):\n", "class A(", "(", "\u200b", "x: ", "\r\n", "lambda: ",
          "# \n", "~~~a\n"]


def test_what_is_compiled_of_a_text_is_bounded():
    """Of texts of 20,000 characters, made of pieces that begin much and end nothing: 1.2 million.

    A search that tried each end of each beginning would compile thousands of millions.
    """
    r, tried = random.Random("pieces"), []
    space = {"compile": lambda text, *rest: tried.append(len(text)) or compile(text, *rest)}
    exec(colbench.server_program([]).rpartition("\nserve(")[0], space)
    for pieces in [*([piece] for piece in PIECES), *(r.choices(PIECES, k=3) for _ in range(20))]:
        tried.clear()
        text = "".join(pieces)
        text = (text * 20_000)[:20_000]
        with contextlib.suppress(SyntaxError, ValueError):
            space["answer_code"](text, {"g"})
        assert sum(tried) < 1_200_000, pieces


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
        names = {}  # apart from the globals, as in the function of the scorer before Python 3.13
        try:
            exec(code, globals(), names)
            return eval(test, globals(), names)
        except Exception:  # any error of an answer is no value, as in the released scorer
            return None

    def late(*_):
        raise TimeoutError
    passed = 0
    for test in tests:
        wanted = value(reference, test)
        signal.signal(signal.SIGALRM, late)
        signal.alarm(1)
        got = value(answer, test)
        signal.alarm(0)
        try:
            passed += bool(wanted == got and wanted is not None)
        except ValueError:  # arrays
            pass
        except ArithmeticError:  # a signalling NaN ends the released scorer
            return None
    return passed / len(tests)


def honest_corpus():
    """(name, task, answer): forms, oddities and values, right and wrong."""
    for name in FORMS:
        if not name.startswith("it "):  # which would end the released scorer
            yield f"form {name}", DOUBLE, written(name, RIGHT)
            yield f"form {name}, wrong", DOUBLE, written(name, WRONG)
    for name, answer in ODDITIES.items():
        yield f"oddity {name}", DOUBLE, answer
    imports = "import collections, datetime, decimal, fractions, math, numpy, uuid"
    values = [text for text in VALUES if "mine(" not in text]
    for text in [*values, *(f"numpy.array({data})" for data in ("[x]", "[x, x]", "[]", "x"))]:
        code = f"def f(x):\n    {imports}\n    return {text}"
        if "array" not in text:
            code = code.replace(text, f"[{text}, x]")
        yield f"value {text}", task(code, "f(1)", "f(2)"), code


def oracle(cases):
    builtins.input = lambda *_: (_ for _ in ()).throw(EOFError())
    return [released(t["ground_truth"], answer, list(t["test_cases"].values()))
            for _, t, answer in cases]


def test_official_rules_give_the_released_scorers_verdicts(graders):
    cases = list(honest_corpus())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        wanted = pool.apply(oracle, [cases])
    got = [graders[1].grade(t, answer)["reward"] for _, t, answer in cases]
    assert {name: (w, g) for (name, *_), w, g in zip(cases, wanted, got) if w != g} == {}
    assert len(cases) > 140 and None not in wanted and 0.3 < sum(wanted) / len(cases) < 0.9


# --- answers on stdin -----------------------------------------------------------------------------

def test_any_text_is_graded_and_the_answers_after_it_as_if_it_had_not_been_there():
    """Nothing of an earlier verdict stays; a bad last line costs no verdict before it."""
    old = {"reward": 0.5, "tests": {"test9": "old"}, "failure": "old", "note": "\ud800 \udc00"}
    record = {"task": {"problem_description": "d", **DOUBLE}, **old}
    texts = ["\ud800", f"{RIGHT}# \ud800 \udfff", "\udc00\ud800", "def f(x): return '\ud800' * x",
             "\0", "x" * 300_000, "", "\u2028", WRONG]
    stdin = [{**record, "answer": text} for odd in texts for text in (odd, RIGHT)]
    done = script("colbench.py", "grade", "--workers", 2, stdin=lines(stdin) + "{\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: stdin, line 19: not JSON")
    got = records(done.stdout)
    assert [r["reward"] for r in got] == [0, 1, 1, 1] + [0, 1] * 7
    assert all(r["tests"].keys() == DOUBLE["test_cases"].keys() for r in got)
    assert not any("failure" in r for r in got) and {r["note"] for r in got} == {"\ufffd \ufffd"}
    (read,) = read_jsonl([b'{"answer": "\xed\xa0\x80 \\ud83d\\ude00 \\udc00"}'])
    assert read == {"answer": "\ufffd \U0001f600 \ufffd"}  # as bytes, a whole pair, as escapes


SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def end_grading(answers, number, grader="colbench.py"):
    """Ends the grading of these records by a signal when the first is graded; nothing is left."""
    pipe = subprocess.PIPE
    grading = subprocess.Popen(
        [sys.executable, grader, "grade", "--workers", "1"], cwd=ROOT, text=True, env=CPU,
        stdin=pipe, stdout=pipe, stderr=pipe,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    grading.stdin.write(lines(answers))
    grading.stdin.flush()
    assert grading.stdout.readline()
    children = descendants(grading.pid)
    grading.send_signal(number)
    assert grading.wait(30) == -number and children
    assert "Traceback" not in grading.stderr.read()
    gone(children)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_grading_of_a_hostile_answer_long_before_its_time_is_up(number):
    """Ten answers that never end, of up to 6 s each; half of that is allowed, on a busy machine."""
    answers = [RIGHT] + ["while True: pass"] * 10
    end_grading([{"task": {"problem_description": "d", **DOUBLE}, "answer": answer}
                 for answer in answers], number)
