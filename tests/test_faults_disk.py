"""The disk is full, read-only or another's: one line that names the place, and with room it goes on to the same end."""

import signal
import subprocess

import pytest

from fault_prints import run_prints
from faults import Sabotage, Site, fill, small_disk, undisturbed

pytestmark = pytest.mark.slow

# What is written -> a call just before it, which call, and what must be on the small disk.
WRITES = {
    "the verifier's answers": ("data.log.RoundLog.append", 2, "cache"),
    "tokenised documents": ("data.convert.to_documents", 5, "cache"),
    "states": ("data.store.save_file", 1, "cache"),
    "a checkpoint": ("train.checkpoints.WholeFiles.save_checkpoint", 3, "run"),
    "metrics.csv": ("train.fit.MetricsFile._write_all", 1, "run"),
    "the trained head": ("train.main.save_head", 1, "run"),
    "the export": ("train.finish.exported", 1, "run"),
    "alpha.json": ("eval.alpha.AlphaReport.write", 1, "run"),
    "the report": ("train.finish.write_report", 1, "run"),
}


@pytest.mark.parametrize("what", WRITES)
def test_the_disk_is_full(tmp_path, fault, what):
    target, call, where = WRITES[what]
    with small_disk(tmp_path / "small", "16m") as disk:
        site = Site(tmp_path, cache=disk / "cache" if where == "cache" else None)
        folder = (disk if where == "run" else tmp_path) / "run"
        words = site.job(folder, "evaluation.report=true")
        full = Sabotage(target, "fill", call, (str(disk),))
        ended = site.run("train", *words, sabotage=(full,))
        lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert ended.code == 2 and len(lines) == 1 and "Traceback" not in ended.err, ended.err
        assert "No space left" in lines[0] and str(disk) in lines[0], lines
        (disk / "filler").unlink()
        saved = list(folder.glob("checkpoints/*.ckpt"))
        again = site.run("train", *([f"resume={folder}", "json=true"] if saved else words))
        assert again.code == 0, again.err
        assert run_prints(folder) == run_prints(undisturbed("evaluation.report=true"))
        assert not [path for path in (*folder.rglob("*"), *site.cache.rglob("*")) if path.name.endswith(".tmp")]
    fault(
        f"the disk is full (tmpfs of 16 MB) when {what} is to be written",
        f"`{site.plain(lines[0])}`, exit 2",
        "nothing: with room again it ends bitwise as the run that was left alone",
    )


def test_states_larger_than_the_disk(tmp_path, fault):
    """Known before anything is computed."""
    with small_disk(tmp_path / "small", "16m") as disk:
        site = Site(tmp_path)
        fill(str(disk), room=32768)
        ended = site.run("data", "task=capture", *site.data(f"out={disk / 'states'}"))
        assert ended.code == 2 and "of free disk for the verifier's states" in ended.line, ended.err
    fault("states larger than the disk", f"`{site.plain(ended.line)}`, exit 2", "nothing: before any is computed")


def test_a_read_only_disk(tmp_path, fault):
    with small_disk(tmp_path / "small", "16m") as disk:
        site = Site.warm(tmp_path)
        folder = disk / "run"
        kill = Sabotage("train.module.HeadModule.training_step", call=15)
        assert site.run("train", *site.job(folder), sabotage=(kill,)).code == -signal.SIGKILL
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        ended = site.run("train", f"resume={folder}", "json=true")
        assert ended.code == 2 and ended.line.startswith("error: ") and "Read-only" in ended.line, ended.err
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert site.run("train", f"resume={folder}", "json=true").code == 0
        assert run_prints(folder) == run_prints(undisturbed())
    fault(
        "the run folder's disk is read-only",
        f"`{site.plain(ended.line)}`, exit 2",
        "nothing: writable, it goes on bitwise",
    )


CLOSED = {"the run's folder": "runs", "the cache": "cache/dialogues", "the data file": "prompts.jsonl"}
CLOSED |= {"the verifier's weights": "verifier/model.safetensors"}


@pytest.mark.parametrize("what", CLOSED)
def test_no_permission(tmp_path, fault, what):
    site = Site.warm(tmp_path)
    (tmp_path / "runs").mkdir()
    words = site.job(tmp_path / "runs" / "run", "data.max_documents=11")
    path = tmp_path / CLOSED[what]
    path.chmod(0o500 if path.is_dir() else 0)
    ended = site.run("train", *words, bound=True)
    assert ended.code == 2 and ended.line.startswith("error: ") and "Traceback" not in ended.err, ended.err
    path.chmod(0o700)
    assert site.run("train", *words, bound=True).code == 0
    fault(f"no permission for {what}", f"`{site.plain(ended.line)}`, exit 2", "nothing: permitted, it runs")
