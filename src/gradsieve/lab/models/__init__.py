"""The papers' models and a GPT, one file each. `MODELS` has each of them in several sizes."""

from __future__ import annotations

from typing import Any

from gradsieve.lab.models.alexnet import AlexNet, AlexNetShape
from gradsieve.lab.models.bert import Bert, BertShape
from gradsieve.lab.models.deepspeech import DeepSpeech, DeepSpeechShape
from gradsieve.lab.models.gpt import Gpt, GptShape
from gradsieve.lab.models.lstm import LstmLanguageModel, LstmShape
from gradsieve.lab.models.mlp import Mlp, MlpShape
from gradsieve.lab.models.resnet20 import ResNet20, ResNet20Shape
from gradsieve.lab.models.resnet50 import ResNet50, ResNet50Shape
from gradsieve.lab.models.shape import Architecture, count_parameters
from gradsieve.lab.models.vgg import Vgg16, VggShape
from gradsieve.registry import Registry

__all__ = ["MODELS", "Architecture", "count_parameters"]

BYTES = 256  # vocabulary of text that is read as bytes

MODELS: Registry[Architecture[Any]] = Registry(
    "model",
    {
        "vgg16": Architecture(
            Vgg16, VggShape(), VggShape(width=16), 14_728_266, "VGG-16 with batch norm and one fully connected layer"
        ),
        "resnet20": Architecture(
            ResNet20, ResNet20Shape(), ResNet20Shape(blocks=1), 269_722, "ResNet-20 with parameter-free shortcuts"
        ),
        "resnet50": Architecture(
            ResNet50, ResNet50Shape(), ResNet50Shape((1, 1, 1, 1), width=16), 25_557_032, "ResNet-50"
        ),
        "alexnet": Architecture(
            AlexNet, AlexNetShape(), AlexNetShape(16, 512, pooled=2, dropout=0.2), 61_100_840, "AlexNet in one tower"
        ),
        "mlp": Architecture(
            Mlp, MlpShape(), MlpShape((1280, 1280), side=8), 12_115_010, "multilayer perceptron of five hidden layers"
        ),
        "lstm": Architecture(
            LstmLanguageModel,
            LstmShape(),
            LstmShape(vocabulary=256, embedding=96, hidden=256, dropout=0.0, spread=0.08),
            66_034_000,
            "LSTM language model of two layers",
            {"medium": LstmShape(embedding=650, hidden=650, dropout=0.5, spread=0.05)},  # Zaremba et al.
        ),
        "deepspeech": Architecture(
            DeepSpeech,
            DeepSpeechShape(),
            DeepSpeechShape(channels=8, hidden=160, layers=2),
            27_569_568,
            "Deep Speech 2 with unidirectional LSTM layers and look-ahead",
        ),
        "bert": Architecture(
            Bert,
            BertShape(),
            BertShape(vocabulary=4096, hidden=128, layers=4, heads=4, feedforward=512, positions=128, dropout=0.0),
            133_547_324,
            "BERT-base with masked-word and next-sentence heads, decoder not tied to the embedding",
            {"medium": BertShape(hidden=256, layers=4, heads=4, feedforward=1024)},  # BERT-mini of Turc et al., 2019
        ),
        "gpt": Architecture(
            Gpt,
            GptShape(),
            GptShape(BYTES, context=64, width=128, layers=2, heads=4),
            124_356_864,
            "GPT in the shape of GPT-2 small, without biases",
            {
                "1m": GptShape(BYTES, context=128, width=128, layers=5, heads=4),
                "11m": GptShape(BYTES, context=128, width=384, layers=6, heads=6),
                "25m": GptShape(BYTES, context=128, width=512, layers=8, heads=8),
            },
        ),
    },
)
