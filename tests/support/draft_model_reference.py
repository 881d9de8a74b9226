"""A tiny draft model, drafts by whole-sequence passes, and random lives of requests."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.config import EngineConfig
from reprise.spec.config import ChainConfig, SamplingConfig
from reprise.spec.draft_model.drafter import DraftModelDrafter
from reprise.spec.drafter import PADDING, LiveSlots
from reprise.spec.verification import sampling

V, LONGEST, ROWS = 17, 64, 6
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=V,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    d_ff=8,
)
POLICY = dataclasses.replace(MODEL, num_layers=3, num_kv_heads=2)  # with cache layers unlike its
CONFIG = ChainConfig(
    window_tokens=2,
    chunk_tokens=16,
    pass_tokens=32,
    max_draft_tokens=5,
)
BUCKETS = EngineConfig(slots=8, min_slots=4, page_tokens=16)
ONE_BUCKET = dataclasses.replace(BUCKETS, min_slots=8)  # each is compiled
KEY = sampling.step_key(3, 4)
COOL = SamplingConfig(temperature=0.7)
SAMPLINGS = {
    "plain": SamplingConfig(),
    "cool": SamplingConfig(temperature=0.7, top_p=0.9, top_k=9),
    "blocks": SamplingConfig(temperature=1.2, draw="gumbel_blocks"),
}


def make_params(seed=0):
    rng = np.random.default_rng(seed)

    def one(spec):
        return (2 * (spec.scale or 0.5) * rng.standard_normal(spec.shape)).astype(np.float32)

    return jax.tree.map(one, transformer.param_specs(MODEL))


PARAMS = make_params()


def make_drafter(
    config=CONFIG, *, params=PARAMS, draws=COOL, buckets=ONE_BUCKET, place=None, **options
):
    sizes = {"longest_tokens": LONGEST, "most_slots": buckets.max_slots}
    runner = ModelRunner(POLICY, buckets, **sizes, **(place or {}))
    return DraftModelDrafter(
        MODEL, params, config, runner=runner, sampling=draws, key=KEY, **options
    )


class Host:
    """The requests of an engine: a row each, which may change."""

    def __init__(self, num_rows=ROWS):
        self.tokens_BL = np.zeros((num_rows, LONGEST), np.int32)
        self.rows: dict[int, int] = {}
        self.prompt_tokens: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}

    def enter(self, request_id, prompt, response=()):
        self.rows[request_id] = next(
            b for b in range(len(self.tokens_BL)) if b not in self.rows.values()
        )
        self.prompt_tokens[request_id] = len(prompt)
        self.texts[request_id] = [*prompt, *response]

    def leave(self, request_id):
        for held in (self.rows, self.prompt_tokens):
            del held[request_id]
        return self.texts.pop(request_id)

    def live(self, ids=None):
        ids = list(self.rows) if ids is None else ids
        self.tokens_BL[:] = -7  # what is not its own, a drafter must not look at
        for r, b in self.rows.items():
            self.tokens_BL[b, : len(self.texts[r])] = self.texts[r]
        total_A = np.array([len(self.texts[r]) for r in ids], np.int32)
        return LiveSlots(
            rows_A=np.array([self.rows[r] for r in ids], np.int64),
            request_ids_A=np.array(ids, np.int64),
            group_ids_A=np.zeros(len(ids), np.int64),
            prompt_tokens_A=np.array([self.prompt_tokens[r] for r in ids], np.int32),
            total_tokens_A=total_A,
            remaining_tokens_A=LONGEST - total_A,
            tokens_BL=self.tokens_BL,
        )


@partial(jax.jit, static_argnames="scheme")
def _slow_step(tokens_L, length, request_id, t, temperature, top_k, top_p, *, scheme):
    """(likeliest, its probability, the draw) behind `length` tokens, by a pass over all of them."""
    logits_V = transformer.logits(MODEL, PARAMS, tokens_L[None])[0, length - 1]
    scale = jnp.where(temperature > 0, temperature, 1.0)
    prob_V = jax.nn.softmax(logits_V / scale)
    cut_V = sampling.processed_logits(logits_V, temperature, top_k, top_p)
    key = jax.random.fold_in(jax.random.fold_in(KEY, request_id), t)
    drawn, _ = sampling.draw(cut_V[None], key[None], temperature[None], scheme)
    return jnp.argmax(logits_V), jnp.max(prob_V), drawn[0]


def slowly(text, prompt_tokens, request_id, count, draws, mode):
    """(tokens, probabilities) of a chain behind a text."""
    tokens_L = np.zeros(LONGEST + 8, np.int32)
    tokens_L[: len(text)] = text
    tokens, probs, prob = [], [], 1.0
    for n in range(len(text), len(text) + count):
        likeliest, p, drawn = _slow_step(
            tokens_L,
            np.int32(n),
            np.int32(request_id),
            np.int32(n - prompt_tokens),
            np.float32(draws.temperature),
            np.int32(draws.top_k),
            np.float32(draws.top_p),
            scheme=draws.scheme,
        )
        prob *= float(p)
        tokens.append(int(likeliest if mode == "greedy" else drawn))
        probs.append(prob)
        tokens_L[n] = tokens[-1]
    return tokens, probs


def complaints(drafts, live, host, most_A, draws=COOL, mode="greedy", longest=5):
    """Return a line for each draft that is not the chain of whole-sequence passes."""
    found = []
    for a, r in enumerate(live.request_ids_A.tolist()):
        n = min(int(most_A[a]), longest)
        tokens, probs = slowly(host.texts[r], host.prompt_tokens[r], r, n, draws, mode)
        got = drafts.tokens_AN[a]
        if got.tolist() != tokens + [PADDING] * (len(got) - n) or drafts.count_A[a] != n:
            found.append(f"request {r}: {got.tolist()}, not {tokens}")
        elif mode == "greedy" and not np.allclose(drafts.prob_AN[a, :n], probs, atol=1e-4):
            found.append(f"request {r}: probabilities {drafts.prob_AN[a]}, not {probs}")
        if drafts.parents_AN[a].tolist() != [*range(-1, n - 1), *[-1] * (len(got) - n)]:
            found.append(f"request {r}: parents {drafts.parents_AN[a].tolist()}")
    return found


def history(drafter, seed, draws=COOL, mode="greedy", rounds=12, num_rows=ROWS):
    """A random life of up to six requests: what the slow way complains of."""
    rng = np.random.default_rng(seed)
    host, away, found, next_id = Host(num_rows), {}, [], 100
    prompt = rng.integers(0, V, 9).tolist()
    for _ in range(rounds):
        while len(host.rows) < rng.integers(1, num_rows + 1):
            own = rng.integers(0, V, rng.integers(1, 12)).tolist()
            host.enter(next_id, prompt + own if rng.random() < 0.5 else own)
            next_id += 1
        if away and len(host.rows) < num_rows:  # back in another row, with more or other tokens
            r, (n, text) = away.popitem()
            text = [*text, *rng.integers(0, V, rng.integers(0, 6)).tolist()][: LONGEST - 2]
            if rng.random() < 0.3:
                text[int(rng.integers(0, len(text)))] = 1
            host.enter(r, text[:n], text[n:])
        ids = rng.permutation(list(host.rows)).tolist()
        live, most_A = host.live(ids), rng.integers(0, 8, len(ids)).astype(np.int32)
        room_A = LONGEST - 1 - live.total_tokens_A
        most_A = np.minimum(most_A, room_A)
        drafts = drafter.propose(live, most_A, 7)
        found += complaints(drafts, live, host, most_A, draws, mode)
        for a, r in enumerate(ids):
            right = drafts.tokens_AN[a, : rng.integers(0, drafts.count_A[a] + 1)].tolist()
            others = rng.integers(0, V, rng.choice([1, 1, 2, 9])).tolist()
            host.texts[r] = [*host.texts[r], *right, *others][:LONGEST]
            over = len(host.texts[r]) >= LONGEST - 1
            if over or rng.random() < 0.15:
                if over or rng.random() < 0.7:
                    drafter.finished(host.live([r]))
                n = host.prompt_tokens[r]
                text = host.leave(r)
                if not over and rng.random() < 0.5:
                    away[r] = n, text
    return found
