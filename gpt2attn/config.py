"""GPT2Config: the numbers that fix a GPT-2, under the names of Hugging Face's config.json.

What reaches the forward pass is read and checked; what we do not implement is refused by name,
since a setting that is silently ignored is a wrong logit later. Keys that only concern training,
other heads or other programs are skipped; keys nobody knows are reported once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .untrusted import listed, read_json, short

ACTIVATIONS = (
    "gelu_new",
    "gelu",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "relu",
    "silu",
    "swish",
    "tanh",
)

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

# Keys of real GPT-2 config files that have no say in a forward pass at inference: training, other
# heads, bookkeeping, and defaults of generation, which are the caller's to choose (they never apply
# silently). `n_ctx` is an old twin of n_positions that the reference does not read either.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
    architectures attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length max_new_tokens min_length n_ctx n_special
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id
    predict_special_tokens prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unk_token_id
    use_bfloat16 use_cache xla_device
    """.split()  # noqa: SIM905 - as a list of quoted names it would fill two pages
)

# What other model families call our keys: too far from them for a spelling check to notice.
OTHER_NAMES = {
    "d_model": "n_embd",
    "hidden_act": "activation_function",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "num_heads": "n_head",
    "num_layers": "n_layer",
}

# Keys that change what is computed unless they hold one of these values.
FIXED = {
    "model_type": ("gpt2", None),
    "attention_head_type": ("multihead", None),
    "position_embedding_type": ("absolute", "learned", None),
}

# Keys that must be absent, null, false or empty.
REFUSED = {
    "add_cross_attention": "a decoder-only GPT-2 has no cross-attention",
    "auto_map": "the model needs code from its repository, which is never run here",
    "quantization_config": "quantised weights are not supported; use the original ones",
}

# Beyond these no GPT-2 exists, and building one would take minutes or overflow torch's sizes.
LARGEST_SIZE = 2**24
MOST_LAYERS = 1000


class ConfigError(ValueError):
    """A config.json that describes no GPT-2 this package can run exactly."""


@dataclass(frozen=True)
class GPT2Config:
    """Sizes and switches of one model; the defaults are GPT-2 small's.

    Raises ConfigError, naming the key, for a value that is not implemented or makes no sense.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # None: 4 * n_embd
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256  # several: any of them ends the text

    def __post_init__(self) -> None:
        for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            _check_size(key, getattr(self, key))
        if self.n_inner is not None:
            _check_size("n_inner", self.n_inner)
        if self.n_embd % self.n_head:
            raise ConfigError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}.")
        if self.activation_function not in ACTIVATIONS:
            raise ConfigError(
                f"activation_function {short(self.activation_function)} is not supported; "
                f"supported: {', '.join(ACTIVATIONS)}."
            )
        epsilon = self.layer_norm_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
            raise ConfigError(f"layer_norm_epsilon must be a number, not {short(epsilon)}.")
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ConfigError(f"layer_norm_epsilon must be positive and finite, not {epsilon!r}.")
        object.__setattr__(self, "layer_norm_epsilon", float(epsilon))  # transformers insists on it
        for key in (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "tie_word_embeddings",
        ):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key} must be true or false, not {short(getattr(self, key))}.")
        _check_special_id("bos_token_id", self.bos_token_id)
        eos = self.eos_token_id
        if isinstance(eos, list):
            object.__setattr__(self, "eos_token_id", tuple(eos))
        for id in eos if isinstance(eos, list | tuple) else (eos,):
            _check_special_id("eos_token_id", id)
        if isinstance(eos, list | tuple) and None in eos:
            raise ConfigError("eos_token_id must be a token id or a list of them, without null.")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Width of the MLP between its two matrices."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End-of-text ids that the vocabulary has; an id outside it can never be produced."""
        eos = self.eos_token_id
        ids = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        return tuple(id for id in ids if 0 <= id < self.vocab_size)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPT2Config:
        """The config that a config.json's keys describe; raises ConfigError naming a bad key."""
        _refuse_other_models(values)
        fields = {field.name for field in dataclasses.fields(cls)}
        chosen: dict[str, Any] = {key: values[key] for key in fields if key in values}
        for alias, key in ALIASES.items():
            if alias not in values:
                continue
            if key in values and values[key] != values[alias]:
                raise ConfigError(
                    f"{key} is {short(values[key])} but its alias {alias} is "
                    f"{short(values[alias])}; remove one of them."
                )
            chosen[key] = values[alias]
        config = cls(**chosen)
        _check_attn_mult(values.get("attn_mult"), config)
        known = fields | ALIASES.keys() | IGNORED | FIXED.keys() | REFUSED.keys() | {"attn_mult"}
        _report_unknown(values.keys() - known, fields)
        _report_outside(config)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> GPT2Config:
        """The config in a config.json; raises ConfigError with the path in the message."""
        try:
            values = read_json(Path(path))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json that transformers reads back to the same model."""
        values = dataclasses.asdict(self)
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values}


def _check_size(key: str, value: Any) -> None:
    most = MOST_LAYERS if key == "n_layer" else LARGEST_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{key} must be a whole number from 1 to {most:,}, not {short(value)}.")


def _check_special_id(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{key} must be a token id or null, not {short(value)}.")


def _refuse_other_models(values: Mapping[str, Any]) -> None:
    """Refuse what carries GPT-2's key names but computes something else."""
    for key, supported in FIXED.items():
        value = values.get(key)
        if value not in supported:
            raise ConfigError(
                f"{key} is {short(value)}; this program runs GPT-2 only ({key} {supported[0]!r})."
            )
    for key, what in REFUSED.items():
        if values.get(key):
            raise ConfigError(f"{key} is set: {what}.")


def _check_attn_mult(attn_mult: Any, config: GPT2Config) -> None:
    """muP checkpoints scale scores by attn_mult / head_dim: GPT-2's scaling at one value only."""
    if attn_mult is not None and attn_mult != math.sqrt(config.head_dim):
        raise ConfigError(
            f"attn_mult {short(attn_mult)} is not supported; GPT-2 divides scores by the root of "
            f"head_dim, which is attn_mult {math.sqrt(config.head_dim):g}."
        )


def _report_unknown(unknown: set[str], fields: set[str]) -> None:
    if not unknown:
        return
    text = f"config.json: unknown keys, not used: {listed(unknown, limit=20)}"
    meant = []
    for key in sorted(unknown)[:100]:  # comparing spellings takes 1 ms, and there may be 100,000
        close = difflib.get_close_matches(key[:40].lower(), [*fields, *ALIASES], n=1, cutoff=0.85)
        if near := OTHER_NAMES.get(key) or (close[0] if close else None):
            meant.append(f"{near} by {key}")
    if meant:
        text += f"; did you mean {listed(meant)}"
    warnings.warn(f"{text}.", stacklevel=4)


def _report_outside(config: GPT2Config) -> None:
    eos = config.eos_token_id
    ids = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
    outside = [id for id in ids if id not in config.end_ids]
    if outside:
        warnings.warn(
            f"eos_token_id {listed(outside)} is outside the vocabulary of "
            f"{config.vocab_size}: it will never end a text.",
            stacklevel=4,
        )
