"""A policy's model card, followed to the letter: an episode with a server that gets messages."""
import json
import re
import shlex
import shutil
import urllib.request
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import model as M
import toy
import train_policy
from colbench import first_message, message_texts, read_action, with_hidden
from conftest import HUMAN, demos, lines, metrics, read_by, records, script, succeed
from test_collect_endpoints import Server, chat

DATE = "{{ strftime_now('%d %b %Y') }}"
THOUGHT = ("{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}"
           "<think>{% endif %}")


def shown_demos():
    """Demonstrations with an agent_prompt of their own, of which the first shows the reference."""
    given = demos(12, max_turns=5)
    for i, r in enumerate(given):
        task = r["task"]
        task |= {"id": f"{i:02}", "agent_prompt": "{max_turns} messages. {problem_description}"}
        r["dialogue_history"][0] = first_message(task, 5)
    given[0]["dialogue_history"] = with_hidden(given[0]["dialogue_history"],
                                               given[0]["task"]["ground_truth"])
    return given


def served(folder, flags):
    """A server that does what `vllm serve` does with these flags, and keeps the prompts' ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    template = (folder / flags[flags.index("--chat-template") + 1]).read_text()

    def reply(path, body):
        prompt = tokenizer.apply_chat_template(
            body["messages"], chat_template=template, add_generation_prompt=True)["input_ids"]
        server.prompts.append(prompt)
        with torch.no_grad():
            ids = lm.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=ends,
                              max_new_tokens=body["max_tokens"])[0, len(prompt):]
        return chat(tokenizer.decode(ids, skip_special_tokens=True))

    server = Server(reply)
    server.prompts = []
    return server


def ask(url, messages):
    body = json.dumps({"messages": messages, "max_tokens": 12, "temperature": 0}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body)) as f:
        return json.load(f)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("begin, end", [("", ""), (DATE, ""), ("", THOUGHT)])
def test_an_episode_served_as_the_card_says_is_that_of_collect(begin, end, tiny_dir, tmp_path):
    """It has the prompts of training, also of templates that print a date or may think."""
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "out"
    template = base / "chat_template.jinja"
    template.write_text(begin + template.read_text() + end)
    given = shown_demos()
    rft = ["--loss", "rft", "--all", 1, "--model", base, "--batch_size", 6, "--lr", 3e-3]
    succeed("train_policy.py", *rft, "--out", out, stdin=given)
    succeed("tests/experiments/card.py", out, stdin=given)

    card = (out / "README.md").read_text()
    shown = json.loads(re.search(r"```json\n(.*?)\n```", card, re.DOTALL)[1])
    opening, fields, turns = shown["opening"], shown["task"], shown["max_turns"]
    command = shlex.split(re.search(r"```bash\n(vllm serve .*)\n```", card)[1])
    assert opening == [first_message(given[0]["task"], turns)] and turns == 5
    assert "26 Jul 2024" in card
    name = command[command.index("--served-model-name") + 1]
    other = shutil.copytree(out, tmp_path / "other" / "out")  # another run, of that folder's name
    rows = metrics(out)
    rows[0]["args"]["lr"] = 1e-3
    (other / "metrics.jsonl").write_text(lines(rows))
    succeed("tests/experiments/card.py", other, stdin=given)
    assert name.startswith("out-") and name not in (other / "README.md").read_text()
    server = served(out, command)

    ask(server.url, opening)
    trained = {prompt for pair in chain(*read_by(given, train_policy, *rft)[0])
               for prompt, _ in pair.chosen}
    assert M.packed(server.prompts.pop()) in trained

    (fresh,) = records(script("tests/toy.py", "tasks", "--n", 1, "--seed", 9).stdout)
    task = {**fresh["task"], **fields}
    history, answer = [first_message(task, turns)], None
    for turn in range(turns):
        content, answer = read_action(ask(server.url, history), last=turn == turns - 1)
        history.append({"role": "assistant", "content": content})
        if answer is not None:
            break
        history.append({"role": "user", "content": toy.reply(task, history)})
    (episode,) = records(succeed("collect.py", "--model", out, *HUMAN, "--temperature", 0,
                                 "--max_turns", turns, "--max_tokens", 12,
                                 stdin=[{"task": task}]).stdout)
    assert message_texts(episode["dialogue_history"]) == message_texts(history)
    assert episode["answer"] == (answer or "")
    history = episode["dialogue_history"]
    _, spoken, _ = M.find_model(out)
    assert server.prompts == [
        spoken.prompt_ids(history[:t])
        for t in range(len(history)) if history[t]["role"] == "assistant"]
