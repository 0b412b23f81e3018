"""A chat template of the user: `--chat-template`, `LLM(chat_template=)`, and their messages."""

from pathlib import Path

import pytest
from cli_cases import Command, assert_same_samples, samples_of

from treegen import LLM, InputError, SamplingParams

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
CHAT = [{"role": "user", "content": "2 + 3?"}]
FEW = ["--limit", 2, "-n", 2, "--max-tokens", 4, "--num-fewshot", 0, "--model", "demo"]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


def test_an_llm_takes_a_file_or_a_template(template: Path) -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    with LLM("demo", memory="8MiB", chat_template=str(template)) as llm:
        (of_file,) = llm.chat(CHAT, params)
        assert of_file.prompt == "<user>2 + 3?\n<assistant>"
    with LLM("demo", memory="8MiB", chat_template=TEMPLATE) as llm:
        (of_text,) = llm.chat(CHAT, params)
        assert of_text == of_file
    again = LLM(llm.model, tokenizer=llm.tokenizer, memory="8MiB", chat_template="{{ 'Hi' }}")
    assert again.chat(CHAT, params)[0].prompt == "Hi"


def test_a_template_that_cannot_be_read() -> None:
    with pytest.raises(InputError, match="must be a template or the path of a file"):
        LLM("demo", chat_template="no/such.jinja")
    with pytest.raises(InputError, match="chat_template must be a template or the path of a file"):
        LLM("demo", chat_template=5)  # type: ignore[arg-type]


def test_messages_say_how_to_give_one(treegen: Command) -> None:
    with LLM("demo", memory="8MiB") as llm, pytest.raises(InputError) as caught:
        llm.chat(CHAT)
    assert "load the model with chat_template='TEMPLATE', use a chat model" in str(caught.value)
    error = treegen("eval", "gsm8k", *FEW, "--apply-chat-template").error
    assert "load the model with --chat-template TEMPLATE, use a chat model, or pass text" in error
    error = treegen("eval", "gsm8k", *FEW, "--chat-template", "no.jinja").error
    assert "--chat-template" in error or "no.jinja" in error


def test_a_run_keeps_its_template(treegen: Command, template: Path, tmp_path: Path) -> None:
    run, half = tmp_path / "run", tmp_path / "half"
    chat = ["--apply-chat-template", "--chat-template", template]
    done = treegen("eval", "gsm8k", *FEW, *chat, "-o", run, "--write-out")
    assert done.code == 0, done.err
    assert "<user>" in done.out and done.out.count("<assistant>") >= 1
    assert len(samples_of(run)) == 4
    assert treegen("eval", "gsm8k", *FEW, *chat, "-o", half).code == 0
    assert treegen("eval", "--resume", half).code == 0
    assert_same_samples(run, half)
    plain = tmp_path / "plain"
    assert treegen("eval", "gsm8k", *FEW, "-o", plain).code == 0
    assert [r["seed"] for r in samples_of(plain)] == [r["seed"] for r in samples_of(run)]
    assert [r["text"] for r in samples_of(plain)] != [r["text"] for r in samples_of(run)]


def test_another_template_is_another_run(treegen: Command, template: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    chat = ["--apply-chat-template", "--chat-template", template]
    assert treegen("eval", "gsm8k", *FEW, *chat, "-o", run).code == 0
    other = tmp_path / "other.jinja"
    other.write_text(template.read_text() + " ")
    refused = treegen("eval", "--resume", run, "--chat-template", other)
    assert refused.code == 2 and "--chat-template" in refused.error
    template.write_text(template.read_text() + " ")
    assert "--chat-template" in treegen("eval", "--resume", run).error
