"""Records what the demo model's routers choose, for the policy study.

    python -m benchmarks.record_traces                    # writes benchmarks/traces/*.trace.xz
    python -m benchmarks.record_traces --verify 4 8 16 32 # again, so many streams at a time

Owns: the requests and their seeds. Two kinds of traffic, each with a set to tune on (seed 1) and
one held out (seed 2), which differ in every prompt and every random number:

- `tasks`: one question of one task, greedy, to the answer's natural end; all questions of a task
  come in a row, so that the streams do the same and now and then all change.
- `chats`: a question of a random task, sampled, 32 to 256 tokens without a stop at the answer's
  end: the model then writes further turns, questions too, so each stream goes from task to task.

The files hold one sequence after the other. Routing does not depend on who else is in the batch, so
`expert_cache.rebatch` makes the steps of any number of streams of them; `--verify` records with
that many streams in the engine and counts the rows that differ from the files'. A trace has expert
numbers only, no text.
"""

from __future__ import annotations

import argparse
import lzma
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.expert_cache.rebatch import rebatch
from moestro.expert_cache.trace import read_trace
from moestro.types import Request, SamplingParams
from tools.train_demo.chat import IM_END, encode_prompt
from tools.train_demo.data import draw, to_messages
from tools.train_demo.tasks import TASKS

FOLDER = Path(__file__).parent / "traces"
MODEL = Path(__file__).parents[1] / "moestro/demo/model"
KINDS = ("tasks", "chats")
SEEDS = {"tune": 1, "held_out": 2}
EACH_TASK = 10  # questions in `tasks`
CHATS = 64
LENGTHS = (32, 256)  # tokens of a chat

Rows = dict[int, npt.NDArray[np.int64]]  # sequence -> its decode rows [tokens, layers, top_k]


def requests(kind: str, seed: int) -> list[Request]:
    """The traffic of a trace, in order of arrival."""
    rng = Random(f"{kind} {seed}")
    if kind == "tasks":
        wanted = [(task, 128, 0.0, (IM_END,)) for task in TASKS for _ in range(EACH_TASK)]
    else:
        names = list(TASKS)
        wanted = [(rng.choice(names), rng.randint(*LENGTHS), 0.7, ()) for _ in range(CHATS)]
    made = []
    for number, (task, length, temperature, eos) in enumerate(wanted):
        example = draw(rng, task, held_out=True)
        prompt = encode_prompt(to_messages("", [*example.setup, (example.question, "")])[:-1])
        sampling = SamplingParams(
            max_tokens=length,
            temperature=temperature,
            seed=rng.getrandbits(32),
            eos_token_ids=eos,
        )
        made.append(Request(str(number), tuple(prompt), sampling))
    return made


def record(wanted: Sequence[Request], streams: int, path: Path) -> None:
    """Run the requests, `streams` at a time, and write their routing to `path`."""
    config = Config(
        threads=1,
        max_num_seqs=streams,
        kv_cache_tokens=1024 * streams,
        enable_prefix_caching=False,
        trace=path,
    )
    engine = build_engine(config, MODEL)
    try:
        for request in wanted:
            engine.add(request)
            while streams == 1 and not engine.idle:
                engine.step()
        while not engine.idle:
            engine.step()
    finally:
        engine.close()


def decode_rows(path: Path) -> Rows:
    """What each sequence's decode steps routed."""
    rows: dict[int, list[npt.NDArray[np.int64]]] = {}
    for step in rebatch(read_trace(path), 1):
        if step.kind == "decode" and step.routes:
            owner = int(step.routes[0].sequences[0])
            rows.setdefault(owner, []).append(np.stack([route.ids[0] for route in step.routes]))
    return {owner: np.stack(parts) for owner, parts in rows.items()}


def unpack(name: str, folder: Path) -> Path:
    """The shipped trace `name`, as a file that `read_trace` and `moestro simulate` read."""
    path = folder / f"{name}.trace"
    path.write_bytes(lzma.decompress((FOLDER / f"{name}.trace.xz").read_bytes()))
    return path


def _differing(one: Rows, other: Rows) -> tuple[int, int]:
    """Rows of other that route differently, and all rows. Sequences are numbered by arrival."""
    total = sum(len(rows) for rows in one.values())
    same = 0
    for owner, rows in one.items():
        found = other.get(owner, rows[:0])
        count = min(len(rows), len(found))
        ends = np.sort(rows[:count], axis=2) == np.sort(found[:count], axis=2)
        same += int(ends.all(axis=(1, 2)).sum())
    return total - same, total


def main() -> None:
    """Record and compress, or verify."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", type=int, nargs="+", metavar="STREAMS", default=[])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moestro-traces-") as folder:
        for kind in KINDS:
            for part, seed in SEEDS.items():
                name = f"{kind}_{part}"
                wanted = requests(kind, seed)
                for streams in asked.verify:
                    path = Path(folder) / f"{name}-{streams}.trace"
                    record(wanted, streams, path)
                    differing, total = _differing(
                        decode_rows(unpack(name, Path(folder))), decode_rows(path)
                    )
                    print(f"{name}, {streams} streams: {differing} of {total} decode rows differ")
                if not asked.verify:
                    path = Path(folder) / name
                    record(wanted, 1, path)
                    FOLDER.mkdir(exist_ok=True)
                    packed = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
                    (FOLDER / f"{name}.trace.xz").write_bytes(packed)
                    print(f"{name}: {len(wanted)} sequences, {len(packed)} bytes")


if __name__ == "__main__":
    main()
