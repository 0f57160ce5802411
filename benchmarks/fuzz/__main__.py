"""Does any request break the server?

Two parts. First, schemathesis makes up requests from our own OpenAPI document, half of them
against it. Then requests are sent as bytes over raw sockets: broken framing and headers, broken
JSON, other encodings, odd values in bodies that are otherwise right. Both take their routes from
the document. No answer may have a status of 500 or more, every error must be an error object, no
complete request may wait, and at the end the engine must be the same process, with no sequence
and no KV block held. What was found is printed, with the bytes that show it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from benchmarks import report
from benchmarks.fuzz.by_bytes import ByteFuzz
from benchmarks.fuzz.by_schema import SchemaFuzz, unique
from benchmarks.fuzz.http import routes
from tests.oracle.serving import Served, serve

# Small limits, so that what is valid is short.
FLAGS = ("--max-model-len", "256", "--max-num-seqs", "16", "--max-num-queued", "4096")


def fuzz(served: Served, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both parts; what they found, and how many there were of each status."""
    document = json.loads(served.get("/openapi.json")[1])
    started = time.monotonic()
    by_schema = SchemaFuzz(
        f"http://127.0.0.1:{served.port}", seed=arguments.seed, timeout=arguments.timeout
    )
    by_schema.run(arguments.schema)
    between = time.monotonic()
    by_bytes = ByteFuzz(
        served.port, routes(document), seed=arguments.seed, timeout=arguments.timeout
    )
    asyncio.run(by_bytes.run(arguments.bytes))
    return {
        "schema_seconds": between - started,
        "bytes_seconds": time.monotonic() - between,
        "schema_statuses": dict(by_schema.statuses),
        "bytes_statuses": dict(by_bytes.statuses),
        "faults": by_schema.faults + by_bytes.faults,
    }


def main() -> int:
    """Run the fuzzing."""
    parser = report.parser(__doc__)
    parser.add_argument("--schema", type=int, default=20_000, help="requests of schemathesis")
    parser.add_argument("--bytes", type=int, default=10_000, help="requests as bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for one answer")
    parser.add_argument("--model", default="", help="default: the included demo model")
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        flags = (*FLAGS, "--files-dir", str(work / "files"), *arguments.flags)
        with serve(arguments.model, *flags, log=work / "server.log") as served:
            engine = served.engine.pid
            found = fuzz(served, arguments)
            served.wait_idle()
            restarted = served.engine.pid != engine
    for text in unique(found["faults"]):
        print(text)
    rows = [
        ("by schema", _counts(found["schema_statuses"], found["schema_seconds"])),
        ("by bytes", _counts(found["bytes_statuses"], found["bytes_seconds"])),
    ]
    bars = [
        report.Bar("faults", len(found["faults"]), 0),
        report.Bar("engines that died", int(restarted), 0),
    ]
    return report.finish(arguments, rows, bars, found)


def _counts(statuses: dict[Any, int], seconds: float) -> str:
    shown = ", ".join(f"{status}: {statuses[status]}" for status in sorted(statuses, key=str))
    return f"{sum(statuses.values())} in {seconds:.0f} s ({shown})"


if __name__ == "__main__":
    sys.exit(main())
