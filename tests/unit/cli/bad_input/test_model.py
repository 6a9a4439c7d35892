"""What a user may get wrong about the model, in the experiment or in a Hugging Face file."""

import json
from typing import Final

import pytest

from support.bad_input import EXPERIMENT, MODEL, Refused, edited

MODELS: Final = {
    "more layers than there are": (
        ("num_layers: 2", "num_layers: 100000"),
        "model.num_layers: found 100000; expected less than or equal to 10000",
    ),
    "unknown family": (
        ("family: gpt2", "family: gpt9"),
        "experiment.yaml:2: model: family 'gpt9' is unknown; known: gpt2, llama, transgan",
    ),
    "no family": (
        ("family: gpt2, ", ""),
        (
            "experiment.yaml:2: model: model needs 'family' (gpt2, llama, transgan, t5, "
            "wide_resnet, vit or blocks) or 'config'"
        ),
    ),
    "family without its figures": (
        (", " + MODEL, "}"),
        (
            "experiment.yaml:2: model: family 'gpt2' needs num_layers, hidden_size, num_heads, "
            "sequence_length, vocab_size; missing: vocab_size"
        ),
    ),
    "figure of another family": (
        (MODEL, "vocab_size: 128, bottom_width: 8}"),
        "experiment.yaml:2: model: family 'gpt2' has no bottom_width; its figures are ",
    ),
    "heads that do not divide the width": (
        ("num_heads: 4", "num_heads: 7"),
        "experiment.yaml:2: model: hidden_size 64 is not a multiple of num_heads 7",
    ),
    "heads that do not divide each other": (
        ("family: gpt2", "num_key_value_heads: 3, family: llama"),
        "experiment.yaml:2: model: num_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "published list of another family": (
        ("family: gpt2", "layer_list: amp-2022, family: llama"),
        "experiment.yaml:2: model: layer list 'amp-2022' exists for gpt2 and transgan only",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), MODELS.values(), ids=MODELS)
def test_a_wrong_model_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})


LLAMA: Final = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "vocab_size": 128,
}

WITH_CONFIG: Final = EXPERIMENT.replace(EXPERIMENT.splitlines()[1], "model: {config: config.json}")

CONFIGS: Final = {
    "not JSON": ("{", "config.json:1: not valid JSON: Expecting property name"),
    "a list": ("[]", "model: config.json: expected a JSON object, found []"),
    "unknown architecture": (
        json.dumps(LLAMA | {"model_type": "bert"}),
        "experiment.yaml:2: model: config.json: model_type: found 'bert'; expected one of gpt2, ",
    ),
    "no architecture": ("{}", "model: config.json: model_type: found null; expected one of gpt2"),
    "text for a number": (
        json.dumps(LLAMA | {"num_hidden_layers": "2"}),
        "model: config.json: num_hidden_layers: found '2'; expected an integer from 1 to 10,000",
    ),
    "number for a flag": (
        json.dumps(LLAMA | {"tie_word_embeddings": 1}),
        "model: config.json: tie_word_embeddings: found 1; expected true or false",
    ),
    "missing figure": (
        json.dumps({key: value for key, value in LLAMA.items() if key != "vocab_size"}),
        (
            "experiment.yaml:2: model: family 'llama' needs num_layers, hidden_size, num_heads, "
            "sequence_length, vocab_size; missing: vocab_size"
        ),
    ),
    "experts": (
        json.dumps(LLAMA | {"num_local_experts": 8}),
        "model: config.json: num_local_experts: found 8; only dense decoders are planned",
    ),
    "experts under another name": (
        json.dumps(LLAMA | {"n_routed_experts": 64}),
        "model: config.json: n_routed_experts: found 64; only dense decoders are planned",
    ),
    "experts per token": (
        json.dumps(LLAMA | {"num_experts_per_tok": 2}),
        "model: config.json: num_experts_per_tok: found 2; only dense decoders are planned",
    ),
    "width of experts": (
        json.dumps(LLAMA | {"moe_intermediate_size": 1408}),
        "model: config.json: moe_intermediate_size: found 1408; only dense decoders are planned",
    ),
    "encoder": (
        json.dumps(LLAMA | {"is_encoder_decoder": True}),
        "model: config.json: is_encoder_decoder: found true; only dense decoders are planned",
    ),
    "layers without end": (
        json.dumps(LLAMA | {"num_hidden_layers": 10**9}),
        "config.json: num_hidden_layers: found 1000000000; expected an integer from 1 to 10,000",
    ),
    "number of many digits": (
        '{"model_type": 1' + "0" * 5000 + "}",
        "config.json: not usable JSON: found a number of 5001 digits; expected at most 300",
    ),
    "number beyond floats": (
        '{"model_type": 1e999}',
        "config.json: not usable JSON: found 1e999; expected a finite number",
    ),
    "nested too deeply": ("[" * 100_000, "config.json: not usable JSON: nested too deeply"),
    "heads of their own size": (
        json.dumps(LLAMA | {"head_dim": 2.5}),
        "model: config.json: head_dim: found 2.5; expected an integer from 1 to 1,000,000,000",
    ),
}


@pytest.mark.parametrize(("content", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_model_configuration_is_led_to_its_key(
    refused: Refused, content: str, message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_CONFIG, "config.json": content})


def test_a_missing_model_configuration_is_led_to_the_key_that_names_it(refused: Refused) -> None:
    message = refused({"experiment.yaml": WITH_CONFIG})
    assert message == "experiment.yaml:2: model.config: config.json: no such file"
