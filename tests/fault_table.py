"""The fault table: what was injected, what the user saw, and what was lost, of the tests that have just run."""

from __future__ import annotations

COLUMNS = ("", "injected", "what the user sees", "what was lost")


def table(stats: dict[str, list]) -> str:
    """Markdown, from a terminal reporter's reports by outcome; a test that failed or was skipped is a row as well."""
    rows, seconds = [], 0.0
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            seconds += report.duration
            found = [values for name, values in report.user_properties if name == "fault"]
            if outcome in ("failed", "error"):
                rows.append((report.nodeid, "the test failed", "?"))
            elif outcome == "skipped" and "fault" in report.keywords:
                rows.append((report.nodeid, f"not injected: {report.longrepr[-1]}", "?"))
            elif report.when == "call":
                rows += found
    lines = [_line(COLUMNS), _line("---" for _ in COLUMNS)]
    lines += [_line((number, *row)) for number, row in enumerate(rows, 1)]
    return "\n".join([*lines, "", f"{len(rows)} rows in {seconds / 60:.1f} minutes."])


def _line(cells) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"
