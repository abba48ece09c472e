"""collect.py alone: what it samples, --resume, bad input."""
import asyncio
import copy
import json
import shutil
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

import collect
import model as M
from colbench import ANSWER, agent_messages
from conftest import (HUMAN, PLAY, actions, complaint, dialogue, key_of, lines, nucleus, records,
                      script, succeed)
from train_critic import advantage


def play(model, stdin, *flags, **how):
    return script("collect.py", "--model", model, *HUMAN, *flags, stdin=stdin, **how)


# --- what it samples ------------------------------------------------------------------------------

def tokens_of(record):
    """The token ids of all messages and candidates."""
    return [[a["token_ids"] for a in (m, *m["candidates"])] for m in agent_messages(record)]


def test_a_draw_does_not_depend_on_its_company(tasks, episodes, tiny_dir):
    """Other batches, other tasks beside it, a dialogue that exists and only gets candidates."""
    of_one = [r for r in episodes if r["task"]["id"] == tasks[1]["task"]["id"]]
    want = {key_of(r): tokens_of(r) for r in of_one}
    drawn = [tuple(ids) for r in episodes for of in tokens_of(r) for ids in of]
    assert len(want) == 2 and len(set(drawn)) == len(drawn)  # each is a draw
    for m in chain(*map(agent_messages, of_one)):
        del m["candidates"]
    dialogues = {key_of(r): copy.deepcopy(r["dialogue_history"]) for r in of_one}
    small = ["--concurrency", 1, "--max_batch_tokens", 100]
    for given in (tasks[1:2], of_one):
        got = records(play(tiny_dir, given, *PLAY, *small).stdout)
        assert {key_of(r): tokens_of(r) for r in got} == want
    for r in got:  # candidates are all that is new
        for m in agent_messages(r):
            del m["candidates"]
        assert r["dialogue_history"] == dialogues[key_of(r)]


def test_actions_that_max_tokens_cut_are_marked_and_counted(tasks, tiny_dir):
    """An untrained model ends a message after some hundred tokens."""
    flags = ["--max_turns", 2, "--candidates", 3, "--max_tokens", 100]
    done, end = play(tiny_dir, tasks, *flags), M.end_of_turn(M.find_model(tiny_dir)[1])[-1]
    drawn = list(chain(*map(actions, records(done.stdout))))
    for action in drawn:
        assert len(action["token_ids"]) <= 100
        assert action.get("cut", False) == (action["token_ids"][-1] != end)
    share = 100 * sum("cut" in action for action in drawn) / len(drawn)
    assert f": {share:.1f} % of actions cut at --max_tokens 100" in done.stderr.splitlines()[-1]
    assert 0 < share < 100


def players(tiny_dir, *flags):
    args = collect.get_args(["--model", tiny_dir, *map(str, flags)])
    return asyncio.run(collect.Players(args).load())


def prompt_of(players, text):
    return M.render(players.tokenizer, dialogue(text))


def sample(players, prompt, draws):
    async def ask():
        return await players.engine(prompt, draws)
    return asyncio.run(ask())


@pytest.mark.parametrize("temperature, top_p", [(1, 1), (0.5, 0.7), (0.5, 1e-6)])
def test_the_sampler_draws_from_the_models_distribution(temperature, top_p, tiny_dir):
    """Each token comes up as often as its log-prob says, none from outside the nucleus ever."""
    p = players(tiny_dir, "--max_tokens", 1, "--temperature", temperature, "--top_p", top_p)
    prompt, n = prompt_of(p, "write f"), 6000
    lm, _ = M.load_lm(tiny_dir, "cpu")
    with torch.no_grad():
        logits = lm(torch.tensor([prompt])).logits[:, -1].double()
    logps = nucleus((logits / temperature).log_softmax(-1), top_p)[0]
    seen = torch.zeros(len(logps))
    for (token,), (logp,) in sample(p, prompt, [(0, j) for j in range(n)]):
        assert logp == pytest.approx(logps[token].item(), abs=1e-4)
        seen[token] += 1
    kept = logps.exp() > 0
    expected = n * logps.exp()
    assert seen[~kept].sum() == 0 and (kept.sum() == 1) == (top_p < 0.1)
    assert ((seen - expected)[kept].abs() < 5 * expected[kept] ** 0.5 + 1).all()
    greedy = players(tiny_dir, "--max_tokens", 1, "--temperature", 0)
    drawn = sample(greedy, prompt, [(0, 0), (0, 1)])
    assert [ids for ids, _ in drawn] == [[logits.argmax().item()]] * 2


@pytest.mark.parametrize("ref_reads", ["hidden", pytest.param("agent", marks=pytest.mark.full)])
def test_best_of_sends_the_critics_favourite(ref_reads, tasks, rewarded, tiny_dir, tmp_path):
    critic = str(tmp_path / "c")
    flags = ["--model", tiny_dir, "--out", critic, "--lr", 1e-3, "--held_out", 0, "--epochs", 2]
    succeed("train_critic.py", *flags, "--ref_context", ref_reads, stdin=rewarded)
    p = players(tiny_dir, "--best_of", 5, "--critic", critic, "--max_tokens", 12)
    task, favourites = tasks[0]["task"], []
    history = dialogue(task["problem_description"])
    hidden = f"Hidden reference:\n{task['ground_truth']}\n\n{history[0]['content']}"
    pi, pi_ref = (M.load(path)[0] for path in (critic, tiny_dir))
    prompts = {"agent": prompt_of(p, history[0]["content"]), "hidden": prompt_of(p, hidden)}
    for turn in range(6):
        key = (0, task["id"], 0, turn)
        drawn = sample(p, prompts["agent"], [(*key, j) for j in range(5)])
        logps, ref_logps = (
            M.score(model, [(M.packed(prompts[reads]), M.packed(ids)) for ids, _ in drawn], 4096)
            for model, reads in ((pi, "hidden"), (pi_ref, ref_reads)))
        scores = [advantage(a, b).item() for a, b in zip(logps, ref_logps)]
        for p.args.logprob_weight in (0, 0.1):
            values = [score + p.args.logprob_weight * sum(logprobs)
                      for score, (_, logprobs) in zip(scores, drawn)]
            favourites.append(values.index(max(values)))
            sent = asyncio.run(p.act(task, history, key, 0))
            assert sent["token_ids"] == drawn[favourites[-1]][0]
    assert len(set(favourites)) > 1 and favourites[::2] != favourites[1::2]
    complaint(play(tiny_dir, tasks, "--best_of", 2, "--critic", "no/critic"), "no/critic")


def test_answered_says_whether_the_last_message_has_the_marker(episodes, tiny_dir):
    """Played to the last turn without an answer of its own, or given as a dialogue."""
    assert all(r["answered"] == (ANSWER in agent_messages(r)[-1]["content"]) for r in episodes)
    for r, ended in zip(episodes, ("", ANSWER + "\ndef f(): return 1")):
        del r["answered"]
        r["dialogue_history"][-1] |= {"output": ended, "content": ended}
    again = records(play(tiny_dir, episodes[:2], *PLAY, "--candidates", 1).stdout)
    assert sorted(r["answered"] for r in again) == [False, True]


# --- --resume -------------------------------------------------------------------------------------

@pytest.mark.parametrize("cut", [lambda line: "", lambda line: line[:len(line) // 2]])
def test_only_a_cut_last_line_of_a_file_is_dropped(cut, tasks, collected, tiny_dir, tmp_path):
    file, of_task = tmp_path / "all.jsonl", f'"id": "{tasks[0]["task"]["id"]}"'
    first, last = (line for line in collected.splitlines(True) if of_task in line)
    for others in ("", first):
        file.write_text(others + cut(last))
        done = play(tiny_dir, tasks[:1], *PLAY, "--resume", file)
        assert file.read_text() == others
        assert len(records(done.stdout)) + others.count("\n") == 2
    file.write_text(first + last)
    done = play(tiny_dir, tasks[:1], *PLAY, "--resume", file, "-k", 3, "--human", "fixed:no")
    assert len(records(done.stdout)) == 1 and file.read_text() == first + last
    assert "(2 done before)" in done.stderr


def test_a_file_of_something_else_is_not_touched(tasks, episodes, tiny_dir, tmp_path):
    del episodes[1]["task"]["ground_truth"]
    file = tmp_path / "diary.txt"
    for text, line in (("a diary\nof mine", 1), ("a diary", 1), (lines(episodes), 2)):
        file.write_text(text)
        error = complaint(play(tiny_dir, tasks, *PLAY, "--resume", file))
        assert error.startswith(f"error: {file}, line {line}") and file.read_text() == text


def test_a_file_is_resumed_with_the_flags_and_weights_that_played_it(tasks, collected, tiny_dir,
                                                                          tmp_path):
    base, file = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "all.jsonl"
    file.write_text(collected)
    for flag, value, had in (("max_turns", 2, 4), ("temperature", 0.5, 1.0), ("seed", 4, 3)):
        error = complaint(play(tiny_dir, tasks, *PLAY, "--resume", file, "--" + flag, value))
        assert f"--resume {file} holds episodes with {flag} {had}, not {value}: " in error
    judged = [{**r, "meta": {**r["meta"], "critic": "runs/one"}} for r in records(collected)]
    (tmp_path / "judged.jsonl").write_text(lines(judged))
    error = complaint(play(tiny_dir, tasks, *PLAY, "--resume", tmp_path / "judged.jsonl"))
    assert "holds episodes with critic runs/one, not None: " in error
    state = load_file(base / "model.safetensors")
    save_file({k: v * 1.001 for k, v in state.items()}, base / "model.safetensors")
    error = complaint(play(base, tasks, *PLAY, "--resume", file))
    assert f"model_weights {M.weights_digest(tiny_dir)}, not {M.weights_digest(str(base))}" in error
    shutil.copy(f"{tiny_dir}/model.safetensors", base)  # the same again
    file.write_text(lines(records(collected)[1:]))
    assert len(records(play(base, tasks, *PLAY, "--resume", file).stdout)) == 1


# --- records that were played before --------------------------------------------------------------

def test_a_record_without_its_dialogue_is_played_and_graded_anew(tasks, tiny_dir):
    old = [{**r, "reward": 1.0, "tests": {"test1": "pass"}, "failure": "old"} for r in tasks]
    played = play(tiny_dir, old, "--max_tokens", 5, "--max_turns", 2).stdout
    new = records(succeed("colbench.py", "grade", stdin=played).stdout)
    assert len(new) == len(tasks) and {r["reward"] for r in new} == {0.0}
    assert all(len(r["tests"]) == 10 and "failure" not in r for r in new)


def test_new_candidates_leave_what_is_known_of_a_dialogue(episodes, tiny_dir):
    """Its settings and its reward; the candidates' settings stand beside them."""
    known, bare = {**episodes[0], "reward": 0.5}, episodes[1]
    known["meta"] = {"seed": 77}
    del bare["meta"]
    flags = ["--candidates", 2, "--max_tokens", 5, "--seed", 8]
    got = {r["sample"]: r for r in records(play(tiny_dir, [known, bare], *flags).stdout)}
    first, second = got[known["sample"]], got[bare["sample"]]
    assert (first["meta"]["seed"], first["reward"]) == (77, 0.5)
    assert "seed" not in second["meta"] and "reward" not in second
    assert all(r["meta"]["candidates"]["seed"] == 8 for r in (first, second))


# --- bad input ------------------------------------------------------------------------------------

def test_a_conversation_longer_than_the_models_context_is_no_episode(tasks, tiny_dir, tmp_path):
    config = shutil.copytree(tiny_dir, tmp_path / "base") / "config.json"
    shorter = {**json.loads(config.read_text()), "max_position_embeddings": 10}
    config.write_text(json.dumps(shorter))
    done = play(config.parent, tasks[:1], "--max_tokens", 5, "--max_turns", 2)
    assert done.returncode == 1 and not done.stdout
    assert "tokens, and the model takes 10" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def unloadable(tiny_dir, tmp_path_factory):
    """The tiny model without a weight, so that what is told was told before it was loaded."""
    base = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("unloadable") / "m")
    save_file({"no weight": torch.zeros(1)}, base / "model.safetensors")
    return base


TASK = {"problem_description": "p", "ground_truth": "def f(): return 1",
        "test_cases": {"test1": "f()"}}
BARE, PLAYED = lines([TASK]), lines([{"task": TASK, "dialogue_history": dialogue("p")}])
NOBODY = "http://127.0.0.1:9"
THOUGHT = lines([{"task": {**TASK, "id": "a"}, "dialogue_history": dialogue("p", "q"),
                  "meta": {"thinking": 1}}])


@pytest.mark.parametrize("stdin, flags, message", [
    ("", [], "stdin is empty"),
    (PLAYED, [], "a dialogue already"),
    ("", ["--model", "no/such/dir"], "no model at 'no/such/dir'"),
    ("", ["--best_of", 2], "--critic"),
    (BARE, [], "the weights in"),
    (BARE, ["--human", ""], "--human is missing: give the http://host:port/v1"),
    (BARE, ["--human", "me.py"], "error: me.py: No such file"),
    (BARE, ["--human", NOBODY], f"error: {NOBODY} lists no models"),
    (BARE, ["--engine", NOBODY], f"error: {NOBODY} lists no models"),
    (BARE, ["--human", collect.__file__], "collect.py defines no reply()"),
    (THOUGHT, ["--candidates", 2], "the dialogue of task a was played with --thinking 1"),
    ("", ["--top_p", 0], "argument --top_p: 0 is below 1e-06"),
    ("", ["--candidates_share", 1.5], "--candidates_share: 1.5 is above 1"),
    ("", ["--human_params", "[1"], "--human_params is no JSON object"),
    ("", ["--max_turns", 0], "argument --max_turns: 0 is below 1"),
    ("", ["--temperature", "nan"], "argument --temperature: nan is below 0")])
def test_collect_complains(stdin, flags, message, unloadable):
    complaint(play(unloadable, stdin, *flags), message)


def test_a_bad_line_later_on_loses_nothing_before_it(tasks, tiny_dir):
    other = lines([{"task": {**tasks[0]["task"], "ground_truth": "def f(x): return x"}}])
    for bad, error in (("{\n", "stdin, line 3: not JSON"), (other, "two unlike tasks of stdin")):
        done = play(tiny_dir, lines(tasks[:2]) + bad, "--max_tokens", 5, "--max_turns", 2)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"error: {error}")
        assert len(records(done.stdout)) == 2


# --- the human ------------------------------------------------------------------------------------

WRITTEN = {
    "def reply(task, history):\n    return f'{len(history)} {task[\"id\"]}'": None,
    "import asyncio\nasync def reply(task, history):\n    await asyncio.sleep(0.01)\n"
    "    return f'{len(history)} {task[\"id\"]}'": None,
    "def reply(task, history):\n    pass": "reply() gives nothing",
    "def reply(task, history):\n    return 5": "the human's reply is no text: 5",
    "def reply(task, history):\n    raise ValueError('no such task')": "no such task"}


@pytest.mark.parametrize("code", WRITTEN)
def test_a_human_is_a_file_with_a_function(code, tasks, tiny_dir, tmp_path):
    (tmp_path / "human.py").write_text(code)
    flags = ["--human", tmp_path / "human.py", "--max_tokens", 5, "--max_turns", 3]
    done = play(tiny_dir, tasks, *flags)
    got, why = records(done.stdout), WRITTEN[code]
    if why:
        assert not got and f"sample 0 failed: {why}" in done.stderr and done.returncode == 1
        return
    assert len(got) == len(tasks)
    for r in got:
        said = [m["content"] for m in r["dialogue_history"][2::2]]
        assert said == [f"{n} {r['task']['id']}" for n in (2, 4)]


def test_a_template_without_a_generation_prompt_is_refused(tasks, tiny_dir, tmp_path):
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    chatml = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
              "{% endfor %}")
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    mistral = ("{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
               "[/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}")
    thinks = chatml.replace("\n{{", "\n{{ '<think></think>' if m['role'] == 'assistant' }}{{")
    tokenizer = M.find_model(str(base))[1]
    for template, good in ((chatml, False), (chatml + prompt, True), (mistral, True),
                           (thinks + prompt, True)):
        tokenizer.chat_template = template
        if good:
            M.check_generation_prompt(tokenizer)
            continue
        tokenizer.save_pretrained(base)
        error = complaint(play(base, tasks))
        assert "has no generation prompt" in error and "<|im_start|>assistant" in error
