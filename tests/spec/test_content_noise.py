"""Names of noise that goes by content: host and device agree, and no name comes twice."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec import content_noise
from spec.content_noise import Contexts
from spec.drafter import plant, stack
from spec.tree import Draft, DraftTree, ancestors

K, ROOM, NODES = 3, 16, 6


def brute(prompt, response, k):
    """(context, how often it came before) of each response token, by looking at all of them."""
    tokens, names = [*prompt, *response], []
    for t in range(len(prompt), len(tokens)):
        context = tuple(([content_noise.NO_TOKEN] * k + tokens[:t])[-k:])
        names.append((context, sum(context == c for c, _ in names)))
    return names


few = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(few, few, st.integers(1, 4))
def test_a_name_is_a_context_and_how_often_it_came_before(prompt, response, k):
    hashes, counts = content_noise.of_response(np.asarray(prompt), np.asarray(response), k)
    want = brute(prompt, response, k)
    by_context = {context: h for (context, _), h in zip(want, hashes.tolist(), strict=True)}
    assert [by_context[c] for c, _ in want] == hashes.tolist()  # a function of the context
    assert len(set(by_context.values())) == len(by_context)  # and another for each
    assert counts.tolist() == [n for _, n in want]
    assert len(set(zip(hashes.tolist(), counts.tolist(), strict=True))) == len(response)


def test_host_and_device_hash_alike():
    tokens = np.random.default_rng(0).integers(-1, 2**31 - 1, (50, 5)).astype(np.int32)
    host = content_noise.hash_contexts(tokens)
    assert host.dtype == np.uint32 and len(set(host.tolist())) == 50
    np.testing.assert_array_equal(
        host, np.asarray(content_noise.hash_contexts(jnp.asarray(tokens)))
    )


def some_tree(rng, drafts):
    edges = []
    for i in range(drafts):
        edge = int(rng.integers(-1, i)) if i else -1, int(rng.integers(0, 3))
        edges += [edge] if edge not in edges and edge[0] < len(edges) else []
    return Draft([t for _, t in edges], [p for p, _ in edges])


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_nodes_have_the_names_that_their_paths_will_have_as_responses(seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 3, rng.integers(1, 5)) for _ in range(4)]
    responses = [rng.integers(0, 3, rng.integers(0, 8)) for _ in range(4)]
    tokens_BL = np.zeros((4, 20), np.int32)
    for row, p, r in zip(tokens_BL, prompts, responses, strict=True):
        row[: len(p) + len(r)] = np.concatenate([p, r])
    first_B, emitted_B = (np.array([len(x) for x in xs]) for xs in (prompts, responses))
    known = content_noise.of_rows(tokens_BL, first_B, first_B + emitted_B, K, ROOM)
    drafts = [some_tree(rng, int(rng.integers(0, NODES))) for _ in range(4)]
    tokens_BN, parents_BN = plant(stack(drafts, NODES), np.arange(4), 4, NODES)
    tokens_BN[:, 0] = tokens_BL[np.arange(4), first_B + emitted_B - 1]
    tree = DraftTree(jnp.asarray(tokens_BN), jnp.asarray(parents_BN))
    slots = Contexts(*map(jnp.asarray, known))
    hash_BN, met_BN = content_noise.of_nodes(
        slots, tree, jnp.asarray(emitted_B), ancestors(tree.parents_BN)
    )
    for b, draft in enumerate(drafts):
        for n in range(len(draft.tokens) + 1):
            path, node = [], n
            while node > 0:
                path.insert(0, int(tokens_BN[b, node]))
                node = int(parents_BN[b, node])
            more = np.concatenate([responses[b], path, [0]]).astype(int)  # what comes is any
            names, counts = content_noise.of_response(prompts[b], more, K)
            assert (int(hash_BN[b, n]), int(met_BN[b, n])) == (int(names[-1]), int(counts[-1]))


def test_what_rounds_add_is_what_the_host_would_have_made_anew():
    rng = np.random.default_rng(1)
    tokens_BL = rng.integers(0, 3, (5, 24)).astype(np.int32)
    first_B, total_B = np.array([1, 2, 3, 8, 8]), np.array([1, 4, 9, 8, 20])
    count_B = np.array([0, 1, 2, 3, 4])
    before = Contexts(
        *map(jnp.asarray, content_noise.of_rows(tokens_BL, first_B, total_B, K, ROOM))
    )
    new_BN = tokens_BL[np.arange(5)[:, None], total_B[:, None] + np.arange(4)]
    rows = zip(tokens_BL, first_B, total_B, strict=True)
    names_BN = np.stack(
        [content_noise.of_response(t[:p], t[p:], K)[0][n - p :][:4] for t, p, n in rows]
    )
    after = content_noise.advance(
        before, jnp.asarray(names_BN), jnp.asarray(new_BN), count_B, total_B - first_B
    )
    want = content_noise.of_rows(tokens_BL, first_B, total_B + count_B, K, ROOM)
    np.testing.assert_array_equal(after.tail_BK, want[0])
    for got, wanted, n in zip(after.seen_BX, want[1], total_B + count_B - first_B, strict=True):
        np.testing.assert_array_equal(got[:n], wanted[:n])


def test_a_text_that_an_insertion_has_moved_meets_its_names_again():
    prompt, response = np.array([90, 91]), np.arange(20)
    moved = np.insert(response, 5, 77)
    names, counts = content_noise.of_response(prompt, response, K)
    names_after, counts_after = content_noise.of_response(prompt, moved, K)
    np.testing.assert_array_equal(names_after[:6], names[:6])
    np.testing.assert_array_equal(names_after[6 + K :], names[5 + K :])
    assert not np.isin(names_after[6 : 6 + K], names).any()
    assert not counts.any() and not counts_after.any()
