"""ColBench as an environment of SkyRL (pip install skyrl-gym==0.4.0), for online RL of the agent.

    import skyrl_gym
    skyrl_gym.register(id="colbench", entry_point="tests.experiments.skyrl:ColBench")
    env = skyrl_gym.make("colbench", extras={"task": task, "human": "tests/toy.py"})

Run it with this repo's root in PYTHONPATH. extras are the columns of a line of SkyRL's data:

    task          as in a record
    human         as collect.py --human takes it: a FILE.py, the address of an LLM, or fixed:TEXT
    human_params  of an LLM's requests, as JSON text (optional)
    max_turns     the most messages of the agent (optional, 10)

null means missing, also in a task: a column of a data set has a field in all rows or in none. The
reward is that of `colbench.py grade`, and comes with the last message; messages before it get 0.
The metadata of the last step are the fields that a record would have.
"""
import asyncio
import atexit
import functools
import os
import sys
import threading
from types import SimpleNamespace

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import collect  # noqa: E402
from colbench import Episode, cpus, environment  # noqa: E402

LOCK = threading.Lock()  # SkyRL steps environments in several threads


@functools.cache
def event_loop():
    """Returns a loop that runs in a thread of its own, because a server's client needs one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def wait(coroutine):
    """Returns a coroutine's result, from any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


@functools.cache
def human_runner(human, params):
    """Returns a loaded EpisodeRunner with this human, whose own agent never acts."""
    flags = ["--agent", "fixed:", "--human", human]
    if params:
        flags += ["--human_params", params]
    return wait(collect.EpisodeRunner(collect.get_args(flags)).load())


@functools.cache
def opened(env):
    """Returns an Environment that can grade; it is closed when this process exits."""
    env.open(SimpleNamespace(rules="honest", workers=cpus(), clip="openai/clip-vit-base-patch32"))
    atexit.register(env.close)
    return env


def without_nulls(x):
    """Returns x without the fields that are None, at any depth."""
    if isinstance(x, dict):
        return {name: without_nulls(value) for name, value in x.items() if value is not None}
    return [*map(without_nulls, x)] if isinstance(x, list) else x


class ColBench(BaseTextEnv):
    """An episode of a task. See the module's docstring for extras."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        extras = without_nulls(extras)
        self.task, self.max_turns = extras["task"], extras.get("max_turns", 10)
        with LOCK:
            self.runner = human_runner(extras["human"], extras.get("human_params"))
            self.grader = opened(environment(self.task))

    def init(self, prompt=None):
        """Starts the episode; returns its prompt, whatever SkyRL's data has as one."""
        self.episode = Episode(self.task, self.max_turns)
        return [*self.episode.history], {}

    def step(self, action):
        """Sends the agent's message. Returns the human's reply or, at the end, the reward."""
        episode = self.episode
        episode.act(action)
        self.turns = episode.turn
        if not episode.ended:
            reply = collect.call_user_function(self.runner.reply, self.task, episode.history)
            episode.reply(wait(reply))
        if not episode.ended:
            return BaseTextEnvStepOutput(observations=episode.history[-1:], reward=0.0, done=False,
                                         metadata={})
        fields = episode.fields()
        fields |= self.grader.grade({"task": self.task, **fields})
        return BaseTextEnvStepOutput(observations=[], reward=fields["reward"], done=True,
                                     metadata=fields)
