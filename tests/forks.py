"""Runs scripts in forks of a process that has loaded the libraries that load slowly.

`python forks.py NAME` serves at the socket NAME. A request is a line of JSON (see `serve`) with the
files to be stdin, stdout and stderr; the answer is the fork's PID and then its exit code. `python`
in a shell asks for a fork, too, if its program is `python_program(NAME)`. None of our own modules
is loaded here: a fork loads them as a new interpreter does.
"""
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module

SLOW = ["numpy", "openai", "safetensors.torch", "tqdm", "torch.distributed.checkpoint",
        "torch.distributed.fsdp", "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama"]


def request(name, fds, argv, cwd, env, ranks=1, last=None):
    """Asks for `python argv`; returns a file of two lines, its PID and its exit code.

    ranks: how many processes run it. last: None or [path, signal], see `end_at`.
    """
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\0" + name)
        order = dict(argv=argv, cwd=cwd, env=env, ranks=ranks, last=last)
        socket.send_fds(s, [json.dumps(order).encode() + b"\n"], fds)
        return s.makefile("rb", 0)


def python_program(name):
    """The text of a program `python` that asks for forks; without a script or -m it is Python."""
    return (f"#!{sys.executable} -IS\nimport sys\nsys.path.append({os.path.dirname(__file__)!r})\n"
            f"import forks\nforks.be_python({name!r})\n")


def be_python(name):
    argv = sys.argv[1:]
    if argv[:1] != ["-m"] and not (argv and argv[0].endswith(".py")):
        os.execv(sys.executable, [sys.executable, *argv])
    _, code = map(int, request(name, (0, 1, 2), argv, os.getcwd(), dict(os.environ)))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def be_ranks(world):
    """Goes on in `world` forks that have what torchrun would give them; this process waits."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    left, code = set(), 0
    for rank in map(str, range(world)):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "tests"}
            return
        left.add(pid)
    while left:
        pid, status = os.wait()
        left.remove(pid)
        code = code or os.waitstatus_to_exitcode(status)
        for other in left if code else ():
            os.kill(other, signal.SIGKILL)
    os._exit(code)


def end_at(path, how):
    """This process gets the signal `how` as soon as it has renamed a file or directory to path."""
    def replace(part, to, rename=os.replace):
        rename(part, to)
        if to == path:
            os.kill(os.getpid(), how)
    os.replace = replace


def run(fds, argv, cwd, env, ranks, last):
    """Runs the script in this process."""
    for fd, file in enumerate(fds):
        os.dup2(file, fd)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # as a new interpreter does
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env
    if ranks > 1:
        be_ranks(ranks)
    if last:
        end_at(*last)
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], cwd
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


def answer(connection):
    """Answers one request, in a process of its own."""
    text, fds, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    pid = os.fork()
    if not pid:
        connection.close()
        run(fds, **json.loads(text))
    for fd in fds:
        os.close(fd)
    connection.sendall(b"%d\n" % pid)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(name):
    """Serves until the process that started this one has ended."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(64)
        print("listening", flush=True)
        for library in SLOW:
            import_module(library)
        if "triton" not in sys.modules:  # at exit triton 3.9 reports frozen objects as leaks
            gc.freeze()  # a fork need not copy torch only to tear it down
        signal.signal(signal.SIGCHLD, reap)
        listener.settimeout(1)
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.settimeout(None)
                listener.close()
                answer(connection)
            connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
