"""Log-probabilities on a GPU: in float32 transformers' own, in bfloat16 as good as those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.test_parity import GPU, starved
from tests.models.test_logprobs import assert_close, forced
from tests.oracle import drive
from tests.oracle.golden import NEW_TOKENS, Golden, load
from tests.oracle.specs import SPECS

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

SLACK = 1.5  # times transformers' own error in bfloat16, on the same GPU
FLOOR = 0.002  # below this mean error nobody is worse than anybody


@pytest.mark.parametrize("name", SPECS)
def test_prompts_and_text_in_float32(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    cases = golden(name).cases
    with drive.engine(checkpoint(name), **starved(name)) as engine:
        outputs = drive.generate(engine, [forced(n, case) for n, case in enumerate(cases)])
        for number, case in enumerate(cases):
            found = outputs[str(number)].prompt_logprobs
            assert found is not None
            rest = [one for one in found[1:] if one is not None]
            assert_close(rest, (case.prompt + case.tokens)[1:], case.logprobs)
        requests = [
            drive.greedy(f"g{n}", case.prompt, NEW_TOKENS, logprobs=n % 3)
            for n, case in enumerate(cases)
        ]
        texts = drive.generate(engine, requests)
    for number, case in enumerate(cases):
        found = texts[f"g{number}"].logprobs
        assert_close(found, case.tokens, case.logprobs[len(case.prompt) - 1 :])


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_is_as_near_as_transformers_is(
    name: str, checkpoint: Checkpoints, golden: Goldens
) -> None:
    cases = golden(name).cases
    model = load(checkpoint(name)).to("cuda", torch.bfloat16)
    theirs, ours = [], []
    settings = GPU | {"dtype": "bfloat16"}
    with drive.engine(checkpoint(name), **settings) as engine:
        outputs = drive.generate(engine, [forced(n, case) for n, case in enumerate(cases)])
    for number, case in enumerate(cases):
        tokens = torch.tensor([case.prompt + case.tokens], device="cuda")
        with torch.no_grad():
            logits = model(tokens).logits[0].float()
        found = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        want = torch.tensor(case.logprobs)
        theirs.append((found - want).abs())
        reports = outputs[str(number)].prompt_logprobs
        assert reports is not None
        mine = torch.tensor([one.logprob for one in reports[1:] if one is not None])
        ours.append((mine - want).abs())
    their, our = float(torch.cat(theirs).mean()), float(torch.cat(ours).mean())
    assert our <= max(FLOOR, SLACK * their), f"mean error {our:.5f}, transformers' {their:.5f}"
