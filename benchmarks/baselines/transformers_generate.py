"""`generate` of transformers: `python -m benchmarks.baselines.transformers_generate`.

Runs in an environment of its own, with torch. Variants: how the cache is kept,
how attention is computed, and on how many cores (torch's threads wait for each
other at every operation, which costs dearly on a busy machine). All with
`use_cache` and in inference mode. Log-probabilities are taken from the logits it
hands out for each step.
"""

from __future__ import annotations

import os

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.baselines import protocol
from benchmarks.shape import Shape


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Transformers:
    name = "transformers"
    variants = tuple(
        f"{cache}/{attention}/{threads}"
        for threads in ("one thread", "all cores")
        for cache in ("dynamic", "static")
        for attention in ("sdpa", "eager")
    )
    packages = ("transformers", "torch", "numpy")

    def prepare(self, shape: Shape, policy: str, variant: str) -> None:
        self.shape = shape
        self.cache, attention, threads = variant.split("/")
        torch.set_num_threads(1 if threads == "one thread" else cores())
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(
            policy, dtype=getattr(torch, shape.dtype), attn_implementation=attention
        ).to(self.device)
        self.model.eval()
        self.prompts = torch.tensor(shape.prompts(), device=self.device)

    def generate(self, seed: int, greedy: bool) -> tuple[list, list]:
        torch.manual_seed(seed)
        generation = GenerationConfig(
            do_sample=not greedy,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.shape.new_tokens,
            use_cache=True,
            cache_implementation="static" if self.cache == "static" else None,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        with torch.inference_mode():
            out = self.model.generate(
                self.prompts,
                attention_mask=torch.ones_like(self.prompts),
                generation_config=generation,
            )
            tokens_BT = out.sequences[:, self.shape.prompt :]
            logprobs_T = [
                logits_BV.gather(1, tokens_BT[:, t : t + 1])[:, 0] - logits_BV.logsumexp(1)
                for t, logits_BV in enumerate(out.logits)
            ]
            return tokens_BT.tolist(), torch.stack(logprobs_T, dim=1).tolist()


if __name__ == "__main__":
    protocol.serve(Transformers())
