"""What lies on the disk is damaged: checkpoints, shards, dialogues, heads. It is noticed, and nothing is lost."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.files import file_hash, read_json, write_json
from fault_prints import run_prints
from faults import Sabotage, Site, calm, save_verifier, undisturbed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed in step 15 of 24, with checkpoints at 8 and 12. Only to be copied."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    undisturbed()
    kill = Sabotage("train.module.HeadModule.training_step", call=15)
    assert calm().run("train", *calm().job(folder), sabotage=(kill,)).code == -signal.SIGKILL
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    return sorted((run / "checkpoints").glob("*.ckpt"))


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "the newest checkpoint is cut off": lambda paths: cut(paths[-1]),
    "a bit of the newest checkpoint is flipped": lambda paths: flip(paths[-1]),
    "the newest checkpoint is gone, its JSON is not": lambda paths: paths[-1].unlink(),
    "the newest checkpoint holds a pickled command": lambda paths: torch.save(
        {"eyrie": Path("/"), "global_step": 12, "state_dict": {}}, paths[-1]
    ),
    "the JSON of the newest checkpoint is missing, as after a kill between the two": lambda paths: (
        paths[-1].with_suffix(".json").unlink()
    ),
    "half a checkpoint lies beside them, as after a power cut": lambda paths: (
        paths[-1].with_name("step-00000016.ckpt").write_bytes(paths[-1].read_bytes()[:1000])
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(run, fault, damage):
    DAMAGES[damage](checkpoints(run))
    ended = calm().run("train", f"resume={run}", "json=true")
    assert ended.code == 0, ended.err
    warned = [line for line in ended.err.splitlines() if line.startswith("damaged: ")]
    assert len(warned) == ("JSON" not in damage or "gone" in damage), ended.err
    assert run_prints(run) == run_prints(undisturbed())
    shown = f"`{warned[0]}`" if warned else "nothing"
    fault(damage, f"{shown}, exit 0", "a few steps of time: ends bitwise as the run that was left alone")


def test_all_checkpoints_damaged(run, fault):
    kept = [path.read_bytes() for path in checkpoints(run)]
    for path in checkpoints(run):
        flip(path)
    ended = calm().run("train", f"resume={run}", "json=true")
    assert ended.code == 2 and ended.line.startswith("error: expected a whole checkpoint"), ended.err
    for path, data in zip(checkpoints(run), kept, strict=True):
        path.write_bytes(data)
    assert calm().run("train", f"resume={run}", "json=true").code == 0
    assert run_prints(run) == run_prints(undisturbed())
    shown = ended.line.replace(str(run.parent), "…")
    fault("every checkpoint is damaged", f"`{shown}`, exit 2", "nothing more: a copy put back goes on bitwise")


def shard_of(site: Site) -> Path:
    (path,) = site.cache.glob("states/*/states-00000.safetensors")
    return path


SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is cut off": (cut, ""),
    "a shard is deleted": (Path.unlink, ""),
    "a shard's checksum file is garbage": (lambda path: path.with_suffix(".json").write_bytes(b"\xff{"), ""),
    "a bit of a stored shard is flipped": (flip, "remove states-00000.safetensors"),
    "index.json of the states is garbage": (lambda path: (path.parent / "index.json").write_text("{"), "index.json"),
}


@pytest.mark.parametrize("damage", SHARDS)
def test_a_damaged_shard(stopped, tmp_path, fault, damage):
    """Mended by computing it anew: at once where it shows before training, else after one message."""
    site, (act, message) = Site.warm(tmp_path), SHARDS[damage]
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    act(shard_of(site))
    ended = site.run("train", f"resume={run}", "json=true")
    shown = "nothing, it is computed again"
    if message:
        assert ended.code == 2 and ended.line.startswith("error: ") and message in ended.line, ended.err
        shown = f"`{site.plain(ended.line)}`"
        shutil.rmtree(shard_of(site).parent)
        assert site.run("train", f"resume={run}", "json=true").code == 0
    else:
        assert ended.code == 0, ended.err
    assert run_prints(run) == run_prints(undisturbed())
    fault(damage, f"{shown}, exit {ended.code}", "nothing: resumed, it ends bitwise as the run that was left alone")


def test_a_shard_of_another_verifier(tmp_path, fault):
    site, other = Site.warm(tmp_path), tmp_path / "other"
    save_verifier(other, seed=1)
    words = ["data", "task=capture", *site.data(f"out={tmp_path / 'store'}")]
    assert site.run(*words).code == 0
    before = file_hash(tmp_path / "store" / "states-00000.safetensors")
    ended = site.run(*words, f"verifier.source={other}")
    assert ended.code == 2 and "holds states of another verifier" in ended.line, ended.err
    assert file_hash(tmp_path / "store" / "states-00000.safetensors") == before
    fault(
        "states of another verifier where they are to go", f"`{site.plain(ended.line)}`, exit 2", "nothing: untouched"
    )


@pytest.mark.parametrize("act", [cut, flip], ids=lambda act: act.__name__)
def test_damaged_dialogues(tmp_path, fault, act):
    """The verifier's answers: what is damaged is set aside and written again."""
    site = Site.warm(tmp_path)
    (path,) = site.cache.glob("dialogues/*/dialogues.jsonl")
    before = path.read_bytes()
    act(path)
    ended = site.run("data", "task=regenerate", *site.data())
    (warned,) = [line for line in ended.err.splitlines() if "unfinished or damaged" in line]
    assert ended.code == 0 and path.read_bytes() == before, ended.err
    what = {"cut": "dialogues.jsonl is cut off in a line", "flip": "a bit in dialogues.jsonl is flipped"}[act.__name__]
    fault(what, f"`{site.plain(warned)}`, exit 0", "nothing: bitwise the same file again")


def test_states_that_are_not_numbers(stopped, tmp_path, fault):
    """A shard with NaN whose checksum is right: the step stops before the weights are touched, or is left out."""
    site, run = Site.warm(tmp_path), Path(shutil.copytree(stopped, tmp_path / "run"))
    path, whole = shard_of(site), shard_of(site).read_bytes()
    tensors = load_file(path)
    tensors["aux"][-40] = torch.nan
    save_file(tensors, path)
    entry = read_json(path.with_suffix(".json"))
    write_json(path.with_suffix(".json"), entry | {"sha256": file_hash(path), "bytes": path.stat().st_size})
    skipped = Path(shutil.copytree(run, tmp_path / "skipped"))
    ended = site.run("train", f"resume={run}", "json=true")
    assert ended.code == 2 and "not finite" in ended.line and "aux" in ended.line, ended.err
    assert list(run.glob("nonfinite/*")), "a reproducer"
    shown = site.plain(ended.line)
    ended = site.run("train", f"resume={skipped}", "trainer.nonfinite=skip", "json=true")
    assert ended.code == 0 and ended.values["trained"]["skipped"] > 0, ended.err
    count = ended.values["trained"]["skipped"]
    fault("NaN in stored states, trainer.nonfinite=skip", f"{count} steps counted as skipped, exit 0", "those batches")
    path.write_bytes(whole)
    write_json(path.with_suffix(".json"), entry)
    assert site.run("train", f"resume={run}", "json=true").code == 0
    assert run_prints(run) == run_prints(undisturbed())
    fault("NaN in stored states", f"`{shown}`, exit 2", "nothing: with sound states it goes on bitwise")


def test_a_verifier_that_gives_no_numbers(tmp_path, fault):
    site = Site(tmp_path)
    path = site.verifier / "model.safetensors"
    tensors = load_file(path)
    next(value for name, value in tensors.items() if "layers.5.mlp.down" in name)[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    rows = [{"prompt": f"Why {i}?", "response": "two apples and Paris"} for i in range(12)]
    site.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = site.run("train", *site.job(tmp_path / "run", "data.store=false", "data.answers=given"))
    assert ended.code == 2 and "finite" in ended.line, ended.err
    fault(
        "NaN in the verifier's weights, states online",
        f"`{site.plain(ended.line)}`, exit 2",
        "nothing was trained on them",
    )
    ended = site.run("train", *site.job(tmp_path / "run2", "data.answers=given"))
    assert ended.code == 2 and "finite" in ended.line, ended.err
    fault("NaN in the verifier's weights, states stored", f"`{site.plain(ended.line)}`, exit 2", "no shard was written")
