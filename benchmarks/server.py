"""The server for Tinker's client: dialogues, adapters, a loop over HTTP, and a kill.

    python -m benchmarks.server PART --json

dialogue  Dialogues of `--turns` in a stream: tokens of prompts that are computed to new ones, and
          responses that differ from a stream that keeps no rows.
adapter   Rollouts with an adapter in turns with its merged weights: seconds at each of `--batches`.
places    The same requests in a stream, half of them of a second adapter, against each adapter's
          alone: responses that differ.
drafts    GRPO steps in process over `--epochs` of the same questions, in turns with and without
          drafts in the stream: seconds of samples, and responses that differ.
loop      GRPO steps through the server, by the client, in turns with the same steps in process:
          seconds, and rewards that differ. With `--before FOLDER` in turns with the server of that
          checkout too, whose noise may have other names: its seconds over the server's.
restart   `--clients` send `--requests` each; the server is killed on the way and starts again:
          requests without an answer.
clients   Packages of PyPI, unmodified, call the token endpoint and OpenAI's routes: calls that
          fail, and tokens that differ from `Policy.sample`. `--python` has the packages.

`loop` and `restart` need the package `tinker`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.turns import WARM_TURNS, in_turns
from reprise.rl.python import api
from reprise.rl.python.stream import SampleRequest, Stream
from reprise.spec.config import SamplingConfig

QUESTION = "State the final answer to the following arithmetic problem: {} + {} =\n"
RANK = "Policy.lora_rank=32"
ALL = "Policy.lora_targets=('attention', 'mlp', 'head')"
DRAFTS = "Speculation.budget='goodput'"  # as in the server
KEY = "tml-local"
CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # the prompts of policies/tiny
LIMIT_S = 300.0
RATE = 1e-3
Ids = Sequence[int]
Groups = list[list[tuple[Ids, Any]]]  # ids and log-probs of each response
Weighted = tuple[Ids, Ids, Any, float]  # prompt, response, log-probs, advantage


def open_policy(arguments: argparse.Namespace, *settings: str) -> api.Policy:
    sizes = f"Engine.slots={arguments.slots}", f"Engine.min_slots={arguments.slots}"
    return api.Policy(arguments.policy, RANK, ALL, *sizes, *settings)


def trained(policy: api.Policy, seed: int) -> api.Policy:
    """Return the policy with a fresh adapter after a large step on random tokens."""
    twin, rng = policy.with_new_adapter(seed), np.random.default_rng(seed)
    ids = rng.integers(0, 90, (4, 33))
    twin.forward_backward([api.Datum(row[:-1], row[1:]) for row in ids])
    twin.optim_step(api.Adam(learning_rate=1e-3))
    return twin


def answers(stream: Stream, requests: Sequence[SampleRequest]) -> list[list[list[int]]]:
    """Return the tokens of each request's responses."""
    done: dict[int, list[list[int]]] = {}
    for i, request in enumerate(requests):

        def finish(samples: list[api.Sample], i: int = i) -> None:
            done[i] = [sample.token_ids for sample in samples]

        stream.add(request, finish)
    while stream.has_work:
        stream.step()
    return [done[i] for i in range(len(requests))]


def differing(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def dialogue(arguments: argparse.Namespace) -> dict[str, Any]:
    policy = open_policy(arguments, DRAFTS)
    stream, fresh, rng = policy.stream(2), policy.stream(2), np.random.default_rng(0)
    samplers = [policy.sampler(), trained(policy, 1).sampler()]
    sampling = SamplingConfig(max_new_tokens=arguments.new_tokens)
    dialogues: list[tuple[int, ...]] = [()] * arguments.dialogues
    new = computed = wrong = 0
    for turn in range(arguments.turns):
        says = rng.integers(0, 90, (arguments.dialogues, arguments.new_tokens)).tolist()
        dialogues = [(*ids, *said) for ids, said in zip(dialogues, says, strict=True)]
        requests = [
            SampleRequest(samplers[i % 2], ids, 1, sampling, f"{turn}.{i}")
            for i, ids in enumerate(dialogues)
        ]
        before = stream.stats.prefilled_tokens
        found = answers(stream, requests)
        computed += stream.stats.prefilled_tokens - before
        new += sum(map(len, says))
        fresh.close()
        wrong += differing(found, answers(fresh, requests))
        dialogues = [(*ids, *response) for ids, [response] in zip(dialogues, found, strict=True)]
    return {
        **{"turns": arguments.turns, "dialogues": arguments.dialogues, "new_tokens": new},
        **{"computed_tokens": computed, "computed_to_new": round(computed / new, 3)},
        **{"responses": arguments.turns * arguments.dialogues, "responses_that_differ": wrong},
        "longest_prompt": max(map(len, dialogues)),
    }


def adapter(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = [_adapter_row(arguments, batch) for batch in arguments.batches]
    return {"policy": arguments.policy, "rank": 32, "rows": rows}


def _adapter_row(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    sizes = f"Engine.slots={batch}", f"Engine.min_slots={batch}"
    own = trained(api.Policy(arguments.policy, RANK, ALL, *sizes), 1)
    with tempfile.TemporaryDirectory() as folder:
        own.export(folder)
        policies = {"adapter": own, "merged": api.Policy(folder, *sizes)}
    sampling, ids = SamplingConfig(max_new_tokens=arguments.new_tokens), dict[str, Any]()

    def rollout(name: str) -> float:
        began_s = time.perf_counter()
        [group] = policies[name].sample([QUESTION.format(57, 68)], batch, sampling, seed=1)
        taken_s = time.perf_counter() - began_s
        ids[name] = [sample.token_ids for sample in group]
        return taken_s / sum(map(len, ids[name]))

    seconds = in_turns({name: partial(rollout, name) for name in policies}, arguments.repeats)
    ratios = seconds["adapter"] / seconds["merged"]
    row = {"batch": batch, "ratio": round(float(np.median(ratios)), 3)}
    row |= {"ratios": ratios.round(3).tolist(), "responses_that_differ": differing(*ids.values())}
    environment.progress(row)
    return row


def places(arguments: argparse.Namespace) -> dict[str, Any]:
    policy = open_policy(arguments, DRAFTS)
    samplers = [policy.sampler(), trained(policy, 1).sampler()]
    sampling, rng = SamplingConfig(max_new_tokens=arguments.new_tokens), np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, 90, 4 + i % 24).tolist()) for i in range(arguments.requests)]
    requests = [
        SampleRequest(samplers[i % 2], ids, 2, sampling, f"{i}") for i, ids in enumerate(prompts)
    ]
    stream, alone = policy.stream(2), policy.stream(2)
    together = answers(stream, requests)
    found = [answers(alone, requests[i::2]) for i in range(2)]
    wrong = sum(differing(together[i::2], found[i]) for i in range(2))
    tokens = sum(len(ids) for group in together for ids in group)
    return {"requests": 2 * len(requests), "tokens": tokens, "responses_that_differ": wrong}


# -- over HTTP -----------------------------------------------------------------------------


class Server:
    """A server in a process of its own, on a port that stays the same."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, checkout: Path = environment.ROOT
    ) -> None:
        self._checkout = checkout
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        sizes = f"--gin.Engine.slots={arguments.slots}", f"--gin.Engine.min_slots={arguments.slots}"
        self._command = [sys.executable, "-m", "rl.serve", "--policy", arguments.policy]
        self._command += [f"--port={self.port}", f"--folder={folder}", f"--gin.{RANK}", *sizes]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._checkout)
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.address}/api/v1/healthz", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("the server did not start")

    def stop(self, number: int) -> None:
        self._process.send_signal(number)
        self._process.wait()


def client(server: Server) -> Any:
    import tinker

    os.environ |= {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    return tinker.ServiceClient(base_url=server.address)


class InProcess:
    """Samples and updates by `rl.python.api`, with a stream as the server has."""

    def __init__(self, arguments: argparse.Namespace, *settings: str) -> None:
        policy = open_policy(arguments, *settings)
        self._policy, self._stream = policy.with_new_adapter(0, 32), policy.stream(2)
        self._stream.warm_up()
        self.tokenizer = policy.tokenizer

    def sample(self, prompts: Sequence[Ids], n: int, most: int, seed: int) -> Groups:
        sampler, sampling = self._policy.sampler(), SamplingConfig(max_new_tokens=most)
        groups: dict[int, list[api.Sample]] = {}
        for i, ids in enumerate(prompts):
            request = SampleRequest(sampler, ids, n, sampling, f"seed {seed + i}")
            self._stream.add(request, lambda samples, i=i: groups.update({i: samples}))
        while self._stream.has_work:
            self._stream.step()
        return [[(x.token_ids, x.logprobs) for x in groups[i]] for i in range(len(prompts))]

    def train(self, data: Sequence[Weighted]) -> None:
        made = []
        for prompt, ids, logprobs, advantage in data:
            before, ones = np.zeros(len(prompt) - 1), np.ones(len(ids))
            floats = (np.append(before, x) for x in (logprobs, advantage * ones))
            both = [*prompt, *ids]
            made.append(api.Datum(both[:-1], both[1:], None, *floats))
        self._policy.forward_backward(made, "importance_sampling")
        self._policy.optim_step(api.Adam(learning_rate=RATE))


class OverHttp:
    """The same by the client, through a server."""

    def __init__(self, server: Server, arguments: argparse.Namespace) -> None:
        service = client(server)
        made = service.create_lora_training_client(arguments.policy, rank=32, seed=0)
        self._model = made.result()

    def sample(self, prompts: Sequence[Ids], n: int, most: int, seed: int) -> Groups:
        from tinker import types

        sampler = self._model.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(list(ids)),
                num_samples=n,
                sampling_params=types.SamplingParams(max_tokens=most, seed=seed + i),
            )
            for i, ids in enumerate(prompts)
        ]
        return [[(x.tokens, x.logprobs) for x in f.result().sequences] for f in futures]

    def train(self, data: Sequence[Weighted]) -> None:
        from tinker import types

        made = []
        for prompt, ids, logprobs, advantage in data:
            before, both = [0.0] * (len(prompt) - 1), [*prompt, *ids]
            inputs = {
                "target_tokens": types.TensorData(data=both[1:], dtype="int64"),
                "logprobs": types.TensorData(data=[*before, *logprobs], dtype="float32"),
                "advantages": types.TensorData(
                    data=[*before, *[advantage] * len(ids)], dtype="float32"
                ),
            }
            shown = types.ModelInput.from_ints(both[:-1])
            made.append(types.Datum(model_input=shown, loss_fn_inputs=inputs))
        update = self._model.forward_backward(made, "importance_sampling")
        step = self._model.optim_step(types.AdamParams(learning_rate=RATE))
        update.result()
        step.result()


def _rewarded(tokenizer: Any, pairs: Sequence[Any], groups: Groups) -> list[list[float]]:
    """Return the rewards of each group of answers to sums."""

    def reward(ids: Ids, total: int) -> float:
        return float(tokenizer.decode(ids).rpartition("####")[2].strip() == str(total))

    return [
        [reward(ids, sum(pair)) for ids, _ in group]
        for pair, group in zip(pairs, groups, strict=True)
    ]


def _weighted(prompts: Sequence[Ids], groups: Groups, rewards: list[list[float]]) -> list[Weighted]:
    rows = zip(prompts, groups, rewards, strict=True)
    return [
        (prompt, *drawn, reward - float(np.mean(some)))
        for prompt, group, some in rows
        for drawn, reward in zip(group, some, strict=True)
    ]


def _questions(tokenizer: Any, seed: int, count: int) -> tuple[list[Any], list[Ids]]:
    """Return pairs of numbers, and prompts for their sums."""
    pairs = np.random.default_rng(seed).integers(1, 10, (count, 2)).tolist()
    return pairs, [tuple(tokenizer.encode_prompt(QUESTION.format(*pair))) for pair in pairs]


def drafts(arguments: argparse.Namespace) -> dict[str, Any]:
    sides = {"plain": InProcess(arguments), "drafts": InProcess(arguments, DRAFTS)}
    # turns that do not count have other questions: an epoch begins with the first that counts
    steps, drawn = dict.fromkeys(sides, -WARM_TURNS), {name: list[Ids]() for name in sides}

    def step(name: str) -> float:
        side, number, epoch = sides[name], steps[name], arguments.steps
        seed = number % epoch if number >= 0 else epoch - number
        pairs, prompts = _questions(side.tokenizer, seed, arguments.groups)
        began_s = time.perf_counter()
        groups = side.sample(prompts, arguments.group_size, arguments.new_tokens, 1000 * number)
        taken_s = time.perf_counter() - began_s
        drawn[name] += [list(ids) for group in groups for ids, _ in group]
        side.train(_weighted(prompts, groups, _rewarded(side.tokenizer, pairs, groups)))
        steps[name] += 1
        return taken_s

    turns = {name: partial(step, name) for name in sides}
    seconds = in_turns(turns, arguments.epochs * arguments.steps)
    faster = seconds["plain"] / seconds["drafts"]
    epochs = [float(np.median(some)) for some in np.split(faster, arguments.epochs)]
    return {
        **{"policy": arguments.policy, "steps_of_an_epoch": arguments.steps},
        **{"plain_over_drafts_by_epoch": np.round(epochs, 3).tolist()},
        **{"ratios": faster.round(3).tolist(), "responses": len(drawn["plain"])},
        "responses_that_differ": differing(drawn["plain"], drawn["drafts"]),
    }


def loop(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        servers = [Server(arguments, Path(folder, "after"))]
        own = InProcess(arguments, DRAFTS)
        sides: dict[str, Any] = {"http": OverHttp(servers[0], arguments), "process": own}
        if arguments.before is not None:
            servers.append(Server(arguments, Path(folder, "before"), arguments.before))
            sides["before"] = OverHttp(servers[1], arguments)
        steps, paid = dict.fromkeys(sides, 0), {name: list[float]() for name in sides}

        def step(name: str) -> float:
            began_s, number = time.perf_counter(), steps[name]
            pairs, prompts = _questions(own.tokenizer, number, arguments.groups)
            size = arguments.group_size, arguments.new_tokens
            groups = sides[name].sample(prompts, *size, 1000 * number)
            rewards = _rewarded(own.tokenizer, pairs, groups)
            paid[name] += [reward for some in rewards for reward in some]
            sides[name].train(_weighted(prompts, groups, rewards))
            steps[name] += 1
            return time.perf_counter() - began_s

        seconds = in_turns({name: partial(step, name) for name in sides}, arguments.repeats)
        for server in servers:
            server.stop(signal.SIGTERM)
    ratios, more = seconds["http"] / seconds["process"], {}
    if "before" in seconds:
        befores = seconds["before"] / seconds["http"]
        more = {"before_ratio": round(float(np.median(befores)), 3)}
        more["before_ratios"] = befores.round(3).tolist()
        more["before_reward_sum"] = sum(paid["before"])
    return {
        **more,
        **{"policy": arguments.policy, "responses": arguments.groups * arguments.group_size},
        **{f"{k}_s": round(float(np.median(x)), 4) for k, x in seconds.items()},
        **{"ratio": round(float(np.median(ratios)), 3), "ratios": ratios.round(3).tolist()},
        **{"rewards": len(paid["http"]), "reward_sum": sum(paid["http"])},
        "rewards_that_differ": differing(paid["http"], paid["process"]),
    }


def restart(arguments: argparse.Namespace) -> dict[str, Any]:
    from tinker import types

    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments, Path(folder))
        samplers = [
            client(server).create_sampling_client(base_model=arguments.policy).result()
            for _ in range(arguments.clients)
        ]
        total, done, errors = arguments.clients * arguments.requests, 0, list[str]()
        params = types.SamplingParams(max_tokens=arguments.new_tokens)

        async def one(sampler: Any, i: int) -> None:
            nonlocal done
            prompt = types.ModelInput.from_ints([1 + i % 90, 2, 3])
            try:
                response = await sampler.sample(prompt, num_samples=1, sampling_params=params)
                done += len(response.sequences) == 1
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])

        async def kill() -> None:
            while done < total // 3:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)

        async def all_of_them() -> None:
            requests = [one(s, i) for i in range(arguments.requests) for s in samplers]
            await asyncio.gather(kill(), *requests)

        began_s = time.perf_counter()
        asyncio.run(all_of_them())
        taken_s = time.perf_counter() - began_s
        server.stop(signal.SIGTERM)
    return {
        **{"clients": arguments.clients, "requests": total, "answered": done},
        **{"not_recovered": total - done, "errors": sorted(set(errors))[:8]},
        "seconds": round(taken_s, 1),
    }


def clients(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "policy")
        shutil.copytree(environment.ROOT / arguments.policy, place)
        (place / "chat_template.jinja").write_text(CHAT)
        arguments.policy = str(place)
        server = Server(arguments, Path(folder, "server"))
        numbers = np.random.default_rng(0).integers(1, 100, (arguments.groups, 2)).tolist()
        texts = [f"{a} + {b} =" for a, b in numbers]
        seeds = list(range(arguments.repeats))
        most = arguments.new_tokens
        given = {"address": server.address, "key": KEY, "model": arguments.policy}
        given |= {"prompts": texts, "seeds": seeds, "max_tokens": most}
        done = subprocess.run(
            [str(arguments.python or sys.executable), "-m", "benchmarks.baselines.clients"],
            input=json.dumps(given),
            cwd=environment.ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        server.stop(signal.SIGTERM)
        done.check_returncode()
        policy = open_policy(arguments).with_new_adapter()
    found = json.loads(done.stdout.splitlines()[-1])
    expected = dict[tuple[bool, int, int], list[int]]()
    for seed in seeds:
        for i, text in enumerate(texts):
            chat = policy.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for is_text, prompt in ((True, text), (False, chat)):
                sampling = SamplingConfig(max_new_tokens=most)
                [[sample]] = policy.sample([prompt], 1, sampling, seed=seed)
                expected[is_text, i, seed] = sample.token_ids
    differing_tokens = tokens = 0
    for call in found["calls"]:
        if call.get("tokens") is not None:
            own = expected["completion" in call["name"], call["prompt"], call["seed"]]
            pairs = list(itertools.zip_longest(own, call["tokens"]))
            tokens += len(pairs)
            differing_tokens += sum(a != b for a, b in pairs)
    errors = [f"{x['name']}: {x['error']}" for x in found["calls"] if "error" in x]
    return {
        "policy": "policies/tiny",
        "packages": found["versions"],
        "calls": len(found["calls"]),
        "calls_that_fail": len(errors),
        "tokens": tokens,
        "tokens_that_differ": differing_tokens,
        "errors": sorted(set(errors))[:8],
    }


if __name__ == "__main__":
    environment.run(
        __doc__,
        {
            **{"dialogue": dialogue, "adapter": adapter, "places": places},
            **{"drafts": drafts, "loop": loop, "restart": restart, "clients": clients},
        },
        environment.TRAINING,
        policy="policies/tiny",
        batches=(16, 64),
        slots=32,
        turns=20,
        dialogues=8,
        new_tokens=8,
        groups=8,
        epochs=3,
        steps=4,
        group_size=8,
        clients=64,
        requests=100,
        repeats=5,
        before=Path,
        python=Path,
    )
