"""Analysis: what attention maps, heads, embeddings and the residual stream say, as numbers.

`maps` works on attention weights and value vectors, `embeddings` on an embedding table; `heads` and
`stream` run a GPT2 and hand its tensors to them. Every formula and its source stands in a
docstring. A mean or a maximum over heads needs no function: `weights.mean(-3)`, `weights.amax(-3)`.

Attention is not an explanation of the output: a weight says where a head looked, not what it did
with it.
"""

from .embeddings import cosine, neighbours, unembedding_bias
from .heads import (
    IOI_HEADS,
    Ablation,
    HeadScores,
    ablate_heads,
    copying_score,
    head_scores,
    is_gpt2_small,
    measure_heads,
    ov_copying_scores,
    ov_eigenvalues,
    rank_heads,
    repeated_random_ids,
    value_weighted_maps,
)
from .maps import (
    attention_distance,
    diagonal_score,
    entropy,
    over_queries,
    rollout,
    sink_share,
    uniform_weights,
    value_weighted,
)
from .stream import (
    Drift,
    Lens,
    ResidualStream,
    context_drift,
    kl_divergence,
    logit_lens,
    residual_stream,
)

__all__ = [
    "IOI_HEADS",
    "Ablation",
    "Drift",
    "HeadScores",
    "Lens",
    "ResidualStream",
    "ablate_heads",
    "attention_distance",
    "context_drift",
    "copying_score",
    "cosine",
    "diagonal_score",
    "entropy",
    "head_scores",
    "is_gpt2_small",
    "kl_divergence",
    "logit_lens",
    "measure_heads",
    "neighbours",
    "ov_copying_scores",
    "ov_eigenvalues",
    "over_queries",
    "rank_heads",
    "repeated_random_ids",
    "residual_stream",
    "rollout",
    "sink_share",
    "unembedding_bias",
    "uniform_weights",
    "value_weighted",
    "value_weighted_maps",
]
