"""Ranks from the launcher's variables, GPUs from device nodes, private folders, and how models are found."""

import os
import stat
import tempfile

import pytest

from ep_runtime.config import RuntimeConfig
from ep_runtime.supervise import place as place_module
from ep_runtime.supervise.coordinator import refusal
from ep_runtime.supervise.engine_process import engine_environment
from ep_runtime.supervise.folder import FolderError, RuntimeFolder, check_private, job_folder
from ep_runtime.supervise.frontend import frontend_config
from ep_runtime.supervise.place import Place, PlaceError, count_gpus, read_place
from ep_runtime.supervise.source import ModelNotFound, model_folder
from protocol.messages import Join, Refused

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.1.2.3",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "abc",
}


def test_without_a_launcher_the_world_is_one_rank():
    assert read_place({}) == Place(rank=0, world=1, local_rank=0, local_world=1)


def test_torchruns_variables():
    expected = Place(rank=5, world=8, local_rank=1, local_world=4, master_addr="10.1.2.3", master_port=29501, job="abc-29501")
    assert read_place(TORCHRUN) == expected


@pytest.mark.parametrize(
    ("change", "named"), [({"RANK": "8"}, "RANK"), ({"LOCAL_RANK": ""}, "LOCAL_RANK"), ({"WORLD_SIZE": "x"}, "WORLD_SIZE")]
)
def test_launcher_variables_that_make_no_sense_are_refused(change, named):
    with pytest.raises(PlaceError, match=named):
        read_place(TORCHRUN | change)


@pytest.mark.parametrize(
    ("version", "variables", "nodes", "expected"),
    [
        ("2.13.0+cpu", {}, 2, 0),
        ("2.13.0", {}, 0, 0),
        ("2.13.0", {}, 2, 2),
        ("2.13.0", {"CUDA_VISIBLE_DEVICES": ""}, 2, 0),
        ("2.13.0", {"CUDA_VISIBLE_DEVICES": "-1"}, 2, 0),
        ("2.13.0", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 8, 3),
    ],
)
def test_gpus_are_counted_without_touching_one(monkeypatch, tmp_path, version, variables, nodes, expected):
    monkeypatch.setattr(place_module.importlib.metadata, "version", lambda name: version)
    for number in range(nodes):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    assert count_gpus(variables, tmp_path) == expected


def test_engines_get_the_environment_without_the_launchers_ranks():
    environment = engine_environment(TORCHRUN | {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}, 4)
    assert environment == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_the_runtime_folder_is_private_held_once_and_removed(tmp_path):
    path = tmp_path / "job"
    with RuntimeFolder(path) as folder:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (folder.path / "socket").touch()
        with pytest.raises(FolderError, match="another server"):
            RuntimeFolder(path)
    assert not path.exists()


def test_what_a_killed_server_left_is_cleared(tmp_path):
    path = tmp_path / "job"
    path.mkdir(mode=0o700)
    (path / "join").touch()
    with RuntimeFolder(path):
        assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    path = tmp_path / "job"
    path.mkdir(mode=0o755)
    with pytest.raises(FolderError, match="not a private folder"):
        RuntimeFolder(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(FolderError, match="not a private folder"):
        check_private(tmp_path / "link")


def test_the_job_folder_is_the_same_for_all_ranks_of_a_job_alone(tmp_path):
    variables = {"XDG_RUNTIME_DIR": str(tmp_path)} if len(str(tmp_path)) < 40 else {}
    assert job_folder("a-1", variables) == job_folder("a-1", variables)
    assert job_folder("a-1", variables) != job_folder("a-2", variables)
    assert len(os.fsencode(job_folder("a-1", {"XDG_RUNTIME_DIR": "/x" * 200}))) <= 80


def test_a_lone_folder_has_a_path_short_enough_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RuntimeFolder(None) as folder:
        assert len(os.fsencode(folder.path)) <= 80
    assert not folder.path.exists()


def test_a_join_is_refused_for_its_token_or_version_without_repeating_the_secret():
    def join(token: str, package: str) -> Join:
        return Join(token=token, host="h", boot="b", rank=None, device="cpu", package=package)

    assert refusal(join("right", "1"), "right", "1") is None
    assert refusal(join("", "1"), None, "1") is None
    wrong = refusal(join("guess", "1"), "right", "1")
    assert wrong is not None
    assert "token" in wrong.reason
    assert "right" not in wrong.reason
    assert not wrong.again
    version = Refused("package version: this rank has 2026.1, the head has 2026.2")
    assert refusal(join("right", "2026.1"), "right", "2026.2") == version


def test_models_that_cannot_be_had_are_refused_by_name(tmp_path, monkeypatch):
    import huggingface_hub
    import huggingface_hub.errors

    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        model_folder(str(tmp_path))
    with pytest.raises(ModelNotFound, match="there is no folder /no/such/model"):
        model_folder("/no/such/model")

    def offline(name: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"org/name is no folder here and could not be fetched.*no network"):
        model_folder("org/name")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert model_folder("org/name") == tmp_path
    assert model_folder(str(tmp_path)) == tmp_path


def test_the_frontend_is_told_what_concerns_it(tmp_path):
    config = RuntimeConfig(
        model="org/name", served_model_name="m", port=9, api_key="k", cors_origins=("o",), max_queue=3, drain_timeout=0,
        max_loops=2, exit_thresholds=(0.5,),
    )  # fmt: skip
    told = frontend_config(config, tmp_path, tmp_path)
    assert (told.model, told.runtime_dir, told.served_model_name) == (str(tmp_path), str(tmp_path), ("m",))
    assert (told.port, told.api_keys, told.cors_origins, told.max_queue) == (9, ("k",), ("o",), 3)
    assert (told.max_loops, told.exit_thresholds) == (2, (0.5,))
    assert (told.tool_call_parser, told.reasoning_parser) == ("auto", "auto")
