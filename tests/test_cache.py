"""Chunked, forked and reordered caches against one uncached pass."""

import pytest
import torch
from checkpoints import TINY

from gpt2attn import GPT2Config, KVCache, load_model
from gpt2attn.kernels import KERNELS

# A chunk of another length runs other kernels; measured about 4e-6 on these weights.
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module", params=KERNELS)
def model(request, tiny_folder):
    return load_model(tiny_folder, kernels=request.param)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(TINY["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(3))


def feed(model, ids, chunks, cache):
    return torch.cat([model(chunk, cache=cache) for chunk in ids.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("chunks", [[6], [4, 1, 1], [1, 3, 2], [1] * 6, [2, 4]])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("is_observed", [False, True])
def test_d08_any_chunking_equals_the_uncached_pass(model, ids, chunks, rows, is_observed):
    ids = ids[:rows]
    observe = (lambda layer, steps: None) if is_observed else None
    cache = KVCache.for_model(model, rows)
    logits = torch.cat(
        [model(chunk, cache=cache, observe=observe) for chunk in ids.split(chunks, dim=1)], dim=1
    )
    torch.testing.assert_close(logits, model(ids), **CLOSE)
    assert cache.length == 6


def test_d08_nothing_leaks_from_one_call_to_the_next(model, ids):
    uncached = model(ids)
    first = feed(model, ids, [4, 1, 1], KVCache.for_model(model, 2))
    assert torch.equal(model(ids), uncached)
    assert torch.equal(feed(model, ids, [4, 1, 1], KVCache.for_model(model, 2)), first)


def test_d07_float64_agrees_with_and_without_a_cache(tiny_folder, ids):
    model = load_model(tiny_folder, dtype=torch.float64)
    logits = feed(model, ids, [1] * 6, KVCache.for_model(model, 2))
    torch.testing.assert_close(logits, model(ids), rtol=0, atol=1e-10)


def test_maps_of_a_cached_chunk_are_rows_of_the_whole_map(model, ids):
    whole, parts = [], []
    model(ids, observe=lambda layer, steps: whole.append(steps.weights))
    cache = KVCache.for_model(model, 2)
    model(ids[:, :4], cache=cache)
    model(ids[:, 4:], cache=cache, observe=lambda layer, steps: parts.append(steps.weights))
    torch.testing.assert_close(torch.stack(parts), torch.stack(whole)[..., 4:, :], **CLOSE)


def test_overflow_raises_before_any_compute(model, ids):
    cache = KVCache.for_model(model, 2, max_len=5)
    model(ids[:, :4], cache=cache)
    keys = cache.keys[:, :, :, :4].clone()
    with pytest.raises(ValueError, match="holds 4 of 5 tokens, so 2 more do not fit"):
        model(ids[:, 4:], cache=cache)
    assert cache.length == 4
    assert torch.equal(cache.keys[:, :, :, :4], keys)
    with pytest.raises(ValueError, match="holds 2 rows, the input 1"):
        model(ids[:1, 4:5], cache=cache)


def test_a_pass_that_fails_halfway_leaves_the_cache_as_it_was(model, ids):
    cache = KVCache.for_model(model, 2)
    model(ids[:, :4], cache=cache)

    def fail(layer, steps):
        if layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 4:], cache=cache, observe=fail)
    logits = model(ids[:, 4:], cache=cache)
    torch.testing.assert_close(logits, model(ids)[:, 4:], **CLOSE)


def test_a_fork_continues_on_its_own(model, ids):
    cache = KVCache.for_model(model, 2)
    model(ids[:, :4], cache=cache)
    fork = cache.fork()
    other = (ids[:, 4:] + 1) % TINY["vocab_size"]
    model(other, cache=fork)
    torch.testing.assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:], **CLOSE)
    assert fork.keys.data_ptr() != cache.keys.data_ptr()


def test_select_and_repeat_rearrange_rows(model, ids):
    cache = KVCache.for_model(model, 2)
    model(ids[:, :4], cache=cache)
    swapped = model(ids[[1, 0, 1], 4:], cache=cache.select([1, 0, 1]))
    torch.testing.assert_close(swapped, model(ids[[1, 0, 1]])[:, 4:], **CLOSE)
    twice = model(ids[[0, 0, 1, 1], 4:], cache=cache.repeat(2))
    torch.testing.assert_close(twice, model(ids[[0, 0, 1, 1]])[:, 4:], **CLOSE)
    for bad in ([], [2], [-1]):
        with pytest.raises(ValueError, match="the cache has the rows 0 to 1"):
            cache.select(bad)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 2, 2]])
@pytest.mark.parametrize("start", [0, 2, 4])
def test_reorder_is_select_in_place(model, ids, order, start):
    rows = torch.cat([ids, (ids[:1] + 5) % TINY["vocab_size"]])
    rows[:, :start] = rows[:1, :start]
    cache = KVCache.for_model(model, 3)
    model(rows[:, :4], cache=cache)
    for buffer in (cache.keys, cache.values):  # rounding may differ from row to row
        buffer[:, :, :, :start] = buffer[:, :1, :, :start]
    expected, buffer = cache.select(order), cache.keys.data_ptr()
    cache.reorder(order, start)
    assert cache.keys.data_ptr() == buffer
    assert torch.equal(model(rows[order, 4:], cache=cache), model(rows[order, 4:], cache=expected))


def test_reorder_keeps_the_number_of_rows(model, ids):
    cache = KVCache.for_model(model, 2)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="3 rows do not fit in place of 2; select"):
        cache.reorder([0, 1, 1])
    with pytest.raises(ValueError, match="the cache has the rows 0 to 1"):
        cache.reorder([0, 2])


def test_rows_that_hold_padding_go_on_needing_a_mask(model, ids):
    """However they were rearranged: without one, padding would be read as text."""
    cache = KVCache.for_model(model, 2)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 0] = False
    model(ids[:, :4], attention_mask=mask, cache=cache)
    for held in (cache, cache.fork(), cache.select([1, 0]), cache.repeat(2)):
        with pytest.raises(ValueError, match="padding"):
            model(ids[:1, 4:].repeat(held.batch_size, 1), cache=held)


def test_truncate_forgets_the_end(model, ids):
    cache = KVCache.for_model(model, 2)
    model(ids, cache=cache)
    cache.truncate(4)
    torch.testing.assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:], **CLOSE)
    with pytest.raises(ValueError, match="cache of 6 tokens to 7"):
        cache.truncate(7)


def test_memory_is_what_the_lesson_says():
    cache = KVCache(GPT2Config(), device="meta")
    assert cache.nbytes == 73_728 * 1024
    assert cache.keys.shape == (12, 1, 12, 1024, 64)
    with pytest.raises(ValueError, match="at least one row and one position"):
        KVCache(GPT2Config(), max_len=0)


def test_an_emptied_cache_holds_no_padding(model, ids):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    cache = KVCache.for_model(model, 2)
    model(ids, cache=cache, attention_mask=mask)
    cache.truncate(1)
    with pytest.raises(ValueError, match="holds padding"):
        model(ids, cache=cache)
    cache.truncate(0)
    assert torch.equal(model(ids, cache=cache), model(ids, cache=KVCache.for_model(model, 2)))
    with pytest.raises(TypeError):
        cache.truncate(1.5)


def test_a_cache_of_inference_mode_goes_on_outside(model, ids):
    with torch.inference_mode():
        cache = KVCache.for_model(model, 2)
        model(ids[:, :3], cache=cache)
        other = cache.fork()
    for one in (cache, other):
        torch.testing.assert_close(model(ids[:, 3:], cache=one), model(ids)[:, 3:], **CLOSE)
