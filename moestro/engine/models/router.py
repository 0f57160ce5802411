"""The kinds of routers, as data.

Owns: how a token's experts and their weights follow from the router's logits, one class for each
kind. Does not own: computing it (`layers.moe` and `kernels.reference` do).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scores(Enum):
    """What turns all logits of a token into scores between 0 and 1."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class SoftmaxTopK:
    """Softmax over all experts, then the k best of them (Mixtral, Qwen, OLMoE, DBRX)."""


@dataclass(frozen=True, slots=True)
class TopKSoftmax:
    """The k best logits, then softmax over these alone (Granite). `bias`: the logits have a learned
    bias (GPT-OSS)."""

    bias: bool = False


@dataclass(frozen=True, slots=True)
class BiasedTopK:
    """Scores, to which a learned bias is added to choose, and only to choose (arXiv 2408.15664).

    With `groups` > 1 experts are in so many groups of equal size, a group counts as much as its two
    best experts, and only the `kept` best groups are chosen from. Logits are float32 if `wide`.
    When weights are scaled to sum 1, the sum first gets `sum_add` more, and is `sum_min` at least.
    """

    scores: Scores
    groups: int = 1
    kept: int = 1
    scale: float = 1.0  # on the weights, after they were scaled to sum 1
    sum_add: float = 0.0
    sum_min: float = 0.0
    wide: bool = True


@dataclass(frozen=True, slots=True)
class GroupedSoftmax:
    """Softmax over all experts, then the k best out of the `kept` best of `groups` groups of equal
    size, where a group counts as much as its best expert (DeepSeek-V2, arXiv 2405.04434). Logits
    are float32."""

    groups: int = 1
    kept: int = 1
    scale: float = 1.0  # on the weights


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Two experts, the second after the first was taken out; a weight is the softmax over those
    that are near the best, nearer than 2 * `jitter` of it (Phi-3.5-MoE, arXiv 2409.12136)."""

    jitter: float


Router = SoftmaxTopK | TopKSoftmax | BiasedTopK | GroupedSoftmax | SparseMixer
