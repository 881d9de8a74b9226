"""Reward functions that misbehave on command: the completion says how."""

import asyncio
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

LOOPS = {}


def faulty(prompts, completions, completion_ids, **columns):
    """Length of the completion, unless it names a fault."""
    completion = completions[0]
    if completion == "raise":
        raise RuntimeError("scorer bug")
    if completion == "sys_exit":
        sys.exit(3)
    if completion == "hang":
        time.sleep(60)
    if completion == "os_exit":
        os._exit(7)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "memory":
        return [float(len(bytearray(8 << 30)))]
    if completion == "print":
        print('{"outcomes": [[99.0, null, null]]}', flush=True)
        os.write(1, b"\x00 not JSON \n")
        return [5.0]
    if completion == "read":
        return [float(len(sys.stdin.read()) + 4)]
    answers = {
        "length": [1.0, 2.0],
        "empty": [],
        "none": [None],
        "nan": [float("nan")],
        "inf": [float("inf")],
        "text": ["1.0"],
        "not_a_list": 1.0,
        "nothing": None,
        "true": [True],
    }
    return answers.get(completion, [float(len(completion))])


def half(completions, **columns):
    """0.5 always."""
    return [0.5 for _ in completions]


def sees(prompts, completions, completion_ids, difficulty, answer):
    """Without **columns: gets the columns that it names."""
    return [float(difficulty[0] + len(completion_ids[0]) + int(answer[0]))]


def chat(prompts, completions, **columns):
    """As TRL shows chats: lists of messages on both sides."""
    assert prompts[0][0]["role"] == "user"
    return [float(completions[0][0] == {"role": "assistant", "content": "hello"})]


async def later(completions, **columns):
    """1 for each, once all have waited together; `raise` raises."""
    client = asyncio.get_running_loop()

    async def one(text):
        await asyncio.sleep(0)
        if text == "raise":
            raise RuntimeError("judge is away")
        return float(asyncio.get_running_loop() is client is LOOPS.setdefault("first", client))

    return await asyncio.gather(*map(one, completions))


def longest(prompts, completions, completion_ids, answer, n):
    """A comparison of a group: 1 for its longest response."""
    assert len(prompts) == len(completion_ids) == len(answer) == len(n) == len(completions)
    if "hang" in completions:
        time.sleep(60)
    if "die" in completions:
        os._exit(7)
    most = max(map(len, completions))
    return [math.nan if text == "nan" else float(len(text) == most) for text in completions]


def forks(completions, **columns):
    """Length of the completion; `fork` lets a child return too, as if it were the worker."""
    if completions[0].startswith("fork"):
        os.fork()
    return [float(len(completions[0]))]


def scribbles(completions, **columns):
    """Length of the completion; `now: TEXT` and `late: TEXT` write on every pipe there is."""
    when, _, text = completions[0].partition(": ")

    def write():
        for number in range(3, 20):
            try:
                os.write(number, text.encode())
            except OSError:
                continue

    if when == "now":
        write()
    elif when == "late":
        threading.Timer(0.2, write).start()
    return [float(len(completions[0]))]


def leaves_daemons(completions, **columns):
    """A child, and another in its own session that is nobody's; their numbers in files. `hang`s."""
    if completions[0] == "hang":
        time.sleep(60)
    path = pathlib.Path(completions[0])
    child = subprocess.Popen(["sleep", "60"])
    script = f"setsid sh -c 'echo $$ > {path}.orphan; exec sleep 60' &"
    subprocess.run(["sh", "-c", script], check=True)
    while not path.with_name(path.name + ".orphan").exists():
        time.sleep(0.01)
    path.write_text(str(child.pid))
    return [1.0]


def huge(completions, **columns):
    """1e38, or what the completion says."""
    return [float(completions[0] or 1e38)]
