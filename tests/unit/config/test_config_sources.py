"""Where settings come from, which win, and which are refused."""

import pytest
from pydantic import ValidationError

from ep_runtime.config import PER_PROCESS, Facts, RuntimeConfig, localise, resolve
from ep_runtime.engine.peers import BUFFER_BYTES
from ep_runtime.offline.llm import OFFLINE_TOKENS
from ep_runtime.settings import ConfigRefused, read_config

CPU = Facts(gpus=0, cores=8)
GPU = Facts(gpus=8, cores=64, world=8, local_world=8)


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1001\nmax_num_seqs: 11\nhost: yaml-host\ncors_origins: [a, b]\n")
    return path


def test_flags_win_over_environment_over_yaml_over_defaults(yaml, monkeypatch):
    monkeypatch.setenv("EP_RUNTIME_PORT", "1002")
    monkeypatch.setenv("EP_RUNTIME_MAX_NUM_SEQS", "12")
    config = read_config(["--config", str(yaml), "--port", "1003", "--enable-prefix-caching"])
    assert (config.port, config.max_num_seqs, config.host) == (1003, 12, "yaml-host")
    assert config.cors_origins == ("a", "b")
    assert config.enable_prefix_caching is True
    assert config.block_size == 16


def test_the_file_may_be_named_in_the_environment(yaml, monkeypatch):
    monkeypatch.setenv("EP_RUNTIME_CONFIG", str(yaml))
    assert read_config([]).port == 1001


@pytest.mark.parametrize(
    "given", [["a", "--allowed-origins", "b"], ["a,b"], ['["a", "b"]'], ["a", "--cors-origins", "b"]], ids=" ".join
)
def test_origins_have_vllms_flag_too(given):
    assert read_config(["--allowed-origins", *given]).cors_origins == ("a", "b")


def test_repeated_flags_make_a_list_and_switches_have_a_no_form():
    assert read_config(["--cors-origins", "a", "--cors-origins", "b"]).cors_origins == ("a", "b")
    assert read_config(["--no-enable-prefix-caching"]).enable_prefix_caching is False


@pytest.mark.parametrize(
    "arguments", [["--exit-thresholds", "0.5,0.25"], ["--exit-thresholds", "0.5", "--exit-thresholds", "0.25"]]
)
def test_thresholds_are_given_with_commas_or_one_by_one(arguments):
    assert read_config(["--max-loops", "3", *arguments]).exit_thresholds == (0.5, 0.25)


def test_the_token_may_lie_in_a_file(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    assert read_config(["--token-file", str(tmp_path / "token")]).token == "0123456789abcdef"
    with pytest.raises(ConfigRefused, match="token_file"):
        read_config(["--token-file", str(tmp_path / "none")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--protocol", "1", "--max-num-seqs", "2"], ["protocol 1", "max_num_seqs is 2"]),
        (["--forward-mode", "graph", "--device", "cpu"], ["forward_mode graph", "device is cpu"]),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], ["max_num_batched_tokens 8", "max_num_seqs 9"]),
        (["--num-blocks", "4", "--block-size", "16", "--max-model-len", "65"], ["num_blocks 4", "max_model_len 65"]),
        (["--max-loops", "4", "--exit-thresholds", "0.5,0.5"], ["exit_thresholds has 2 values", "max_loops 4 takes 3"]),
        (["--exit-thresholds", "0.5"], ["exit_thresholds has 1 values", "max_loops 1 takes 0"]),
        (["--max-loops", "2", "--exit-thresholds", "1.5"], ["exit_thresholds.0", "1.5"]),
        (["--max-loops", "17"], ["max_loops", "16"]),
        (["--attention-layout", "heads"], ["attention_layout 'heads' is not served; 'replicated', 'tensor', 'data', 'auto' are"]),
        (["--coordinator-host", "0.0.0.0"], ["coordinator_host 0.0.0.0"]),
        (["--port", "-1"], ["port", "-1"]),
        (["--block-size", "x"], ["block_size", "'x'"]),
        (["--drain-timeout", "19"], ["drain_timeout", "18"]),
        (["--load-timeout", "inf"], ["load_timeout", "finite"]),
        (["--config", "/no/such.yaml"], ["config", "/no/such.yaml"]),
    ],
)
def test_what_contradicts_or_makes_no_sense_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigRefused) as refused:
        read_config(arguments)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_rejected_secret_is_not_shown():
    with pytest.raises(ConfigRefused) as refused:
        read_config(["--token", "tooshort"])
    assert "tooshort" not in str(refused.value)


@pytest.mark.parametrize("text", ["unknown_setting: 1", "- a list", "a: [", "port: {}"])
def test_files_that_are_no_settings_are_refused(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigRefused):
        read_config(["--config", str(path)])


def test_an_unknown_variable_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("EP_RUNTIME_MAX_NUM_SEQ", "4")
    with pytest.raises(ConfigRefused, match="EP_RUNTIME_MAX_NUM_SEQ"):
        read_config([])


def test_an_unknown_flag_ends_with_argparses_status(capsys):
    with pytest.raises(SystemExit) as ended:
        read_config(["--max-num-seq", "4"])
    assert ended.value.code == 2
    assert "--max-num-seq" in capsys.readouterr().err


def test_help_names_every_flag_with_its_description(capsys):
    with pytest.raises(SystemExit) as ended:
        read_config(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in RuntimeConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description is not None
        assert "".join(field.description.split()) in shown.replace(" ", "")


def test_the_configuration_is_frozen():
    config = RuntimeConfig()
    with pytest.raises(ValidationError):
        config.port = 1  # type: ignore[misc]


def test_json_round_trip():
    config = resolve(RuntimeConfig(model="m", cors_origins=("a",), api_key="k", max_model_len=77), CPU)
    assert RuntimeConfig.from_json(config.to_json()) == config
    with pytest.raises(ValidationError):
        RuntimeConfig.from_json(config.to_json().replace(b'"seed"', b'"sed"'))


def test_secrets_stay_at_home_and_are_not_printed():
    config = RuntimeConfig(api_key="sesame-key", token="0123456789abcdef")
    assert b"sesame" not in config.without_secrets().to_json()
    assert b"0123456789abcdef" not in config.without_secrets().to_json()
    assert "sesame" not in config.table()
    assert "api_key: (set)" in config.table()


def test_the_digest_covers_exactly_what_must_be_equal_on_all_ranks():
    base = RuntimeConfig(model="m")
    other = {
        "model": "n", "tokenizer": "t", "threads": 3, "token": "0123456789abcdef", "api_key": "k", "host": "h", "port": 1,
        "log_level": "debug", "seed": 1, "dtype": "float32", "block_size": 32, "max_num_seqs": 3, "enable_prefix_caching": True,
    }  # fmt: skip
    for name, value in other.items():
        changed = base.model_copy(update={name: value}).digest() != base.digest()
        assert changed == (name not in PER_PROCESS), name


def test_what_is_left_open_is_chosen_for_the_machine():
    on_cpu = resolve(RuntimeConfig(), CPU)
    assert (on_cpu.device, on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens, on_cpu.world_size) == ("cpu", 16, 512, 1)
    assert on_cpu.served_model_name == "demo"
    on_gpu = resolve(RuntimeConfig(), GPU)
    assert (on_gpu.device, on_gpu.max_num_seqs, on_gpu.max_num_batched_tokens, on_gpu.world_size) == ("cuda", 256, 8192, 8)
    assert resolve(RuntimeConfig(protocol=1), CPU).max_num_seqs == 1
    assert resolve(RuntimeConfig(max_num_seqs=1000), CPU).max_num_batched_tokens == 1000
    assert resolve(RuntimeConfig(device="cpu"), GPU).device == "cpu"
    assert resolve(on_gpu, GPU) == on_gpu


def test_offline_steps_on_gpus_are_larger_and_their_sums_go_through_peer_memory():
    config = RuntimeConfig(model="m")
    assert resolve(config, GPU, OFFLINE_TOKENS).max_num_batched_tokens == OFFLINE_TOKENS > 8192
    assert resolve(config, CPU, OFFLINE_TOKENS).max_num_batched_tokens == resolve(config, CPU).max_num_batched_tokens
    assert resolve(RuntimeConfig(model="m", max_num_batched_tokens=700), GPU, OFFLINE_TOKENS).max_num_batched_tokens == 700
    # Two halves of so many rows of 2048 in 16 bits, the width of the models that the number was chosen for.
    assert BUFFER_BYTES["sums"] >= 2 * OFFLINE_TOKENS * 2048 * 2


def test_what_was_chosen_may_contradict_what_was_given():
    with pytest.raises(ValueError, match="max_num_batched_tokens 8 is less than max_num_seqs 16"):
        resolve(RuntimeConfig(max_num_batched_tokens=8), CPU)
    with pytest.raises(ValueError, match="forward_mode graph"):
        resolve(RuntimeConfig(forward_mode="graph"), CPU)
    with pytest.raises(ValueError, match="world_size 4 is less than the 8 ranks"):
        resolve(RuntimeConfig(world_size=4), GPU)


def test_ranks_on_other_hosts_need_a_token_and_an_address():
    across = Facts(gpus=8, cores=64, world=16, local_world=8, master_addr="10.0.0.1", master_port=29500)
    with pytest.raises(ValueError, match=r"8 of the 16 ranks are on other hosts .* no token"):
        resolve(RuntimeConfig(), across)
    with pytest.raises(ValueError, match=r"coordinator_host 10\.0\.0\.1 .* no token"):
        resolve(RuntimeConfig(coordinator_host="10.0.0.1"), CPU)
    with pytest.raises(ValueError, match=r"^world_size is 2, but 1 rank was started .*, but no token is set \(token_file\)$"):
        resolve(RuntimeConfig(world_size=2), CPU)
    config = resolve(RuntimeConfig(token="0123456789abcdef"), across)
    assert (config.coordinator_host, config.coordinator_port) == ("10.0.0.1", 29501)
    assert resolve(RuntimeConfig(), GPU).coordinator_host is None


def test_each_host_takes_its_own_share_of_cores_unless_told():
    config = resolve(RuntimeConfig(), CPU)
    local = localise(config, model="/here", cores=8, local_world=3, token=None)
    assert (local.threads, local.model) == (2, "/here")
    assert localise(config, model="/here", cores=1, local_world=2, token=None).threads == 1
    assert local.digest() == config.digest()
    explicit = config.model_copy(update={"threads": 7})
    assert localise(explicit, model="m", cores=8, local_world=3, token=None).threads == 7
