"""Resident memory of the stages along many records.

    python tests/bench_memory.py [--records 50000]

Each stage reads a pipe that holds about ten records, so that what it has read is known. After each
tenth of the records its MB are noted, with those of the processes that it has started: a line of
JSON a stage. Agent and critic are tiny and untrained. Records have 3 turns, a tenth of them 4
candidates a turn.
"""
import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import colbench  # noqa: E402
import model  # noqa: E402
from conftest import CPU, ROOT, demos, descendants, lines, records, script  # noqa: E402

PLAY = ["collect.py", "--model", "MODEL", "--max_tokens", 8]
STAGES = {
    "collect": [*PLAY, "-k", 10, "--max_turns", 3],
    "resume": [*PLAY, "-k", 1, "--resume", "DONE"],
    "grade": ["colbench.py", "grade"],
    "evaluate": ["evaluate.py", "--bootstrap", 10],
    "score": ["train_critic.py", "--score", 1, "--out", "CRITIC"],
    "critic": ["train_critic.py", "--model", "MODEL", "--out", "OUT", "--batch_size", 10 ** 6,
               "--epochs", 1],
    "policy": ["train_policy.py", "--model", "MODEL", "--out", "OUT", "--batch_size", 10 ** 6]}


def megabytes(pid):
    total = 0
    for p in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):  # it has just ended
            total += int(open(f"/proc/{p}/statm").read().split()[1]) * 4096
    return total >> 20


def along(command, given, n, folder):
    """MB of a stage after each tenth of n lines of `given`, and the most after the last line."""
    names = {"MODEL": f"{folder}/model", "CRITIC": f"{folder}/critic",
             "OUT": f"{folder}/{command[0]}.out", "DONE": f"{folder}/done"}
    flags = [names.get(flag, str(flag)) for flag in command[1:]]
    p = subprocess.Popen([sys.executable, os.path.join(ROOT, command[0]), *flags],
                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sys.stderr,
                         env=CPU)
    seen = []
    for i in range(1, n + 1):
        p.stdin.write(next(given).encode())
        if i % max(1, n // 10) == 0:
            seen.append(megabytes(p.pid))
    p.stdin.close()
    most = 0
    while p.poll() is None:
        most = max(most, megabytes(p.pid))
        time.sleep(0.2)
    assert p.returncode == 0
    return seen, most


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--records", type=int, default=50000)
    p.add_argument("stages", nargs="*", default=list(STAGES))
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model.save(*model.tiny(demos(200), 0, colbench.PIECES), f"{folder}/model")
        builtin = colbench.ENVIRONMENTS["backend"].tasks("train", colbench.get_args(["tasks"]))
        tasks = [{"task": next(builtin)} for _ in range(50)]
        play = ["collect.py", "--model", f"{folder}/model", "--max_turns", 3, "--max_tokens", 8]
        played = records(script(*play, "-k", 9, stdin=tasks).stdout)
        played += records(script(*play, "-k", 1, "--candidates", 4, stdin=tasks).stdout)
        random.Random(0).shuffle(played)
        for r in played:
            for m in r["dialogue_history"]:
                for i, c in enumerate(m.get("candidates", ())):
                    c["advantage"] = float(i)

        def many(i=0):
            while True:
                r = json.loads(json.dumps(played[i % len(played)]))
                r["task"]["id"], r["sample"] = str(i // 10), i % 10
                r["reward"], i = float(i % 10 == 0), i + 1
                yield lines([r])

        given = many()
        learned = "".join(next(given) for _ in range(50))
        script("train_critic.py", "--model", f"{folder}/model", "--out", f"{folder}/critic",
               "--epochs", 1, stdin=learned)
        with open(f"{folder}/done", "w") as f:
            f.writelines(next(given) for _ in range(args.records))
        for name in args.stages:
            n, given = args.records, many()
            if name in ("collect", "resume"):
                n = args.records // 10
                given = (lines([{"task": {**tasks[i % 50]["task"], "id": str(i)}}])
                         for i in range(n))
            elif name in ("critic", "policy"):  # which hold what they learn from
                n = args.records // 10
            seen, most = along(STAGES[name], given, n, folder)
            figures = {"stage": name, "lines": n, "mb_at_each_tenth": seen, "then_at_most": most}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
