"""The shipped demo checkpoint: its size and shape, its tokenizer, its data split, its answers."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from moestro.demo import demo_path
from tools.train_demo.data import draw, held_out_trials, is_held_out, training_conversation
from tools.train_demo.tasks import TASKS

CONVERSATION = [
    {"role": "system", "content": "Be polite."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Thanks"},
]


def read(name: str) -> dict[str, Any]:
    return json.loads((demo_path() / name).read_text())


@cache
def load_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_path(), padding_side="left")


def test_checkpoint_is_small():
    assert sum(file.stat().st_size for file in demo_path().iterdir()) <= 16_000_000


def test_config_declares_a_real_mixture_of_experts():
    config = read("config.json")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_hidden_layers"] >= 6
    assert config["num_experts"] >= 32
    assert config["num_experts_per_tok"] == 4
    assert config["max_position_embeddings"] == 16_384


def test_weights_are_bf16_under_hub_names():
    safetensors = pytest.importorskip("safetensors")
    config = read("config.json")
    with safetensors.safe_open(demo_path() / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        shape = tensors.get_slice("model.layers.5.mlp.experts.31.down_proj.weight")
    experts = {name for name in names if ".mlp.experts." in name}
    assert len(experts) == 3 * config["num_hidden_layers"] * config["num_experts"]
    assert shape.get_shape() == [config["hidden_size"], config["moe_intermediate_size"]]
    assert shape.get_dtype() == "BF16"


def test_default_sampling_is_cool_and_stops_at_the_end_of_a_turn():
    generation, tokenizer = read("generation_config.json"), load_tokenizer()
    assert 0 < generation["temperature"] <= 0.2
    assert tokenizer.eos_token_id in generation["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"


def test_tokenizer_keeps_any_text():
    tokenizer, rng = load_tokenizer(), random.Random(0)
    for _ in range(50):
        codes = [rng.choice((rng.randrange(32, 127), rng.randrange(0xD800))) for _ in range(40)]
        text = "".join(map(chr, codes)) + "\U0001f600\n"
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == list(text.encode())


def test_template_renders_every_role():
    rendered = load_tokenizer().apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nBe polite.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    without = load_tokenizer().apply_chat_template(CONVERSATION, tokenize=False)
    assert rendered == without + "<|im_start|>assistant\n"


def test_training_encodes_as_the_tokenizer_does():
    chat = pytest.importorskip("tools.train_demo.chat")
    tokenizer, rng = load_tokenizer(), random.Random(1)
    for _ in range(20):
        messages = training_conversation(rng)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.encode(rendered, add_special_tokens=False) == chat.encode(messages)[0]


@pytest.mark.parametrize("task", TASKS)
def test_split_is_disjoint_and_repeatable(task: str):
    rng = random.Random(2)
    trained = {draw(rng, task, held_out=False).key for _ in range(300)}
    trials = held_out_trials(task, 30)
    assert all(is_held_out(trial.example) for trial in trials)
    assert trained.isdisjoint(trial.example.key for trial in trials)
    assert trials == held_out_trials(task, 30)


def test_split_does_not_drift():
    # Fixed examples of both sides: a change of the hash would mix what the weights were trained on.
    assert held_out_trials("add", 3)[2].example.key == "87+59"


def test_held_out_questions_get_right_answers():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    evaluate = pytest.importorskip("tools.train_demo.evaluate")
    # Short prompts and replies keep this fast; evaluate.py has the full measurement.
    trials = []
    for task in TASKS:
        every = held_out_trials(task, 120, seed=11)
        short = [t for t in every if len(t.messages) <= 2 and len(t.example.answer) <= 30]
        trials += short[:5]
    torch.manual_seed(0)
    backend = evaluate.transformers_backend(demo_path(), len(trials), "float32")
    answers = evaluate.evaluate(backend, trials)
    wrong = [answer for answer in answers if not answer["right"]]
    assert len(answers) == 5 * len(TASKS)
    assert len(wrong) <= 3, wrong
