"""The one table of TensorDict keys that the sub-packages share.

It follows TorchRL's vision-language-action schema (``torchrl.data.vla``) and adds what
group-relative policy optimisation needs. ``H`` actions of a chunk, ``A`` action
dimensions, ``C`` image channels. Leading batch dimensions are left out.

=============================  ===========  ===========  ==============================
key                            shape        dtype        range or unit; writer -> reader
=============================  ===========  ===========  ==============================
("observation", "image")       [C, Y, X]    uint8        0..255; env -> policy
("observation", "wrist_image") [C, Y, X]    uint8        0..255; env -> policy
("observation", "state")       [S]          float32      proprioception; env -> policy
"language_instruction"         text         NonTensor    env -> policy
("vla_action", "tokens")       [H, A]       int64        0..V-1; policy -> env, loss
("vla_action", "log_probs")    [H, A]       float32      <= 0; policy -> loss
("vla_action",                 [H, A]       float32      <= 0, of the frozen reference;
 "reference_log_probs")                                  updater -> loss
("vla_action", "chunk")        [H, A]       float32      env units; codec -> MultiAction
"action"                       [A]          float32      env units; MultiAction -> env
("next", "reward")             [1]          float32      sum over the chunk; env -> loss
("next", "success")            [1]          bool         env -> collector, evaluator
("next", "num_executed")       [1]          int64        0..H; MultiAction -> loss
"task_id"                      [1]          int64        number in the suite; env
"init_state_id"                [1]          int64        number of the start; env
"group_id"                     [1]          int64        of the run; pool -> advantage
"episode_id"                   [1]          int64        of the run; pool -> advantage
"decision_id"                  [1]          int64        0.. in its episode; pool
"sampling_seed"                [1]          int64        of the noise; pool -> policy
"advantage"                    [1]          float32      advantage -> loss
"loss_weight"                  [1]          float32      per token; advantage -> loss
=============================  ===========  ===========  ==============================

``done``, ``terminated`` and ``truncated`` are TorchRL's.
"""

from torchrl.data.vla.schema import (
    ACTION_CHUNK_KEY,
    ACTION_KEY,
    ACTION_TOKENS_KEY,
    IMAGE_KEY,
    INSTRUCTION_KEY,
    STATE_KEY,
)

IMAGE = IMAGE_KEY
WRIST_IMAGE = ("observation", "wrist_image")
STATE = STATE_KEY
INSTRUCTION = INSTRUCTION_KEY
TOKENS = ACTION_TOKENS_KEY
LOG_PROBS = ("vla_action", "log_probs")
REFERENCE_LOG_PROBS = ("vla_action", "reference_log_probs")
CHUNK = ACTION_CHUNK_KEY
ACTION = ACTION_KEY
REWARD = ("next", "reward")
DONE = ("next", "done")
SUCCESS = ("next", "success")
NUM_EXECUTED = ("next", "num_executed")
TASK_ID = "task_id"
INIT_STATE_ID = "init_state_id"
GROUP_ID = "group_id"
EPISODE_ID = "episode_id"
DECISION_ID = "decision_id"
SAMPLING_SEED = "sampling_seed"
ADVANTAGE = "advantage"
LOSS_WEIGHT = "loss_weight"
