"""Peak host memory and time of loading a synthetic checkpoint of about 1 GB.

    python benchmarks/openvla_loading.py --size-gb 1

The limit is the model in its target dtype plus one shard. Loading runs in a process of
its own, whose memory is sampled from ``/proc``; mapped pages of the open shard count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from torchrl_vla.modules.openvla_oft import (
    OpenVLAOFT,
    OpenVLAOFTConfig,
    tiny_config,
    weights,
)

_LAYER_WIDTH = 1024
_LAYER_MLP = 2816


def make_checkpoint(folder: Path, size_gb: float, shard_gb: float) -> None:
    """Random weights in bfloat16, the real layout, as many layers as fit the size."""
    per_layer = 2 * (4 * _LAYER_WIDTH**2 + 3 * _LAYER_WIDTH * _LAYER_MLP)
    embeddings = 2 * 2 * 32064 * _LAYER_WIDTH
    layers = max(1, round((size_gb * 1e9 - embeddings) / per_layer))
    raw = json.loads(json.dumps(dict(tiny_config().raw)))
    raw["text_config"].update(
        hidden_size=_LAYER_WIDTH,
        intermediate_size=_LAYER_MLP,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    model = OpenVLAOFT(OpenVLAOFTConfig.from_dict(raw)).to(torch.bfloat16)
    weights._SHARD_BYTES = int(shard_gb * 1e9)
    model.save_pretrained(folder)


def load(folder: str, dtype: str, device: str) -> None:
    """Load in this process and print what it took."""
    peak, before, done = [0], _resident_bytes(), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    model = OpenVLAOFT.from_pretrained(
        folder, dtype=getattr(torch, dtype), device=device
    )
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    size = sum(t.nbytes for t in model.state_dict().values())
    print(json.dumps([seconds, (peak[0] - before) / 1e9, size / 1e9]))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--shard-gb", type=float, default=0.25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "DTYPE"))
    options = parser.parse_args()
    if options.load:
        load(*options.load, options.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), options.size_gb, options.shard_gb)
        files = [p.stat().st_size for p in Path(folder).glob("*.safetensors")]
        largest = max(files) / 1e9
        print(f"checkpoint: {sum(files) / 1e9:.3f} GB in {len(files)} shards")
        for dtype in ("bfloat16", "float32"):
            command = [sys.executable, __file__, "--load", folder, dtype]
            command += ["--device", options.device]
            seconds, peak, size = json.loads(subprocess.check_output(command))
            print(
                f"{dtype}: {seconds:.2f} s, peak {peak:.3f} GB, model {size:.3f} GB, "
                f"limit (model + shard) {size + largest:.3f} GB"
            )


if __name__ == "__main__":
    main()
