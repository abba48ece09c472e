"""What a child claims: generated lines at the wire, forgeries from inside, and values.

    CLAIMS=100000 CLAIMS_SEED=1 python -m pytest -q tests/test_colbench_claims.py -k wire
"""
import ast
import collections
import datetime
import decimal
import fractions
import inspect
import itertools
import json
import math
import os
import pathlib
import random
import socket
import threading
import time
import tracemalloc
import uuid

import pytest

import colbench
from colbench import Grader, Outcome, Verdict, claim, comparable, compare, encode, read_lines
from conftest import FULL
from test_colbench_grader import DOUBLE, HONEST, full, task

N = int(os.environ.get("CLAIMS", 10_000 if FULL else 1_000))
SEED = int(os.environ.get("CLAIMS_SEED", 0))


@pytest.fixture(scope="module")
def graders():
    if not full():
        pytest.skip("no Landlock or another processor: hostile code runs at level full only")
    with Grader(workers=1) as honest, Grader("official", workers=1) as official:
        yield honest, official


def line(value):
    return json.dumps(["value", encode(value)]).encode()


# --- the wire -------------------------------------------------------------------------------------

SECRET = 728_531_908_117  # in every expected value, in no generated line
WANTED = [line(value) for value in (
    SECRET, [SECRET, 0.5], {"a": SECRET}, {SECRET, 1}, (decimal.Decimal(SECRET) / 8,), str(SECRET),
    [fractions.Fraction(SECRET, 7)] * 50, [decimal.Decimal(SECRET) + i for i in range(200)],
    [float("nan"), SECRET], collections.Counter({SECRET: 1}))]
WORDS = ["pass", "value", "raised", "refused", "error", *(v.value for v in Verdict),
         *Verdict.__members__]
NAMES = [*colbench.REBUILD[list], *colbench.REBUILD[str], "os.system", "__class__", "exec", "list",
         "Outcome", ""]
TEXTS = ["1e1000000000", "-1E-999999999", "sNaN", "NaN123", "Infinity", "0x" + "f" * 9000, "-0x0",
         "\ud800", "\0", "é" * 9,
         "2024-01-02T03:04:05+00:00", "9999-12-31", "24:00", "1/3", "::1", "10.0.0.0/8", "int",
         "NoneType", "7" * 5000,
         "1_0", " 1 ", "0b1", "ff" * 700, "12345678" * 4, "../../etc/passwd", *WORDS]
EDGES = [0, -1, 1, 2**31, 2**63 - 1, -2**63, 2**63, 2**64, 10**400, 0.0, -0.0, 5e-324, 1.7e308,
         math.inf, -math.inf, float('nan'),
         0.1, True, False, None, 2**61 - 1, 3 * (2**61 - 1)]


def tree(r, depth):
    """JSON at random, of the encoding's names where they belong and where they don't."""
    kind = r.random()
    if depth == 0 or kind < 0.35:
        return r.choice([r.choice(EDGES), r.choice(TEXTS), r.randrange(-9, 9), r.random()])
    parts = [tree(r, depth - 1) for _ in range(r.choice([0, 1, 2, 2, 3, 3, 6]))]
    if kind < 0.5:
        return parts
    return {r.choice(NAMES): r.choice([parts, parts, r.choice(TEXTS), {r.choice(NAMES): parts},
                                       None, 7])
            for _ in range(1 if r.random() < 0.95 else 2)}


def nest(opening, inner, closing, n):
    return opening * n + inner + closing * n


def collide(r):
    """Keys of one hash, as a set's or a dict's, plain or within tuples."""
    n, step = r.choice([20, 3000, 20_000]), 2**61 - 1
    wrap = r.choice(["%s", '{"tuple": [%s]}', '{"frozenset": [%s]}', '{"Fraction": [%s, 1]}'])
    ones = ",".join(wrap % json.dumps({"int": hex(i * step)}) for i in range(n))
    if r.random() < 0.3:
        values = ",".join(["1"] * n)
        return '["value", {"%s": [[%s], [%s]]}]' % (r.choice(["dict", "Counter"]), ones, values)
    return '["value", {"%s": [%s]}]' % (r.choice(["set", "frozenset", "dict_keys"]), ones)


def nested(r):
    """Sets in tuples in sets: on each level keys of one hash, since hash(-1) == hash(-2)."""
    key = r.choice(['{"Decimal": "%d"}', '{"int": "%#x"}'])
    size = r.choice([3, 9, 17])
    text = '{"set": [%s]}' % ", ".join(key % (i * (2**61 - 1)) for i in range(1, size))
    for _ in range(r.randrange(1, 9)):
        alike = ["".join(f", -{b}" for b in bits)
                 for bits in itertools.product("12", repeat=r.choice([1, 2, 3, 4]))]
        if len(text) * len(alike) > 1_000_000:
            break
        text = '{"set": [%s]}' % ", ".join('{"tuple": [%s%s]}' % (text, tail) for tail in alike)
    return '["value", %s]' % text


SMALL = ['[]', '{"tuple":[]}', '1e1', '""', '"ab"', '{"set":[]}', '{"Decimal":"1"}', 'NaN', '-0',
         '{"Fraction":[1,3]}', '{"UUID":"1"}', '{"Counter":[[],[]]}', '{"deque":[]}',
         '{"date":"2024-01-01"}', '{"range":[0,9,2]}']


def large(r):
    """Lines at the bounds: of bytes, items, digits, depth."""
    n = r.choice([300, 900, 5000, 40_000, 99_000, 101_000, 260_000])
    of = {
        "lists": lambda: nest("[", "1", "]", min(n, 200_000)),
        "tuples": lambda: nest('{"tuple": [', "1", "]}", min(n, 40_000)),
        "sets": lambda: nest('{"frozenset": [', "1", "]}", min(n, 40_000)),
        "many": lambda: repeated(r.choice(SMALL), n),
        "integer": lambda: '{"int": "%s"}' % ("f" * 4 * n),
        "integers": lambda: repeated('{"int": "%s"}' % ("f" * 900), n // 900),
        "digits": lambda: "9" * n,
        "decimals": lambda: repeated('{"Decimal": "%s"}' % ("7" * 3999), min(250, n // 300)),
        "exponents": lambda: repeated('{"Decimal": "%s"}' % r.choice(["1E999", "5E-400", "0.5"]),
                                      min(n, 49_000)),
        "set of decimals": lambda: '{"set": [%s]}' % ",".join(
            '{"Decimal": "%dE-990"}' % i for i in range(min(n, 40_000))),
        "fractions": lambda: repeated('{"Fraction": [{"int": "%s1"}, {"int": "%s3"}]}' % (
            "a" * size, "b" * size), min(150, n // 300)),
        "range": lambda: '{"range": [0, {"int": "%s"}, {"int": "%s"}]}' % ("f" * 2 * n, "3" * n),
        "text": lambda: '"%s"' % ("x" * (1 << 21)),
        "surrogates": lambda: '"%s"' % ("\\ud800" * min(n, 150_000))}
    size = r.choice([800, 3300])
    whole = {"raised": lambda: '["raised", "%s"]' % ("pass" * n), "nested": lambda: nested(r),
             "more nested": lambda: nested(r), "collide": lambda: collide(r)}
    name = r.choice([*of, *whole])
    return whole[name]() if name in whole else '["value", %s]' % of[name]()


def repeated(text, n):
    return "[%s]" % ",".join([text] * n)


def sent(r):
    """What a hostile child sends in place of one line: none, two, or a torn one."""
    kind = r.random()
    if kind < 0.04:
        return large(r).encode() + b"\n"
    if kind < 0.1:
        return r.choice([b"", b"\n", b"\n\n", b"[]\n", b"pass\n", b'"pass"\n', b'["pass"]\n',
                         b'["value"]\n', b"{}\n",
                         b'["pass", "pass"]\n', b"\xff\xfe\n", b'["value", "\xed\xa0\x80"]\n',
                         "['value', 1]\n".encode("utf-16"),
                         b'\xef\xbb\xbf["value", 1]\n', b"nul\0l\n",
                         bytes(r.randrange(256) for _ in range(99)) + b"\n"])
    head = r.choice(["value"] * 8 + WORDS)
    text = json.dumps([head, tree(r, r.choice([1, 2, 3, 5]))], ensure_ascii=r.random() < 0.97)
    data = text.encode("utf-8", "surrogatepass")
    if kind < 0.2:
        at = r.randrange(len(data))
        data = r.choice([data[:at], data[at:],
                         data[:at] + bytes([r.randrange(256)]) + data[at + 1:],
                         data[:at] + b"\n" + data[at:],
                         data + data, data.replace(b"[", b"[[" * 3)])
    return data + r.choice([b"\n"] * 9 + [b"", b"\n" + data + b"\n", b"\r\n"])


def received(data):
    """The line, or the Outcome of there being none, by the function that reads a real child."""
    ours, theirs = socket.socketpair()
    with ours:
        def write():
            with theirs:
                try:
                    theirs.sendall(data)
                except OSError:  # who reads no further
                    pass
        writer = threading.Thread(target=write)
        writer.start()
        lines, last = read_lines(ours, 1, 9, time.monotonic() + 9, 1 << 24)
    writer.join()
    return lines[0] if lines else last


def test_no_line_at_the_wire_earns_a_reward_raises_or_takes_long():
    """Generated lines against ten expected values; the slowest is looked at."""
    r, slowest, verdicts = random.Random(f"wire {SEED}"), (0, b""), collections.Counter()
    for _ in range(N):
        data, wanted = sent(r), r.choice(WANTED)
        got = received(data)
        assert isinstance(got, (bytes, Outcome))
        start = time.thread_time()
        outcome = compare(wanted, got)
        slowest = max(slowest, (time.thread_time() - start, data[:200]))
        assert isinstance(outcome, Outcome) and outcome.verdict is not Verdict.PASS, data[:500]
        assert str(outcome) != "pass" and len(str(outcome)) < 1200 and "\n" not in str(outcome)
        verdicts[outcome.verdict] += 1
    assert slowest[0] < 2, slowest  # it hangs: the slowest of these lines take a twentieth of it
    assert {Verdict.WRONG, Verdict.RAISED, Verdict.REFUSED,
            Verdict.ENDED} <= verdicts.keys(), verdicts


@pytest.mark.full
def test_the_largest_lines_take_bounded_memory():
    r = random.Random(f"large {SEED}")
    tracemalloc.start()
    try:
        for _ in range(40):
            data = large(r).encode()[:colbench.LIMITS["line"]]
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            claim(data)
            assert tracemalloc.get_traced_memory()[1] - before < 24 << 20, data[:100]
    finally:
        tracemalloc.stop()


def test_bytes_that_drip_past_a_deadline_are_not_waited_for():
    """A wire of our own: each byte comes half a millisecond after the one before, for ever."""
    class Drip:
        read = 0

        def settimeout(self, seconds):
            self.left = seconds

        def recv(self, n):
            self.read += 1
            time.sleep(5e-4)
            return b"1" if self.read < 500 else b""
    wire = Drip()
    lines, last = read_lines(wire, 1, 0.05, time.monotonic() + 9, 1 << 24)
    assert not lines and last == Outcome(Verdict.TIMEOUT) and wire.read < 500


def test_the_lines_of_an_answer_are_bounded_over_all_its_children(graders, monkeypatch):
    monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, "lines": 3 << 20})
    dies = "import os\nn = 0\ndef f(x):\n    if x % 2: os._exit(0)\n    return str(x) * 900_000"
    outcomes = graders[0].lines(dies, [f"f({i})" for i in range(40)], "answer")
    assert sum(len(x) for x in outcomes if isinstance(x, bytes)) <= 3 << 20 and len(outcomes) == 40
    assert Outcome(Verdict.REFUSED, "more than 3,145,728 bytes in all") in outcomes


def test_what_a_child_says_is_kept_short(graders):
    odd = task("def f(x): raise type('A' * 10 ** 6, (Exception,), {})", "f(1)")
    assert len(graders[0].grade(odd, odd["ground_truth"])["tests"]["test1"]) < 200
    assert graders[0].kept_bytes < 4 << 20


def test_a_decimal_is_compared_with_a_long_integer_as_a_fraction():
    """As a Decimal it would take long."""
    wanted = line(decimal.Decimal(SECRET) / 8)
    given = b'["value", {"int": "0x%s"}]' % (b"f" * 60_000)
    assert type(claim(wanted).value) is fractions.Fraction
    assert compare(wanted, given).verdict is Verdict.WRONG


def test_nested_counters_are_refused(graders):
    """Their == takes time exponential in the depth."""
    deep = task("""
from collections import Counter
def f(x):
    c = Counter(a=1)
    for _ in range(60):
        c = Counter(a=c)
    return c
""", "f(1)")
    assert graders[0].grade(deep, deep["ground_truth"])["tests"]["test1"] == (
        "no expected value from the reference: "
        "value refused, a Counter of other things than numbers")


@pytest.mark.parametrize("wanted", WANTED[:8])
def test_the_same_line_passes_and_one_bit_less_does_not(wanted):
    assert compare(wanted, received(wanted + b"\n")).verdict is Verdict.PASS
    other = wanted.replace(b"8", b"9", 1)
    assert other != wanted and compare(wanted, received(other + b"\n")).verdict is Verdict.WRONG


def test_a_verdict_of_pass_is_written_once_behind_the_comparison():
    """What decides is in `compare`; `grade` counts it."""
    source = ast.parse(inspect.getsource(colbench))
    where = [function.name for function in ast.walk(source) if isinstance(function, ast.FunctionDef)
             for node in ast.walk(function) if isinstance(node, ast.Attribute)
             and node.attr == "PASS"]
    assert collections.Counter(where) == {"compare": 1, "grade": 1, "check_task": 2}


@pytest.mark.parametrize("data, why", [
    (b'["value", %s]' % nest(b"[", b"1", b"]", 3000), "nested too deeply"),
    (b'["value", [%s]]' % b",".join([b"1"] * 200_000), "more than 100,000 items"),
    (b'["value", {"Fraction": [{"int": "%s"}, 3]}]' % (b"f" * 5000),
     "a Fraction of more than 1,000 digits"),
    (b'["value", {"Decimal": "1E+1000000000"}]', "a Decimal of more than 1,000 digits"),
    (b'["value", {"range": [0, {"int": "%s"}, 1]}]' % (b"f" * 999),
     "a range of more than 1,000 digits"),
    (b'["value", {"set": [%s]}]' % b",".join(b'{"int": "%x"}' % (i * (2**61 - 1))
                                             for i in range(40)),
     "more than 16 keys of one hash"), (b'["value", {"tuple": "12"}]', "no line of plain data")])
def test_a_bound_names_itself_and_is_the_tasks_fault_where_the_reference_breaks_it(data, why):
    assert claim(data) == Outcome(Verdict.REFUSED, why)
    assert comparable(data) == Outcome(Verdict.NOT_EXPECTED, f"value refused, {why}")


# --- from inside ----------------------------------------------------------------------------------

HIDDEN = task("def f(x):\n    return (x * 7919 + 104729) % 1009 + 3",
              *(f"f({i})" for i in range(4)))
LINES = ['["error", "pass"]', '["pass", "pass"]', '["value", true]',
         '["value", {"type": "object"}]', "pass", '"pass"', "",
         '["raised", "pass"]', '["value", NaN]', '["value", {"Decimal": "1e1000000000"}]',
         '["value", 1]\\n["value", 2]',
         '["value", "pass"]', '["refused", "pass"]', '["value", {"Fraction": ["1e99", 3]}]',
         '{"value": 1}']
VANDALS = {
    "json": "import json\njson.dumps = lambda *a, **k: LINE\ndef f(x): return 0",
    "encoder": "import json\n"
               "json.encoder.encode_basestring_ascii = json.encoder.c_make_encoder = lambda *a: "
               "LINE\ndef f(x): return 0",
    "main": "import __main__ as m\nm.encode = lambda *a: LINE\n"
            "m.json = type('J', (), {'dumps': lambda *a: LINE})\ndef f(x): return 0",
    "stdout": "import sys, io\nsys.stdout = sys.stderr = sys.__stdout__ = io.StringIO(LINE)\n"
              "print(LINE)\ndef f(x): print(LINE); return 0",
    "builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\n"
                "builtins.type = lambda *a: LINE\nbuiltins.len = lambda *a: 0\n"
                "def f(x): return 0",
    "every descriptor": "import posix\ndef f(x):\n    for fd in range(64):\n"
                        "        try: posix.write(fd, LINE.encode() + b'\\n')\n"
                        "        except OSError: pass\n    return 0",
    "writev": "import os\ndef f(x):\n    for fd in range(64):\n"
              "        try: os.writev(fd, [LINE.encode(), b'\\n'])\n"
              "        except OSError: pass\n    os._exit(0)",
    "libc": "import ctypes\ndef f(x):\n"
            "    for fd in range(9): ctypes.CDLL(None).write(fd, LINE.encode() + b'\\n"
            "', len(LINE) + 1)\n    return 0",
    "many lines at import": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, (LINE + '\\n"
                            "').encode() * 9)\n"
                            "    except OSError: pass\ndef f(x): return 0",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
              "        for name, value in {**frame.f_locals, **frame.f_globals}.items():\n"
              "            if type(value) is dict and 'tests' in value: value['tests'] = ['1'] * "
              "9\n        frame = frame.f_back\n    return LINE",
    "garbage": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
               "        if type(o) is dict and 'tests' in o: o.clear()\n"
               "        if type(o) is list and o and o[0] == 'value': o[:] = [LINE]\n    return 0",
    "tracing": "import sys\ndef trace(frame, event, arg):\n"
               "    if 'line' in frame.f_locals: frame.f_locals['line'] = LINE\n    return trace\n"
               "sys.settrace(trace)\ndef f(x): return 0",
    "os.write": "import os\nwrite = os.write\n"
                "os.write = lambda fd, data: write(fd, LINE.encode() + b'\\n') and len(data)\n"
                "def f(x): return 0",
    "class": "class E(int):\n    def __eq__(s, o): return True\n    def __repr__(s): return LINE\n"
             "    __hash__ = int.__hash__\ndef f(x): return E(0)",
    "raises": "class pass_(BaseException): pass\npass_.__name__ = LINE\n"
              "def f(x): raise pass_(LINE)"}


def forge(grader, names=VANDALS):
    """No vandal earns a reward, and none spoils the next answer's."""
    for name in names:
        for text in LINES:
            answer = f"LINE = {text!r}.replace('\\\\n', chr(10))\n" + VANDALS[name]
            graded = grader.grade(HIDDEN, answer)
            assert graded["reward"] == 0 and "pass" not in graded["tests"].values(), (name, text,
                graded)
        assert grader.grade(DOUBLE, HONEST)["reward"] == 1, name


@pytest.mark.parametrize("name", VANDALS)
def test_no_answer_forges_a_reward_from_inside(graders, name, monkeypatch):
    monkeypatch.setattr(colbench, "LIMITS",
                        {**colbench.LIMITS, "test": .5, "answer": .5})  # only to save time
    for grader in graders:
        forge(grader, [name])


# --- values ---------------------------------------------------------------------------------------

SPACE = {m.__name__: m for m in (collections, datetime, decimal, fractions, math, pathlib, uuid)}
VALUES = """
None | True | 1 | 1.0 | 0 | -0.0 | 0.5 | 2**63 | 2**70000 | 2.0**63 | 1e300 | 0.1
math.inf | float('nan') | 1+0j | 1j
'' | 'a' | '\\ud800\\0é' | '::1' | b'a' | b'' | bytearray(b'a')
[] | [1] | [1.0, [None]] | [float('nan')] | [[float('nan')]] | () | (1,) | ((1,),)
set() | {1} | frozenset({1}) | {(1, 'a')} | {(1, 1)} | {1: 1}.keys()
{} | {1: 1} | {1: [1], 'a': ()} | {(1,): {2: 3}} | {'a': 1} | {1: 1, 2: 2} | {2: 2, 1: 1}
collections.OrderedDict([(1, 1), (2, 2)]) | collections.OrderedDict([(2, 2), (1, 1)])
collections.Counter('a') | collections.Counter({'a': 1, 'b': 0}) | collections.Counter({'a': 1.0})
collections.defaultdict(list, {1: 1}) | collections.namedtuple('P', 'a')(1)
collections.deque([1]) | collections.deque([1], 5) | collections.deque([[1]])
range(0) | range(3) | range(0, 3) | range(0, 4, 2) | range(0, 3, 2) | range(2**80, 2**80 + 2)
decimal.Decimal('0.5') | decimal.Decimal('0.50') | decimal.Decimal('NaN')
decimal.Decimal('-Infinity') | decimal.Decimal('Infinity') | decimal.Decimal(1)
decimal.Decimal('1E+300') | decimal.Decimal('0.1') | decimal.Decimal('0') | decimal.Decimal('0E-9')
fractions.Fraction(1, 2) | fractions.Fraction(1)
datetime.datetime(2024, 1, 2) | datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)
datetime.datetime(2024, 1, 2, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1)))
datetime.datetime(2024, 1, 2, 3, 4, 5, 6) | datetime.date(2024, 1, 2)
datetime.time(1, 2) | datetime.timedelta(1) | datetime.timedelta(hours=24)
uuid.UUID(int=1) | uuid.UUID('00000000-0000-0000-0000-000000000001') | uuid.UUID(int=2)
pathlib.Path('a') | pathlib.PurePosixPath('a') | pathlib.Path('a/../a') | ('PurePosixPath', 'a')
int | type(None)
"""
VALUES = [text.strip() for text in VALUES.strip().replace("\n", "|").split("|")]


@pytest.mark.full
def test_two_values_are_equal_where_python_says_so():
    """The oracle is ==, on all pairs of some 80 values, each by itself and within a list."""
    differ = []
    for a, b in itertools.product(VALUES, repeat=2):
        for form in "{}", "[{}, 0]":
            x, y = (eval(form.format(text), dict(SPACE)) for text in (a, b))
            try:
                equal = bool(x == y)
            except (decimal.InvalidOperation, TypeError):  # a signalling NaN, an unhashable item
                equal = False
            if x is None:
                continue
            wanted = comparable(line(x))
            assert isinstance(wanted, bytes), (a, wanted)
            if (compare(wanted, line(y)).verdict is Verdict.PASS) != equal:
                differ.append((form.format(a), form.format(b), equal))
    assert not differ, differ


@pytest.mark.parametrize("text",
                         ["10 ** 130_000", "(1 << 4_000_000) + 1", "nest(900)",
                          "list(range(99_000))", "'a' * 1_000_000"])
def test_long_and_deep_values_are_compared(graders, text):
    code = ("def nest(n):\n    a = []\n    for _ in range(n): a = [a]\n    return a\n"
            "def f(x): return ")
    want = task(code + text, "f(1)")
    assert graders[0].grade(want, want["ground_truth"])["reward"] == 1
    assert graders[0].grade(want, code + text.replace("9", "8").replace("0_000",
        "0_001"))["reward"] == 0


REFUSED = {
    "generator": "(i for i in [1])", "dict_values": "{1: 2}.values()", "function": "f",
    "module": "__import__('math')", "object": "object()", "map": "map(str, [1])",
    "Pattern": "__import__('re').compile('a')", "type": "type('K', (), {})",
    "dict_items": "{1: 2}.items()",
    "slice": "slice(1)", "memoryview": "memoryview(b'a')",
    "array": "__import__('array').array('i', [1])",
    "mappingproxy": "__import__('types').MappingProxyType({})",
    "ChainMap": "__import__('collections').ChainMap({})",
    "UserDict": "__import__('collections').UserDict({})",
    "IPv4Address": "__import__('ipaddress').ip_address('10.0.0.1')"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_plain_equality_is_refused_by_its_name(graders, name):
    want = task("def f(x): return [1]", "f(1)")
    graded = graders[0].grade(want, f"def f(x): return {REFUSED[name]}")
    assert graded["tests"] == {"test1": f'value refused "TypeError: {name}"'}
    odd = task(f"def f(x): return {REFUSED[name]}", "f(1)")
    assert graders[0].grade(odd, odd["ground_truth"])["tests"]["test1"] == \
        f'no expected value from the reference: value refused "TypeError: {name}"'
