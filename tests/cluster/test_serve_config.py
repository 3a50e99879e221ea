"""The configuration of replicas, and what serve --replicas refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from batch.jobs import save
from cluster.processes import WAIT_SECONDS, start_keepleft
from keepleft.cli import main
from keepleft.cluster import replicas
from keepleft.cluster.replicas import DEPLOYMENT, IMPORT_PATH, ReplicaArguments, ReplicaSettings, serve_config
from keepleft.cluster.serve import cluster_environment, default_environment
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.auth import API_KEY_VARIABLE, APIKey
from keepleft.serving.http.served_app import ServedAppOptions
from serving.tiny_services import decoder

OPTIONS = ServedAppOptions(path="/models/tiny", name="tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(decoder(), tmp_path_factory.mktemp("served") / "tiny")


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        replace(OPTIONS, dtype="int8", threads=2, max_model_len=64, kv_cache_memory=0.5),
        replace(
            OPTIONS,
            allowed_hosts=frozenset({"localhost", "a.example"}),
            allowed_origins=("https://a.example",),
        ),
        replace(OPTIONS, limits=Limits(requests=3, seconds=9.5), pivot="en", log_level="debug"),
    ],
)
def test_replicas_are_built_from_plain_values(options):
    arguments = ReplicaArguments(options=options, api_key_file="/keys")
    text = yaml.safe_dump(arguments.to_json())
    assert ReplicaArguments.from_json(yaml.safe_load(text)) == arguments


def test_keys_are_never_among_them():
    secret = replace(OPTIONS, keys=(APIKey("geheim"),))
    assert "geheim" not in str(ReplicaArguments(options=secret).to_json())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": "a", "name": "b", "pth": 1}, "args has 'pth'"),
        ({"path": "a", "name": "b", "keys": []}, "args has 'keys'"),
        ({"path": "a"}, "args has no 'name'"),
        ({"path": "a", "name": "b", "limits": {"requets": 1}}, "no such limit"),
        ({"path": "a", "name": "b", "limits": {"requests": 0}}, "the limit requests is 0"),
    ],
)
def test_other_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ReplicaArguments.from_json(values)


def test_limits_of_ray_lie_above_those_of_the_app():
    settings = ReplicaSettings(replicas=2, cpus=2, gpus=0.5, shutdown_timeout=7.0)
    options = settings.deployment_options(Limits())
    assert options["max_ongoing_requests"] > Limits().requests
    assert options["graceful_shutdown_timeout_s"] == 7.0
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5}
    assert options["num_replicas"] == 2
    scaled = replace(settings, autoscaling={"max_replicas": 8, "target_ongoing_requests": 4})
    assert "num_replicas" not in scaled.deployment_options(Limits())
    assert scaled.deployment_options(Limits())["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 8,
        "target_ongoing_requests": 4,
    }


@pytest.mark.parametrize(
    ("installed", "has_429"), [("2.56.0", False), ("2.60.0", True), ("3.0.0.dev0", True)]
)
def test_older_versions_of_ray_get_no_option_that_they_do_not_know(monkeypatch, installed, has_429):
    monkeypatch.setattr(replicas, "version", lambda name: installed)
    assert ("backpressure_config" in ReplicaSettings().deployment_options(Limits())) == has_429


def test_the_configuration_is_one_that_ray_serve_takes(model, tmp_path):
    """By Ray's own check, in a process of its own, since importing Ray warns."""
    pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")
    config = tmp_path / "serve.yaml"
    settings = ReplicaSettings(autoscaling={"max_replicas": 3}, host="0.0.0.0", port=9000)
    config.write_text(
        yaml.safe_dump(serve_config(ReplicaArguments(options=replace(OPTIONS, path=model)), settings))
    )
    code = (
        "import sys, yaml; from ray.serve.schema import ServeDeploySchema; "
        "from ray._common.utils import import_attr; "
        "schema = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1]))); "
        "app = schema.applications[0]; "
        "built = import_attr(app.import_path)(app.args); "
        "print(app.import_path, app.deployments[0].name, built._bound_deployment.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.stdout.split() == [IMPORT_PATH, DEPLOYMENT, DEPLOYMENT], done.stderr


def test_print_config_writes_it_without_the_key(model, capsys, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "geheim")
    assert main(["serve", model, "--replicas", "2", "--print-config", "--gpus-per-replica", "0.5"]) == 0
    text = capsys.readouterr()[0]
    assert "geheim" not in text
    assert f"#   export {API_KEY_VARIABLE}=…" in text
    assert "requires_key: true" in text
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in text
    config = yaml.safe_load(text)
    (application,) = config["applications"]
    assert application["args"]["path"] == model
    assert application["deployments"][0]["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0.5}


def test_what_serve_refuses_without_a_cluster(model, capsys):
    def refused(*arguments):
        assert main(["serve", model, *arguments]) == 2
        return capsys.readouterr()[1].strip().splitlines()[-1]

    assert "--replicas is 0" in refused("--replicas", "0")
    assert "give --replicas N" in refused("--address", "auto")
    assert "--replica names one server" in refused("--replicas", "2", "--replica", "a")
    assert "give names with values" in refused("--replicas", "2", "--autoscaling", "many")
    assert "--autoscaling has 'max'" in refused("--replicas", "2", "--autoscaling", "{max: 3}")
    assert "give at least --replicas, 2" in refused("--replicas", "2", "--autoscaling", "{max_replicas: 1}")
    assert "listen on 127.0.0.1 or on 0.0.0.0" in refused("--replicas", "2", "--host", "127.0.0.2")
    assert "--port is 0" in refused("--replicas", "2", "--address", "auto", "--port", "0")
    keyed = refused("--replicas", "2", "--address", "auto", "--api-key", "geheim")
    assert "KEEPLEFT_API_KEY would pass through" in keyed
    assert "geheim" not in keyed


@pytest.mark.slow
def test_what_a_cluster_cannot_serve_is_one_line(model):
    pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")

    def refused(*arguments):
        port = () if "--port" in arguments else ("--port", "0")
        process = start_keepleft("serve", model, *port, *arguments)
        lines = process.communicate(timeout=WAIT_SECONDS)[1].strip().splitlines()
        assert process.returncode == 2
        assert len(lines) == 2, lines
        assert lines[0].startswith("keepleft: starting")
        return lines[1]

    nowhere = refused("--replicas", "1", "--address", "127.0.0.1:1", "--port", "8123")
    assert "there is no Ray cluster at '127.0.0.1:1'" in nowhere
    gpus = refused("--replicas", "2", "--gpus-per-replica", "32")
    assert "2 replicas need 64 GPUs, and the cluster has" in gpus


def test_serve_names_the_remedy_where_ray_is_missing(model, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", model, "--replicas", "1", "--port", "0"]) == 2
    assert "pip install 'keepleft[ray]'" in capsys.readouterr()[1]


def test_the_page_has_every_variable_of_a_cluster():
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8")
    environment = default_environment()
    for name, value in environment.items():
        assert name in page
        assert value.replace("\n", "\\n") in page


@pytest.mark.parametrize("header", ["", "x y", "a\nb", "a)", "x" * 65])
def test_a_session_header_is_the_name_of_a_header(header):
    with pytest.raises(ValueError, match="give the name of a header"):
        default_environment(header)


def test_the_secrets_of_a_local_cluster_are_set_while_it_runs(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with cluster_environment("x-session-id", {API_KEY_VARIABLE: "geheim"}):
        assert os.environ[API_KEY_VARIABLE] == "geheim"
    assert API_KEY_VARIABLE not in os.environ
    monkeypatch.setenv(API_KEY_VARIABLE, "another")
    with cluster_environment("x-session-id", {API_KEY_VARIABLE: "geheim"}):
        assert os.environ[API_KEY_VARIABLE] == "geheim"  # the option goes before the variable
    assert os.environ[API_KEY_VARIABLE] == "another"
