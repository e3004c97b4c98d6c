"""Which demonstrations a run takes."""

import importlib.util
from pathlib import Path

import pytest

from torchrl_vla.config.schema import DemonstrationConfig, EnvConfig
from torchrl_vla.data.demonstrations import DemonstrationWriter
from torchrl_vla.envs import factory as envs
from torchrl_vla.training.demonstration_loader import load_demonstrations

pytest.importorskip("pyarrow")
pytest.importorskip("h5py")


def load_test(name):
    """A test file of the data layer, for what it writes."""
    path = Path(__file__).parents[1] / "data" / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"written_by_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOY = EnvConfig(name="toy")


@pytest.fixture
def folder(tmp_path):
    """Eight episodes of task 0, of which number 1 failed, and one of task 1."""
    make = load_test("demonstrations").make
    with DemonstrationWriter(tmp_path / "demos") as writer:
        for number in range(8):
            writer.add(make(number, task_id=0))
        writer.add(make(9, task_id=1))
    return tmp_path / "demos"


def load(folder, seed=0, cameras=("image",), env=TOY, **options):
    cfg = DemonstrationConfig(path=str(folder), **options)
    return load_demonstrations(cfg, env, cameras, seed)


def numbers(demonstrations):
    return [d.init_state_id - 1_000_000 for d in demonstrations]


def test_successful_ones_of_the_tasks_that_are_played(folder):
    assert numbers(load(folder)) == [0, 2, 3, 4, 5, 6, 7]
    assert numbers(load(folder, only_successful=False)) == list(range(8))
    assert list(load(folder)[0].images) == ["image"]
    assert load(folder, cameras=())[0].images == {}


def test_some_of_each_task_drawn_by_the_seed(folder):
    drawn = {tuple(numbers(load(folder, seed=s, num_per_task=3))) for s in range(5)}
    assert len(drawn) > 2
    assert all(len(set(one)) == 3 and 1 not in one for one in drawn)
    assert numbers(load(folder, num_per_task=3)) == numbers(
        load(folder, num_per_task=3)
    )
    with pytest.raises(ValueError, match=r"8 successful .* tasks have \{0: 7\}"):
        load(folder, num_per_task=8)


def test_a_file_of_libero(tmp_path):
    written = load_test("libero_hdf5")
    path = written.write(tmp_path / "milk_demo.hdf5", [written.contents(0)])
    (demonstration,) = load(path, format="libero_hdf5")
    assert demonstration.instruction == written.TEXT
    assert list(demonstration.images) == ["image"]


@pytest.mark.libero
def test_liberos_files_are_found_by_the_names_of_the_benchmark(tmp_path):
    pytest.importorskip("libero")
    written = load_test("libero_hdf5")
    env = EnvConfig(name="libero", task_suite="libero_object", task_ids=[2, 7])
    files = envs.demonstration_files(env, tmp_path)
    assert files[7].name == "pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5"
    for number, path in enumerate(files.values()):
        written.write(path, [written.contents(number)])
    found = load(tmp_path, env=env, format="libero_hdf5")
    assert [d.task_id for d in found] == [2, 7]
    with pytest.raises(ValueError, match="a file of LIBERO has one task"):
        load(files[7], env=env, format="libero_hdf5")
