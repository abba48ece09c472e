"""The benchmarks: equal work is found equal, unequal work is found out, rows survive failures."""
import json
import os
import random
import subprocess
import sys

import bench_gpu
import bench_train as B
import pytest
import torch
from conftest import CPU, ROOT

from model import batches, deal, score, count_tokens, turns_in


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """(folder, policy, pi_ref): a tiny model and the records of two tasks."""
    folder = str(tmp_path_factory.mktemp("bench"))
    B.make_data(folder, 2, "tiny")
    cpu = torch.device("cpu")
    return folder, B.random_model(folder, cpu), B.random_model(folder, cpu, noise=0.1)


def first_batch(folder, job, pairs):
    return batches(B.read_groups(job, folder), pairs, seed=(0, 0))[0]


@pytest.mark.parametrize("job", ["dpo", "rft", pytest.param("mtdpo", marks=pytest.mark.full),
                                 pytest.param("critic", marks=pytest.mark.full)])
def test_rows_of_a_step(bench, job):
    """Gradients agree; the tokens are those counted one pair and one part at a time."""
    folder, model, pi_ref = bench
    batch = first_batch(folder, job, 3)
    rows = {(r["rival"], r["ranks"]): r for r in B.compare_steps(model, pi_ref, job, batch, 1)}
    scored = count_tokens(turns_in(batch)) if job != "rft" else 0
    for world in (1, 8):
        theirs = [0] * world
        for n, pair in enumerate(batch):
            lengths = [len(side[-1][0] + side[-1][1]) for side in pair[:2] if side]
            theirs[n % world] += len(lengths) * max(lengths) * (3 if job == "rft" else 4)
        parts = deal(turns_in(batch), B.MAX_TOKENS, world)
        assert len(parts) <= world  # one a rank
        ours = [3 * count_tokens(part) for part in parts]
        bound = max(theirs) / (max(ours) + scored / B.JOBS[job][3] / world)
        row = rows["official", world]
        assert row["tokens"] == pytest.approx(bound) and row["differs"] < 1e-5


def test_data_have_the_papers_shape(bench):
    """Six turns of 16 candidates, four pairs a turn; of a task four trajectories."""
    folder = bench[0]
    assert [len(pairs) <= 4 * 6 for pairs in B.read_groups("dpo", folder)] == [True] * 2 * 4
    assert {len(p.chosen) for pairs in B.read_groups("critic", folder) for p in pairs} == {6}
    assert len(B.read_groups("scoring", folder)) == 2 * 4 * 6 * 17


def test_unequal_work_is_found_out(bench, monkeypatch):
    folder, model, pi_ref = bench
    batch = first_batch(folder, "dpo", 1)
    step = B.official_step
    monkeypatch.setattr(B, "official_step", lambda *args: step(*args[:-1], args[-1] * 1.01))
    for row in B.compare_steps(model, pi_ref, "dpo", batch, 1):
        assert (row["differs"] > 1e-3) == (row["rival"] == "official")


def test_the_kv_cache_gives_the_same_log_probs(bench):
    """So do separate forwards, of which it must not be one."""
    folder, model, _ = bench
    turns = B.read_groups("scoring", folder)[:40]
    got, (_, tokens) = B.cost(model.device, B.kv_cache_scores, model, turns)
    with torch.no_grad(), B.plain(model):
        want = [model(B.pad([p + a], model.device))[0, len(p) - 1:] for p, a in turns]
    assert B.difference(want, got) < 1e-5 and B.difference(want, score(model, turns, 4096)) < 1e-5
    by_prompt = {p: [len(a) for q, a in turns if q == p] for p, _ in turns}
    assert tokens == sum(len(p) + len(a) * (max(a) - 1) for p, a in by_prompt.items())


def test_idle_stretches():
    """Against a clock that asks at every tick whether a kernel runs."""
    r = random.Random(0)
    for _ in range(50):
        spans = [(start, start + r.randint(1, 4), str(start))
                 for start in (r.randrange(60) for _ in range(r.randint(1, 12)))]
        stretches, idle = bench_gpu.idle_stretches(spans)
        ticks = range(min(s for s, _, _ in spans), max(e for _, e, _ in spans))
        free = [t for t in ticks if not any(s <= t < e for s, e, _ in spans)]
        assert idle == len(free) == sum(length for length, _, _ in stretches)
        assert stretches == sorted(stretches, reverse=True)
        for length, before, after in stretches:
            assert {int(after) - n for n in range(1, length + 1)} <= set(free)
            assert int(after) - length in [e for s, e, _ in spans if str(s) == before]


def gpu(out, *flags):
    command = [sys.executable, os.path.join(ROOT, "tests", "bench_gpu.py"), "--out", str(out)]
    return subprocess.run([*command, "--tiny", "1", *flags], env=CPU, capture_output=True,
                          text=True, timeout=300)


@pytest.mark.full
def test_bench_gpu_on_a_cpu(tmp_path):
    """All rows are there with sane figures; kernels that need a GPU say so in one line."""
    done = gpu(tmp_path / "out.json", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    for name, row in rows.items():
        needs_gpu = name.split()[-1] == "flash"
        assert ("needs a GPU" in row.get("error", "")) if needs_gpu else "error" not in row, row
        assert f"| {name} |" in done.stdout
    assert rows["matmul"]["tflops"] > 0
    assert max(rows["oracle tiny sdpa"][f"tree_{of}"] for of in ("logps", "gradients")) < 1e-4
    for job in ("dpo 24", "critic"):
        row = rows[f"official tiny {job}"]
        assert row["loss"] == pytest.approx(row["our_loss"], rel=1e-4)
        assert row["gradient"] == pytest.approx(1, abs=1e-4)
        assert 0 < rows[f"step tiny {job}"]["of_peak_useful"] <= rows[f"step tiny {job}"]["of_peak"]
    assert rows["scoring tiny"]["differs"] < 1e-4
    assert 0 <= rows["gaps tiny"]["idle"] < 1


@pytest.mark.full
def test_a_row_that_does_not_end_ends_the_run(tmp_path):
    """What was measured before it is written."""
    done = gpu(tmp_path / "out.json", "--row_seconds", "0.001")
    rows = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 1 and "no end in" in rows[-1]["error"], done.stderr


def test_a_row_that_fails(tmp_path, monkeypatch):
    """It is one line; the rows after it run."""
    def rows(bench):
        yield "bad", lambda: 1 / 0
        yield "worse", lambda: bench_gpu.take_kernel("flash", bench.device)
        yield "good", lambda: {"figure": 1.5}

    monkeypatch.setattr(bench_gpu.Bench, "rows", rows)
    bench_gpu.main(bench_gpu.get_args(["--tiny", "1", "--out", str(tmp_path / "out.json")]))
    bad, worse, good = json.loads((tmp_path / "out.json").read_text())
    assert bad["error"] == "ZeroDivisionError: division by zero"
    assert "needs a GPU" in worse["error"] and good == {"row": "good", "figure": 1.5}
