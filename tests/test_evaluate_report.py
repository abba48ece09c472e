"""The report of episodes in a real Chromium: what it shows, and that texts stay texts."""
import os
import shutil

import pytest

import colbench
from conftest import dialogue, lines, succeed

NO_BROWSER = "no playwright or no Chromium (MANUAL.md, \"Frontend Design\")"
sync_api = pytest.importorskip("playwright.sync_api", reason=NO_BROWSER)
BROWSER = next(filter(None, map(shutil.which, colbench.BROWSERS)), None)
if not BROWSER:
    pytest.skip(NO_BROWSER, allow_module_level=True)
LISTED = ".task > summary b"  # the names of the tasks in the list
OPEN = ".task[open] main"  # what is shown beside it
HOSTILE = ("</script><script>document.title = 'owned'</script></template>"
           "<img src=x onerror=\"document.title = 'owned'\"><!--")


@pytest.fixture(scope="module")
def tab():
    with sync_api.sync_playwright() as p:
        flags = ["--no-sandbox"] * (os.geteuid() == 0)
        page = p.chromium.launch(executable_path=BROWSER, args=flags).new_page()
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
