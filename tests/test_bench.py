"""The benchmarks: they run; equal work is found equal, unequal work is found out."""
import json
import subprocess
import sys

import bench_train as B
import pytest
import torch
from conftest import CPU, ROOT


@pytest.mark.parametrize("job", ["dpo", *(pytest.param(job, marks=pytest.mark.full)
                                          for job in ("mtdpo", "rft", "critic"))])
def test_unequal_work_is_found_out(job, tmp_path, monkeypatch):
    """All of a step's gradient and loss are compared, and the records have the paper's shape."""
    folder, cpu = B.make_data(str(tmp_path), 2, "tiny"), torch.device("cpu")
    models = B.load_moved(folder, cpu), B.load(folder, cpu)[0]
    batch = B.batches(B.read_groups(job, folder), 3, seed=(0, 0))[0]
    assert len(batch[0].chosen) == (1 if job == "dpo" else B.TURNS)
    assert B.compare_steps(*models, job, batch, 1)["differs"] < 1e-5
    loss_of = B.loss_of  # official_step takes one pair of the batch at a time
    monkeypatch.setattr(B, "loss_of", lambda job, pairs, *more: loss_of(job, pairs, *more)
                        * (1.01 if pairs == batch[-1:] else 1))
    assert B.compare_steps(*models, job, batch, 1)["differs"] > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("command", [
    "grade --repeats 1 --tasks 3", "train --repeats 1 --shape tiny --jobs dpo scoring",
    "collect --episodes 4 --batch 4 --delay 0.01 --max_turns 2 --repeats 1",
    "gpu --shapes tiny --repeats 1"])
def test_the_benchmarks_run(command, tmp_path):
    name, *flags = command.split()
    if name == "gpu":
        flags += ["--out", str(tmp_path / "rows.json")]
    done = subprocess.run([sys.executable, f"{ROOT}/tests/bench_{name}.py", *flags], cwd=ROOT,
                          env=CPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout, done.stderr
    if name == "gpu":
        rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
        assert not any("error" in row for row in rows.values()), rows
        oracle, official = rows["oracle tiny"], rows["official tiny critic"]
        assert max(oracle["tree_logps"], oracle["tree_gradients"]) < 1e-4
        assert official["loss"] == pytest.approx(official["our_loss"], rel=1e-4)
        assert official["gradient"] == pytest.approx(1, abs=1e-4)
