"""evaluate.py against plain Python, which works out the same numbers from random episodes."""
import random
import re
from itertools import combinations, product
from statistics import fmean

import pytest

import colbench
import evaluate
from conftest import dialogue, lines, stdin_of

REFERENCES = {"backend": "def f(x): return x", "frontend": "<html></html>"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*args, stdin=records, NAME=records): (results, table); NAME.jsonl has those records."""
    def run(*args, stdin="", **files):
        for name, rs in files.items():
            (tmp_path / f"{name}.jsonl").write_text(lines(rs))
        results = []
        monkeypatch.setattr(evaluate, "open_stdout", lambda: results.append)
        with stdin_of(stdin):
            evaluate.main(evaluate.get_args(args))
        return results, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    return run


# --- random episodes, and what is true of them ----------------------------------------------------

def episode(task, reward=1.0, texts=("q",), sample=0, kind="backend", **more):
    """A record in which the agent writes these texts."""
    history = dialogue("p", *" ".join(texts).replace(" ", " what? ").split())
    return {"task": {"id": task, "kind": kind, "problem_description": "p",
                     "ground_truth": REFERENCES[kind]},
            "sample": sample, "dialogue_history": history, "answer": "x", "reward": reward, **more}


def random_episode(r, task, sample, kind, rewards, counted, meta):
    """(record, truth) of an episode, which may have failed; not all messages may have a count."""
    truth = {"task": task, "key": (task, sample, meta["seed"]), "reward": r.choice(rewards)}
    if r.random() < 0.2:
        record = episode(task, kind=kind)
        return ({"task": record["task"], "sample": sample, "failed": "no reply", "meta": meta},
                {**truth, "reward": None})
    texts = [r.choice("ab") for _ in range(r.randint(1, 3))]
    record = episode(task, truth["reward"], texts, sample, kind, meta=meta)
    truth |= {"texts": tuple(texts), "turns": len(texts), "tokens": 0, "success": None,
              "unanswered": None, "not_drawn": None}
    for message in colbench.agent_messages(record):
        n, counts = r.randint(1, 9), r.choice(counted)
        if counts == "token_ids":
            message["token_ids"] = [7] * n
        elif counts:
            message[counts] = n
        known = counts and truth["tokens"] is not None
        truth["tokens"] = truth["tokens"] + n if known else None
    if kind == "frontend":
        truth["not_drawn"] = r.random() < 0.3
        record |= {"failure": "no page"} if truth["not_drawn"] else {}
    else:
        truth |= {"success": truth["reward"] == 1, "unanswered": r.random() < 0.5}
        if r.random() < 0.5:
            record["answered"] = not truth["unanswered"]
        elif not truth["unanswered"]:
            record["dialogue_history"][-1]["content"] = colbench.ANSWER + texts[-1]
            truth["texts"] += ("answer",)
    return record, truth


def random_system(r, name, kind):
    """(records of each file, [truth]); later runs repeat some of the failed episodes.

    A file per trained seed, or one for several seeds of sampling.
    """
    rewards = r.choice([[0.0], [1.0], [0.3], [0.1 + 0.2], [0.0, 0.25, 0.3, 1.0, 1.0, 1.0]])
    counted = r.choice([["token_ids", "completion_tokens"], ["token_ids"] * 19 + [None], [None]])
    tasks, k, files, truths = r.sample("uvwxy", r.randint(1, 5)), r.randint(1, 4), [], []
    trained = r.random() < 0.7
    for seed in range(r.randint(1, 3)):
        meta = {"model_weights": f"{name}{seed}" if trained else name, "seed": seed}
        of_file = [random_episode(r, task, sample, kind, rewards, counted, meta)
                   for task in tasks for sample in range(k + r.randint(0, 1))]
        of_file += [random_episode(r, truth["task"], truth["key"][1], kind, rewards, counted, meta)
                    for _, truth in of_file if truth["reward"] is None and r.random() < 0.5]
        r.shuffle(of_file)
        files.append([record for record, _ in of_file])
        truths += [truth for _, truth in of_file]
    return files if trained else [sum(files, [])], truths


METRICS = "reward", "success", "unanswered", "not_drawn", "turns", "tokens"


def by_task(truths, metric):
    """{task: its episodes' values}, without the failed ones."""
    values = {}
    for truth in truths:
        if truth["reward"] is not None:
            values.setdefault(truth["task"], []).append(truth[metric])
    return values


def known_means(values):
    """The means of tasks' values, [] if one value is not known."""
    return [] if None in sum(values, []) else [fmean(of_task) for of_task in values]


def check_interval(limits, values, is_share):
    """Checks a 95 % interval against all resamples of the tasks, or a binomial's definition."""
    n = len(values)
    if is_share and {*values} in ({0}, {1}):
        far, one = (limits[1], limits[0]) if values[0] == 0 else (1 - limits[0], 1 - limits[1])
        assert one == 0 and (1 - far) ** n == pytest.approx(0.025, rel=0.01)
    elif n < 2:
        assert limits is None
    else:
        low, high = limits
        means = [sum(drawn) / n for drawn in product(values, repeat=n)]
        for outside, inside in ((lambda x: x < low - 1e-4, lambda x: x > low + 1e-4),
                                (lambda x: x > high + 1e-4, lambda x: x < high - 1e-4)):
            assert fmean(map(outside, means)) < 0.025 + 0.01
            assert fmean(map(inside, means)) < 0.975 + 0.01


def check(found, metric, values, is_share=True):
    """Checks a mean and its interval of a result against the tasks' values."""
    if not values:
        assert found.get(metric) is None and found.get(f"{metric}_95") is None
        return
    assert found[metric] == pytest.approx(fmean(values), abs=6e-5)
    check_interval(found[f"{metric}_95"], values, is_share)


def test_every_number_is_that_of_plain_python(run):
    """Of systems with several seeds, uneven tasks and episodes, failed episodes and missing counts.

    A mean is over a task's episodes, then over tasks. Resampling draws whole tasks.
    """
    r = random.Random(0)
    for number in range(60):
        kind, systems, given = r.choice(["backend", "backend", "frontend"]), {}, {}
        for name in "abc"[:r.randint(1, 3)]:
            files, truths = random_system(r, name, kind)
            given |= {f"{name}{seed}": records for seed, records in enumerate(files)}
            systems[name] = truths
        args = [f"{name}=" + ",".join(f"{file}.jsonl" for file in given if file[0] == name)
                for name in systems]
        empty = [name for name in systems if not by_task(systems[name], "reward")]
        if empty:
            with pytest.raises(SystemExit, match=f"error: {empty[0]} has only failed episodes"):
                run(*args, **given)
            continue
        results, table = run(*args, **given)
        for records in given.values():
            r.shuffle(records)
        assert run(*args, **given) == (results, table)  # lines have no order
        check_table(results, table)
        first = systems[results[0]["system"]]
        for found, truths in zip(results, systems.values(), strict=True):
            check_system(found, truths)
            if found is not results[0]:
                check_differences(found, truths, first)


def check_system(found, truths):
    """Checks a result's own numbers."""
    done = [truth for truth in truths if truth["reward"] is not None]
    failed = {t["key"] for t in truths} - {t["key"] for t in done}
    assert found["episodes"] == len(done) and found["failed"] == len(failed)
    assert found["distinct"] == len({(t["task"], t["texts"]) for t in done})
    assert found["tasks"] == len({t["task"] for t in done})
    for metric in METRICS:
        values = known_means(by_task(truths, metric).values())
        check(found, metric, values, is_share=metric not in ("turns", "tokens"))
    solved = by_task(truths, "success")
    for k in 2, 4, 8:
        has_k = all(len(of_task) >= k and None not in of_task for of_task in solved.values())
        check(found, f"pass^{k}", has_k and [fmean(map(all, combinations(of_task, k)))
                                             for of_task in solved.values()])


def check_differences(found, truths, first):
    """Checks a result's differences from the first system."""
    for metric in METRICS:
        ours, theirs = by_task(truths, metric), by_task(first, metric)
        common = [task for task in ours if task in theirs]
        means, firsts = (known_means([of[task] for task in common]) for of in (ours, theirs))
        gaps = [x - y for x, y in zip(means, firsts)]
        check(found, f"{metric}_minus_first", gaps, is_share=False)
        if metric == "reward":
            assert found["common"] == len(common)
            check(found, "wins", [0.5 if abs(gap) < 1e-9 else gap > 0 for gap in gaps])


def check_table(results, table):
    """Each number stands under its name: a count, or a share as a percentage with its interval."""
    head, *rows, note = table.splitlines()[:len(results) + 2]
    ends = {match.end(): match[0] for match in re.finditer(r"\S+( \S+)*", head)}
    assert note.startswith("[means and 95 % intervals over tasks]")
    shown = {"reward %", "turns", "episodes", "distinct", "failed", "tasks"}
    if len(results) > 1:
        shown |= {"common"}
    if any(found.get("common") for found in results):
        shown |= {"reward minus first %"}
        shown |= {"success minus first %"} if "success" in results[0] else {"wins %"}
    assert shown <= {*ends.values()}
    for found, row in zip(results, rows, strict=True):
        cells = {ends[m.end()]: m[0] for m in re.finditer(r"\S+( \S+)*", row[6:].rjust(len(row)))}
        assert row[:6].strip() == found["system"] and cells.keys() == {*ends.values()} - {"system"}
        for name, text in cells.items():
            field = name.removesuffix(" %").replace(" ", "_")
            value, limits = found.get(field), found.get(f"{field}_95")
            sign = "+" if field.endswith("_minus_first") else ""
            if value is None:
                assert text == "-"
            elif isinstance(value, int):
                assert text == str(value)
            elif name.endswith(" %") and limits:
                low, high = (f"{100 * x:{sign}.1f}" for x in limits)
                assert text == f"{100 * value:{sign}.1f} [{low}, {high}]"
            else:
                assert text == f"{(100 if name.endswith(' %') else 1) * value:{sign}.1f}"


class Game(colbench.Environment):
    """Each record says which metrics it has."""

    def metrics(self, record):
        return record["own"]


def test_own_metrics_are_means_over_the_episodes_that_have_them(run, monkeypatch):
    monkeypatch.setitem(colbench.environments(), "game", Game())
    monkeypatch.setitem(evaluate.COUNTS, "rooms", lambda record: record["rooms"])
    of = lambda task, sample, rooms, **own: {
        **episode(task, sample=sample), "own": own, "rooms": rooms,
        "task": {"id": task, "kind": "game", "problem_description": "p", "ground_truth": "g"}}
    one = [of("a", 0, 1), of("a", 1, 3, won=True), of("a", 2, 2, won=False, first_try=True),
           of("b", 0, 9, won=True)]
    two = [of("a", 0, 4, first_try=False)]
    (one, two), table = run("one.jsonl", "two.jsonl", one=one, two=two)
    assert (one["won"], one["first_try"], one["rooms"]) == (0.75, 1, 5.5)
    assert (two["won"], two["first_try"], two["rooms"]) == (None, 0, 4)
    assert (two["won_minus_first"], two["first_try_minus_first"]) == (None, -1)
    assert two["rooms_minus_first"] == 2 and "success" not in one
    heads = re.split("  +", table.splitlines()[0])
    assert {"won %", "first try %", "rooms"} <= {*heads} and "success %" not in heads


# --- settings, and what is refused ----------------------------------------------------------------

def test_a_line_names_each_setting_that_differs_with_the_values_of_each_system(run):
    """Not the model or the seed. A system whose records do not have a setting may have the same."""
    r, values = random.Random(0), {"temperature": [0.0, 1.0], "human": ["toy.py 1f", "h.py 2e"],
                                   "human_params": [{}, {"top_p": [0.9]}], "of_an_edit": [None, 3]}
    for _ in range(60):
        systems, used = {}, {name: {} for name in (*values, "reward_by")}
        for system in "abc":
            systems[system] = []
            for sample in range(r.randint(1, 2)):
                meta = {name: r.choice(xs[:r.choice([1, 2])]) for name, xs in values.items()
                        if r.random() < 0.8}
                by = r.choice(["honest rules, Python 3.11", "honest rules, Python 3.12"])
                for name, value in {**meta, "reward_by": by}.items():
                    of_system = used[name].setdefault(system, [])
                    of_system += [value] * (value not in of_system)
                meta |= {"model_weights": system, "seed": sample, "version": r.choice("xy")}
                systems[system].append(episode("t", sample=sample, meta=meta, reward_by=by))
        want = []
        for name, of_systems in sorted(used.items()):
            texts = {system: sorted(map(str, found)) for system, found in of_systems.items()}
            if len(set(sum(texts.values(), []))) > 1:
                each = (f"{system} {' and '.join(found)}" for system, found in texts.items())
                want.append(f"NOT THE SAME {name}: {', '.join(each)}")
        _, table = run("a.jsonl", "b.jsonl", "c.jsonl", **systems)
        _, _, _, _, note, *found = table.splitlines()
        assert found == want
        graders = " and ".join(sorted(used["reward_by"]["a"]))
        assert note == f"[means and 95 % intervals over tasks] graded by {graders}"


def test_other_tasks_are_noted(run):
    of = lambda tasks: [episode(task) for task in tasks]
    for ours, theirs in ("ab", "ab"), ("ab", "abc"), ("abc", "ab"), ("ab", "bc"), ("a", "b"):
        _, table = run("a.jsonl", "b.jsonl", a=of(ours), b=of(theirs))
        assert ("\nNOT THE SAME TASKS" in table) == (ours != theirs)


def test_an_episode_counts_once_and_a_file_holds_one_system(run):
    """Files of a system may be of two models, which were trained with other seeds.

    And of an agent that says the same in two runs; `distinct` shows it.
    """
    of = lambda **meta: [episode("a", sample=sample, meta=meta) for sample in (0, 1)]
    one, agent = of(model_weights="1a", seed=0), of(agent="agent.py 1f")
    again, two = "sample 0 of the task a is also in", "has episodes of two systems, with"
    for first, second, in_two_files, in_one in (
            (one, one, None, again), (agent, agent, None, again),
            (one, of(model_weights="1a", seed=1), None, None),
            (one, of(model_weights="2b", seed=0), None, f"{two} model 1a and 2b"),
            (agent, of(agent="agent.py 2e"), None, f"{two} agent agent.py 1f and agent.py 2e")):
        for args, stdin, why in ((["s=one.jsonl,two.jsonl"], "", in_two_files),
                                 ([], first + second, in_one)):
            if why:
                with pytest.raises(SystemExit, match=f"error: .*{why}"):
                    run(*args, stdin=stdin, one=first, two=second)
            else:
                (found,), _ = run(*args, stdin=stdin, one=first, two=second)
                assert (found["episodes"], found["distinct"]) == (4, 1)
        with pytest.raises(SystemExit, match="error: s: give each file only once"):
            run("s=one.jsonl,one.jsonl", one=first)


def test_a_failed_episode_is_one_that_its_file_does_not_repeat(run):
    """As --resume appends to it. Each seed has a file of its own. All tries have a cost."""
    r = random.Random("retries")
    for _ in range(40):
        files, n_failed, n_done = {}, 0, 0
        for seed in range(r.randint(1, 3)):
            file = files[f"f{seed}"] = []
            for task, sample in product("ab", range(2)):
                ends = r.choices(["failed", "done"], [2, 1], k=r.randint(1, 3))
                ends = ends[:ends.index("done") + 1] if "done" in ends else ends
                n_failed, n_done = n_failed + ("done" not in ends), n_done + ("done" in ends)
                for end in ends:
                    record = episode(task, texts=[f"{r.random()}"], sample=sample)
                    if end == "failed":
                        record = {key: record[key] for key in ("task", "sample")}
                        record["failed"] = "no reply"
                    if r.random() < 0.7:
                        record["usage"] = {r.choice("xy"): r.randrange(9), "z": r.randrange(9)}
                    file.append(record)
            r.shuffle(file)
        if n_done:
            (found,), _ = run(f"s={','.join(f'{name}.jsonl' for name in files)}", **files)
            assert (found["episodes"], found["failed"]) == (n_done, n_failed)
            usages = [x["usage"] for x in sum(files.values(), []) if "usage" in x]
            names = {name for usage in usages for name in usage}
            assert found["usage"] == {name: sum(usage.get(name, 0) for usage in usages)
                                      for name in names}


def test_two_tasks_of_one_id_are_not_compared(run):
    one, two = [episode("a")], [episode("b"), episode("a")]
    for field, value in ("ground_truth", "another"), ("test_cases", {"x": "f(1)"}):
        two[1]["task"] = {**one[0]["task"], field: value}
        with pytest.raises(SystemExit, match="two.jsonl, line 2: the task a differs from the one "
                                             "in one.jsonl, line 1: give one"):
            run("one.jsonl", "two.jsonl", one=one, two=two)


def test_names(run, tmp_path):
    """A file is named by its path. NAME=FILE that is a path itself is one."""
    rs = [episode("x")]
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "runs").mkdir()
    found, _ = run("runs/test.jsonl", "test.jsonl", "a=lr=1/x.jsonl", "lr=1/x.jsonl", "-", stdin=rs, test=rs,
                   **{"runs/test": rs, "lr=1/x": rs})
    assert [(r["system"], r["files"]) for r in found] == [
        ("runs/test", ["runs/test.jsonl"]), ("test", ["test.jsonl"]), ("a", ["lr=1/x.jsonl"]),
        ("lr=1/x", ["lr=1/x.jsonl"]), ("stdin", ["-"])]
