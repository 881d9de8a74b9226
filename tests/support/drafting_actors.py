"""Drafting workers as actors in threads of this process, for the requests of `tiny_team`."""

import dataclasses

import jax
import jax.numpy as jnp
from thread_actors import SETTINGS, ThreadRoom
from tiny_team import CONFIG, MODEL, PARAMS, REQUESTS, SAMPLING

from reprise.models.formats import hf
from reprise.rl.cluster.actors import Actor
from reprise.rl.drafting.config import DraftingConfig
from reprise.rl.drafting.plans import Planner
from reprise.rl.drafting.workers import CONCURRENCY, DraftingActors, DraftingSettings
from reprise.rl.speculation.config import DraftModelConfig

LONGEST, WINDOW = 24, 2  # tokens of a prompt and a response; draft tokens


def save_policy(folder):
    """Save the policy as its own draft model, which proposes its own draws; return its settings."""
    hf.save_pretrained(folder, MODEL, jax.tree.map(jnp.asarray, PARAMS))
    return DraftModelConfig(str(folder), max_depth=3, proposal="shared_noise")


def drafting_actors(model, verifying=2, workers=1, room=None, lines=None, **settings):
    """The drafting workers of a run: a context manager."""
    config = DraftingConfig(workers=workers, window=WINDOW, **settings)
    planner = Planner(config, verifying + workers, len(REQUESTS), WINDOW)
    planner.drafting_workers = workers
    sizes = WINDOW, len(REQUESTS), LONGEST
    given = DraftingSettings(MODEL, CONFIG, "float32", model, config, *sizes, SAMPLING)
    say = (lambda line: None) if lines is None else lines.append
    room, of_actors = room or ThreadRoom(), dataclasses.replace(SETTINGS, say=say)

    def start(number):
        target = "reprise.rl.drafting.workers:DraftingActor"
        named = f"drafting worker {number}", target, (given,)
        options = {"make_s": 300.0, "concurrency": CONCURRENCY}
        return Actor(*named, of_actors, room, number, **options)

    return DraftingActors(planner, workers, start, hang_limit_s=300.0)
