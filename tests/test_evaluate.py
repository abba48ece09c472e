"""evaluate.py against numbers worked out by hand, and its intervals against the textbook.

And the report of episodes in a real Chromium: what it shows, and that texts stay texts.
"""
import os
import random
import shutil
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


def draws(tasks):
    """2,000 draws of as many tasks, with replacement."""
    r = random.Random(1)
    return [r.choices(tasks, k=len(tasks)) for _ in range(2000)]


def mean(tasks):
    return statistics.fmean(x for task in tasks for cluster in task for x in cluster)


def gain(tasks):
    first, second = ([[pair[i] for pair in task] for task in tasks] for i in (0, 1))
    return mean(second) - mean(first)


def test_values_and_intervals_are_those_of_a_plain_bootstrap(tmp_path):
    """Two systems, each of two seeds, which have some tasks in common and some not.

    A task is drawn with all its episodes of all seeds; a difference is of the tasks that both have
    in a seed, in pairs.
    """
    r, files = random.Random(0), {}
    rewards = {"a": {}, "s": {}}  # of each system {(seed, task): rewards}
    for name, seed in ("a0", "a1", "s0", "s1"):
        rs = files[name + seed] = []
        for t in r.sample(range(50), 40):
            got = [min(1, t % 5 / 4 + r.choice((0, 0.2 * (name == "s"))))
                   for _ in range(r.randint(1, 3))]
            rewards[name][seed, f"t{t}"] = got
            rs += [episode(f"t{t}", reward) for reward in got]
    systems = [f"{name}={name}0.jsonl,{name}1.jsonl" for name in "as"]
    results, table = run(tmp_path, *systems, **files)
    assert run(tmp_path, *systems)[0] == results  # seeded
    assert [(x["system"], x["files"][1], x["episodes"]) for x in results] == [
        (name, f"{name}1.jsonl", len(files[name + "0"]) + len(files[name + "1"])) for name in "as"]

    for metric, of in ("tests_passed", float), ("success", lambda reward: reward == 1):
        a, s = ({key: list(map(of, got)) for key, got in rewards[name].items()} for name in "as")
        common = {key: (a[key], s[key]) for key in a if key in s}
        assert results[1]["minus_first"]["clusters"] == len(common) < len(a)
        for found, statistic, clusters in ((results[0], mean, a), (results[1], mean, s),
                                           (results[1]["minus_first"], gain, common)):
            tasks = {}
            for (_, task), values in clusters.items():
                tasks.setdefault(task, []).append(values)
            tasks = list(tasks.values())
            low, *_, high = statistics.quantiles(map(statistic, draws(tasks)), n=40)
            assert found[metric] == pytest.approx(statistic(tasks), abs=1e-4)
            assert found[f"{metric}_95"] == pytest.approx([low, high], abs=0.05 * (high - low))
        low, high = found[f"{metric}_95"]
        assert f" {100 * found[metric]:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" in table


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


# --- the report -----------------------------------------------------------------------------------

LISTED = ".task > summary b"  # the names of the tasks in the list
OPEN = ".task[open] main"  # what is shown beside it
HOSTILE = ("</script><script>document.title = 'owned'</script></template>"
           "<img src=x onerror=\"document.title = 'owned'\"><!--")


@pytest.fixture(scope="module")
def tab():
    """A tab of a browser, which notes what it asks for and its errors."""
    why = "no playwright or no Chromium (MANUAL.md, \"Frontend Design\")"
    sync_api = pytest.importorskip("playwright.sync_api", reason=why)
    browser = next(filter(None, map(shutil.which, colbench.BROWSERS)), None)
    if not browser:
        pytest.skip(why)
    with sync_api.sync_playwright() as p:
        flags = ["--no-sandbox"] * (os.geteuid() == 0)
        page = p.chromium.launch(executable_path=browser, args=flags).new_page()
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page
        assert page.errors == []


def report(tmp_path, tab, **systems):
    """Writes the systems' records, has them reported, and opens the report."""
    for name, made in systems.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(made))
    files = [tmp_path / f"{name}.jsonl" for name in systems]
    done = succeed("tests/experiments/report.py", *files)
    (tmp_path / "report.html").write_text(done.stdout, encoding="utf-8")
    tab.asked.clear()
    tab.goto(f"file://{tmp_path}/report.html")
    assert len(tab.asked) == 1  # itself alone


def texts(tab, where):
    return tab.locator(where).all_text_contents()


def test_what_a_model_wrote_is_never_markup_and_candidates_come_best_first(tmp_path, tab):
    candidates = [{"output": HOSTILE, "token_ids": [1], "advantage": advantage,
                   "role": '"><img src=x>'} for advantage in (-0.5, 0.25, 0.0)]
    task = {"problem_description": HOSTILE, "ground_truth": HOSTILE, "id": HOSTILE,
            "test_cases": {"a": "f()"}}
    history = dialogue(HOSTILE, HOSTILE)
    history[1]["candidates"] = candidates
    r = {"task": task, "answer": HOSTILE, "reward": 0.5, "dialogue_history": history,
         "tests": {HOSTILE: HOSTILE}, "failure": HOSTILE}
    report(tmp_path, tab, base=[r], sweet=[{**r, "reward": 1.0}])
    tab.get_by_text("3 candidates").first.click()
    assert tab.title() == "Episodes" and tab.locator("img, script").count() == 0
    assert texts(tab, LISTED) == [HOSTILE[:90]] and texts(tab, f"{OPEN} pre").count(HOSTILE) >= 10
    assert texts(tab, ".task > summary span") == ["50", "100"]
    assert texts(tab, f"{OPEN} .episode > summary") == [
        "episode 0: reward 0.500", "episode 0: reward 1.000"]
    assert texts(tab, f"{OPEN} details[open] .advantage")[:3] == ["+0.250", "+0.000", "-0.500"]


def test_pages_are_shown_as_pictures(tmp_path, tab):
    if not os.path.exists(os.path.join(colbench.CACHE, "tailwind.min.css")):
        pytest.skip("no Tailwind style sheet (MANUAL.md, \"Frontend Design\")")
    task = {"id": "a", "kind": "frontend", "problem_description": "a shop",
            "ground_truth": "<html><h1>A Shop</h1></html>"}
    play = lambda page, **more: [{"task": task, "answer": page, "reward": 0.5,
                                  "dialogue_history": dialogue("a shop", page), **more}]
    report(tmp_path, tab, base=play("<html><h1>My Shop</h1></html>"),
           rft=play(task["ground_truth"]), none=play("", failure="no page"))
    pictures = tab.locator(f"{OPEN} img")
    sources = pictures.evaluate_all("all => all.map(e => [e.src, e.naturalWidth])")
    assert [width for _, width in sources] == [480] * 3
    reference, base, rft = (src for src, _ in sources)
    assert reference == rft != base and texts(tab, ".fail") == ["no page"]
