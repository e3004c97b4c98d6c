"""The policy for a CPU: small, and it looks at everything it is given."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.modules import CompactPolicy
from torchrl_vla.modules.compact_policy import SpatialSoftmax, word_ids

IMAGE, WRIST = ("observation", "image"), ("observation", "wrist_image")
STATE, TOKENS = ("observation", "state"), ("vla_action", "tokens")


def make(**kwargs):
    sizes = {"chunk_size": 3, "action_dim": 2, "num_bins": 5, "state_dim": 4}
    return CompactPolicy(**{**sizes, "hidden_dim": 16, "num_keypoints": 8, **kwargs})


def make_rows(num=4, size=32, cameras=(IMAGE, WRIST), texts=None):
    generator = torch.Generator().manual_seed(0)
    rows = TensorDict({STATE: torch.randn(num, 4, generator=generator)}, [num])
    for camera in cameras:
        rows[camera] = torch.randint(
            0, 256, (num, 3, size, size), generator=generator, dtype=torch.uint8
        )
    if isinstance(texts, str):
        rows.set("language_instruction", NonTensorData(texts, [num]))
    elif texts:
        rows.set("language_instruction", NonTensorStack(*texts))
    return rows


def logits(policy, rows):
    with torch.no_grad():
        return policy.action_logits(rows)


@pytest.mark.parametrize("num_bins", [65, 256])
def test_at_most_five_million_parameters_on_libero(num_bins):
    policy = CompactPolicy(
        chunk_size=8,
        action_dim=7,
        num_bins=num_bins,
        state_dim=9,
        image_keys=[IMAGE, WRIST],
    )
    assert sum(p.numel() for p in policy.parameters()) <= 5_000_000
    rows = TensorDict({STATE: torch.zeros(2, 9)}, [2])
    for camera in (IMAGE, WRIST):
        rows[camera] = torch.zeros(2, 3, 128, 128, dtype=torch.uint8)
    rows.set("language_instruction", NonTensorData("pick up the bowl", [2]))
    with torch.no_grad():
        rows = policy(rows)
    assert rows[TOKENS].shape == (2, 8, 7)
    assert rows[TOKENS].max() < num_bins


@pytest.mark.parametrize("size", [8, 31, 128])
def test_any_image_size(size):
    policy = make(image_keys=[IMAGE])
    out = logits(policy, make_rows(size=size))
    assert out.shape == (4, 3, 2, 5)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("key", [IMAGE, WRIST, STATE])
def test_every_input_changes_the_output_of_its_row_only(key):
    policy = make(image_keys=[IMAGE, WRIST])
    rows = make_rows()
    before = logits(policy, rows)
    rows[key][2] = rows[key][2].flip(-1)
    change = (logits(policy, rows) - before).abs().flatten(1).amax(-1)
    assert change[2] > 1e-5
    assert (change[[0, 1, 3]] < 1e-6).all()


def test_the_instruction_changes_the_output():
    policy = make()
    same = ["open the drawer"] * 4
    one = logits(policy, make_rows(cameras=(), texts=same))
    assert torch.equal(one, logits(policy, make_rows(cameras=(), texts=same[0])))
    other = [*same[:3], "close the drawer"]
    change = (logits(policy, make_rows(cameras=(), texts=other)) - one).abs()
    assert change[3].max() > 1e-5
    # Texts of other lengths in the batch are padded, which must not be seen.
    longer = [*same[:3], "put the black bowl on the plate next to the ramekin"]
    change = (logits(policy, make_rows(cameras=(), texts=longer)) - one).abs()
    assert change[:3].max() < 1e-6
    none = logits(policy, make_rows(cameras=()))
    assert (none - one).abs().max() > 1e-5


def test_words_are_hashed_alike_in_every_process():
    """Not Python's hash, which is salted per process."""
    assert word_ids("Open  the\ndrawer") == word_ids("open the drawer")
    assert word_ids("open the drawer") == (998, 390, 598)
    assert word_ids("") == ()
    many = {word_ids(f"word{i}")[0] for i in range(5000)}
    assert min(many) == 1, "0 is padding"
    assert max(many) == 1023


def test_the_seed_names_the_weights_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
    assert not torch.equal(one.stem.weight, other.stem.weight)


def test_it_starts_close_to_the_uniform_distribution():
    policy = make(image_keys=[IMAGE], num_bins=11)
    entropy = policy.get_dist(make_rows()).entropy()
    highest = torch.tensor(11.0).log()
    assert entropy.min() > 0.98 * highest


def test_an_image_that_is_not_uint8_is_refused():
    policy = make(image_keys=[IMAGE])
    rows = make_rows()
    rows[IMAGE] = rows[IMAGE].float() / 255
    with pytest.raises(TypeError, match=r"'image'\) is torch.float32; expected uint8"):
        policy(rows)


def test_spatial_softmax_finds_a_point():
    features = torch.zeros(1, 2, 5, 9)
    features[0, 0, 1, 6] = 100.0  # y -0.5, x 0.5
    features[0, 1, 4, 0] = 100.0  # y 1, x -1
    out = SpatialSoftmax()(features)
    expected = torch.tensor([[-0.5, 1.0, 0.5, -1.0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_weights_survive_a_state_dict():
    policy = make(image_keys=[IMAGE], seed=1)
    other = make(image_keys=[IMAGE], seed=2)
    other.load_state_dict(policy.state_dict())
    rows = make_rows()
    assert torch.equal(logits(policy, rows), logits(other, rows))


def test_it_can_be_trained_to_a_token():
    policy = make()
    rows = make_rows(num=8, cameras=())
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    wanted = torch.full((8, 3, 2), 4)
    for _ in range(30):
        loss = -policy.get_dist(rows).log_prob(wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(policy(rows)[TOKENS], wanted)


COLORS = {"red": (220, 40, 40), "green": (40, 220, 40), "blue": (40, 40, 220)}


def make_scenes(num, size, generator):
    """Three squares at random places, and a text that names one of them."""
    image = torch.full((num, 3, size, size), 90, dtype=torch.uint8)
    place = torch.rand(num, 3, 2, generator=generator)
    which = torch.randint(0, 3, (num,), generator=generator)
    for row in range(num):
        corners = (place[row] * (size - 8)).long().tolist()
        for (y, x), color in zip(corners, COLORS.values(), strict=True):
            square = torch.tensor(color, dtype=torch.uint8)[:, None, None]
            image[row, :, y : y + 8, x : x + 8] = square
    names = list(COLORS)
    texts = [f"pick up the {names[w]} block and place it in the box" for w in which]
    rows = TensorDict({STATE: torch.zeros(num, 4), IMAGE: image}, [num])
    rows.set("language_instruction", NonTensorStack(*texts))
    tokens = (place[torch.arange(num), which] * 5).long().clamp(max=4)
    return rows, tokens.unsqueeze(1)


def test_the_instruction_picks_the_object_among_others():
    """Unseen scenes; an encoder without the instruction knows where three things are,
    and is right in a third of the cases and by chance in the others."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = make_scenes(600, 48, generator)
    unseen, answers = make_scenes(100, 48, generator)
    policy = make(chunk_size=1, image_keys=[IMAGE], hidden_dim=64, num_keypoints=32)
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-3)
    for _ in range(120):
        batch = torch.randint(0, 600, (32,), generator=generator)
        loss = -policy.get_dist(rows[batch]).log_prob(tokens[batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    hits = logits(policy, unseen).argmax(-1) == answers
    assert hits.float().mean() > 0.7


def test_the_state_is_standardised_with_what_is_learned_from_data():
    policy = make()
    rows = make_rows(cameras=())
    plain = logits(policy, rows)
    policy.standardize_state([1.0, 2.0, 3.0, 4.0], [2.0, 0.5, 1.0, 0.0])
    scaled = rows.clone()
    scale = torch.tensor([2.0, 0.5, 1.0, 0.01])  # the last deviation is too small
    scaled[STATE] = rows[STATE] * scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(logits(policy, scaled), plain, rtol=0, atol=1e-5)
    other = make()
    other.load_state_dict(policy.state_dict())
    torch.testing.assert_close(logits(other, scaled), plain, rtol=0, atol=1e-5)


def test_a_state_out_of_range_is_clipped():
    policy = make()
    rows = make_rows(cameras=())
    rows[STATE][0] = 5.0
    rows[STATE][1] = 1e6
    out = logits(policy, rows)
    torch.testing.assert_close(out[0], out[1])


def test_it_fits_into_ten_megabytes_with_the_set_up_of_libero():
    policy = CompactPolicy(
        chunk_size=8,
        action_dim=7,
        num_bins=65,
        state_dim=9,
        image_keys=[IMAGE, WRIST],
        hidden_dim=256,
    )
    assert 4 * sum(v.numel() for v in policy.state_dict().values()) < 10_000_000
