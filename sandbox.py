"""The sandbox: runs untrusted answers in forked children that can compute, and nothing else.

A child can make only ALLOWED_CALLS, even as root: no files, processes, network, signals or shared
memory. Its memory is limited, and the grader (ForkServer in colbench.py) kills it when its time is
up. It can write only to one socket, where it sends a result per test: the hash of the test's value,
or an error. It may send anything, but only the hash of the reference's value passes.

    grader -- result socket, request file --> fork server -- fork --> child: confines itself,
       ^-------------------------- a result per test ------------------------- runs the answer

The fork server never sees code, values or references, so a child inherits nothing worth reading.
This file imports little, because a process with few modules forks up to ten times as fast.

The sections, in order:
    confinement             what a child may do
    a request               an answer and its tests, which a child runs
    the text of an answer   which parts of it are code
    values as text          by which they are compared
    the fork server         started by `python sandbox.py MODULE...`
"""
import __future__
import _ast
import builtins
import codecs
import collections.abc
import contextlib
import ctypes
import datetime
import functools
import gc
import importlib
import json
import math
import numbers
import os
import pathlib
import pkgutil
import re
import resource
import signal
import socket
import struct
import sys
import textwrap
import types
import uuid
from hashlib import sha256

MEMORY = 1 << 30     # bytes of a child's address space
RESULT_BYTES = 200   # most of a result
NEEDS_CODECS = b"needs codecs"  # result of a child that looks for a codec which it lacks
LIBC = ctypes.CDLL(None, use_errno=True)


# --- confinement ----------------------------------------------------------------------------------

# Allowed system calls: name, number on x86_64, number on aarch64. All others fail with EPERM, so a
# child can't open a file or socket, or start a process.
ALLOWED_CALLS = """
read 0 63   write 1 64   close 3 57   fstat 5 80   lseek 8 62   mmap 9 222   mprotect 10 226
munmap 11 215   brk 12 214   mremap 25 216   rt_sigaction 13 134   rt_sigprocmask 14 135
rt_sigreturn 15 139   sigaltstack 131 132   sched_yield 24 124   getpid 39 172   gettid 186 178
futex 202 98   getrandom 318 278   rseq 334 293   restart_syscall 219 128   gettimeofday 96 169
clock_gettime 228 113   clock_getres 229 114   clock_nanosleep 230 115   exit 60 93
exit_group 231 94   getcwd 79 17
"""
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column above, AUDIT_ARCH


def seccomp_filter():
    """Returns the BPF program that allows only ALLOWED_CALLS, as bytes."""
    machine = os.uname().machine
    if machine not in MACHINES:
        sys.exit(f"error: the sandbox supports {' and '.join(MACHINES)}, not {machine}")
    column, arch = MACHINES[machine]
    # An instruction is (operation, instructions to skip if true, or if false, value). Offsets to
    # `load` from: 0 the call's number, 4 the architecture, 16 and 24 the first two arguments.
    # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    load, mask, equal, at_least, ret = 0x20, 0x54, 0x15, 0x35, 0x06
    # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_KILL_PROCESS
    allow, deny, kill = (ret, 0, 0, 0x7FFF0000), (ret, 0, 0, 0x00050001), (ret, 0, 0, 1 << 31)
    # deny clock ids from 16 on, which belong to other processes
    clock = [(load, 0, 0, 16), (at_least, 0, 1, 16), deny, allow]
    futex = [(load, 0, 0, 24), (mask, 0, 0, 0xFFFFFEFF)]
    for operation in 128, 129, 137, 138:  # wait or wake, within the process
        futex += [(equal, 0, 1, operation), allow]
    futex += [deny]
    checks = {"futex": futex, "clock_gettime": clock, "clock_getres": clock,
              "clock_nanosleep": clock}
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)]
    words = ALLOWED_CALLS.split()
    for name, number in zip(words[::3], words[column::3]):
        check = checks.get(name, [allow])
        program += [(equal, 0, len(check), int(number)), *check]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, deny])


def confine(devnull, server, bpf):
    """Confines this process's system calls and resources; raises OSError if it can't.

    devnull: a descriptor of /dev/null. server: the parent's process id. bpf: seccomp_filter().
    """
    for fd in (0, 1, 2):
        os.dup2(devnull, fd)
    os.close(devnull)  # now only the result socket leads out
    for name, value in {"AS": MEMORY, "CPU": 60, "FSIZE": 0, "CORE": 0, "NOFILE": 64}.items():
        limit = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:  # the machine's own limit can't be raised
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the server
    if os.getppid() != server:  # it is gone
        os._exit(0)
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = ctypes.create_string_buffer(bpf)
    fprog = struct.pack("H6xQ", len(bpf) // 8, ctypes.addressof(code))  # struct sock_fprog
    fprog = ctypes.create_string_buffer(fprog)
    if LIBC.prctl(22, 2, ctypes.addressof(fprog), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp is not available")


# --- a request: an answer and its tests -----------------------------------------------------------

def run_child(result_fd, request_fd, devnull, server, bpf):
    """Confines this child, reports that or why it can't, runs one request, and exits."""
    try:
        try:
            confine(devnull, server, bpf)
        except Exception as e:
            os.write(result_fd, f"{type(e).__name__}: {e}".encode())
            os._exit(1)
        os.write(result_fd, b"confined %d" % os.getpid())
        with open(request_fd, closefd=False) as f:
            request = json.load(f)
        seed_random(request["seed"])
        if request["seed"] is not None:  # objects get other addresses, as id() shows
            earlier_objects = [object() for _ in range(100 * request["seed"])]  # noqa: F841
        ask_for_codecs(result_fd)
        run_tests(request, result_fd)
    finally:
        os._exit(0)


def seed_random(seed):
    """Seeds the random numbers of this child; None: by chance, not as they are in the server."""
    for name in ("random", "numpy.random", "sympy.core.random"):
        if name in sys.modules:
            sys.modules[name].seed(seed)


def ask_for_codecs(result_fd):
    """Ends this child with NEEDS_CODECS as soon as it looks for a codec that it lacks."""
    def send_and_exit(name):
        os.write(result_fd, NEEDS_CODECS)
        os._exit(0)

    if "encodings.cp1252" not in sys.modules:  # else all codecs are loaded
        codecs.register(send_and_exit)


def run_tests(request, result_fd):
    """Runs the tests of a request {text, tests, official}; writes a result for each."""
    text, tests, official = request["text"], request["tests"], request["official"]
    error = None
    try:
        if official:
            programs = [Program(text)]
        else:
            programs = read_programs(text, tests)
    except BaseException as e:
        error = e
    for test in tests:
        try:
            if error is not None:
                raise error
            result = run_test(programs, test, official)
        except BaseException as e:  # also SystemExit and KeyboardInterrupt
            missing = f": {e.name}" if type(e) is ModuleNotFoundError else ""
            result = f"raised {type(e).__name__}{missing}"
        os.write(result_fd, result.encode("ascii", "backslashreplace")[:RESULT_BYTES])


def run_test(programs, test, official):
    """Runs an answer and a test; returns "value HASH", "none", or "refused REASON"."""
    module = sys.modules["answer"] = types.ModuleType("answer")  # a new one per test
    namespace = vars(module)
    # official: two namespaces, as in the released scorer, so that an answer's functions can't see
    # its top-level names, such as imports and helper functions
    local_names = {} if official else namespace
    errors = []
    for program in programs:
        try:
            program.execute(namespace, local_names)
        except BaseException as e:  # also SystemExit, as the function may be defined before it
            errors.append(e)
    if official and errors:
        raise errors[0]
    try:
        value = eval(test, namespace, local_names)
    except NameError as e:
        raise errors[0] if errors else e
    try:
        if official and getattr(value, "ndim", 0) and value.size != 1:
            raise TypeError("an array, whose == is no verdict")
        sys.setrecursionlimit(max(4500, sys.getrecursionlimit()))  # for nested data
        text = as_text(value)
        return "none" if value is None else "value " + sha256(text.encode()).hexdigest()
    except RecursionError:
        return "refused nested too deeply"
    except Exception as e:
        return f"refused {type(e).__name__}: {e}"


# --- the text of an answer ------------------------------------------------------------------------

INVISIBLE = {**dict.fromkeys([0x0D, 0xAD, *range(0x200B, 0x2010), 0x2060, 0xFEFF]),  # deleted
             **dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x3000], " ")}  # spaces
FUNCTIONS = _ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef
IMPORTS = _ast.Import, _ast.ImportFrom


class Program:
    """A text that is Python. Raises a SyntaxError, or another error, if it is not."""

    def __init__(self, text):
        self.text, self.code = text, compile(text, "<answer>", "exec")

    @functools.cached_property
    def statements(self):
        """Its statements, as syntax trees."""
        return compile(self.text, "<answer>", "exec", _ast.PyCF_ONLY_AST).body

    def keep(self, statements):
        """Reduces the program to some of its statements."""
        self.code, self.statements = self.compile(statements), statements

    def compile(self, statements):
        flags = self.code.co_flags & __future__.annotations.compiler_flag
        return compile(_ast.Module(statements, []), "<answer>", "exec", flags)

    def execute(self, namespace, local_names):
        """Executes the program. Raises its first error, but only after the other statements."""
        try:
            exec(self.code, namespace, local_names)
        except Exception as e:  # such as that of an import which the function does not need
            for statement in self.statements_after(e):
                with contextlib.suppress(Exception):
                    exec(self.compile([statement]), namespace, local_names)
            raise

    def statements_after(self, error):
        """Returns the statements after the one that has raised an error."""
        failed = error.__traceback__.tb_next  # the program's own frame, below that of execute
        line, _, column, _ = list(self.code.co_positions())[failed.tb_lasti // 2]
        unfinished = [statement for statement in self.statements
                      if (statement.end_lineno, statement.end_col_offset) > (line, column)]
        return unfinished[1:]  # the first one failed


def read_programs(answer, tests):
    """Returns the programs of an answer: the whole, else each fenced block that is Python."""
    try:
        return [read_program(answer)]
    except Exception as e:  # it is not Python
        programs = fenced_programs(answer)
        if not programs:
            raise e
    reduce_later_programs(programs, tests)
    return programs


def read_program(text):
    """Returns the program of a text, which is cleaned if it is not Python as it stands."""
    try:
        return Program(text)
    except Exception:  # not only SyntaxError: also ValueError, MemoryError and RecursionError
        return Program(textwrap.dedent(text.translate(INVISIBLE)))


def fenced_programs(answer):
    """Returns the programs in the fenced blocks of an answer.

    A block ends at the first fence, as long as its own or longer, where its text is Python; so not
    at one in a string. A block that never is Python, such as Markdown, is searched for blocks, too.
    """
    programs, texts = [], [answer]
    while texts:
        text = texts.pop()
        opening = re.search("`{3,}|~{3,}", text)
        if not opening:
            continue
        text, fence = text[opening.end():], opening[0] + opening[0][0] + "*+"  # or a longer one
        # first fences on lines of their own and the text's end, then others unless tagged
        ends = [*re.finditer(rf"^[ \t]*{fence}\s*$|\Z", text, re.M),
                *re.finditer(rf"{fence}(?!\w+\s*$)", text, re.M)]
        for end in ends[:40]:
            first_line, newline, rest = text[:end.start()].partition("\n")
            with contextlib.suppress(Exception):  # it is not Python
                programs.append(read_program(rest if newline else first_line))
                texts.append(text[end.end():])
                break
        else:
            texts += [text[ends[0].end():], text[:ends[0].start()]]
    return programs


def reduce_later_programs(programs, tests):
    """Reduces the programs after the one that defines what the tests call to what they define.

    So a loop, a benchmark or input() that shows how to use a function can't harm it. Kept are
    imports, functions, assignments to variables that functions or tests use, and statements with
    such variables, which may fill a table. A stub does not replace a function.
    """
    statements = [statement for program in programs for statement in program.statements]
    functions = {node.name for node in statements if isinstance(node, FUNCTIONS)}
    imports = names_in([node for node in statements if isinstance(node, IMPORTS)])
    called = set(re.findall(r"(\w+)\(", "\n".join(tests)))
    used = called.union(*(names_in_functions(program.code) for program in programs))
    for node in reversed(statements):  # a variable is assigned before another one uses it
        if isinstance(node, _ast.Assign) and used & names_in(node.targets):
            used |= names_in([node])
    variables = used - functions - imports - {*vars(builtins)}
    known = set()  # names that the programs before define

    def defines(node):
        if isinstance(node, FUNCTIONS):
            return not is_stub(node) or node.name not in known
        if isinstance(node, _ast.Assign):
            return used & names_in(node.targets)
        return isinstance(node, IMPORTS) or variables & names_in([node])

    for program in programs:
        if known & called:
            program.keep([node for node in program.statements if defines(node)])
        known |= names_bound_by(program.statements)


def names_in(nodes):
    """Returns the names in a list of syntax trees, without those of attributes."""
    names, rest = set(), [*nodes]
    while rest:
        node = rest.pop()
        names |= {getattr(node, field, None) for field in ("id", "name", "asname")}
        for field in getattr(node, "_fields", ()):  # ast.walk, but `ast` slows down forks
            value = getattr(node, field, None)
            rest += value if isinstance(value, list) else [value]
    return names


def names_bound_by(statements):
    """Returns the names of the functions, and of the variables that are assigned to."""
    functions = {node.name for node in statements if isinstance(node, FUNCTIONS)}
    assignments = [node for node in statements if isinstance(node, _ast.Assign)]
    return functions.union(*(names_in(node.targets) for node in assignments))


def names_in_functions(code):
    """Returns the names that a program's functions and classes use, but for local variables."""
    named = [inner for inner in inner_codes(code) if inner.co_name[0] != "<"]  # unlike "<lambda>"
    return set().union(*map(used_names, named))


def used_names(code):
    return {*code.co_names}.union(*map(used_names, inner_codes(code)))


def inner_codes(code):
    """Returns the codes of functions, classes and comprehensions within some code."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def is_stub(node):
    """Whether a statement does nothing, or defines a function that does nothing or only raises."""
    if isinstance(node, FUNCTIONS):
        return all(map(is_stub, node.body))
    constant = isinstance(node, _ast.Expr) and isinstance(node.value, _ast.Constant)
    return constant or isinstance(node, (_ast.Pass, _ast.Raise))


# --- values as text -------------------------------------------------------------------------------

def as_text(value):
    """Returns a value's text: values count as equal if their texts are.

    This is == for plain data, except that subclasses compare as their base class (a namedtuple as a
    tuple, a Counter as a dict, including zero counts), numpy arrays compare as lists, and the same
    moment in two time zones differs. Raises TypeError for other classes, ValueError for NaN.
    """
    if value is None or isinstance(value, type) and value.__module__ == "builtins":
        return ascii(value)
    if type(value).__module__ == "numpy":
        moments = value.ravel().tolist() if value.dtype.kind in "mM" else ()
        if not all(isinstance(x, (datetime.date, datetime.timedelta)) for x in moments):
            raise TypeError(value.dtype)  # nanoseconds would become integers, and NaT None
        plain = value.tolist()
        if type(plain) is not type(value):  # unlike np.longdouble's
            return as_text(plain)
    for classes, formatter in FORMATTERS:
        if isinstance(value, classes):
            return formatter(value)
    raise TypeError(type(value).__name__)


def joined(values):
    return ", ".join(map(as_text, values))


def number_as_text(x):
    """Returns a text that is the same for equal numbers of any class; ValueError for NaN."""
    if isinstance(x, numbers.Rational):  # also sympy's
        return "%x/%x" % (int(x.numerator), int(x.denominator))
    if hasattr(x, "as_integer_ratio"):  # it is real
        return str(float(x)) if x in (math.inf, -math.inf) else "%x/%x" % x.as_integer_ratio()
    if isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real):  # also np.clongdouble
        imaginary = f" + {number_as_text(x.imag)}j" if x.imag else ""
        return number_as_text(x.real) + imaginary
    return number_as_text(float(x))


FORMATTERS = [  # (classes, text of their values); the first row that matches is used
    (str, lambda x: ascii(str.__str__(x))),
    (numbers.Number, number_as_text),
    ((bytes, bytearray), lambda x: ascii(bytes(x))),
    (list, lambda x: f"[{joined(x)}]"),
    (tuple, lambda x: f"({joined(x)})"),
    (dict, lambda x: "dict(%s)" % ", ".join(sorted(map(joined, x.items())))),
    (collections.abc.Set, lambda x: "{%s}" % ", ".join(sorted(map(as_text, x)))),
    (collections.deque, lambda x: f"deque({joined(x)})"),
    (range, lambda x: f"range({joined([len(x), *x[:2]])})"),
    (datetime.datetime, lambda x: f"datetime({datetime.datetime.isoformat(x)})"),
    (datetime.date, lambda x: f"date({datetime.date.isoformat(x)})"),
    (datetime.time, lambda x: f"time({datetime.time.isoformat(x)})"),
    (datetime.timedelta, lambda x: f"timedelta({x.days}, {x.seconds}, {x.microseconds})"),
    (uuid.UUID, lambda x: f"UUID({x.int})"),
    (pathlib.PurePosixPath, lambda x: f"path({ascii(str(x))})")]


# --- the fork server ------------------------------------------------------------------------------

# Tests, and modules that do something when they are imported.
NOT_LOADED = """__main__ antigravity benchmarks distutils ensurepip idlelib lib2to3 pydoc_data test
tests this tkinter turtle turtledemo""".split()


def load_module(name):
    """Imports a module and its submodules, except those that are NOT_LOADED or that fail."""
    if name.rpartition(".")[2] not in NOT_LOADED:
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for submodule in pkgutil.iter_modules(getattr(module, "__path__", ())):
                load_module(f"{name}.{submodule.name}")


def prepare(modules, devnull):
    """Loads what children may import, and warms up their caches."""
    for name in modules:
        load_module(name)
    if "zoneinfo" in modules:  # a child can't open the files of time zones, so cache all of them
        zoneinfo = sys.modules["zoneinfo"]
        zoneinfo.kept = [zoneinfo.ZoneInfo(name) for name in zoneinfo.available_timezones()]
    # two blocks of an answer
    text = "```\ndef f(x): return [x, 0.5, 'a', {'b': (x, None)}]\n```\n```\nT = f(3)\n```"
    run_tests({"text": text, "tests": ["f(1)", "g(2)"], "official": False}, devnull)
    gc.freeze()  # else garbage collection in a child would copy all shared memory pages


def serve(control, modules):
    """Runs a fork server until the grader, to which the socket `control` leads, exits.

    A message with two descriptors, of a result socket and a request file, forks a child. The next
    message kills and reaps that child, and is acknowledged. Children import only these modules.
    """
    sys.argv = ["-c"]  # what an answer may parse
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills a child first
    bpf = seccomp_filter()
    LIBC.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
    LIBC.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core dumps, and only root can read its memory
    devnull, server = os.open(os.devnull, os.O_RDWR), os.getpid()
    prepare(modules, devnull)
    with contextlib.suppress(ConnectionError):  # the grader has exited
        while fds := socket.recv_fds(control, 1, 2)[1]:
            try:
                pid = os.fork()
            except OSError as e:  # such as a limit of processes
                os.write(fds[0], f"no fork: {e}".encode())
                return
            if pid == 0:
                run_child(*fds, devnull, server, bpf)
            for fd in fds:
                os.close(fd)
            control.recv(1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            control.sendall(b"k")


if __name__ == "__main__":
    serve(socket.socket(fileno=0), modules=sys.argv[1:])
