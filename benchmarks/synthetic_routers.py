"""Made-up routing with the locality that was published for real models.

Owns: the law and its three calibrations. Everything here is synthetic: no model routed these
tokens. A router's logit of an expert is a sum of independent normal terms: one that all traffic
shares, one of the sequence, one that drifts from token to token with a time constant, and noise of
the token. The experts with the `top_k` greatest logits are chosen. There is no text, so nothing
but persistence can be learned from it.

The amplitudes were fitted by hand to what was published for single streams (`PUBLISHED`, from
https://github.com/kekzl/imp/pull/1359, https://huggingface.co/hipfire-models/deepseek-v4-flash-0731
and https://github.com/ggml-org/llama.cpp/pull/27861); `python -m benchmarks.synthetic_routers`
prints both. Models have 40 to 60 layers; these have 4, since layers are drawn independently and
slots grow with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.policy_replay import PlainLru, Stream, on_cpu, passes

Ids = npt.NDArray[np.int64]
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Router:
    """A law of routing. Amplitudes are standard deviations; `time` is in tokens."""

    name: str
    experts: int
    top_k: int
    shared: float
    sequence: float
    drift: float
    time: float
    noise: float

    def draw(self, sequences: int, tokens: tuple[int, int], seed: int) -> list[Ids]:
        """Routing of decode steps: for each sequence [tokens, layers, top_k], its length drawn
        evenly from `tokens`."""
        law = np.random.default_rng(self.experts)  # what all traffic shares is the model's
        shared = self.shared * law.standard_normal((LAYERS, self.experts), np.float32)
        random = np.random.default_rng((self.experts, seed))
        keep = np.exp(-1.0 / self.time)
        fresh = np.sqrt(1.0 - keep**2)
        drawn = []
        for length in random.integers(*tokens, sequences, endpoint=True).tolist():
            own = random.standard_normal((LAYERS, self.experts), np.float32)
            fixed = shared + self.sequence * own
            state = random.standard_normal((LAYERS, self.experts), np.float32)
            ids = np.empty((length, LAYERS, self.top_k), np.int64)
            for token in range(length):
                state = keep * state + fresh * random.standard_normal(state.shape, np.float32)
                noise = random.standard_normal(state.shape, np.float32)
                logits = fixed + self.drift * state + self.noise * noise
                ids[token] = np.argpartition(-logits, self.top_k, axis=1)[:, : self.top_k]
            drawn.append(ids)
        return drawn


ROUTERS = (
    Router("e128k8", 128, 8, shared=0.3, sequence=1.3, drift=1.0, time=3.0, noise=0.6),
    Router("e256k6", 256, 6, shared=0.3, sequence=0.5, drift=1.0, time=16.0, noise=0.8),
    Router("e512k10", 512, 10, shared=0.3, sequence=0.7, drift=1.0, time=14.0, noise=0.85),
)

# What is known of single streams: (share of experts in slots, hit rate of LRU), and how many of a
# token's experts were among those of the token before, and of the eight before.
PUBLISHED: dict[str, tuple[str, tuple[tuple[float, float], ...], tuple[float, float] | None]] = {
    "e128k8": ("Qwen3-30B-A3B", ((0.40, 0.93),), (0.45, 0.80)),
    "e256k6": (
        "DeepSeek-V4-Flash",
        ((0.055, 0.405), (0.11, 0.594), (0.22, 0.744), (0.44, 0.865)),
        None,
    ),
    "e512k10": ("Qwen3.8-Flash-Next", ((0.125, 0.67), (0.25, 0.81)), None),
}


def repeats(drawn: list[Ids], back: int) -> float:
    """The share of a token's experts that were among those of the `back` tokens before it."""
    found = [
        np.isin(ids[token, layer], ids[token - back : token, layer]).mean()
        for ids in drawn
        for token in range(back, len(ids))
        for layer in range(LAYERS)
    ]
    return float(np.mean(found))


def main() -> None:
    """Print what was published beside what the routers give."""
    for router in ROUTERS:
        like, hits, repeat = PUBLISHED[router.name]
        drawn = router.draw(3, (300, 500), seed=1)
        shape = LAYERS, router.experts
        one = passes([Stream(None, ids) for ids in drawn], 1, 10**6)
        print(f"{router.name}, like {like}")
        for share, published in hits:
            counts = on_cpu(shape, one, int(share * LAYERS * router.experts), PlainLru(*shape))
            rate = counts.hits / (counts.hits + counts.misses)
            print(f"  LRU, {share:.1%} in slots: {rate:.1%} (published {published:.1%})")
        for place, back in enumerate((1, 8)):
            known = "" if repeat is None else f" (published {repeat[place]:.2f})"
            print(f"  repeats of the last {back}: {repeats(drawn, back):.2f}{known}")


if __name__ == "__main__":
    main()
