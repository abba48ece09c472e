"""evaluate.py against numbers worked out by hand, and its intervals against the textbook."""
import random
import re
import statistics
from itertools import combinations

import pytest

import colbench
import evaluate
from conftest import dialogue, lines, stdin_of

CODE = "def f(x, rate=3, fee=12): return x * rate + fee"


def episode(task, reward, turns=1, tokens=None, by="honest rules", **more):
    history = dialogue(*["write f", "what?"] * turns)
    for message in history[1::2] if tokens else ():
        message["token_ids"] = [1] * tokens
    return {"task": {"id": task, "problem_description": "p", "ground_truth": CODE},
            "dialogue_history": history, "answer": "x", "answered": True, "reward": reward,
            "reward_by": by, **more}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*flags, stdin=records, NAME=records): (results, table); NAME.jsonl has those records."""
    def run(*flags, stdin="", **files):
        for name, rs in files.items():
            (tmp_path / f"{name}.jsonl").write_text(lines(rs))
        results = []
        monkeypatch.setattr(evaluate, "open_stdout", lambda: results.append)
        with stdin_of(stdin):
            evaluate.main(evaluate.get_args(flags))
        return results, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    return run


def test_hand_computed(run):
    rs = [episode("a", 1.0, turns=3, tokens=5), episode("a", 0.5, turns=2, tokens=7),
          episode("b", 0.2, turns=4, tokens=2, answered=False),
          episode("c", 1, turns=1, tokens=1)]
    for r in rs[:2]:  # where a record does not say whether it is answered, the marker does
        del r["answered"]
    for r in rs[1:]:
        r["dialogue_history"][-1]["content"] = colbench.ANSWER + "x"
    (r,), table = run("s.jsonl", s=rs)
    assert (r["system"], r["episodes"], r["tasks"], r["reward_by"]) == ("s", 4, 3, ["honest rules"])
    # means of the tasks' means: (1.0 + 0.5) / 2, 0.2 and 1 of the tests, ...
    assert r["tests_passed"] == 0.65 and r["success"] == 0.5 and r["turns"] == 2.5
    assert r["tokens"] == round(((15 + 14) / 2 + 8 + 1) / 3, 4) and r["unanswered"] == 0.5
    assert "minus_first" not in r
    low, high = r["success_95"]  # of the tasks (1/2, 0/1, 1/1) some resamples hold only b or c
    assert (low, high) == (0, 1)
    head, row, note = table.splitlines()
    assert head.replace(" %", "%").split() == [
        "system", "tests%", "success%", "unanswered%", "turns", "tokens", "episodes", "tasks"]
    assert row.startswith("s ") and "65.0 [" in row and "50.0 [0.0, 100.0]" in row
    assert note == ("[95 % bootstrap intervals over tasks, exact ones for 0 and 100 %]; "
                    "graded by honest rules")


def test_pages_have_likeness_wins_failures_and_no_rules(run):
    page = lambda task, reward, **more: {**episode(task, reward, by="clip", **more), "task": {
        "id": task, "problem_description": "p", "ground_truth": "<html></html>"}}
    ours = [page("a", 1.0), page("b", 0.5), page("b", 0.7), page("c", 0.25),
            page("d", 0.0, failure="no page")]
    rival = [page("a", 0.9), page("b", 0.6), page("c", 0.3), page("e", 1.0)]
    (first, r), table = run("rival.jsonl", "ours.jsonl", ours=ours, rival=rival)
    assert r["tests_passed"] == 0.4625 and "success" not in r and "unanswered" not in r
    assert first["not_drawn"] == 0 and r["not_drawn"] == 0.25
    assert r["minus_first"]["success"] is None and "success" not in table
    assert r["minus_first"]["tasks"] == 3
    assert r["minus_first"]["wins"] == 0.5 and "wins %" in table  # a won, b tied, c lost
    assert "likeness %" in table and "likeness - first" in table and "not drawn %" in table
    assert table.endswith("]; graded by clip; NOT THE SAME TASKS: "
                          "compare only the differences\n")  # though both have 4


def draws(tasks):
    """2,000 draws of as many tasks, with replacement."""
    r = random.Random(1)
    return [r.choices(tasks, k=len(tasks)) for _ in range(2000)]


def mean(tasks):
    return statistics.fmean(map(statistics.fmean, tasks))


def gain(tasks):
    return statistics.fmean(statistics.fmean(b) - statistics.fmean(a) for a, b in tasks)


def test_values_and_intervals_are_those_of_a_plain_bootstrap(run):
    """Two systems, each of two seeds, which have some tasks in common and some not.

    A task is drawn with all its episodes of all seeds; a difference is of the tasks that both have,
    in pairs.
    """
    r, files = random.Random(0), {}
    rewards = {"a": {}, "s": {}}  # of each system {task: rewards}
    for name, seed in ("a0", "a1", "s0", "s1"):
        rs = files[name + seed] = []
        for t in r.sample(range(150), 120):
            got = [min(1, t % 5 / 4 + r.choice((0, 0.2 * (name == "s"))))
                   for _ in range(r.randint(1, 3))]
            rewards[name].setdefault(f"t{t}", []).extend(got)
            rs += [episode(f"t{t}", reward) for reward in got]
    systems = [f"{name}={name}0.jsonl,{name}1.jsonl" for name in "as"]
    results, table = run(*systems, **files)
    for rs in files.values():
        r.shuffle(rs)
    assert run(*systems, **files) == (results, table)  # seeded; lines have no order
    assert [(x["system"], x["files"][1], x["episodes"]) for x in results] == [
        (name, f"{name}1.jsonl", len(files[name + "0"]) + len(files[name + "1"])) for name in "as"]

    for metric, of in ("tests_passed", float), ("success", lambda reward: reward == 1):
        a, s = ({key: list(map(of, got)) for key, got in rewards[name].items()} for name in "as")
        common = {key: (a[key], s[key]) for key in a if key in s}
        assert results[1]["minus_first"]["tasks"] == len(common) < len(a)
        for found, statistic, tasks in ((results[0], mean, a), (results[1], mean, s),
                                        (results[1]["minus_first"], gain, common)):
            tasks = list(tasks.values())
            low, *_, high = statistics.quantiles(map(statistic, draws(tasks)), n=40)
            assert found[metric] == pytest.approx(statistic(tasks), abs=1e-4)
            assert found[f"{metric}_95"] == pytest.approx([low, high], abs=0.07 * (high - low))
        low, high = found[f"{metric}_95"]
        assert f" {100 * found[metric]:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" in table


def test_pass_k_is_the_share_of_a_tasks_k_tuples_that_all_succeed(run):
    """Where every task has k episodes, of both seeds together; the mean of tasks."""
    r, seeds = random.Random(0), ([], [])
    rewards = {task: [r.choice([0.5, 1.0, 1.0]) for _ in range(n)]
               for task, n in (("a", 4), ("b", 5), ("c", 6), ("d", 4))}
    for task, values in rewards.items():
        for sample, reward in enumerate(values):
            of_seed = {"sample": sample, "meta": {"seed": sample % 2}}
            seeds[sample % 2].append(episode(task, reward, **of_seed))
    (got,), table = run("both=s.jsonl,t.jsonl", s=seeds[0], t=seeds[1])
    for k in 2, 4:
        want = statistics.mean(
            statistics.mean(min(several) == 1 for several in combinations(values, k))
            for values in rewards.values())
        assert got[f"pass^{k}"] == pytest.approx(want, abs=1e-4) and f"pass^{k} %" in table
    assert "pass^8" not in got and got["pass^4_95"][0] < got["pass^4"] < got["pass^2"]


def test_systems_that_have_nothing_in_common(run):
    """One task tells nothing of others; numbers by different rules are not comparable."""
    files = dict(a=[episode("x", 1), episode("x", 0)], b=[episode("y", 1, by="official rules")])
    (a, b), table = run("a.jsonl", "b.jsonl", **files)
    assert a["success"] == 0.5 and a["success_95"] is None and "tokens" not in a
    assert a["unanswered"] == 0  # as they say, without the marker
    names = ("success", "success_95", "tests_passed", "tests_passed_95", "wins", "wins_95")
    assert b["minus_first"] == {"first": "a", "tasks": 0, **dict.fromkeys(names)}
    assert [r["reward_by"] for r in (a, b)] == [["honest rules"], ["official rules"]]
    assert table.endswith("honest rules and official rules; NO COMMON TASK with a: b; NOT COMPARABLE: "
                          "different graders\n")


def test_differences_name_the_number_of_common_tasks_unless_that_is_all(run):
    """Each in a column of its number; without a common task a note says so."""
    of = lambda tasks, reward: [episode(task, reward) for task in tasks]
    files = dict(a=of("xyz", 0.5), b=of("xyz", 1), c=of("yzw", 1), d=of("x", 0), e=of("vw", 1))
    results, table = run("a.jsonl", *(f"{name}.jsonl" for name in "bcde"), **files)
    head, *rows, note = table.splitlines()
    titles = [f"{metric} - first{of}" for of in ("", " (common: 2)", " (common: 1)")
              for metric in ("success", "tests")]
    assert re.findall(r"\w+ - first(?: \(common: \d\))?", head) == titles
    for row, cells in zip(rows, ([], ["+100.0 [+100.0, +100.0]", "+50.0 [+50.0, +50.0]"],
                                 ["+100.0 [+100.0, +100.0]", "+50.0 [+50.0, +50.0]"],
                                 ["+0.0", "-50.0"], [])):
        assert re.findall(r"[+-]\d+\.\d(?: \[.*?\])?", row) == cells
    starts = [re.search(r"[+-]\d|$", row).start() for row in rows]
    assert starts[1] < starts[2] < starts[3]
    assert note.endswith("NOT THE SAME TASKS: compare only the differences; "
                         "NO COMMON TASK with a: e")
    assert run("a.jsonl", "e.jsonl", **files)[1].endswith("rules; NO COMMON TASK with a: e\n")
    assert run("a.jsonl", "b.jsonl", **files)[1].endswith("graded by honest rules\n")


def test_a_share_of_0_or_1_in_all_tasks_has_an_exact_interval(run):
    """Clopper-Pearson's, by its definition; differences and counts have the bootstrap's."""
    tail = lambda n, share: share ** n  # probability that n tasks all succeed
    for n in (1, 2, 5, 40):
        names = [str(i) for i in range(n)]
        files = dict(all=[episode(name, 1) for name in names for _ in range(2)],
                     none=[episode(name, 0) for name in names for _ in range(2)])
        (every, none), table = run("all.jsonl", "none.jsonl", **files)
        for metric in ("success", "tests_passed", "pass^2"):
            (low, one), (zero, high) = every[f"{metric}_95"], none[f"{metric}_95"]
            assert (zero, one) == (0, 1)
            assert [tail(n, low), tail(n, 1 - high)] == pytest.approx([0.025] * 2, rel=0.01)
        assert every["unanswered_95"] == none["success_95"]
        same = None if n == 1 else [1, 1]
        assert every["turns_95"] == same
        assert none["minus_first"]["success_95"] == (same and [-1, -1])
        assert f"100.0 [{100 * low:.1f}, 100.0]" in table
        assert f"0.0 [0.0, {100 * high:.1f}]" in table
    page = {"problem_description": "p", "ground_truth": "<html></html>"}
    ours, rival = ([{**episode(name, reward), "task": {**page, "id": name}} for name in "abc"]
                   for reward in (0.5, 0.25))
    (_, r), _ = run("rival.jsonl", "ours.jsonl", ours=ours, rival=rival)
    assert r["minus_first"]["wins"] == 1
    assert r["minus_first"]["wins_95"] == [round(0.025 ** (1 / 3), 4), 1]


MADE = {"model": "a", "model_weights": "1a", "agent_params": "b", "seed": 0,
        "version": "x", "engine": None, "n_candidates": 0, "candidates_share": 1.0,
        # these are no conditions; those below are, also one that an edit adds
        "min_p": 0.1,
        "human": "toy.py 1f", "human_model": None, "human_params": {}, "prompts": "2e",
        "max_turns": 6, "temperature": 1.0, "best_of": 1, "critic": None, "thinking": 0}


def test_conditions_that_differ_between_systems_are_noted(run):
    """Each setting but those of the agent; what a record does not say is not known to differ."""
    conditions = list(MADE)[list(MADE).index("min_p"):]
    of = lambda meta, **more: [episode("x", 1, sample=0, meta=meta, **more)]
    for name in MADE:
        for value in ("another", 7, {"a": [1]}, None):
            other = {**MADE, name: 7 if name == "seed" else value}
            if name == "model_weights" and not isinstance(value, str):
                continue  # not valid
            (a, b), table = run("a.jsonl", "b.jsonl", a=of(MADE), b=of(other))
            if name in conditions and value != MADE[name]:
                assert table.splitlines()[-1] == (
                    f"NOT THE SAME CONDITIONS: {name} {MADE[name]} or {value}")
                assert b["conditions"] == {**a["conditions"], name: [value]}
            else:
                assert table.endswith("graded by honest rules\n"), name
    without = {name: value for name, value in MADE.items() if name != "max_turns"}
    for meta in ({}, without):
        assert "CONDITIONS" not in run("a.jsonl", "b.jsonl", a=of(MADE), b=of(meta))[1]
    two = of(MADE) + [episode("y", 1, sample=0, meta={**MADE, "max_turns": 9, "human": "h.py 2"})]
    _, table = run("a.jsonl", "b.jsonl", a=of(MADE), b=two)
    assert table.endswith("\nNOT THE SAME CONDITIONS: human toy.py 1f or h.py 2, max_turns 6 or 9\n"
                          ), table
    assert "CONDITIONS" not in run("a.jsonl", "b.jsonl", a=two, b=two)[1]


def test_rewards_of_another_python_are_noted(run):
    of = lambda *by: [episode(str(i), 1, by=name) for i, name in enumerate(by)]
    old, new = "honest rules, Python 3.11", "honest rules, Python 3.12"
    for a, b, label, differ in (
            ([old, old], [new, new], f"{old} and {new}", True),
            ([old, old], [old, old], old, False),
            (["honest rules"] * 2, [old, old], f"honest rules and {old}", True)):  # unknown
        _, table = run("a.jsonl", "b.jsonl", a=of(*a), b=of(*b))
        note = "; NOT COMPARABLE: different graders" if differ else ""
        assert table.endswith(f"graded by {label}{note}\n")


def test_two_tasks_of_one_id_are_not_compared(run):
    one, two = [episode("a", 1)], [episode("b", 1), episode("a", 1)]
    for field, value in ("ground_truth", "another"), ("test_cases", {"x": "f(1)"}):
        two[1]["task"] = {**one[0]["task"], field: value}
        with pytest.raises(SystemExit, match="two.jsonl, line 2: the task a differs from the one "
                                             f"in one.jsonl, line 1 in {field}: give one"):
            run("one.jsonl", "two.jsonl", one=one, two=two)


def test_an_episode_counts_once_and_a_file_holds_one_system(run):
    made_by = lambda weights, seed=0: [episode("a", 1, sample=i, meta={
        "model_weights": weights, "seed": seed, "version": "1"}) for i in (0, 1)]
    one, other = made_by("1a"), made_by("2b")
    (_, r), _ = run("one.jsonl", "o=other.jsonl,third.jsonl", one=one, other=other,
                    third=made_by("3c"))
    assert r["episodes"] == 4  # two that were trained with other seeds
    (r,), _ = run(stdin=one + made_by("1a", seed=1))
    assert r["episodes"] == 4
    again = "sample 0 of the task a is also in"
    for flags, stdin, why in (
            (["s=one.jsonl,one.jsonl"], "", f"one.jsonl, line 1: {again} one.jsonl, line 1: "),
            ([], one + one, f"stdin, line 3: {again} stdin, line 1: "),
            ([], one + other, "stdin has episodes of two systems, such as sample 0 of the task a")):
        with pytest.raises(SystemExit, match=f"error: {why}"):
            run(*flags, stdin=stdin)


def test_names(run, tmp_path):
    """A file is named by its stem; a path may hold a =."""
    rs = [episode("x", 1)]
    (tmp_path / "runs" / "lr=1").mkdir(parents=True)
    got, table = run("runs/lr=1/test.jsonl", "a=sweet.jsonl", "-", stdin=rs,
                     **{"runs/lr=1/test": rs, "sweet": rs})
    assert [r["system"] for r in got] == ["test", "a", "stdin"]
    assert table.endswith("graded by honest rules\n")  # these are the same tasks
