"""What changes under a run: its folder, data, settings, verifier, ranks. One line, and the run can still be ended."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from fault_prints import run_prints
from faults import Sabotage, Site, save_verifier, undisturbed

pytestmark = pytest.mark.slow
STEP = "train.module.HeadModule.training_step"


@pytest.fixture
def stopped(tmp_path):
    """(site, folder) of a run that was killed in its 15th step of 24."""
    site = Site.warm(tmp_path)
    assert site.run("train", *site.job(tmp_path / "run"), sabotage=(Sabotage(STEP, call=15),)).code == -signal.SIGKILL
    return site, tmp_path / "run"


def ends_as_if_nothing_had_happened(site: Site, folder: Path) -> None:
    ended = site.run("train", f"resume={folder}", "json=true")
    assert ended.code == 0, ended.err
    assert run_prints(folder) == run_prints(undisturbed())


def refused(site: Site, folder: Path, *more: str) -> str:
    """The one line with which a resumed run ends at once."""
    ended = site.run("train", f"resume={folder}", *more)
    assert ended.code == 2 and ended.line.startswith("error: ") and "Traceback" not in ended.err, ended.err
    return f"`{site.plain(ended.line)}`, exit 2"


def test_two_runs_in_one_folder(tmp_path, fault):
    site, folder = Site.warm(tmp_path), tmp_path / "run"
    first = site.start("train", *site.job(folder), sabotage=(Sabotage(STEP, "signal", 15, (signal.SIGSTOP,)),))
    first.until(lambda: list(folder.glob("checkpoints/step-00000012.json")))
    time.sleep(0.2)
    at_once = refused(site, folder)
    assert "another process" in at_once
    first.send(signal.SIGCONT)
    assert first.wait().code == 0
    assert run_prints(folder) == run_prints(undisturbed())
    ended = site.run("train", *site.job(folder))
    assert ended.code == 2 and "another run's checkpoints" in ended.line, ended.err
    assert run_prints(folder) == run_prints(undisturbed())
    fault(
        "a run is resumed while another process trains in its folder", at_once, "nothing: the first ends bitwise right"
    )
    fault("a new run in the folder of a finished one", f"`{site.plain(ended.line)}`, exit 2", "nothing: untouched")


def test_the_data_changed(stopped, fault):
    site, folder = stopped
    before = site.prompts.read_bytes()
    time_ns = site.prompts.stat().st_mtime_ns
    site.prompts.write_bytes(before.replace(b"times two", b"times ten"))
    shown = refused(site, folder)
    assert "prompts.jsonl" in shown and "resume" in shown
    site.prompts.write_bytes(before)
    os.utime(site.prompts, ns=(time_ns, time_ns))
    ends_as_if_nothing_had_happened(site, folder)
    fault("the data file was changed before resume=", shown, "nothing: put back, it goes on bitwise")


def test_the_data_is_gone(stopped, fault):
    site, folder = stopped
    before = site.prompts.read_bytes()
    site.prompts.unlink()
    shown = refused(site, folder)
    assert "prompts.jsonl" in shown
    site.prompts.write_bytes(before)
    ends_as_if_nothing_had_happened(site, folder)
    fault("the data file is gone before resume=", shown, "nothing: put back, it goes on bitwise")


def test_the_verifier_changed(stopped, fault):
    site, folder = stopped
    shutil.move(site.verifier, site.folder / "kept")
    save_verifier(site.verifier, seed=1)
    shown = refused(site, folder)
    assert "weights_hash" in shown
    shutil.rmtree(site.verifier)
    shutil.move(site.folder / "kept", site.verifier)
    ends_as_if_nothing_had_happened(site, folder)
    fault("the verifier's folder holds other weights before resume=", shown, "nothing: put back, it goes on bitwise")


@pytest.mark.parametrize("setting", ["optim.lr=1", "data.seed=3", "trainer.tokens_per_step=64", "seed=5"])
def test_settings_changed(stopped, fault, setting):
    site, folder = stopped
    shown = refused(site, folder, setting)
    assert setting.partition("=")[0] in shown
    if setting == "optim.lr=1":
        ends_as_if_nothing_had_happened(site, folder)
        fault(f"resume= with {setting}", shown, "nothing: without it, it goes on bitwise")


def test_config_yaml_damaged(stopped, fault):
    site, folder = stopped
    path = folder / "config.yaml"
    before = path.read_text()
    path.write_text(before[: len(before) // 2] + "\n  {")
    shown = refused(site, folder)
    assert "config.yaml" in shown
    path.write_text(before)
    ends_as_if_nothing_had_happened(site, folder)
    fault("config.yaml is cut off", shown, "nothing: put back, it goes on bitwise")


def test_a_learning_rate_that_breaks_the_weights(tmp_path, fault):
    site, folder = Site.warm(tmp_path), tmp_path / "run"
    ended = site.run("train", *site.job(folder, "optim.lr=1e30", "optim.warmup_ratio=0"))
    assert ended.code == 2 and "not finite" in ended.line and "optim.lr" in ended.line, ended.err
    fault("optim.lr=1e30", f"`{site.plain(ended.line)}`, exit 2", "nothing that is of use; no checkpoint holds it")


def test_a_head_of_another_tokenizer(tmp_path, fault):
    """Given to go on from, and given to be measured."""
    site, other = Site.warm(tmp_path), Site(tmp_path / "other")
    save_verifier(other.verifier, vocab=400)
    assert other.run("train", *other.job(tmp_path / "theirs")).code == 0
    ended = site.run("train", *site.job(tmp_path / "run", f"head.start={tmp_path / 'theirs'}"))
    assert ended.code == 2 and ended.line.startswith("error: ") and "Traceback" not in ended.err, ended.err
    fault("head.start= names a head of another verifier", f"`{site.plain(ended.line)}`, exit 2", "nothing")
    words = [f"run={tmp_path / 'theirs'}", f"verifier_source={site.verifier}", f"prompts={site.asked}"]
    ended = site.run("eval", *words)
    assert ended.code == 2 and ended.line.startswith("error: ") and "Traceback" not in ended.err, ended.err
    fault("a head is measured with another verifier", f"`{site.plain(ended.line)}`, exit 2", "nothing")


def test_one_of_two_ranks_is_killed(tmp_path, fault):
    """As by the kernel when memory is short. The other ends by itself; both resume, to the end of a run left alone."""
    site = Site.warm(tmp_path)

    def ranks(words, *sabotage):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        common |= {"TORCHELASTIC_RUN_ID": "faults", "GROUP_RANK": "0"}
        started = [
            site.start("train", *words, sabotage=sabotage * rank, RANK=str(rank), LOCAL_RANK=str(rank), **common)
            for rank in (0, 1)
        ]
        return [running.wait() for running in started]

    more = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.tokens_per_step=64"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    first, second = ranks(site.job(whole, *more))
    assert first.code == 0 and second.code == 0, first.err + second.err
    survivor, killed = ranks(site.job(folder, *more), Sabotage(STEP, call=15))
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 2 and survivor.line.startswith("error: ") and "Traceback" not in survivor.err, survivor.err
    resumed = ranks([f"resume={folder}", "json=true"])
    assert [ended.code for ended in resumed] == [0, 0], resumed[0].err
    assert run_prints(folder) == run_prints(whole)
    fault(
        "one of two ranks (gloo) is killed in a step, as when memory is short",
        f"the other: `{site.plain(survivor.line)}`, exit {survivor.code}",
        "steps since the last checkpoint are done again: ends bitwise as two ranks that were left alone",
    )
