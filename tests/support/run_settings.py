"""Settings that tests of runs share, so that each program is compiled once; a scheduler."""

from reprise.sched.ledger import Ledger
from reprise.sched.protocol import ChunkDone, Defer, Submitted

TWO = ("Sched.workers=2", "Sched.chunk_tokens=3")
SLOTS = ("Engine.slots=4", "Engine.min_slots=4")
# Which rounds a request shares depends on time, and their shapes round differently: what is learnt
# from the trainer's own log-probabilities, with weights of 0 or 1, is the same to the bit.
SETTINGS = (
    "Algorithm.correction='token_mask:0.01:100'",
    *(*SLOTS, "Run.steps=6", "Sampling.draw='gumbel'"),
)
WORKERS = (*TWO, *SLOTS)
PIPELINE = ("Sched.mode='pipeline'", *TWO)
DAPO = ("Algorithm.name='dapo'", "Algorithm.max_extra_phases=2")
DRAFTS = ("Speculation.budget='fixed:3'", "Engine.max_nodes=4")
LEARNED = (
    *(*DRAFTS, "Speculation.sources=('group', 'own', 'learned')"),
    *("Drafter.max_depth=2", "Drafter.top_k=2", "Drafter.micro_batches=2", "Drafter.batch_rows=1"),
    *("Drafter.row_tokens=32", "DrafterTraining.learning_rate=0.003"),
)
TRAINED_AFTER = (*LEARNED, "Drafter.spot=False", "Drafter.steps_after_rollout=3")
BANDIT = (
    *("Speculation.budget='bandit'", "Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(3, 1)"),
    "Tuner.depths=(1, 2)",
)


class Deferring:
    """Gives all to worker 0, step by step; request 4 goes on in the next step after 3 tokens."""

    def __init__(self):
        self._ledger, self._late = Ledger(), None

    @property
    def num_unfinished(self):
        return self._ledger.num_unfinished

    def handle(self, event, now_s):
        waiting = self._ledger.apply(event)
        worker = self._ledger.workers[0]
        if isinstance(event, ChunkDone):
            (self._late,) = waiting
            self._late.pooled = False
            return [Defer(self._late.request_id)]
        if isinstance(event, Submitted):
            self._steps = [*getattr(self, "_steps", ()), waiting]
        actions = []
        if getattr(self, "_steps", ()) and not worker.running:
            begun = self._steps.pop(0)
            if self._late is not None:
                begun.append(self._late)
                self._late = None
            for r in begun:
                most = 3 if (r.request_id, r.generated_tokens) == (4, 0) else 2**31
                most = min(most, r.remaining_tokens)
                actions.append(self._ledger.start(r, worker, most, reserve=False))
        return actions
