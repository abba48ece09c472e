"""The report of episodes in a real Chromium: what it shows, and that texts stay texts."""
import os
import shutil

import pytest

import colbench
from conftest import lines, script

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
    done = script("tests/experiments/report.py", *files)
    assert done.returncode == 0, done.stderr
    (tmp_path / "report.html").write_text(done.stdout, encoding="utf-8")
    tab.asked.clear()
    tab.goto(f"file://{tmp_path}/report.html")
    assert len(tab.asked) == 1  # itself alone


def texts(tab, where):
    return tab.locator(where).all_text_contents()


def episode(i, reward, said="which rate?", **more):
    task = {"id": f"t{i}", "problem_description": f"write f{i}",
            "ground_truth": f"def f{i}(): return {i}", "test_cases": {"a": f"f{i}()"}}
    history = [{"role": "user", "content": f"write f{i}"},
               {"role": "assistant", "content": said, **more}]
    return {"task": task, "answer": f"def f{i}(): return 0", "reward": reward,
            "tests": {"a": "pass" if reward == 1 else "wrong value"}, "dialogue_history": history}


def test_the_report_shows_conversations_candidates_and_verdicts_side_by_side(tmp_path, tab):
    candidates = [{"output": f"candidate {a}", "token_ids": [1], "advantage": a}
                  for a in (-0.5, 0.25, 0.0)]
    first = episode(0, 0.0, output="hm. OUTPUT: which rate?", advantage=0.5, candidates=candidates)
    base = [first, episode(1, 0.0), {**episode(1, 1.0, said="the other sample"), "sample": 1}]
    report(tmp_path, tab, base=base, sweet=[episode(0, 1.0), episode(2, 1.0)])
    assert texts(tab, LISTED) == ["write f0", "write f1", "write f2"]
    assert texts(tab, ".task > summary span") == ["0", "100", "50", "-", "-", "100"]
    assert texts(tab, f"{OPEN} h3") == ["t0", "hidden reference", "base", "sweet"]
    assert texts(tab, f"{OPEN} .episode > summary") == [
        "episode 0: reward 0.000", "episode 0: reward 1.000"]
    assert texts(tab, f"{OPEN} .pass, {OPEN} .fail") == ["a: wrong value", "a: pass"]
    assert texts(tab, f"{OPEN} pre").count("def f0(): return 0") == 3  # the reference, two answers
    assert "hm. OUTPUT: which rate?" in texts(tab, f"{OPEN} pre")  # what the model wrote
    tab.get_by_text("3 candidates").click()
    assert texts(tab, f"{OPEN} details[open] .advantage") == ["+0.500", "+0.250", "+0.000", "-0.500"]
    tab.locator(LISTED).nth(1).click()
    assert texts(tab, f"{OPEN} h3") == ["t1", "hidden reference", "base"]
    other = tab.get_by_text("the other sample")
    assert not other.is_visible()
    tab.get_by_text("episode 1: reward 1.000").click()
    assert other.is_visible()


def test_what_a_model_wrote_is_never_markup(tmp_path, tab):
    candidates = [{"output": HOSTILE, "token_ids": [1], "role": '"><img src=x>'}]
    r = episode(0, 0.5, said=HOSTILE, advantage=0.1, candidates=candidates)
    r = {**r, "answer": HOSTILE, "tests": {HOSTILE: HOSTILE}, "failure": HOSTILE}
    r["task"] |= {"problem_description": HOSTILE, "ground_truth": HOSTILE, "id": HOSTILE}
    report(tmp_path, tab, **{"base": [r]})
    tab.get_by_text("1 candidates").click()
    assert tab.title() == "Episodes" and tab.locator("img, script").count() == 0
    assert texts(tab, LISTED) == [HOSTILE[:90]] and texts(tab, f"{OPEN} pre").count(HOSTILE) >= 5


def test_pages_are_shown_as_pictures(tmp_path, tab):
    if not os.path.exists(os.path.join(colbench.CACHE, "tailwind.min.css")):
        pytest.skip("no Tailwind style sheet (MANUAL.md, \"Frontend Design\")")
    task = {"id": "a", "kind": "frontend", "problem_description": "a shop",
            "ground_truth": "<html><h1>A Shop</h1></html>"}
    play = lambda page, **more: [{"task": task, "answer": page, "reward": 0.5, "dialogue_history": [
        {"role": "user", "content": "a shop"}, {"role": "assistant", "content": page}], **more}]
    report(tmp_path, tab, base=play("<html><h1>My Shop</h1></html>"),
           rft=play("<html><h1>A Shop</h1></html>"),
           none=play("", failure="no page"))
    pictures = tab.locator(f"{OPEN} img")
    sources = pictures.evaluate_all("all => all.map(e => [e.src, e.naturalWidth])")
    assert [width for _, width in sources] == [480] * 3
    reference, base, rft = (src for src, _ in sources)
    assert reference == rft != base and texts(tab, ".fail") == ["no page"]
