"""The models of the papers: as large as published, the same for the same seed, trainable in every parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradsieve import InputError
from gradsieve.lab.models import MODELS, count_parameters
from gradsieve.lab.models.bert import Bert, BertShape
from gradsieve.lab.models.deepspeech import DeepSpeech, DeepSpeechShape
from gradsieve.lab.models.gpt import Gpt, GptShape, count_gpt_parameters
from gradsieve.lab.models.lstm import LstmLanguageModel, LstmShape, count_lstm_parameters

PUBLISHED = {
    "vgg16": 14_728_266,
    "resnet20": 269_722,
    "resnet50": 25_557_032,
    "alexnet": 61_100_840,
    "mlp": 12_115_010,  # 12.11 million weights in table 1 of Cireşan et al.
    "lstm": 66_034_000,
    "deepspeech": 27_569_568,
    "bert": 133_547_324,
    "gpt": 124_356_864,  # GPT-2 small, 124,439,808, without the biases of its linear layers
}
INPUTS: dict[str, Any] = {
    "vgg16": lambda: (torch.randn(2, 3, 32, 32),),
    "resnet20": lambda: (torch.randn(2, 3, 32, 32),),
    "resnet50": lambda: (torch.randn(2, 3, 64, 64),),
    "alexnet": lambda: (torch.randn(2, 3, 64, 64),),
    "mlp": lambda: (torch.randn(2, 1, 8, 8),),
    "lstm": lambda: (torch.randint(256, (2, 7)),),
    "deepspeech": lambda: (torch.randn(2, 30, 161), torch.tensor([30, 21])),
    "bert": lambda: (torch.randint(4096, (2, 16)), torch.zeros(2, 16, dtype=torch.long), torch.arange(32)),
    "gpt": lambda: (torch.randint(256, (2, 64)),),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_size_has_the_published_number_of_parameters(name: str) -> None:
    architecture = MODELS[name]
    with torch.device("meta"):
        model = architecture.make(architecture.paper)
    assert count_parameters(model) == PUBLISHED[name] == architecture.num_parameters


def test_every_published_model_is_there() -> None:
    assert set(MODELS) == set(PUBLISHED)


@pytest.mark.parametrize(("name", "expected"), [("lstm", 19_780_400), ("bert", 19_081_532)])
def test_the_medium_size_is_the_published_one(name: str, expected: int) -> None:
    """The medium LSTM of Zaremba et al. with 10,000 symbols; BERT-mini, 11.2 million, and a decoder of its own."""
    architecture = MODELS[name]
    with torch.device("meta"):
        assert count_parameters(architecture.make(architecture.shape("medium"))) == expected


@pytest.mark.parametrize("name", MODELS)
def test_the_small_size_is_small_and_every_parameter_gets_a_gradient(name: str) -> None:
    architecture = MODELS[name]
    torch.manual_seed(0)
    model = architecture.build(architecture.small, seed=0)
    assert count_parameters(model) < 2_100_000
    outputs = model(*INPUTS[name]())
    scores = [output for output in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(output)]
    sum(output.float().square().sum() for output in scores).backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not without


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_start_and_nobody_elses_draws_change(name: str) -> None:
    architecture = MODELS[name]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (
        torch.cat([p.flatten() for p in architecture.build(architecture.small, seed).parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("shape", [LstmShape(), LstmShape(50, 7, 11, layers=1), LstmShape(33, 5, 6, layers=3)])
def test_the_closed_form_counts_lstm_parameters(shape: LstmShape) -> None:
    with torch.device("meta"):
        assert count_parameters(LstmLanguageModel(shape)) == count_lstm_parameters(shape)


def test_bert_with_a_shared_decoder_would_be_the_original() -> None:
    shape = BertShape()
    with torch.device("meta"):
        separate = count_parameters(Bert(shape))
    assert separate - shape.vocabulary * shape.hidden == 110_106_428


def test_deepspeech_on_cepstra_differs_in_the_first_lstm_layer_only() -> None:
    with torch.device("meta"):
        assert count_parameters(DeepSpeech(DeepSpeechShape(features=13))) == 23_780_768


GPT_SIZES = {
    "small": 435_456,
    "1m": 1_035_008,
    "11m": 10_774_272,
    "25m": 25_379_840,
    "paper": 124_356_864,
}


@pytest.mark.parametrize(("size", "expected"), GPT_SIZES.items())
def test_every_size_of_gpt_has_its_number_of_parameters(size: str, expected: int) -> None:
    shape = MODELS["gpt"].shape(size)
    with torch.device("meta"):
        model = Gpt(shape)
    assert count_parameters(model) == count_gpt_parameters(shape) == expected
    assert list(MODELS["gpt"].sizes) == list(GPT_SIZES)


def small_gpt(seed: int = 0, **fields: int) -> Gpt:
    model = MODELS["gpt"].build(MODELS["gpt"].shape("small", **fields), seed)
    assert isinstance(model, Gpt)
    return model


def test_gpt_sees_no_later_token() -> None:
    model = small_gpt()
    tokens = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :11], before[:, :11], rtol=0, atol=1e-6)
    differs = (after - before).abs().amax((0, 2)) > 1e-4
    assert differs[11:].all()


def test_gpt_scores_with_its_embedding() -> None:
    model = small_gpt()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        model.tokens.weight[200] = 0
    assert (model(tokens)[..., 200] == 0).all()
    assert (model(tokens)[..., 201] != 0).any()


def test_a_fresh_gpt_knows_nothing_and_its_residual_projections_are_smaller() -> None:
    model = small_gpt()
    tokens = torch.randint(256, (16, 65), generator=torch.Generator().manual_seed(0))
    scores = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.15)
    deep = small_gpt(layers=8)
    spreads = {name: float(weight.detach().std()) for name, weight in deep.named_parameters() if weight.dim() > 1}
    for name, spread in spreads.items():
        adds = "attended" in name or "narrow" in name
        assert spread == pytest.approx(0.02 / 4 if adds else 0.02, rel=0.05)
    biases = [name for name, _ in deep.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 8 + 1
    assert all("norm" in name for name in biases)


def test_gpt_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="at most 64 tokens, the model's context, got 65"):
        small_gpt()(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(InputError, match="width must be a multiple of the number of heads, got 128 and 3"):
        GptShape(width=128, heads=3)


def test_the_lstm_goes_on_from_what_it_carries() -> None:
    model = MODELS["lstm"].build(MODELS["lstm"].small, 0)
    tokens = torch.randint(256, (3, 20))
    whole, _ = model(tokens)
    first, carry = model(tokens[:, :9])
    second, _ = model(tokens[:, 9:], carry)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    afresh, _ = model(tokens[:, 9:])
    assert not torch.allclose(second, afresh)


def test_what_speech_is_batched_with_does_not_change_the_answer() -> None:
    torch.manual_seed(0)
    model = DeepSpeech(DeepSpeechShape(features=13, channels=4, hidden=24, layers=2)).eval()
    frames = torch.randn(2, 50, 13)
    frames[0, 31:] = 0
    together, lengths = model(frames, torch.tensor([31, 50]))
    alone, length = model(frames[:1, :31], torch.tensor([31]))
    assert lengths.tolist() == [16, 25]
    assert length.tolist() == [16]
    torch.testing.assert_close(together[0, :16], alone[0])


def test_speech_outputs_see_so_far_ahead_and_no_further() -> None:
    torch.manual_seed(0)
    model = DeepSpeech(DeepSpeechShape(features=13, channels=4, hidden=24, layers=1, lookahead=3)).eval()
    frames = torch.randn(1, 80, 13)
    changed = frames.clone()
    changed[:, 60:] += 1
    one, other = (model(x, torch.tensor([80]))[0][0] for x in (frames, changed))
    differs = (one - other).abs().amax(1) > 0
    # 3 steps of look-ahead, and 5 of each convolution: half a kernel of 11, at full and at half time.
    earliest = (60 - 5) // 2 - 5 - 3
    assert not differs[: earliest - 1].any()
    assert differs[earliest + 2 :].all()


def test_unknown_names_and_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="unknown model 'vgg19'; did you mean 'vgg16'"):
        MODELS["vgg19"]
    with pytest.raises(InputError, match="size of VGG-16 .* must be one of small, paper, got 'medium'"):
        MODELS["vgg16"].shape("medium")
    with pytest.raises(InputError, match="must be one of small, 1m, 11m, 25m, paper, got '2m'"):
        MODELS["gpt"].shape("2m")
