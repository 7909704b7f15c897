"""Scripts under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def launch(script: str, *options: str) -> list[dict[str, Any]]:
    """Run a script of this project on two ranks and return what each printed last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    decoder, text, results = json.JSONDecoder(), done.stdout, []
    while (start := text.find('{"rank"')) >= 0:  # ranks may share a line
        result, end = decoder.raw_decode(text[start:])
        results.append(result)
        text = text[start + end :]
    results.sort(key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == [0, 1]
    assert results[0]["parameters"] == results[1]["parameters"]
    return results
