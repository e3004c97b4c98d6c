"""Write a checkpoint folder with a tiny network of random weights, for trial runs.

python -m torchrl_vla.modules.openvla_oft FOLDER
"""

import sys

from torchrl_vla.modules.openvla_oft.tiny import save_tiny_checkpoint

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m torchrl_vla.modules.openvla_oft FOLDER")
    print(save_tiny_checkpoint(sys.argv[1]))
