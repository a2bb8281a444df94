"""What comes from outside runs no code, names no file elsewhere, and is shown as it is."""

import ast
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_report import METRICS, alpha_values, run_folder

from conf.cli import load
from conf.errors import UserError, printable
from conf.parse import json_of
from conf.terminal import TextConsole
from data.documents import Document
from data.inspect import show
from eval.plots import plain, plot_summary
from eval.report import write_comparison, write_report
from eval.report.page import asset
from eval.stream import words
from eval.study import write_study
from models.export.warm import read_any
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer, tiny_verifier
from train.checkpoints import WholeFiles, _read

ROOT = Path(__file__).parent.parent
OURS = [path for name in ("conf", "models", "data", "eval", "train") for path in (ROOT / name).rglob("*.py")]
EVIL = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>"


# --- no code ---------------------------------------------------------------------------------------------------


def calls(path: Path):
    """(name, node) of every call in a file, the name with its dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(node: ast.Call, name: str):
    return next((ast.unparse(word.value) for word in node.keywords if word.arg == name), None)


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_call_can_run_what_is_read(path):
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) (pickle|cPickle|dill|joblib|cloudpickle|marshal|shelve)\b", text, re.M)
    for name, node in calls(path):
        if name == "torch.load":
            assert keyword(node, "weights_only") == "True", f"line {node.lineno}"
        assert name not in ("eval", "exec", "os.system", "os.popen", "yaml.load"), f"line {node.lineno}: {name}"
        assert keyword(node, "shell") in (None, "False") and keyword(node, "allow_pickle") in (None, "False")
        trusted = keyword(node, "trust_remote_code")
        again = path.name == "parts.py" and "fresh = outline" in text  # a model whose code runs already
        assert trusted != "True" or again, f"line {node.lineno}: remote code is trusted"


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def bomb(tmp_path):
    """(what torch.save writes of it, the folder that it would make)."""
    mark, stream = tmp_path / "it-ran", io.BytesIO()
    torch.save({"state_dict": Bomb(mark), "x": torch.zeros(2)}, stream)
    torch.load(io.BytesIO(stream.getvalue()), weights_only=False)  # it is a live one
    mark.rmdir()
    return stream.getvalue(), mark


def refused(hint: str, run) -> str:
    with pytest.raises(UserError) as caught:
        run()
    line = str(caught.value)
    assert hint in line and len(line.splitlines()) == 1, line
    return line


def model_folder(path: Path, **config) -> Path:
    tiny_model(hidden=32, vocab=300, layers=7).save_pretrained(path)
    tiny_tokenizer(300).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


@pytest.mark.parametrize("whole", [True, False])
def test_a_verifier_that_is_a_pickle(tmp_path, bomb, whole):
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bomb[0])
    refused("", lambda: Verifier.load(str(folder), whole=whole))
    assert not bomb[1].exists()


def test_a_head_that_is_a_pickle(tmp_path, bomb):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(bomb[0])
    (folder / "config.json").write_text('{"model_type": "llama"}')
    refused("pytorch_model.bin is a pickle, which is not read", lambda: read_any(folder, tiny_verifier(vocab=300)))
    (folder / "model.safetensors").write_bytes(bomb[0])
    refused("damaged", lambda: read_any(folder, tiny_verifier(vocab=300)))
    assert not bomb[1].exists()


def test_a_checkpoint_that_is_a_pickle(tmp_path, bomb, caplog):
    for name in ("last.ckpt", "step-00000003.ckpt"):
        (tmp_path / name).write_bytes(bomb[0])
        assert isinstance(_read(tmp_path / name), str)  # a reason, and no checkpoint
    with pytest.raises(Exception, match="[Ww]eights"):
        WholeFiles().load_checkpoint(tmp_path / "last.ckpt")
    assert not bomb[1].exists()


CODE = "import os\nos.mkdir({mark!r})\nclass Config: pass\nclass Model: pass\n"


def test_code_of_a_model_is_not_run(tmp_path):
    mark = tmp_path / "it-ran"
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    folder = model_folder(tmp_path / "model", auto_map=auto, model_type="unheard-of")
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    refused("verifier.trust_remote_code=true", lambda: Verifier.load(str(folder)))
    assert not mark.exists() and load("train", []).verifier.trust_remote_code is False


def test_a_template_reaches_no_code(tmp_path):
    """transformers renders in an immutable sandbox; what it refuses is one line."""
    from models.chat import render_text

    tokenizer = tiny_tokenizer(300)
    mark = tmp_path / "it-ran"
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.mkdir('" + str(mark) + "') }}",
        "{{ self._TemplateReference__context }}{{ 1/0 }}",
        "{% for x in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('a\nb\x1b[2J') }}",
    ):
        tokenizer.chat_template = template
        refused("the chat template refuses", lambda: render_text(tokenizer, [{"role": "user", "content": "x"}]))
    assert not mark.exists()


# --- no file elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", 3, "x\0"])
def test_shards_lie_beside_their_index(tmp_path, name):
    folder = model_folder(tmp_path / "model")
    shutil.copy(folder / "model.safetensors", tmp_path / "other.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for whole in (True, False):
        refused("names of files beside", lambda whole=whole: Verifier.load(str(folder), whole=whole))


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", ".", "", "a\nb"])
def test_a_runs_name_is_one_folder(name):
    refused("a run's name is a folder's", lambda: load("train", [f"name={json.dumps(name)}"]))


@pytest.fixture
def victim(tmp_path):
    """A file of the user's own that looks like states, and the lock of a package manager."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "poetry.lock").write_text("precious")
    (folder / "poetry").write_text("precious")
    (folder / "model.safetensors.lock").write_text("precious")
    save_file({"hidden_states": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "link.safetensors").symlink_to(folder / "model.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    return folder


@pytest.mark.parametrize(
    "name", ["poetry", "model.safetensors", "link.safetensors", "pipe.safetensors", "../home/model.safetensors", "\0"]
)
def test_a_server_names_a_file_of_the_users(victim, tmp_path, name):
    before = {path.name: path.lstat().st_mtime_ns for path in victim.iterdir()}
    named = str(victim / name)
    from data.server_states import ServerStates

    server = ServerStates.__new__(ServerStates)
    server.url = "http://x"
    refused("nothing was read or removed", lambda: server._its_own(named))
    assert {path.name: path.lstat().st_mtime_ns for path in victim.iterdir()} == before
    assert (victim / "poetry.lock").read_text() == (victim / "model.safetensors.lock").read_text() == "precious"


def test_a_server_names_another_file_of_states(tmp_path):
    """Right in name and kind, and not this document's: it stays."""
    from data.server_states import ServerStates

    server = ServerStates.__new__(ServerStates)
    server.url, server.layers, server.verifier = "http://x", [1, 2], tiny_verifier(hidden=32)
    document = Document("a", [1, 2, 3], [(1, 3)])
    file = tmp_path / "states.safetensors"
    for tensors, hint in (
        ({"hidden_states": torch.zeros(3, 2, 32), "token_ids": torch.tensor([1, 2, 4])}, "found others"),
        ({"hidden_states": torch.zeros(1 << 20), "token_ids": torch.tensor([1, 2, 3])}, "another size"),
        ({"hidden_states": torch.zeros(3, 2, 32), "token_ids": torch.tensor([1, 2, 3]), "x": torch.zeros(1)}, "beside"),
    ):
        save_file(tensors, file)
        refused(hint, lambda: server._read(server._its_own(str(file)), document))
        assert file.is_file()


# --- shown as it is --------------------------------------------------------------------------------------------


def evil_values() -> dict:
    part = {"tau": 2.15, "alpha": 0.587, "prompts": 2, "prompt_lookup_tau": 1.2, "speedup": 1.6}
    sample = {"prompt": EVIL, "rounds": [[[], EVIL], [[EVIL, "x"], EVIL]]}
    tie = {"prompt": EVIL, "position": 9, "gap": 2e-5}
    texts = {name: EVIL for name in ("verifier", "verifier_hash", "head", "head_hash", "decode", "dtype", "device")}
    return alpha_values(samples=[sample], ties=[tie], by_category={EVIL: part}, definitions={EVIL: EVIL}, **texts)


def harmless(page: str) -> None:
    """Beside the page's own style, script and data, which can't hold a tag, there are the tags that it is made of."""
    body = page.replace(f"<style>{asset('page.css')}</style>", "", 1)
    body = body.replace(f"<script>{asset('tokens.js')}</script>", "", 1)
    body = re.sub(r'<script type="application/json">[^<]*</script>', "", body)
    assert "&lt;script&gt;" in body
    for tag in ("<script", "<style", "</style", "<img src=x", "javascript:", "<svg onload"):
        assert tag not in body
    tags = set(re.findall(r"<(/?[a-zA-Z0-9]+)", body))
    assert {tag.lstrip("/") for tag in tags} <= {
        *("html", "head", "meta", "title", "body", "header", "nav", "section", "h1", "h2", "h3", "p", "div", "a"),
        *("b", "span", "i", "ul", "li", "code", "pre", "details", "summary", "table", "tr", "th", "td", "figure"),
        *("figcaption", "img", "article", "button", "input", "output", "svg", "defs", "g", "path", "use", "text"),
        *("clipPath", "rect"),
    }
    assert not re.search(r"<[a-z][^>]*\son[a-z]+=", body)


def test_pages_escape_what_others_wrote(tmp_path):
    folder = run_folder(tmp_path / "run", METRICS)
    (folder / "alpha.json").write_text(json.dumps(evil_values()))
    (folder / "provenance.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    harmless(write_report(folder).read_text())
    other = run_folder(tmp_path / EVIL.replace("/", "|") / "1", METRICS)
    harmless(write_comparison([folder, other], tmp_path / "compare.html").read_text())


def test_a_study_escapes_what_others_wrote(tmp_path):
    nothing = [None, None]
    arm = {name: [0.5, 0.25] for name in ("n_alpha", "true_accuracy", "own_accuracy", "gap", "teacher_forced")}
    arm |= {f"{name}_interval": nothing for name in arm}
    from eval import study

    values = {"arms": {EVIL: arm}, "depth": 2, "prompts": 2, "equal": "steps", "explanation": EVIL}
    values |= {"definitions": {EVIL: EVIL}, "provenance": {EVIL: EVIL}}
    tables = [(EVIL, ("arm", EVIL), [(EVIL, "1")])]
    before, study.study_tables = study.study_tables, lambda values: tables
    try:
        harmless(write_study(values, tmp_path).read_text())
    finally:
        study.study_tables = before


@pytest.mark.parametrize("label", ["a $\\frac{1$ b", "$$", "cost $5 and $6", "\\", "a\nb\x1b", "_hidden", "%s {0}"])
def test_titles_are_no_formulas(tmp_path, label):
    values = alpha_values()
    plot_summary({label: values, "other": values}, f"{label} and {label}", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    assert "\n" not in plain(label) and plain("$") == "\\$"


def shown(value) -> str:
    stream = io.StringIO()
    TextConsole(file=stream, force_terminal=True, color_system=None, width=200).print(value)
    return stream.getvalue()


def test_a_terminal_obeys_nobody():
    from rich.table import Table

    words = "[bold]x[/bold] [/] :smile: [link=file:///etc]y[/link] \x1b[2J\x1b]0;title\x07 \x9b31m \r\b"
    safe = "[bold]x[/bold] [/] :smile: [link=file:///etc]y[/link] \\x1b[2J\\x1b]0;title\\x07 \\x9b31m \\r\\x08"
    assert shown(words).strip() == safe == printable(words)
    table = Table(title=words)
    table.add_column(words)
    table.add_row(words)
    assert shown(table).count(safe) == 3 and "\x1b" not in shown(table).replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_documents_are_shown_harmless():
    tokenizer = tiny_tokenizer(300)
    ids = tokenizer("\x1b]0;x\x07[bold]", add_special_tokens=False)["input_ids"]
    stream = io.StringIO()
    console = TextConsole(file=stream, force_terminal=False, width=500)
    show([Document("\x1b[2J[red]", ids, [(0, len(ids))], "[/]")], tokenizer, (), console)
    assert "\x1b" not in stream.getvalue() and "\x07" not in stream.getvalue() and "[bold]" in stream.getvalue()


def test_a_streamed_answer_is_text():
    assert shown(words("\x1b[2J[bold]\r\n", True)).rstrip("\n") == "\\x1b[2J[bold]\\r"


def test_errors_are_one_line_that_a_terminal_can_show():
    error = UserError("found a\n  b\x1b[2J\u2028\ud800 " + "x" * 5000 + " do this")
    assert "\n" not in str(error) and "a b\\x1b[2J\\u2028\\ud800" in str(error)
    assert len(str(error)) < 1300 and str(error).endswith("do this")
    with pytest.raises(ValueError, match="nested"):
        json_of("[" * 100_000)
