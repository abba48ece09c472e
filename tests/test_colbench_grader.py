"""The grader: right verdicts, honest code, hostile code, and nothing left behind."""
import contextlib
import ctypes
import json
import os
import platform
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import colbench as module
from conftest import FULL, descendants, records, script
from colbench import Grader, GraderError, grade_records

SHARED = Path(__file__).resolve().parents[2] / "shared"
LISTENER = socket.create_server(("127.0.0.1", 0))  # on any free port
SECRET = "def f(x):\n    return (x * 7919 + 104729) % 1009 + 3\n"


def task(reference, *tests):
    return {"ground_truth": reference,
            "test_cases": {f"test{i}": t for i, t in enumerate(tests, 1)}}


DOUBLE = task("def f(x):\n    return x * 2", "f(1)", "f(2)", "f(3)", "f(4)")
HONEST = "def f(x):\n    return x + x"


@pytest.fixture(scope="module", autouse=True)
def secrets():
    """What the attacks look for: a variable, a readable file, one to delete, a listener."""
    os.environ["COLBENCH_SECRET"] = SECRET
    folder = Path("/tmp/colbench_secret")
    folder.mkdir(exist_ok=True)
    (folder / "reference.py").write_text(SECRET)
    (folder / "victim").write_text("victim")
    tcp, udp = LISTENER, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    udp.bind("\0colbench45678")
    tcp.setblocking(False), udp.setblocking(False)
    yield tcp, udp, folder
    tcp.close(), udp.close()
    for name in ("reference.py", "victim"):
        (folder / name).unlink()
    folder.rmdir()
    del os.environ["COLBENCH_SECRET"]


def full():
    """Whether the grader's system calls are listed for this machine."""
    return platform.machine() in ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def grader():
    if not full():
        pytest.skip("no sandbox for this processor")
    with Grader() as g:
        yield g


def processes():
    """{pid: parent} of every live process; zombies are counted too."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    return found


def offspring():
    """The pids that descend from this process, and those whose parent died (adopted by pid 1)."""
    parents, mine = processes(), {os.getpid()}
    for _ in range(6):
        mine |= {pid for pid, parent in parents.items() if parent in mine}
    return mine


def traces():
    """Everything outside that an attack might leave or change."""
    shm = Path("/proc/sysvipc/shm")
    victim = Path("/tmp/colbench_secret/victim")
    return (sorted(p for p in os.listdir("/tmp") if "pwned" in p), sorted(os.listdir("/dev/shm")),
            shm.read_text() if shm.exists() else "", victim.read_text(), victim.stat().st_mode)


def reached(tcp, udp):
    """Whether anybody connected or sent something."""
    for take in (tcp.accept, lambda: udp.recv(1)):
        try:
            take()
            return True
        except BlockingIOError:
            pass
    return False


# --- verdicts -------------------------------------------------------------------------------------

VERDICTS = [
    ("right", HONEST, ["pass"] * 4),
    ("wrong", "def f(x):\n    return x * 3", ["wrong value"] * 4),
    ("half", "def f(x):\n    return x * 2 if x < 3 else 0", ["pass"] * 2 + ["wrong value"] * 2),
    ("none", None, ["no answer"] * 4),
    ("blank", " \n", ["no answer"] * 4),
    ("syntax", "def f(x) return x", ['raised "SyntaxError"'] * 4),
    ("nul", "def f(x): return 2*x\0", ['raised "ValueError"'] * 4),
    # SyntaxError from Python 3.12 on
    ("surrogate", "def f(x): return '\ud800'", ['raised "UnicodeEncodeError"'] * 4),
    ("wrong name", "def g(x): return x", ['raised "NameError"'] * 4),
    ("raises once", "def f(x):\n    return x * 2 if x != 2 else 1 / 0",
     ["pass", 'raised "ZeroDivisionError"', "pass", "pass"]),
    ("loop once", "def f(x):\n    while x == 2: pass\n    return x * 2",
     ["pass", "timeout", "pass", "pass"]),
    ("sys.exit", "import sys\ndef f(x):\n    sys.exit(0)", ['raised "SystemExit"'] * 4),
    ("exit at import", "raise SystemExit(0)", ['raised "SystemExit"'] * 4),
    ("_exit", "import os\ndef f(x):\n    os._exit(0)", ["process ended"] * 4),
    ("crash once", "import os\ndef f(x):\n    if x == 2: os._exit(3)\n    return x * 2",
     ["pass", "process ended", "pass", "pass"]),
    ("stdin", "def f(x):\n    return input()", ['raised "EOFError"'] * 4),
    ("import", "import math\ndef f(x): return math.floor(x * 2)", ["pass"] * 4),
    ("globals", "n = 0\ndef f(x):\n    global n\n    n += 1\n    return x * 2 * n", ["pass"] * 4),
    ("forged eq", "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()",
     ['value refused "TypeError: E"'] * 4),
    ("forged subclass", "class E(int):\n    def __eq__(s, o): return True\n"
                        "    __hash__ = int.__hash__\n"
     "def f(x): return E(0)", ["wrong value"] * 4),
    ("claims to pass", "def f(x): return True", ["wrong value"] * 4),
    ("generator", "def f(x): yield x * 2", ['value refused "TypeError: generator"'] * 4),
    ("cycle", "def f(x):\n    a = []\n    a.append(a)\n    return a",
     ['value refused "nested too deeply"'] * 4),
    ("large", "def f(x): return 'a' * (2 << 20)", ["wrong value"] * 4),
    ("memory", "def f(x): return len(bytearray(2 << 30))", ['raised "MemoryError"'] * 4),
    ("no such module", "import nosuchmodule", ['raised "ModuleNotFoundError: nosuchmodule"'] * 4),
]


@pytest.mark.parametrize("answer, verdicts", [v[1:] for v in VERDICTS],
                         ids=[v[0] for v in VERDICTS])
def test_verdicts(grader, answer, verdicts):
    graded = grader.grade(DOUBLE, answer)
    got = list(graded["tests"].values())
    assert [v.replace("SyntaxError", "ValueError") for v in got] == \
        [v.replace("SyntaxError", "ValueError") for v in verdicts]
    assert graded["reward"] == got.count("pass") / 4


def test_official_against_honest(grader):
    cases = [HONEST, "def g(x): return x\ndef f(x): return g(x) * 2",
             "import math\ndef f(x): return math.floor(x * 2)",
             "def f(x): return 0 if x == 0 else 2 + f(x - 1)",
             "def f(x):\n    import os\n    return x * 2", HONEST + "  # never call exit(1)",
             f"```\n{HONEST}\n```", f"```py\n{HONEST}\n```",
             f"Use argparse.\n```python\n{HONEST}\n```",
             "def f(x):\n    import math\n    return math.floor(x * 2)"]
    with Grader(rules="official", workers=1) as official:
        assert [official.grade(DOUBLE, a)["reward"] for a in cases] == [1, 0, 0, 0, 0, 0, 1, 0, 0,
            1]
        recursive = task("def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)", "f(1)",
                         "f(5)")
        assert official.grade(recursive, recursive["ground_truth"])["reward"] == 0.5
        attack = "def f(x):\n    open('/tmp/pwned', 'w')"
        assert official.grade(DOUBLE, attack)["tests"]["test1"] == 'raised "PermissionError"'
    assert [grader.grade(DOUBLE, a)["reward"] for a in cases] == [1] * 10
    with pytest.raises(ValueError):
        Grader(rules="oficial")


def test_reference_without_a_value_never_passes(grader):
    odd = task("def f(x):\n    if x == 1: return None\n    if x == 2: raise KeyError\n    return x",
               "f(1)", "f(2)", "f(3)")
    assert grader.grade(odd, odd["ground_truth"]) == {"reward": 1 / 3, "tests": {
        "test1": "no expected value: None",
        "test2": 'no expected value: raised "KeyError"', "test3": "pass"}}
    with pytest.raises(GraderError):
        grader.grade({"ground_truth": "", "test_cases": {}}, HONEST)


def test_both_sides_hash_alike(grader):
    order = task("def f(n):\n    return list({str(i) for i in range(n)})", "f(50)", "f(60)")
    assert grader.grade(order, order["ground_truth"])["reward"] == 1


def test_inputs_and_modules_are_fresh(grader):
    mutating = task("def f(a):\n    return sum(a)", "f([1, 2])", "f([1, 2])")
    assert grader.grade(mutating, "def f(a):\n    a.append(0)\n    return sum(a)")["reward"] == 1
    vandal = "import math, json\njson.dumps = math.floor = None\n" + HONEST
    grader.grade(DOUBLE, vandal)
    assert grader.grade(DOUBLE, HONEST)["reward"] == 1


ODDITIES = {  # honest code of all kinds, all right
    "fence": f"Sure! Here it is:\n```python\n{HONEST}\n```\nAnything else?",
    "unclosed fence": f"```python\n{HONEST}",
    "no language": f"```\n{HONEST}\n```",
    "prints": "def f(x):\n    print('[\"value\", 1]')\n    return x * 2",
    "os": "import os\ndef f(x): return len(os.path.join('', 'a' * 2 * x))",
    "helper": "def g(x): return x\ndef f(x): return 2 * g(x)",
    "from star": "from math import *\ndef f(x): return int(fabs(2 * x))",
    "lambda": "f = lambda x: x << 1",
    "recursion": "def f(x): return 0 if x == 0 else 2 + f(x - 1)",
    "class": "class P:\n    two = 2\ndef f(x): return P.two * x",
    "callable": "class F:\n    def __call__(s, x): return 2 * x\nf = F()",
    "partial": "import functools, operator\n"
    "f = functools.partial(operator.mul, 2)",
    "cache": "import functools\n@functools.lru_cache\ndef f(x): return 2 * x",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
                 "def f(x): return P(x).x * 2",
    "main": HONEST + "\nif __name__ == '__main__':\n    print(f(int(input())))",
    "bool": "def f(x): return x * (True + True)",
    "global": "n = 0\ndef f(x):\n    global n\n    n = 2\n    return x * n",
    "nested": "def f(x):\n    def g(): return x\n    return g() * 2",
    "typed": "from typing import List, Optional\n"
             "def f(x: Optional[int]) -> 'List[int]': return 2 * x", "deep":
    "def f(x): return (lambda n: n if n > 500 else f.__call__(x) if 0 else 2 * x)(0)",
    "late import":
    "def f(x):\n    import itertools\n    return sum(itertools.repeat(x, 2))",
    "regex": "import re\ndef f(x): return int(re.sub('a', '', f'a{2 * x}'))",
    "decimal": "from decimal import Decimal\ndef f(x): return int(Decimal(x) * 2)",
    "date": "import datetime\n"
    "def f(x): return (datetime.date(2020, 1, 1) + datetime.timedelta(2 * x)).toordinal() - "
    "datetime.date(2020, 1, 1).toordinal()",
    "counter": "from collections import Counter\ndef f(x): return Counter('a' * 2 * x)['a']",
    "try": "def f(x):\n    try: 1 / 0\n"
    "    except ZeroDivisionError: return 2 * x",
    "finally": "def f(x):\n    try: return 2 * x\n    finally: pass",
    "unicode": "def f(größe): return größe * 2  # \u2713",
    "crlf": "def f(x):\r\n    return x * 2\r\n", "tabs": "def f(x):\n\treturn x * 2",
    "float that is whole": "def f(x): return x * 2.0",
    "heap": "import heapq\ndef f(x): return heapq.nsmallest(1, [2 * x, 99])[0]",
    "big": "def f(x): return (x << 200) // (1 << 199)",
    "two definitions": "def f(x): return 0\ndef f(x): return 2 * x"}


@pytest.mark.parametrize("name", ODDITIES)
def test_honest_oddities_pass(grader, name):
    assert set(grader.grade(DOUBLE, ODDITIES[name])["tests"].values()) == {"pass"}


# --- attacks --------------------------------------------------------------------------------------

ATTACKS = {
    "fork bomb": "import os\ndef f(x):\n    while True: os.fork()",
    "threads": "import _thread\ndef f(x):\n    _thread.start_new_thread(f, (x,))",
    "write": "def f(x):\n    open('pwned', 'w')",
    "write tmp": "def f(x):\n    open('/tmp/pwned', 'w')",
    "truncate": "import os\ndef f(x):\n"
                "    os.open('/tmp/colbench_secret/victim', os.O_RDONLY | os.O_TRUNC)",
    "read": "def f(x):\n    open('/tmp/colbench_secret/reference.py')",
    "list home": "import os\ndef f(x):\n    os.listdir(os.path.dirname(os.path.abspath('x')))",
    "connect": "import socket\ndef f(x):\n"
               "    socket.create_connection(('127.0.0.1', %d))" % LISTENER.getsockname()[1],
    "environ": "import os\ndef f(x):\n    open(f'/proc/{os.getppid()}/environ', 'rb')",
    "memory": "import os\ndef f(x):\n    open(f'/proc/{os.getppid()}/mem', 'rb')",
    "kill": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)",
    "raise limits": "import resource\ndef f(x):\n"
                    "    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "ptrace": "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef f(x):\n"
              "    if libc.ptrace(16, os.getppid(), 0, 0) < 0: raise PermissionError",
}


SHUT = {'raised "PermissionError"', 'raised "RuntimeError"', 'raised "ValueError"',
        'raised "error"', 'raised "OSError"', 'raised "LookupError"', 'raised "AttributeError"',
        *(f'raised "ModuleNotFoundError: {name}"' for name in ("subprocess", "fcntl"))}
SPENT = {"timeout", 'raised "MemoryError"', "wrong value",
         'raised "RecursionError"', 'raised "OverflowError"'}
GONE = {"process ended"}
FORGED = {"wrong value", *(f'value refused "TypeError: {name}"'
                           for name in ("generator", "E", "method")),
          'value refused "nested too deeply"',
          'raised "TypeError"', 'raised "KeyError"', 'raised "AttributeError"'}
MISCHIEF = {  # by what it ends in; none may pass
    "a loop": ("while True: pass", SPENT),
    "a loop that swallows": ("def f(x):\n    while True:\n        try:\n"
                             "            while True: pass\n"
                             "        except BaseException: pass", SPENT),
    "sleep": ("import time\ntime.sleep(99)", SPENT),
    "a loop in C": ("def f(x): return sum(range(10 ** 12))", SPENT),
    "a regex": ("import re\ndef f(x): return re.match('(a+)+$', 'a' * 60 + 'b')", SPENT),
    "a power": ("def f(x): return 9 ** 9 ** 9", SPENT),
    "endless generator": ("def f(x):\n    while True: yield x", FORGED),
    "recursion": ("def f(x): return f(x)", SPENT),
    "deep syntax": ("x = " + "(" * 5000 + ")" * 5000,
                    {'raised "SyntaxError"', 'raised "MemoryError"', *GONE}),
    "growing list": ("x = [0]\nwhile True: x += x", SPENT | GONE),
    "a string of 1 TB": ("def f(x): return 'a' * (1 << 40)", SPENT),
    "2 MB": ("def f(x): return 'a' * (2 << 20)", SPENT),
    "many values": ("def f(x): return list(range(10 ** 6))", SPENT),
    "itself": ("def f(x):\n    a = []\n    a.append(a)\n    return a", FORGED),
    "deep value": ("def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
                   FORGED | GONE),
    "prints without end": ("while True: print('x' * 99999)", SPENT),
    "abort": ("import os\nos.abort()", GONE),
    "null pointer": ("import ctypes\nctypes.string_at(0)", GONE),
    "exit": ("import os\ndef f(x): os._exit(0)", GONE),
    "sys.exit": ("import sys\nsys.exit(0)", {'raised "SystemExit"'}),
    "kills itself": ("import ctypes\ndef f(x): ctypes.CDLL(None).raise_(9)",
                     {'raised "AttributeError"'}),
    "always equal": ("class E:\n    def __eq__(s, o): return True\ndef f(x): return E()", FORGED),
    "equal inside": ("class E(int):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
                     "def f(x): return [E(7)]", FORGED),
    "reduce": ("class E:\n    def __reduce__(s): return print, (1,)\ndef f(x): return E()", FORGED),
    "a forged line": ("import os\ndef f(x):\n    for fd in range(9):\n"
                      "        try: os.write(fd, b'[\"value\", 2]\\n')\n"
                      "        except OSError: pass\n    return 0", None),
    "patches json": ("import json\njson.dumps = lambda v: '[\"value\", 2]'\ndef f(x): return 0",
                     None),
    "patches encode": ("import __main__\n__main__.encode = lambda v: 2\ndef f(x): return 0", None),
    "looks at frames": ("import sys\ndef f(x):\n    f = sys._getframe()\n"
                        "    while f.f_back: f = f.f_back\n"
                        "    return f.f_locals['request']['wanted']", FORGED),
    "spawns": ("import subprocess\ndef f(x): return subprocess.run(['true'])", SHUT),
    "execs": ("import os\ndef f(x): os.execv('/bin/true', ['true'])", SHUT),
    "kills the group": ("import os\ndef f(x): os.killpg(0, 9)", SHUT),
    "unlinks": ("import os\ndef f(x): os.unlink('/tmp/colbench_secret/victim')", SHUT),
    "changes modes": ("import os\ndef f(x): os.chmod('/tmp/colbench_secret/victim', 0)", SHUT),
    "makes a folder": ("import os\ndef f(x): os.mkdir('/tmp/pwned')", SHUT),
    "shared memory": ("def f(x): open('/dev/shm/pwned', 'w')", SHUT),
    "udp": ("import socket\ndef f(x): socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", SHUT),
    "unix socket": ("import socket\n"
                    "def f(x): socket.socket(socket.AF_UNIX).connect('\\0colbench45678')", SHUT),
    "fcntl": ("import fcntl, os\ndef f(x): fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", SHUT | {
        'raised "ImportError"'}),
    "its own environment": ("import os\ndef f(x): return os.environ['COLBENCH_SECRET']", FORGED)}


EVERY = {**{name: (answer, SHUT) for name, answer in ATTACKS.items()}, **MISCHIEF}
FEW = {name: EVERY[name] for name in [*ATTACKS, "sleep", "udp", "a forged line", "abort"]}


def check_attacks(g, secrets, attacks=EVERY):
    """Every attack ends as it should, outside all is as it was; an honest answer passes after."""
    g.grade(DOUBLE, "import math\n" + HONEST)  # starts the other server
    before = traces(), offspring()
    for name, (answer, ends) in attacks.items():
        graded = g.grade(DOUBLE, answer)
        if ends:
            assert {*graded["tests"].values()} <= ends | (SHUT if ends is SPENT else set()), (name,
                graded)
        else:  # it may claim a value, and guess one that is right, but no more than one
            assert graded["reward"] <= 0.25, (name, graded)
        assert (traces(), offspring()) == before, name
        assert not (secrets and reached(*secrets)), name
        assert g.grade(DOUBLE, HONEST)["reward"] == 1, name


def quick(monkeypatch):
    monkeypatch.setattr(module, "LIMITS",
                        {**module.LIMITS, "test": .5, "answer": .5})  # only to save time


def test_attacks_meet_a_wall(grader, secrets, monkeypatch):
    quick(monkeypatch)
    assert len(ATTACKS) + len(MISCHIEF) >= 50
    check_attacks(grader, secrets[:2])


AS_NOBODY = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_colbench_grader as t
assert os.geteuid() == 65534
t.module.LIMITS |= {"test": .5, "answer": .5}
os.environ["COLBENCH_SECRET"] = t.SECRET
import test_colbench_claims
vandals = list(test_colbench_claims.VANDALS)
if not t.FULL:
    vandals = ["json", "every descriptor"]
with t.Grader("official", workers=1) as g:
    test_colbench_claims.forge(g, vandals)
with t.Grader(workers=1) as g:
    assert g.grade(t.DOUBLE, t.HONEST)["reward"] == 1
    test_colbench_claims.forge(g, vandals)
    t.check_attacks(g, None, t.EVERY if t.FULL else t.FEW)
    for name, answer in t.ODDITIES.items():
        assert g.grade(t.DOUBLE, answer)["reward"] == 1, name
print("all as it should be")
"""


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an unprivileged user already")
def test_an_unprivileged_user_is_as_safe(secrets, grader, tmp_path):
    """In a mount namespace in which that user can reach this Python and this checkout."""
    reach, paths = [sys.base_prefix, *sys.path[1:], str(Path(__file__).parent),
                    str(Path(module.__file__).parent)], []
    script = f"set -e; chmod 755 {tmp_path}; "
    for i, path in enumerate(p for p in dict.fromkeys(reach) if os.path.isdir(p)):
        paths.append(f"/mnt/{i}")
        script += f"mkdir -p {tmp_path}/{i}; mount --bind {shlex.quote(path)} {tmp_path}/{i}; "
    script += f"mount --rbind {tmp_path} /mnt; "
    python = f"/mnt/0/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c",
               AS_NOBODY, json.dumps(paths[1:])]
    done = subprocess.run(["unshare", "-m", "bash", "-c", script + 'cd /; exec "$@"', "bash",
                           *command], text=True,
                          capture_output=True, timeout=300)
    if "mount" in done.stderr.split("Traceback")[0] and done.returncode:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.stdout == "all as it should be\n", done.stderr


def test_a_child_finds_nothing_to_read(grader, tmp_path):
    """What a child reports of its environment, descriptors, modules and command line."""
    probe = """
import os, sys, ctypes
def environ(): return sorted(os.environ)
def fds():
    found = []
    for fd in range(64):
        try: os.lseek(fd, 0, 1)
        except OSError as e:
            if e.errno == 9: continue
        found.append(fd)
    return len(found)
def modules(): return [m for m in sys.modules if m in ("colbench", "grader", "torch")]
def argv(): return sys.argv
def source(): return "ground_truth" in repr(vars(sys.modules["__main__"]))
"""
    known = "{'PYTHONHASHSEED', 'TZ', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}"
    facts = {f"set(environ()) <= {known}": True, "fds()": 5, "modules()": [], "argv()": ["-c"],
             "source()": False}  # fds: /dev/null three times, the wire, the request
    for test, value in facts.items():
        claims = grader.claims(probe + f"def wanted(): return {value!r}", [test, "wanted()"])
        assert claims[0] == claims[1], (test, claims)


def test_a_child_cannot_fill_the_file_of_its_request(grader):
    """It lies in memory, which no limit of the child's counts."""
    code = """
import os
def written():
    n = 0
    for fd in range(9):
        try:
            os.lseek(fd, 0, 1)  # a file; the wire is none
            n += fd > 2 and os.write(fd, b"x" * 9)
        except OSError: pass
    return n
def nothing(): return 0
"""
    done, nothing = grader.claims(code, ["written()", "nothing()"])
    assert done == nothing


def test_an_answer_cannot_read_an_earlier_one(grader):
    """The server sees neither code nor values, so the next child's heap holds none of them."""
    mark = "marker_" + "of_an_earlier_answer"
    grader.claims(f"def {mark}(): return '{mark}' * 50", [f"{mark}()"] * 3)
    if os.geteuid():
        pytest.skip("only root may read a server's memory: it is not dumpable")
    for server in grader.servers[False].queue:
        if server.process:
            pid = server.process.pid
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
                for line in maps:
                    if "rw-p" in line and "[v" not in line:
                        low, high = (int(v, 16) for v in line.split()[0].split("-"))
                        memory.seek(low)
                        assert mark.encode() not in memory.read(high - low)


# --- the grader itself ----------------------------------------------------------------------------

def test_parallel_grading_keeps_apart_and_in_order(grader):
    records = [{"task": task(f"def f(x):\n    return x + {i}", "f(1)", "f(2)"), "keep": i,
                "answer": f"def f(x):\n    return x + {i - i % 3 % 2}"} for i in range(60)]
    graded = list(grade_records(iter(records), grader))
    assert [r["keep"] for r in graded] == list(range(60))
    assert [r["reward"] for r in graded] == [float(i % 3 != 1) for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda r: grader.grade(r["task"], r["answer"])["reward"], records))
    assert rewards == [r["reward"] for r in graded]


def test_a_fifth_of_thousands_of_answers_may_hang_crash_or_bomb(grader):
    """ANSWERS=10000 python -m pytest -q -s tests/test_colbench_grader.py -k thousands"""
    n, sizes, stop = int(os.environ.get("ANSWERS", 300 if FULL else 60)), [], threading.Event()
    hostile = [*ATTACKS.values(), *(answer for answer, ends in MISCHIEF.values() if ends)]

    def watch():
        while not sizes or not stop.wait(0.1):
            mine = descendants()
            memory = 0
            for pid in (os.getpid(), *mine):
                with contextlib.suppress(OSError):
                    memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            sizes.append((len(mine), memory))

    def records():
        for i in range(n):
            mischief, wrong = i % 5 == 0, i % 5 == 1
            answer = f"def f(x):\n    return x + {i + wrong}"
            if mischief:
                answer = hostile[i // 5 % len(hostile)]
            yield {"task": task(f"def f(x):\n    return x + {i}", "f(1)"), "answer": answer,
                   "want": not (mischief or wrong)}

    watcher, begin = threading.Thread(target=watch), time.monotonic()
    watcher.start()
    graded = list(grade_records(records(), grader))
    seconds = time.monotonic() - begin
    stop.set()
    watcher.join()
    assert len(graded) == n and all(r["reward"] == r["want"] for r in graded)
    most, memory = (max(x) for x in zip(*sizes))
    print(f"\n{n} answers, {n // 5} of them hostile: {n / seconds:.1f} a second with "
          f"{grader.workers} workers, at most "
          f"{most} processes and {memory >> 20} MB")
    assert most < 40 and memory < 6 << 30 and seconds < 30 + n / 5 * 2
    quarter = len(sizes) // 4
    assert n < 1000 or max(sizes[-quarter:])[0] <= max(sizes[:quarter])[0] + 4  # nothing piles up


@pytest.mark.parametrize("how", [signal.SIGKILL,
                                 pytest.param(signal.SIGSEGV, marks=pytest.mark.full)])
def test_a_killed_server_is_started_again(how):
    with Grader(workers=1) as g:
        assert g.grade(DOUBLE, HONEST)["reward"] == 1
        os.kill(g.servers[False].queue[0].process.pid, how)
        fresh = task("def f(x):\n    return -x", "f(1)")  # its reference is not cached
        assert g.grade(fresh, "def f(x): return -x")["reward"] == 1
        # while an answer runs: again on a new server, or an error, but never a verdict
        slow = "import time\ndef f(x):\n    time.sleep(.3)\n    return x * 2"
        assert g.grade(DOUBLE, slow)["reward"] == 1
        server = g.servers[True].queue[0]
        threading.Timer(.2, lambda pid=server.process.pid: os.kill(pid, how)).start()
        assert g.grade(DOUBLE, slow)["reward"] == 1


def test_a_grader_that_cannot_work_says_so(monkeypatch):
    with Grader(workers=1) as g:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        g.servers[False].queue[0].stop()
        with pytest.raises(GraderError):
            g.grade(DOUBLE, HONEST)


def test_without_seccomp_nothing_is_graded(monkeypatch):
    monkeypatch.setattr(module, "seccomp_filter", lambda: b"")
    with pytest.raises(GraderError, match="confine"):
        Grader(workers=1)


def test_close_leaves_nothing():
    before = offspring()
    with Grader(workers=3) as g:
        list(grade_records(({"task": DOUBLE, "answer": HONEST} for _ in range(9)), g))
        assert offspring() != before
    g.close()  # twice is fine
    assert offspring() == before


def test_whoever_waits_for_a_grader_that_closes_is_told():
    slow = "import time\ndef f(x):\n    time.sleep(.2)\n    return 2 * x"
    with ThreadPoolExecutor(6) as pool:
        with Grader(workers=1) as g:
            assert g.grade(DOUBLE, HONEST)["reward"] == 1
            jobs = [pool.submit(g.grade, DOUBLE, slow) for _ in range(6)]
        ended = [job.exception(timeout=60) or job.result()["reward"] for job in jobs]
    assert any(isinstance(end, GraderError) for end in ended)
    assert all(isinstance(end, GraderError) or end == 1 for end in ended)


def test_a_killed_grader_leaves_nothing():
    code = ("import sys, time; from colbench import Grader; g = Grader(workers=1)\n"
            "print(g.servers[False].queue[0].process.pid, flush=True)\n"
            "g.grade({'ground_truth': 'def f(): return 1', 'test_cases': {'t': 'f()'}},\n"
            "        'import time\\ndef f(): time.sleep(60)')")
    grading = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               cwd=Path(module.__file__).parent)
    pid = int(grading.stdout.readline())
    time.sleep(.3)
    grading.kill()
    grading.wait()
    deadline = time.monotonic() + 10
    while pid in processes() and time.monotonic() < deadline:
        time.sleep(.05)
    assert pid not in processes()


def test_check_drops_tasks_whose_reference_does_not_pass():
    bad = task("def f(x):\n    if x == 1: import nosuch\n    if x == 2: return None\n"
               "    if x == 3: raise KeyError\n    if x == 4: return f\n"
               "    if x == 5:\n        import random\n        return random.random()\n"
               "    return x",
               *[f"f({i})" for i in range(1, 7)])
    tasks = [{"task": {"problem_description": "d", **t}, "n": n} for n, t in
             enumerate((DOUBLE, bad, DOUBLE))]
    done = script("colbench.py", "check", stdin=tasks)
    assert records(done.stdout) == [tasks[0], tasks[2]]
    assert "line 2: dropped: " in done.stderr
    said = done.stderr
    for why in ("nosuch", "None", "KeyError", "TypeError: function", "'test5': 'wrong value'"):
        assert why in said, said
    assert "test6" not in said


# --- the shared files, where they are -------------------------------------------------------------

def shared(name):
    path = SHARED / name
    return [json.loads(line) for line in path.open()] if path.exists() else []


@pytest.mark.full
@pytest.mark.skipif(not (SHARED / "sandbox").exists(),
                    reason="no ../shared/sandbox beside this checkout")
def test_shared_attacks(secrets, grader, monkeypatch):
    """Every record: its reward, and the grader's invariants after each."""
    monkeypatch.setattr(module, "LIMITS",
                        {**module.LIMITS, "test": .5, "answer": 2})  # only to save time
    with Grader(workers=1) as g:
        g.grade(DOUBLE, HONEST), g.grade(DOUBLE, "import math\n" + HONEST)
        before = traces(), offspring()
        for record in shared("sandbox/answers.jsonl"):
            start = time.monotonic()
            graded = g.grade(record["task"], record["answer"])
            # the released scorer reads the first block alone; these rules read both
            reward = 1 if record["id"] == "b05_two_fences" else record["expect"]["reward"]
            assert graded["reward"] == pytest.approx(reward), (record["id"], graded)
            assert time.monotonic() - start < 20, record["id"]
            assert g.grade(DOUBLE, HONEST)["reward"] == 1, record["id"]
            assert (traces(), offspring()) == before, record["id"]
            assert not reached(*secrets[:2]), record["id"]


@pytest.mark.skipif(not (SHARED / "colbench").exists(),
                    reason="no ../shared/colbench beside this checkout")
def test_shared_references_pass(grader):
    """References as answers, all of them or every tenth: they pass, but for three odd ones.

    One needs a module that is not here, one gives random numbers, and one writes files.
    """
    step = 1 if FULL else 10
    tasks = shared("colbench/backend_tasks.jsonl")[::step]
    graded = grade_records(({"task": t, "answer": t["ground_truth"]} for t in tasks), grader)
    failed = {step * i: r["tests"]["test1"] for i, r in enumerate(graded) if r["reward"] < 1}
    assert set(failed) <= {214, 235, 264}, failed


@pytest.mark.parametrize("unread", [False, True])
def test_a_fork_server_ends_quietly_when_its_grader_dies_before_the_answer(unread, capfd):
    """The grader dies between its "k" and the answer, or before it reads that. No traceback."""
    server = module.Server([])
    server.start()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(server.control, [b"f"], [theirs.fileno(), os.memfd_create("request")])
        assert ours.recv(99)  # the child is there
        unread or server.process.send_signal(signal.SIGSTOP)
        server.control.sendall(b"k")
        unread and select.select([server.control], [], [])
        server.control.close()
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(20) == 0
    assert capfd.readouterr() == ("", "")
