"""Runs scripts in forks of this process, which has loaded the libraries that load slowly.

A line of stdin is an order: [argv, directory, [files for stdin, stdout, stderr], ranks, last], with
`last` null or [path, signal]. The fork's PID and then its exit code go to stdout. None of our own
modules is loaded here: a fork loads them as a new interpreter does.
"""
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


if __name__ == "__main__":
    for name in SLOW:
        import_module(name)
    if "triton" not in sys.modules:  # at exit triton 3.9 reports frozen objects as leaks
        gc.freeze()  # a fork need not copy torch only to tear it down
    for line in sys.stdin:
        argv, cwd, files, world, last = json.loads(line)
        pid = os.fork()
        if not pid:
            for fd, file in enumerate(files):
                os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), fd)
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # as a new interpreter does
            os.chdir(cwd)
            if world > 1:
                be_ranks(world)
            if last:
                end_at(*last)
            sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
            runpy.run_path(argv[0], run_name="__main__")
            sys.exit()
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
