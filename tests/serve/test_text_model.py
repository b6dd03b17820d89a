"""What a checkpoint brings along: chat templates, their mistakes, and sampling defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from tests.serve.running_server import RunningServer, serving, start_fake

PICKY = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
)


def ask(server: RunningServer, *roles: str) -> Any:
    messages = [{"role": role, "content": "hi"} for role in roles]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def change(path: Path, **values: object) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


def test_chat_with_a_model_that_has_no_template_is_a_400_and_completions_work(
    checkpoint: Path, tmp_path: Path
):
    change(checkpoint / "tokenizer_config.json", chat_template=None)
    with serving(checkpoint, tmp_path) as server:
        reply = ask(server, "user")
        assert reply.status_code == 400
        assert "no chat template" in reply.json()["error"]["message"]
        assert server.is_alive()


def test_a_model_with_bos_gets_it_exactly_once_in_every_api(checkpoint: Path, tmp_path: Path):
    bos = "<|endoftext|>"
    change(
        checkpoint / "tokenizer_config.json",
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    bos_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_id)]
    )
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    with serving(checkpoint, tmp_path) as server:
        assert server.complete("", max_tokens=1).json()["usage"]["prompt_tokens"] == 1
        assert server.complete([""], max_tokens=1).status_code == 200
        for nothing in ([], [[]]):
            assert server.complete(nothing).status_code == 400
        for prompt in ("hello", bos + "hello"):
            usage = server.complete(prompt, max_tokens=1).json()["usage"]
            assert server.events("add")[-1]["prompt"] == bos + "hello"
            assert usage["prompt_tokens"] == 6
        messages = [{"role": "user", "content": "hello"}]
        server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert server.events("add")[-1]["prompt"] == bos + "hello"
        assert server.post("/tokenize", {"messages": messages}).json()["count"] == 6
        assert server.post("/tokenize", {"prompt": "hello"}).json()["tokens"][0] == bos_id


def test_what_a_template_refuses_is_a_400_with_its_own_words(checkpoint: Path, tmp_path: Path):
    change(checkpoint / "tokenizer_config.json", chat_template=PICKY)
    with serving(checkpoint, tmp_path) as server:
        reply = ask(server, "system", "user")
        assert reply.status_code == 400
        assert "no system here" in reply.json()["error"]["message"]
        assert ask(server, "user").status_code == 200


def test_a_broken_template_of_the_model_is_a_400(checkpoint: Path, tmp_path: Path):
    change(checkpoint / "tokenizer_config.json", chat_template="{% if %}")
    with serving(checkpoint, tmp_path) as server:
        assert ask(server, "user").status_code == 400
        assert server.is_alive()


def test_the_flag_overrides_the_model_s_template(checkpoint: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    flags = ("--chat-template", str(tmp_path / "mine.jinja"))
    with serving(checkpoint, tmp_path, *flags) as server:
        assert ask(server, "user").status_code == 200
        assert server.events("add")[-1]["prompt"] == "Q: hi A:"


@pytest.mark.parametrize("text", ["{% if %}", None])
def test_a_broken_or_missing_template_file_ends_the_start(
    checkpoint: Path, tmp_path: Path, text: str | None
):
    path = tmp_path / "mine.jinja"
    if text is not None:
        path.write_text(text)
    server = start_fake(checkpoint, tmp_path, "--chat-template", str(path))
    assert server.wait() == 1
    assert "template" in server.stderr or "No such file" in server.stderr
    assert "Traceback" not in server.stderr


def test_the_model_s_sampling_defaults_apply_to_what_a_request_leaves_out(
    checkpoint: Path, tmp_path: Path
):
    change(checkpoint / "generation_config.json", temperature=0.6, top_p=0.9, eos_token_id=258)
    with serving(checkpoint, tmp_path) as server:
        assert server.complete("a", top_p=0.5).status_code == 200
        params = server.events("add")[-1]["params"]
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.6, 0.5, 0)
    with serving(checkpoint, tmp_path, "--generation-config", "none") as server:
        server.complete("a")
        assert server.events("add")[-1]["params"]["temperature"] == 1.0


def test_impossible_sampling_defaults_end_the_start_with_what_to_do(
    checkpoint: Path, tmp_path: Path
):
    change(checkpoint / "generation_config.json", temperature=-1)
    server = start_fake(checkpoint, tmp_path)
    assert server.wait() == 1
    assert "--generation-config none" in server.stderr


def test_a_message_of_the_assistant_is_continued(server: RunningServer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer "}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert server.post("/v1/chat/completions", body).status_code == 200
    prompt = server.events("add")[-1]["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nThe answer ")
    tokenized = server.post("/tokenize", {**body, "max_tokens": None}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokenized}).json()["prompt"]
    assert text == prompt
    both = server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert both.status_code == 400
    assert "exclude each other" in both.json()["error"]["message"]


def test_a_template_in_a_request_is_rendered_only_where_clients_are_trusted(
    server: RunningServer, tiny_checkpoint: Path, tmp_path: Path
):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    body["chat_template"] = "<{{ messages[0].content }}>"
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    with serving(tiny_checkpoint, tmp_path, "--trust-request-chat-template") as trusting:
        assert trusting.post("/v1/chat/completions", body).status_code == 200
        assert trusting.events("add")[-1]["prompt"] == "<hi>"
        for bad in ("{% for %}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
            reply = trusting.post("/v1/chat/completions", {**body, "chat_template": bad})
            assert reply.status_code == 400, bad


def test_a_model_may_have_several_names(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path, "--served-model-name=one, two/three") as server:
        assert [card["id"] for card in server.get("/v1/models").json()["data"]] == [
            "one",
            "two/three",
        ]
        assert server.get("/v1/models/two/three").json()["id"] == "two/three"
        for asked, told in [("two/three", "two/three"), (None, "one")]:
            assert server.complete("a", model=asked).json()["model"] == told
        refused = server.complete("a", model="tiny")
        assert refused.status_code == 404
        assert "served: one, two/three" in refused.json()["error"]["message"]
