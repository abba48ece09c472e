"""An LLM judge instead of a critic: a message's score is the share of comparisons that it wins.

    JUDGE=http://host:port/v1 python collect.py --critic tests/experiments/judge.py --best_of 4 ...
"""
import asyncio
import functools
import os
import re
import sys

import openai

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from colbench import without_thinking  # noqa: E402

PROMPT = """An assistant works for a colleague who wants something that it can't see. It finds \
out by talking to them, and hands it in at the end.

What the colleague wants:
{wanted}

The conversation so far:
{dialogue}

Two messages that the assistant might send next:
A: {a}

B: {b}

Which one brings it nearer to handing in exactly what is wanted? Reply with one letter, A or B."""
# "A better message is B" names only B: an A before a word is an article, but for these
ARTICLE = r"\bA\s+(?!(?:is|because|since|as|over|would|asks|brings|gets|wins)\b)(?=[a-z])"
URL = os.environ.get("JUDGE")
if not URL:
    raise SystemExit("error: set JUDGE=http://host:port/v1")
CLIENT = openai.AsyncOpenAI(base_url=URL, max_retries=8,
                            api_key=os.environ.get("OPENAI_API_KEY", "none"),
                            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False))


@functools.cache
def model():
    """Returns a future of the name of the server's model, which is requested only once."""
    async def first():
        return (await CLIENT.models.list()).data[0].id
    return asyncio.ensure_future(first())


async def wins(task, history, a, b):
    """Returns 1 if the judge prefers message a, 0 if it prefers b, and 0.5 if they are equal."""
    if a == b:
        return 0.5
    names = {"assistant": "Assistant", "user": "Colleague", "system": "Colleague"}
    dialogue = "\n".join(f"{names[m['role']]}: {m['content']}" for m in history[1:])
    hidden = task.get("hidden_information") or task["ground_truth"]
    content = PROMPT.format(wanted=hidden, dialogue=dialogue, a=a, b=b)
    completion = await CLIENT.chat.completions.create(
        model=await model(), messages=[{"role": "user", "content": content}],
        temperature=0, seed=0, max_tokens=1024)
    choice = completion.choices[0]
    return float(verdict(choice.message.content or "", choice.finish_reason) == "A")


def verdict(reply, finish_reason):
    """Returns the letter of the message that a judge's reply prefers, or raises ValueError."""
    if finish_reason in ("length", "max_tokens"):
        raise ValueError("the judge's reply is truncated: it may end before the verdict")
    text = without_thinking(reply)
    letters = set(re.findall(r"\b[AB]\b", re.sub(ARTICLE, "", text)))
    if len(letters) != 1:
        raise ValueError(f"the judge's reply {text[:60]!r} is no verdict: it must name A or B, "
                         "not both")
    return letters.pop()


async def advantages(task, history, actions):
    """Compares each message with its neighbors in a circle, once as A and once as B."""
    texts = [action["output"].rpartition("OUTPUT:")[2].strip() for action in actions]
    pairs = zip(texts, texts[1:] + texts[:1])
    try:
        won = await asyncio.gather(*(wins(task, history, a, b) for a, b in pairs))
    except openai.OpenAIError as e:  # fails this episode; the 16th in a row ends the run
        raise ConnectionError(f"the judge at {URL}: {e}") from None
    return [(won[i] + 1 - won[i - 1]) / 2 for i in range(len(texts))]
