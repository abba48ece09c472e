"""An LLM as judge, in the critic's place: the share of comparisons that a message wins.

    JUDGE=http://host:port/v1 python collect.py --critic tests/experiments/judge.py --best_of 4 ...
"""
import asyncio
import functools
import os
import re

import openai

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
URL = os.environ.get("JUDGE")
if not URL:
    raise SystemExit("error: set JUDGE=http://host:port/v1")
CLIENT = openai.AsyncOpenAI(base_url=URL, max_retries=8,
                            api_key=os.environ.get("OPENAI_API_KEY", "none"))


@functools.cache
def model():
    """The model's name, asked for once: a future."""
    async def first():
        return (await CLIENT.models.list()).data[0].id
    return asyncio.ensure_future(first())


async def wins(task, history, a, b):
    """1 if message a wins against b, 0 if b wins, 0.5 if they are equal."""
    if a == b:
        return 0.5
    names = {"assistant": "Assistant", "user": "Colleague", "system": "Colleague"}
    dialogue = "\n".join(f"{names[m['role']]}: {m['content']}" for m in history[1:])
    wanted = task.get("hidden_information") or task["ground_truth"]
    content = PROMPT.format(wanted=wanted, dialogue=dialogue, a=a, b=b)
    completion = await CLIENT.chat.completions.create(
        model=await model(), messages=[{"role": "user", "content": content}],
        temperature=0, seed=0, max_tokens=1024)
    reply = (completion.choices[0].message.content or "").rpartition("</think>")[2]
    letters = set(re.findall(r"\b[AB]\b", reply))
    if len(letters) != 1:  # "A better one is B" says nothing sure
        raise ValueError("not one of A and B in the judge's reply")
    return float(letters == {"A"})


async def advantages(task, history, actions):
    """In a circle, each message is compared with the next as A, and with the one before as B."""
    texts = [action["output"].rpartition("OUTPUT:")[2].strip() for action in actions]
    pairs = zip(texts, texts[1:] + texts[:1])
    try:
        won = await asyncio.gather(*(wins(task, history, a, b) for a, b in pairs))
    except openai.BadRequestError as e:  # of this comparison, such as too long a dialogue
        raise ValueError(f"the judge {URL}: {e}") from None
    except openai.OpenAIError as e:
        raise ConnectionError(f"the judge {URL}: {e}") from None
    return [(won[i] + 1 - won[i - 1]) / 2 for i in range(len(texts))]
