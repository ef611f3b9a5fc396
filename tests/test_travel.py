"""A model goes from training through resuming and other formats: its logits stay, bit for bit."""

import json

import numpy as np
from helpers import TEXT, logits, run_program

from andrea_numba import interchange


def test_harris_tokens_and_logits_at_every_stage(train, text):
    options = ["--tokenizer", "harris", "--vocab-size", 270]
    for arguments in (["t.txt", *options, "--steps", 2, "--out", "run"],
                      ["--resume", "--steps", 3, "--out", "run"]):
        done = train(*arguments)
        assert done.returncode == 0, done.stderr
        assert " of 270 kinds; " in done.stderr
    generated = []
    for model in ("run", "folder"):
        if model != "run":
            assert run_program("andrea-generate", "run", "--export", model,
                               cwd=text).returncode == 0
        done = run_program("andrea-generate", model, "--prompt", "The old cat", "--max-tokens", 20,
                           "--device", "cpu", "--json", cwd=text)
        assert done.returncode == 0, done.stderr
        generated.append(json.loads(done.stdout)["token_ids"])
        # No weight changes at such a rate: what is saved is what was read.
        done = train("t.txt", "--init-from", model, "--steps", 1, "--lr", 1e-30, "--min-lr", 0,
                     "--warmup", 0, "--out", f"from-{model}",
                     *("--batch-size", 4, "--device", "cpu"), tiny=False)
        assert done.returncode == 0, done.stderr
    assert generated[0] == generated[1]
    models = [interchange.open_model(str(text / name), print) for name in
              ("run", "folder", "from-run", "from-folder")]
    ids = models[0].tokenizer.encode(TEXT)[None, :16]
    expected = logits(models[0], ids)
    for model in models[1:]:
        assert model.tokenizer.to_dict() == models[0].tokenizer.to_dict()
        np.testing.assert_array_equal(logits(model, ids).view(np.uint32),
                                      expected.view(np.uint32))
