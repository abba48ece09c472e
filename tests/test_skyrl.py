"""tests/experiments/skyrl.py in the real skyrl-gym, against collect.py and colbench.py grade."""
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

import colbench
from colbench import ANSWER
from conftest import DOUBLE, HUMAN, ROOT, records, succeed
from test_collect_endpoints import Server, chat

skyrl_gym = pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        skyrl_gym.register(id="colbench", entry_point="tests.experiments.skyrl:ColBench")
        yield


def play(outputs, **extras):
    """(the environment's record, its rewards, all that the agent reads) of these messages."""
    env = skyrl_gym.make("colbench", extras=extras)
    prompt, _ = env.init([{"role": "user", "content": "from SkyRL's data"}])
    read, rewards = [*prompt], []
    for output in outputs:
        step = env.step(output)
        read += [{"role": "assistant", "content": output}, *step["observations"]]
        rewards.append(step["reward"])
        assert step["done"] == bool(step["metadata"])
        if step["done"]:
            break
    env.close()
    return step["metadata"], rewards, read


def with_nulls(x, r):
    """x with fields that are None at any depth, as a round trip through a data set leaves them."""
    if isinstance(x, dict):
        more = {name: None for name in ("hidden_information", "agent_prompt", "test99", "kind")
                if r.random() < 0.5}
        return more | {name: with_nulls(value, r) for name, value in x.items()}
    return [with_nulls(item, r) for item in x] if isinstance(x, list) else x


def script_of(task, r, end):
    """Messages of an agent whose episode has this kind of ending, in at most 4 turns."""
    questions = "which rate?", "<think>hm</think>what is the fee?", "cap? OUTPUT: which cap?"
    asked = r.choices(questions, k=3)
    right, wrong = task["ground_truth"], task["ground_truth"].replace("return", "return 1 +")
    last = {"right": f"{ANSWER}\n{right}", "wrong": f"{ANSWER}\n{wrong}", "empty": ANSWER,
            "not code": f"{ANSWER} I give up", "thought": "<think>" + right,
            "last turn without the marker": f"```python\n{right}\n```",
            "no answer": "which op?"}[end]
    late = end in ("last turn without the marker", "no answer", "thought")
    return asked[:3 if late else r.randrange(4)] + [last]


ENDS = ["right", "wrong", "empty", "not code", "thought", "last turn without the marker",
        "no answer"]
AGENT = """
import json
SCRIPTS = json.load(open(FILE))
def act(task, history):
    return SCRIPTS[task["id"]][len(history) // 2]
"""


def test_each_kind_of_ending_is_as_collect_and_grade_have_it(tasks, tmp_path):
    r, scripts, given = random.Random(0), {}, []
    for i, end in enumerate(ENDS):
        task = {**r.choice(tasks)["task"], "id": end}
        scripts[end] = script_of(task, r, end)
        given.append({"task": task})
    (tmp_path / "scripts").write_text(json.dumps(scripts))
    (tmp_path / "agent.py").write_text(f"FILE = {str(tmp_path / 'scripts')!r}\n{AGENT}")
    played = succeed("collect.py", "--agent", tmp_path / "agent.py", *HUMAN, "--max_turns", 4,
                     stdin=given)
    graded = records(succeed("colbench.py", "grade", stdin=records(played.stdout)).stdout)
    solved = {}
    for want in graded:
        end = want["task"]["id"]
        got, rewards, read = play(scripts[end], task=want["task"], human=HUMAN[1], max_turns=4)
        assert got == {name: want[name] for name in got} and "reward_by" in got
        assert play(scripts[end], task=with_nulls(want["task"], r), human=HUMAN[1], max_turns=4,
                    human_params=None) == (got, rewards, read)
        assert rewards == [0.0] * (len(scripts[end]) - 1) + [want["reward"]]
        assert read[0] == want["dialogue_history"][0]
        assert read[2::2] == want["dialogue_history"][2::2]
        assert all(want["task"]["ground_truth"] not in m["content"] for m in read[::2])
        solved[end] = want["reward"] == 1, want["answered"]
    assert solved == {"right": (True, True), "wrong": (False, True), "empty": (False, True),
                      "not code": (False, True), "thought": (False, False),
                      "last turn without the marker": (True, False), "no answer": (False, False)}


def test_an_llm_as_the_human_of_many_environments_at_once():
    """In threads, as SkyRL steps them. A failed reply is an error of that step."""
    def reply(path, body):
        text = body["messages"][0]["content"]
        assert DOUBLE["ground_truth"] in text and body["seed"] == 5
        return chat("" if "broken?" in text else f"it is {len(text)}")
    server = Server(reply)
    extras = {"human": server.url, "human_params": '{"seed": 5}', "max_turns": 3}

    def run(i):
        answer = f"{ANSWER} def f(x): return {i % 3} * x"
        outputs = ["which factor?" + " please" * i, "sure?", answer]
        got, rewards, _ = play(outputs, task=DOUBLE, **extras)
        for t in (2, 4):
            prompt = colbench.human_prompt(DOUBLE, got["dialogue_history"][:t])
            assert got["dialogue_history"][t]["content"] == f"it is {len(prompt)}"
        return rewards
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(run, range(24)))
    assert rewards == [[0.0, 0.0, float(i % 3 == 2)] for i in range(24)]
    with pytest.raises(Exception, match="the reply is empty"):
        play(["broken?"], task=DOUBLE, **extras)
