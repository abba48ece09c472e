"""bench_train.py: equal work is found equal, unequal work is found out; tokens are as counted."""
import bench_train as B
import pytest
import torch
from conftest import records, script

from model import batches, count_tokens, score, turns_in


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """(folder, policy, pi_ref): a tiny model and the records of two tasks."""
    folder = str(tmp_path_factory.mktemp("bench"))
    B.make_data(folder, 2, "tiny")
    cpu = torch.device("cpu")
    return folder, B.random_model(folder, cpu), B.random_model(folder, cpu, noise=0.1)


@pytest.mark.parametrize("job", ["dpo", "rft", pytest.param("mtdpo", marks=pytest.mark.full),
                                 pytest.param("critic", marks=pytest.mark.full)])
def test_rows_of_a_step(job, bench, monkeypatch):
    """Losses and gradients agree, and the bound is the tokens counted one pair at a time."""
    folder, model, pi_ref = bench
    batch = batches(B.read_groups(job, folder), 3, seed=(0, 0))[0]
    theirs = 0
    for pair in batch:
        lengths = [len(side[-1][0] + side[-1][1]) for side in pair[:2] if side]
        theirs += len(lengths) * max(lengths) * (3 if job == "rft" else 4)
    tree = count_tokens(turns_in(batch))
    ours = tree * (3 + (1 / B.JOBS[job][3] if job != "rft" else 0))
    row = B.compare_steps(model, pi_ref, job, batch, 1)
    assert row["tokens"] == pytest.approx(theirs / ours) and row["differs"] < 1e-5
    step = B.official_step
    monkeypatch.setattr(B, "official_step", lambda *args: step(*args[:-1], args[-1] * 1.01))
    assert B.compare_steps(model, pi_ref, job, batch, 1)["differs"] > 1e-3


@pytest.mark.full
def test_two_ranks_do_the_same_work():
    """Or the benchmark ends with an error."""
    done = script("tests/bench_train.py", "--repeats", 1, "--shape", "tiny", "--jobs", "dpo",
                  "rft", ranks=2)
    assert done.returncode == 0, done.stderr
    assert [row["ranks"] for row in records(done.stdout)] == [2, 2]


def test_data_have_the_papers_shape(bench):
    """Six turns of 16 candidates, four pairs a turn; of a task four trajectories."""
    folder = bench[0]
    assert [len(pairs) <= 4 * 6 for pairs in B.read_groups("dpo", folder)] == [True] * 2 * 4
    assert {len(p.chosen) for pairs in B.read_groups("critic", folder) for p in pairs} == {6}
    assert len(B.read_groups("scoring", folder)) == 2 * 4 * 6 * 17


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
