"""The programs that are compared, each over one checkpoint, behind the same few methods.

A `Program` is a name; `open` makes an `Engine` of it, in the process that measures it: only there
its library is imported. All engines take and give plain ids, and decode greedily without ever
ending a text early.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..config import GPT2Config

Ids = list[int]

OURS, TORCH = "gpt2attn", "torch"
TRANSFORMERS, CTRANSLATE2, LLAMA_CPP = "transformers", "ctranslate2", "llama-cpp"
# The number formats that a program's weights can have here, with the bytes of one weight in each;
# where weights share scales, with their part of one.
FORMATS = {
    OURS: {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 64},
    TORCH: {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0},
    TRANSFORMERS: {"float32": 4.0},
    CTRANSLATE2: {"float32": 4.0, "int8": 1.0},
    LLAMA_CPP: {"f32": 4.0, "f16": 2.0, "q8_0": 1 + 2 / 32},
}
# What each peer imports, and what installs it.
NEEDS = {
    OURS: ((), ""),
    TORCH: ((), ""),
    TRANSFORMERS: (("transformers",), "pip install transformers"),
    CTRANSLATE2: (("ctranslate2", "transformers"), "pip install ctranslate2 transformers"),
    LLAMA_CPP: (("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
}


@dataclass(frozen=True)
class Program:
    """One of the names in `FORMATS` with the format of its weights."""

    name: str
    format: str

    @classmethod
    def parse(cls, text: str, dtype: str = "float32") -> Program:
        """NAME or NAME:FORMAT; NAME alone has as many bits as `dtype`, where it can, else 32."""
        name, _, format = text.partition(":")
        if name not in FORMATS:
            raise ValueError(f"Programs to compare are {', '.join(FORMATS)}, not {name!r}.")
        if not format:
            n_bytes = round(FORMATS[OURS][dtype])
            fitting = [one for one, each in FORMATS[name].items() if round(each) == n_bytes]
            format = dtype if dtype in fitting else [*fitting, *FORMATS[name]][0]
        if format not in FORMATS[name]:
            raise ValueError(
                f"{name} is measured with {', '.join(FORMATS[name])}, not with {format!r}."
            )
        return cls(name, format)

    def __str__(self) -> str:
        return f"{'gpt2attn torch' if self.name == TORCH else self.name} {self.format}"

    @property
    def spec(self) -> str:
        """What `parse` makes this program of."""
        return f"{self.name}:{self.format}"

    @property
    def is_ours(self) -> bool:
        return self.name in (OURS, TORCH)

    @property
    def kernels(self) -> str:
        """Of this package's own programs."""
        return "torch" if self.name == TORCH else "auto"

    @property
    def has_maps(self) -> bool:
        """Whether attention maps can be had of it."""
        return self.is_ours or self.name == TRANSFORMERS

    @property
    def missing(self) -> str:
        """Why it cannot run here, with what installs it; empty if it can."""
        modules, remedy = NEEDS[self.name]
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        return f"{' and '.join(absent)} not installed: {remedy}" if absent else ""


def bytes_per_token(config: GPT2Config, program: Program) -> int:
    """Bytes of weights that decoding one token reads: each matrix once, of `wpe` next to nothing.

    Biases and LayerNorms are counted as float32.
    """
    width, inner = config.n_embd, config.inner_dim
    matrices = config.n_layer * (4 * width * width + 2 * width * inner)
    matrices += config.vocab_size * width
    vectors = config.n_layer * (9 * width + inner) + 2 * width
    return round(matrices * FORMATS[program.name][program.format]) + 4 * vectors


def open_engine(program: Program, folder: Path, threads: int, n_positions: int) -> Engine:
    """The program with its weights loaded from `folder`, which `convert` has made for it."""
    if program.is_ours:
        return Ours(program, folder, threads)
    if program.name == TRANSFORMERS:
        return Transformers(program, folder, threads)
    if program.name == CTRANSLATE2:
        return CTranslate2(program, folder, threads)
    return LlamaCpp(folder, threads, n_positions)


class Engine(ABC):
    """A loaded program."""

    @property
    @abstractmethod
    def in_use(self) -> str:
        """What computes, in words."""

    @abstractmethod
    def decode(self, prompts: list[Ids], n_new: int) -> list[Ids]:
        """The `n_new` greedy ids after each of the prompts, which are equally long."""

    @abstractmethod
    def last_logits(self, ids: Ids) -> np.ndarray:
        """The logits (V,) after the last of `ids`, all of them in one prefill."""

    @property
    def compiles(self) -> bool:
        """Whether it runs a step that this package compiles, without which there is no lookup."""
        return False

    def maps(self, ids: Ids) -> object:
        """All attention maps."""
        raise NotImplementedError

    def one_layer(self, ids: Ids) -> object:
        """The attention maps of the middle layer."""
        raise NotImplementedError

    def no_layer(self, ids: Ids) -> object:
        """The same pass with nobody looking."""
        raise NotImplementedError


class Ours(Engine):
    """This package, with the kernels `auto` or `torch`."""

    def __init__(self, program: Program, folder: Path, threads: int) -> None:
        import torch

        from ..checkpoint import load_model

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        dtype = getattr(torch, program.format)
        self._kernels = program.kernels
        self.model = load_model(folder, dtype=dtype, kernels=program.kernels)

    @property
    def in_use(self) -> str:
        from ..kernels import use_kernels

        return use_kernels(self.model, self._kernels)

    @property
    def compiles(self) -> bool:
        return hasattr(self.model.compiled, "takes_guesses")

    def decode(self, prompts: list[Ids], n_new: int) -> list[Ids]:
        from ..generation import Row, decode
        from ..sampling import Sampling

        rows = [Row(ids, Sampling(temperature=0), seed=0) for ids in prompts]
        for _ in decode(self.model, rows, n_new):
            pass
        return [row.ids for row in rows]

    def last_logits(self, ids: Ids) -> np.ndarray:
        from ..cache import KVCache

        cache = KVCache.for_model(self.model, 1, len(ids))
        return self.model.last_logits([ids], cache=cache)[0].float().numpy()

    def maps(self, ids: Ids) -> object:
        from ..capture import attention_maps

        return attention_maps(self.model, [ids])

    def one_layer(self, ids: Ids) -> object:
        from ..capture import attention_maps

        return attention_maps(self.model, [ids], [self.model.config.n_layer // 2])

    def no_layer(self, ids: Ids) -> object:
        return self.model.hidden([ids])


class Transformers(Engine):
    """Hugging Face's GPT2LMHeadModel; its maps with `attn_implementation="eager"`."""

    def __init__(self, program: Program, folder: Path, threads: int) -> None:
        import torch
        from transformers import GenerationConfig, GPT2LMHeadModel

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        dtype = getattr(torch, program.format)
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.eval()
        # Without the folder's end-of-text id a greedy run never ends early.
        self.model.generation_config = GenerationConfig()

    @property
    def in_use(self) -> str:
        return "torch"

    def decode(self, prompts: list[Ids], n_new: int) -> list[Ids]:
        import torch

        ids = torch.tensor(prompts)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_new,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, ids.shape[1] :].tolist()

    def last_logits(self, ids: Ids) -> np.ndarray:
        import torch

        out = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].float().numpy()

    def maps(self, ids: Ids) -> object:
        import torch

        self.model.set_attn_implementation("eager")
        # The transformer alone: the logits are not asked for, and ours does not make them either.
        body = self.model.transformer
        return body(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions


class CTranslate2(Engine):
    """CTranslate2's Generator over the folder that its own converter wrote."""

    def __init__(self, program: Program, folder: Path, threads: int) -> None:
        import json

        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type=program.format,
            inter_threads=1,
            intra_threads=threads,
        )
        self._tokens = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))

    @property
    def in_use(self) -> str:
        return f"compute type {self._generator.compute_type}"

    def decode(self, prompts: list[Ids], n_new: int) -> list[Ids]:
        return [result.sequences_ids[0] for result in self._generate(prompts, n_new)]

    def last_logits(self, ids: Ids) -> np.ndarray:
        # forward_batch would unembed every position; one step of generation, only the last.
        (result,) = self._generate([ids], 1, return_logits_vocab=True)
        return np.array(result.logits[0][0], dtype=np.float32)

    def _generate(self, prompts: list[Ids], n_new: int, **options: Any) -> Any:
        tokens = [[self._tokens[id] for id in ids] for ids in prompts]
        return self._generator.generate_batch(
            tokens,
            max_length=n_new,
            end_token=[],
            include_prompt_in_result=False,
            **options,
        )


class LlamaCpp(Engine):
    """llama.cpp's own functions, through llama-cpp-python's bindings, over a GGUF file.

    The cache is float32 where the weights are, and llama.cpp's default float16 where they are not.
    """

    def __init__(self, folder: Path, threads: int, n_positions: int) -> None:
        import ctypes

        import llama_cpp

        self._c, self._threads, self._n_positions = llama_cpp, threads, n_positions
        # It keeps this callback, so this object must too.
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        (path,) = folder.glob("*.gguf")
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}.")
        self._float32 = path.stem == "f32"
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[int, Any] = {}
        self._context(1)

    @property
    def in_use(self) -> str:
        return "ggml, on the CPU"

    def decode(self, prompts: list[Ids], n_new: int) -> list[Ids]:
        context = self._context(len(prompts))
        new: list[Ids] = [[] for _ in prompts]
        fed, position = prompts, 0
        for _ in range(n_new):
            logits = self._feed(context, fed, position)
            position += len(fed[0])
            fed = [[int(row.argmax())] for row in logits]
            for ids, (id,) in zip(new, fed, strict=True):
                ids.append(id)
        return new

    def last_logits(self, ids: Ids) -> np.ndarray:
        return self._feed(self._context(1), [ids], 0)[0].copy()

    def _context(self, n_rows: int) -> Any:
        """A context for so many texts, emptied."""
        c = self._c
        if n_rows not in self._contexts:
            options = c.llama_context_default_params()
            options.n_ctx, options.n_seq_max = n_rows * self._n_positions, n_rows
            options.n_threads = options.n_threads_batch = self._threads
            if self._float32:
                options.type_k = options.type_v = c.GGML_TYPE_F32
            self._contexts[n_rows] = c.llama_init_from_model(self._model, options)
            if not self._contexts[n_rows]:
                raise ValueError(f"llama.cpp makes no context for {n_rows} texts.")
        context = self._contexts[n_rows]
        c.llama_memory_clear(c.llama_get_memory(context), False)
        return context

    def _feed(self, context: Any, rows: list[Ids], position: int) -> np.ndarray:
        """The logits (rows, V) after the last of each row, whose first id stands at `position`."""
        c = self._c
        width = len(rows[0])
        batch = c.llama_batch_init(width * len(rows), 0, 1)
        try:
            batch.n_tokens = width * len(rows)
            for i in range(batch.n_tokens):
                row, place = divmod(i, width)
                batch.token[i], batch.pos[i] = rows[row][place], position + place
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                batch.logits[i] = place == width - 1
            if c.llama_decode(context, batch):
                raise ValueError("llama.cpp could not decode a batch.")
        finally:
            c.llama_batch_free(batch)
        lasts = [
            np.ctypeslib.as_array(
                c.llama_get_logits_ith(context, (row + 1) * width - 1), (self._n_vocab,)
            )
            for row in range(len(rows))
        ]
        return np.stack(lasts)
