"""Loss against bytes and seconds, from races."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradsieve.cli import main
from gradsieve.lab.bench.frontier import family


def raced(recipe: str, num_bytes: float, loss: float | None, seconds: float, **other: Any) -> dict[str, Any]:
    """One row of race.json, as far as it counts here; no loss for a run that diverged."""
    row = {
        "recipe": recipe,
        "values": "exact",
        "peer": recipe.startswith(("dense", "power", "diloco")),
        "workload": "gpt",
        "network": "1gbit",
        "numel": 1000,
        "ranks": 4,
        "repeats": 800,
        "bytes_received_per_rank": num_bytes,
        "curves": [[[400, seconds / 2, 3.0], [800, seconds, loss]]],
        **other,
    }
    return row if loss is None else row | {"test_loss": loss, "test_loss_deviation": 0.01}


RACE = [
    raced("dense", 6400, 2.0, 100),
    raced("powersgd-1", 200, 2.4, 30),
    raced("powersgd-4@0.01", 800, 2.2, 40),
    raced("diloco-64", 100, 2.5, 20),
    raced("diloco-128", 50, None, 20),
    raced("onebit-updates", 100, 2.02, 25),
    raced("onebit-updates:0.1", 20, 2.3, 35),
]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(
        json.dumps({"environment": {"cpu": "c", "cores": 2, "torch": "t", "gradsieve": "g"}, "results": rows})
    )
    return str(path)


def test_a_margin_is_over_the_best_baseline_that_costs_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "frontier.png"
    file = written(tmp_path / "race.json", RACE)
    assert main(["bench", "frontier", file, "--plot", str(picture), "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert [row["bytes"] for row in rows.values()] == sorted((row["bytes"] for row in rows.values()), reverse=True)
    assert "diloco-128" not in rows, "it diverged"
    assert rows["onebit-updates"]["fewer_bytes"] == 64
    assert rows["onebit-updates"]["over_dense"] == pytest.approx(0.01)
    assert rows["onebit-updates"]["margin_at_equal_bytes"] == pytest.approx(2.5 / 2.02 - 1)
    assert rows["onebit-updates"]["margin_at_equal_seconds"] == pytest.approx(2.5 / 2.02 - 1)
    assert "margin_at_equal_bytes" not in rows["onebit-updates:0.1"], "no baseline sends so little"
    assert rows["onebit-updates:0.1"]["margin_at_equal_seconds"] == pytest.approx(2.4 / 2.3 - 1)
    assert "margin_at_equal_bytes" not in rows["dense"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("panels", "labels"), [("all", 3), ("bytes", 1), ("seconds", 2)])
def test_the_plot_has_the_panels_that_were_asked_for(
    tmp_path: Path, panels: str, labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradsieve.lab.plots import frontier

    drawn: list[Any] = []
    monkeypatch.setattr(frontier, "save", lambda figure, path: drawn.append(figure))
    slow = [{**row, "network": "100mbit"} for row in RACE]
    file = written(tmp_path / "race.json", [*RACE, *slow])
    assert main(["bench", "frontier", file, "--plot", str(tmp_path / "f.png"), "--panels", panels]) == 0
    xlabels = [axes.get_xlabel() for axes in drawn[0].axes]
    assert len(xlabels) == labels
    assert any("bytes" in label for label in xlabels) is (panels != "seconds")
    assert any("seconds, 100mbit" in label for label in xlabels) is (panels != "bytes")


def test_several_races_are_one_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = written(tmp_path / "more.json", [raced("dense", 6400, 1.9, 90), raced("topka:0.01", 300, 2.3, 30)])
    assert main(["bench", "frontier", written(tmp_path / "race.json", RACE), again, "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert rows["dense"]["test_loss"] == 2.0, "the first race's"
    assert rows["topka:0.01"]["margin_at_equal_bytes"] == pytest.approx(2.4 / 2.3 - 1)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("powersgd-early-16", "powersgd-early"),
        ("onebit-updates-8:0.25@0.004", "onebit-updates-H"),
        ("topka:0.01", "topka"),
        ("quantized-8bit", "quantized-8bit"),
        ("dense@0.002", "dense"),
    ],
)
def test_a_family_is_the_name_without_how_much_is_sent(recipe: str, name: str) -> None:
    assert family(recipe) == name


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "is not a race"),
        ([{"recipe": "dense"}], "is not a race"),
        (RACE[1:], "there is no finished run of dense on 1gbit"),
        ([*RACE, raced("topka", 1, 2.0, 1, ranks=8)], "these races differ in ranks"),
    ],
)
def test_what_is_no_race(
    rows: list[dict[str, Any]], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "frontier", written(tmp_path / "race.json", rows)]) == 2
    assert sentence in capsys.readouterr().err


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "frontier", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    file = written(tmp_path / "race.json", RACE)
    assert main(["bench", "frontier", file, "--plot", str(tmp_path / "no" / "f.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
