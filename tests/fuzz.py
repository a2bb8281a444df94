"""What a parser may meet, and the one thing that it must do: give a value, or end with a UserError of one line.

    @fuzz(jsons(VALID), VALID_TEXT)
    def test_a_reader(text, folder): read(text)

makes two tests: 60 cases that are always the same, and under `-m slow` 10,000 that never are. Each case has seconds and
a gigabyte; the example that is mutated is read first, and must be taken.
"""

import json
import os
import resource
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from conf.errors import UserError, printable

FEW, MANY = 60, int(os.environ.get("EYRIE_FUZZ_CASES", 10_000))
SECONDS, BYTES = 20, 1 << 30
DEEP, HUGE = '"@deep@"', '"@huge@"'  # stand for what json.dumps can't write
ODD_TEXT = ("", "\ud800", "\0", "a\nb\x1b[2J", "../../x", "/etc/passwd", "${oc.env:HOME}", "[bold]", "NaN", "x" * 999)
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"))


def utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def texts():
    """Of any characters, halves of some included."""
    return st.sampled_from(ODD_TEXT) | st.text(st.characters(exclude_categories=()), max_size=8)


def anything(leaves: int = 6):
    """JSON values of every kind; DEEP and HUGE among them (`written`)."""
    marks = st.sampled_from([json.loads(DEEP), json.loads(HUGE)])
    plain = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats() | texts() | marks
    return st.recursive(plain, _containers, max_leaves=leaves)


def _containers(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3)


def written(value) -> str:
    """A value as JSON."""
    nested = "[" * 50_000 + "]" * 50_000
    return json.dumps(value).replace(DEEP, nested).replace(HUGE, "9" * 5000)


def _places(value, found):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


@st.composite
def changed(draw, valid):
    """`valid` with one to three changes: another value, another type, something gone, doubled or swapped."""
    root = [json.loads(json.dumps(valid))]
    for _ in range(draw(st.integers(1, 3))):
        places = _places(root, [])
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        old = holder[key]
        match draw(st.sampled_from(("other", "other", "gone", "wrapped", "text", "number", "swapped", "more", "null"))):
            case "other":
                holder[key] = draw(anything())
            case "gone":
                del holder[key]
                if not root:
                    return None
            case "wrapped":
                holder[key] = draw(st.sampled_from(([old], {"": old}, {"value": old}, [old, old])))
            case "text":
                holder[key] = str(old)
            case "number" if type(old) in (int, float) and abs(old) < 1e300:
                holder[key] = draw(st.sampled_from((old + 1, -old, old * 2, float(old), *ODD_NUMBERS)))
            case "swapped":
                other, name = draw(st.sampled_from(places))
                try:
                    holder[key], other[name] = other[name], old
                    json.dumps(root[0])
                except (KeyError, IndexError, ValueError, RecursionError):  # gone with a change before, or a ring
                    return draw(anything())
            case "more" if isinstance(old, dict):
                old[draw(texts())] = draw(anything())
            case "more" if isinstance(old, list):
                old.append(draw(anything()))
            case "null":
                holder[key] = None
    return root[0]


@st.composite
def damaged(draw, valid: bytes):
    """Bytes with a few places flipped, cut out, doubled or put in, or their end missing."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, max(0, len(data) - 1))), draw(st.integers(1, 16))
        match draw(st.sampled_from(("flip", "bytes", "cut", "out", "twice", "in"))):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "bytes":
                data[at : at + length] = draw(st.binary(min_size=length, max_size=length) | st.just(b"\xff" * length))
            case "cut":
                del data[at:]
            case "out":
                del data[at : at + length]
            case "twice":
                data[at:at] = data[at : at + length]
            case "in":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(data)


@st.composite
def doubled(draw, valid: dict):
    """The object as JSON with one of its keys said twice."""
    key = draw(st.sampled_from(sorted(valid)))
    said = f"{json.dumps(key)}: {written(draw(anything()))}"
    text = json.dumps(valid)
    return f"{{{said}, {text[1:]}" if draw(st.booleans()) else f"{text[:-1]}, {said}}}"


def jsons(*valid):
    """JSON files as bytes: changed, doubled, damaged, other JSON, and no JSON at all."""
    parts = [st.binary(max_size=64), anything().map(written).map(str.encode)]
    for one in valid:
        parts += [changed(one).map(written).map(str.encode)] * 3 + [damaged(json.dumps(one).encode())]
        if isinstance(one, dict):
            parts.append(doubled(one).map(str.encode))
    return st.one_of(parts)


def files(valid: bytes):
    """Binary files: damaged ones, and others."""
    return st.one_of(damaged(valid), damaged(valid), damaged(valid), st.binary(max_size=200))


@st.composite
def _changed_header(draw, valid: bytes):
    size = int.from_bytes(valid[:8], "little")
    header = written(draw(changed(json.loads(valid[8 : 8 + size])))).encode()
    return len(header).to_bytes(8, "little") + header + valid[8 + size :]


@st.composite
def _changed_tensors(draw, valid: dict):
    """One tensor gone, renamed, of another shape or dtype, or with odd values."""
    tensors = dict(valid)
    name = draw(st.sampled_from(sorted(tensors)))
    old = tensors.pop(name)
    match draw(st.sampled_from(("gone", "name", "shape", "dtype", "value", "value"))):
        case "name":
            tensors[draw(st.sampled_from(("", "d2t", "blocks.0.0.linear.weight", f"{name}.x")))] = old
        case "shape":
            shapes = (old[:0], old.flatten(), old[None], old[:1], torch.cat([old, old]), old.flatten()[0])
            tensors[name] = draw(st.sampled_from(shapes)).clone()
        case "dtype":
            kinds = (torch.float64, torch.float16, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn)
            tensors[name] = old.to(draw(st.sampled_from(kinds)))
        case "value":
            tensors[name] = new = old.clone()
            odd = (float("nan"), float("inf"), 0.0) if old.is_floating_point() else (0, -1, -(2**63), 2**63 - 1, 5)
            odd = (True, False) if old.dtype == torch.bool else odd
            new.view(-1)[draw(st.integers(0, new.numel() - 1))] = draw(st.sampled_from(odd))
    return safetensors.torch.save(tensors)


def tensor_files(valid: dict):
    """safetensors files that are other than those of these tensors: in their bytes, header, names, shapes, values."""
    data = safetensors.torch.save(valid)
    return st.one_of(files(data), _changed_header(data), _changed_tensors(valid), _changed_tensors(valid))


class Folder(dict):
    """Files by name, in a form that a report of a failure can show."""

    def __repr__(self):
        return "\n".join(f"{name}: {len(data)} bytes {data[:1500]!r}" for name, data in self.items())

    def put(self, folder: Path) -> Path:
        for name, data in self.items():
            (folder / name).write_bytes(data)
        return folder


def folders(whole: dict[str, bytes], others: dict):
    """`whole` with one of its files by its strategy in `others`."""
    return st.one_of(
        *(strategy.map(lambda data, name=name: Folder(whole | {name: data})) for name, strategy in others.items())
    )


@contextmanager
def _bounded():
    """A gigabyte more than now, at the most."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class TooLong(BaseException):
    """Not an Exception: nothing may catch it."""


@contextmanager
def _soon():
    def stop(*_):
        raise TooLong(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refusal(error: BaseException) -> str:
    """The message, which must be one line of sane length that a terminal can show."""
    line = str(error)
    assert line.strip() and len(line) <= 1500 and printable(line) == line, ascii(line)
    return line


def fuzz(strategy, valid, few=FEW, many=MANY, refusals=(UserError,), takes=True, refuses=True):
    """Decorator of check(case, folder). valid: a case that must be taken.  refusals: how others may end.

    takes, refuses: whether some cases are expected to be taken, and to be refused.
    """

    def decorate(check):
        def test(cases, tmp_path):
            seen: Counter[str] = Counter()

            def run(case):
                with _soon(), _bounded():
                    try:
                        check(case, tmp_path)
                        seen["taken"] += 1
                    except refusals as error:
                        refusal(error)
                        seen["refused"] += 1

            if takes:
                with _bounded():
                    check(valid, tmp_path)
            always = cases == few
            settings(
                max_examples=cases,
                derandomize=always,
                database=None,
                deadline=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            )(given(strategy)(run))()
            print(f"{check.__name__.removeprefix('test_')}: {sum(seen.values())} cases, {dict(seen)}")
            assert bool(seen["refused"]) == refuses, seen

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        both = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]
        test = pytest.mark.filterwarnings("ignore:Generating overly large repr")(test)  # it would hide what failed
        return pytest.mark.parametrize("cases", both)(test)

    return decorate
