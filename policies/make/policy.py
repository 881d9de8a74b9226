"""Make the base policy that ships: a small decoder, taught worked solutions, stopped early.

    python -m policies.make.policy --output policies/tiny

Next-token training on the responses of `solutions.py`: first a drill (the bare problem and its
worked solution), then the questions as RL asks them, worked and direct, until sampling at
temperature 1 earns `stop_at_reward` on average. GRPO then has responses to reward, and room to
improve. Equal settings give equal weights, up to the rounding of matrix products.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax

from policies.make import solutions
from policies.make.characters import save_character_tokenizer
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.answers.answers import extract_answer
from reprise.rl.engine.engine import Engine
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.spec.config import SamplingConfig

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))  # all that questions contain
BATCHES_PER_STEP = 4  # a step's examples are sorted by length and cut, so that padding is small
WIDTHS_TOKENS = (64, 96, 128, 192, 256, 384)  # batches are padded to these: few programs
MAX_POSITIONS = 512
DRILL_TOKENS = 128  # longest example of the drill


@dataclasses.dataclass(frozen=True)
class Settings:
    """Size of the policy and its training; the first `drill_steps` of `steps` are the drill."""

    seed: int = 0
    steps: int = 2000
    drill_steps: int = 1300
    step_examples: int = 32
    learning_rate: float = 2e-3
    direct_fraction: float = 0.5
    eval_every_steps: int = 100
    eval_prompts: int = 16
    final_eval_prompts: int = 128
    stop_at_reward: float = 0.47
    max_new_tokens: int = 384
    num_layers: int = 4
    d_model: int = 128
    d_ff: int = 512


class Shape(Protocol):
    """The size of a policy, in the settings of a recipe."""

    @property
    def num_layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def d_ff(self) -> int: ...


def model_config(
    shape: Shape, tok: tokenizer.Tokenizer, max_positions: int = MAX_POSITIONS
) -> ModelConfig:
    """Return a Qwen3 decoder with heads of 32, two key/value heads and tied embeddings."""
    return ModelConfig(
        architecture="qwen3",
        vocab_size=tok.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.d_model // 32,
        num_kv_heads=2,
        head_dim=32,
        d_ff=shape.d_ff,
        tied_embeddings=True,
        qk_norm=True,
        max_positions=max_positions,
        eos_token_ids=tok.eos_token_ids,
        pad_token_id=tok.pad_token_id,
    )


# --- training -----------------------------------------------------------------------------


class Batch(NamedTuple):
    """Right-padded rows. Column t holds the target of the token at t + 1.

    `target` is the next token, int32 [B, T], or logits of a teacher, float16 [B, T, V].
    """

    tokens_BT: np.ndarray
    target: np.ndarray
    in_loss_BT: np.ndarray


def pack(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], widths: Sequence[int] = WIDTHS_TOKENS
) -> Batch:
    """Pack (prompt ids, response ids), padded with 0; only responses are in the loss."""
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    width = next(width for width in widths if width >= longest)
    tokens_BT = np.zeros((len(pairs), width), np.int32)
    in_loss_BT = np.zeros((len(pairs), width), bool)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        tokens_BT[row, :end] = [*prompt, *response]
        in_loss_BT[row, len(prompt) - 1 : end - 1] = True
    return Batch(tokens_BT, np.roll(tokens_BT, -1, axis=1), in_loss_BT)


def step_batches(settings: Settings, tok: tokenizer.Tokenizer) -> Iterator[list[Batch]]:
    """Yield each step's batches; examples that are too long are left out."""
    eos = tok.eos_token_ids[0]

    def fitting(stream: int, is_drill: bool) -> Iterator[tuple[list[int], list[int]]]:
        direct_fraction = 0.0 if is_drill else settings.direct_fraction
        max_tokens = DRILL_TOKENS if is_drill else WIDTHS_TOKENS[-1]
        for example in solutions.examples(stream, direct_fraction):
            prompt = example.stem if is_drill else example.prompt
            pair = tok.encode(prompt), [*tok.encode(example.response), eos]
            if len(pair[0]) + len(pair[1]) <= max_tokens:
                yield pair

    drill, questions = fitting(2 * settings.seed, True), fitting(2 * settings.seed + 1, False)
    size = settings.step_examples // BATCHES_PER_STEP
    for step in itertools.count():
        stream = drill if step < settings.drill_steps else questions
        pairs = list(itertools.islice(stream, settings.step_examples))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        yield [pack(pairs[start : start + size]) for start in range(0, len(pairs), size)]


def make_optimizer(
    learning_rate: float, steps: int, weight_decay: float = 0.1
) -> optax.GradientTransformation:
    """AdamW after clipping, linear warm-up and a cosine to a tenth; no decay on vectors."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, min(50, steps), max(51, steps), 0.1 * learning_rate
    )
    is_matrix = functools.partial(jax.tree.map, lambda weight: weight.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(
    model: ModelConfig, params: transformer.Params, batch: Batch, num_tokens: float
) -> tuple[jax.Array, transformer.Params]:
    """Return Σ loss / `num_tokens` in nats, and its gradient.

    The loss of a token is −log q(token), or KL(p ‖ q) to the teacher's distribution p.
    """

    def loss(params: transformer.Params) -> jax.Array:
        logits_BTV = transformer.logits(model, params, batch.tokens_BT)
        if batch.target.ndim == 2:
            loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch.target)
        else:
            p_BTV = jax.nn.softmax(batch.target.astype("float32"))
            loss_BT = optax.kl_divergence(jax.nn.log_softmax(logits_BTV), p_BTV)
        return (loss_BT * batch.in_loss_BT).sum() / num_tokens

    return jax.value_and_grad(loss)(params)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _apply(update: Any, params: Any, state: Any, parts: list[Any]) -> tuple[Any, Any]:
    grads = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    changes, state = update(grads, state, params)
    return optax.apply_updates(params, changes), state


def train_step(
    model: ModelConfig, update: Any, params: transformer.Params, state: Any, step: Sequence[Batch]
) -> tuple[transformer.Params, Any, float]:
    """Train on all batches of a step; return (params, state, mean loss in nats)."""
    num_tokens = float(sum(batch.in_loss_BT.sum() for batch in step))
    parts = [loss_and_grads(model, params, batch, num_tokens) for batch in step]
    params, state = _apply(update, params, state, [grads for _, grads in parts])
    return params, state, sum(float(loss) for loss, _ in parts)


# --- evaluation ---------------------------------------------------------------------------


def respond(
    engine: Engine,
    params: transformer.Params,
    tok: tokenizer.Tokenizer,
    prompts: Sequence[str],
    key: jax.Array,
    max_new_tokens: int,
) -> list[Trajectory]:
    """Sample one response to each prompt at temperature 1."""
    requests = [Request(i, tuple(tok.encode(prompt))) for i, prompt in enumerate(prompts)]
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return generate(engine.model, params, requests, sampling, key=key, engine=engine)


def mean_rewards(
    engine: Engine,
    params: transformer.Params,
    tok: tokenizer.Tokenizer,
    num_prompts: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """Score responses to each task's held-out questions as RL would; return the means."""
    rewards = {}
    for index, task in enumerate(solutions.TASKS):
        dataset = task.dataset(solutions.EVAL_SEED, num_prompts)
        prompts = [entry["question"] + solutions.PROMPT_SUFFIX for entry in dataset]
        answers = respond(engine, params, tok, prompts, jax.random.key(index), max_new_tokens)
        scores = [
            score(dataset, entry, t.response_ids.tolist(), tok)
            for entry, t in zip(dataset, answers, strict=True)
        ]
        rewards[task.spec] = float(np.mean(scores))
    print({**rewards, "mean": np.mean([*rewards.values()])}, flush=True)
    return rewards


def score(
    dataset: Any, entry: solutions.Entry, ids: Sequence[int], tok: tokenizer.Tokenizer
) -> float:
    """Return the reward of a response; 0 without an end token or an answer."""
    answer = extract_answer("hash", tok.decode(ids)) if ids[-1] in tok.eos_token_ids else None
    return 0.0 if answer is None else float(dataset.score_answer(answer, entry))


# --- the command --------------------------------------------------------------------------


def make(output: Path, settings: Settings) -> None:
    """Train until the wanted reward, write the folder, and measure rewards on more prompts."""
    output.mkdir(parents=True, exist_ok=True)
    save_character_tokenizer(output, CHARACTERS)
    tok = tokenizer.load(output)
    model = model_config(settings, tok)
    engine = Engine(model)
    params = transformer.init(model, jax.random.key(settings.seed))
    optimizer = make_optimizer(settings.learning_rate, settings.steps)
    state, losses = optimizer.init(params), list[float]()

    def measure(num_prompts: int) -> dict[str, float]:
        return mean_rewards(engine, params, tok, num_prompts, settings.max_new_tokens)

    steps = itertools.islice(step_batches(settings, tok), settings.steps)
    for step, batches in enumerate(steps, start=1):
        params, state, loss = train_step(model, optimizer.update, params, state, batches)
        losses.append(loss)
        if step % 20 == 0:
            print(f"step {step:5d}  loss {np.mean(losses[-20:]):.4f}", flush=True)
        if step % settings.eval_every_steps == 0 and settings.drill_steps < step < settings.steps:
            if np.mean([*measure(settings.eval_prompts).values()]) >= settings.stop_at_reward:
                break
    hf.save_pretrained(output, model, params)
    rewards = measure(settings.final_eval_prompts)
    write_report(output / "warmstart.json", settings, steps_run=step, rewards=rewards)


def write_report(path: Path, settings: Any, **figures: Any) -> None:
    """Write settings and measurements beside the weights."""
    content = {
        "settings": dataclasses.asdict(settings),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        **figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.policy", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.output, Settings(seed=arguments.seed))


if __name__ == "__main__":
    main()
