"""A checkpoint is complete or not chosen, and a run continues from it bit for bit."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_scheduler,
)

from hope_hf.optim import build_optimizer
from hope_hf.training.checkpoint import find_checkpoint, load_weights, restore_checkpoint, save_checkpoint
from hope_hf.training.manifest import latest_checkpoint, verify

CONFIG = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_dropout=0.1,
    pad_token_id=0,
)


@pytest.fixture(autouse=True)
def one_cpu_process():
    PartialState(cpu=True)


class Run:
    """A tiny training with dropout, a level that steps every fourth time, and data drawn from three generators."""

    def __init__(self, seed: int = 0, **changes):
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG | changes))
        # A slow level in a model that has none.
        self.model.model.layers[1].mlp.level, self.model.model.layers[1].mlp.period = 0, 400
        self.optimizer = build_optimizer(self.model, "muon", 1e-2, 0.1, (0.9, 0.95), 1e-8, tokens_per_step=100)
        self.scheduler = get_scheduler("cosine", self.optimizer, num_warmup_steps=2, num_training_steps=50)
        words = pre_tokenizers.Whitespace()
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hope": 1}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = words
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            offset = random.randrange(4) + int(np.random.randint(4))
            tokens = (torch.randint(24, (2, 12)) + offset) % 32
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, output_dir: Path, save_total_limit: int | None = None, **changes) -> Path:
        pieces = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "trainer_state": {"step": self.step, "loss_sum": 0.1 + 0.2, "best": None},
            "data_state": {"epoch": 1, "positions": [3, 5]},
        }
        return save_checkpoint(output_dir, self.step, save_total_limit=save_total_limit, **pieces | changes)

    def restore(self, output_dir: Path, choice: str | None = None):
        saved = find_checkpoint(output_dir, choice)
        restore_checkpoint(saved, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.step = saved.step
        return saved


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An output folder with checkpoints of steps 3 and 5; tests copy it."""
    PartialState(cpu=True)
    output_dir = tmp_path_factory.mktemp("written")
    run = Run()
    run.train(3)
    run.save(output_dir)
    run.train(2)
    run.save(output_dir)
    return output_dir


@pytest.fixture
def output_dir(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    random.seed(1), np.random.seed(2)
    run = Run()
    run.train(6)
    run.save(tmp_path)
    expected = run.train(6)

    random.seed(8), np.random.seed(9)
    resumed = Run(seed=7)
    resumed.train(1)
    saved = resumed.restore(tmp_path)
    assert (saved.step, saved.path) == (6, tmp_path / "checkpoint-6")
    assert saved.trainer_state == {"step": 6, "loss_sum": 0.1 + 0.2, "best": None}
    assert saved.data_state == {"epoch": 1, "positions": [3, 5]}
    assert saved.carried == {}
    assert resumed.train(6) == expected
    for (name, a), (_, b) in zip(run.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert resumed.optimizer.level_report() == run.optimizer.level_report()


def test_carried_memories_come_back_as_they_were(tmp_path):
    whole = torch.randn(4, 6)
    carried = {
        "all": whole,
        "columns": whole[:, :3],
        "rows": whole[2:],
        "same": whole,
        "half": torch.randn(2).bfloat16(),
        "count": torch.tensor(3),
    }
    Run().save(tmp_path, carried=carried)
    found = find_checkpoint(tmp_path, None).carried
    assert found.keys() == carried.keys()
    for name, tensor in carried.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_nothing_is_pickled_and_every_file_is_in_the_manifest(output_dir):
    folder = output_dir / "checkpoint-5"
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    assert {*verify(folder)["files"], "manifest.json"} == set(names(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_loads_with_the_auto_classes(tmp_path, tied):
    run = Run(tie_word_embeddings=tied)
    folder = run.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("hope")["input_ids"] == [1]
    for (name, a), (_, b) in zip(run.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    fresh = Run(seed=3, tie_word_embeddings=tied).model
    load_weights(fresh, folder)
    assert torch.equal(fresh.lm_head.weight, run.model.lm_head.weight)


def test_a_family_that_renames_its_weights_for_export_continues(tmp_path):
    """Mixtral's experts are stacked in the model and apart in the files of the Hub."""
    config = AutoConfig.for_model("mixtral", **CONFIG | {"num_local_experts": 2, "num_key_value_heads": 2})
    torch.manual_seed(0)
    model, fresh = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    folder = Run().save(tmp_path, model=model)
    load_weights(fresh, folder)
    for (name, a), (_, b) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_weights_in_several_files(tmp_path):
    run = Run()
    run.model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    fresh = Run(seed=3).model
    load_weights(fresh, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 32}, r"lm_head.weight is float32 \[32, 16\] in the checkpoint and float32 \[32, 32\]"),
        ({"num_hidden_layers": 1}, "model.layers.1.* is only in the checkpoint"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is only in the model"),
        ({"dtype": "bfloat16"}, "in the checkpoint and bfloat16"),
    ],
)
def test_another_model_is_refused_untouched(output_dir, change, said):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG | change))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        load_weights(model, output_dir / "checkpoint-5")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_missing_tensor_is_refused(output_dir):
    file = output_dir / "checkpoint-5" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="model.norm.weight is only in the model: repeat the flags"):
        load_weights(Run().model, file.parent)


def truncate(path: Path):
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 1)


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = [truncate, flip_a_bit, Path.unlink]
FILES = ["model.safetensors", "optimizer.safetensors", "trainer.json", "rank_0.json", "config.json", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_not_chosen(output_dir, file, damage):
    damaged = output_dir / "checkpoint-5"
    damage(damaged / file)
    with pytest.warns(UserWarning, match="Not chosen: .*checkpoint-5"):
        assert latest_checkpoint(output_dir) == output_dir / "checkpoint-3"
    with pytest.raises(ValueError, match="checkpoint-5.* resume from another checkpoint.$") as caught:
        find_checkpoint(output_dir, str(damaged))
    assert "\n" not in str(caught.value)


def test_every_bit_of_the_manifest_counts(output_dir):
    """Steps, sizes and counts stand only there; no flip in them may pass."""
    manifest = output_dir / "checkpoint-3" / "manifest.json"
    whole = manifest.read_bytes()
    places = random.Random(0).sample(range(len(whole)), 60)
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1
        manifest.write_bytes(data)
        try:
            same = json.loads(data) == json.loads(whole)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ValueError, match="checkpoint-3"):
                verify(manifest.parent)
    manifest.write_bytes(whole)
    assert verify(manifest.parent)["step"] == 3


def test_choosing(output_dir, tmp_path):
    assert find_checkpoint(output_dir, None).step == find_checkpoint(output_dir, "latest").step == 5
    assert find_checkpoint(output_dir, str(output_dir / "checkpoint-3")).step == 3
    assert find_checkpoint(tmp_path / "nothing", None) is None
    with pytest.raises(ValueError, match="--resume_from_checkpoint latest: .*nothing holds no checkpoint"):
        find_checkpoint(tmp_path / "nothing", "latest")
    with pytest.raises(ValueError, match="checkpoint-9 is not a folder"):
        find_checkpoint(output_dir, str(output_dir / "checkpoint-9"))


def test_when_no_checkpoint_is_whole_the_run_does_not_begin_again_by_itself(output_dir):
    for step in (3, 5):
        truncate(output_dir / f"checkpoint-{step}" / "model.safetensors")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="holds no complete checkpoint; delete"):
        find_checkpoint(output_dir, None)


def test_another_number_of_processes_is_refused(output_dir, monkeypatch):
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match="written by 1 processes and this run has 2: launch it with --num"):
        find_checkpoint(output_dir, None)


class Killed(BaseException):
    """Stands for kill -9: nothing that handles errors may handle it."""


def test_a_kill_at_any_moment_leaves_the_last_checkpoint(output_dir, monkeypatch):
    """Stop before each call that changes the disk, the rename over an existing step included."""
    run = Run()
    run.restore(output_dir)
    before = {path.name: path.read_bytes() for path in (output_dir / "checkpoint-5").iterdir()}
    calls, limit = 0, 0

    def interrupting(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            return function(*args, **kwargs)

        return call

    changes = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    with monkeypatch.context() as patch:
        for owner, name in changes:
            patch.setattr(owner, name, interrupting(getattr(owner, name)))
        finished = False
        while not finished:
            calls = 0
            try:
                run.save(output_dir)
                finished = True
            except Killed:
                pass
            limit += 1
            calls = -(10**9)
            chosen = latest_checkpoint(output_dir)
            assert verify(chosen)["step"] == 5
            assert before.keys() == {path.name for path in chosen.iterdir()}
    assert limit > 20
    run.save(output_dir)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_what_a_kill_between_two_renames_leaves(output_dir):
    """The replaced folder counts until the one that replaces it is there."""
    replaced = output_dir / "checkpoint-5.replaced"
    (output_dir / "checkpoint-5").rename(replaced)
    run = Run()
    assert run.restore(output_dir).path == replaced
    run.save(output_dir)
    shutil.copytree(output_dir / "checkpoint-5", replaced)
    assert latest_checkpoint(output_dir) == output_dir / "checkpoint-5"
    run.step = 6
    run.save(output_dir)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5", "checkpoint-6"]


def test_rotation_keeps_the_newest(tmp_path):
    run = Run()
    for expected in (["1"], ["1", "2"], ["2", "3"], ["3", "4"]):
        run.step += 1
        run.save(tmp_path, save_total_limit=2)
        assert names(tmp_path) == [f"checkpoint-{step}" for step in expected]
    run.step = 10
    run.save(tmp_path, save_total_limit=1)
    assert names(tmp_path) == ["checkpoint-10"]


def test_rotation_does_not_count_broken_ones_and_keeps_later_ones(output_dir):
    run = Run()
    truncate(output_dir / "checkpoint-5" / "model.safetensors")
    run.step = 6
    run.save(output_dir, save_total_limit=2)
    assert names(output_dir) == ["checkpoint-3", "checkpoint-6"]
    # After going back to an older checkpoint by name the newer ones are somebody's still.
    run.step = 4
    run.save(output_dir, save_total_limit=1)
    assert names(output_dir) == ["checkpoint-4", "checkpoint-6"]


def test_a_kill_while_deleting_leaves_no_half_checkpoint(output_dir, monkeypatch):
    def delete_one_file(folder, **_):
        (Path(folder) / "model.safetensors").unlink()
        raise Killed

    run = Run()
    run.step = 6
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", delete_one_file)
        run.save(output_dir, save_total_limit=1)
    whole = [name for name in names(output_dir) if ".tmp-" not in name]
    assert whole == ["checkpoint-3", "checkpoint-6"]
    for name in whole:
        verify(output_dir / name)
    run.save(output_dir, save_total_limit=1)
    assert names(output_dir) == ["checkpoint-6"]


def test_a_full_disk_gets_one_sentence_and_its_space_back(output_dir):
    """The limit on a file's size stands for a full disk: the same calls fail in the same places."""
    run = Run()
    run.step = 9
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))
    try:
        with pytest.raises(ValueError, match=r"No checkpoint .* \(.*[Ff]ile too large.*last good .*checkpoint-5\.$"):
            run.save(output_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_a_read_only_folder_gets_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"\(Read-only file system\).*last good checkpoint: none yet\.$"):
        Run().save(tmp_path / "run")


def test_a_mistake_of_ours_keeps_its_traceback(output_dir):
    run = Run()
    with pytest.raises(AssertionError, match="state.data.epoch is a"):
        run.save(output_dir, data_state={"epoch": object()})


TWO_PROCESSES = """
    import sys
    from pathlib import Path
    import torch
    from accelerate import PartialState
    from test_checkpoint import Run
    from hope_hf.training.checkpoint import find_checkpoint

    process = PartialState(cpu=True)
    assert process.num_processes == 2
    run, rank, output_dir = Run(), process.process_index, sys.argv[1]
    torch.manual_seed(rank)
    run.step = 1
    run.save(output_dir, data_state={"rank": rank}, carried={"memory": torch.full((2,), float(rank))})
    expected = torch.rand(3)
    saved = run.restore(output_dir)
    assert saved.data_state == {"rank": rank} and (saved.carried["memory"] == rank).all()
    assert torch.equal(torch.rand(3), expected)

    run.step = 2
    try:
        run.save(output_dir, data_state={"bad": object()} if rank else {})
    except AssertionError:
        assert rank == 1
    except ValueError as error:
        assert rank == 0 and "checkpoint-1" in str(error), error
    else:
        raise SystemExit("a failure of one process did not reach the other")
    (find_checkpoint(output_dir, None).step == 1) or sys.exit("wrong choice")
    Path(f"{output_dir}.done-{rank}").touch()
"""


def test_two_processes_keep_their_own_states_and_agree_on_failures(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(
        [*command, str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert names(tmp_path) == ["run", "run.done-0", "run.done-1", "two.py"]
    assert names(tmp_path / "run") == ["checkpoint-1"]
