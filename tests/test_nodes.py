"""Two torchruns on one machine, as on two nodes, and one of eight processes train as one process."""
import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from conftest import CPU, ROOT, lines, metrics, records, steps, succeed


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def torchruns(nodes, processes, command, stdin):
    """Runs one torchrun per node, each with the same stdin; returns the stdout of each.

    On a busy machine gloo once aborted a process (SIGABRT), of which no cause was found. So such a
    run is repeated once, with another port; it resumes.
    """
    for last_try in (False, True):
        ended = start_and_wait(nodes, processes, command, stdin)
        aborted = any("SIGABRT" in p.stderr for p in ended)
        if last_try or not aborted:
            break
    assert [p.returncode for p in ended] == [0] * nodes, [p.stderr for p in ended]
    return [p.stdout for p in ended]


def start_and_wait(nodes, processes, command, stdin):
    """Returns the CompletedProcess of each node's torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
                f"--nproc_per_node={processes}", "--rdzv_backend=c10d",
                f"--rdzv_endpoint=localhost:{free_port()}"]
    command = [*torchrun, *map(str, command)]
    running = []
    try:
        for _ in range(nodes):
            with open(stdin) as file:
                running.append(subprocess.Popen(
                    command, cwd=ROOT, stdin=file, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, start_new_session=True,
                    env={**CPU, "GLOO_SOCKET_IFNAME": "lo"}))
        said = [p.communicate(timeout=500) for p in running]
    finally:
        for p in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
    return [subprocess.CompletedProcess(command, p.returncode, *texts)
            for p, texts in zip(running, said)]


@pytest.mark.full
@pytest.mark.parametrize("nodes, processes, trainer, flags, tolerance", [
    (2, 2, "train_critic.py", ["--lr", 1e-4, "--batch_size", 2, "--epochs", 3], 1e-6),
    # Adam's first steps turn rounding into larger differences
    (1, 8, "train_policy.py", ["--lr", 1e-5, "--batch_size", 9, "--mix", 0.25], 1e-4)])
def test_nodes_and_processes_train_as_one_process(nodes, processes, trainer, flags, tolerance,
                                                  ranked, tiny_dir, tmp_path):
    """Losses and scores are the same to rounding. The node of rank 0 writes records, no other."""
    (tmp_path / "in.jsonl").write_text(lines(ranked))
    command = [trainer, "--model", tiny_dir, "--beta", 1, *flags, "--out"]
    alone = succeed(*command, tmp_path / "alone", stdin=ranked).stdout
    written = torchruns(nodes, processes, [*command, tmp_path / "out"], tmp_path / "in.jsonl")
    assert sum(bool(text) for text in written) == (trainer == "train_critic.py")
    assert metrics(tmp_path / "out")[0]["world"] == nodes * processes
    got, want = ([(row["loss"], row["grad_norm"]) for row in steps(tmp_path / name)]
                 for name in ("out", "alone"))
    assert len(got) == len(want) > 3
    assert got[0] == pytest.approx(want[0], rel=1e-5)  # other trees round sums of tokens otherwise
    for here, there in zip(got, want):
        assert here == pytest.approx(there, rel=tolerance)
    if trainer == "train_critic.py":
        assert scores("".join(written)) == pytest.approx(scores(alone), abs=1e-5)


def scores(text):
    return [m["advantage"] for r in records(text) for m in r["dialogue_history"][1::2]]
