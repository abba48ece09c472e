"""The grader: right verdicts, honest code, hostile code, and nothing left behind."""
import encodings.aliases
import os
import platform
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import SimpleNamespace

import pytest

import colbench
from colbench import Grader, GraderError, get_args, grade_records
from conftest import (DOUBLE, FULL, HONEST, PYTHON, ROOT, copy_scripts, descendants, gone, lines,
                      task, until)

# what the attacks look for: two listeners, a readable file, one to delete, a variable
STREAM = socket.create_server(("127.0.0.1", 0))  # on any free port
DATAGRAM = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
DATAGRAM.bind(f"\0colbench{os.getpid()}")
FOLDER = Path(f"/tmp/colbench{os.getpid()}")
os.environ["COLBENCH_SECRET"] = "secret"  # before a grader starts


@pytest.fixture(scope="module", autouse=True)
def secrets():
    FOLDER.mkdir()
    (FOLDER / "secret").touch()
    (FOLDER / "victim").write_text("victim")
    yield
    shutil.rmtree(FOLDER)


def traces():
    """What an attack might leave or change: processes, files, shared memory, messages."""
    shm, victim = Path("/proc/sysvipc/shm"), FOLDER / "victim"
    pwned = [p for folder in ("/tmp", "/dev/shm") for p in os.listdir(folder) if "pwned" in p]
    heard = select.select([STREAM, DATAGRAM], [], [], 0)[0]
    return (descendants(), pwned, shm.read_text() if shm.exists() else "", victim.read_text(),
            victim.stat().st_mode, sorted(os.listdir(FOLDER)), heard)


# --- verdicts -------------------------------------------------------------------------------------

def doing(line):
    """A right answer to DOUBLE, but for what its first line does."""
    return f"def f(x):\n    {line}\n    return 2 * x"


VERDICTS = [  # an answer, and its verdict or those of each test
    (HONEST, "pass"), (None, "no answer"), (" \n", "no answer"),
    (doing("if x > 2: return 0"), ["pass", "pass", "wrong value", "wrong value"]),
    (doing("if x == 2: 1 / 0"), ["pass", 'raised "ZeroDivisionError"', "pass", "pass"]),
    (doing("while x == 2: pass"), ["pass", "timeout", "pass", "pass"]),
    ("import os\n" + doing("if x == 2: os._exit(3)"), ["pass", "process ended", "pass", "pass"]),
    ("n = 0\n" + doing("global n; n += 1; x *= n"), "pass"),
    ("def f(x) return x", 'raised "SyntaxError"'), ("def g(x): return x", 'raised "NameError"'),
    (doing("return '\ud800'"), "wrong value"),
    (doing("input()"), 'raised "EOFError"'),
    (doing("bytearray(2 << 30)"), 'raised "MemoryError"'),
    (doing("raise type('A' * 10 ** 6, (Exception,), {})"), f'raised "{"A" * 93}"'),
    ("import nosuchmodule", 'raised "ModuleNotFoundError: nosuchmodule"'),
    ("class E:\n    def __eq__(s, o): return True\ndef f(x): return E()",
     'value refused "TypeError: E"'),
    ("class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
     "def f(x): return E(0)", "wrong value"),
    ("class E(int): pass\ndef f(x): return E(2 * x)", "pass"),
    ("import numbers\nclass E:\n    def __init__(s, x): s.x = x\n    def as_integer_ratio(s): "
     "return 2 * s.x, 1\nnumbers.Real.register(E)\nf = E", "pass"),
    (doing("yield x"), 'value refused "TypeError: generator"'),
    (HONEST + "#" * (1 << 20), "pass")]
ODDITIES = {  # honest code of all kinds, all right
    "prints": doing("print('[\"value\", 1]')"),
    "os": doing("import os; x = len(os.path.join('', 'a' * x))"),
    "callable": "class F:\n    def __call__(s, x): return 2 * x\nf = F()",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
                 + doing("x = P(x).x"),
    "main": HONEST + "\nif __name__ == '__main__':\n    print(f(int(input())))",
    "strptime": "import datetime\n" + doing("datetime.datetime.strptime('2024', '%Y').year"),
    "unicode": "def f(größe): return größe * 2  # \u2713",
    "numpy": doing("import numpy as np; x = np.unique([x, x])[0]"),
    "numpy's late modules": "import numpy as np\n" + doing(
        "x *= int(np.char.isdigit('1') * np.fft.fft([1])[0].real)"),
    "sympy's numbers": doing("from sympy import Rational; x = Rational(2 * x, 2)"),
    "sympy's late modules": "from sympy import *\ny = symbols('y')\n" + doing(
        "return int(solve(2 ** y - 4 ** x, y)[0])"),
    "sympy, lambdify": "from sympy import *\ny = symbols('y')\n" + doing(
        "return int(lambdify(y, integrate(2 * y ** 0, y))(x))"),
    "a codec": doing("x *= len('\\\\x41'.encode().decode('unicode_escape'))"),
    "bytes of a code page": doing("x *= len(bytes('\\u2013', 'cp1252'))"),
    "a time zone": "from datetime import datetime\nfrom zoneinfo import ZoneInfo\n" + doing(
        "x = datetime(24, x, 1, tzinfo=ZoneInfo('Europe/Paris')).month"),
    "a warning and a trace": "import traceback, warnings\n" + doing(
        "warnings.warn('w')\n    try: 1 / 0\n    except ZeroDivisionError:\n"
        "        x *= 'Zero' in traceback.format_exc()"),
    "closes files": "import os, sys\nsys.stdout.close()\nos.closerange(0, 64)\n" + doing("pass"),
    "a parser": "import xml.dom.minidom as m\n" + doing(
        "return x * int(m.parseString('<a>2</a>').firstChild.firstChild.data)")}


@pytest.mark.parametrize("answer, verdicts", [
    *VERDICTS, *((code, "pass") for code in ODDITIES.values())])
def test_verdicts(grader, answer, verdicts):
    verdicts = [verdicts] * 4 if isinstance(verdicts, str) else verdicts
    assert grader.grade(DOUBLE, answer) == {"reward": verdicts.count("pass") / 4,
                                            "tests": dict(zip(DOUBLE["test_cases"], verdicts))}


def test_a_reference_without_a_value_never_passes_and_check_drops_its_task(grader, grading):
    code = """import random
def f(x):
    if x == 1: return None
    if x == 2: import nosuch
    if x == 3: return iter([x])
    return random.random() if x == 4 else x"""
    odd = task(code, *(f"f({x})" for x in range(1, 6)))
    why = ["None", 'raised "ModuleNotFoundError: nosuch"',
           'value refused "TypeError: list_iterator"']
    wanted = [*(f"no expected value: {why}" for why in why), "wrong value", "pass"]
    verdicts = dict(zip(odd["test_cases"], wanted))
    assert grader.grade(odd, code) == {"reward": 1 / 5, "tests": verdicts}
    verdicts = dict.fromkeys(verdicts, colbench.MAY_VARY)
    tasks = [{"task": {"id": n, **t}, "n": n} for n, t in enumerate((DOUBLE, odd, DOUBLE))]
    kept, told, _ = grading(tasks, command="check")
    assert kept == [tasks[0], tasks[2]] and told == f"task 1 dropped: {verdicts}\n"


RANDOM = {  # bodies of references whose values vary, most of them between two values only
    "a choice": "import random; return random.choice([1, 2])",
    "a rare event": "import random; return random.random() < .1",
    "an order": "from random import shuffle; x = [1, 2]; shuffle(x); return x",
    "another generator": "import random; return random.Random().choice([1, 2])",
    "the system's generator": "import random; return random.SystemRandom().choice([1, 2])",
    "secrets": "import secrets; return secrets.randbelow(2)",
    "a uuid": "import uuid; return str(uuid.uuid4()) < '8'",
    "bytes": "return __import__('os').urandom(1)[0] % 2",
    "numpy": "import numpy as np; return int(np.random.randint(2))",
    "numpy's new generator": "import numpy as np; return int(np.random.default_rng().integers(2))",
    "sympy": "import sympy; return int(sympy.randMatrix(1, 1, 0, 1)[0])",
    "an address": "return id(object()) % 1000", "another address": "return hash(object()) % 1000"}
READS_CLOCK = {  # bodies of references whose values change with the day
    "a second": "import time; return int(time.time()) % 2",
    "nanoseconds": "import time; return time.time_ns() // 10 ** 9 % 2",
    "an uptime": "import time; return int(time.monotonic()) % 7",
    "a stopwatch": "import time as t; return t.perf_counter_ns() // 10 ** 9 % 7",
    "a clock by its number": "import time; return int(time.clock_gettime(0)) % 2",
    "a year": "import datetime; return datetime.datetime.now().year",
    "a year by time": "import time; return time.localtime().tm_year",
    "a year in text": "from time import strftime; return strftime('%Y')",
    "a date in text": "import time; return time.ctime()[4:7]",
    "a date in other text": "import time; return time.asctime(time.gmtime())[4:7]",
    "half a day": "import datetime as d; return d.datetime.now(d.timezone.utc).hour < 12",
    "half a year": "import datetime as d; return d.datetime.utcnow().month < 7",
    "a day of rest": "from datetime import datetime as d; return d.today().weekday() >= 5",
    "numpy's day": "import numpy; return str(numpy.datetime64('today'))",
    "a function that is passed on": "import datetime; return max(map(datetime.datetime.now, [None]))",
    "a stopwatch that checks": "import time; t = time.time(); assert 0 <= time.time() - t < 5; return x",
    "a date that may be given": "from datetime import date; return (x or date.today()) + 1",
    "another name": "from time import time as n; return int(n()) % 2",
    "a deadline": "from datetime import date; return date.today() > date(2025, 6, 1)"}
REPEATABLE = {  # bodies of references that look like these and always give the same value
    "dates": """from datetime import date, datetime, timedelta
    day = datetime.strptime('2024-02-28 12', '%Y-%m-%d %H')
    assert isinstance(day, date) and isinstance(day.date(), date) and type(day) is datetime
    return [day + timedelta(1), repr(day), str(day.date()), datetime.fromtimestamp(0).year]""",
    "the time of a date": "import datetime as d; t = d.datetime(2024, 2, 3, 4); "
                          "return [str(t.time()), t.strftime('%Y'), d.datetime.time(t).hour]",
    "a text": "from datetime import date; return date(2024, 2, 3).strftime('%Y')",
    "words": "time, operand, today, now = x, 3, 4, 5; return [time, operand, today, now]"}


@pytest.mark.parametrize("what", [*RANDOM, *READS_CLOCK])
def test_check_drops_a_reference_that_may_draw_random_numbers_or_read_a_clock(what, graders):
    """Also if it has two values, and the two that grade compares are often equal."""
    odd = task(f"def f(x):\n    {RANDOM.get(what) or READS_CLOCK[what]}", "f(1)")
    for grader in graders:
        assert grader.grade_reference(odd) == {"reward": 0, "tests": {"test1": colbench.MAY_VARY}}


@pytest.mark.parametrize("what", REPEATABLE)
def test_check_keeps_a_reference_that_repeats_its_value(what, graders):
    good = task(f"def f(x):\n    {REPEATABLE[what]}", "f(1)")
    for grader in graders:
        assert grader.grade_reference(good) == {"reward": 1, "tests": {"test1": "pass"}}


def test_grade_has_the_clock_and_the_random_numbers_of_the_machine(grader):
    now = task("import datetime\ndef f(x):\n    return datetime.datetime.now().year", "f(1)")
    grader.grade_reference(now)
    assert grader.grade(now, f"def f(x): return {time.localtime().tm_year}")["reward"] == 1
    results = {grader.results_of("import random", ["random.random()"])[0] for _ in range(3)}
    assert len(results) == 3


# --- modules --------------------------------------------------------------------------------------

@pytest.mark.parametrize("test, code", [
    ("f(50)", "def f(n): return list({str(i) for i in range(n)})"),
    ("f(__import__('fractions').Fraction(1, 2))", "def f(x): return 2 * x"),
    ("list(f('a').encode('cp1252'))", "def f(x): return x * 2"),
    ("f(b'a')", "def f(x): return str(2 * x, 'cp1252')"),
    ("f('a')", "def f(x): return list(bytearray(2 * x, 'cp1252'))"),
    ("f(b' \\x80')", "def f(x): return str(x.strip(), 'cp1252')"),
    ("f(b'\\x80')", "def f(x): return (lambda read: read('cp1252'))(x.decode)"),
    ("f(b'\\x80')", "def f(x): return ''.join(map(str, [x], ['cp' + '1252']))"),
    ("f(b'\\x80')", "def f(x):\n    try: return str(x, 'cp1252')\n"
                    "    except LookupError: return 0"),
    ("f('a')", "def f(x):\n    try: return str(b'', x)\n    except LookupError: return 'none'")])
def test_a_value_is_the_same_in_a_child_with_other_modules(test, code, grader):
    """A set has the same order, and what a test or a codec needs is there."""
    assert grader.grade(task("import math\n" + code, test), code)["reward"] == 1


def test_an_answer_has_the_packages_that_the_grader_has(monkeypatch, tmp_path):
    """Wherever they are: sympy's place is taken by a module of another folder."""
    r = random.Random("packages")
    for number in range(3):
        folder, marker = tmp_path / f"{number} {r.random()}", r.randrange(10 ** 9)
        folder.mkdir()
        (folder / "sympy.py").write_text(f"marker = {marker}\n")
        with monkeypatch.context() as patch, closing(Grader(workers=1)) as g:
            patch.setattr(sys, "path", [*sys.path[:number], str(folder), *sys.path[number:]])
            wanted = task(f"def f(x): return {marker} * x", "f(1)", "f(2)")
            answer = "import sympy\ndef f(x): return sympy.marker * x"
            assert g.grade(wanted, answer)["reward"] == 1


def test_every_codec_is_there(grader):
    names = sorted({*encodings.aliases.aliases.values()} - {"mbcs", "oem"})  # of Windows
    code = """def f(name, data=b'4'):
    try: return str(data, name)
    except UnicodeError: return 'not this data'
    except LookupError: return 'a codec for something else than text'"""
    exec(code, space := {})
    given = grader.results_of(code, [f"f({name!r})" for name in names])
    wanted = grader.results_of("", [repr(space["f"](name)) for name in names])
    assert dict(zip(names, given)) == dict(zip(names, wanted))


PACKAGES = Path(find_spec("sympy").origin).parents[1]
IMPORT = r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]*(\([^)]*\)|.*)"
NOT_FOR_ANSWERS = (  # tests, compilers, plots, other packages' arrays
    r"(numpy|sympy)\.testing|mpmath\.tests|numpy\.(core|ctypeslib|distutils|f2py|matlib|typing)"
    r"|numpy\.lib\.recfunctions|sympy\.(plotting|printing|physics\.control)"
    r"|sympy\.tensor\.array\.expressions")


def module_files():
    """(name, path) of each module of numpy, sympy and mpmath, which sympy imports."""
    for package in "numpy", "sympy", "mpmath":
        for path in (PACKAGES / package).rglob("*"):
            if path.suffix in (".py", ".so"):
                module = path.relative_to(PACKAGES).with_name(path.name.partition(".")[0])
                yield ".".join(module.parts).removesuffix(".__init__"), path


def imported(path):
    """All that may be a module in the import statements of a file."""
    package = ".".join(path.relative_to(PACKAGES).parts[:-1])
    for base, names in re.findall(IMPORT, path.read_text(encoding="utf-8"), re.M):
        base = resolve_name(base, package) if base else ""
        yield from (f"{base}.{name}".strip(".") for name in ["", *re.findall(r"[.\w]+", names)])


def test_what_numpy_and_sympy_import_late_is_loaded(grader):
    """By all import statements in the files of loaded modules, also those within functions."""
    files = dict(module_files())
    (yes,) = grader.results_of("", ["True"])
    told = grader.results_of("import numpy, sys", [f"{name!r} in sys.modules" for name in files])
    loaded = {name for name, result in zip(files, told) if result == yes}
    sources = [files[name] for name in loaded if files[name].suffix == ".py"]
    late = {name for path in sources for name in imported(path)} & files.keys() - loaded
    assert late and not [name for name in late if not re.match(NOT_FOR_ANSWERS, name)]


@pytest.mark.parametrize("part", ["a", ".a", "\\", "(", "time", "import ", "from "])
def test_no_text_takes_long_to_look_through(part):
    """By the pattern of check."""
    begin = time.process_time()
    for text in (part * (260_000 // len(part)), part[:1] + part[1:2] * 260_000):
        colbench.RANDOM_OR_CLOCK.search(text)
    assert time.process_time() - begin < 2


# --- attacks --------------------------------------------------------------------------------------

# Each is the first line of a right function: who takes the step gets the reward. None of them does
# harm where it can be taken: os.getppid() fails in a child as all calls do, and gives -1.
STEPS = [
    "os.fork()", "_thread.start_new_thread(print, ())", "subprocess.run(['true'])",
    "os.execv('/bin/true', ['true'])", "open('/tmp/pwned', 'w')", "open('/dev/shm/pwned', 'w')",
    "os.mkdir('/tmp/pwned')", "os.open(victim, os.O_RDONLY | os.O_TRUNC)", "os.unlink(victim)",
    "os.chmod(victim, 0)", "open(secret)", "os.listdir('/')", "open('/proc/self/environ')",
    "open('/proc/self/mem', 'rb')", "os.environ['COLBENCH_SECRET']",
    "socket.create_connection(('127.0.0.1', port))",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', name)",
    "os.kill(os.getpid(), 0)", "os.killpg(0, 0)", "fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "time.sleep(9)",
    "assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
    "sum(range(10 ** 12))", "9 ** 9 ** 9", "re.match('(a+)+$', 'a' * 60 + 'b')", "f(x)",
    "'a' * (1 << 40)", "os._exit(0)", "os.abort()", "ctypes.string_at(0)", "sys.exit(0)",
    "raise BaseExceptionGroup('', [KeyboardInterrupt(), SystemExit()])",
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))",
    "multiprocessing.Process(target=print).start()", "sys.setrecursionlimit(10 ** 9); f(x)",
    "sys._getframe(99)", "import __main__; __main__.task",
    "while True: print('x' * 99999)", "while True: os.fork()", "while True: yield x",
    "return [x] * 10 ** 6", "a = []\n    for _ in range(100000): a = [a]\n    return a",
    "signal.signal(signal.SIGSEGV, lambda *a: None); ctypes.string_at(0)"]
IMPORTS = f"""import _thread, ctypes, fcntl, multiprocessing, os, re, resource, signal, socket
import subprocess, sys, time
victim, secret, name = '{FOLDER}/victim', '{FOLDER}/secret', {DATAGRAM.getsockname()!r}
port = {STREAM.getsockname()[1]}
"""
ATTACKS = {step: IMPORTS + doing(step) for step in STEPS} | {
    "a loop that swallows": "def f(x):\n    while True:\n        try:\n"
                            "            while True: pass\n        except BaseException: pass",
    "deep syntax": "x = " + "(" * 5000 + ")" * 5000, "growing list": "x = [0]\nwhile True: x += x",
    "endless values": "class D(dict):\n    def items(s):\n        while True: yield 1, 1\n"
                      + doing("return D()"),
    "equal inside": "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
                    + doing("return [E(7)]"),
    "name that raises": "class S(str):\n    def __format__(s, *a): raise SystemExit\n" + doing(
                        "e = ModuleNotFoundError(); e.name = S(); raise e"),
    "zone that hangs": "import datetime\nclass Z(datetime.tzinfo):\n    def utcoffset(s, d):\n"
                       "        while True: pass\n"
                       + doing("return datetime.datetime(2024, 1, 1, tzinfo=Z())"),
    "class of builtins": "class M(type): __module__ = 'builtins'\nclass K(metaclass=M): pass\n"
                         "K.__module__ = 'builtins'\n" + doing("return K"),
    "reduce": "class E:\n    def __reduce__(s): return print, (1,)\n" + doing("return E()")}


def test_attacks_meet_a_wall(grader, quick):
    """Each has no reward, outside all is as before, and an honest answer passes after it."""
    for text in (HONEST, IMPORTS + doing("pass")):  # the server for imports starts with the second
        assert grader.grade(DOUBLE, text)["reward"] == 1
    before = traces()
    for answer in ATTACKS.values():
        graded = grader.grade(DOUBLE, answer)
        assert graded["reward"] == 0, (answer, graded)
        assert traces() == before, answer
        assert grader.grade(DOUBLE, HONEST)["reward"] == 1, answer


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an unprivileged user already")
def test_an_unprivileged_user_is_as_safe():
    """The same tests, by a root without capabilities."""
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable]
    done = subprocess.run(
        [*powerless, "-m", "pytest", "-qp", "no:cacheprovider", "tests/test_colbench_grader.py",
         "tests/test_colbench_claims.py", "-k", "attacks_meet or forges or verdicts"],
        text=True, capture_output=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_a_child_finds_nothing_to_read(grader):
    facts = {"sum(map(is_open, range(1024)))": 4,  # /dev/null three times, the socket
             "{*os.environ} - {'PYTHONPATH', 'PYTHONHASHSEED', 'TZ', 'OPENBLAS_NUM_THREADS',"
             " 'LC_CTYPE'}": set(),
             "{*sys.modules} & {'collect', 'model', 'torch'}": set(), "sys.argv": ["-c"],
             f"{DOUBLE['ground_truth']!r} in repr(vars(sys.modules['__main__']))": False}
    probe = ("import os, sys\ndef is_open(fd):\n    try: return os.lseek(fd, 0, 1) >= 0\n"
             "    except OSError as e: return e.errno != 9\ndef wanted(): return ")
    for test, value in facts.items():
        given, wanted = grader.results_of(f"{probe}{value!r}", [test, "wanted()"])
        assert given == wanted, (test, given)


# The system calls that an answer may make, as in Linux's tables: a copy of the list, so that one
# more is not allowed by mistake. Whoever adds one explains here why it can do no harm.
ALLOWED = {
    "x86_64": {0, 1, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 39, 79, 219, 228, 230, 231, 318},
    "aarch64": {17, 62, 63, 64, 80, 94, 113, 115, 128, 134, 135, 139, 172, 214, 215, 216, 222, 226,
                278}}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decided(program, number, architecture):
    """What a BPF program decides of a system call: "allow", "deny" or "kill"."""
    data = {0: number, 4: architecture}
    at, value = 0, None
    while True:
        operation, if_true, if_false, constant = program[at]
        at += 1
        if operation == 0x20:
            value = data[constant]
        elif operation == 0x15:
            at += if_true if value == constant else if_false
        else:
            assert operation == 0x06
            return {0x7FFF0000: "allow", 0x00050001: "deny", 1 << 31: "kill"}[constant]


@pytest.mark.parametrize("machine", ALLOWED)
def test_the_filter_allows_the_frozen_list_alone(machine, monkeypatch):
    """Its decisions, on both machines; a call of the other machine's numbering ends the child."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    program = [*struct.iter_unpack("HBBI", colbench.seccomp_filter())]
    architecture, numbers = ARCHITECTURES[machine], [*range(2048), 1 << 30, (1 << 30) + 39, -1]
    decisions = {n: decided(program, n, architecture) for n in numbers}
    assert {n for n in numbers if decisions[n] == "allow"} == ALLOWED[machine]
    assert {*decisions.values()} == {"allow", "deny"}
    for other in {*ARCHITECTURES.values(), 0x40000003} - {architecture}:  # also i386
        assert {decided(program, n, other) for n in numbers} == {"kill"}


KILLS = """import ctypes
libc, data = ctypes.CDLL(None), ctypes.create_string_buffer(128)
data[0] = 9
def f(pid):
    descriptor = libc.syscall(434, pid, 0)  # pidfd_open
    for call in (CALLS):
        libc.syscall(*call)
    return 1"""
CALLS = {  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo; 424 is pidfd_send_signal
    "x86_64": "(62, pid, 9), (200, pid, 9), (234, pid, pid, 9), (129, pid, 9, data), "
              "(297, pid, pid, 9, data), (424, descriptor, 9, None, 0)",
    "aarch64": "(129, pid, 9), (130, pid, 9), (131, pid, pid, 9), (138, pid, 9, data), "
               "(240, pid, pid, 9, data), (424, descriptor, 9, None, 0)"}


def test_no_call_kills_another_process(grader):
    """Each call does so without the sandbox, but for those that need another state of things."""
    code = KILLS.replace("CALLS", CALLS[platform.machine()])
    victims = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    try:
        assert grader.results_of(code, [f"f({victims[0].pid})"]) == grader.results_of("", ["1"])
        assert victims[0].poll() is None
        subprocess.run([sys.executable, "-c", f"{code}\nf({victims[1].pid})"], check=True)
        assert victims[1].wait(10) == -signal.SIGKILL
    finally:
        for victim in victims:
            victim.kill(), victim.wait()


SWEEP = """import ctypes, itertools, os
libc = ctypes.CDLL(None, use_errno=True)
def denied(number):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1
def calls(numbers):
    return [n for n in numbers if not denied(n)]
def opened(path):
    flags = [getattr(os, 'O_' + name) for name in 'CREAT EXCL TRUNC APPEND DIRECTORY PATH TMPFILE '
             'NOFOLLOW NONBLOCK CLOEXEC DIRECT NOATIME'.split()]
    found = []
    for mode, one, two in itertools.product(range(8), [0, *flags], [0, *flags]):
        try: found.append(os.open(path, mode | one | two))
        except PermissionError: pass
    return found
"""


def test_no_file_opens_in_any_mode_and_no_call_outside_the_list_is_made(grader):
    """Every mode with every two flags; every system call, those of x32 among them, by number.

    But 335 and 336: uretprobe and uprobe, which new kernels keep from filters, do nothing.
    """
    before = traces()
    numbers = [n for n in range(1024) if n not in ALLOWED[platform.machine()] | {335, 336}]
    numbers += [n | 1 << 30 for n in range(1024)] + [-1, (1 << 31) - 1]
    paths = [f"{FOLDER}/victim", f"{FOLDER}/new", str(FOLDER), "/dev/null", "/dev/shm", "/proc/1",
             sys.executable, "/proc/self/fd/0", "."]
    tests = [f"calls({numbers[i:i + 300]})" for i in range(0, len(numbers), 300)]
    tests += [f"opened({path!r})" for path in paths]
    assert set(grader.results_of(SWEEP, tests)) == set(grader.results_of("", ["[]"]))
    assert traces() == before


def test_unseeded_random_numbers_differ_from_child_to_child(grader):
    code = "import random, numpy, sympy.core.random"
    tests = ["random.random()", "numpy.random.rand()", "sympy.core.random.rng.random()"]
    results = {result for _ in range(6) for result in grader.results_of(code, tests)}
    assert len(results) == 18 and all(result.startswith(b"value ") for result in results)


def test_an_answer_cannot_read_an_earlier_one(grader):
    """The server sees neither code nor values, so the next child's heap holds none of them."""
    mark = "marker_" + "of_an_earlier_answer"
    grader.results_of(f"def {mark}(): return '{mark}' * 50", [f"{mark}()"] * 3)
    if os.geteuid():
        pytest.skip("only root may read a server's memory: it is not dumpable")
    for pid in [server.process.pid for worker in grader.workers for server in worker.values()]:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                if "rw-p" in line and "[v" not in line:
                    low, high = (int(v, 16) for v in line.split()[0].split("-"))
                    memory.seek(low)
                    assert mark.encode() not in memory.read(high - low)


# --- the grader itself ----------------------------------------------------------------------------

BUSY = "import time\nend = time.time() + 100\nwhile time.time() < end: pass"
SPIN = "import time\ndef f(x):\n    while time.process_time() < x * {}: pass\n    return x"
SLEEP = "import time\ndef f(x):\n    time.sleep({})\n    return x"


def test_a_busy_machine_takes_nothing_from_a_right_answer(monkeypatch):
    """By CPU time, verdicts are those of a quiet one: 1 worker or 16, a busy loop on each core.

    The answers take up to three quarters of what a test may, or never end; one sleeps for longer.
    """
    monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, "test": .2, "answer": 1})
    spins = [SPIN.format(.05)] * 4 + [SPIN.format(9), SLEEP.format(.3)]
    wanted = [["pass"] * 3] * 4 + [["timeout"] * 3, ["pass"] * 3]
    spun = task("def f(x): return x", "f(1)", "f(2)", "f(3)")
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(colbench.cpus())]
    try:
        for workers in 1, 16:
            with closing(Grader(workers=workers)) as g, ThreadPoolExecutor(16) as pool:
                graded = list(pool.map(lambda answer: g.grade(spun, answer), spins))
            assert [list(r["tests"].values()) for r in graded] == wanted, workers
    finally:
        for p in busy:
            p.kill(), p.wait()


def test_a_tenth_of_the_time_asleep_is_charged():
    request = {"text": SLEEP.format(.6), "tests": ["f(None)"], "official": False}
    server = colbench.ForkServer(with_packages=False)
    results, seconds = server.run_child(request, 9, 9)
    server.stop()
    assert results == [b"none"] and .05 <= seconds < .5


def test_a_reference_runs_once_for_the_same_tests(grader, monkeypatch):
    code, runs, run = "def f(x): return 2 * x  # once", [], grader.results_of
    monkeypatch.setattr(grader, "results_of",
                        lambda text, *rest, **more: runs.append(text) or run(text, *rest, **more))
    with ThreadPoolExecutor(6) as pool:
        for graded in pool.map(lambda n: grader.grade(task(code, f"f({n % 2})"), HONEST), range(12)):
            assert graded["reward"] == 1
    assert runs.count(code) == 2


def test_an_answer_is_run_for_the_tests_alone_whose_reference_has_a_value(grader, monkeypatch):
    code = "def f(x):\n    if x == 1: return None\n    return {2: [].pop, 3: 3}[x]"
    some = task(code, "f(1)", "f(2)", "f(3)", "f(4)")
    asked, run = [], grader.results_of
    monkeypatch.setattr(grader, "results_of", lambda text, tests, *more, **named:
                        asked.append(tests) or run(text, tests, *more, **named))
    graded = grader.grade(some, "def f(x): return x")
    none = "no expected value: "
    assert list(graded["tests"].values()) == [
        f"{none}None", f'{none}value refused "TypeError: builtin_function_or_method"', "pass",
        f'{none}raised "KeyError"']
    assert asked == [["f(1)", "f(2)", "f(3)", "f(4)"], ["f(3)"]]
    begin = time.monotonic()
    broken = task("def f(x): return nosuch", "f(1)")
    assert grader.grade(broken, "while True: pass")["reward"] == 0
    assert time.monotonic() - begin < colbench.LIMITS["test"]


def test_a_reference_has_three_times_as_much_time(monkeypatch):
    """Per test and in all: an answer that takes as long fails."""
    for limits, tests in ({"test": .3, "answer": 9}, ["f(.6)"]), (
            {"test": 9, "answer": .3}, ["f(.2)", "f(.4)", "f(.6)"]):
        monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, **limits})
        quick, slow = "def f(x): return x", SPIN.format(1)
        endless = task(SPIN.format(9), *tests)
        with closing(Grader(workers=1)) as g:
            slow_reference = task(slow, *tests)
            assert g.grade(slow_reference, quick)["reward"] == 1
            assert "timeout" in g.grade(slow_reference, slow)["tests"].values()
            assert "no expected value: timeout" in g.grade(endless, quick)["tests"].values()


def test_an_answer_has_its_time_once_however_many_children_it_needs(monkeypatch):
    """Each test of this one ends its child, when it has used a part of the time."""
    monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, "test": 9, "answer": .5})
    dying = SPIN.format(.2).replace("return x", "__import__('os')._exit(0)")
    many = task("def f(x): return x", *["f(1)"] * 40)
    many["test_cases"] = {str(n): "f(1)" for n in range(40)}
    with closing(Grader(workers=1)) as g:
        verdicts = [*g.grade(many, dying)["tests"].values()]
    ended = verdicts.count("process ended")
    assert 1 <= ended <= 4 and verdicts[ended:] == ["timeout"] * (40 - ended)


def test_no_descriptor_and_no_process_is_left_by_an_answer(grader):
    """Whether it is right, hangs or crashes; else thousands of answers would use up all of them."""
    def open_files():
        servers = [s.process.pid for worker in grader.workers for s in worker.values()]
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", *servers)}

    answers = [HONEST, doing("import os; os._exit(1)"), doing("while True: pass"), "f = 1 / 0"]
    for _ in range(2):
        before, family = open_files(), descendants()
        for answer in answers:
            grader.grade(DOUBLE, answer)
    assert open_files() == before and descendants() == family


def test_a_child_dies_with_its_server():
    server = colbench.ForkServer(with_packages=False)
    request = {"text": SLEEP.format(30), "tests": ["f(1)"], "official": False}
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(server.run_child, request, 99, 99)
        until(lambda: descendants(server.process.pid))
        (child,) = descendants(server.process.pid)
        until(lambda: "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text())
        server.process.kill()
        gone([child], seconds=5)
        with pytest.raises(OSError):
            run.result()
    server.stop()


@pytest.mark.parametrize("kills", [1, 2])
def test_a_child_that_is_killed_from_outside_runs_again_and_twice_is_no_verdict(kills):
    """As the kernel does where memory ends: at any moment while the answer runs."""
    r, slow = random.Random(kills), SLEEP.format(.5) + " * 2"
    with closing(Grader(workers=1)) as g, ThreadPoolExecutor(1) as pool:
        g.grade(DOUBLE, HONEST)  # the reference has run
        job, victims = pool.submit(g.grade, DOUBLE, slow), set()
        while len(victims) < kills:
            assert not job.done()
            for server in [*g.workers[0].values()]:
                for child in descendants(server.process.pid) - victims:
                    time.sleep(.3 + r.random())
                    os.kill(child, signal.SIGKILL)
                    victims.add(child)
        if kills == 1:
            assert job.result()["reward"] == 1
        else:
            with pytest.raises(GraderError, match="a child was killed"):
                job.result()


def test_only_root_may_read_a_server():
    """Not another process of its user, without root's rights, which may read the grader."""
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [sys.executable, "colbench.py", "grade", "--workers", "1"]
    grading = subprocess.Popen([*powerless, *command], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    grading.stdin.write(lines([{"task": DOUBLE, "answer": HONEST}] * 9))
    grading.stdin.flush()
    grading.stdout.readline()  # the server has started

    def read(pid):
        cat = [*powerless, "cat", f"/proc/{pid}/environ"]
        return subprocess.run(cat, capture_output=True).stdout

    assert read(grading.pid) and descendants(grading.pid)
    assert not any(map(read, descendants(grading.pid)))
    grading.communicate()


def test_a_killed_server_is_started_again(monkeypatch):
    with closing(Grader(workers=1)) as g:
        g.grade(DOUBLE, HONEST)  # starts the server
        os.kill(g.workers[0][False].process.pid, signal.SIGKILL)
        assert g.grade(DOUBLE, HONEST)["reward"] == 1
        # while an answer runs: again on a new server, or an error, but never a verdict
        slow = SLEEP.format(.15) + " * 2"
        assert g.grade(DOUBLE, slow)["reward"] == 1
        victim = g.workers[0][False].process.pid
        threading.Timer(.2, os.kill, [victim, signal.SIGKILL]).start()
        assert g.grade(DOUBLE, slow)["reward"] == 1


def change_sandbox(monkeypatch, folder, old, new):
    """Servers that start now run a copy of the sandbox with that change."""
    copy_scripts(folder)
    text = (folder / "colbench.py").read_text()
    assert text.count(old) == 1
    (folder / "colbench.py").write_text(text.replace(old, new))
    monkeypatch.setattr(colbench, "HERE", str(folder))


def test_a_grader_that_cannot_work_says_so(monkeypatch, grading, tmp_path):
    with closing(Grader(workers=1)) as g, monkeypatch.context() as patch, \
            pytest.raises(GraderError):
        patch.setattr(sys, "executable", "/bin/false")
        g.grade(DOUBLE, HONEST)
    change_sandbox(monkeypatch, tmp_path, "bpf = seccomp_filter()", "bpf = b''")
    _, _, end = grading([{"task": DOUBLE, "answer": HONEST}])
    assert re.match("a fork server failed .* confine itself: OSError: .*seccomp is not available",
                    str(end))


def test_what_the_server_has_loaded_takes_no_memory_from_an_answer(monkeypatch, tmp_path):
    """Libraries take address space, and how much depends on their versions."""
    change_sandbox(monkeypatch, tmp_path, "import __future__\n",
                   "import __future__, mmap\nloaded = mmap.mmap(-1, 3 << 30)\n")
    for size, reward in (900 << 20, 1), (1100 << 20, 0):
        with closing(Grader(workers=1)) as g:
            answer = f"import mmap\ndef f(x):\n    mmap.mmap(-1, {size}).close()\n    return x * 2"
            graded = g.grade(DOUBLE, answer)
            assert graded["reward"] == reward, graded


def test_a_child_that_cannot_confine_itself_tells_its_cause(monkeypatch, tmp_path):
    change_sandbox(monkeypatch, tmp_path, "    confine(bpf)\n", "    raise ValueError('a bad limit')\n")
    with closing(Grader(workers=1)) as g, pytest.raises(GraderError, match="a bad limit"):
        g.grade(DOUBLE, HONEST)


def test_children_die_first_when_memory_ends(grader):
    """The kernel prefers them, and never the grader."""
    grader.grade(DOUBLE, HONEST)
    server = next(s for worker in grader.workers for s in worker.values())
    own, theirs = (int(Path(f"/proc/{pid}/oom_score_adj").read_text())
                   for pid in ("self", server.process.pid))
    assert theirs == 1000 > own


# --- records --------------------------------------------------------------------------------------

def test_a_fifth_of_thousands_of_answers_may_hang_crash_or_bomb(quick):
    """ANSWERS=10000 python -m pytest -q -s tests/test_colbench_grader.py -k thousands"""
    n, before, most = int(os.environ.get("ANSWERS", 300 if FULL else 60)), descendants(), []

    def answers():
        for i in range(n):
            answer = f"def f(x):\n    return x + {i + (i % 5 == 1)}"
            if i % 5 == 0:
                answer = list(ATTACKS.values())[i // 5 % len(ATTACKS)]
            most.append(len(descendants()))
            yield {"task": {"id": i, **task(f"def f(x):\n    return x + {i}", "f(1)")},
                   "answer": answer, "want": i % 5 > 1, "number": i}

    graded = list(grade_records(answers(), get_args(["grade", "--workers", "2"])))
    assert [r["number"] for r, _ in graded] == list(range(n))  # in order, each by itself
    assert all(fields["reward"] == r["want"] for r, fields in graded)
    assert max(most) < 40 + len(before) and descendants() <= before


ERRORS = {"value": ValueError("one\ntwo"), "key": KeyError(3), "recursion": RecursionError(),
          "grader": GraderError("no sandbox")}


class Odd(colbench.Environment):
    """A kind of task: an answer that names an error raises it, any other has reward 1."""
    def grade(self, record):
        answer = record["answer"]
        time.sleep(.2 if answer == "slow" else random.random() / 100)  # they end in any order
        if answer in ERRORS:
            raise ERRORS[answer]
        return {"reward": 0.0, "failure": "no"} if answer == "fails" else {"reward": 1.0}


@pytest.fixture
def odd(monkeypatch):
    """Makes a record of the kind Odd from its answer."""
    monkeypatch.setitem(colbench.environments(), "Odd", Odd())
    return lambda answer: {"task": {**task(""), "kind": "Odd"}, "answer": answer}


def test_a_grade_that_raises_ends_the_grading_after_the_records_before_it(odd, grading):
    for error in ERRORS:
        answers = [str(i) for i in range(40)]
        answers[20] = error
        done, told = [], grade_records(map(odd, answers), get_args(["grade", "--workers", "2"]))
        with pytest.raises(type(ERRORS[error])):
            done.extend(told)
        assert [r["answer"] for r, _ in done] == answers[:20]


def test_failures_of_an_earlier_grading_are_gone(odd, grading):
    old = {"failure": "old", "tests": {"a": "old"}, "reward_by": "old", "note": 1}
    given = [{**odd(answer), **old} for answer in ("", "fails", "", "fails", "fails")]
    done, told, _ = grading(given)
    assert [r.get("failure") for r in done] == [None, "no", None, "no", "no"]
    assert all(r.keys() == {"task", "answer", "note", "reward"} | {"failure"} & r.keys()
               for r in done)
    assert told == "graded 5 answers\n"


def test_a_reward_names_the_rules_and_the_version_of_python(grading):
    for rules in ("honest", "official"):
        done, _, _ = grading([{"task": DOUBLE, "answer": HONEST}] * 2, "--rules", rules)
        assert [r["reward_by"] for r in done] == [f"{rules} rules, {PYTHON}"] * 2


def test_tasks_with_a_broken_reference_are_counted(grading):
    """Also if their answers were not run."""
    works, breaks = (task(code, "f(1)", "f(2)") for code in (
        "def f(x): return x", "def f(x): return x if x < 2 else y"))
    given = [{"task": works, "answer": "def f(x): return 1"}, {"task": breaks, "answer": ""},
             {"task": breaks, "answer": "def f(x): return x"}]
    for first, last, is_broken in ((0, 3, True), (2, 3, True), (0, 1, False)):
        told = grading(given[first:last])[1]
        assert told.startswith(f"graded {last - first} answers\n")
        assert ("own reference of 1 tasks fails" in told) == is_broken


def test_a_record_is_written_soon_after_it_is_graded(odd):
    """Whatever --workers: it does not wait until four times as many have come."""
    graded, asked = [], []

    def slowly():
        for i in range(300):
            if not graded:
                time.sleep(.02)
                asked.append(i)
                yield odd("")

    for record in grade_records(slowly(), get_args(["grade", "--workers", "75"])):
        graded.append(record)
    assert len(asked) == len(graded) < 300
