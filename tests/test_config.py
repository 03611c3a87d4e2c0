"""config.json in: what is read, what is refused by name, what is reported."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2attn.config import ACTIVATIONS, ALIASES, ConfigError, GPT2Config


def write(folder: Path, values: Any) -> Path:
    path = folder / "config.json"
    path.write_bytes(values if isinstance(values, bytes) else json.dumps(values).encode())
    return path


@pytest.fixture(autouse=True)
def _no_surprise() -> Iterator[None]:
    """A warning that a test does not ask for fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_defaults_are_the_references() -> None:
    ours, theirs = GPT2Config().to_dict(), transformers.GPT2Config()
    del ours["architectures"]
    assert {key: getattr(theirs, key) for key in ours} == ours


def test_transformers_reads_back_what_to_dict_gives(tmp_path: Path) -> None:
    ours = GPT2Config(
        vocab_size=90,
        n_positions=20,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_inner=37,
        activation_function="relu",
        layer_norm_epsilon=1e-6,
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=(0, 5),
    )
    path = write(tmp_path, ours.to_dict())
    theirs = transformers.GPT2Config.from_pretrained(tmp_path)
    assert {key: getattr(theirs, key) for key in ours.to_dict()} == ours.to_dict()
    assert GPT2Config.from_file(path) == ours


def test_a_whole_number_as_epsilon_is_written_as_transformers_takes_it(tmp_path: Path) -> None:
    write(tmp_path, GPT2Config(layer_norm_epsilon=1).to_dict())
    assert transformers.GPT2Config.from_pretrained(tmp_path).layer_norm_epsilon == 1


def test_a_config_that_transformers_writes_raises_no_warning(tmp_path: Path) -> None:
    transformers.GPT2Config(n_layer=3).save_pretrained(tmp_path)
    assert GPT2Config.from_file(tmp_path / "config.json").n_layer == 3
    full = transformers.GPT2Config(n_layer=3).to_dict()
    assert GPT2Config.from_dict(full).n_layer == 3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_d20_activation_is_kept_by_name(name: str) -> None:
    assert GPT2Config.from_dict({"activation_function": name}).activation_function == name


@pytest.mark.parametrize("name", ["quick_gelu", "GELU", "", None, 3, ["gelu"]])
def test_d20_unknown_activation_lists_the_supported_ones(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"activation_function .* supported: gelu_new, gelu, "):
        GPT2Config.from_dict({"activation_function": name})


def test_d21_every_key_has_the_references_default() -> None:
    full = GPT2Config().to_dict()
    for key in full:
        rest = {other: value for other, value in full.items() if other != key}
        assert GPT2Config.from_dict(rest) == GPT2Config()


def test_d21_config_of_eight_old_keys() -> None:
    old = {
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 512,
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 24,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    assert GPT2Config.from_dict(old) == GPT2Config(n_embd=1024, n_head=16, n_layer=24)


def test_d21_aliases() -> None:
    values = {alias: 8 * (number + 1) for number, alias in enumerate(ALIASES)}
    values["num_attention_heads"] = 4
    config = GPT2Config.from_dict(values)
    assert {key: getattr(config, key) for key in ALIASES.values()} == {
        key: values[alias] for alias, key in ALIASES.items()
    }
    twice = GPT2Config.from_dict({"n_layer": 6, "num_hidden_layers": 6})
    assert twice.n_layer == 6
    with pytest.raises(ConfigError, match="n_layer is 6 but its alias num_hidden_layers is 7"):
        GPT2Config.from_dict({"n_layer": 6, "num_hidden_layers": 7})


@pytest.mark.parametrize("key", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"])
@pytest.mark.parametrize(
    "value", [0, -1, 4.0, "4", None, True, [4], float("nan"), float("inf"), 2**63, 10**400]
)
def test_d21_sizes_of_a_wrong_kind(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a whole number from 1 to ") as caught:
        GPT2Config.from_dict({key: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_inner": 0}, "n_inner must be a whole number"),
        ({"n_embd": 30, "n_head": 4}, "n_embd 30 is not divisible by n_head 4"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be positive"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be positive"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be a number, not '1e-5'"),
        ({"layer_norm_epsilon": True}, "layer_norm_epsilon must be a number"),
        ({"scale_attn_weights": "false"}, "scale_attn_weights must be true or false"),
        ({"reorder_and_upcast_attn": 1}, "reorder_and_upcast_attn must be true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false"),
        ({"bos_token_id": "0"}, "bos_token_id must be a token id or null"),
        ({"eos_token_id": [0, None, "x"]}, "eos_token_id must be a token id or null, not 'x'"),
    ],
)
def test_d21_other_values_of_a_wrong_kind(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT2Config.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_head_type": "multiquery"}, "attention_head_type is 'multiquery'"),
        ({"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ({"attn_mult": 64}, "attn_mult 64 is not supported.* attn_mult 8"),
        ({"add_cross_attention": True}, "add_cross_attention is set"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "auto_map is set"),
    ],
)
def test_d22_models_that_only_look_like_gpt2(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT2Config.from_dict(values)


def test_d22_harmless_forms_of_refused_keys() -> None:
    harmless = {
        "attention_head_type": "multihead",
        "position_embedding_type": "absolute",
        "attn_mult": 8.0,  # the root of head_dim 64: GPT-2's own scaling
        "add_cross_attention": False,
        "quantization_config": None,
        "auto_map": {},
    }
    assert GPT2Config.from_dict(harmless) == GPT2Config()


def test_d22_unknown_keys_are_listed_once() -> None:
    with pytest.warns(UserWarning, match="unknown keys, not used") as caught:
        GPT2Config.from_dict(
            {"welcome": "hello", "n_layers": 6, "hidden_act": "relu", "\x1b[2J": 1}
        )
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "unknown keys, not used: '\\x1b[2J', hidden_act, n_layers, welcome" in text
    assert "did you mean activation_function by hidden_act, n_layer by n_layers" in text


@pytest.mark.parametrize("model_type", ["bert", "biogpt", "gpt_neo", "aragpt2", "", 3, ["gpt2"]])
def test_d23_other_families(model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_type is .*; this program runs GPT-2 only"):
        GPT2Config.from_dict({"model_type": model_type})


@pytest.mark.parametrize("values", [{}, {"model_type": None}, {"model_type": "gpt2"}])
def test_d23_no_family_means_gpt2(values: dict[str, Any]) -> None:
    assert GPT2Config.from_dict(values) == GPT2Config()


def test_d24_special_ids() -> None:
    values = {"vocab_size": 64, "bos_token_id": None}
    assert GPT2Config.from_dict({**values, "eos_token_id": None}).end_ids == ()
    assert GPT2Config.from_dict({**values, "eos_token_id": [0, 5]}).end_ids == (0, 5)
    with pytest.raises(ConfigError, match="without null"):
        GPT2Config.from_dict({**values, "eos_token_id": [0, None]})
    for outside in (64, 50256, -1):
        with pytest.warns(UserWarning, match=f"eos_token_id {outside} is outside the vocabulary"):
            config = GPT2Config.from_dict({**values, "eos_token_id": outside})
        assert config.end_ids == ()
        assert config.eos_token_id == outside  # kept, so that saving changes nothing


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html></html>", "is an HTML page"),
        (b"{", "is not valid JSON"),
        (b'{"n_head": 12', "is not valid JSON"),
        (b"\xff\xfe\xfd{}", "is not valid JSON"),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not a NoneType"),
        (b'{"n_head": 4, "n_head": 8}', "the key 'n_head' stands there twice"),
        (b'{"n_head": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a":' * 100_000, "is not valid JSON"),
        (b'{"a": "' + b"x" * 1_000_000 + b'"}', "has more than 1,000,000 bytes"),
    ],
)
def test_d34_files_that_are_no_config(tmp_path: Path, raw: bytes, message: str) -> None:
    path = write(tmp_path, raw)
    start = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        GPT2Config.from_file(path)
    assert time.process_time() - start < 1
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    assert GPT2Config.from_file(write(tmp_path, b'\xef\xbb\xbf{"n_layer": 2}')).n_layer == 2


def test_as_many_unknown_keys_as_a_file_may_hold_take_no_time(tmp_path: Path) -> None:
    path = write(tmp_path, {f"n_layer{number}": 1 for number in range(50_000)})
    start = time.process_time()
    with pytest.warns(UserWarning, match="and 49,980 more"):
        GPT2Config.from_file(path)
    assert time.process_time() - start < 5


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = st.sampled_from(
    sorted({*GPT2Config().to_dict(), *ALIASES, "attn_mult", "auto_map", "attention_head_type", "x"})
)


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_json_gives_a_config_or_one_sentence(values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = GPT2Config.from_dict(values)
        except ConfigError as error:
            config, sentence = None, str(error)
    if config is None:
        assert len(sentence) < 400
        assert sentence.isprintable()
    else:
        assert config.n_embd == config.n_head * config.head_dim
        assert all(0 <= id < config.vocab_size for id in config.end_ids)
