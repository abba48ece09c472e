"""Pages in a real Chromium: the same bytes each time, nothing reached, bounded failures; how alike pages look."""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import colbench
import model as M
from colbench import CACHE, PAGE, Renderer, RenderError, similarity
from conftest import ROOT, gone, lines, records, script
from test_endpoints import Server, chat
from utils import family

pytest.importorskip("playwright", reason="playwright is not installed (README, \"Frontend Design\")")
SHEET = os.path.join(CACHE, "tailwind.min.css")
if not any(map(shutil.which, colbench.BROWSERS)) or not os.path.exists(SHEET):
    pytest.skip("no Chromium, or no Tailwind style sheet (README, \"Frontend Design\")", allow_module_level=True)
REAL = os.path.join(ROOT, "..", "shared", "colbench", "frontend_tasks.jsonl")
LINK = '<link href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css" rel="stylesheet">'
PLAIN = f"""<html>{LINK}<body class="bg-gray-100"><header class="bg-green-500 text-white p-4"><h1 class="text-3xl">A Shop</h1>
</header><p class="p-4">We sell <b>shoes</b>.</p><img src="https://picsum.photos/id/48/100/50" alt="x"></body></html>"""


@pytest.fixture(scope="module")
def renderer():
    with Renderer() as r:
        yield r


@pytest.fixture(scope="module")
def tasks():
    if not os.path.exists(REAL):
        pytest.skip("no real ColBench tasks at ../shared/colbench/frontend_tasks.jsonl")
    return [json.loads(line) for line in open(REAL)]


def size(png):
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_page_has_its_style_and_placeholders_and_always_the_same_bytes(renderer):
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(renderer.render, [PLAIN, "<p>another</p>", PLAIN, PLAIN]))
    assert pages[0] == pages[2] == pages[3] and size(pages[0]["png"]) == (PAGE["width"], PAGE["height"])
    kinds = {(b["kind"], b["colour"], b["text"], *b["box"][2:]) for b in pages[0]["blocks"]}
    assert ("thing", "IMG", "", 100, 50) in kinds and pages[0]["colour"] == "rgb(243, 244, 246)"
    assert ("area", "rgb(16, 185, 129)", "", 1280, 68) in kinds
    with Renderer(workers=1) as other:
        assert other.render(PLAIN) == pages[0]


def test_scripts_do_not_run_and_text_is_text(renderer):
    page = renderer.render("<body><p>before</p><script>document.body.innerHTML = 'JS RAN'</script>"
                           "<noscript><p>no script</p></noscript><p onclick='x()'>é🙂</p></body>")
    assert [b["text"] for b in page["blocks"]] == ["before", "no script", "é🙂"]


def test_nothing_is_reached(renderer, tmp_path):
    """A listener on loopback sees no connection, whatever asks for one; files stay closed; the page goes nowhere."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret words")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        listener.settimeout(2)
        there = f"127.0.0.1:{listener.getsockname()[1]}"
        ask = "".join(t.replace("URL", f"http://{host}/x") for host in (there, there.replace("127.0.0.1", "localhost"))
                      for t in (
            '<link rel="preconnect" href="URL"><link rel="dns-prefetch" href="URL"><link rel="prefetch" href="URL">',
            '<link rel="preload" as="image" href="URL"><link rel="stylesheet" href="URL"><link rel="icon" href="URL">',
            '<style>@import "URL"; @font-face {font-family: f; src: url(URL)} p {font-family: f; background: url(URL)}'
            '</style><img src="URL"><img srcset="URL 2x"><iframe src="URL"></iframe><object data="URL"></object>',
            '<embed src="URL"><video src="URL" poster="URL"></video><audio src="URL"></audio><svg><image href="URL"/></svg>',
            '<script src="URL"></script><link rel="manifest" href="URL"><link rel="stylesheet" href="URL/tailwindx.js">',
            '<meta http-equiv="refresh" content="0;url=URL">'))
        page = renderer.render(f"<html><body>{ask}<p>still here</p><iframe src='file://{secret}'></iframe>"
                               f"<embed src='file://{secret}'><a ping='http://{there}/y' href='#'>z</a></body></html>")
        assert "still here" in [b["text"] for b in page["blocks"]]
        assert not any("secret" in b["text"] for b in page["blocks"])
        with pytest.raises(TimeoutError):
            listener.accept()


def test_meta_refresh_does_not_turn_for_ever(renderer):
    page = renderer.render('<meta http-equiv="refresh" content="0"><p>once</p>')
    assert [b["text"] for b in page["blocks"]] == ["once"]


@pytest.mark.parametrize("page, why", [
    ("", "no page"), (None, "no page"), ("x" * (PAGE["bytes"] + 1), "bytes"), ("<p>" + "é" * PAGE["bytes"], "bytes")])
def test_what_is_no_page_says_why(page, why, renderer):
    with pytest.raises(RenderError, match=why):
        renderer.render(page)


@pytest.mark.parametrize("page", [
    "<div style='height: 99999999px'>tall</div>", "<div style='width: 99999999px; height: 9999999px'>wide</div>",
    "<p>" + "many words " * 90_000 + "</p>", "<div>" * 50_000 + "deep", "<table>" * 3000 + "x",
    "<iframe srcdoc='<iframe srcdoc=1></iframe>'></iframe>" * 300,
    "<style>* {filter: blur(50px) drop-shadow(0 0 50px red)}</style>" + "<div>a</div>" * 3000,
    "<style>:root {--a: x x x x x x x x x x;" + "".join(
        f"--{b}: " + f"var(--{a}) " * 10 + ";" for a, b in zip("abcdefgh", "bcdefghi")) + "} p::before {content: var(--i)}</style><p>b",
    "<style>div {animation: a 1s infinite} @keyframes a {to {width: 9000px}}</style>" + "<div>a</div>" * 2000,
    "<svg>" + "<g id='a0'><rect width='9' height='9'/></g>" + "".join(
        f"<g id='a{i + 1}'>" + f"<use href='#a{i}'/>" * 10 + "</g>" for i in range(8)) + "<use href='#a8'/></svg>",
    "\0\1\2", "<frameset><frame src='x'></frameset>", "<html>" + "<b>" * 3000, "<img src='https://picsum.photos/99999/99999'>"],
    ids=range(14))
def test_hostile_pages_are_bounded_and_the_next_one_is_drawn(page, renderer):
    start = time.monotonic()
    try:
        assert size(renderer.render(page)["png"])[1] <= PAGE["tallest"]
    except RenderError as e:
        assert str(e)
    assert time.monotonic() - start < 3 * PAGE["seconds"]
    assert "We sell ." in [" ".join(b["text"].split()) for b in renderer.render(PLAIN)["blocks"]]


def test_hostile_neighbours_cost_a_page_nothing():
    """Pages that hang or end the browser, time after time, beside good ones: each good one gets its picture."""
    with Renderer(workers=2) as r:
        want, shoot = r.render(PLAIN), r.shoot

        async def shoots(opened, page):
            if page == "hostile":
                await opened[1].close()
                raise r.api.Error("it took the browser with it")
            return await shoot(opened, page)
        r.shoot = shoots
        def draw(page):
            try:
                return r.render(page)
            except RenderError as e:
                return str(e)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(draw, ["hostile", PLAIN] * 8))
        assert got == ["it took the browser with it", want] * 8


def test_a_browser_that_does_not_start_grades_nothing(tmp_path):
    (tmp_path / "chromium").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "chromium").chmod(0o755)
    done = script("colbench.py", "grade", "--browser", tmp_path / "chromium", stdin=[answered(PLAIN)])
    assert done.returncode == 1 and done.stdout == "" and "does not start" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def browsers():
    """The processes of our own browsers."""
    return {pid for pid in family() if b"--headless" in open(f"/proc/{pid}/cmdline", "rb").read()}


def test_a_killed_browser_loses_no_page():
    before = browsers()  # of the other tests
    with Renderer(workers=2) as r:
        want = r.render(PLAIN)
        for _ in range(2):
            for pid in browsers() - before:
                with contextlib.suppress(ProcessLookupError):  # it went with another
                    os.kill(pid, signal.SIGKILL)
            with ThreadPoolExecutor(3) as pool:
                assert all(page == want for page in pool.map(r.render, [PLAIN] * 3))
    assert r.open is None and browsers() <= before


def test_a_killed_grader_leaves_no_browser_behind(tmp_path):
    (tmp_path / "in").write_text(lines(answered(PLAIN.replace("shoes", str(i))) for i in range(500)))
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen([sys.executable, "colbench.py", "grade"], cwd=ROOT, stdin=open(tmp_path / "in"),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.readline()
        its = family(process.pid)
        assert len(its) > 3
        process.send_signal(how)
        _, said = process.communicate(timeout=15)
        assert process.returncode and "Traceback" not in said
        gone(its, seconds=3)


def test_a_part_of_the_sheet_draws_the_real_pages_as_the_whole_does(renderer, tasks):
    part, whole = renderer.sheet, open(SHEET, encoding="utf-8").read()
    try:
        for task in tasks[:12]:
            used = renderer.render(task["ground_truth"])
            assert len(part(task["ground_truth"])) < len(whole) / 10
            renderer.sheet = lambda page: whole
            assert renderer.render(task["ground_truth"]) == used
            renderer.sheet = part
    finally:
        renderer.sheet = part


# --- how alike --------------------------------------------------------------------------------------------------------

def without_a_section(page):
    """The page less the last part of some kind that is neither empty nor most of it; None where there is none."""
    for tag in ("section", "footer", "nav", "header", "li", "p", "button"):
        for part in reversed(list(re.finditer(rf"<{tag}\b.*?</{tag}>", page, re.S))):
            if re.sub("<.*?>", "", part[0]).strip() and len(part[0]) < 0.5 * len(page[page.index("<body"):]):
                return page[:part.start()] + page[part.end():]


def test_similarity_orders_the_real_pages(renderer, tasks):
    """Itself = 1 > less a section > another page of the theme > an empty one, in at least 95 % of the pages."""
    theme = lambda t: t["problem_description"].split(":")[0]
    themes = Counter(map(theme, tasks))
    with ThreadPoolExecutor(2) as pool:
        pages = list(pool.map(lambda t: renderer.render(t["ground_truth"]), tasks))
    empty, verdicts = renderer.render("<html><body></body></html>"), []
    for i, task in enumerate(tasks):
        if (less := without_a_section(task["ground_truth"])) and (i % 3 == 0 or themes[theme(task)] > 1):
            other = next((j for j, t in enumerate(tasks) if j != i and theme(t) == theme(task)), i - 1)
            scores = [similarity(pages[i], page) for page in (pages[i], renderer.render(less), pages[other], empty)]
            verdicts.append(scores[0] == 1 and scores == sorted(set(scores), reverse=True))
    assert len(verdicts) > 50 and sum(verdicts) >= 0.95 * len(verdicts), (sum(verdicts), len(verdicts))


def test_similarity_is_symmetric_bounded_and_falls_with_each_difference(renderer):
    page = lambda colour="green", text="A Shop", extra="": renderer.render(PLAIN.replace("green", colour).replace(
        "A Shop", text).replace("</body>", extra + "</body>"))
    same, blue, words, more = page(), page("blue"), page(text="My Garden"), page(extra="<p>more</p>" * 9)
    assert similarity(same, same) == 1
    for other in (blue, words, more, page("red", "My Garden", "<p>more</p>" * 9)):
        assert similarity(same, other) == pytest.approx(similarity(other, same)) and 0 <= similarity(same, other) < 1
    both = page("blue", "My Garden")
    assert similarity(same, both) < min(similarity(same, blue), similarity(same, words))
    nothing = renderer.render("<html></html>")
    assert similarity(nothing, nothing) == 1 and similarity(same, nothing) < 0.12


# --- grading ----------------------------------------------------------------------------------------------------------

def answered(page):
    return {"task": {"problem_description": "a shop", "ground_truth": PLAIN}, "answer": page}


def test_grade_draws_the_last_page_of_an_answer():
    blue = PLAIN.replace("green", "blue")
    records_in = [answered(x) for x in (PLAIN, f"first {blue} then\n```html\n{PLAIN}\n```", blue, "I have no page", None,
                                        "<body><p>A Shop</p></body>", "<html><body>cut of")]
    done = script("colbench.py", "grade", "--skip_bad", 1, stdin=records_in)
    assert done.returncode == 0, done.stderr
    got = records(done.stdout)
    same, last, other, none, some, cut = (r["reward"] for r in got)  # null is no answer
    assert same == last == 1 > other > some > none == cut == 0
    assert {r["reward_by"] for r in got} == {"blocks"} and got[3]["failure"] == "no page" and "2 not drawn" in done.stderr
    assert [{k: v for k, v in r.items() if k in ("task", "answer")} for r in got] == [
        r for r in records_in if r["answer"] is not None]


def test_grade_takes_the_published_frontend_tasks(tasks):
    done = script("colbench.py", "grade", "--reference", 1, stdin=tasks[:5])
    assert [r["reward"] for r in records(done.stdout)] == [1] * 5, done.stderr


def test_check_drops_what_cannot_be_drawn(tasks):
    bad = {"problem_description": "a", "ground_truth": "<html><body>" + "x" * PAGE["bytes"]}
    empty = {"problem_description": "b", "ground_truth": "<html><body></body></html>"}
    done = script("colbench.py", "check", stdin=[*tasks[:3], bad, empty])
    assert done.returncode == 0 and [r["task"] for r in records(done.stdout)] == [*tasks[:3], empty]
    assert "line 4: dropped: can't be drawn" in done.stderr and "line 5: kept: nothing is on it" in done.stderr
    done = script("colbench.py", "grade", stdin=[{"task": bad, "answer": PLAIN}, answered(PLAIN)])
    one, other = records(done.stdout)
    assert one["reward"] == 0 and "its reference can't be drawn" in one["failure"] and other["reward"] == 1


def test_kinds_are_not_mixed():
    backend = {"task": {"problem_description": "f", "ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}},
               "answer": "x"}
    for first, second in ((answered(PLAIN), backend), (backend, answered(PLAIN))):
        done = script("colbench.py", "grade", stdin=[first, second])
        assert done.returncode == 1 and "of another kind" in done.stderr and "Traceback" not in done.stderr
    del backend["task"]["test_cases"]
    done = script("colbench.py", "grade", stdin=[backend])
    assert done.returncode == 1 and "stdin, line 1: no 'task.test_cases'" in done.stderr


@pytest.mark.parametrize("resize", ["official", "letterbox"])
def test_clip_is_the_cosine_of_the_real_classes_embeddings(resize, tmp_path, renderer):
    """A tiny CLIP of the real class with random weights; the oracle is transformers' whole CLIPModel."""
    import io

    from PIL import Image
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel
    torch.manual_seed(0)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=16)
    model = CLIPModel(CLIPConfig(vision_config={**small, "image_size": 224, "patch_size": 32},
                                 text_config={**small, "vocab_size": 99}, projection_dim=16)).eval()
    model.save_pretrained(tmp_path)
    CLIPImageProcessorPil().save_pretrained(tmp_path)
    pages = [PLAIN, PLAIN.replace("</body>", "<p class='bg-red-500 h-64'>a tall one</p>" * 9 + "</body>"), "none"]
    done = script("colbench.py", "grade", "--clip", tmp_path, "--resize", resize, stdin=map(answered, pages))
    assert done.returncode == 0, done.stderr
    got = records(done.stdout)
    pictures = [Image.open(io.BytesIO(renderer.render(p)["png"])).convert("RGB") for p in pages[:2]]
    if resize == "letterbox":
        assert pictures[1].height > pictures[1].width
        for i, p in enumerate(pictures):
            side = max(p.size)
            pictures[i] = Image.new("RGB", (side, side), (255, 255, 255))
            pictures[i].paste(p, ((side - p.width) // 2, (side - p.height) // 2))
    with torch.no_grad():
        features = model.get_image_features(CLIPImageProcessorPil()(pictures, return_tensors="pt")["pixel_values"])
    features = getattr(features, "pooler_output", features)
    want = torch.cosine_similarity(features[0], features[1], dim=0).item()
    assert got[0]["reward"] == pytest.approx(1, abs=1e-5) and got[1]["reward"] == pytest.approx(max(0, want), abs=1e-5)
    assert abs(want) < 0.9999 and got[2]["reward"] == 0
    assert {r["reward_by"] for r in got} == {"clip" + " letterbox" * (resize == "letterbox")}


@pytest.mark.parametrize("flags, message", [
    (["--browser", "/nowhere/chromium"], "no such program"), (["--clip", "/nowhere"], "--clip /nowhere")])
def test_what_is_missing_is_said_in_one_line(flags, message):
    done = script("colbench.py", "grade", *flags, stdin=[answered(PLAIN)])
    assert done.returncode == 1 and message in done.stderr and done.stderr.startswith("error: "), done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- episodes ---------------------------------------------------------------------------------------------------------

BLUE = PLAIN.replace("green", "blue")


def test_episodes_are_pages_shown_to_a_human_who_sees_both(tiny_dir, tmp_path, renderer):
    """The engine's server answers with pages, the human's with what it was shown; the last page shown is graded."""
    import base64
    tokenizer = M.open_directory(tiny_dir)[1]
    said_by_turn = ["I have no page yet", f"Let me see. OUTPUT: {BLUE}", f"OUTPUT: the same: {PLAIN}", "Good luck"]
    drawn = {name: renderer.render(page)["png"] for name, page in (("blue", BLUE), ("plain", PLAIN))}

    def agent(path, body):
        turn = tokenizer.decode(body["prompt"]).count("<|assistant|>") - 1
        ids = M.plain_ids(tokenizer, said_by_turn[turn]) + body["stop_token_ids"][:1]
        return {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [{
            "index": 0, "text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": {
                "token_logprobs": [-1.0] * len(ids), "tokens": [], "top_logprobs": [], "text_offset": []}}]}

    def human(path, body):
        text, *pictures = body["messages"][0]["content"]
        png = [base64.b64decode(p["image_url"]["url"].removeprefix("data:image/png;base64,")) for p in pictures]
        assert "a shop" in text["text"] and "<html" not in text["text"] and png[1] == drawn["plain"]
        return chat(("blue " if png[0] == drawn["blue"] else "the same ") + "x" * 2000)
    servers = Server(agent), Server(human, trouble=0.3)
    tasks_in = [{"problem_description": "a shop", "ground_truth": PLAIN}]
    for turns, reward in ((4, 1), (2, None), (1, 0)):
        flags = ["--engine", servers[0].url, "--human", servers[1].url, "--max_turns", turns, "--candidates", 2]
        done = script("collect.py", "--model", tiny_dir, *flags, "--timeout", 3, stdin=tasks_in)
        assert done.returncode == 0, done.stderr
        (r,) = records(done.stdout)
        history = r["dialogue_history"]
        assert r["task"]["kind"] == "frontend" and r["reward_by"] == "blocks" and len(history) == 2 * turns
        assert "no scripts" in history[0]["content"] and history[0]["content"].endswith("a shop")
        if turns == 4:
            assert history[2]["content"] == "I can't see your page: no page."
            assert [len(m["content"]) for m in history[4:7:2]] == [1000, 1000]
            assert history[4]["content"].startswith("blue") and history[6]["content"].startswith("the same")
            assert r["answer"] == PLAIN and r["reward"] == 1
        else:
            assert r["answer"] == (BLUE if turns == 2 else "") and r["reward"] < 1 and ("failure" in r) == (turns == 1)
    assert len(servers[1].seen) >= 2  # one that draws nothing asks nobody

    # the text critic reads the reference page, and the policy trains on what it ranked
    other = {**r, "sample": 1, "reward": 0.9}
    flags = ["--model", tiny_dir, "--pairs", "all", "--margin", 0.1, "--held_out", 0, "--epochs", 1]
    done = script("train_critic.py", *flags, "--out", tmp_path / "critic", stdin=[r, other])
    assert done.returncode == 0, done.stderr
    assert all("advantage" in c for x in records(done.stdout) for c in x["dialogue_history"][1]["candidates"])
    assert script("evaluate.py", stdin=done.stdout).returncode == 0


def test_published_episodes_get_candidates_without_a_browser_or_a_human(tiny_dir):
    episode = {"task": {"problem_description": "a shop", "ground_truth": PLAIN}, "answer": BLUE, "reward": 0.8,
               "dialogue_history": [{"role": "user", "content": "a shop"}, {"role": "assistant", "content": BLUE}]}
    flags = ["--model", tiny_dir, "--candidates", 2, "--max_tokens", 5, "--browser", "/nowhere/chromium"]
    done = script("collect.py", *flags, stdin=[episode, episode])
    assert done.returncode == 0, done.stderr
    got = records(done.stdout)
    assert sorted(r["sample"] for r in got) == [0, 1] and all(r["reward"] == 0.8 for r in got)
    assert all(len(r["dialogue_history"][1]["candidates"]) == 2 for r in got)


def test_the_scripted_human_knows_no_pages(tiny_dir):
    done = script("collect.py", "--model", tiny_dir, stdin=[{"problem_description": "a shop", "ground_truth": PLAIN}])
    assert done.returncode == 1 and done.stdout == "" and "--human http" in done.stderr and "Traceback" not in done.stderr
