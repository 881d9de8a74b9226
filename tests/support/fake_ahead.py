"""Commits by hand, and drafters that count on from the last token. For tests."""

import numpy as np

from reprise.spec.decoupled.messages import Commit, DraftPlan
from reprise.spec.drafter import Drafter, no_drafts

NO_CHAIN = ()


def commit(
    tokens,
    *,
    request=0,
    round=1,
    first=0,
    prompt=2,
    left=50,
    chain=NO_CHAIN,
    plan=DraftPlan(3),  # noqa: B008  an immutable tuple
    processing=(1.0, 0.0, 1.0),
):
    arrays = np.array(tokens, np.int32), np.array(chain, np.int32)
    return Commit(request, round, first, arrays[0], prompt, left, arrays[1], plan, processing)


class CountsOn(Drafter):
    """Drafts the numbers behind a request's last token, each with probability ½; notes calls."""

    def __init__(self, most=99):
        self.most = most
        self.asked = []  # (request, tokens, how many) of each call
        self.gone, self.seen = [], []

    def propose(self, live, max_nodes_A, max_nodes):
        drafts = no_drafts(len(live), max_nodes)
        ids, total_A = live.request_ids_A.tolist(), live.total_tokens_A
        rows = zip(live.rows_A, total_A, strict=True)
        texts = [live.tokens_BL[row, :n].tolist() for row, n in rows]
        self.asked.append(list(zip(ids, texts, max_nodes_A.tolist(), strict=True)))
        for a, text in enumerate(texts):
            n = min(int(max_nodes_A[a]), self.most)
            drafts.tokens_AN[a, :n] = np.arange(n) + text[-1] + 1
            drafts.parents_AN[a, :n] = np.arange(n) - 1
            drafts.prob_AN[a, :n] = 0.5 ** (np.arange(n) + 1)
            drafts.count_A[a] = n
        return drafts

    def observe_chains(self, acceptance_A2):
        self.seen.append(acceptance_A2.tolist())

    def finished(self, live):
        self.gone.append(live.request_ids_A.tolist())

    def outcomes(self, live, chain_AK, depth, fan_out):
        """Guess f of case z is 100 · z + 10 · f + 10, and numbers behind it; likelier first.

        Second choices are 5,000 more than the tokens that they stand beside.
        """
        self.asked.append((live.request_ids_A.tolist(), chain_AK.tolist(), depth, fan_out))
        Z, F = np.arange(chain_AK.shape[1] + 1), np.arange(fan_out)
        first_ZF = 100 * Z[:, None] + 10 * F + 10
        tokens_ZFN = first_ZF[..., None] + np.arange(depth + 1)
        prob_ZF = np.broadcast_to(0.5 ** (F + 1), first_ZF.shape)
        found = tokens_ZFN, tokens_ZFN[..., 1:] + 5000, prob_ZF
        return tuple(np.broadcast_to(x, (len(live), *x.shape)) for x in found)
