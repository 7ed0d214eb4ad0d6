"""``python -m deepinfer_plugin.soak --seconds 600 --out REPORT.json``: exit code 0 if nothing was wrong, else 1."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin.reference.tiny import write_checkpoint
from deepinfer_plugin.soak.run import Soak, solo_answers
from deepinfer_plugin.soak.server import MODEL, resident_mib, soak_server
from deepinfer_plugin.soak.traffic import GOOD

MAX_GROWTH = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_plugin.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long requests are sent (default 600)")
    parser.add_argument("--threads", type=int, default=16, help="requests in flight (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the requests (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the report; the server's log beside it")
    parsed = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint("nano", 0, folder)
            with soak_server(Path(folder), parsed.out.with_suffix(".log")) as server:
                solo = solo_answers(server.base_url, MODEL, GOOD)
                print(f"{len(solo)} requests answered alone; sending for {parsed.seconds:.0f} s", flush=True)
                soak = Soak(server.base_url, MODEL, solo, parsed.seed)
                report = soak.run(parsed.seconds, parsed.threads, lambda: resident_mib(server))
                server.check_alive()
                again = solo_answers(server.base_url, MODEL, GOOD)
    except (DeepInferError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parsed.out.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report.to_json(), indent=2))
    is_clean = not report.differing and not report.unexpected and again == solo
    return 0 if is_clean and report.memory_growth < MAX_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
