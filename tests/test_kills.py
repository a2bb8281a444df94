"""kill -9, SIGTERM and Ctrl-C at any moment of a run: started again, it ends as if nothing had happened."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from fault_prints import run_prints, tree_prints
from faults import Ended, Sabotage, Site, save_prompts, undisturbed
from tiny_writer import content

pytestmark = pytest.mark.slow

LONG = ("trainer.max_steps=800", "trainer.checkpoint_every=5", "trainer.validate_every=0")
WORDS = ("three", "apples", "function", "Paris", "France", "two", "numbers")
# A call of each phase of a run, and which of its calls.
PHASES = {
    "the verifier's answers": ("models.verifier.Verifier.decode", 9),
    "tokenising": ("data.convert.to_documents", 5),
    "capture": ("data.store.save_file", 1),
    "a training step": ("train.module.HeadModule.training_step", 15),
    "the midst of a checkpoint": ("train.checkpoints._Hashed.write", 700),
    "the place between a checkpoint and its JSON": ("train.checkpoints.write_json", 3),
    "validation": ("train.callbacks.evaluate", 2),
    "saving the head": ("train.main.save_head", 1),
    "export": ("train.finish.exported", 1),
    "evaluation": ("train.finish.load_head", 1),
    "the report": ("train.finish.write_report", 1),
}


@pytest.fixture
def cold(tmp_path):
    """A site with an empty cache."""
    return Site(tmp_path)


def resumed(site: Site, folder: Path, *words: str) -> Ended:
    """The run in `folder`, continued to its end; before its first checkpoint by the command that began it."""
    saved = list(folder.glob("checkpoints/*.ckpt"))
    ended = site.run("train", *([f"resume={folder}", "json=true"] if saved else words))
    assert ended.code == 0, ended.err
    return ended


def killed(site: Site, moments, *command: str) -> int:
    """Start the command again and again, killed after each of `moments` (seconds). How often it was alive to be."""
    count = 0
    for moment in moments:
        running = site.start(*command)
        running.process.join(moment)
        running.send(signal.SIGKILL)
        count += running.wait().code == -signal.SIGKILL
    return count


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_each_phase(cold, fault, phase, number):
    calm_run, folder = undisturbed("evaluation.report=true"), cold.folder / "run"
    words = cold.job(folder, "evaluation.report=true")
    target, call = PHASES[phase]
    ended = cold.run("train", *words, sabotage=(Sabotage(target, "signal", call, (int(number),)),))
    assert ended.code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number], ended.err
    if number != signal.SIGKILL:
        word = "terminated" if number == signal.SIGTERM else "interrupted"
        assert ended.line.startswith(f"{word}; "), ended.err
    assert "Traceback" not in ended.err
    resumed(cold, folder, *words)
    assert run_prints(folder) == run_prints(calm_run)
    said = "nothing" if number == signal.SIGKILL else f"`{cold.plain(ended.line)}`"
    fault(f"{number.name} in {phase}", f"{said}, exit {ended.code}", "nothing: bitwise the run that was left alone")


def test_twenty_kills_in_one_training_run(tmp_path, fault):
    calm_run, site = undisturbed(*LONG), Site.warm(tmp_path)
    folder, chance = site.folder / "run", random.Random(20)
    training, words = 0, site.job(folder, *LONG)
    for _ in range(20):
        running, begun = site.start("train", *words), time.time()
        if chance.random() < 0.8:  # others meet the start, the reading of checkpoints, the first step
            running.until(lambda running=running: "training: " in running.err())
        running.process.join(chance.uniform(0.1, 1.2))
        assert running.process.exitcode is None, running.err()[-2000:]
        running.send(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
        rows = folder / "metrics.csv"
        training += rows.is_file() and rows.stat().st_mtime > begun
        if list(folder.glob("checkpoints/*.ckpt")):
            words = [f"resume={folder}", "json=true"]
    resumed(site, folder)
    assert training >= 12, f"only {training} of 20 kills met the training"
    assert run_prints(folder) == run_prints(calm_run)
    fault(
        f"kill -9 at 20 random moments of one training run of 800 steps, {training} of them between its steps",
        "nothing, exit -9; `resume=` goes on",
        "nothing: weights, optimizer, place in the data, metrics, head, export and acceptance are bitwise those of the "
        "run that was left alone",
    )


def whole_and_often_killed(site: Site, chance: random.Random, *command: str) -> tuple[Ended, Ended, int]:
    """(the command left alone, in a cache of its own; its last start after 6 kills; how many met it alive).

    Moments: anywhere in a sixth of the whole time after the start-up, so that each start gets a little further.
    """
    begun = time.monotonic()
    whole = site.run(*command, f"out={site.folder / 'whole.jsonl'}", EYRIE_CACHE=str(site.folder / "other"))
    seconds = time.monotonic() - begun
    assert whole.code == 0, whole.err
    count = killed(site, [chance.uniform(0.5, 1.0 + seconds / 6) for _ in range(6)], *command)
    again = site.run(*command, f"out={site.folder / 'again.jsonl'}")
    assert again.code == 0 and count >= 3, (count, again.err)
    assert not [path for path in site.cache.rglob("*") if path.name.endswith((".tmp", ".part"))]
    return whole, again, count


@pytest.mark.parametrize("task", ["regenerate", "synthesize"])
def test_kills_while_the_verifier_writes(cold, fault, task):
    """Each kill loses what was under way, and that is written again."""
    rows = {"regenerate": 120, "synthesize": 30}[task]
    save_prompts(cold.prompts, rows)
    more = [f"data.max_documents={rows}", "data.max_new_tokens=64", "data.temperature=0.7"]
    if task == "synthesize":
        more += ["data=synthetic", "data.path=null"]
    whole, again, count = whole_and_often_killed(cold, random.Random(8), "data", f"task={task}", *cold.data(*more))
    one, other = (
        [json.loads(line) for line in (cold.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "again")
    )
    assert len(one) == rows and content(one) == content(other)
    assert again.values["dropped"] == whole.values["dropped"]
    fault(
        f"kill -9 at {count} random moments of task={task}",
        "nothing, exit -9; the same command goes on",
        f"nothing: {rows} dialogues, ids, text and counts those of a run that was left alone",
    )


def given(site: Site, rows: int = 300, words: int = 220) -> list[str]:
    """Words of `data` for dialogues with answers: several shards of states."""
    chance = random.Random(1)
    with (site.folder / "given.jsonl").open("w") as stream:
        for i in range(rows):
            answer = " ".join(chance.choice(WORDS) for _ in range(words))
            turns = [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"conversations": turns}) + "\n")
    settings = ["data.answers=given", "data.max_documents=null", "data.max_length=512"]
    return site.data(f"data.path={site.folder / 'given.jsonl'}", *settings)


def test_kills_while_documents_are_tokenised(cold, fault):
    words = given(cold, rows=12000, words=20)  # three parts
    whole, again, count = whole_and_often_killed(cold, random.Random(6), "data", "task=tokenize", *words)
    assert (cold.folder / "again.jsonl").read_bytes() == (cold.folder / "whole.jsonl").read_bytes()
    assert again.values["content_hash"] == whole.values["content_hash"]
    fault(
        f"kill -9 at {count} random moments of tokenising 12,000 dialogues",
        "nothing, exit -9; the same command goes on",
        "nothing: documents bitwise the same, nothing half written left behind",
    )


def test_kills_while_states_are_captured(cold, fault):
    """One process, then two that share the store and of which one is killed."""
    command = ["data", "task=capture", *given(cold)]
    whole = cold.run(*command, f"out={cold.folder / 'whole'}")
    assert whole.code == 0 and whole.values["shards"] >= 4, whole.err
    prints, chance = tree_prints(cold.folder / "whole", "*.safetensors"), random.Random(4)
    store, count = cold.folder / "many", 0
    for call in range(1, 4):  # in the shards one after another: half computed, or written and without its checksum
        target = chance.choice(["models.verifier.Verifier.states", "data.store.save_file", "data.store.file_hash"])
        ended = cold.run(*command, f"out={store}", sabotage=(Sabotage(target, call=call),))
        count += ended.code == -signal.SIGKILL
    doomed = cold.start(*command, f"out={store}", sabotage=(Sabotage("data.store.save_file"),))
    other = cold.start(*command, f"out={store}")
    count += doomed.wait().code == -signal.SIGKILL
    ended = other.wait()
    assert ended.code == 0 and ended.values["verified"] and count == 4, ended.err
    assert tree_prints(store, "*.safetensors") == prints
    assert not list(store.glob("*.tmp"))
    fault(
        f"kill -9 in capture {count} times, the last time one of two processes that shared the store",
        "nothing, exit -9; the other computes what is missing and exits with 0",
        f"nothing: {len(prints)} shards bitwise those of a run that was left alone",
    )
