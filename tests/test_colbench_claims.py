"""What a child claims: generated lines at the wire, forgeries from inside, and values.

    CLAIMS=100000 python -m pytest -q tests/test_colbench_claims.py -k wire
"""
import collections
import contextlib
import datetime
import decimal
import fractions
import itertools
import math
import os
import random
import socket
import time

import pytest

import colbench
from colbench import as_text, receive, verdict
from conftest import DOUBLE, FULL, HONEST, task

# --- the wire -------------------------------------------------------------------------------------

WORDS = [b"pass", b"value", b"value pass", b"raised pass", b"refused pass", b"none", b"timeout",
         b"", b"\xff\xfe", b"value \n", b"raised \n", b"\0"]
WANTED = b"value " + b"5e" * 32


def received(data):
    """What the grader receives of a child that sends this."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data.ljust(colbench.MESSAGE_BYTES))
        return receive(ours, time.process_time, time.process_time() + 9)


def test_no_message_at_the_wire_earns_a_reward_or_raises():
    r = random.Random("wire")
    for _ in range(int(os.environ.get("CLAIMS", 10_000 if FULL else 1_000))):
        data = r.choice([r.choice(WORDS), r.choice(WORDS) + r.randbytes(r.randrange(400)),
                         WANTED + r.choice(WORDS[:5]), WANTED[:r.randrange(len(WANTED))]])
        flipped = bytearray(WANTED)
        flipped[r.randrange(len(WANTED))] ^= 1 << r.randrange(8)
        for sent in (data, flipped):
            said = verdict(WANTED, received(sent))
            assert said != "pass" and len(said) < 1200 and "\n" not in said
    assert verdict(WANTED, received(WANTED)) == "pass"


def test_nothing_passes_where_the_reference_has_no_value():
    for wanted in b"none", b"raised E", b"", "timeout":
        for claimed in (b"none", wanted):
            assert verdict(wanted, claimed).startswith("no expected value: ")


# --- from inside ----------------------------------------------------------------------------------

HIDDEN = task("def f(x):\n    return (x * 7919 + 104729) % 1009 + 3",
              *(f"f({i})" for i in range(4)))
LINES = [" " * 300, "pass", "value", "value pass", "", "raised pass", "refused pass", "value " + "5e" * 32]
VANDALS = {  # what follows a wrong f
    "main": "import __main__ as m\nm.run_tests = m.as_text = m.sha256 = lambda *a: LINE",
    "the sandbox": "import colbench as m\nm.value_of = m.result_of = m.as_text = lambda *a: LINE",
    "stdout": "import sys, io\nsys.stdout = sys.stderr = sys.__stdout__ = io.StringIO(LINE)\n"
              "def f(x): print(LINE); return 0",
    "builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\n"
                "builtins.type = builtins.ascii = lambda *a: LINE",
    "every descriptor": "import os\ndef f(x):\n    for fd in range(64):\n"
                        "        try: os.write(fd, LINE.encode()), os.writev(fd, [b'pass'])\n"
                        "        except OSError: pass\n    os._exit(0)",
    "many lines at import": "import os\nfor fd in range(3, 9):\n"
                            "    try: [os.write(fd, LINE.encode()) for _ in range(9)]\n"
                            "    except OSError: pass",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
              "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
              "            if type(value) is dict and 'tests' in value: value['tests'] = ['1']\n"
              "        frame = frame.f_back\n    return LINE",
    "garbage": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
               "        if type(o) is dict and 'tests' in o: o.clear()\n"
               "        if type(o) is list and o and type(o[0]) is str: o[:] = [LINE]\n"
               "    return 0",
    "tracing": "import sys\ndef trace(frame, event, arg):\n    frame.f_locals['result'] = LINE\n"
               "    return trace\nsys.settrace(trace)",
    "os.write": "import os\nwrite = os.write\n"
                "os.write = lambda fd, data: write(fd, LINE.encode()) and len(data)",
    "raises": "class pass_(BaseException): pass\npass_.__name__ = LINE\n"
              "def f(x): raise pass_(LINE)"}


@pytest.mark.parametrize("name", VANDALS)
def test_no_answer_forges_a_reward_from_inside_or_spoils_the_next_ones(name, graders, quick):
    for grader, line in itertools.product(graders, LINES):
        answer = f"LINE = {line!r}\ndef f(x): return 0\n{VANDALS[name]}"
        assert grader.grade(HIDDEN, answer)["reward"] == 0, answer
    assert [grader.grade(DOUBLE, HONEST)["reward"] for grader in graders] == [1, 1]


# --- values ---------------------------------------------------------------------------------------

SPACE = {m.__name__: m for m in (collections, datetime, decimal, fractions, math)}
SPACE["mine"] = lambda base, *args, **named: type("Mine", (base,), {})(*args, **named)
VALUES = """
None | True | 1 | 1.0 | 0 | -0.0 | 0.5 | 2**63 | 2**70000 | 2.0**63 | 1e300 | 0.1
math.inf | float('nan') | 1+0j | 1j | '1/1' | 'None' | '[1/1]'
'' | 'a' | '\\ud800\\0é' | '\\ud83d\\ude00' | '\\U0001f600'
[] | [1] | [1.0, [None]] | [float('nan')] | () | (1,) | ((1,),)
set() | {1} | frozenset({1}) | {(1, 'a')} | {0, 8} | {8, 0} | {1: 1}.keys()
{} | {1: 1} | {1: [1], 'a': ()} | {(1,): {2: 3}} | {'a': 1} | {1: 1, 2: 2} | {2: 2, 1: 1}
collections.OrderedDict([(1, 1), (2, 2)]) | collections.Counter({'a': 1.0})
collections.defaultdict(list, {1: 1}) | collections.namedtuple('P', 'a')(1)
range(0) | range(3) | range(0, 4, 2) | range(0, 3, 2) | range(2**80, 2**80 + 2)
decimal.Decimal('0.50') | decimal.Decimal('NaN') | decimal.Decimal('Infinity')
decimal.Decimal('1E+300') | decimal.Decimal('0.1') | decimal.Decimal('0E-9')
fractions.Fraction(1, 2) | fractions.Fraction(1) | fractions.Fraction(10**400, 3)
5e-324 | fractions.Fraction(1, 2**1074) | complex(fractions.Fraction(1, 2), 2.0**70)
datetime.datetime(2024, 1, 2) | datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)
datetime.datetime(2024, 1, 2, 3, 4, 5, 6) | datetime.date(2024, 1, 2)
mine(datetime.datetime, 2024, 1, 2)
mine(int, 1) | mine(str, 'a') | mine(list, [1]) | mine(set, {1})
int | collections.deque([1]) | collections.deque([1], 5)
"""
VALUES = [text.strip() for text in VALUES.strip().replace("\n", "|").split("|")]


def text_of(x):
    """The text that stands for a value; None if it has none, and then it passes for no other."""
    with contextlib.suppress(ValueError):  # NaN
        return None if x is None else as_text(x)


def same(x, y):
    """Whether one passes for the other."""
    return text_of(x) == text_of(y) is not None


@pytest.mark.parametrize("form", ["{}", "({},)", "{1: {}}", "{'a': [{}], 'b': ({}, 2)}"])
def test_two_values_are_equal_where_python_says_so(form):
    """The oracle is ==, on all pairs of some 80 values, each by itself and within others."""
    def evaluated():
        for text in VALUES:
            value = eval(form.replace("{}", text), dict(SPACE))
            yield text, value, text_of(value)

    for (a, x, one), (b, y, other) in itertools.product(evaluated(), evaluated()):
        equal = x is not None and bool(x == y)
        assert (one == other is not None) == equal, (a, b)


@pytest.mark.parametrize("kind, numbers", [
    (datetime.datetime, (2024, 1, 2, 3, 4, 5, 6)), (datetime.date, (2024, 1, 2)),
    (range, (1, 20, 3)),
    (range, (0, 1, 1)), (complex, (1, 2)), (fractions.Fraction, (1, 2)),
    (lambda *numbers: list(numbers), (1, 2, 3)), (lambda *numbers: tuple(numbers), (1, 2, 3)),
    (lambda *numbers: dict(zip("abc", numbers)), (1, 2, 3)), (lambda *numbers: {*numbers}, (1, 5)),
    (lambda a, b: {a: b}, (1, 2)), (lambda a: str(a), (3,))])
def test_each_part_of_a_value_counts(kind, numbers):
    """Whichever is changed, by how much ever, the values are equal only where == says so."""
    given = kind(*numbers)
    for i, change in itertools.product(range(len(numbers)), (1, 2, 3)):
        other = kind(*(n + change * (i == at) for at, n in enumerate(numbers)))
        assert same(given, other) == (given == other), (given, other)
        assert same(other, kind(*(n + change * (i == at) for at, n in enumerate(numbers))))


def test_a_subclass_counts_as_its_base():
    """Where its own == is another."""
    one, two = collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)
    assert one != two and same(one, two) and same(one, {"a": 1, "b": 2})
    day = SPACE["mine"](datetime.date, 2024, 1, 2)  # whose == is True for a datetime, too
    assert same(day, datetime.date(2024, 1, 2)) and not same(day, datetime.datetime(2024, 1, 2))
    assert not same(collections.Counter(a=0), collections.Counter())  # whose == is True


def test_moments_of_numpy_are_refused():
    """Nanoseconds are no integers, and NaT is not None, by themselves and in arrays."""
    numpy = pytest.importorskip("numpy")
    units = ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns"]
    for kind, unit in itertools.product((numpy.datetime64, numpy.timedelta64), units):
        for value in (kind(5, unit), kind("NaT", unit)):
            for odd in (value, numpy.array([value]), [value], numpy.array([[value, value]])):
                with pytest.raises(TypeError, match="64"):
                    as_text(odd)


def test_numpys_own_numbers_are_their_values():
    """Every type but long doubles, alone and in arrays and lists."""
    numpy = pytest.importorskip("numpy")
    for code in "?bhilqBHILQefdFD":
        kind = numpy.dtype(code).type
        values = [0, 1] + [0.5, 2.0] * (code in "efdFD") + [1 + 2j, 0.5j] * (code in "FD")
        for value, other in itertools.product(values, values):
            for form, plain in ((kind, lambda x: x), (lambda x: [(kind(x),)], lambda x: [(x,)]),
                                (lambda x: numpy.array([x, x], kind), lambda x: [x, x])):
                assert same(form(value), plain(value))
                assert same(form(value), form(other)) == (value == other), (code, value, other)


@pytest.mark.parametrize("text", [
    "10 ** 130_000", "nest(190)", "list(range(99_000))", "chr(92) * 500_000",
    "chain(190, list(range(39_000)))"])
def test_long_and_deep_values_are_compared(grader, text, monkeypatch):
    monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, "test": 20, "answer": 20})
    code = ("def nest(n):\n    a = []\n    for _ in range(n): a = [a]\n    return a\n"
            "def chain(n, a):\n    for i in range(n): a = {0: a, i + 1: i}\n    return a\n"
            "def f(x): return ")
    want = task(code + text, "f(1)")
    assert grader.grade(want, want["ground_truth"])["reward"] == 1
    endless = "(lambda a: a.append(a) or a)([])"
    for other in (text.replace("9", "8").replace("0_000", "0_001"), endless):
        assert grader.grade(want, code + other)["reward"] == 0
    assert grader.grade(task(code + endless, "f(1)"), code + endless)["reward"] == 0
