"""Edits against transformers with the same activations changed by hooks."""

import pytest
import torch
from checkpoints import TINY
from transformers import GPT2LMHeadModel

from gpt2attn import load_model
from gpt2attn.edits import (
    block_output,
    chain,
    head_outputs,
    mean_head_output,
    set_block,
    set_heads,
)

IDS = torch.randint(TINY["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(4))
D = 8


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch")


def theirs_with(tiny_folder, layer, change):
    """transformers' logits with `change` applied to what enters c_proj of a layer, heads side by
    side.
    """
    model = GPT2LMHeadModel.from_pretrained(tiny_folder, attn_implementation="sdpa")
    model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(
        lambda module, args: (change(args[0].clone()),)
    )
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("positions", [None, [-1], [2, 5]])
def test_zero_ablation_of_a_head(tiny_folder, model, positions):
    def change(x):
        x[:, slice(None) if positions is None else positions, 2 * D : 3 * D] = 0
        return x

    logits = model(IDS, edit=set_heads(model, [(1, 2)], positions=positions))
    assert torch.equal(logits, theirs_with(tiny_folder, 1, change))
    assert not torch.equal(logits, model(IDS))


def test_several_heads_at_once_and_negative_numbers(model):
    pairs = [(0, 1), (2, 3)]
    edited = model(IDS, edit=set_heads(model, pairs))
    chained = model(IDS, edit=chain(*(set_heads(model, [pair]) for pair in pairs)))
    assert torch.equal(edited, chained)
    assert torch.equal(edited, model(IDS, edit=set_heads(model, [(0, 1), (-1, -1)])))


def test_a_chain_keeps_its_order(model):
    first, second = set_block(model, 1, 1.0), set_block(model, 1, 2.0)
    assert torch.equal(model(IDS, edit=chain(first, second)), model(IDS, edit=second))


def test_mean_ablation_puts_the_mean_in_the_heads_place(tiny_folder, model):
    mean = mean_head_output(model, IDS, 1, 2)
    assert mean.shape == (D,)

    def change(x):
        x[..., 2 * D : 3 * D] = mean
        return x

    logits = model(IDS, edit=set_heads(model, [(1, 2)], mean))
    assert torch.equal(logits, theirs_with(tiny_folder, 1, change))


def test_patching_a_block_from_another_run_gives_that_run(model):
    other = (IDS + 1) % TINY["vocab_size"]
    patched = model(IDS, edit=set_block(model, 1, block_output(model, other, 1)))
    assert torch.equal(patched, model(other))


def test_patching_at_one_position_reaches_only_later_ones(model):
    other = (IDS + 1) % TINY["vocab_size"]
    stream = block_output(model, other, 0)[:, 4:5]
    patched = model(IDS, edit=set_block(model, 0, stream, positions=[4]))
    assert torch.equal(patched[:, :4], model(IDS)[:, :4])
    assert not torch.equal(patched[:, 5:], model(IDS)[:, 5:])


def test_head_outputs_are_the_observed_ones(model):
    seen = {}
    model(IDS, observe=lambda layer, steps: seen.update({layer: steps.output}))
    torch.testing.assert_close(head_outputs(model, IDS, 1, 3), seen[1][:, 3], rtol=0, atol=1e-5)


def test_the_next_call_runs_as_ever(model):
    expected = model(IDS)
    model(IDS, edit=set_heads(model, [(0, 0)]))
    assert torch.equal(model(IDS), expected)


def test_an_edit_that_changes_nothing_changes_nothing(model):
    assert torch.equal(model(IDS, edit=lambda layer, site, x: x), model(IDS))


def test_sites_and_shapes(model):
    seen = []

    def edit(layer, site, x):
        seen.append((layer, site, tuple(x.shape)))
        return x

    model(IDS, edit=edit)
    assert seen == [
        (layer, site, shape)
        for layer in range(3)
        for site, shape in (("heads", (2, 4, 9, D)), ("block", (2, 9, 32)))
    ]


@pytest.mark.parametrize(("layer", "head"), [(3, 0), (0, 4), (-4, 0)])
def test_what_does_not_exist_is_refused(model, layer, head):
    with pytest.raises(ValueError, match="is not there: this model has the"):
        set_heads(model, [(layer, head)])
    if head == 0:
        with pytest.raises(ValueError, match="this model has the layers 0 to 2"):
            set_block(model, layer)
