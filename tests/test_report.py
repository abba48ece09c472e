"""report.py in a real browser: what it shows, and that texts stay texts. plot.py's figure."""
import copy
import json
import random
import re
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_policy
from colbench import BROWSERS
from conftest import ROOT, dialogue, lines, script, succeed
from model import Action, Turn

HOSTILE = ("</script><script>document.title = 'owned'</script></template><!--{}\\u003c\\"
           "<img src=x onerror=\"document.title = 'owned'\">")


@pytest.fixture
def report():
    """The module report.py."""
    import importlib.util
    spec = importlib.util.spec_from_file_location("report",
                                                  f"{ROOT}/tests/experiments/report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")  # its event loop would be in the way of other files' tests
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        pytest.skip("no Chromium")
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def page_of(chromium, tmp_path):
    """page_of(*flags, NAME=records): the report of these systems, in a window of 1,400 pixels."""
    errors = []

    def open_report(*flags, **systems):
        for name, given in systems.items():
            (tmp_path / name).write_text(lines(given))
        html = succeed("tests/experiments/report.py", *flags, *systems, cwd=tmp_path).stdout
        (tmp_path / "report.html").write_text(html)
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.on("pageerror", lambda error: errors.append(error))
        page.on("dialog", lambda dialog: errors.append(dialog))
        page.goto(f"file://{tmp_path}/report.html")
        return page
    yield open_report
    assert not errors


def record(name, reward, *contents, **more):
    """A graded episode of a task with two tests, of which it fails the second one."""
    history = dialogue("write f", *contents)
    task = {"id": name, "problem_description": f"the task {name}", "ground_truth": f"def {name}()",
            "test_cases": {"test1": "f(1)", "test2": "f(2)"}}
    return {"task": task, "reward": reward, "answer": contents[-1], "dialogue_history": history,
            "tests": {"test1": "pass", "test2": "wrong value"}, **more}


def scored(advantages, **more):
    """An episode of one message, which has the last of these advantages, as its candidates have."""
    r = record("scored", 1.0, "the message", **more)
    r["dialogue_history"][1] |= {"advantage": advantages[-1], "candidates": [
        {"output": f"text {a}", "token_ids": [1], "advantage": a} for a in advantages]}
    return r


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


# --- the ranking and the colours ------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(20))
def test_the_halves_are_those_of_which_train_policy_draws(seed, report):
    """All pairs of an upper and a lower candidate: with ties, odd numbers, truncated ones."""
    r, weight = random.Random(seed), random.Random(seed).choice([0, 0.1])
    candidates = [{"output": str(i), "token_ids": [i], "logprob": -r.random(),
                   "advantage": r.choice([-1, 0, 0.5, r.random()]), "cut": r.random() < 0.2}
                  for i in range(r.randint(0, 9))]
    for c in r.sample(candidates, len(candidates) // 4):
        del c["advantage"]
    args = SimpleNamespace(logprob_weight=weight, seed=0, pairs_per_turn=1000)
    actions = [Action(c, Turn("", chr(c["token_ids"][0])), None) for c in candidates]
    logps = {a.turn: torch.tensor([a.fields["logprob"]]) for a in actions}
    drawn = {tuple(ord(side[0][1]) for side in (pair.chosen, pair.rejected))
             for pair in train_policy.candidate_pairs(args, actions, logps)}
    ranked, n = report.ranked(candidates, weight)

    def value(c):
        return c["advantage"] + weight * c["logprob"]
    shown = {(a["token_ids"][0], b["token_ids"][0])
             for a, b in product(ranked[:n // 2], ranked[n - n // 2:n])
             if not a["cut"] and value(a) > value(b)}
    assert shown == drawn and len(ranked) == len(candidates)
    assert all("advantage" in c for c in ranked[:n])


@pytest.mark.parametrize("n", [2, 3, 19, 20, 21, 1000])
def test_one_outlier_does_not_change_the_colours(n, report):
    draw = random.Random(n)
    values = [draw.gauss(0, 0.2) for _ in range(n)]
    limit = report.colour_limit(values)
    values[values.index(max(values, key=abs))] = -1e9
    assert report.colour_limit(values) == limit > 0
    assert sum(abs(x) > limit for x in values) <= max(1, n // 10)


def test_the_browser_draws_candidates_by_rank_with_a_line_between_the_halves(page_of):
    page = page_of(a=[scored([-0.5, 0.25, 0.0])], b=[scored([1000, 0.1, -0.1, 0.2])])
    page.keyboard.press("c")
    assert texts(page, ".columns section:nth-child(1) .candidates > div > div") == [
        "+0.250\ntext 0.25", "chosen from above", "+0.000\ntext 0.0", "rejected from below",
        "-0.500\ntext -0.5"]
    rows = texts(page, ".columns section:nth-child(2) .candidates > div > div")
    assert [row.split()[-1] for row in rows] == ["1000", "0.2", "above", "below", "0.1", "-0.1"]
    assert texts(page, ".ends") == ["-0.250\n0\n+0.250", "-0.200\n0\n+0.200"]
    colours = page.eval_on_selector_all(
        ".candidate .chip:first-child", "all => all.map(x => getComputedStyle(x).backgroundColor)")
    assert colours[3] == colours[4] != colours[5]  # 1000 and 0.2: the strongest colour
    box = page.locator(".assistant .box").first
    assert box.evaluate("x => getComputedStyle(x).backgroundColor") == colours[1]  # 0.0
    page.keyboard.press("c")
    assert not page.locator(".candidate").first.is_visible()


def test_the_ranking_can_add_the_log_prob(page_of):
    r = scored([0.3, 0.1, 0.2])
    for c, logprob in zip(r["dialogue_history"][1]["candidates"], (-3, -1, -0.5)):
        c["logprob"] = logprob
    page = page_of("--logprob_weight", 0.1, a=[r])
    page.keyboard.press("c")
    assert texts(page, ".candidate pre") == ["text 0.2", "text 0.1", "text 0.3"]
    assert "advantage + 0.1 x log-prob" in page.inner_text("main")


# --- the list of tasks, keys ----------------------------------------------------------------------

def test_find_sort_and_keys(page_of):
    first = [record("alpha", 1.0, "a question"), record("beta", 1.0, "x"),
             record("gamma", 0.5, "y")]
    last = [record("alpha", 0.75, "z"), record("beta", 0.0, "the Needle & <b>"),
            record("delta", 0.25, "w")]
    page = page_of(first=first, last=last)

    def listed():
        return [text.split()[-1] for text in texts(page, ".task b")]
    assert listed() == ["alpha", "beta", "gamma", "delta"]
    assert texts(page, ".task .chip") == ["100", "75", "100", "0", "50", "-", "-", "25"]
    page.select_option("#sort", index=1)
    assert listed()[:2] == ["beta", "alpha"]
    page.select_option("#sort", label="lowest reward of last first")
    assert listed() == ["beta", "delta", "alpha", "gamma"]
    assert page.inner_text("h2") == "beta"
    for key, shown in ("j", "delta"), ("j", "alpha"), ("k", "delta"), ("k", "beta"), ("k", "beta"):
        page.keyboard.press(key)
        assert page.inner_text("h2") == shown
    page.keyboard.press("/")
    page.keyboard.type("nEEdle & <b>")
    assert listed() == ["beta"] and "1 of 4 tasks" in page.inner_text("header")
    page.keyboard.press("Escape")
    page.keyboard.press("j")  # is no text any more
    assert page.input_value("#find") == "nEEdle & <b>"


def test_four_systems_fit_and_a_failed_test_has_its_call(page_of):
    """With pages, the reference is a fifth column."""
    long = "a_long_name_without_spaces" * 9
    given = [record("a", 0.5, "what?", "4", long, failure=long)]
    page = page_of(**{name: given for name in ("base", "rft", "sweet", long[:40])})
    columns = ".columns > section"
    for n in 4, 5:
        right = page.eval_on_selector_all(
            columns, "all => all.map(x => x.getBoundingClientRect().right)")
        assert len(right) == n and max(right) < 1400
        assert page.evaluate("document.documentElement.scrollWidth") == 1400
        page.evaluate("DATA.tasks[0].reference.picture = 0; DATA.pictures = ['']")
        page.evaluate("show(DATA.tasks[0])")
    text = page.inner_text(f"{columns} >> nth=1")
    assert "1 of 2 tests pass\nf(2): wrong value\n" in text and "f(1)" not in text
    assert all(name in page.inner_text("header") for name in ("base", "rft", "sweet", long[:40]))


# --- texts stay texts -----------------------------------------------------------------------------

def hostile():
    """An episode in which everything that may be text is hostile."""
    candidates = [{"output": HOSTILE, "token_ids": [1], "advantage": advantage,
                   "role": '"><img src=x>'} for advantage in (-0.5, 0.25, 0.0)]
    task = {"problem_description": HOSTILE, "ground_truth": HOSTILE, "id": HOSTILE,
            "test_cases": {HOSTILE: HOSTILE}}
    history = dialogue(HOSTILE, HOSTILE)
    history[1] |= {"candidates": candidates, "output": HOSTILE}
    return {"task": task, "answer": HOSTILE, "reward": 0.5, "dialogue_history": history,
            "tests": {HOSTILE: HOSTILE}, "failure": HOSTILE}


def test_what_a_model_wrote_is_never_markup(page_of):
    page = page_of(base=[hostile()], sweet=[hostile()])
    page.keyboard.press("c")
    page.wait_for_timeout(200)  # an image that fails to load would run its code
    assert page.title() == "Episodes"
    tags = page.eval_on_selector_all("body *", "all => all.map(x => x.tagName)")
    assert not {*tags} & {"IMG", "TEMPLATE"} and tags.count("SCRIPT") == 2  # data and code
    shown = page.eval_on_selector_all("h2, pre", "all => all.map(x => x.textContent)")
    # the id, the description, the reference; an answer, a failure and five messages per system
    assert shown.count(HOSTILE) == 3 + 2 * 7 and shown.count(f"{HOSTILE}: {HOSTILE}") == 2


def test_the_data_are_one_script_element(tmp_path):
    """Also without a browser: nothing in a record ends the element in which the data are."""
    (tmp_path / "a").write_text(lines([hostile()]))
    html = succeed("tests/experiments/report.py", "a", cwd=tmp_path).stdout
    template = Path(ROOT, "tests/experiments/report_page.html").read_text()
    before, after = template.split("{}</script>")
    assert html.startswith(before) and html.endswith("</script>" + after)
    data = html[len(before):len(html) - len("</script>" + after)]
    assert "<" not in data and json.loads(data)["tasks"][0]["description"] == HOSTILE


def test_episodes_are_drawn_when_they_are_opened(page_of):
    """1,600 episodes of 16 candidates take two seconds to open; here the number of elements."""
    many, few = ([copy.deepcopy(scored([0.1 * i for i in range(n)])) for _ in range(episodes)]
                 for n, episodes in ((16, 50), (2, 1)))
    count = "document.querySelectorAll('*').length"
    page = page_of(a=few)
    least = page.evaluate(count)
    page = page_of(a=many)
    assert page.evaluate(count) - least == 49 * 2  # a folded line and its summary per episode
    page.locator("details.episode >> nth=9 >> summary").click()
    page.wait_for_function(f"{count} > {least + 49 * 2}")
    assert page.locator(".assistant").count() == 2


def test_an_error_names_the_line(tmp_path):
    (tmp_path / "a").write_text(lines([record("a", 1.0, "x")]) + "{")
    done = script("tests/experiments/report.py", "a", cwd=tmp_path)
    assert done.returncode == 1 and "a, line 2" in done.stderr and not done.stdout


# --- plot.py --------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def numbers_in_figure(path):
    """The y of everything that is drawn in colour at a round, {x: {y in %}}, by the ticks."""
    root = ElementTree.fromstring(Path(path).read_text())
    ticks, coloured = {"x": {}, "y": {}}, []
    for group in root.iter(f"{SVG}g"):
        axis = re.fullmatch(r"([xy])tick_\d+", group.get("id", ""))
        if axis:
            text = next(group.iter(f"{SVG}text")).text
            place = float(next(group.iter(f"{SVG}use")).get(axis[1]))
            ticks[axis[1]][float(text)] = place
    for use in root.iter(f"{SVG}use"):
        if "fill: #000000" not in use.get("style") and "stroke: #000000" not in use.get("style"):
            coloured.append((float(use.get("x")), float(use.get("y"))))
    (y0, top), (y100, bottom) = min(ticks["y"].items()), max(ticks["y"].items())
    found = {}
    for x, place in ticks["x"].items():
        found[x] = {round(y0 + (y - top) / (bottom - top) * (y100 - y0), 1)
                    for at, y in coloured if abs(at - place) < 0.01}
    return found, [text.text for text in root.iter(f"{SVG}text")]


def numbers_in_table(text):
    """{x: {numbers in the column}} of a Markdown table, and all its values without intervals."""
    head, _, *rows = [line.strip("|").split("|") for line in text.splitlines()]
    columns = {float(x): {float(y) for row in rows for y in re.findall(r"\d+\.\d", row[i])}
               for i, x in enumerate(head) if i}
    return columns, [re.match(r"[\d.]+", cell.strip())[0] for row in rows for cell in row[1:]
                     if cell.strip()], [row[0].strip() for row in rows]


def test_the_figure_shows_the_numbers_of_its_table():
    """That in the repo. If it fails, draw it again: RESULTS.md has the command."""
    results = Path(ROOT, "tests/experiments/RESULTS.md").read_text()
    table = results.partition("<!-- rounds -->\n")[2].partition("\n\n")[0].replace("*", "")
    want, values, curves = numbers_in_table(table)
    found, labels = numbers_in_figure(f"{ROOT}/tests/experiments/rounds.svg")
    assert found == want and len(values) >= 5
    assert all(labels.count(name) == 1 for name in curves)
    assert all(labels.count(value) == values.count(value) for value in values)


def test_a_table_is_plotted(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    table = ("| success | 0 | 1 | 2 |\n|---|---|---|---|\n| **a** | 10.0 | 50.5 [40.1, 60.9] | |\n"
             "| b | | 20.0 [10.3, 30.0] | 99.9 [99.0, 100.0] |\n")
    figure = ["tests/experiments/plot.py", "--table", "t", tmp_path / "t.svg"]
    drawn = set()
    for _ in range(2):
        succeed(*figure, stdin=f"<!-- s -->\n|x|\n\n<!-- t -->\n{table}\nmore | text")
        found, _ = numbers_in_figure(tmp_path / "t.svg")
        assert found == numbers_in_table(table.replace("*", ""))[0]
        drawn.add((tmp_path / "t.svg").read_bytes())
    assert len(drawn) == 1  # the same bytes
    for stdin, said in ("", "no table below"), (f"<!-- t -->\n{table}|c|1|x|2|", "a cell 'x'"):
        done = script(*figure, stdin=stdin)
        assert done.returncode == 1 and said in done.stderr


def test_the_metrics_of_both_sides_of_a_policy_are_in_one_plot(tmp_path, monkeypatch):
    """Each other metric has a plot of its own; a run without a metric is not in its legend."""
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    from experiments import plot
    rows = {"policy": [{"step": n, "chosen_change": n / 2, "rejected_change": -n} for n in (0, 1)],
            "critic": [{"step": 0, "loss": 3.0}]}
    for name, steps_of in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(lines([{"args": {}}, *steps_of]))
    drawn, legends, runs = {}, {}, [str(tmp_path / name) for name in rows]

    def keep(figure, *_, **__):
        for axes in figure.axes:
            drawn[axes.get_title()] = [(list(line.get_ydata()), line.get_linestyle(),
                                        line.get_color()) for line in axes.lines]
            legends[axes.get_title()] = [text.get_text() for text in axes.get_legend().texts]

    monkeypatch.setattr(figures.Figure, "savefig", keep)
    plot.main(plot.get_args(["m.png", "--runs", *runs]))
    assert drawn.keys() == legends.keys() == {"loss", plot.BOTH_SIDES}
    assert drawn[plot.BOTH_SIDES] == [([0, 0.5], "-", "C0"), ([0, -1], "--", "C0")]
    assert legends == {"loss": runs[1:], plot.BOTH_SIDES: runs[:1]}
