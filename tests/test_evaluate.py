"""evaluate.py against numbers worked out by hand, and its intervals against the textbook."""
import random
import statistics

import pytest

import colbench
from conftest import complaint, dialogue, lines, records, script, succeed

CODE = "def f(x, rate=3, fee=12): return x * rate + fee"


def episode(task, reward, turns=1, tokens=None, by="honest rules", **more):
    history = dialogue(*["write f", "what?"] * turns)
    for message in history[1::2] if tokens else ():
        message["token_ids"] = [1] * tokens
    return {"task": {"id": task, "problem_description": "p", "ground_truth": CODE},
            "dialogue_history": history, "answer": "x", "answered": True, "reward": reward,
            "reward_by": by, **more}


def run(tmp_path, *flags, stdin="", **files):
    for name, rs in files.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(rs))
    done = succeed("evaluate.py", *flags, stdin=stdin, cwd=tmp_path)
    return records(done.stdout), done.stderr


def test_hand_computed(tmp_path):
    rs = [episode("a", 1.0, turns=3, tokens=5), episode("a", 0.5, turns=2, tokens=7),
          episode("b", 0.2, turns=4, tokens=2, answered=False),
          episode("c", 1, turns=1, tokens=1)]
    for r in rs[:2]:  # where a record does not say whether it is answered, the marker does
        del r["answered"]
    for r in rs[1:]:
        r["dialogue_history"][-1]["content"] = colbench.ANSWER + "x"
    (r,), table = run(tmp_path, "s.jsonl", s=rs)
    assert (r["system"], r["episodes"], r["tasks"], r["reward_by"]) == ("s", 4, 3, ["honest rules"])
    assert r["tests_passed"] == 0.675 and r["success"] == 0.5 and r["turns"] == 2.5
    assert r["tokens"] == (15 + 14 + 8 + 1) / 4 and r["unanswered"] == 0.5
    assert "minus_first" not in r
    low, high = r["success_95"]  # of the tasks (1/2, 0/1, 1/1) some resamples hold only b or c
    assert (low, high) == (0, 1)
    head, row, note = table.splitlines()
    assert head.replace(" %", "%").split() == [
        "system", "tests%", "success%", "unanswered%", "turns", "tokens", "episodes", "tasks"]
    assert row.startswith("s ") and "67.5 [" in row and "50.0 [0.0, 100.0]" in row
    assert note == "[95 % bootstrap intervals over tasks]; graded by honest rules"


def test_one_task_tells_nothing_of_others(tmp_path):
    (r,), table = run(tmp_path, "s.jsonl", s=[episode("a", 1), episode("a", 0)])
    assert r["success"] == 0.5 and r["success_95"] is None and "tokens" not in r
    assert r["unanswered"] == 0  # as they say, without the marker


def test_pages_have_likeness_wins_failures_and_no_rules(tmp_path):
    page = lambda task, reward, **more: {**episode(task, reward, by="clip", **more), "task": {
        "id": task, "problem_description": "p", "ground_truth": "<html></html>"}}
    ours = [page("a", 1.0), page("b", 0.5), page("b", 0.7), page("c", 0.25),
            page("d", 0.0, failure="no page")]
    rival = [page("a", 0.9), page("b", 0.6), page("c", 0.3), page("e", 1.0)]
    (first, r), table = run(tmp_path, "rival.jsonl", "ours.jsonl", ours=ours, rival=rival)
    assert r["tests_passed"] == 0.49 and "success" not in r and "unanswered" not in r
    assert first["not_drawn"] == 0 and r["not_drawn"] == 0.2 and r["minus_first"]["success"] is None
    assert r["minus_first"]["clusters"] == 3 and "success" not in table
    assert r["minus_first"]["wins"] == 0.5 and "wins %" in table  # a won, b tied, c lost
    assert "likeness %" in table and "likeness - first" in table and "not drawn %" in table
    assert table.endswith("[95 % bootstrap intervals over tasks]; graded by clip\n")


def plain_bootstrap(tasks, statistic):
    """[value, low, high]: tasks are drawn with replacement, 2,000 times."""
    r = random.Random(1)
    draws = sorted(statistic(r.choices(tasks, k=len(tasks))) for _ in range(2000))
    return [statistic(tasks), draws[50], draws[-51]]


@pytest.mark.parametrize("metric", ["tests_passed", "success"])
def test_values_and_intervals_are_those_of_a_plain_bootstrap(metric, tmp_path):
    """Two systems, each of two seeds, which have some tasks in common and some not.

    A task is drawn with all its episodes of all seeds; a difference is of the tasks that both have
    in a seed, in pairs.
    """
    r, files = random.Random(0), {}
    for name, better in (("a", 0), ("s", 0.2)):
        for seed in "01":
            rs = files[name + seed] = []
            for t in r.sample(range(50), 40):
                for _ in range(r.randint(1, 3)):
                    rs.append(episode(f"t{t}", min(1, t % 5 / 4 + r.choice((0, better)))))
    systems = [f"{name}={name}0.jsonl,{name}1.jsonl" for name in "as"]
    results, table = run(tmp_path, *systems, **files)
    assert run(tmp_path, *systems)[0] == results  # seeded
    by = {name: {} for name in "as"}  # {(seed, task): rewards}
    for file, rs in files.items():
        for record in rs:
            cluster = file[1], record["task"]["id"]
            reward = record["reward"] if metric == "tests_passed" else record["reward"] == 1
            by[file[0]].setdefault(cluster, []).append(reward)

    def tasks_of(values):
        """The values of clusters, by task."""
        tasks = {}
        for (_, task), value in values.items():
            tasks.setdefault(task, []).append(value)
        return list(tasks.values())

    def mean(rewards):
        return statistics.fmean(x for task in rewards for cluster in task for x in cluster)

    def gain(tasks):
        first, second = ([[both[i] for both in task] for task in tasks] for i in (0, 1))
        return mean(second) - mean(first)

    common = {key: (by["a"][key], by["s"][key]) for key in by["a"] if key in by["s"]}
    cases = [(results[0], mean, tasks_of(by["a"])), (results[1], mean, tasks_of(by["s"])),
             (results[1]["minus_first"], gain, tasks_of(common))]
    for got, statistic, tasks in cases:
        value, low, high = plain_bootstrap(tasks, statistic)
        assert got[metric] == pytest.approx(value, abs=1e-4)
        assert got[f"{metric}_95"] == pytest.approx([low, high], abs=0.05 * (high - low))
    low, high = got[f"{metric}_95"]
    assert f" {100 * got[metric]:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" in table
    assert results[1]["minus_first"]["clusters"] == len(common) < len(by["a"])
    assert [(r["system"], r["files"][1], r["episodes"]) for r in results] == [
        (name, f"{name}1.jsonl", len(files[name + "0"]) + len(files[name + "1"])) for name in "as"]


def test_nothing_in_common(tmp_path):
    (_, r), table = run(tmp_path, "a.jsonl", "b.jsonl", a=[episode("x", 1)], b=[episode("y", 1)])
    names = ("success", "success_95", "tests_passed", "tests_passed_95", "wins", "wins_95")
    assert r["minus_first"] == {"first": "a", "clusters": 0, **dict.fromkeys(names)}


def test_names(tmp_path):
    rs = [episode("x", 1)]
    (tmp_path / "lr=1").mkdir(), (tmp_path / "lr=2").mkdir()
    files = {"lr=1/test": rs, "lr=2/test": rs}
    got, _ = run(tmp_path, "lr=1/test.jsonl", "lr=2/test.jsonl", "-", stdin=rs, **files)
    assert [r["system"] for r in got] == ["lr=1/test.jsonl", "lr=2/test.jsonl", "stdin"]
    assert run(tmp_path, stdin=rs)[0][0]["system"] == "stdin"


def test_mixed_rules_are_called_out(tmp_path):
    files = dict(a=[episode("x", 1)], b=[episode("x", 1, by="official rules")])
    got, table = run(tmp_path, "a.jsonl", "b.jsonl", **files)
    assert [r["reward_by"] for r in got] == [["honest rules"], ["official rules"]]
    assert "NOT COMPARABLE" in table
    assert "NOT COMPARABLE" not in run(tmp_path, "a.jsonl", **files)[1]


@pytest.mark.parametrize("flags, stdin, message", [
    (["s.jsonl"], "", "s.jsonl, line 2: no 'reward'"),
    (["gone.jsonl"], "", "gone.jsonl: No such file"),
    (["-"], "\n \n", "stdin is empty"), ([], "\n{\n", "stdin, line 2: not JSON")])
def test_bad_input(tmp_path, flags, stdin, message):
    (tmp_path / "s.jsonl").write_text(lines([episode("x", 1), {**episode("x", 1), "reward": None}]))
    assert message in complaint(script("evaluate.py", *flags, stdin=stdin, cwd=tmp_path))


@pytest.mark.full
def test_a_figure_is_drawn_of_the_lines(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = {name: [episode(t, float(i < solved)) for i, t in enumerate("abcd")]
             for name, solved in (("base", 1), ("c1", 2), ("c4", 4))}
    results, _ = run(tmp_path, "base.jsonl", "critic@4=c4.jsonl", "critic@1=c1.jsonl", **files)
    succeed("tests/experiments/plot.py", tmp_path / "f.png", stdin=results)
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
