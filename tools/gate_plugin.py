"""A plugin of pytest: run one share of the tests, and record what came of each.

tools/gate.py starts a few processes with it.
"""

import json
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", action="append", help="K/N: of N shares the Kth")
    parser.addoption("--seconds", help="a JSON file with the seconds of tests")
    parser.addoption("--record", help="where to append a line for every test")


def pytest_configure(config: pytest.Config) -> None:
    if place := config.getoption("--record"):
        config.pluginmanager.register(Recorder(Path(place)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    mine = [item.nodeid for item in items]
    for share in config.getoption("--share") or []:
        seconds = json.loads(Path(config.getoption("--seconds")).read_text())
        number, count = map(int, share.split("/"))
        mine = shared_out(mine, seconds, count)[number - 1]
    chosen = set(mine)
    items[:] = [item for item in items if item.nodeid in chosen]


class Recorder:
    """Appends a line of JSON for every module left out and every test that ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, Counter()

    def write(self, **line) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.write(test=report.nodeid, outcome="skipped", why=reason(report))
        elif report.failed:
            self.write(test=report.nodeid, outcome="failed", why=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.write(test=report.nodeid, outcome="skipped", why=reason(report))
        elif report.failed:
            self.write(test=report.nodeid, outcome="failed", why=first_line(report))
        elif report.when == "teardown":
            seconds = round(self.seconds[report.nodeid], 2)
            self.write(test=report.nodeid, outcome="passed", seconds=seconds)


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a test or a module was skipped."""
    return report.longrepr[2].removeprefix("Skipped: ")


def first_line(report: pytest.TestReport) -> str:
    """What failed, without the traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).split("\n")[0]


def shared_out(
    tests: list[str], seconds: dict[str, float], count: int
) -> list[list[str]]:
    """`tests` in `count` shares that take about as long; a function stays in one.

    A test that nobody timed counts as the average one. The same arguments give the same
    shares, in whatever order the tests come.
    """
    average = sum(seconds.values()) / len(seconds) if seconds else 1.0
    weights: Counter[str] = Counter()
    for test in tests:
        weights[test.partition("[")[0]] += seconds.get(test, average)
    loads, share_of = [0.0] * count, {}
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        share_of[name] = loads.index(min(loads))
        loads[share_of[name]] += weights[name]
    return [
        [test for test in tests if share_of[test.partition("[")[0]] == share]
        for share in range(count)
    ]
