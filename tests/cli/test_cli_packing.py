"""`onboard packing`: its three commands, their exit statuses, JSON and text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from child_process import clean_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from packing.packed import metadata, rows, write_metadata, write_npy, write_parquet

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN = str(EXAMPLES / "qwen3-0.6b")
GOOD = """\
world_size: 8
train: {micro_batch_size: 1, global_batch_size: 8}
model: {seq_length: 4096, context_parallel_size: 2, calculate_per_token_loss: true}
dataset:
  kind: gpt_sft
  seq_length: 4096
  enable_offline_packing: true
  offline_packing_specs: {packed_sequence_size: 4096, pad_seq_to_mult: 4}
"""
COMMANDS = ["check", "plan", "inspect"]
OWN = {
    "check": {"--strict"},
    "plan": {
        *("--revision", "--tp", "--cp", "--pp", "--ep", "--sequence-parallel", "--seq-length", "--global-batch-size"),
        *("--micro-batch-size", "--world-size", "--packing", "--pack-size", "--dataset", "--peft", "--as", "--fix"),
        "--out",
    },
    "inspect": {
        *("--metadata", "--config", "--hf-model", "--vocab-size", "--pad-id", "--pack-size", "--pad-seq-to-mult"),
        *("--pad-cu-seqlens", "--strict"),
    },
}


@pytest.fixture
def packing(onboard):
    def run(*words, **more):
        return onboard("packing", *map(str, words), stub=False, **more)

    return run


@pytest.fixture
def config(tmp_path):
    def write(text=GOOD, name="train.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_group_lists_its_commands_with_examples(invoke):
    result = invoke("packing", "--help")
    assert result.exit_code == 0
    listed = result.stdout.split("Commands:\n")[1].split("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == COMMANDS
    assert "..." not in listed
    assert all(f"onboard packing {name}" in result.stdout.split("Examples:\n")[1] for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_options_and_examples(invoke, command):
    result = invoke("packing", command, "--help")
    options = {word for line in result.stdout.splitlines() if line.startswith("  -") for word in line.split()}
    named = {word.strip(",") for word in options if word.startswith("--")}
    assert named == {"--format", "--json", "--debug", "--help"} | OWN[command]
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert f"onboard packing {command}" in result.stdout.split("Examples:\n")[1]


def test_no_or_an_unknown_command_is_a_usage_error(packing):
    assert packing().returncode == 2
    wrong = packing("chek", "x")
    assert wrong.returncode == 2
    assert "Did you mean 'check'?" in wrong.stderr


def test_completion_knows_the_commands_and_options(onboard):
    words = {"COMP_WORDS": "onboard packing in", "COMP_CWORD": "2", "_ONBOARD_COMPLETE": "bash_complete"}
    assert onboard(stub=False, **words).stdout == "plain,inspect\n"
    words |= {"COMP_WORDS": "onboard packing plan --sequence-p", "COMP_CWORD": "3"}
    assert onboard(stub=False, **words).stdout == "plain,--sequence-parallel\n"


@pytest.mark.parametrize("words", [["packing", "--help"], ["packing", "inspect", "--help"], ["packing", "check", "F"]])
def test_nothing_heavy_is_imported(words, config, tmp_path):
    import subprocess

    words = [str(config()) if word == "F" else word for word in words]
    script = (
        "import sys\nfrom onboard.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy', 'rich') if name in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, *words], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert child.stdout.splitlines()[-1] == "[]"


class TestCheck:
    def test_a_good_file(self, packing, config):
        done = packing("check", config())
        assert done.returncode == 0
        assert done.stdout == "fine: gpt_sft, offline packing, data parallel size 4\n"
        assert done.stderr == ""

    def test_an_error(self, packing, config):
        path = config(GOOD.replace(", calculate_per_token_loss: true", ""))
        done = packing("check", path)
        assert done.returncode == 1
        assert "P15 error: CP > 1 and fine-tuning" in done.stdout
        assert "values  model.context_parallel_size = 2, dataset.kind = gpt_sft" in done.stdout
        assert "mend    set model.calculate_per_token_loss to true" in done.stdout
        assert done.stderr.startswith(f"error: {path} does not pass\n")

    def test_a_trap_is_an_error_only_where_strict(self, packing, config):
        path = config(GOOD.replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 2"))
        assert packing("check", path).returncode == 0
        strict = packing("check", path, "--strict", "--format", "quiet")
        assert (strict.returncode, strict.stdout) == (1, "")
        assert "T01" in strict.stderr

    def test_json(self, packing, config):
        path = config(
            GOOD.replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 0").replace("world_size: 8", "world_size: 3")
        )
        done = packing("check", path, "--json")
        payload = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (1, "")
        assert list(payload)[:4] == ["schema_version", "verdict", "first_error", "findings"]
        assert (payload["verdict"], payload["first_error"]) == ("error", "P01")
        assert [item["id"] for item in payload["findings"]] == ["P01", "P13"]
        assert set(payload["findings"][0]) == {"id", "severity", "values", "what", "mend", "changes"}

    def test_json_file_and_the_classes_of_megatron_bridge(self, packing, config):
        mapping = yaml.safe_load(GOOD)
        mapping["dataset"]["_target_"] = "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig"
        del mapping["dataset"]["kind"]
        assert packing("check", config(json.dumps(mapping), "train.json")).returncode == 0

    def test_python_tags_are_read_as_plain_values(self, packing, config):
        tagged = (
            "dtype: !!python/name:torch.bfloat16 ''\noptimizer: !!python/object:bridge.Optimizer {lr: 1.0}  # mine\n"
        )
        path = config(GOOD + tagged)
        assert packing("check", path).returncode == 0
        path = config(tagged + GOOD.replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 2"))
        assert packing("plan", "--fix", path).stdout == tagged + GOOD

    def test_the_model_is_looked_for_beside_the_file(self, packing, config, tmp_path):
        (tmp_path / "glm").mkdir()
        (tmp_path / "glm" / "config.json").write_text(
            '{"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}'
        )
        done = packing("check", config(GOOD + "hf_model: glm\n"), "--json", cwd=Path("/"))
        assert done.returncode == 0
        assert [item["id"] for item in json.loads(done.stdout)["findings"]] == ["T04", "T10"]

    def test_a_hub_that_does_not_answer_leaves_the_name(self, packing, config):
        path = config(GOOD + "hf_model: Qwen/Qwen3-Next-80B-A3B-Instruct\n")
        done = packing("check", path, HF_HUB_OFFLINE="1")
        assert done.returncode == 0
        assert "T10 trap" in done.stdout
        assert "its family follows from its name" in done.stderr

    def test_a_misspelt_key_is_told(self, packing, config):
        done = packing("check", config(GOOD.replace("enable_offline_packing", "enable_ofline_packing")))
        assert "did you mean dataset.enable_offline_packing?" in done.stderr

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "no mapping"),
            ("[1]", "no mapping"),
            ("a: [", "neither YAML nor JSON"),
            ("a: &x [*x]", "contains itself"),
            ("\0", "neither YAML nor JSON"),
            ("a: 1", "dataset.kind is not given"),
            (GOOD.replace("kind: gpt_sft", "kind: gpt"), "one of gpt_sft"),
            (GOOD.replace("world_size: 8", "world_size: eight"), "'eight'"),
            (GOOD.replace("world_size: 8", "world_size: 0"), "above 0"),
            (GOOD.replace("micro_batch_size: 1", "micro_batch_size: true"), "a whole number"),
            (GOOD.replace("calculate_per_token_loss: true", "calculate_per_token_loss: 'no'"), "true or false"),
            (GOOD.replace("{packed_sequence_size: 4096, pad_seq_to_mult: 4}", "4096"), "a section"),
            (GOOD + "hf_model: ./nowhere\n", "no such file"),
        ],
    )
    def test_a_file_that_cannot_be_read_is_a_usage_error(self, packing, config, text, why):
        done = packing("check", config(text))
        assert done.returncode == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr


class TestPlan:
    def test_yaml_that_passes_the_strict_check(self, packing, config, tmp_path):
        done = packing("plan", QWEN, "--tp", 2, "--cp", 2, "--sequence-parallel", "--world-size", 8)
        assert done.returncode == 0
        planned = yaml.safe_load(done.stdout)
        assert planned["dataset"]["offline_packing_specs"]["pad_seq_to_mult"] == 4
        assert "pad_multiple 4" in done.stderr
        assert packing("check", config(done.stdout), "--strict").returncode == 0

    def test_python(self, packing):
        done = packing("plan", QWEN, "--cp", 2, "--as", "python")
        assert "cfg.dataset.offline_packing_specs = PackedSequenceSpecs(" in done.stdout
        compile(done.stdout, "overrides", "exec")

    def test_json(self, packing):
        payload = json.loads(packing("plan", QWEN, "--json").stdout)
        assert set(payload) == {"schema_version", "packing", "config", "computed", "notes", "python"}

    def test_refuses_a_family_that_opts_out(self, packing, tmp_path):
        path = tmp_path / "config.json"
        path.write_text('{"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}')
        done = packing("plan", path)
        assert done.returncode == 3
        assert "the GLM-4.5 family opts out" in done.stderr
        assert json.loads(packing("plan", path, "--json").stdout)["error"]["code"] == "unsupported.packing"

    def test_a_hub_that_does_not_answer_needs_the_packing(self, packing):
        assert packing("plan", "org/model", HF_HUB_OFFLINE="1").returncode == 2
        done = packing("plan", "org/model", "--packing", "in-batch", HF_HUB_OFFLINE="1")
        assert yaml.safe_load(done.stdout)["dataset"]["enable_in_batch_packing"] is True
        assert "was not read" in done.stderr

    @pytest.mark.parametrize(
        "words", [[], [QWEN, "--fix", "F"], [QWEN, "--tp", 3, "--world-size", 8], [QWEN, "--tp", 0]]
    )
    def test_usage_errors(self, packing, config, words):
        path = config()
        assert packing("plan", *(path if word == "F" else word for word in words)).returncode == 2

    def test_fix_in_place_keeps_the_rest(self, packing, config):
        text = "# my run\noptimizer: {lr: 1.0e-4} # tuned\n" + GOOD.replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 3")
        path = config(text)
        done = packing("plan", "--fix", path, "--out", path)
        assert done.returncode == 0
        assert "T01: set dataset.offline_packing_specs.pad_seq_to_mult to 4" in done.stderr
        assert path.read_text() == text.replace("pad_seq_to_mult: 3", "pad_seq_to_mult: 4")
        assert packing("check", path, "--strict").returncode == 0

    def test_fix_keeps_line_ends_and_refuses_other_encodings(self, packing, config):
        path = config()
        path.write_bytes(GOOD.replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 3").replace("\n", "\r\n").encode())
        assert packing("plan", "--fix", path, "--out", path).returncode == 0
        assert path.read_bytes() == GOOD.replace("\n", "\r\n").encode()
        path.write_bytes(GOOD.encode("utf-16"))
        assert packing("plan", "--fix", path).returncode == 2

    def test_fix_says_what_is_left(self, packing, config):
        path = config(
            GOOD.replace("world_size: 8", "world_size: 3").replace("pad_seq_to_mult: 4", "pad_seq_to_mult: 3")
        )
        done = packing("plan", "--fix", path)
        assert done.returncode == 1
        assert "what is left needs a decision: P13" in done.stderr
        assert "pad_seq_to_mult: 4" in done.stdout
        payload = json.loads(packing("plan", "--fix", path, "--json").stdout)
        assert (payload["mended"], payload["left"]["first_error"]) == (["T01", "T03"], "P13")


class TestInspect:
    def test_good_data(self, packing, tmp_path):
        write_metadata(tmp_path, metadata(rows()))
        path = write_parquet(tmp_path / "training_64.idx.parquet", rows())
        done = packing("inspect", path, "--pad-id", 2, "--vocab-size", 1000, "--pad-seq-to-mult", 4, "--strict")
        assert (done.returncode, done.stderr) == (0, "")
        assert "no damage found" in done.stdout
        assert re.search(r"80-90 %\s+12\s+#{50}\n", done.stdout)

    def test_damage_with_its_rows(self, packing, tmp_path):
        data = rows()
        data[5]["input_ids"][3] = -7
        path = write_parquet(tmp_path / "training_64.idx.parquet", data)
        done = packing("inspect", path)
        assert done.returncode == 1
        assert "D17 error: a token id is negative" in done.stdout
        assert re.search(r"rows\s+5 \(1 row\)", done.stdout)
        assert "token -7" in done.stdout
        payload = json.loads(packing("inspect", path, "--json").stdout)
        assert payload["verdict"] == "error"
        assert [(item["id"], item["rows"]) for item in payload["findings"]] == [("D17", [5]), ("D18", [])]

    def test_the_configuration_and_its_model_say_what_is_checked(self, packing, config, tmp_path):
        text = GOOD.replace("packed_sequence_size: 4096", "packed_sequence_size: 50").replace(
            "pad_seq_to_mult: 4", "pad_seq_to_mult: 8"
        )
        path = config(text + f"hf_model: {QWEN}\n")
        data = write_parquet(tmp_path / "a.parquet", rows())
        payload = json.loads(packing("inspect", data, "--config", path, "--json").stdout)
        assert payload["checked_against"] == {"pad_multiple": 8, "pad_id": 151645, "vocab_size": 151936}
        assert [item["id"] for item in payload["findings"]] == ["D10", "D11", "D18"]

    def test_warnings_count_where_strict(self, packing, tmp_path):
        path = write_npy(tmp_path / "a.npy", rows())
        assert packing("inspect", path).returncode == 0
        assert packing("inspect", path, "--strict").returncode == 1

    def test_no_data(self, packing, tmp_path):
        done = packing("inspect", tmp_path / "nowhere.parquet")
        assert done.returncode == 2
        assert "there is no such file" in done.stderr
