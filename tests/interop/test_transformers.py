"""The same models here and in `transformers`: logits, text, gradients and tokens.

Runs where `torch` and `transformers` are installed; elsewhere it is skipped. From the checkout:

    python3 -m venv ../interop && ../interop/bin/pip install '.[test]' torch transformers
    ../interop/bin/python -m pytest -n 0 -s tests/interop
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, logits, loss_and_gradient, random_batch, random_checkpoint

from andrea_numba import huggingface, interchange
from andrea_numba.checkpoint import Checkpoint
from andrea_numba.config import ModelConfig
from andrea_numba.decoder import Decoder
from andrea_numba.generate import generate_text
from andrea_numba.parameters import ParameterTable
from andrea_numba.sampler import Sampling, sample_rng
from andrea_numba.tokenizers import build_tokenizer
from kernels.registry import op_table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = "The quick brown fox jumps over the lazy dog, naïvely: 1234567890 +-*/ \"'\n\t é∑😀"
SHAPES = {
    "odd": ModelConfig(30, 3, 2, 37, 61),
    "wide": ModelConfig(96, 4, 3, 64, 257),
    "one head": ModelConfig(16, 1, 1, 16, 1000),
    "deep": ModelConfig(32, 8, 8, 128, 129),
    "untied": ModelConfig(48, 3, 2, 33, 300, tied=False),
    "bare": ModelConfig(24, 2, 2, 20, 50, tied=False, bias=False, norm_affine=False),
    "no biases": ModelConfig(24, 2, 2, 20, 50, bias=False),
}
TOKENIZERS = pytest.mark.parametrize(("name", "documents"), [
    ("byte", 1), ("byte", 2), ("char", 1), ("char", 2), ("bpe", 1), ("bpe", 2)])
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def exported(ours: Checkpoint, folder):
    interchange.export(ours, str(folder))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    return theirs.eval()


def their_logits(theirs, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.from_numpy(ids.astype(np.int64))).logits.numpy()


def compare(what: str, ours: np.ndarray, theirs: np.ndarray, limit: float) -> None:
    difference = float(np.abs(ours - theirs).max())
    print(f"{what}: largest difference {difference:.2e}, largest value "
          f"{np.abs(theirs).max():.2f}")
    assert ours.shape == theirs.shape and difference < limit


@EACH_SHAPE
def test_our_model_there(shape, tmp_path):
    ours = random_checkpoint(shape)
    theirs = exported(ours, tmp_path / "model")
    ids, _ = random_batch(shape, np.random.default_rng(1), 3)
    compare("logits of ours there", logits(ours, ids), their_logits(theirs, ids), 1e-4)
    again = huggingface.load(tmp_path / "model")
    assert np.array_equal(logits(again, ids), logits(ours, ids))


@EACH_SHAPE
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_their_model_here(shape, dtype, tmp_path):
    """Saved with 16 bits, computed with 32 on both sides."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_embd=shape.d_model, n_head=shape.n_head, n_layer=shape.n_layer,
        n_positions=shape.context, vocab_size=shape.vocab_size, initializer_range=0.1,
        tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # norms and biases are not at one and zero
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    ours = huggingface.load(tmp_path)
    assert (ours.model.tied, ours.tokenizer) == (shape.tied, None)
    ids, _ = random_batch(shape, np.random.default_rng(1), 2)
    compare(f"logits of theirs here, {dtype}", logits(ours, ids),
            their_logits(theirs.float(), ids), 1e-4)


@EACH_SHAPE
def test_gradients_of_a_step(shape, tmp_path):
    ours = random_checkpoint(shape)
    theirs = exported(ours, tmp_path / "model")
    ids, targets = random_batch(shape, np.random.default_rng(2), 2)
    loss, flat = loss_and_gradient("cpu", shape, ours.weights, ids, targets)
    there = theirs(torch.from_numpy(ids.astype(np.int64))).logits
    their_targets = torch.from_numpy(targets.astype(np.int64)).reshape(-1)
    their_loss = torch.nn.functional.cross_entropy(there.reshape(-1, shape.vocab_size),
                                                   their_targets)
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    worst = 0.0
    for name, gradient in ParameterTable(shape).unpadded(flat).items():
        expected = gradients[huggingface.name_of(name)]
        worst = max(worst, float(np.abs(gradient - expected).max() / np.abs(expected).max()))
    print(f"gradients: largest difference {worst:.2e} of the tensor's largest")
    assert worst < 1e-4


@TOKENIZERS
def test_greedy_text_of_100_tokens(name, documents, tmp_path):
    tokenizer = build_tokenizer(name, [TEXT], documents)
    shape = ModelConfig(48, 4, 3, 128, tokenizer.vocab_size, tied=False)
    ours = random_checkpoint(shape, tokenizer, scale=0.5)  # does not repeat itself at once
    theirs = exported(ours, tmp_path / "model")
    prompt = "The fox é"
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = their_tokenizer(prompt, return_tensors="pt")
    assert inputs.input_ids[0].tolist() == tokenizer.encode(prompt).tolist()
    there = theirs.generate(**inputs, do_sample=False, max_new_tokens=100, eos_token_id=None)
    p = ParameterTable(ours.model).views(ours.weights)
    here = generate_text(Decoder(ours.model, p, op_table("cpu")), tokenizer, prompt, 100,
                         Sampling(0.0, 0, 1.0, 1.0), sample_rng(1, 0))
    there = there[0, inputs.input_ids.shape[1]:]
    assert len(there) == 100 and there.tolist() == here.tokens
    assert their_tokenizer.decode(there) == here.text
    assert len(set(here.tokens)) > 5


@TOKENIZERS
def test_tokens_there_are_ours(name, documents, tmp_path):
    """The texts hold what looks like a mark, or like one of GPT-2's letters for bytes."""
    texts = [TEXT, "", " ", "\n\n", "a\n\n\nb", "\r\n\r", "<|endoftext|> x", "ĊĊ Ġ", "  two  ",
             "\x00\x01\x7f", "\u2028\u0085\x0b", "e\u0301", "\ufeffx", "don't I'll"]
    tokenizer = build_tokenizer(name, texts, documents)
    shape = ModelConfig(8, 1, 1, 256, tokenizer.vocab_size)
    exported(random_checkpoint(shape, tokenizer), tmp_path / "m")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    rng = np.random.default_rng(0)
    mark = tokenizer.document_mark if name == "bpe" else None  # whose name is shown there
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, 20)
        ids = ids[ids != mark].tolist()
        assert theirs.decode(ids) == tokenizer.decode(ids)


def test_a_tokenizer_of_theirs_here(tmp_path):
    """As in a folder of GPT-2: no file of ours, texts begin with the mark."""
    tokenizer = build_tokenizer("bpe", [TEXT * 3], 2)
    shape = ModelConfig(8, 1, 1, 256, tokenizer.vocab_size + 3)  # padded
    exported(random_checkpoint(shape, tokenizer), tmp_path / "m")
    (tmp_path / "m" / "andrea_tokenizer.json").unlink()
    transformers.AutoTokenizer.from_pretrained(tmp_path / "m").save_pretrained(tmp_path / "m")
    again = huggingface.load(tmp_path / "m").tokenizer
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert again.start_token == again.document_mark == tokenizer.document_mark


@pytest.mark.parametrize("modules", ["kernels, transformers", "transformers, kernels"])
def test_kernels_and_transformers_in_one_process(modules):
    """`transformers` looks for a package of PyPI that is called `kernels` too."""
    script = (f"import {modules}\nfrom transformers import AutoTokenizer, GPT2LMHeadModel\n"
              "import kernels.gelu\nassert kernels.IDENTITY == 'andrea-numba'\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
