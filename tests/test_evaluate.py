"""evaluate.py against numbers worked out by hand, and its intervals against the textbook."""
import numpy as np
import pytest

import colbench
import evaluate
from conftest import lines, records, script

CODE = "def f(x, rate=3, fee=12): return x * rate + fee"


def episode(task, reward, turns=1, tokens=None, rules="honest", **more):
    history = [{"role": "user", "content": "write f"}]
    for _ in range(turns):
        history += [{"role": "assistant", "content": "what?"}, {"role": "user", "content": "?"}]
        if tokens:
            history[-2]["token_ids"] = [1] * tokens
    return {"task": {"id": task, "problem_description": "p", "ground_truth": CODE},
            "dialogue_history": history[:-1], "answer": "x", "answered": True, "reward": reward,
            "meta": {"rules": rules}, **more}


def run(tmp_path, *flags, stdin="", **files):
    for name, rs in files.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(rs))
    done = script("evaluate.py", *flags, stdin=stdin, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return records(done.stdout), done.stderr


def test_hand_computed(tmp_path):
    rs = [episode("a", 1.0, turns=3, tokens=5), episode("a", 0.5, turns=2, tokens=7),
          episode("b", 0.2, turns=4, tokens=2, answered=False),
          episode("c", 1, turns=1, tokens=1)]
    (r,), table = run(tmp_path, "s.jsonl", s=rs)
    assert (r["system"], r["episodes"], r["tasks"], r["rules"]) == ("s", 4, 3, ["honest"])
    assert r["tests_passed"] == 0.675 and r["success"] == 0.5 and r["turns"] == 2.5
    assert r["tokens"] == (15 + 14 + 8 + 1) / 4 and r["unanswered"] == 0.25
    assert "minus_first" not in r
    low, high = r["success_95"]  # of the tasks (1/2, 0/1, 1/1) some resamples hold only b or c
    assert (low, high) == (0, 1)
    head, row, note = table.splitlines()
    assert head.replace(" %", "%").split() == [
        "system", "tests%", "success%", "unanswered%", "turns", "tokens", "episodes", "tasks"]
    assert row.startswith("s ") and "67.5 [" in row and "50.0 [0.0, 100.0]" in row
    assert note == "[95 % bootstrap intervals over tasks]; grader's rules: honest"


def test_one_task_tells_nothing_of_others(tmp_path):
    (r,), table = run(tmp_path, "s.jsonl", s=[episode("a", 1), episode("a", 0)])
    assert r["success"] == 0.5 and r["success_95"] is None and "tokens" not in r


def test_where_records_do_not_say_whether_they_are_answered_the_marker_does(tmp_path):
    rs = [episode(t, 1) for t in "abcd"]
    for r in rs[:2]:
        del r["answered"]
    rs[0]["dialogue_history"][-1]["content"] = colbench.ANSWER + "x"
    (r,), said = run(tmp_path, "s.jsonl", s=rs)
    assert r["unanswered"] == 0.25 and "\n2 records have no `answered`: " in said


def test_pages_have_likeness_wins_failures_and_no_rules(tmp_path):
    page = lambda task, reward, **more: {**episode(task, reward, **more), "task": {
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
    assert table.endswith("[95 % bootstrap intervals over tasks]\n")


def test_an_environment_brings_its_own_metrics(monkeypatch):
    class Guesses(colbench.Environment):
        @classmethod
        def metrics(cls, record):
            return {**super().metrics(record), "at_once": (record["reward"] == 1, 1)}
    monkeypatch.setitem(colbench.ENVIRONMENTS, "guesses", Guesses)
    system = evaluate.System("s", [])
    for name, reward in (("a", 1), ("b", 0.5)):
        record = episode(name, reward)
        record["task"]["kind"] = "guesses"
        system.add((0, name), record)
    r = evaluate.result(system, [system], 0)
    assert r["at_once"] == r["success"] == 0.5
    head, row, note = evaluate.table([r])
    assert "at once %" in head and row.split()[1:4] == ["75.0", "50.0", "0.0"]
    assert "rules" not in note  # it has none


def test_interval_resamples_tasks_not_episodes(tmp_path):
    """20 tasks of 10 equal episodes are 20 draws: the interval is that of 20 coins, not of 200."""
    rs = [episode(f"t{t}", float(t % 2)) for t in range(20) for _ in range(10)]
    (r,), _ = run(tmp_path, "s.jsonl", "--bootstrap", 4000, s=rs)
    low, high = r["success_95"]
    assert r["success"] == 0.5 and abs((high - low) / 2 - 1.96 * np.sqrt(0.25 / 20)) < 0.03


def test_seeds_that_share_test_tasks_give_no_more_certainty_than_one(tmp_path):
    """A task is drawn with its episodes of all seeds: 20 tasks played alike by 3 seeds are 20."""
    base = [episode(f"t{t}", float(t % 3 == 0)) for t in range(20)]
    better = [episode(f"t{t}", float(t % 2)) for t in range(20)]
    one = run(tmp_path, "b.jsonl", "s.jsonl", b=base, s=better)[0]
    three = run(tmp_path, "b=" + ",".join(["b.jsonl"] * 3), "s=" + ",".join(["s.jsonl"] * 3))[0]
    for r, rs in zip(one, three):
        assert (r["success_95"], r["tasks"]) == (rs["success_95"], rs["tasks"])
    a, b = one[1]["minus_first"], three[1]["minus_first"]
    assert b == {**a, "clusters": 60} and a["success_95"]


def test_interval_of_independent_episodes_is_the_normal_one():
    rng = np.random.default_rng(1)
    rewards = rng.random(400)
    value, (low, high) = evaluate.with_interval(evaluate.ratio, [(x, 1) for x in rewards], 2000)
    assert abs(value - rewards.mean()) < 1e-4
    assert abs((high - low) / 2 - 1.96 * rewards.std() / 20) < 0.003
    again = evaluate.with_interval(evaluate.ratio, [(x, 1) for x in rewards], 2000)
    assert again == (value, [low, high])  # seeded


def test_a_paired_difference_is_not_widened_by_the_tasks(tmp_path):
    base = [episode(f"t{t}", t % 10 / 10) for t in range(40)]
    tasks = reversed(range(10, 50))  # other tasks too, in another order
    better = [episode(f"t{t}", t % 10 / 10 + 0.1) for t in tasks]
    (_, r), table = run(tmp_path, "base.jsonl", "better.jsonl", base=base, better=better)
    d = r["minus_first"]
    assert d["first"] == "base" and d["clusters"] == 30
    assert d["tests_passed"] == 0.1 and d["tests_passed_95"] == [0.1, 0.1]
    assert d["success"] == 0.1  # of the common 30, the three with 0.9
    assert "+10.0 [+10.0, +10.0]" in table


def test_nothing_in_common(tmp_path):
    (_, r), table = run(tmp_path, "a.jsonl", "b.jsonl", a=[episode("x", 1)], b=[episode("y", 1)])
    names = ("success", "success_95", "tests_passed", "tests_passed_95", "wins", "wins_95")
    assert r["minus_first"] == {"first": "a", "clusters": 0, **dict.fromkeys(names)}


def test_seeds_are_joined_under_a_name_and_paired_by_seed(tmp_path):
    files = dict(b0=[episode("x", 0), episode("y", 1)], b1=[episode("x", 1), episode("y", 1)],
                 s0=[episode("x", 1), episode("y", 1)], s1=[episode("x", 1), episode("z", 0)])
    (b, s), table = run(tmp_path, "base=b0.jsonl,b1.jsonl", "sweet=s0.jsonl,s1.jsonl", **files)
    assert (b["system"], b["files"]) == ("base", ["b0.jsonl", "b1.jsonl"])
    assert (b["success"], b["tasks"], b["episodes"]) == (0.75, 2, 4)
    assert (s["success"], s["tasks"], s["episodes"]) == (0.75, 3, 4)
    d = s["minus_first"]
    assert d["clusters"] == 3 and d["success"] == 0.3333  # x and y of seed 0, x of seed 1


def test_names(tmp_path):
    rs = [episode("x", 1)]
    (tmp_path / "lr=1").mkdir(), (tmp_path / "lr=2").mkdir()
    for lr in "12":
        (tmp_path / f"lr={lr}" / "test.jsonl").write_text(lines(rs))
    got, _ = run(tmp_path, "lr=1/test.jsonl", "lr=2/test.jsonl", "-", stdin=rs)
    assert [r["system"] for r in got] == ["lr=1/test.jsonl", "lr=2/test.jsonl", "stdin"]
    assert run(tmp_path, stdin=rs)[0][0]["system"] == "stdin"


def test_mixed_rules_are_called_out(tmp_path):
    files = dict(a=[episode("x", 1)], b=[episode("x", 1, rules="official")])
    got, table = run(tmp_path, "a.jsonl", "b.jsonl", **files)
    assert [r["rules"] for r in got] == [["honest"], ["official"]] and "NOT COMPARABLE" in table
    assert "NOT COMPARABLE" not in run(tmp_path, "a.jsonl", **files)[1]


def test_tasks_without_an_id_are_grouped_by_what_they_are(tmp_path):
    rs = [episode("x", 1), episode("x", 0)]
    for r in rs:
        del r["task"]["id"]
    assert run(tmp_path, "s.jsonl", s=rs)[0][0]["tasks"] == 1


@pytest.mark.parametrize("flags, stdin, message", [
    (["s.jsonl"], "", "s.jsonl, line 2: no 'reward'"),
    (["gone.jsonl"], "", "gone.jsonl: No such file"),
    (["-"], "", "stdin is empty"),
    ([], "{\n", "stdin, line 1: not JSON"),
    (["--bootstrp", "3"], "", "unrecognized")])
def test_bad_input(tmp_path, flags, stdin, message):
    bad = episode("x", 1)
    del bad["reward"]
    (tmp_path / "s.jsonl").write_text(lines([episode("x", 1), bad]))
    done = script("evaluate.py", *flags, stdin=stdin, cwd=tmp_path)
    assert done.returncode and message in done.stderr and not done.stdout
    assert sum("error:" in line for line in done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_plot_draws_curves_with_intervals_and_level_lines(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    files = {name: [episode(t, float(i < solved)) for i, t in enumerate("abcd")]
             for name, solved in (("base", 1), ("c1", 2), ("c4", 4), ("c2", 3))}
    systems = ["base.jsonl", "critic@4=c4.jsonl", "critic@1=c1.jsonl", "critic@2=c2.jsonl"]
    run(tmp_path, *systems, "--plot", "f.png", **files)
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    saved, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *to, **how: (
        saved.append(figure), save(figure, *to, **how)))
    results, _ = run(tmp_path, *systems)
    evaluate.plot(results, str(tmp_path / "g.png"))
    (figure,) = saved
    level, curve = figure.axes[0].lines
    assert level.get_label() == "base" and curve.get_label() == "critic"
    assert list(level.get_ydata()) == [25, 25]
    assert list(curve.get_xdata()) == [1, 2, 4] and list(curve.get_ydata()) == [50, 75, 100]
    low, high = np.array([r["success_95"] for r in results if r["system"] == "critic@1"][0]) * 100
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert {y for x, y in band if x == 1} == {low, high}
    done = script("evaluate.py", "base.jsonl", "--plot", "x.nothing", cwd=tmp_path)
    assert done.returncode == 1 and "x.nothing can't be written: Format" in done.stderr
