"""The server that writes the answers fails, hangs, lies or dies. What it wrote is kept, and the file ends the same."""

import json
import signal

import pytest

from answer_stub import Stub
from faults import Sabotage, Site, calm, imported
from models.verifier import Verifier
from tiny_writer import content

pytestmark = pytest.mark.slow
ROWS = 14


@pytest.fixture(scope="module")
def served():
    imported()  # before this process has threads
    return Verifier.load(str(calm().verifier), dtype="float32")


def words(site: Site, url: str, name: str) -> list[str]:
    """Words of `data` for answers from a server, into a file of this name."""
    more = ["data.max_documents=null", f"data.server={url}", "data.concurrency=3", f"out={site.folder / name}.jsonl"]
    return ["data", "task=regenerate", *site.data(*more, "verifier.dtype=float32")]


def rows(site: Site, name: str) -> list[dict]:
    return content([json.loads(line) for line in (site.folder / f"{name}.jsonl").read_text().splitlines()])


@pytest.fixture(scope="module")
def expected(served, tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("expected"))
    with Stub(served) as stub:
        ended = site.run(*words(site, stub.url, "expected"))
    assert ended.code == 0, ended.err
    found = rows(site, "expected")
    assert len(found) == ROWS
    return found


FAULTS = {
    "the server answers 500 five times": ["500"] * 5,
    "the server cuts five connections in the midst of an answer": ["cut"] * 5,
    "the server sends a web page in place of JSON, twice": ["garbage"] * 2,
    "the server is busy (429) three times": ["429 0"] * 3,
    "the server aborts an answer, twice": ["abort"] * 2,
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_that_pass(served, expected, tmp_path, fault, what):
    site = Site(tmp_path)
    with Stub(served) as stub:
        stub.faults += ["", *FAULTS[what]]
        ended = site.run(*words(site, stub.url, "again"))
        asked = len(stub.asked)
    assert ended.code == 0, ended.err
    assert rows(site, "again") == expected and asked == ROWS + 1 + len(FAULTS[what])  # one tries the server out
    said = next(line for line in ended.err.splitlines() if "tried again" in line)
    fault(what, f"`{site.plain(said)}`, exit 0", f"nothing: {ROWS} rows, each once")


class Successor(Stub):
    """A server where another one was."""

    def __init__(self, verifier, port: int):
        self.port = port
        super().__init__(verifier)

    def server_bind(self):
        self.server_address = ("127.0.0.1", self.port)
        super().server_bind()


def test_a_server_that_dies_and_comes_back(served, expected, tmp_path, fault):
    """While it is away, requests wait; then they are asked again."""
    site = Site(tmp_path)
    with Stub(served, after=5) as stub:
        running = site.start(*words(site, stub.url, "again"))
        running.until(lambda: "tried again" in running.err())
        stub.die()
        with Successor(served, stub.server_port):
            ended = running.wait()
    assert ended.code == 0 and rows(site, "again") == expected, ended.err
    said = next(line for line in ended.err.splitlines() if "tried again" in line)
    fault("the server dies midway and comes back", f"`{site.plain(said)}`, exit 0", f"nothing: {ROWS} rows, each once")


def test_a_server_that_dies_for_good(served, expected, tmp_path, fault):
    """The command ends with a line when its patience does; the same command goes on with another server."""
    site, soon = Site(tmp_path), Sabotage("data.prepare.needs_verifier", "hurry", arguments=())
    with Stub(served, after=9) as stub:
        ended = site.run(*words(site, stub.url, "again"), "data.batch_size=2", sabotage=(soon,))
    assert ended.code == 2 and ended.line.startswith("error: ") and "Traceback" not in ended.err, ended.err
    with Stub(served) as stub:
        again = site.run(*words(site, stub.url, "again"), "data.batch_size=2")
        asked = len(stub.asked)
    assert again.code == 0 and asked < ROWS, again.err
    assert rows(site, "again") == expected
    fault(
        "the server fails for good midway (patience: 3 s in place of 600)",
        f"`{site.plain(ended.line)}`, exit 2",
        f"nothing: {asked} of {ROWS} rows were left to ask for, none is there twice",
    )


def test_a_kill_while_a_server_writes(served, expected, tmp_path, fault):
    site = Site(tmp_path)
    with Stub(served) as stub:
        running = site.start(*words(site, stub.url, "again"), "data.batch_size=2")
        running.until(lambda: len(stub.asked) > 9)
        running.send(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
        before = len(stub.asked)
        again = site.run(*words(site, stub.url, "again"), "data.batch_size=2")
        assert again.code == 0 and len(stub.asked) - before < ROWS, again.err
    assert rows(site, "again") == expected
    fault(
        "kill -9 while a server writes",
        "nothing, exit -9; the same command goes on",
        f"nothing: {ROWS} rows, each once",
    )


def test_no_server_there(tmp_path, fault):
    site = Site(tmp_path)
    ended = site.run(*words(site, "http://127.0.0.1:9", "again"), seconds=400)
    assert ended.code == 2 and ended.line.startswith("error: ") and "127.0.0.1:9" in ended.line, ended.err
    fault("no server listens at data.server", f"`{site.plain(ended.line)}`, exit 2", "nothing: no run begins")
