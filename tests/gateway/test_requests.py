"""Every parameter: what is accepted and reaches the worker, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpc.v1 import generate_pb2
from tests.gateway.conftest import Service, running
from tests.gateway.fake_decode import VOCAB_SIZE
from tests.gateway.folders import byte_level, save_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 10**40


async def accepted(service: Service, **body: Any) -> generate_pb2.GenerateRequest:
    response = await service.complete(**body)
    assert response.status_code == 200, response.text
    return service.worker.requests[-1]


async def refused(service: Service, *, chat: Any = False, **body: Any) -> dict[str, Any]:
    before = len(service.worker.requests)
    response = await (service.chat(**body) if chat else service.complete(**body))
    assert response.status_code == 400, response.text
    assert len(service.worker.requests) == before
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


async def test_defaults(service: Service) -> None:
    request = await accepted(service)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.repetition_penalty == 1.0
    assert sampling.frequency_penalty == sampling.presence_penalty == 0.0
    assert request.max_tokens == 16
    assert list(request.stop_token_ids) == service.ids("<|end|>")
    assert list(request.prompt_token_ids) == service.ids("<s>Hello")


async def test_without_a_seed_every_request_has_its_own(service: Service) -> None:
    seeds = {(await accepted(service)).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert max(seeds) >= 1 << 32


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (42, 42), (-1, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1), (-(1 << 63), 1 << 63)]
)
async def test_seeds(service: Service, seed: int, sent: int) -> None:
    assert (await accepted(service, seed=seed)).sampling.seed == sent


async def test_everything_said_reaches_the_worker(service: Service) -> None:
    said = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": -1.5,
        "presence_penalty": 2,
    }
    request = await accepted(service, **said, max_tokens=5, stop_token_ids=[3, 1])
    assert {name: getattr(request.sampling, name) for name in said} == said
    assert request.max_tokens == 5
    assert sorted(request.stop_token_ids) == sorted([1, 3, *service.ids("<|end|>")])


@pytest.mark.parametrize("said", [{"temperature": 0}, {"top_p": 0}, {"temperature": 1e-40}])
async def test_the_limits_of_temperature_and_top_p_are_greedy(service: Service, said: dict[str, float]) -> None:
    sampling = (await accepted(service, **said)).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


async def test_top_k_minus_one_keeps_everything(service: Service) -> None:
    assert (await accepted(service, top_k=-1)).sampling.top_k == 0


WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, [1], HUGE],
    "top_p": [-0.1, 1.1, "a", False],
    "min_p": [-0.1, 1.1, {}],
    "repetition_penalty": [0, -1, 101, "x"],
    "frequency_penalty": [-2.1, 2.1, True],
    "presence_penalty": [-2.1, 2.1, ""],
    "top_k": [-2, 1.5, "5", True, HUGE],
    "seed": [1.5, "7", True, 1 << 64, -(1 << 63) - 1, HUGE],
    "max_tokens": [0, -1, 1.0, "16", True, HUGE, [16]],
    "n": [0, -1, 1.0, "1", True, 2, 129],
    "stop": ["", [""], 5, ["a", 5], {"a": 1}, [["a"]], ["x"] * 17],
    "stop_token_ids": [5, ["a"], [1.5], [-1], [True], [1 << 32]],
    "stream": ["true", 1, 0],
    "return_token_ids": ["yes", 1],
    "stream_options": ["x", [], {"include_usage": True}],
    "prompt": [[], 5, {"a": 1}, ["a", "b"], [[1], [2]], [1, "a"], [1.5], [-1], [True], [None], [VOCAB_SIZE]],
    "user": [5, ["me"]],
    "metadata": ["x", ["a"], {"a": 1}],
    "model": [5, ["tiny"], {}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values], ids=str
)
async def test_wrong_values_are_refused_by_name(service: Service, field: str, value: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Hello", field: value})
    response = await service.http.post("/v1/completions", content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(field)
    assert field in error["message"]
    assert not service.worker.requests


async def test_the_message_shows_field_bounds_and_value(service: Service) -> None:
    error = await refused(service, temperature="hot")
    assert error["message"] == 'temperature must be a number from 0 to 2, got "hot"'
    error = await refused(service, max_tokens=HUGE)
    assert error["message"].endswith(f"got {HUGE}")
    error = await refused(service, stop=["y" * 10_000, 5])
    assert len(error["message"]) < 300


async def test_a_number_beyond_all_numbers_is_refused_by_name(service: Service) -> None:
    response = await service.http.post(
        "/v1/completions", content=b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


NULLABLE = [
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "n", "stream", "stream_options", "return_token_ids", "user", "metadata",
    "logprobs", "best_of", "echo", "suffix", "logit_bias",
]  # fmt: skip


async def test_null_is_not_said(service: Service) -> None:
    request = await accepted(service, **dict.fromkeys(NULLABLE))
    assert request.max_tokens == 16
    assert request.sampling.temperature == 1.0


HARMLESS: dict[str, Any] = {
    "logit_bias": {}, "echo": False, "suffix": "", "best_of": 1, "ignore_eos": False, "min_tokens": 0,
    "user": "someone", "metadata": {"a": "b"},
}  # fmt: skip
HARMLESS_IN_CHAT: dict[str, Any] = {
    "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
    "modalities": ["text"], "store": False, "service_tier": "auto", "parallel_tool_calls": True, "user": "someone",
}  # fmt: skip
NOT_BUILT: dict[str, Any] = {
    "logprobs": 0, "echo": True, "suffix": "end", "best_of": 2, "logit_bias": {"5": 1}, "ignore_eos": True,
    "min_tokens": 4,
}  # fmt: skip
NOT_BUILT_IN_CHAT: dict[str, Any] = {
    "logprobs": True, "top_logprobs": 3, "tools": [{"type": "function"}], "tool_choice": "required",
    "response_format": {"type": "json_object"}, "modalities": ["audio"], "audio": {"voice": "x"}, "store": True,
    "reasoning_effort": "high", "logit_bias": {"1": 2},
}  # fmt: skip


async def test_values_that_ask_for_nothing_are_accepted(service: Service) -> None:
    await accepted(service, **HARMLESS)
    assert (await service.chat(max_tokens=2, **HARMLESS_IN_CHAT)).status_code == 200


@pytest.mark.parametrize("field", NOT_BUILT)
async def test_what_is_not_built_is_said(service: Service, field: str) -> None:
    error = await refused(service, **{field: NOT_BUILT[field]})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert "not supported yet" in error["message"]


@pytest.mark.parametrize("field", NOT_BUILT_IN_CHAT)
async def test_what_is_not_built_in_chat_is_said(service: Service, field: str) -> None:
    error = await refused(service, chat=True, **{field: NOT_BUILT_IN_CHAT[field]})
    assert error["param"] == field
    assert "not supported yet" in error["message"]


async def test_one_is_no_false(service: Service) -> None:
    assert (await refused(service, echo=0))["param"] == "echo"


@pytest.mark.parametrize(("field", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens")])
async def test_unknown_fields_are_refused_with_the_nearest(service: Service, field: str, meant: str) -> None:
    error = await refused(service, **{field: 1})
    assert error["message"] == f"unrecognized request argument {field!r}; did you mean {meant!r}?"
    assert (error["param"], error["code"]) == (field, "unknown_parameter")


async def test_fields_of_the_other_endpoint_are_unknown(service: Service) -> None:
    assert (await refused(service, messages=[]))["param"] == "messages"
    assert (await refused(service, chat=True, prompt="x"))["param"] == "prompt"


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_required_fields(service: Service, field: str) -> None:
    error = await refused(service, **{field: None})
    assert error["message"] == f"{field} is required"
    assert error["code"] == "missing_required_parameter"


async def test_stream_options_need_a_stream(service: Service) -> None:
    assert (await refused(service, stream_options={"include_usage": True}))["param"] == "stream_options"
    error = await refused(service, stream=True, stream_options={"include_usage": "yes"})
    assert error["param"] == "stream_options.include_usage"
    error = await refused(service, stream=True, stream_options={"continuous": True})
    assert error["param"] == "stream_options.continuous"


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"]])
async def test_a_prompt_of_text(service: Service, prompt: Any) -> None:
    assert list((await accepted(service, prompt=prompt)).prompt_token_ids) == service.ids("<s>Hello")


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_a_prompt_of_ids_is_taken_as_it_is(service: Service, prompt: Any) -> None:
    assert list((await accepted(service, prompt=prompt)).prompt_token_ids) == [5, 6, 7]


async def test_several_prompts_are_refused_clearly(service: Service) -> None:
    error = await refused(service, prompt=["a", "b", "c"])
    assert error["message"] == "prompt must be one prompt, got a list of 3; several prompts are not supported yet"


async def test_a_prompt_without_a_token(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = None
    async with running(save_folder(tmp_path / "tiny-model", tokenizer)) as service:
        assert (await refused(service, prompt=""))["message"] == "the prompt has no tokens; it must have at least one"


async def test_a_prompt_that_is_too_long_names_both_numbers(service: Service) -> None:
    error = await refused(service, prompt=[1] * 250, max_tokens=7)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "257" in error["message"]
    assert "250 in the prompt, 7 for the answer" in error["message"]
    assert (await accepted(service, prompt=[1] * 250, max_tokens=6)).max_tokens == 6


async def test_a_chat_prompt_that_is_too_long(service: Service) -> None:
    messages = [{"role": "user", "content": "ab " * 300}]
    error = await refused(service, chat=True, messages=messages)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("length", [240, 250, 255])
async def test_the_default_bound_of_an_answer_shrinks_to_what_fits(service: Service, length: int) -> None:
    assert (await accepted(service, prompt=[1] * length)).max_tokens == min(16, 256 - length)


async def test_the_shortest_context_of_all_workers_counts(folder: Path) -> None:
    async with running(folder, 2, ready=False) as service:
        service.workers[1].description.max_model_len = 64
        await service.gateway.set_decode_workers([await worker.start() for worker in service.workers])
        response = await service.complete(prompt=[1] * 60, max_tokens=10)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "64" in response.json()["error"]["message"]


async def chat_request(service: Service, **body: Any) -> generate_pb2.GenerateRequest:
    response = await service.chat(**body)
    assert response.status_code == 200, response.text
    return service.worker.requests[-1]


async def test_a_chat_fills_the_context_by_default(service: Service) -> None:
    request = await chat_request(service)
    assert request.max_tokens == 256 - len(request.prompt_token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_bound(service: Service, name: str) -> None:
    assert (await chat_request(service, **{name: 3})).max_tokens == 3


async def test_two_bounds_must_agree(service: Service) -> None:
    assert (await chat_request(service, max_tokens=3, max_completion_tokens=3)).max_tokens == 3
    error = await refused(service, chat=True, max_tokens=3, max_completion_tokens=4)
    assert error["message"].startswith("max_tokens 3 and max_completion_tokens 4 contradict each other")


async def test_messages_are_rendered_by_the_template(service: Service) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Yes", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "", "name": "me"},
    ]
    request = await chat_request(service, messages=messages, max_tokens=1)
    expected = "<|system|>Be kind.<|end|><|user|>One\ntwo<|end|><|assistant|>Yes<|end|><|user|><|end|><|assistant|>"
    assert list(request.prompt_token_ids) == service.ids(expected)


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("Hello", "messages"),
    ({"role": "user", "content": "x"}, "messages"),
    (["x"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=[str(place) for place in range(len(MESSAGES))])
async def test_wrong_messages_are_refused_by_name(service: Service, messages: Any, param: str) -> None:
    error = await refused(service, chat=True, messages=messages)
    assert error["param"] == param
    assert param in error["message"]


async def test_a_template_that_refuses_is_a_bad_request(service: Service) -> None:
    messages = [{"role": "tool", "content": "x", "tool_call_id": "1"}]
    error = await refused(service, chat=True, messages=messages)
    assert error["param"] == "messages"
    assert error["message"] == "the model's chat template refuses these messages: tools are not known here"


async def test_a_model_without_a_template(tmp_path: Path) -> None:
    async with running(save_folder(tmp_path / "tiny-model", byte_level(), chat_template=None)) as service:
        error = await refused(service, chat=True)
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]
        assert (await service.complete()).status_code == 200


async def test_an_unknown_model(service: Service) -> None:
    response = await service.complete(model="another")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'another'" in error["message"]
    assert "'tiny'" in error["message"]
