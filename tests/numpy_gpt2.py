"""GPT-2 once more, in NumPy and float64: the formulas, with nothing of gpt2attn in them.

An oracle for tests: it reads the checkpoint's own file and keeps every step of every layer. One
text at a time, no cache, no mask but the causal one, and only the settings of GPT-2 itself. Sizes:
T tokens, C n_embd, H heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Layer:
    """Every step of one layer. Heads are the first axis of what has one for each."""

    x: ndarray  # (T, C) what attention is given: ln_1 of the residual stream
    w_q: ndarray  # (H, C, D), and so w_k and w_v
    w_k: ndarray
    w_v: ndarray
    b_q: ndarray  # (H, D), and so b_k and b_v
    b_k: ndarray
    b_v: ndarray
    q: ndarray  # (H, T, D), and so k and v
    k: ndarray
    v: ndarray
    scores: ndarray  # (H, T, T), and so scaled, masked and weights
    scaled: ndarray
    masked: ndarray
    weights: ndarray
    output: ndarray  # (H, T, D)
    w_o: ndarray  # (H, D, C)
    b_o: ndarray  # (C)
    attention_output: ndarray  # (T, C) what attention adds to the residual stream
    stream: ndarray  # (T, C) the residual stream that leaves the block


class NumpyGPT2:
    """The network of a checkpoint folder; called with token ids, it gives logits and layers."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.n_layer, self.n_head = config["n_layer"], config["n_head"]
        self.epsilon = config["layer_norm_epsilon"]
        self.weights = {
            name.removeprefix("transformer."): values.astype(np.float64)
            for name, values in load_file(folder / "model.safetensors").items()
        }

    def __call__(self, ids: Sequence[int]) -> tuple[ndarray, list[Layer]]:
        """Logits (T, V) and all the steps of each layer."""
        wte, wpe = self.weights["wte.weight"], self.weights["wpe.weight"]
        stream = wte[list(ids)] + wpe[: len(ids)]
        layers = []
        for number in range(self.n_layer):
            layers.append(self.block(f"h.{number}", stream))
            stream = layers[-1].stream
        return self.layer_norm("ln_f", stream) @ wte.T, layers

    def block(self, name: str, stream: ndarray) -> Layer:
        x = self.layer_norm(f"{name}.ln_1", stream)
        w_q, w_k, w_v = np.split(self.weights[f"{name}.attn.c_attn.weight"], 3, axis=1)  # (C, C)
        b_q, b_k, b_v = np.split(self.weights[f"{name}.attn.c_attn.bias"], 3)
        w_o, b_o = (
            self.weights[f"{name}.attn.c_proj.weight"],
            self.weights[f"{name}.attn.c_proj.bias"],
        )
        C, H = len(b_o), self.n_head
        D, T = C // H, len(x)

        def by_head(matrix: ndarray) -> ndarray:
            """Columns h * D to (h + 1) * D belong to head h."""
            return np.stack(np.split(matrix, H, axis=-1))

        q, k, v = by_head(x @ w_q + b_q), by_head(x @ w_k + b_k), by_head(x @ w_v + b_v)
        scores = q @ k.transpose(0, 2, 1)
        scaled = scores / np.sqrt(D)
        masked = scaled + np.where(np.tri(T, dtype=bool), 0.0, -np.inf)
        weights = softmax(masked)
        output = weights @ v
        concatenated = np.concatenate(list(output), axis=-1)  # (T, C)
        attention_output = concatenated @ w_o + b_o
        stream = stream + attention_output
        stream = stream + self.mlp(f"{name}.mlp", self.layer_norm(f"{name}.ln_2", stream))
        return Layer(
            x,
            *map(by_head, (w_q, w_k, w_v)),
            *map(by_head, (b_q, b_k, b_v)),
            *(q, k, v, scores, scaled, masked, weights, output),
            w_o.reshape(H, D, C),
            *(b_o, attention_output, stream),
        )

    def mlp(self, name: str, x: ndarray) -> ndarray:
        return self.linear(f"{name}.c_proj", gelu(self.linear(f"{name}.c_fc", x)))

    def linear(self, name: str, x: ndarray) -> ndarray:
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def layer_norm(self, name: str, x: ndarray) -> ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + self.epsilon)
        return normal * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def softmax(x: ndarray) -> ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def gelu(x: ndarray) -> ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
