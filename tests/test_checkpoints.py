"""Checkpoints on disk: whole or not there, the newest and the best kept, damage noticed, one run in a folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from conf.cli import AGAIN, reported
from conf.disk import advice, disk_error, writing
from conf.errors import UserError
from data.files import write_json
from tiny import tiny_verifier
from toy_training import CPU, make
from train.checkpoints import KeepCheckpoints, WholeFiles, begun, best, newest, prune, sole_run
from train.fit import MetricsFile, fit


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=5, hidden=16, vocab=300, seed=0, aux_layers=[1, 2, 4])


def save(folder, step, tau=None, size=4):
    """A checkpoint of a head of `size` numbers, all of them `step`."""
    validated = {} if tau is None else {"step": step, "val/tau": tau}
    values = {"global_step": step, "state_dict": {"head.w": torch.full((size,), float(step))}}
    WholeFiles().save_checkpoint(values | {"eyrie": {"validated": validated}}, folder / f"step-{step:08d}.ckpt")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(path, how):
    blob = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        middle = len(blob) // 2
        flipped = blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]
        path.write_bytes({"truncated": blob[:middle], "flipped": flipped, "empty": b""}[how])


def test_a_training_run_keeps_the_newest_and_checks_what_it_reads(verifier, tmp_path):
    fit(make(verifier, 7), CPU, [KeepCheckpoints(tmp_path, 2, keep=2)])
    stems = ["step-00000006", "step-00000007"]  # the end is saved as well
    assert names(tmp_path) == [f"{stem}.{kind}" for stem in stems for kind in ("ckpt", "json")]
    note = json.loads((tmp_path / "step-00000007.json").read_text())
    assert note["bytes"] == (tmp_path / "step-00000007.ckpt").stat().st_size and note["metrics"] == {}
    digest = subprocess.run(["sha256sum", tmp_path / note["file"]], capture_output=True, text=True).stdout.split()[0]
    assert note["sha256"] == digest and newest(tmp_path).step == note["step"] == 7


def test_the_best_stays(tmp_path):
    for step, tau in ((2, 1.5), (4, 1.9), (6, 1.9), (8, None), (10, 1.2)):
        save(tmp_path, step, tau)
        prune(tmp_path, 2, step)
    assert [path.stem[-2:] for path in sorted(tmp_path.glob("*.ckpt"))] == ["04", "08", "10"]
    assert best(tmp_path) == {
        "file": "step-00000004.ckpt", "step": 4, "metrics": {"step": 4, "val/tau": 1.9},
    }  # fmt: skip
    assert best(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "is missing"),
        ("truncated", "bytes"),
        ("flipped", "has another sha256 than was written"),
        ("empty", "has 0 of"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path, caplog, how, said):
    for step in (2, 4):
        save(tmp_path, step)
    damage(tmp_path / "step-00000004.ckpt", how)
    found = newest(tmp_path)
    assert found.step == 2 and torch.equal(found.values["state_dict"]["head.w"], torch.full((4,), 2.0))
    (line,) = caplog.messages
    assert said in line and line.endswith("going on from step-00000002.ckpt before it") and "\n" not in line
    save(tmp_path, 3)  # the run goes on from there: what was damaged is no newer checkpoint of its
    prune(tmp_path, 2, 3)
    assert sorted(path.stem[-1] for path in tmp_path.glob("*.ckpt")) == ["2", "3"] and len(names(tmp_path)) == 4


def test_without_one_that_is_whole_it_ends(tmp_path):
    assert newest(tmp_path) is None and newest(tmp_path / "absent") is None
    for step in (2, 4):
        save(tmp_path, step)
        damage(tmp_path / f"step-0000000{step}.ckpt", "truncated")
    with pytest.raises(
        UserError, match=r"^expected a whole checkpoint in .*, found step-00000004.ckpt has .*put a copy"
    ):
        newest(tmp_path)


@pytest.mark.parametrize("how", ["whole", "truncated", "no checkpoint"])
def test_killed_between_a_file_and_its_json(tmp_path, caplog, how):
    """The file took its name when it was whole, so it counts; but it has no checksum, and reading it must do."""
    for step in (2, 4):
        save(tmp_path, step, size=40)
    (tmp_path / "step-00000004.json").unlink()
    if how == "truncated":
        damage(tmp_path / "step-00000004.ckpt", how)
    if how == "no checkpoint":
        torch.save({"weights": torch.zeros(2)}, tmp_path / "step-00000004.ckpt")
    assert newest(tmp_path).step == (4 if how == "whole" else 2)
    assert len(caplog.messages) == (how != "whole")


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path):
    """Whoever can write the file can write its checksum: what is loaded is tensors and plain values alone."""
    save(tmp_path, 2)
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    WholeFiles().save_checkpoint(
        {"global_step": 4, "state_dict": Evil(), "eyrie": {"validated": {}}}, tmp_path / "step-00000004.ckpt"
    )
    assert newest(tmp_path).step == 2 and not ran.exists()


def test_a_checkpoint_of_an_older_version(tmp_path):
    torch.save({"global_step": 6, "state_dict": {}, "eyrie": {}}, tmp_path / "last.ckpt")
    assert newest(tmp_path).step == 6


def test_a_new_run_spares_another_in_its_folder(tmp_path):
    assert begun(tmp_path, resume=False) is None is begun(tmp_path, resume=True)
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path / "checkpoints", 2)
    assert begun(tmp_path, resume=True).step == 2
    with pytest.raises(UserError, match=f"another run's checkpoints in {tmp_path}: continue it with resume={tmp_path}"):
        begun(tmp_path, resume=False)


def test_a_trained_head_is_not_trained_over(tmp_path):
    """Its checkpoints were removed, to save room."""
    (tmp_path / "head").mkdir()
    with pytest.raises(UserError, match=f"is trained, and its checkpoints are gone: .* eval run={tmp_path}"):
        begun(tmp_path, resume=True)


def test_metrics_that_are_damaged(tmp_path, caplog):
    """Zeros at the end, as after a loss of power; or nothing of it can be read."""
    (tmp_path / "metrics.csv").write_bytes(b"loss,step\r\n3.5,1\r\n3.25,2\r\n" + bytes(64))
    assert MetricsFile(tmp_path, 2).rows == [{"loss": "3.5", "step": "1"}, {"loss": "3.25", "step": "2"}]
    assert not caplog.messages
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\r\na\r\nb\r\n")
    assert MetricsFile(tmp_path, 2).rows == []
    assert caplog.messages == [f"{tmp_path / 'metrics.csv'}: 2 lines that can't be read are left out"]


def test_nothing_is_saved_in_the_midst_of_a_step(verifier, tmp_path):
    """Ctrl-C, twice, while the optimizer has changed some of the weights."""
    module, keep = make(verifier, 8), KeepCheckpoints(tmp_path, 2)

    def halfway(*_):
        if module.global_step == 3:
            module.head.lm_head.weight.data.add_(1.0)
            raise KeyboardInterrupt

    configure = module.configure_optimizers

    def hurt():
        optimizer = configure()
        optimizer.register_step_post_hook(halfway)
        return optimizer

    module.configure_optimizers = hurt
    with pytest.raises(SystemExit):
        fit(module, CPU, [keep])
    assert newest(tmp_path).step == 2

    module, keep = make(verifier, 8), KeepCheckpoints(tmp_path / "between", 2)
    (tmp_path / "between").mkdir()

    def stop(*_):
        if module.global_step == 3:
            raise KeyboardInterrupt

    module.on_train_batch_start = stop
    with pytest.raises(SystemExit):
        fit(module, CPU, [keep])
    assert newest(tmp_path / "between").step == 3


def test_weights_that_are_not_finite_are_no_checkpoint(verifier, tmp_path):
    module = make(verifier, 2)
    module.on_train_batch_end = lambda *_: module.global_step == 2 and module.head.norm.weight.data.fill_(torch.inf)
    with pytest.raises(UserError, match="after step 2 the weights of norm.weight are not finite .*lower optim.lr"):
        fit(module, CPU, [KeepCheckpoints(tmp_path, 0)])
    assert names(tmp_path) == []


class Full:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def write(self, block):
        self.room -= len(block)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.stream.write(block)

    def flush(self):
        pass


@pytest.mark.parametrize("room", [0, 300, 1500])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, room):
    save(tmp_path, 2, size=400)
    monkeypatch.setattr("train.checkpoints._Hashed", lambda stream: Full(stream, room))
    with pytest.raises(OSError) as caught:
        save(tmp_path, 4, size=400)
    error = disk_error(caught.value)
    assert error.filename == str(tmp_path / "step-00000004.ckpt") and error.__notes__ == ["about 1.6 kB are needed"]
    assert newest(tmp_path).step == 2 and names(tmp_path) == ["step-00000002.ckpt", "step-00000002.json"]


def test_a_disk_that_is_full_before_the_json(tmp_path, monkeypatch):
    def refuse(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("train.checkpoints.write_json", refuse)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert names(tmp_path) == []


def test_training_ends_where_the_disk_is_full_and_nothing_is_tried_again(verifier, tmp_path, monkeypatch):
    module = make(verifier, 8)
    write = torch.save

    def full(values, file):
        if values["global_step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(values, file)

    monkeypatch.setattr("train.checkpoints.torch.save", full)
    with pytest.raises(OSError) as caught:
        fit(module, CPU, [KeepCheckpoints(tmp_path, 2)])
    assert caught.value.filename == str(tmp_path / "step-00000004.ckpt")
    assert newest(tmp_path).step == 2 and len(names(tmp_path)) == 2


def test_metrics_are_never_a_part(tmp_path):
    """Rows up to the checkpoint stay as they were written, a cut line goes, and columns may come later."""
    file = MetricsFile(tmp_path)
    for step in (2, 4):
        file.log_metrics({"train/loss": 1 / 3 / step}, step)
    file.log_metrics({"val/tau": 1.5}, 4)
    file.log_metrics({"train/loss": 0.125}, 6)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.split() == ["step,train/loss,val/tau", f"2,{1 / 6!r},", f"4,{1 / 12!r},", "4,,1.5", "6,0.125,"]
    for cut in ("12", "12,0.5"):
        (tmp_path / "metrics.csv").write_text(text + cut)
        again = MetricsFile(tmp_path, 4)
        assert (tmp_path / "metrics.csv").read_text().split() == text.split()[:4]
    again.log_metrics({"train/loss": 0.125}, 6)
    assert (tmp_path / "metrics.csv").read_text().split() == text.split()
    MetricsFile(tmp_path)  # a run that begins anew
    assert not (tmp_path / "metrics.csv").exists()


HOLD = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); input()"


def test_one_run_in_a_folder(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / ".lock"], **pipes)
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"^another process works in {tmp_path}: wait for it or stop it"):
        sole_run(tmp_path, 0).__enter__()
    with sole_run(tmp_path, 1):
        pass  # further ranks write nothing
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000002.ckpt.77-ab.tmp").touch()
    other.kill()
    other.communicate()
    with sole_run(tmp_path, 0):
        assert names(tmp_path / "checkpoints") == []
    with sole_run(tmp_path, 0):
        pass


def terminate(place):
    os.kill(os.getpid(), signal.SIGTERM)


class Terminates:
    def __del__(self):
        terminate(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_inside_a_destructor_is_not_lost(capsys):
    with pytest.raises(SystemExit) as end, reported():
        Terminates()
        time.sleep(30)
    assert end.value.code == 143 and capsys.readouterr().err.startswith("terminated; ")


def test_a_clean_up_after_sigterm_is_not_cut_short():
    cleaned = False
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(SystemExit) as end, reported():
        try:
            terminate(None)
        finally:
            time.sleep(3 * AGAIN)
            cleaned = True
    assert end.value.code == 143 and cleaned
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def torch_full(place):
    with writing(place), open("/dev/full", "wb", buffering=0) as stream:
        torch.save({"a": torch.zeros(10000)}, stream)


def safetensors_full(place):
    with writing(place):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def placeless(place):
    with open("/dev/full", "wb", buffering=0) as stream:
        stream.write(b"a")


def refused(number):
    def act(place):
        raise OSError(number, "said", str(place))

    return act


FULL = "error: the disk is full at {place} ({why}, "


@pytest.mark.parametrize(
    ("act", "code", "line"),
    [
        (terminate, 143, "terminated; run the same command again"),
        (torch_full, 2, FULL.replace("{why}", "No space left on device")),
        (safetensors_full, 2, FULL.replace("{why}", "No space left on device")),
        (refused(errno.EDQUOT), 2, FULL.replace("{why}", "said")),
        (placeless, 2, "error: the disk is full (No space left on device): make room, then go on"),
        (refused(errno.EACCES), 2, "error: no permission for {place} (said): "),
        (refused(errno.EROFS), 2, "error: no permission for {place} (said): "),
    ],
)
def test_what_a_command_says_of_the_disk_and_of_sigterm(tmp_path, capsys, act, code, line):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, reported():
        act(tmp_path / "file")
    (said,) = capsys.readouterr().err.splitlines()
    assert end.value.code == code and said.startswith(line.format(place=tmp_path / "file"))
    assert ("free there" in said) == ("the disk is full at" in said) and signal.getsignal(signal.SIGTERM) == before


def test_other_errors_stay_bugs(tmp_path):
    with pytest.raises(FileNotFoundError), reported():
        (tmp_path / "absent").read_text()
    with pytest.raises(RuntimeError), reported():
        raise RuntimeError("shapes differ")
    with pytest.raises(PermissionError), reported():
        raise PermissionError(errno.EACCES, "of a socket")


def test_room_and_notes_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("conf.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=3_210_000))
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "not" / "made" / "x"))
    error.add_note("continue with: this")
    assert advice(error) == (
        f"the disk is full at {tmp_path}/not/made/x (No space left on device, 3.21 MB are free there): make room, "
        "then go on; continue with: this"
    )


def test_what_lies_in_the_way_is_left_alone(tmp_path):
    """A folder or a device where a file is to go; a file where a folder is."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="expected a file or nothing at .* found a folder or a device"):
            write_json(place, {})
    assert (tmp_path / "pipe").is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        (tmp_path / "file" / "folder").mkdir(parents=True)
    place = f"{tmp_path}/file/folder"
    assert advice(disk_error(caught.value)) == f"cannot use {place} (Not a directory): choose another place"
