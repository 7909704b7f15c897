"""Training as a race: recipes and torch's own hooks, to a target; and what follows for other bandwidths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsieve.cli import main
from gradsieve.errors import InputError, MismatchError
from gradsieve.lab.bench.breakeven import break_even, range_text, read_reports
from gradsieve.lab.bench.race import TrainPlan
from gradsieve.lab.bench.standings import seconds_to, standings
from gradsieve.lab.bench.timed import StepTime, by_local_steps, require_equal, timed_plan, warmup_steps
from gradsieve.lab.bench.train import _read, _run_folders, compared_run
from gradsieve.lab.plots.canvas import legend_below, line_style, new_figure
from gradsieve.lab.plots.race import draw_race
from gradsieve.lab.plots.steps import draw_steps
from gradsieve.lab.train.choice import Choice, parse_choices
from gradsieve.lab.train.plan import Plan
from support import networks

STEPS = 10
SMALL = ["resnet20", "--batch", "4", "--train-samples", "64", "--test-samples", "40", "--steps", str(STEPS)]


RACED = ["bf16", "powersgd-2", "local-sgd"]
DENSE_STEPS = 3
CONTENDERS = [
    *("--recipe", "dense", "dense@0.02", "oktopk", "--values", "exact", "bf16", "--peer", *RACED, "--ranks", "2"),
    *("--density", "0.05", "--dense-steps", str(DENSE_STEPS)),
]


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One baseline of each kind, on loopback."""
    folder = tmp_path_factory.mktemp("race")
    assert main(["bench", "train", *SMALL, *CONTENDERS, "--out", str(folder), "--json"]) == 0
    return folder, json.loads((folder / "race.json").read_text())


def test_every_contender_has_a_row(race: tuple[Path, dict[str, Any]]) -> None:
    folder, report = race
    rows = {(row["recipe"], row["values"]): row for row in report["results"]}
    recipes = [("dense", "exact"), ("dense@0.02", "exact"), ("oktopk", "exact"), ("oktopk", "bf16")]
    assert list(rows) == [*recipes, *((name, "exact") for name in RACED)]
    dense = rows["dense", "exact"]
    assert dense["speedup_over_dense"] == dense["speedup_to_target"] == 1
    assert dense["test_loss"] * 1.03 == pytest.approx(dense["target_loss"])
    for row in rows.values():
        assert (row["network"], row["ranks"], row["numel"], row["repeats"]) == ("loopback", 2, 75_002, STEPS)
        assert row["seconds"] > 0
        assert len(row["curves"][0]) == STEPS
        assert "interface_bytes_received_per_rank" not in row  # a machine's interface tells nothing of one rank
    assert (folder / "race.png").read_bytes().startswith(b"\x89PNG")


def test_replicas_end_equal_also_where_only_models_are_averaged(race: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = race
    results = [json.loads(path.read_text()) for path in folder.glob("loopback/*/result.json")]
    assert len(results) == len(RACED) + 4
    assert all(result["replicas_equal"] for result in results)
    digests = {result["recipe"]: result["digest"] for result in results}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.long
def test_bytes_of_baselines_are_what_an_interface_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    networks.require_networks()
    monkeypatch.setattr("gradsieve.lab.bench.site.NETWORK_NAME", networks.unique_name())
    command = ["bench", "train", *SMALL, "--network", "unlimited", "--hosts", "2", "--out", str(tmp_path), "--json"]
    assert main([*command, "--peer", "fp16", "powersgd-2", "quantized-8bit"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    for row in rows:
        counted, computed = row["interface_bytes_received_per_rank"], row["bytes_received_per_rank"]
        # Running means of batch norm and the headers of many small packets come on top.
        assert computed < counted < 1.35 * computed + 25_000, row["recipe"]


def test_where_links_are_slow_only_the_time_of_a_step_is_taken_on_them(
    race: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is that of the race on loopback, bit for bit; seconds are steps times those of a timed step."""
    timed = ["--timed-steps", "7", "--out", str(tmp_path), "--json"]
    assert main(["bench", "train", *SMALL, *CONTENDERS, *timed]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    for row, trained in zip(rows, race[1]["results"], strict=True):
        assert [at[0::2] for at in row["curves"][0]] == [at[0::2] for at in trained["curves"][0]]
        assert len(row["raw_seconds"]) == 2  # stretches of four steps
        late = {"oktopk": DENSE_STEPS, "powersgd-2": max(2, STEPS // 10), "local-sgd": STEPS // 10}
        for step, seconds, _ in row["curves"][0]:
            dense_steps = min(step, late.get(row["recipe"], 0))
            expected = dense_steps * rows[0]["seconds"] + (step - dense_steps) * row["seconds"]
            assert seconds == pytest.approx(expected)
        timed_as = row["recipe"].split("@")[0]  # a rate takes no time
        (run,) = (tmp_path / "loopback").glob(f"{timed_as}{'-bf16' * (row['values'] == 'bf16')}-seed0")
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert max(steps) == warmup_steps(1) + 8


def test_runs_of_a_comparison_need_not_be_made_again(
    race: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a race holds runs as a comparison's does; none of them is trained again."""
    compared = ["--compared", str(tmp_path), str(race[0] / "loopback")]
    assert main(["bench", "train", *SMALL, *CONTENDERS, *compared, "--timed-steps", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    for row, trained in zip(rows, race[1]["results"], strict=True):
        assert [at[0::2] for at in row["curves"][0]] == [at[0::2] for at in trained["curves"][0]]
        assert row["test_loss"] == trained["test_loss"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 9}, "was made with other settings"),
        ({"seed": 1}, "no folder has a finished run of dense with seed 1"),
        ({"ranks": 3}, "was made by 2 ranks, not 3"),
    ],
)
def test_runs_of_another_comparison_are_refused(changes: dict[str, int], sentence: str, tmp_path: Path) -> None:
    run = Plan("resnet20", Choice("dense"), steps=7)
    finished(tmp_path, "dense", [3.0, 2.0])
    (tmp_path / "dense-seed0" / "config.json").write_text(json.dumps({"plan": run.to_json(), "workers": 2}))
    plan = TrainPlan(run, [run.choice], [0], ["loopback"], 2, timed_steps=4, compared=[tmp_path])
    assert compared_run(plan, run.choice, 0) == tmp_path / "dense-seed0"
    other = replace(plan, run=replace(run, steps=changes.get("steps", 7)), ranks=changes.get("ranks", 2))
    with pytest.raises(InputError, match=sentence):
        compared_run(other, run.choice, changes.get("seed", 0))


def test_every_timed_stretch_holds_one_exchange_of_many_local_steps() -> None:
    """Or one stretch would be all computing, and the next one have all of the traffic."""
    few = [Choice(name) for name in ("dense", "onebit-updates", "local-sgd", "diloco-4")]
    many = [Choice(name) for name in ("diloco-32", "onebit-updates-32", "diloco-8")]
    assert by_local_steps([*few, *many]) == {1: few, 32: many[:2], 8: many[2:]}
    run = Plan("gpt", few[0], steps=800)
    for local_steps, steps in {1: 8 + 12, 8: 8 + 16, 32: 32 + 32}.items():
        plan = timed_plan(run, 10, local_steps)
        assert plan.steps == steps
        assert plan.log_every == max(4, local_steps)
        assert warmup_steps(local_steps) % plan.log_every == 0


def test_a_dense_start_takes_dense_time() -> None:
    time = StepTime(0.1, 2.0, 5, 0.05, 1e6, [0.1])
    assert time.until(3) == 6.0
    assert time.until(15) == pytest.approx(11.0)


def test_a_loss_that_depends_on_the_network_is_no_loss_of_another_network() -> None:
    found = [{"recipe": "oktopk", "digest": "a"}]
    require_equal("100mbit", found, "1gbit", [{"recipe": "oktopk", "digest": "a"}])
    with pytest.raises(MismatchError, match="oktopk ended with different parameters on 100mbit and on 1gbit"):
        require_equal("100mbit", found, "1gbit", [{"recipe": "oktopk", "digest": "b"}])


def test_recipes_are_compared_with_the_fastest_baseline_to_the_target(tmp_path: Path) -> None:
    choices = [Choice(name) for name in ("dense", "fp16", "powersgd-1", "topka")]
    plan = TrainPlan(Plan("resnet20", choices[0]), choices, [0], ["loopback"], 2)
    losses = {"dense": [3.0, 2.5, 2.2, 2.0], "fp16": [3.0, 2.5, 2.0], "powersgd-1": [3.0, 2.4], "topka": [3.0, 2.0]}
    for name, course in losses.items():
        finished(tmp_path, name, course)
    rows = {row["recipe"]: row for row in standings(plan, "loopback", _read(plan, _run_folders(plan, tmp_path)))}
    assert {row["best_peer"] for row in rows.values()} == {"fp16"}
    assert rows["topka"]["speedup_over_best_peer"] == 2.0
    assert rows["dense"]["speedup_over_best_peer"] == pytest.approx(2 / 3)
    assert "speedup_over_best_peer" not in rows["powersgd-1"]


def test_the_time_to_a_target_is_that_of_the_first_test_that_reaches_it() -> None:
    tests = [{"seconds": 1.0, "loss": 3.0}, {"seconds": 2.0, "loss": 1.9}, {"seconds": 3.0, "loss": 2.5}]
    assert seconds_to(tests, "loss", 2.0) == 2.0
    assert seconds_to(tests, "loss", 1.0) is None
    assert seconds_to([{"seconds": 1.0, "loss": None}], "loss", 1.0) is None


def finished(folder: Path, recipe: str, losses: list[float], diverged: bool = False) -> None:
    run = folder / f"{recipe}-seed0"
    run.mkdir(exist_ok=True)
    lines = [{"event": "test", "step": step, "seconds": float(step), "loss": loss} for step, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"recipe": recipe, "diverged": diverged, "parameters": 10, "steps": 5, "step_seconds": 0.1}
    more = {
        "phase_seconds": {"exchange": 0.05},
        "bytes_received_per_step": 8.0,
        "interface_bytes_per_step": None,
    }
    (run / "result.json").write_text(json.dumps({**result, **more}))


def test_who_goes_astray_has_no_loss_and_does_not_end_the_race(tmp_path: Path) -> None:
    choices = [Choice("fp16"), Choice("dense"), Choice("topka")]
    plan = TrainPlan(Plan("resnet20", choices[1]), choices, [0], ["loopback"], 2)
    finished(tmp_path, "fp16", [], diverged=True)
    finished(tmp_path, "dense", [3.0, 2.0])
    finished(tmp_path, "topka", [3.0, 2.5], diverged=True)
    rows = {row["recipe"]: row for row in standings(plan, "loopback", _read(plan, _run_folders(plan, tmp_path)))}
    assert rows["dense"]["test_loss"] == 2.0
    assert rows["dense"]["diverged"] == 0
    for name in ("fp16", "topka"):
        assert rows[name]["diverged"] == 1
        assert not {"test_loss", "seconds_to_target"} & rows[name].keys()
    draw_race(tmp_path / "race.png", list(rows.values()))
    finished(tmp_path, "dense", [3.0, 2.0], diverged=True)
    with pytest.raises(InputError, match="dense diverged, so there is no target: lower --lr"):
        _read(plan, _run_folders(plan, tmp_path))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipe", "oktopk"], "dense must be among the recipes"),
        (["--peer", "powersgd-3"], "unknown baseline 'powersgd-3'; did you mean 'powersgd-"),
        (["--peer", "fp16", "--no-peers"], "--peer and --no-peers exclude each other"),
        (["--ranks", "1"], "ranks must be at least 2"),
        (["--timed-steps", "0"], "timed-steps"),
        (["--preset", "paper", "--timed-steps", "4"], "timed steps need --density"),
        (["--margin", "2"], "margin must be in [0, 1), got 2"),
        (["--network", "fast"], "a rate must be unlimited or between 100kbit and 100gbit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", *SMALL, *arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_recipe_may_have_a_rate_of_its_own(race: tuple[Path, dict[str, Any]]) -> None:
    rates = {
        name: json.loads((race[0] / "loopback" / f"{name}-seed0" / "metrics.jsonl").read_text().splitlines()[0])["rate"]
        for name in ("dense", "dense@0.02", "oktopk")
    }
    assert rates["dense@0.02"] == pytest.approx(rates["dense"] * 0.02 / 0.1)
    assert rates["oktopk"] == rates["dense"]
    assert [each.rate for each in parse_choices(Choice("dense"), ["dense@2e-3", "fp16"], ["exact"])] == [0.002, None]
    with pytest.raises(InputError, match="@ must be followed by a learning rate, as in dense@0.1, got 'dense@fast'"):
        parse_choices(Choice("dense"), ["dense@fast"], ["exact"])
    with pytest.raises(InputError, match="the learning rate of dense must be positive, got -1"):
        parse_choices(Choice("dense"), ["dense@-1"], ["exact"])


def test_baselines_have_no_codes_and_no_checkpoints() -> None:
    base = Choice("dense")
    found = parse_choices(base, ["dense", "fp16", "topka"], ["exact", "int8"])
    assert [choice.label for choice in found] == ["dense", "fp16", "topka", "topka int8"]
    with pytest.raises(InputError, match="powersgd-2 keeps a state that cannot be saved"):
        Plan("resnet20", Choice("powersgd-2"), checkpoint_every=5)
    with pytest.raises(InputError, match="dense must be among"):
        TrainPlan(Plan("resnet20", Choice("topka")), [Choice("topka")], [0], ["loopback"], 2)


MEGABYTE = 1_000_000


def measured(recipe: str, peer: bool, num_bytes: float, fixed_seconds: float, **more: Any) -> list[dict[str, Any]]:
    """As if a link were filled to 80 %."""
    rates = {"unlimited": None, "1gbit": 1e9, "100mbit": 1e8}
    rows = []
    for network, rate in rates.items():
        seconds = fixed_seconds + (8 * num_bytes / (0.8 * rate) if rate else 0.0)
        row = {"recipe": recipe, "values": "exact", "peer": peer, "network": network, "numel": MEGABYTE, "ranks": 4}
        row |= {"density": 0.01, "seconds": seconds, "interface_bytes_received_per_rank": num_bytes, **more}
        rows.append(row)
    return rows


def test_break_even_is_where_the_times_are_equal() -> None:
    results = measured("gloo all_reduce", True, 6e6, 0.010) + measured("oktopk", False, 6e4, 0.020)
    (row,) = break_even(results, {}, [0.0]).results
    assert row["filling"] == pytest.approx(0.8)
    assert row["fixed_seconds"] == pytest.approx(0.020)
    # 0.010 + 8 * 6e6 / 0.8 / rate = 1.02 * (0.020 + 8 * 6e4 / 0.8 / rate)
    expected = (6e7 - 1.02 * 6e5) / (1.02 * 0.020 - 0.010)
    assert row["over_dense"] == row["over_peers"] == [1e6, pytest.approx(expected, rel=0.01)]
    assert row["faster_links"] == "gloo all_reduce"
    assert "slower_links" not in row
    (hidden,) = break_even(results, {}, [0.3]).results
    # Dense takes 0.2 s, what a step of 0.3 s hides, at 8 * 6e6 / 0.8 / 0.19; just below it has 2 % of a step to show.
    assert hidden["over_dense"] == [1e6, pytest.approx(6e7 / 0.196, rel=0.01)]


def test_a_baseline_with_fewer_bytes_wins_on_slow_links_only() -> None:
    results = measured("gloo all_reduce", True, 6e6, 0.010) + measured("powersgd-1", True, 2e4, 0.100)
    (row,) = break_even(results + measured("oktopk", False, 6e4, 0.020), {}, [0.0]).results
    low, high = row["over_peers"]
    assert row["over_dense"] == [1e6, high]
    # 0.100 + 8 * 2e4 / 0.8 / rate = 1.02 * (0.020 + 8 * 6e4 / 0.8 / rate)
    assert low == pytest.approx((1.02 * 6e5 - 2e5) / (0.100 - 1.02 * 0.020), rel=0.01)
    assert (row["slower_links"], row["faster_links"]) == ("powersgd-1", "gloo all_reduce")


def test_what_is_never_or_always_ahead_is_said_so() -> None:
    dense, slow = measured("gloo all_reduce", True, 6e6, 0.010), measured("topka", False, 7e6, 0.020)
    fast = measured("oktopk", False, 6e4, 0.001)
    rows = {row["recipe"]: row for row in break_even(dense + slow + fast, {}, [0.0]).results}
    assert range_text(rows["topka"]["over_dense"]) == "never"
    assert range_text(rows["oktopk"]["over_dense"]) == "always"
    assert range_text([1e6, 3.44e9]) == "below 3.44 Gbit/s"
    assert range_text([3.44e7, 1e11]) == "above 34.4 Mbit/s"
    assert range_text([3.44e7, 3.44e9]) == "34.4 Mbit/s to 3.44 Gbit/s"


def test_break_even_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reduce.json"
    results = measured("gloo all_reduce", True, 6e6, 0.010) + measured("oktopk", False, 6e4, 0.020)
    file.write_text(
        json.dumps({"environment": {"cpu": "", "cores": 2, "torch": "", "gradsieve": ""}, "results": results})
    )
    assert main(["bench", "break-even", str(file), "--step-ms", "0", "200"]) == 0
    assert "beats every baseline" in capsys.readouterr().out
    assert main(["bench", "break-even", str(file), "--step-ms", "nan"]) == 2
    assert "the compute time per step must be 0 ms or more, got nan ms" in capsys.readouterr().err
    file.write_text(json.dumps({"environment": {}, "results": results[:1]}))
    assert main(["bench", "break-even", str(file)]) == 2
    assert "no recipe was measured on two networks, together with dense" in capsys.readouterr().err
    file.write_text(json.dumps({"environment": {}, "results": [{"interface_bytes_received_per_rank": 1}]}))
    for bad in (file, tmp_path / "none.json"):
        assert main(["bench", "break-even", str(bad)]) == 2
        assert f"{bad} is not the output of bench reduce --network … --json" in capsys.readouterr().err


def test_what_was_measured_on_one_network_only_has_no_break_even(tmp_path: Path) -> None:
    """A line through one point would have been any line."""
    results = measured("gloo all_reduce", True, 6e6, 0.010) + measured("oktopk", False, 6e4, 0.020)
    once = measured("topka", False, 6e4, 0.020)[:1]
    without_dense = [{**row, "ranks": 8} for row in results if row["recipe"] == "oktopk"]
    file = written(tmp_path / "reduce.json", [*results, *once, *without_dense])
    assert read_reports([file])[0] == results


def test_break_even_of_networks_measured_one_by_one(tmp_path: Path) -> None:
    results = measured("gloo all_reduce", True, 6e6, 0.010) + measured("oktopk", False, 6e4, 0.020)
    names = dict.fromkeys(row["network"] for row in results)
    files = [
        written(tmp_path / f"{number}.json", [row for row in results if row["network"] == network])
        for number, network in enumerate(names)
    ]
    together = break_even(*read_reports(files), [0.0]).results
    assert together == break_even(results, {}, [0.0]).results
    elsewhere = written(tmp_path / "elsewhere.json", results, cores=64)
    with pytest.raises(InputError, match=r"elsewhere\.json was not measured on the machine of .*0\.json"):
        read_reports([files[0], elsewhere])


def written(file: Path, results: list[dict[str, Any]], cores: int = 2) -> Path:
    file.write_text(json.dumps({"environment": {"cpu": "x", "cores": cores}, "results": results}))
    return file


def test_curves_of_a_race_of_all_can_be_told_apart() -> None:
    assert len({str(line_style(number)) for number in range(40)}) == 40


def test_a_legend_of_many_long_names_stays_on_the_sheet() -> None:
    """Of 22 contenders the first and the last names had been cut off."""
    figure = new_figure(12.5, 6, "")
    axes = figure.subplots()
    for number in range(22):
        axes.plot([1, 2], [number, number], label=f"gaussiank-nomomentum@0.002 bf16 {number}", **line_style(number))
    legend_below(figure, axes)
    figure.canvas.draw()
    (legend,) = figure.legends
    shown = legend.get_window_extent()
    assert 0 <= shown.x0 < shown.x1 <= figure.bbox.width
    assert shown.y0 >= 0


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "reduce", "--plot", "/nowhere/steps.png"]) == 2
    assert "cannot write to /nowhere/steps.png: there is no folder /nowhere" in capsys.readouterr().err


def test_times_are_drawn(tmp_path: Path) -> None:
    rows = measured("gloo all_reduce", True, 6e6, 0.010, raw_seconds=[0.01, 0.02, 0.03])
    draw_steps(tmp_path / "steps.png", rows + measured("oktopk", False, 6e4, 0.020, raw_seconds=[0.02]))
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_dense_is_ddp_as_it_comes() -> None:
    """A number of its own, even DDP's usual one, would take away the small first bucket, which overlaps soonest."""
    dense = Choice("dense").ddp_baseline
    assert dense is not None
    assert (dense.bucket_mb, dense.make_hook) == (None, None)
