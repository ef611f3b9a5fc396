"""GPT-2 models in folders of the library `transformers`, written and read without it.

    config.json               shape of the model and variant of its equations
    generation_config.json    first and last token of a text
    model.safetensors         weights by the names below
    andrea_tokenizer.json     our tokenizer, beside tokenizer.json (see `huggingface_tokenizer`)

FORMATS.md has the table of names. GPT-2's `Conv1D` stores matrices [in, out], as we do; files that
have them as [out, in] are recognised by their shapes. Only safetensors are read, never pickles.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kernels.common.spec import BFLOAT16

from . import huggingface_tokenizer, tensor_files
from .checkpoint import Checkpoint
from .checkpoint_files import open_regular, read_json
from .config import ModelConfig, TrainConfig, check_train
from .errors import UserError
from .model import EPSILON
from .parameters import ParameterTable

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."  # left out by some programs
SIZES = {"d_model": ("n_embd", 768), "n_head": ("n_head", 12), "n_layer": ("n_layer", 12),
         "context": ("n_positions", 1024), "vocab_size": ("vocab_size", 50257)}  # and defaults
# The values with which GPT-2 computes what our model computes; the first is its default.
EQUATIONS: dict[str, tuple] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
NAMES = {
    "wte": "wte.weight", "wpe": "wpe.weight", "w_head": "lm_head.weight",
    "ln_1_gamma": "ln_1.weight", "ln_1_beta": "ln_1.bias",
    "w_qkv": "attn.c_attn.weight", "b_qkv": "attn.c_attn.bias",
    "w_o": "attn.c_proj.weight", "b_o": "attn.c_proj.bias",
    "ln_2_gamma": "ln_2.weight", "ln_2_beta": "ln_2.bias",
    "w_1": "mlp.c_fc.weight", "b_1": "mlp.c_fc.bias",
    "w_2": "mlp.c_proj.weight", "b_2": "mlp.c_proj.bias",
    "ln_f_gamma": "ln_f.weight", "ln_f_beta": "ln_f.bias",
}
BUFFERS = (".attn.bias", ".attn.masked_bias")  # masks that old files hold
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}
MAX_HEADER_BYTES = 1 << 22  # 1,000 blocks take a third of it


def name_of(name: str) -> str:
    """GPT-2's name of our parameter: `blocks.3.w_o` is `transformer.h.3.attn.c_proj.weight`."""
    *block, short = name.split(".")
    if short == "w_head":
        return NAMES[short]
    return PREFIX + (f"h.{block[1]}." if block else "") + NAMES[short]


def is_folder(path: Path) -> bool:
    """Whether this is a folder of `transformers`, or was meant to be one."""
    return any(os.path.exists(path / name) for name in (CONFIG, INDEX, "pytorch_model.bin"))


# Writing

def contents(model: ModelConfig, weights: np.ndarray, tokenizer) -> dict[str, Iterator]:
    """Name to pieces of bytes of every file of a folder that `transformers` loads as GPT-2.

    `weights` is flat [table.size], `tokenizer` may be None. GPT-2 always has biases and norms with
    gain and offset; where the model has none they are the zeros and ones that change nothing.
    """
    given = ParameterTable(model).unpadded(weights)
    whole = ParameterTable(dataclasses.replace(model, bias=True, norm_affine=True))
    tensors = {}
    for name, tensor in whole.tensors.items():
        neutral = float(name.endswith("_gamma"))
        tensors[name_of(name)] = (given[name] if name in given
                                  else np.full(tensor.shape, neutral, np.float32))
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32",
              "torch_dtype": "float32", "n_inner": None, "tie_word_embeddings": model.tied,
              "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config |= {theirs: getattr(model, ours) for ours, (theirs, _) in SIZES.items()}
    config |= {key: values[0] for key, values in EQUATIONS.items()}
    start = mark = None
    if tokenizer is not None:
        start = tokenizer.start_token
        mark = start if start == tokenizer.document_mark else None  # else it was never trained
    generation = {"bos_token_id": start, "eos_token_id": mark, "pad_token_id": mark}
    documents = {CONFIG: config | generation, GENERATION: generation}
    if tokenizer is not None:
        documents |= huggingface_tokenizer.documents(tokenizer, model.context)
    files = {name: iter([json.dumps(document, indent=1).encode()])
             for name, document in documents.items()}
    return files | {WEIGHTS: tensor_files.encode(tensors, {"format": "pt"})}


# Reading

def load(folder: Path) -> Checkpoint:
    """The GPT-2 of a folder, as a checkpoint of step 0 whose tokenizer is None if it names none.

    Numbers of 16 bits become float32. Raises UserError for other models, for variants of the
    equations that we do not compute, and for files that are missing, pickled, damaged or of
    another shape than config.json says.
    """
    config = TrainConfig(model=_read_shape(folder / CONFIG))
    tokenizer = huggingface_tokenizer.read(folder)
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"{folder}: the model knows {config.model.vocab_size} ids, the tokenizer "
                        f"has {tokenizer.vocab_size}; they do not belong together")
    return Checkpoint(folder, 0, config, tokenizer, _read_weights(folder, config.model))


def _read_shape(file: Path) -> ModelConfig:
    config = read_json(file.resolve())
    if config.get("model_type") != "gpt2":
        raise UserError(f"{file}: model_type is {config.get('model_type')!r:.50}; only gpt2 can be "
                        "read")
    for key, values in EQUATIONS.items():
        if config.get(key, values[0]) not in values:
            raise UserError(f"{file}: {key} is {config[key]!r:.50}; this program computes "
                            f"{' or '.join(map(repr, values))} only")
    model = ModelConfig(tied=config.get("tie_word_embeddings", True) is not False)
    for ours, (theirs, default) in SIZES.items():
        value = config.get(theirs, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{file}: {theirs} is {value!r:.50}; expected a whole number above 0")
        setattr(model, ours, value)
    if config.get("n_inner") not in (None, 4 * model.d_model):
        raise UserError(f"{file}: n_inner is {config['n_inner']!r:.50}; this program computes "
                        f"{4 * model.d_model} only, four times n_embd")
    try:
        check_train(TrainConfig(model=model))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return model


def _read_weights(folder: Path, model: ModelConfig) -> np.ndarray:
    """Flat float32 [table.size]; nothing of the size of the model is allocated before the names
    and shapes of the file are those of `model`."""
    file = _weights_file(folder).resolve()  # the cache of the hub is a folder of links
    header, start = _read_header(file)
    entries = {name.removeprefix(PREFIX): entry for name, entry in header.items()}
    if len(entries) != len(header):
        raise UserError(f"{file}: a tensor is there twice, with and without {PREFIX!r}")
    table = ParameterTable(model)
    shapes = {name: list(shape) for name, shape in table.unpadded_shapes().items()}
    known = {name_of(name).removeprefix(PREFIX) for name in shapes} | {NAMES["w_head"]}
    for name in entries:
        if name not in known and not name.endswith(BUFFERS):
            raise UserError(f"{file}: tensor {name:.100} is unknown")
    first = entries.get("h.0." + NAMES["w_qkv"])
    turned = first is not None and first["shape"] == shapes["blocks.0.w_qkv"][::-1]
    sources = {}
    for name, shape in shapes.items():
        entry = entries.get(name_of(name).removeprefix(PREFIX))
        if entry is None:
            raise UserError(f"{file}: tensor {name_of(name)} is missing")
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{file}: tensor {name_of(name)} is {entry['dtype']}; expected one of "
                            f"{', '.join(DTYPES)}")
        matrix = turned and ".w_" in name
        expected = shape[::-1] if matrix else shape
        if entry["shape"] != expected:
            raise UserError(f"{file}: tensor {name_of(name)} has the shape "
                            f"{entry['shape']!s:.100}; {CONFIG} says {expected}")
        sources[name] = entry, matrix
    flat = table.zeros()
    with open_regular(file) as stream:
        for name, view in table.unpadded(flat).items():
            entry, matrix = sources[name]
            stream.seek(start + entry["data_offsets"][0])
            array = np.fromfile(stream, DTYPES[entry["dtype"]], view.size)
            view[...] = array.reshape(entry["shape"]).T if matrix else array.reshape(view.shape)
    return flat


def _weights_file(folder: Path) -> Path:
    if not (folder / WEIGHTS).exists():
        convert = "load it with transformers and write it with model.save_pretrained(FOLDER"
        if (folder / INDEX).exists():
            raise UserError(f"{folder}: its weights are split into several files; {convert}, "
                            "max_shard_size='1TB')")
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise UserError(f"{folder} has pickled weights only, and reading a pickle can run "
                            f"code; {convert})")
        raise UserError(f"{folder} is not complete: it has no {WEIGHTS}")
    return folder / WEIGHTS


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a whole safetensors file by name, and where their data begin."""
    header, start = tensor_files.read_header(file, MAX_HEADER_BYTES)
    header.pop("__metadata__", None)
    try:
        expected = start + max(entry["data_offsets"][1] for entry in header.values())
        found = file.stat().st_size
        if found != expected:
            raise UserError(f"{file} is not complete: expected {expected!s:.30} bytes, found "
                            f"{found}")
        with safe_open(file, framework="np", backend="pread"):
            pass  # checks that shapes, dtypes and offsets agree and that nothing overlaps
    except (LookupError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"{file} is damaged: {error!s:.200}") from None
    return header, start
