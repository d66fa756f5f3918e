"""hotshoe chat: with a person at a terminal, and through pipes."""

from __future__ import annotations

from cli.command import COMMAND, ENVIRONMENT, LETTER_IDS, hotshoe
from cli.terminal import Terminal
from hotshoe import LLM, SamplingParams

GREEDY = ["--temperature", "0", "--max-tokens", "12"]
LONG = "x" * 300
CUT = "[the answer was cut off: max_tokens was reached]"


def answers(llm: LLM, *texts: str, system: str | None = None) -> list[str]:
    """What the model says, turn by turn, through the Python API."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    params = SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=LETTER_IDS)
    found = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        found.append(llm.chat(messages, params)[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_every_line_of_a_pipe_is_a_turn_until_reset_or_exit(
    llm: LLM, model_flags: list[str], letter_flags: list[str]
) -> None:
    lines = ["hi", "why", "", "/reset", "why", "/nothing", LONG, "so", "/exit", "never"]
    done = hotshoe(
        "chat",
        *("--system", "be brief", *model_flags, *letter_flags, *GREEDY),
        stdin="\n".join(lines) + "\n",
    )
    assert done.returncode == 0, done.stderr
    first = answers(llm, "hi", "why", system="be brief")
    # the message that was too long is not part of the conversation
    second = answers(llm, "why", "so", system="be brief")
    assert first[1] != second[0]
    assert done.stdout.splitlines() == first + second
    notes = done.stderr.splitlines()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    messages += [{"role": "assistant", "content": second[0]}, {"role": "user", "content": LONG}]
    num_tokens = len(llm.render_chat(messages))
    assert [note for note in notes if note != CUT] == [
        "[a new conversation]",
        "[unknown command '/nothing'; /help lists them]",
        f"[the conversation has {num_tokens} tokens with this message but max_model_len is 256; "
        "/reset starts a new one, --max-model-len may raise the limit]",
    ]


def test_a_full_context_ends_the_answer_and_names_the_remedy(
    llm: LLM, model_flags: list[str], letter_flags: list[str]
) -> None:
    done = hotshoe("chat", "--once", "hi", *model_flags, *letter_flags, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    num_prompt_tokens = len(llm.render_chat([{"role": "user", "content": "hi"}]))
    assert len(done.stdout.strip()) == 256 - num_prompt_tokens
    assert done.stderr == (
        "[the answer was cut off: max_model_len is 256; /reset starts a new conversation]\n"
    )


def test_ctrl_c_interrupts_the_answer_and_the_next_one_comes_as_ever(
    long_model_flags: list[str], letter_flags: list[str]
) -> None:
    command = [COMMAND, "chat", *long_model_flags, *letter_flags, "--temperature", "0"]
    with Terminal(command, ENVIRONMENT) as terminal:
        terminal.expect(r"/help lists the commands\.\r\n> ")
        terminal.wait_until_asleep()
        terminal.type("\x03")
        terminal.expect(r"\[/exit or Ctrl-D leaves\]\r\n> ")
        for _ in range(2):
            terminal.type("hi\n")
            terminal.expect(r"hi\r\n[a-z]{20}")
            terminal.type("\x03")
            terminal.expect(r"\[interrupted\]\r\n> ")
        terminal.type("/help\n")
        terminal.expect(r"/exit +leave, as does Ctrl-D[^>]*> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
