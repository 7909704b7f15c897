"""The arithmetic of `gradsieve tune`, with given times: the fit finds constants that are known, predictions follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsieve.errors import InputError
from gradsieve.lab.tune.exchanges import cells, recoded
from gradsieve.lab.tune.fit import Constants, Sample, fit
from gradsieve.lab.tune.job import Job, find_function, stand_in_job
from gradsieve.lab.tune.method import DENSE, Method, baselines, candidates
from gradsieve.lab.tune.physical import pair_rounds
from gradsieve.lab.tune.plan import TunePlan
from gradsieve.lab.tune.predict import FASTEST, Model, Part, overlapped_seconds
from gradsieve.lab.tune.recommend import faster_below, recommend
from gradsieve.lab.tune.stand_in import stand_in_shapes

TRUTH = Constants(2e-3, 1.5e-9, 40e-9, bytes_per_sent=3.0, bytes_per_halving=0.25)
PER_BYTE = 8 / 100e6  # 100 Mbit/s
ONEBIT, OKTOPK, DDP = Method("onebit", 0.5, "bit"), Method("oktopk", 0.01, "exact"), Method(DENSE)


def sample(truth: Constants, numel: int, density: float, noise: float = 1.0) -> Sample:
    sent = round(numel * density)
    return Sample(numel, sent, noise * truth.seconds(numel, sent, PER_BYTE), truth.bytes_received(numel, sent))


CELLS = [(4_000_000, 0.01), (1_000_000, 0.01), (1_000_000, 0.05)]


def test_the_fit_finds_the_constants_behind_exact_times() -> None:
    found = fit([sample(TRUTH, *cell) for cell in CELLS], PER_BYTE)
    assert vars(found) == pytest.approx(vars(TRUTH), rel=1e-6)


def test_times_that_differ_by_a_few_percent_predict_other_sizes_within_ten() -> None:
    noises = (1.03, 0.97, 1.02)
    found = fit([sample(TRUTH, *cell, noise) for cell, noise in zip(CELLS, noises, strict=True)], PER_BYTE)
    for numel, density in [(6_500_000, 0.001), (6_500_000, 0.02), (500_000, 0.01)]:
        sent = round(numel * density)
        expected = TRUTH.seconds(numel, sent, PER_BYTE)
        assert found.seconds(numel, sent, PER_BYTE) == pytest.approx(expected, rel=0.1)


def test_no_constant_is_negative_where_noise_would_make_it_so() -> None:
    samples = [Sample(1000, 10, 1.0, 0), Sample(2000, 10, 0.5, 0), Sample(2000, 20, 0.6, 0)]
    found = fit(samples, 0.0)
    assert min(vars(found).values()) >= 0
    assert found.per_entry_seconds == 0


def test_an_exchange_faster_than_its_bytes_alone_keeps_its_time() -> None:
    """A token bucket lets a burst through: the bytes cannot take longer than the exchange did."""
    measured = [Sample(1_000_000, 10_000, 0.010, 200_000), Sample(4_000_000, 40_000, 0.040, 800_000)]
    found = fit(measured, PER_BYTE)
    assert found.network_share == pytest.approx(0.010 / (200_000 * PER_BYTE))
    assert found.seconds(4_000_000, 40_000, PER_BYTE) == pytest.approx(0.040, rel=1e-6)


def test_a_value_code_changes_bytes_in_proportion_and_seconds_per_byte() -> None:
    at = cells(4_000_000, PER_BYTE, [0.01])[0]
    before, after = TRUTH, replace(TRUTH, per_sent_seconds=60e-9, bytes_per_sent=1.5, bytes_per_halving=0.125)
    own = replace(TRUTH, bytes_per_sent=6.0, bytes_per_halving=0.5)
    found = recoded(own, before, after, at)
    assert found.bytes_per_sent == pytest.approx(3.0)
    assert found.per_sent_seconds == pytest.approx(40e-9 + 2 * 20e-9)


def test_slow_links_are_measured_with_shorter_vectors() -> None:
    sizes = [cells(6_000_000, 8 / rate, [0.001, 0.05])[0].numel for rate in (1e7, 1e8, 1e9, 1e11)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 6_000_000
    assert cells(1000, PER_BYTE, [1.0])[0].numel == 1000


def model(rate: float = 1e9) -> Model:
    dense = Constants(1e-3, 1.5e-9)
    return Model(
        4, rate, {("oktopk", "exact"): TRUTH}, Constants(2e-3, 2e-9, 2e-9, bytes_per_sent=0.1875),
        dict.fromkeys(("ddp", "bf16", "powersgd-1", "powersgd-4"), dense),
    )  # fmt: skip


@pytest.mark.parametrize("method", [ONEBIT, OKTOPK, *baselines()], ids=lambda method: method.name)
@pytest.mark.parametrize("compute", [0.0, 0.4])
def test_more_bandwidth_never_makes_a_step_longer(method: Method, compute: float) -> None:
    job = stand_in_job(50_000_000, compute)
    times = [model().step_seconds(method, job, 10.0**power) for power in (6, 7, 8, 9, 10, 12)]
    assert times == sorted(times, reverse=True)
    assert times[-1] >= compute
    assert times[0] > 2 * times[-1]


def test_dense_is_slower_on_slow_links_and_faster_on_fast_ones() -> None:
    job = stand_in_job(50_000_000, 0.0)
    for method in (ONEBIT, OKTOPK):
        rate = faster_below(model(), job, method)
        assert rate is not None
        assert 1e8 < rate < FASTEST
        assert model().step_seconds(method, job, rate / 2) < model().step_seconds(DDP, job, rate / 2)
        assert model().step_seconds(method, job, rate * 2) > model().step_seconds(DDP, job, rate * 2)


def test_recommended_below_the_break_even_and_dense_above() -> None:
    job = stand_in_job(50_000_000, 0.0)
    slow, fast = (recommend(model(rate), job, [ONEBIT, OKTOPK]) for rate in (1e7, 1e12))
    assert not slow.keeps_dense
    assert slow.method.line in ("sieve = gradsieve.attach(model, optimizer=optimizer)", OKTOPK.line)
    assert fast.keeps_dense
    assert fast.sentences[0].startswith("Keep dense DDP")
    assert "Dense is faster from about" in " ".join(fast.sentences)


def test_the_default_is_preferred_if_it_is_close() -> None:
    job = stand_in_job(50_000_000, 0.0)
    known = model(1e8)
    seconds = known.step_seconds(ONEBIT, job)
    for ratio, chosen in ((0.97, ONEBIT), (0.8, OKTOPK)):
        factor = ratio * seconds / known.step_seconds(OKTOPK, job)
        assert recommend(known.calibrated(OKTOPK, factor), job, [ONEBIT, OKTOPK]).method == chosen


@pytest.mark.parametrize("faster", [Method("oktopk", 0.001, "exact"), Method("randomk", 0.01, "exact")])
def test_what_may_learn_less_is_named_and_not_recommended(faster: Method) -> None:
    """On an idle machine random-k at 0.1 % was the fastest setting, and it was recommended."""
    job = stand_in_job(50_000_000, 0.0)
    known = model(1e7)
    random = {("randomk", "exact"): Constants(1e-3, 1e-9, 1e-9, bytes_per_sent=1.0)}
    made = replace(known, gradients={**known.gradients, **random})
    advice = recommend(made, job, [OKTOPK, faster])
    assert advice.fastest == faster
    assert advice.method == OKTOPK
    assert f"The fastest is {faster.name}" in advice.sentences[0]
    assert "may learn less" in advice.sentences[0]
    assert recommend(made, job, [faster]).method == faster, "the user named nothing else"


def test_a_calibrated_method_takes_the_time_that_was_measured() -> None:
    job = stand_in_job(20_000_000, 0.0)
    known = model(1e8)
    before = known.step_seconds(OKTOPK, job)
    assert known.calibrated(OKTOPK, 1.3).step_seconds(OKTOPK, job) == pytest.approx(1.3 * before)


def test_backward_hides_all_groups_but_the_last() -> None:
    job = Job([(1,)], forward_seconds=1.0, backward_seconds=2.0)
    quick = [Part(10, 0.1, 0.1)] * 4  # ready after 0.5, 1, 1.5 and 2 s of backward
    assert overlapped_seconds(quick, job) == pytest.approx(3.2)
    slow = [Part(10, 0.5, 0.5)] * 4  # from the first one on, one after the other
    assert overlapped_seconds(slow, job) == pytest.approx(1.0 + 0.5 + 4.0)
    assert overlapped_seconds(quick[:1], job) == pytest.approx(3.2)


def test_on_the_processor_only_the_network_is_hidden() -> None:
    job = Job([(1,)], forward_seconds=1.0, backward_seconds=2.0, on_processor=True)
    assert overlapped_seconds([Part(10, 0.1, 0.0)] * 4, job) == pytest.approx(3.4)
    assert overlapped_seconds([Part(10, 0.0, 0.1)] * 4, job) == pytest.approx(3.1)


def test_updates_are_not_hidden() -> None:
    job = stand_in_job(50_000_000, 10.0)
    alone = model().exchange_seconds(ONEBIT, job)
    assert model().step_seconds(ONEBIT, job) == pytest.approx(10.0 + alone)
    assert model().step_seconds(OKTOPK, job) < 10.0 + model().exchange_seconds(OKTOPK, job)


@pytest.mark.parametrize("numel", [1, 100, 12_345, 25_000_000, 125_000_001])
def test_a_stand_in_has_the_parameters_that_were_asked_for(numel: int) -> None:
    assert sum(rows * (columns[0] if columns else 1) for rows, *columns in stand_in_shapes(numel)) == numel


@pytest.mark.parametrize("size", [2, 3, 8, 9, 16, 33])
def test_every_pair_is_measured_once_and_no_rank_twice_in_a_round(size: int) -> None:
    rounds = pair_rounds(size)
    pairs = [pair for alongside in rounds for pair in alongside]
    assert sorted(pairs) == [(low, high) for low in range(size) for high in range(low + 1, size)]
    for alongside in rounds:
        ranks = [rank for pair in alongside for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_candidates_are_every_recipe_density_and_code() -> None:
    found = candidates((), (), ())
    assert len(found) == len(set(found))
    assert {"topka 0.1%", "oktopk 1% bf16", "spardl 5% int8", "onebit 50%", "sparseloco 2%"} <= {m.name for m in found}
    assert [m for m in found if m.is_default] == [ONEBIT]
    coded = Method("oktopk", 0.02, "int8")
    assert coded.line == 'sieve = gradsieve.attach(model, gradsieve.recipe("oktopk", values="int8"), density=0.02)'


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train", "must be module:function"),
        ("no_such_module:build", "cannot import no_such_module"),
        ("json:build", "module json has no function build"),
    ],
)
def test_a_wrong_model_name_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        find_function(name)


def test_a_model_excludes_what_it_tells_itself() -> None:
    with pytest.raises(InputError, match="leave out --parameters"):
        TunePlan(parameters=5, model="a:b")
    with pytest.raises(InputError, match="leave out --compute-seconds"):
        TunePlan(compute_seconds=5, model="a:b")


def test_a_method_that_was_not_timed_is_as_slow_as_those_like_it() -> None:
    """At 0.1 % steps are mostly fixed time, which was understated for all recipes: the next one looked the best."""
    timed, like_it, other = (
        Method("oktopk", 0.01, "exact"),
        Method("topka", 0.01, "exact"),
        Method("topka", 0.1, "exact"),
    )
    constants = Constants(fixed_seconds=0.01)
    gradients = {(recipe, "exact"): constants for recipe in ("oktopk", "topka")}
    model, job = Model(4, 1e9, gradients), stand_in_job(1 << 20, 0.0)
    calibrated = model.calibrated(timed, 3.0)
    assert calibrated.step_seconds(like_it, job) == pytest.approx(3 * model.step_seconds(like_it, job))
    assert calibrated.step_seconds(other, job) == model.step_seconds(other, job)
    assert calibrated.calibrated(like_it, 1.0).step_seconds(like_it, job) == model.step_seconds(like_it, job)
