"""Command lines from the config dataclasses."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from neojax.cli import NOT_YET, RENAMED, field_help, flags_markdown, parse
from neojax.config import EngineConfig, ServeConfig, bound_cores

FLAGS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def parsed(*argv: str) -> ServeConfig:
    return parse(argv, ServeConfig, prog="serve")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said when a command line is refused."""
    with pytest.raises(SystemExit) as caught:
        parsed(*argv)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).replace("│", " ").split())


def test_without_flags_every_setting_has_its_default():
    assert parsed() == ServeConfig()


def test_the_model_may_be_given_with_and_without_its_flag():
    assert parsed("a/b").model == "a/b"
    assert parsed("--port", "1", "a/b", "--enforce-eager").model == "a/b"
    assert parsed("--model", "a/b").model == "a/b"
    assert parsed("--model=--odd").model == "--odd"


def test_dashes_underscores_and_switches_mean_the_same_setting():
    assert parsed("--max-num-seqs", "3").max_num_seqs == 3
    assert parsed("--max_num_seqs=3").max_num_seqs == 3
    assert parsed("--enforce-eager").enforce_eager is True
    assert parsed("--no-enforce-eager").enforce_eager is False
    assert parsed("--cpu-threads", "None").cpu_threads is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--prt", "3"], "--port"),
        (["--max-seqs", "3"], "--max-num-seqs"),
        (["--port", "3", "--port=4"], "--port"),
        (["--enforce-eager", "--no-enforce-eager"], "contradicts"),
        (["a", "--model", "b"], "--model"),
        (["a", "b"], "--model"),
        (["-x"], "'-x'"),
        (["--port"], "--port"),
        (["--port", "abc"], "--port"),
        (["--port", "65536"], "port must be between 0 and 65535"),
        (["--dtype", "int3"], "bfloat16"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--offload-policy", "full", "--cpu-kv-gib", "0"], "cpu_kv_gib is 0"),
        (["--cpu-bind", "some"], "cores like 0-7,16, got 'some'"),
        (["--cpu-bind", "3-1"], "one core or more"),
        (["--cpu-bind", "0,0"], "each once"),
        (["--cpu-bind", "0-3", "--cpu-threads", "2"], "names 4 cores"),
        (["--config", "/no/such/file.yaml"], "/no/such/file.yaml"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_would_be_right(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
):
    assert expected in refusal(capsys, *argv)


def test_cores_are_listed_as_in_taskset():
    assert bound_cores("0-2,16") == (0, 1, 2, 16)
    assert bound_cores("auto") == bound_cores("none") == ()
    assert parsed("--cpu-bind", "0-2,16", "--cpu-threads", "4").cpu_bind == "0-2,16"


def test_lengths_may_be_given_in_thousands_as_in_vllm():
    assert parsed("--max-model-len", "32k").max_model_len == 32_000
    assert parsed("--max-model-len=32K").max_model_len == 32_768
    assert parsed("--num-gpu-blocks-override=1m").num_gpu_blocks_override == 1_000_000
    assert parsed("--served-model-name=32k").served_model_name == "32k"


@pytest.mark.parametrize(
    ("flag", "ours"), [("--swap-space", "--cpu-kv-gib"), ("--context-length", "--max-model-len")]
)
def test_other_engines_names_of_flags_are_refused_with_ours(capsys, flag: str, ours: str):
    assert f"there is no {flag}: here it is {ours}" in refusal(capsys, flag, "4")


def test_every_name_that_is_pointed_to_exists():
    assert set(RENAMED.values()) <= {field.name for field in dataclasses.fields(ServeConfig)}
    assert not (set(RENAMED) | set(NOT_YET)) & {f.name for f in dataclasses.fields(ServeConfig)}


def test_a_config_file_sets_what_the_command_line_does_not(tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 9\ncpu-kv-gib: 2.5\nenforce_eager: true\nmodel: from-file\n")
    config = parsed("--config", str(path), "--port", "7", "--no-enforce-eager")
    assert (config.port, config.cpu_kv_gib, config.model) == (7, 2.5, "from-file")
    assert config.enforce_eager is False
    assert parsed("mine", f"--config={path}").model == "mine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prt: 9", "--port"),
        ("port: many", "--port"),
        ("- port", "mapping"),
        ("port: [1, 2]", "single value"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_wrong_config_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert expected in refusal(capsys, "--config", str(path))


def test_help_takes_less_than_a_second_and_explains_every_setting():
    # Of processor time: what else this machine does meanwhile is no fault of ours.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "neojax.serve", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"jax", "numpy", "fastapi", "tokenizers"}
    text = " ".join(ended.stdout.replace("│", " ").split())
    for name, meaning in field_help(ServeConfig).items():
        assert "--" + name.replace("_", "-") in text
        assert meaning.split(". ")[0][:40] in text


def test_every_setting_has_a_help_text():
    for cls in (EngineConfig, ServeConfig):
        assert set(field_help(cls)) == {field.name for field in dataclasses.fields(cls)}


def test_the_page_of_flags_is_up_to_date():
    assert flags_markdown(ServeConfig) in FLAGS_PAGE.read_text(encoding="utf-8"), (
        "write it anew: python -m neojax.cli > docs/flags.md"
    )


@pytest.mark.parametrize("flag", ["--kv-cache-dtype", "--enable-prefix-caching", "--quantization"])
def test_a_flag_of_other_engines_that_is_not_there_yet_says_what_holds_instead(capsys, flag):
    assert f"{flag} is not there yet: " in refusal(capsys, flag, "fp8")
