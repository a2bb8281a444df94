"""What a study of several arms shows: study.json, the table, the picture and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from rich.console import Group
from rich.table import Table

from data.files import write_json
from eval.counts import Counts
from eval.exposure import ENOUGH, RESAMPLES, Exposure, accuracies, described, draws, listed, shares
from eval.plots import COLOURS, new_figure, plain, read_metrics, save_figure, shares_line
from eval.report.charts import last_accuracies
from eval.report.page import flattened, html_folded, html_header, html_page, html_picture, html_table, words
from eval.tables import markdown_table, number, span

EXPLANATION = (
    "A head trained on the verifier's true features alone meets its own output for the first time when it serves, from "
    "the second draft on, and its errors then feed further errors: this exposure bias makes acceptance fall with depth "
    "while accuracy under teacher forcing stays high. Training-time test unrolls the head on its own features in "
    "training, as scheduled sampling (Bengio et al. 2015) gives a sequence model its own outputs in place of the true "
    "ones, so that it learns on the inputs that it will have."
)
DEFINITIONS = {
    "depth": "n: how many of its own features the head has read when it drafts; 0 is the first draft of a verify call "
    "(depth 1 in alpha.json), so depth n is n-alpha as the EAGLE papers count it.",
    "n_alpha": "P(the draft at depth n is accepted | all before it were) in the greedy speculative loop, pooled over "
    "prompts and seeds.",
    "own_accuracy": "at every anchor of the verifier's greedy answers, not only where a verify call began: share of "
    "drafts at depth n that are the verifier's argmax, where all before them were, with the head's own features.",
    "true_accuracy": "the same drafts (same anchors, same tokens) with the verifier's true features in place of the "
    "head's own.",
    "gap": "true_accuracy - own_accuracy, paired: exposure bias.",
    "teacher_forced": "accuracy with true features over all (anchor, depth), accepted before or not. Contexts in which "
    "drafts were accepted are easier, so it is not to be compared with n_alpha.",
    "own_given_tokens": "accuracy with own features and the answer's tokens over all (anchor, depth), as training logs "
    "it.",
    "training_accuracy": "the same on training text: mean over the last tenth of what metrics.csv holds, by TTT step.",
    "tau": "1 + accepted / verify calls of the loop at this depth.",
    "intervals": f"95 %: {RESAMPLES} resamples of whole prompts, the same ones for every arm, so that differences are "
    "paired. They hold for these heads: another seed's training is not among what varies.",
}  # fmt: skip


@dataclass(frozen=True)
class ArmRun:
    """One trained head of a study, measured.

    loop: counts of the speculative loop, and exposure: of the same prompts' greedy answers, prompt by prompt.
    trained: notes of its training.  training_accuracy: by TTT step (`last_accuracy`).
    """

    arm: str
    seed: int
    loop: Sequence[Counts]
    exposure: Exposure
    trained: dict
    training_accuracy: Sequence[float]


def last_accuracy(metrics: Path) -> list[float]:
    """Training accuracy by TTT step, the mean over the last tenth of the points in a metrics.csv."""
    return last_accuracies(read_metrics(metrics))


@dataclass(frozen=True)
class _Pooled:
    """An arm's counts of each prompt, [N, K] and [N, 1], summed over its seeds."""

    accepted_NK: np.ndarray
    tested_NK: np.ndarray
    passed_N1: np.ndarray
    calls_N1: np.ndarray
    exposure: Exposure

    @classmethod
    def of(cls, runs: Sequence[ArmRun], depth: int) -> _Pooled:
        def by_depth(name: str) -> np.ndarray:
            return sum(
                np.array([(getattr(c, name) + [0] * depth)[:depth] for c in run.loop], dtype=np.int64) for run in runs
            )

        def plain(name: str) -> np.ndarray:
            return sum(np.array([[getattr(c, name)] for c in run.loop], dtype=np.int64) for run in runs)

        exposure = reduce(add, (run.exposure for run in runs))
        loop = by_depth("accepted_by_depth"), by_depth("tested_by_depth"), plain("accepted"), plain("verify_calls")
        return cls(*loop, exposure)

    def samples(self, draws_SN: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Every measured quantity, [1, K], or of each resample, [S, K]; tau has one column."""
        return {
            "n_alpha": shares(self.accepted_NK, self.tested_NK, draws_SN),
            **accuracies(self.exposure, draws_SN),
            "tau": 1 + shares(self.passed_N1, self.calls_N1, draws_SN),
        }


def study_record(overrides: Mapping[str, Sequence[str]], runs: Sequence[ArmRun], depth: int, provenance: dict) -> dict:
    """study.json. overrides: of each arm, the first one being the reference. All runs saw the same prompts.

    equal: "steps" where all arms took the same number, "minutes" where a clock ended them.
    """
    prompts = len(runs[0].loop)
    draws_SN = draws(prompts, RESAMPLES if prompts >= ENOUGH else 0)
    arms, values, samples = {}, {}, {}
    for name, settings in overrides.items():
        own = [run for run in runs if run.arm == name]
        pooled = _Pooled.of(own, depth)
        values[name], samples[name] = pooled.samples(), pooled.samples(draws_SN)
        arms[name] = {
            "overrides": list(settings),
            "seeds": [run.seed for run in own],
            "steps": [run.trained["steps"] for run in own],
            "training_seconds": [run.trained["seconds"] for run in own],
            **_described(values[name], samples[name]),
            "n_alpha_by_seed": [listed(_Pooled.of([run], depth).samples()["n_alpha"]) for run in own],
            "training_accuracy": np.mean([run.training_accuracy for run in own], axis=0).tolist(),
            "tested": pooled.exposure.tested.sum(0).tolist(),
            "loop_tested": pooled.tested_NK.sum(0).tolist(),
        }
    first, *others = overrides
    differences = {
        f"{name} - {first}": _described(*(
            {what: found[name][what] - found[first][what] for what in ("n_alpha", "gap", "tau")}
            for found in (values, samples)
        ))
        for name in others
    }  # fmt: skip
    return {
        "depth": depth,
        "prompts": prompts,
        "equal": "steps" if len({run.trained["steps"] for run in runs}) == 1 else "minutes",
        "arms": arms,
        "differences": differences,
        "explanation": EXPLANATION,
        "definitions": DEFINITIONS,
        "provenance": provenance,
    }


def _described(values: dict[str, np.ndarray], samples: dict[str, np.ndarray]) -> dict:
    """`described`, but tau is a number."""
    found = described(values, samples)
    return found | {name: found[name][0] for name in ("tau", "tau_interval")}


# --- what people see ------------------------------------------------------------------------------------------

Rows = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, head, rows


def study_tables(values: dict) -> list[Rows]:
    """The study's tables, one definition for the terminal, the page and Markdown."""
    arms, differences, depths = values["arms"], values["differences"], range(values["depth"])
    runs = [
        (name, " ".join(arm["overrides"]), _joined(arm["seeds"]), _joined(arm["steps"]), _both(arm, "tau"))
        for name, arm in arms.items()
    ]
    loop = [
        (str(n), *(_both(part, "n_alpha", n) for part in [*arms.values(), *differences.values()])) for n in depths
    ]  # fmt: skip
    same = {
        name: [
            (str(n), str(arm["tested"][n]), number(arm["true_accuracy"][n]), number(arm["own_accuracy"][n]),
             _both(arm, "gap", n))
            for n in depths
        ]
        for name, arm in arms.items()
    }  # fmt: skip
    forced = [
        (str(n), *(_both(arm, "teacher_forced", n) for arm in arms.values()),
         *(number(arm["own_given_tokens"][n]) for arm in arms.values()))
        for n in depths
    ]  # fmt: skip
    return [
        ("arms", ("arm", "settings", "seeds", "steps", "tau (95 %)"), runs),
        ("n-alpha by depth n in the loop (95 % over prompts)", ("n", *arms, *differences), loop),
        *(
            (f"{name}: the same drafts with true and with own features", ("n", "drafts", "true", "own", "gap"), rows)
            for name, rows in same.items()
        ),
        (
            "accuracy at every anchor, whatever was accepted before: teacher-forced; own features, given tokens",
            ("n", *arms, *(f"{name}, own" for name in arms)),
            forced,
        ),
    ]


def _both(part: dict, name: str, n: int | None = None) -> str:
    """A value with its interval, of depth n where there are depths."""
    value, interval = part[name], part[f"{name}_interval"]
    if n is not None:
        value, interval = value[n], interval[n]
    return number(value) + (f" ({span(interval, 2)})" if interval else "")


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(f"{value:,}" for value in numbers)


def terminal_tables(values: dict) -> Group:
    """For a rich console."""
    parts: list = []
    for title, head, rows in study_tables(values):
        table = Table(title=title)
        for name in head:
            table.add_column(name, justify="left" if name in ("arm", "settings") else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        parts.append(table)
    return Group(*parts, values["explanation"])


def markdown(values: dict) -> str:
    """The tables and the explanation as Markdown."""
    blocks = [f"**{title}**\n\n{markdown_table(head, rows)}" for title, head, rows in study_tables(values)]
    return "\n\n".join([*blocks, values["explanation"]]) + "\n"


def plot_study(values: dict, path: Path) -> Path:
    """n-alpha by depth beside true and own features on the same drafts, with intervals over prompts."""
    figure, (loop, same) = new_figure(2, size=(10, 4), dpi=200)
    for colour, (name, arm) in zip(COLOURS, values["arms"].items(), strict=False):
        shares_line(loop, arm, "n_alpha", color=colour, label=plain(name))
        true = {"ls": "--", "mfc": "white", "label": plain(f"{name}, true features")}
        shares_line(same, arm, "true_accuracy", color=colour, **true)
        shares_line(same, arm, "own_accuracy", color=colour, label=plain(f"{name}, own features"))
    loop.set(xlabel="n, own features read", ylabel="n-alpha", ylim=(0, 1), title="Acceptance in the loop")
    same.set(xlabel="n, own features read", ylabel="accuracy", ylim=(0, 1), title="The same drafts, both ways")
    for axes in (loop, same):
        axes.set_xlim(-0.4, values["depth"] - 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)


def write_study(values: dict, folder: Path, plots: bool = True, page: bool = True) -> Path:
    """study.json and study.md, and where they are wanted study.png and study.html, which holds them all.

    Returns the page, without one study.json.
    """
    path = folder / "study.json"
    write_json(path, values)
    (folder / "study.md").write_text(markdown(values))
    picture = plot_study(values, folder / "study.png") if plots or page else None
    return _write_page(values, picture, folder / "study.html") if page else path


def _write_page(values: dict, picture: Path, path: Path) -> Path:
    title = " and ".join(values["arms"])
    how = f"{values['prompts']} prompts, a chain of {values['depth']} drafts, greedy; arms trained for equal "
    definitions = html_table(("", ""), values["definitions"].items(), wrap_last=True)
    origin = html_table(("", ""), flattened(values["provenance"]), wrap_last=True)
    parts = [
        html_header("a study of draft heads", title, how + values["equal"]),
        f"<p>{words(values['explanation'])}</p>",
        html_picture(picture),
        *(f"<h2>{words(name)}</h2>" + html_table(head, rows) for name, head, rows in study_tables(values)),
        html_folded("what the numbers mean", definitions),
        html_folded("provenance", origin),
    ]
    return html_page(path, title, parts)
