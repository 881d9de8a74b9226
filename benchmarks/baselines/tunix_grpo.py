"""The GRPOLearner of google-tunix (0.1.7), which waits for a command before it reads prompts.

Its learner generates responses for each optimizer step apart ("each update"). With "one rollout" it
generates all of a step at once, as for accumulated gradients, and its trainer, made without
accumulation, makes an optimizer step of every part. With one iteration it has no log-probabilities
of before: its ratios are 1. It does not train on end tokens. Responses are padded to the longest
possible one, prompts to the longest of the task. Noise is of a generator by name, with another key
for each rollout (its default is one key for all).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import numpy as safetensors
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.end_to_end.protocol import WEIGHTS, Parent, Step, prompt_text

VARIANTS = (
    "one rollout, threefry2x32",
    "one rollout, rbg",
    "one rollout, unsafe_rbg",
    "each update, threefry2x32",
)
PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "optax", "transformers", "numpy")
NEVER = 1_000_000_000


class Policy:
    """A tunix model, and its weights by their names in the policy's folder."""

    def __init__(self, folder: str, mesh: jax.sharding.Mesh) -> None:
        hf = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        heads, tied = hf["num_attention_heads"], hf.get("tie_word_embeddings", False)
        shared = {
            "num_layers": hf["num_hidden_layers"],
            "vocab_size": hf["vocab_size"],
            "embed_dim": hf["hidden_size"],
            "hidden_dim": hf["intermediate_size"],
            "num_heads": heads,
            "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
            "num_kv_heads": hf["num_key_value_heads"],
            "rope_theta": (hf.get("rope_parameters") or hf)["rope_theta"],
            "norm_eps": hf["rms_norm_eps"],
        }
        module: Any
        params: Any
        if hf["model_type"] == "qwen3":
            module, params = qwen3, qwen3_params
            config: Any = qwen3.ModelConfig(**shared, use_tied_embedding=tied)
        elif hf["model_type"] == "llama":
            module, params = llama3, llama3_params
            config = llama3.ModelConfig(**shared, weight_tying=tied)
        else:
            raise ValueError(f"expected a qwen3 or llama policy, got {hf['model_type']}")
        # 0.1.7 reads no rope_theta of a configuration: all its models rotate by 1e6
        module.apply_rope = partial(module.apply_rope, rope_theta=config.rope_theta)
        self.model = params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)
        self._mapping = params._get_key_and_transform_mapping(config)
        self._shapes = {
            name: x.shape for name, x in safetensors.load_file(Path(folder) / WEIGHTS).items()
        }

    def save(self, folder: Path) -> None:
        """Write the weights under their names and in their shapes of the policy's folder."""
        flat = {
            ".".join(map(str, path)): np.asarray(x.get_value())
            for path, x in nnx.to_flat_state(nnx.state(self.model, nnx.Param))
        }
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: self._weight(name, flat) for name in self._shapes}
        safetensors.save_file(weights, folder / WEIGHTS)

    def _weight(self, name: str, flat: Mapping[str, np.ndarray]) -> np.ndarray:
        """Undo what the loader does to a weight: transpose, then reshape."""
        for pattern, (target, change) in self._mapping.items():
            if re.fullmatch(pattern, name):
                x, shape = flat[re.sub(pattern, target, name)], self._shapes[name]
                if change is None:
                    return np.ascontiguousarray(x)
                return np.ascontiguousarray(x.reshape(shape[::-1]).T)
        raise KeyError(name)


class Run:
    """The learner and its parts, timed."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self.given = parent, parent.given
        way, self._generator = self.given.variant.split(", ")
        self._is_one_rollout = way == "one rollout"
        self._now, self._steps, self._rollouts = Step(), 0, 0
        self._tokenizer = AutoTokenizer.from_pretrained(self.given.policy)
        self._rows = [
            {"prompts": prompt_text(self._tokenizer, row["prompt"]), "answer": row["answer"]}
            for row in self.given.rows()
        ]
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        self._policy = Policy(self.given.policy, self._mesh)
        self._cluster = self._make_cluster()
        generate = self._cluster.generate
        self._cluster.generate = lambda *a, **named: self._timed_rollout(generate, *a, **named)

    def train(self) -> None:
        """Train until the parent's commands end."""
        algorithm = GRPOConfig(
            num_generations=self.given.group_size,
            num_iterations=1,
            beta=0.0,
            epsilon=0.2,
            loss_agg_mode="token-mean",
        )
        with self._mesh:
            GRPOLearner(self._cluster, algorithm, self._score).train(self._batches())

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield the prompts of a step for each command, when the updates before are done."""
        B, figures = self.given.prompts_per_step, dict[str, Any]()
        while True:
            if not self._parent.next_step(figures, self._policy.save):
                return
            self._now = Step()
            before, start = self._cluster.actor_trainer.train_steps, self._steps * B
            self._steps += 1
            rows = [self._rows[i % len(self._rows)] for i in range(start, start + B)]
            yield {name: np.array([row[name] for row in rows]) for name in rows[0]}
            jax.block_until_ready(nnx.state(self._policy.model))
            updates = self._cluster.actor_trainer.train_steps - before
            figures = self._now.figures() | {"updates": updates}

    def _timed_rollout(self, generate: Any, *arguments: Any, **named: Any) -> Any:
        jax.block_until_ready(nnx.state(self._policy.model))  # else the update's seconds count here
        self._rollouts += 1
        number = 100_000 * self.given.seed + self._rollouts
        self._rollout.seed = jax.random.key(number, impl=self._generator)  # the sampler donates it
        made = self._now.timed("rollout", generate, *arguments, **named)
        most = self.given.max_new_tokens
        self._now.tokens += sum(min(len(ids) + 1, most) for ids in made.tokens)  # and their ends
        return made

    def _score(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        rewards = self._now.timed("reward", self.given.score, completions, columns["answer"])
        self._now.rewards += rewards
        return rewards

    def _make_cluster(self) -> rl_cluster.RLCluster:
        given, roles = self.given, rl_cluster.Role
        longest = max(len(self._tokenizer.encode(row["prompts"])) for row in self._rows)
        part = given.prompts_per_step // given.updates_per_step
        whole = given.prompts_per_step if self._is_one_rollout else part
        training = rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.adamw(given.learning_rate, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0),
            ),
            mini_batch_size=whole,
            train_micro_batch_size=part,
            rollout_micro_batch_size=whole,
            eval_every_n_steps=NEVER,
            max_steps=NEVER,
        )
        self._rollout = RolloutConfig(
            max_tokens_to_generate=given.max_new_tokens,
            max_prompt_length=longest,
            kv_cache_size=longest + given.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
        )
        accumulated, training.gradient_accumulation_steps = whole // part, None
        cluster = rl_cluster.RLCluster(
            actor=self._policy.model,
            tokenizer=self._tokenizer,
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={
                    role: self._mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)
                },
                training_config=training,
                rollout_config=self._rollout,
            ),
        )
        training.gradient_accumulation_steps = accumulated  # parts that the learner reads at once
        return cluster


if __name__ == "__main__":
    Run(Parent(VARIANTS, PACKAGES)).train()
