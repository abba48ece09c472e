"""collect.py alone: what it samples, --resume, bad input."""
import asyncio
import json
import random
import shutil
import statistics
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import colbench
import collect
import evaluate
import model as M
from colbench import ANSWER, agent_messages
from conftest import (PLAY, actions, agent_texts, change_json, complaint, dialogue, key_of, lines,
                      nucleus, records, script, stdin_of, succeed, turns_of)
from train_critic import advantage


# --- what it samples ------------------------------------------------------------------------------

def tokens_of(record):
    """The token ids of all messages and candidates."""
    return [[a["token_ids"] for a in (m, *m["candidates"])] for m in agent_messages(record)]


def test_a_draw_does_not_depend_on_its_company(tasks, episodes, playing):
    """Other batches, other tasks beside it, a dialogue that exists and only gets candidates."""
    of_one = [r for r in episodes if r["task"]["id"] == tasks[1]["task"]["id"]]
    want = {key_of(r): tokens_of(r) for r in of_one}
    drawn = [tuple(ids) for r in episodes for of in tokens_of(r) for ids in of]
    assert len(want) == 2 and len(set(drawn)) == len(drawn)  # each is a draw
    for m in chain(*map(agent_messages, of_one)):
        del m["candidates"]
    for given in (tasks[1:2], of_one):
        got, _, _ = playing(given, *PLAY, "--concurrency", 1, "--max_batch_tokens", 100)
        assert {key_of(r): tokens_of(r) for r in got} == want


def test_actions_that_max_tokens_cut_are_marked_and_counted(tasks, tiny_dir, tmp_path, playing):
    """A message ends by any EOS of its folder, or any special token: the toy's first six."""
    base, ends = shutil.copytree(tiny_dir, tmp_path / "base"), {*range(6), 300, 301, 302}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 301, 302]}))
    flags = ["--max_turns", 2, "--candidates", 3, "--max_tokens", 100]
    played, said, _ = playing(tasks, "--model", base, *flags)
    drawn = list(chain(*map(actions, played)))
    assert len({action["token_ids"][-1] for action in drawn} & ends) > 1
    for action in drawn:
        assert len(action["token_ids"]) <= 100 and not ends & {*action["token_ids"][:-1]}
        assert action.get("cut", False) == (action["token_ids"][-1] not in ends)
    share = 100 * sum("cut" in action for action in drawn) / len(drawn)
    assert 0 < share < 100
    assert f"; {share:.1f} % of messages truncated\n" in said


@pytest.mark.parametrize("start, end", [("[THINK]", "[/THINK]"), ("<think>", "</think>"),
                                        ("<|channel>", "<channel|>")])
def test_special_tokens_around_a_thought_end_no_message(start, end, tiny_dir):
    """The human reads what follows the thought, and the trainers read all tokens."""
    p, r = runner(tiny_dir, "--max_turns", 1), random.Random(0)
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    tokenizer.add_tokens([start, end], special_tokens=True)
    p.chat = M.Chat(tokenizer, tiny_dir)
    marks = tokenizer.convert_tokens_to_ids([start, end])
    words = [i for word, i in tokenizer.get_vocab().items()
             if word.strip("\u0120").isalpha() and word not in ("OUTPUT", "ANSWER")]
    assert p.chat.stop == {*tokenizer.all_special_ids} - {*marks}
    for _ in range(100):
        thought, said = r.choices(words, k=r.randrange(9)), r.choices(words, k=r.randrange(1, 9))
        ids = [marks[0], *thought, marks[1], *said, r.choice([*p.chat.stop])]

        async def engine(prompt, keys, max_new):
            return [(ids, [-1.0] * len(ids))]
        p.engine = engine
        task = {"id": "a", "problem_description": "p", "ground_truth": "g"}
        record = asyncio.run(p.run_episode(task, 0))
        message = record["dialogue_history"][1]
        assert message["content"] == tokenizer.decode(said).strip() and "cut" not in message
        ((_, action),) = turns_of(p.chat, {"task": task, **record})
        assert [*map(ord, action)] == ids


def test_a_model_of_the_hub_is_the_same_before_and_after_its_download(tiny_dir, tmp_path,
                                                                      monkeypatch):
    """It is known by its weights, so that --resume takes the episodes of its first run."""
    cache = tmp_path / "cache"
    cache.mkdir()

    def download(name, allow_patterns):
        for pattern in allow_patterns:
            for file in Path(tiny_dir).glob(pattern):
                shutil.copy(file, cache)
        return str(cache)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    def meta(*flags):
        M.weights_digest.cache_clear()  # as in another process
        return without_models("--model", "a/model", *flags).meta
    meta("--engine", "http://localhost:9/v1")
    assert not [*cache.glob("*.safetensors")]  # only the server needs them
    first = meta()
    M.load("a/model")
    assert first == meta() and first["model_weights"] == M.weights_digest(tiny_dir)


def runner(tiny_dir, *flags):
    args = collect.get_args(["--model", tiny_dir, *map(str, flags)])
    return asyncio.run(collect.EpisodeRunner(args).load())


def without_models(*flags):
    """An EpisodeRunner as it is before models are loaded."""
    unloaded = collect.EpisodeRunner(collect.get_args([*map(str, flags)]))
    unloaded.load_chat()
    return unloaded


def prompt_of_first(record, chat):
    return chat.prompt_ids(record["dialogue_history"][:1])


def prompt_of(runner, text):
    return runner.chat.prompt_ids(dialogue(text))


def sample(runner, prompt, draws):
    async def ask():
        return await runner.engine(prompt, draws, runner.args.max_tokens)
    return asyncio.run(ask())


def test_a_message_that_ends_with_its_last_allowed_token_is_whole(tiny_dir):
    p = runner(tiny_dir, "--max_tokens", 3, "--candidates", 2)
    end, most = min(p.chat.stop), []

    async def engine(prompt, keys, max_new):
        most.append(max_new)
        return [([9, 9, end], [-1.0] * 3), ([9, 9, 9], [-1.0] * 3), ([9, end], [-1.0] * 2)]

    p.engine = engine
    actions, candidates = asyncio.run(p.sample_turn(dialogue("write f"), (0, "task", 0, 0), 1))
    assert most == [3]
    assert [action.get("cut", False) for action in (*actions, *candidates)] == [
        False, True, False]


def test_the_engine_stops_at_the_limit_or_at_an_end(tiny_dir):
    """An end that is the last allowed token is sampled, too: some messages end exactly there."""
    p = runner(tiny_dir, "--max_tokens", 2)
    p.engine.stop = {*range(0, p.chat.tokenizer.vocab_size, 2)}  # every second token ends a message
    drawn = [ids for ids, _ in sample(p, prompt_of(p, "write f"), [(0, j) for j in range(60)])]
    ends = [ids[-1] in p.engine.stop for ids in drawn]
    assert all(len(ids) == 1 for ids, end in zip(drawn, ends) if ids[0] in p.engine.stop)
    assert all(len(ids) == 2 for ids in drawn if ids[0] not in p.engine.stop)
    assert {(len(ids), end) for ids, end in zip(drawn, ends)} == {(1, True), (2, True), (2, False)}


def test_an_episode_counts_the_tokens_that_it_costs(tasks, episodes, tiny_dir, playing, tmp_path):
    """Those of messages that --best_of does not send, too, and of episodes that fail."""
    chat = M.find_model(tiny_dir)[1]

    def cost(record):
        turns = turns_of(chat, record)
        ids = [[len(a["token_ids"]) for a in m["candidates"]] for m in agent_messages(record)]
        return {"agent_prompt_tokens": sum(len(prompt) for prompt, _ in turns),
                "agent_completion_tokens": sum(len(action) for _, action in turns),
                "candidates_completion_tokens": sum(map(sum, ids))}
    for r in episodes:
        assert r["usage"] == cost(r)
    for r in playing(episodes[:2], "--candidates", 2, "--max_tokens", 7)[0]:  # later ones
        (old,) = [e["usage"] for e in episodes if key_of(e) == key_of(r)]
        new = Counter(r["usage"]) - Counter(old)
        assert new == Counter({**cost(r), "agent_completion_tokens": 0})
    (tmp_path / "critic.py").write_text("def advantages(task, history, actions):\n"
                                        "    return [-len(a['token_ids']) for a in actions]\n")
    (tmp_path / "human.py").write_text("def reply(task, history):\n    raise ValueError('busy')\n")
    flags = ["--best_of", 4, "--max_tokens", 40, "--critic", tmp_path / "critic.py"]
    (r,), said, _ = playing(tasks[:1], *flags, "--max_turns", 1)
    drawn = sample(runner(tiny_dir, "--max_tokens", 40), prompt_of_first(r, chat),
                   [(0, r["task"]["id"], 0, 0, j) for j in range(4)])
    assert r["usage"]["agent_completion_tokens"] == sum(len(ids) for ids, _ in drawn)
    assert len({len(ids) for ids, _ in drawn}) > 1
    assert f"\nusage: {{'agent_prompt_tokens': {r['usage']['agent_prompt_tokens']}, " in said
    playing(tasks[:1], "--human", tmp_path / "human.py", "--max_turns", 2, "--max_tokens", 9)
    (failed,) = playing.failed
    assert failed["usage"]["agent_prompt_tokens"] == r["usage"]["agent_prompt_tokens"]
    assert 1 <= failed["usage"]["agent_completion_tokens"] <= 9


def test_candidates_share_is_drawn_for_each_episode_and_holds_for_all_its_turns(tasks, playing):
    flags = ["-k", 12, "--candidates", 1, "--candidates_share", 0.5, "--max_tokens", 3]
    played, _, _ = playing(tasks[:2], *flags, "--max_turns", 3)
    has = {key_of(r): {"candidates" in m for m in agent_messages(r)} for r in played}
    assert len(has) == 24 and all(len(turns) == 1 for turns in has.values())
    assert any(len(agent_messages(r)) == 3 for r in played)
    chosen = {key for key, turns in has.items() if True in turns}
    for task in tasks[:2]:
        assert 1 < sum(name == task["task"]["id"] for name, _ in chosen) < 11
    assert {n for name, n in chosen if name == tasks[0]["task"]["id"]} != {
        n for name, n in chosen if name == tasks[1]["task"]["id"]}


@pytest.mark.parametrize("temperature, top_p", [(1, 1), (0.5, 0.7), (0.5, 1e-6)])
def test_the_sampler_draws_from_the_models_distribution(temperature, top_p, tiny_dir):
    """Each token comes up as often as its log-prob says, none from outside the nucleus ever."""
    p = runner(tiny_dir, "--max_tokens", 1, "--temperature", temperature, "--top_p", top_p)
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
    greedy = runner(tiny_dir, "--max_tokens", 1, "--temperature", 0)
    drawn = sample(greedy, prompt, [(0, 0), (0, 1)])
    assert [ids for ids, _ in drawn] == [[logits.argmax().item()]] * 2


@pytest.mark.parametrize("ref_reads, thinking", [("hidden", 0), ("agent", 1)])
def test_best_of_sends_the_critics_favourite(ref_reads, thinking, tasks, rewarded, tiny_dir,
                                             tmp_path):
    critic, base = str(tmp_path / "c"), str(shutil.copytree(tiny_dir, tmp_path / "base"))
    template = tmp_path / "base" / "chat_template.jinja"
    template.write_text(template.read_text().replace(
        "<|assistant|>", "<|assistant|>{% if enable_thinking %}fee{% endif %}"))
    flags = ["--model", base, "--out", critic, "--lr", 1e-3, "--held_out", 0, "--epochs", 2]
    succeed("train_critic.py", *flags, "--ref_context", ref_reads, stdin=rewarded)
    p = runner(base, "--best_of", 5, "--critic", critic, "--max_tokens", 12, "--thinking", thinking)
    task, favourites = tasks[0]["task"], []
    history = dialogue(task["problem_description"])
    hidden = f"Hidden reference:\n{task['ground_truth']}\n\n{history[0]['content']}"
    pi, pi_ref = (M.load(path)[0] for path in (critic, base))
    prompts = {"agent": p.chat.prompt_ids(history, thinking),
               "hidden": p.chat.prompt_ids(dialogue(hidden), thinking)}
    for turn in range(6):
        key = (0, task["id"], 0, turn)
        drawn = sample(p, prompts["agent"], [(*key, j) for j in range(5)])
        turns, ref_turns = ([M.Turn(M.packed(prompts[reads]), M.packed(ids)) for ids, _ in drawn]
                            for reads in ("hidden", ref_reads))
        logps, ref_logps = M.turn_logps(pi, turns, 4096), M.turn_logps(pi_ref, ref_turns, 4096)
        scores = [advantage(logps[a], ref_logps[b]).item() for a, b in zip(turns, ref_turns)]
        actions = [p.as_action(ids, sampled) for ids, sampled in drawn]
        assert p.critic(task, history, actions) == pytest.approx(scores, abs=1e-5)
        favourites.append(scores.index(max(scores)))
        sent = asyncio.run(p.next_message(task, history, key))
        assert sent["token_ids"] == drawn[favourites[-1]][0]
    assert len(set(favourites)) > 1
    with pytest.raises(SystemExit, match="no model at 'no/critic'"):
        runner(tiny_dir, "--best_of", 2, "--critic", "no/critic")


def test_the_model_itself_is_the_untrained_critic(tasks, tiny_dir):
    """Its advantage is log pi(a | o, c) - log pi(a | o), a mean over tokens; --dtype is its own."""
    task, flags = tasks[0]["task"], ["--best_of", 3, "--critic", tiny_dir, "--max_tokens", 12]
    history = dialogue(task["problem_description"])
    hidden = f"Hidden reference:\n{task['ground_truth']}\n\n{history[0]['content']}"
    p = runner(tiny_dir, *flags)
    prompts = [prompt_of(p, text) for text in (hidden, history[0]["content"])]
    drawn = sample(p, prompts[1], [(0, j) for j in range(3)])
    actions = [p.as_action(ids, logprobs) for ids, logprobs in drawn]
    lm, want = AutoModelForCausalLM.from_pretrained(tiny_dir), []
    for ids, _ in drawn:
        means = []
        for prompt in prompts:
            with torch.no_grad():
                logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
            means.append(logits.log_softmax(-1)[range(len(ids)), ids].mean().item())
        want.append(means[0] - means[1])
    assert p.critic(task, history, actions) == pytest.approx(want, abs=1e-5)
    assert max(map(abs, want)) > 0.01
    critic = collect.Critic(collect.get_args([*map(str, ["--model", tiny_dir, *flags])] +
                                             ["--dtype", "bf16"]))
    assert critic.pi.dtype == critic.pi_ref.dtype == torch.bfloat16


# --- --resume -------------------------------------------------------------------------------------

def finished(file, meta=None, tasks=None):
    """The keys of the episodes that a run with this meta need not run again."""
    with collect.open_to_resume(file) as opened:
        return collect.finished_episodes(opened, meta or {}, {} if tasks is None else tasks)


def test_of_a_file_only_a_cut_last_line_is_dropped_and_one_run_at_a_time_has_it(collected,
                                                                                tmp_path):
    file, (first, last) = tmp_path / "all.jsonl", collected.splitlines(True)[:2]
    both, half = first + last, last[:len(last) // 2]
    for text, kept in ((half, ""), (first + half, first), (both, both), (both[:-1], first)):
        file.write_text(text)
        assert finished(file) == set(map(key_of, records(kept))) and file.read_text() == kept
        with collect.open_to_resume(file), pytest.raises(SystemExit, match=f"--resume {file}: "):
            collect.open_to_resume(file)


def test_a_file_of_something_else_is_not_touched(episodes, tmp_path):
    del episodes[1]["task"]["ground_truth"], episodes[3]["sample"]
    file = tmp_path / "diary.txt"
    for text, line in (("a diary\nof mine", 1), ("a diary", 1), (lines(episodes), 2),
                       (lines(episodes[2:]), 2)):
        file.write_text(text)
        with pytest.raises(SystemExit, match=f"error: {file}, line {line}"):
            finished(file)
        assert file.read_text() == text


def test_a_file_is_resumed_with_the_model_that_made_it_wherever_that_is(tasks, episodes, tiny_dir,
                                                                        tmp_path, playing):
    file, (missing, *others) = tmp_path / "all.jsonl", episodes
    file.write_text(lines(others))
    assert missing["meta"]["model_weights"] == M.weights_digest(tiny_dir)
    moved = shutil.copytree(tiny_dir, tmp_path / "moved")
    fast = ["--max_batch_tokens", 999, "--concurrency", 3, "--dtype", "fp32"]
    played, said, _ = playing(tasks, "--model", moved, *PLAY, "--resume", file, *fast)
    assert list(map(key_of, played)) == [key_of(missing)]
    assert "(7 more in the --resume file)" in said


def test_a_thought_that_the_prompt_opened_is_private_and_other_text_is_sent(tiny_dir, tmp_path):
    """A reasoning model's prompt may end in <think>, so that its output lacks that."""
    model = shutil.copytree(tiny_dir, tmp_path / "m")
    template = model / "chat_template.jinja"
    text, generation = template.read_text(), "<|assistant|>{% endif %}"
    outputs = f"so: {ANSWER}?</think>which </think>?", f"why?</think>{ANSWER} x", f"{ANSWER} y"
    task = {"id": "a", "problem_description": "p", "ground_truth": "g"}
    for opening in ("", "<think>\\n", "<think>\\n\\n</think>\\n\\n"):
        opened = "<|assistant|>{{ '" + opening + "' }}{% endif %}"
        template.write_text(text.replace(generation, opened))
        opens = opening == "<think>\\n"
        asked = without_models("--model", model, "--max_turns", 1)
        for n, output in enumerate(outputs):
            async def next_message(*_):
                return {"role": "assistant", "content": None, "output": output}
            asked.next_message = next_message
            episode = asyncio.run(asked.run_episode(task, 0))
            want = ["which </think>?", f"{ANSWER} x", ""][n] if opens else output
            assert episode["dialogue_history"][1]["content"] == want
            assert episode["answered"] == (ANSWER in want)


@pytest.fixture
def resume(tiny_dir, tmp_path):
    """resume(file): runs what resumes the file; fails as collect.py. tasks: those of stdin."""
    for name in ("reply(task, history)", "advantages(task, history, actions)"):
        (tmp_path / f"{name[:5]}.py").write_text(f"def {name}: return 'yes'")
    model = shutil.copytree(tiny_dir, tmp_path / "model")
    argv = ["--model", model, "--human", tmp_path / "reply.py", "--critic", tmp_path / "advan.py",
            "--best_of", 2, "--candidates", 3]

    def make(file, *more, tasks=None):
        unloaded = without_models(*argv, "--resume", file, *more)
        make.args, make.meta = unloaded.args, unloaded.meta
        return finished(file, make.meta, tasks)
    return make


FREE = "model", "engine", "dtype", "version"  # these may change; the weights have a hash


def test_whatever_changes_an_episode_must_be_as_in_the_file(resume, episodes, tmp_path,
                                                            monkeypatch):
    file = tmp_path / "all.jsonl"
    file.touch()
    resume(file)
    meta = resume.meta

    def refused(why, *flags, **changed):
        file.write_text(lines([{**episodes[0], "meta": {**meta, **changed}}]))
        with pytest.raises(SystemExit, match=f"{file} holds episodes with {why}"):
            resume(file, *flags)

    for old in (meta, {**meta, **dict.fromkeys(FREE, "another")},
                {"thinking": 1, "candidates_meta": meta}):  # the settings of the candidates
        file.write_text(lines([{**episodes[0], "meta": old}]))
        resume(file, "--concurrency", 1, "-k", 3, "--max_batch_tokens", 9, "--dtype", "bf16")
    for name in meta.keys() - {*FREE}:
        another = 7 if name == "seed" else "another"
        refused(f"{name.replace('model_weights', 'model')} {another}", **{name: another})
    for name, edited in (("human", "reply.py"), ("critic", "advan.py")):
        edited = tmp_path / edited
        text = edited.read_text()
        edited.write_text(text + "\n")
        refused(f"{name} ")
        edited.write_text(text)
    for flag, value in (("candidates", 5), ("human", "fixed:no"), ("candidates_share", 0.5),
                        ("top_p", 0.5)):
        refused(f"{flag} .*, not {value}; ", "--" + flag, value)
    monkeypatch.setattr(colbench.environments()["backend"], "agent_prompt", "Do as you like.")
    refused("prompts ")


def test_each_flag_but_those_of_speed_and_paths_is_a_setting(resume, tmp_path):
    """So a flag that an edit adds is compared by --resume and by evaluate.py."""
    (tmp_path / "all.jsonl").touch()
    resume(tmp_path / "all.jsonl")
    meta = resume.meta
    flags = vars(collect.get_args(["--human", "fixed:x"])).keys() - {*colbench.MAY_DIFFER}
    assert colbench.settings(meta).keys() == flags | {"prompts"}
    assert not {*evaluate.WHICH_SYSTEM} - flags - {"agent_model"}


def test_a_task_that_was_edited_under_its_id_is_an_error(resume, episodes, tmp_path):
    file, (first, second, *_) = tmp_path / "all.jsonl", sorted(episodes, key=key_of)[::2]
    for r in episodes:
        del r["meta"]
    file.write_text(lines([second, first]))

    def done(record):
        tasks = {}
        with stdin_of([second, record]):
            jobs = [*collect.read_jobs(resume.args, tasks)]
        return {key_of({**r, "sample": n}) for r, n in jobs} & resume(file, tasks=tasks)
    resume(file)
    assert done(first) == {key_of(first), key_of(second)}
    for field in ("problem_description", "ground_truth", "hidden_information", "test_cases", "own"):
        task = {**first["task"], field: {"test1": "f(0)"} if field == "test_cases" else "another"}
        why = f"{file}, line 2: the task {task['id']} differs from the one in stdin, line 2: give"
        with pytest.raises(SystemExit, match=why):
            done({"task": task})


# --- missing episodes -----------------------------------------------------------------------------

class Sampled:
    """Some episodes fail; the others have texts of their own."""
    random = random.Random(0)

    def __init__(self, args, kinds):
        self.meta = {"seed": args.seed}

    async def load(self):
        return self

    async def run_episode(self, task, sample):
        if self.random.random() < 0.2:
            raise collect.ContextFull("no reply")
        text = str(self.random.random())
        return {"sample": sample, "dialogue_history": dialogue("p", text), "meta": self.meta}


def test_failed_episodes_are_counted_and_in_no_mean(playing, monkeypatch, tmp_path):
    """By their key, of a file that runs with other -k and --seed have resumed, after kills."""
    monkeypatch.setattr(collect, "EpisodeRunner", Sampled)
    r = random.Random(0)
    for number in range(12):
        path, lines_of = tmp_path / f"{number}.jsonl", []
        used = []  # seeds
        for _ in range(r.randint(1, 3)):
            names = r.sample("abcdef", r.randint(3, 6))
            tasks = [{"id": n, "problem_description": n, "ground_truth": n} for n in names]
            resume = ["--resume", path] if {*used} == {0} and r.random() < 0.7 else []
            seed = 0 if resume else len(used)
            used.append(seed)
            done = {key_of(x) for x in lines_of if "failed" not in x}
            written, _, end = playing(tasks, "-k", r.randint(1, 3), "--seed", seed, *resume)
            assert bool(end) == bool(playing.failed)
            for x in playing.failed:
                assert [*x] == ["task", "sample", "failed", "usage", "meta"]
                assert x["failed"] == "ContextFull: no reply"
            for x in written:
                x["reward"] = r.choice([0.0, 1.0])
            written += playing.failed
            if resume:
                assert not done & {key_of(x) for x in written}
            if r.random() < 0.3:
                written = r.sample(written, r.randint(1, len(written)))  # a kill
            lines_of += written
            with open(path, "a") as f:
                f.write(lines(written))
        key = lambda x: (*key_of(x), x["meta"]["seed"])
        of_task = {}  # {task: [reward, or None of a failed episode]}
        for k in dict.fromkeys(map(key, lines_of)):
            rewards = [x["reward"] for x in lines_of if key(x) == k and "failed" not in x]
            of_task.setdefault(k[0], []).append(rewards[0] if rewards else None)
        results = []
        monkeypatch.setattr(evaluate, "open_stdout", lambda: results.append)
        evaluate.main(evaluate.get_args([str(path)]))
        (result,) = results
        flat = sum(of_task.values(), [])
        assert (result["episodes"], result["failed"]) == (len(flat) - flat.count(None),
                                                          flat.count(None))
        known = [[x for x in of if x is not None] for of in of_task.values()]
        assert result["success"] == pytest.approx(
            statistics.fmean(map(statistics.fmean, filter(None, known))), abs=1e-4)


def test_a_failed_episode_has_the_meta_that_a_later_one_has(tasks, playing, tmp_path):
    """Else evaluate.py would not know that this one replaces it."""
    human = tmp_path / "human.py"
    given = [{**tasks[0], "meta": {"source": "mine"}}]
    human.write_text("def reply(task, history):\n    raise ValueError('busy')\n")
    flags = ["--agent", "fixed:hi", "--human", human, "--max_turns", 2]
    assert playing(given, *flags)[0] == []
    (failed,) = playing.failed
    human.write_text("def reply(task, history):\n    return 'ok'\n")
    (episode,), _, end = playing(given, *flags)
    meta = episode["meta"]
    assert end is None and {name for name in meta if meta[name] != failed["meta"].get(name)} == {
        "human"}


def test_an_empty_dialogue_is_none(tasks, playing, tmp_path):
    """Such as other programs write: the task is run, and if that fails, it says so."""
    given = [{**tasks[0], "dialogue_history": []}]
    (played,), _, end = playing(given, "--agent", "fixed:hi", "--max_turns", 2)
    assert end is None and agent_texts(played) == ["hi", "hi"]
    human = tmp_path / "human.py"
    human.write_text("def reply(task, history):\n    raise ValueError('busy')\n")
    playing(given, "--agent", "fixed:hi", "--human", human, "--max_turns", 2)
    assert [r["failed"] for r in playing.failed] == ["ValueError: busy"]


def test_who_reads_failed_episodes(grading, episodes, capsys):
    """The grader hands them on, trainers and other readers leave them out and say how many."""
    failed = [{"task": r["task"], "sample": 9, "failed": "no reply", "meta": r["meta"]}
              for r in episodes[:2]]
    graded, told, end = grading([failed[0], *episodes, failed[1]])
    assert not end and graded[0] == failed[0] and graded[-1] == failed[1]
    assert f"graded {len(episodes)} answers" in told
    given = lines(graded).encode().splitlines()
    capsys.readouterr()
    read = list(colbench.read_records(given, "dialogue_history", "reward"))
    assert read == graded[1:-1]
    assert capsys.readouterr().err == "2 records of failed episodes in stdin are left out\n"
    with pytest.raises(SystemExit, match="line 1: .*failed is not text"):
        list(colbench.read_records([lines([{**failed[0], "failed": 1}]).encode()]))


# --- records that have a dialogue -----------------------------------------------------------------

def test_a_dialogue_is_answered_if_its_last_message_has_the_marker(episodes, playing):
    """Played to the last turn without an answer of its own, or given, to get candidates.

    The candidates' settings stand beside those of the dialogue.
    """
    assert all(r["answered"] == (ANSWER in agent_messages(r)[-1]["content"]) for r in episodes)
    for r, ended in zip(episodes, ("", ANSWER + "\ndef f(): return 1")):
        del r["answered"], r["meta"]
        r["dialogue_history"][-1] |= {"output": ended, "content": ended}
    again, _, _ = playing(episodes[:2], "--candidates", 2, "--max_tokens", 5, "--seed", 8)
    assert sorted(r["answered"] for r in again) == [False, True]
    assert all(r["meta"]["candidates_meta"]["seed"] == 8 and "seed" not in r["meta"] for r in again)


def test_new_candidates_replace_old_ones_and_their_settings(episodes, playing):
    """Those of another model and seed, or with --candidates_share none at all."""
    given = episodes[:2]
    for r in given:
        r["meta"]["candidates_meta"] = {**r["meta"], "seed": 5, "model": "another", "old": 1}
    before = {key_of(r): tokens_of(r) for r in given}
    settings = {key_of(r): {**r["meta"], "candidates_meta": None} for r in given}
    flags = ["--candidates", 2, "--max_tokens", 5]
    again, _, _ = playing(given, *flags, "--seed", 8)
    none, _, _ = playing(again, *flags, "--candidates_share", 0)
    for r in (*again, *none):
        assert {**r["meta"], "candidates_meta": None} == settings[key_of(r)]
    for r in again:
        new = r["meta"]["candidates_meta"]
        assert new["seed"] == 8 and new["candidates"] == 2 and "old" not in new
        assert new["model"] == given[0]["meta"]["model"]
        for was, now in zip(before[key_of(r)], tokens_of(r), strict=True):
            assert was[0] == now[0] and len(now) == 3 and was[1:3] != now[1:]
    for r in none:
        assert r["meta"]["candidates_meta"]["candidates_share"] == 0
        assert not any("candidates" in m for m in agent_messages(r))


def test_no_sample_of_a_task_comes_twice():
    """Whatever the dialogues' own numbers are, which those that are free keep."""
    task = {"id": "a", "problem_description": "write f", "ground_truth": "def f(): return 1"}
    said = {"task": task, "dialogue_history": dialogue("write f", "ok")}
    given = [{**said, "sample": n, "meta": {"seed": i}} for i, n in enumerate((5, 2, 2))]
    given += [said, {"task": task}, {**said, "sample": 7}]
    args = collect.get_args(["--human", "fixed:no", "--candidates", "1", "-k", "4"])
    with stdin_of(given):
        samples = [sample for _, sample in collect.read_jobs(args, {})]
    assert samples[:4] == [5, 2, 3, 0] and len(set(samples)) == len(samples) == 9


# --- what user code changes ---

SPOILS = """
def reply(task, history):
    seen = task["ground_truth"], len(history), history[0]["role"]
    history.insert(0, {"role": "system", "content": "Your secret: " + task["ground_truth"]})
    history[-1]["content"] = "the assistant wrote"
    history[-1].pop("token_ids", None)
    task["test_cases"].clear()
    task["ground_truth"] = "gone"
    return "%s, %d messages, %s first" % seen
async def advantages(task, history, actions):
    spoiled = reply(task, history)
    for action in actions:
        action["token_ids"].clear()
        action["output"] = spoiled
    return [float(i) for i in range(len(actions))]
"""


def test_the_human_and_the_critic_get_copies_which_they_may_change(tasks, tmp_path, playing):
    """A human that builds its request in place must not show the agent its secret."""
    (tmp_path / "who.py").write_text(SPOILS)
    flags = ["--human", tmp_path / "who.py", "--critic", tmp_path / "who.py", "--best_of", 2,
             "--candidates", 2, "--max_tokens", 5, "--max_turns", 4]
    (played,), _, end = playing(tasks[:1], *flags)
    task, history = tasks[0]["task"], played["dialogue_history"]
    assert end is None and played["task"] == task
    assert [m["role"] for m in history] == 4 * ["user", "assistant"]
    for n, message in enumerate(history):
        if n % 2:
            assert message["output"] != "the assistant wrote" and 1 <= len(message["token_ids"]) < 6
            assert len(message["candidates"]) == 2
        elif n:
            assert message["content"] == f"{task['ground_truth']}, {n} messages, user first"


# --- what user code imports ---

def test_a_human_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "words_of_mine.py").write_text("WORDS = 'fee'")
    (tmp_path / "human.py").write_text("from words_of_mine import WORDS\n"
                                       "def reply(task, history):\n    return WORDS")
    assert collect.load_function(str(tmp_path / "human.py"), "reply")({}, []) == "fee"


# --- bad input ------------------------------------------------------------------------------------

def test_a_dialogue_longer_than_the_models_context_ends_unanswered(tasks, tiny_dir, tmp_path,
                                                                   playing):
    """It is an episode all the same, but where not even the task fits."""
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    change_json(base / "config.json", max_position_embeddings=75)
    long = {**tasks[0]["task"], "id": "long", "problem_description": "one word more " * 75}
    flags = ["--model", base, "--max_tokens", 5, "--max_turns", 10]
    (r,), said, _ = playing([tasks[0], {"task": long}], *flags)
    assert not r["answered"] and r["answer"] == "" and len(agent_messages(r)) < 10
    assert r["dialogue_history"][-1]["role"] == "assistant"
    assert "task long, sample 0 failed: ContextFull: the context is full: " in said


def test_a_dialogue_longer_than_the_models_context_gets_candidates_as_far_as_it_fits(
        episodes, tiny_dir, tmp_path, playing):
    base, r = shutil.copytree(tiny_dir, tmp_path / "base"), random.Random(0)
    chat, n_without = M.find_model(tiny_dir)[1], []
    for given in episodes:
        for message in agent_messages(given):
            message["candidates"] = [{"output": "old"}]
    prompts = {key_of(e): [len(prompt) for prompt, _ in turns_of(chat, e)] for e in episodes}
    for room in [0, *(r.choice(sum(prompts.values(), [])) for _ in range(4))]:
        change_json(base / "config.json", max_position_embeddings=room + 1)
        got, _, end = playing(episodes, "--model", base, "--candidates", 1, "--max_tokens", 2)
        assert end is None and len(got) == len(episodes)
        for e in got:
            has = ["candidates" in message for message in agent_messages(e)]
            assert has == [length <= room for length in prompts[key_of(e)]]
            assert "old" not in str(e)
            n_without.append(has.count(False))
    assert len({*n_without}) > 2


CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}")
MISTRAL = ("{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
           "[/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}")


@pytest.mark.parametrize("template, eos, why", [
    (MISTRAL, "<|end|>", None),  # it needs no generation prompt
    (CHATML, "<|end|>", "no generation prompt: add '<.im_start.>assistant"),
    (MISTRAL, None, "no added token ends a message, and there is no EOS")])
def test_a_template_that_leaves_the_start_or_end_of_a_message_open_is_refused(
        template, eos, why, tiny_dir, tmp_path):
    """By all that load a model, at the start."""
    chat, config = M.find_model(tiny_dir)[1], AutoConfig.from_pretrained(tiny_dir)
    chat.tokenizer.chat_template, chat.tokenizer.eos_token = template, eos
    for part in chat.tokenizer, config:
        part.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=why) if why else nullcontext():
        M.find_model(str(tmp_path))


LEAVES_OUT = {  # what a template does not show: (a change of tiny's template, how it is said)
    "texts": ("{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",
              "message 2 of 2, whose role is assistant"),
    "assistant": ("{{ m['content'] }}", "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}",
                  "message 2 of 2, whose role is assistant"),
    "system": ("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}",
               "message 1 of 2, whose role is system")}


@pytest.mark.parametrize("what", LEAVES_OUT)
def test_a_template_that_leaves_out_messages_plays_no_episode_and_trains_nothing(
        what, tasks, ranked, tiny_dir, tmp_path, playing):
    before, after, why = LEAVES_OUT[what]
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    text = (base / "chat_template.jinja").read_text()
    assert before in text
    (base / "chat_template.jinja").write_text(text.replace(before, after))
    given = tasks
    if what == "system":  # a dialogue that begins with one
        given = ranked[:1]
        given[0]["dialogue_history"].insert(0, {"role": "system", "content": "Be brief."})
    played, said, end = playing(given, "--model", base, "--max_tokens", 5, "--candidates", 1)
    assert not played and f"it leaves out the content of {why}" in f"{said}{end}"
    for trainer in ("train_critic", "train_policy"):
        done = script(f"{trainer}.py", "--model", base, "--out", tmp_path / trainer,
                      stdin=given if what == "system" else ranked)
        complaint(done, f"it leaves out the content of {why}")
        assert not [*(tmp_path / trainer).iterdir()]


# --- what it prints -------------------------------------------------------------------------------

def test_a_flag_that_an_edit_adds_is_a_setting_of_the_episodes():
    """So that --resume refuses another value, and evaluate.py tells the systems apart."""
    args = collect.get_args(["--model", "m"])
    args.my_bias = 3
    assert collect.run_meta(args)["my_bias"] == 3
    args.agent = "fixed:ok"
    assert collect.run_meta(args)["my_bias"] == 3 and "model" not in collect.run_meta(args)


# --- what it writes -------------------------------------------------------------------------------

LOOKS = """
def reply(task, history):
    return ",".join(line[-3:] for line in open(OUT, newline="") if line[-2:] == "}\\n")
"""


def test_an_episode_is_in_the_file_before_the_next_one_ends(tasks, tmp_path):
    """Whole, so that a kill costs only the running ones."""
    out = tmp_path / "out.jsonl"
    out.touch()
    (tmp_path / "human.py").write_text(f"OUT = {str(out)!r}\n{LOOKS}")
    flags = ["--agent", "fixed:hi", "--human", tmp_path / "human.py", "--max_turns", 2, "-k", 3]
    succeed("collect.py", *flags, "--concurrency", 1, stdin=tasks, out=out)
    seen = [r["dialogue_history"][2]["content"] for r in records(out.read_text())]
    assert seen == [",".join(n * ["}}\n"]) for n in range(3 * len(tasks))]


# --- the human ------------------------------------------------------------------------------------

COMPUTES = """
import threading, time
threads = set()
def reply(task, history):
    time.sleep(0.3)
    threads.add(threading.current_thread())
    assert len(threads) == 1
    return "yes"
"""


def test_a_human_that_is_not_async_stays_in_one_thread_and_needs_no_lock(tasks, tmp_path, playing):
    """Such as one with a model of its own, of which 256 calls at once would not fit in memory."""
    (tmp_path / "human.py").write_text(COMPUTES)
    flags = ["--human", tmp_path / "human.py", "--max_tokens", 5, "--max_turns", 2]
    played, said, end = playing(tasks, *flags)
    assert len(played) == 4 and end is None


WRITTEN = """
async def reply(task, history):
    i = TASKS.index(task["id"])
    if i == 3:
        raise KeyError("no such task")
    return [f"{len(history)}\\udc80", None, 5][i]
"""


def test_a_human_is_a_file_with_a_function(tasks, tmp_path, playing):
    """Its text is the reply, but for half a character, which no tokenizer takes.

    With anything else, or an error, the task's episode fails.
    """
    ids = [r["task"]["id"] for r in tasks]
    (tmp_path / "human.py").write_text(f"TASKS = {ids}\n{WRITTEN}")
    flags = ["--human", tmp_path / "human.py", "--max_tokens", 5, "--max_turns", 3]
    (r,), said, end = playing([*tasks, *[tasks[1]] * 5], *flags, "--concurrency", 4)
    assert r["task"]["id"] == ids[0]
    assert [m["content"] for m in r["dialogue_history"][2::2]] == ["2?", "4?"]
    for name, why in zip(ids[1:], ("ValueError: reply() must return text, not None",
                                   "ValueError: reply() must return text, not 5",
                                   "KeyError: 'no such task'")):
        assert f"task {name}, sample 0 failed: {why}" in said
    assert str(end).startswith("error: 8 episodes failed; --resume FILE reruns them")


DIES = """
import asyncio
n = 0
async def reply(task, history, actions=()):
    global n
    if task["id"] == DEAD:
        n += 1
        raise KeyError("down")
    while n < 16:
        await asyncio.sleep(.01)
    return [0.0 for action in actions] or "yes"
advantages = reply
"""


@pytest.mark.parametrize("who", ["--human", "--critic"])
def test_when_the_run_ends_by_an_error_the_episodes_under_way_end_first(who, tasks, tmp_path,
                                                                        playing):
    (tmp_path / "who.py").write_text(f"DEAD = {tasks[0]['task']['id']!r}\n{DIES}")
    flags = [who, tmp_path / "who.py", "--max_tokens", 5, "--max_turns", 3, "--concurrency", 3]
    flags += ["--best_of", 2] * (who == "--critic")
    given = [tasks[1], tasks[2], *[tasks[0]] * 30, tasks[3]]
    played, said, end = playing(given, *flags)
    assert {r["task"]["id"] for r in played} == {t["task"]["id"] for t in tasks[1:3]}
    assert "\n16 episodes in a row failed, so no further one starts\n" in said
    assert str(end) == "error: 16 episodes failed; --resume FILE reruns them, and what is left"
    assert said.count("failed: KeyError: 'down'") == 16
    assert 'who.py", line 9, in reply' in said


def test_a_critic_of_the_users_that_fails_now_and_then_costs_those_episodes(tasks, tmp_path,
                                                                            playing):
    """What it returns may be anything. An episode that ends begins the count of failures anew."""
    (tmp_path / "critic.py").write_text(
        "n = 0\ndef advantages(task, history, actions):\n    global n\n    n += 1\n"
        "    return 5 if n % 8 else [1.0] * len(actions)\n")
    flags = ["--critic", tmp_path / "critic.py", "--best_of", 2, "--max_tokens", 5]
    played, _, end = playing(tasks, *flags, "--max_turns", 1, "-k", 8, "--concurrency", 1)
    assert len(played) == 4
    assert str(end).startswith("error: 28 episodes failed; --resume FILE reruns them")


def test_a_kind_that_is_added_changes_no_run_of_other_kinds(monkeypatch):
    args = collect.get_args(["--model", "m"])
    before = collect.run_meta(args, {"backend"})
    monkeypatch.setitem(colbench.environments(), "puzzle", colbench.Environment())
    assert collect.run_meta(args, {"backend"}) == before != collect.run_meta(args, {"puzzle"})
