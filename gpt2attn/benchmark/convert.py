"""The same weights in the form that each peer reads.

Conversions go into a folder named by the weights' hash, so one made before is used again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ..files import sha256
from .programs import CTRANSLATE2, LLAMA_CPP, Program

# GGUF's names of a block's tensors, by ours.
GGUF_NAMES = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
UNUSED_TOKEN, CONTROL_TOKEN, NORMAL_TOKEN = 5, 3, 1  # llama.cpp's token types


def with_tokenizer(folder: Path, work: Path) -> Path:
    """`folder`, or links to its files beside GPT-2's vocabulary if it has none and fits that."""
    from ..checkpoint import read_config
    from ..tokenizer import Tokenizer

    if any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return folder
    if read_config(folder).vocab_size != Tokenizer.gpt2().vocab_size:
        raise ValueError(f"{folder} has no tokenizer, which this program needs.")
    linked = work / "with-tokenizer"
    linked.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and not (linked / path.name).exists():
            os.symlink(path.resolve(), linked / path.name)
    Tokenizer.gpt2().save(linked)
    return linked


def converted(program: Program, folder: Path, work: Path) -> Path:
    """The folder that `program` loads; written now if `work` does not hold it yet."""
    if program.name not in (CTRANSLATE2, LLAMA_CPP):
        return folder
    out = work / f"{program.name}-{program.format}-{_fingerprint(folder)}"
    if not out.exists():
        folder = with_tokenizer(folder, work)
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            if program.name == CTRANSLATE2:
                _to_ctranslate2(folder, made, program.format)
            else:
                _to_gguf(folder, made / f"{program.format}.gguf", program.format)
            made.rename(out)  # under its final name only once it is whole
    return out


def _fingerprint(folder: Path) -> str:
    from ..checkpoint import weight_files

    return "-".join(sha256(path)[:12] for path in weight_files(folder, allow_pickle=False))


def _to_ctranslate2(folder: Path, out: Path, format: str) -> None:
    from ctranslate2.converters import TransformersConverter

    quantization = None if format == "float32" else format
    TransformersConverter(str(folder)).convert(str(out), quantization=quantization, force=True)


def _to_gguf(folder: Path, path: Path, format: str) -> None:
    """What llama.cpp's converter and quantizer write: matrices as `format`, the rest float32."""
    import gguf

    from ..checkpoint import load_model

    model = load_model(folder, kernels="torch")
    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.inner_dim)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    _add_vocabulary(writer, folder, config.vocab_size)
    kind = gguf.GGMLQuantizationType[format.upper()]
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.startswith("h.") and values.ndim == 2:
            values = values.T.copy()  # GGUF stores (out, in)
        # Positions are added, not multiplied: llama.cpp leaves them in float32.
        matrix = values.ndim == 2 and name != "wpe.weight"
        if matrix and format != "f32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    tables = {"wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight"}
    tables |= {"lm_head.weight": "output.weight"}
    if name in tables:
        return tables[name]
    if name.startswith("ln_f."):
        return name.replace("ln_f", "output_norm")
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def _add_vocabulary(writer: Any, folder: Path, vocab_size: int) -> None:
    import gguf

    from ..vocabulary import read_vocabulary, vocabulary_files

    vocabulary = read_vocabulary(vocabulary_files(folder))
    tokens = [f"[UNUSED{id}]" for id in range(vocab_size)]
    kinds = [UNUSED_TOKEN] * vocab_size
    entries = [(token, id, NORMAL_TOKEN) for token, id in vocabulary.ids.items()]
    entries += [(text, token.id, CONTROL_TOKEN) for text, token in vocabulary.added.items()]
    for token, id, kind in entries:
        if id < vocab_size:
            tokens[id], kinds[id] = token, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer)
