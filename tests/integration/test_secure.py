"""TLS and passwords on every connection to Kafka: kafka-python, confluent-kafka and Flink's connector; whoever has no rights is refused."""

import json

import pytest

from deploy.models import make_demo_model
from jobs.prompts import load_prompts
from jobs.run import Run
from operators.log import BrokerAway, BrokerRefuses, ensure_topics
from schemas.settings import load
from tests.integration.conftest import SMALL
from tests.integration.secure_broker import OWNER, STRANGER, password, secure_broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secure_broker(tmp_path_factory.mktemp("broker")) as flags:
        ensure_topics(load(flags=flags).kafka, "waits")  # until it is up
        yield flags


@pytest.mark.parametrize(("change", "message"), [
    ({"kafka.sasl_username": STRANGER, "kafka.sasl_password_file": STRANGER}, "does not let user 'stranger' create stranger.prompts"),
    ({"kafka.sasl_username": STRANGER}, "over SASL_SSL as user 'stranger'.*user and password"),
    ({"kafka.ssl_cafile": None, "kafka.security_protocol": "SASL_PLAINTEXT"}, "no Kafka broker answers"),
])
def test_whoever_has_no_rights_is_refused(broker, change, message):
    folder = broker["kafka.sasl_password_file"].rsplit("/", 1)[0]
    changed = {k: f"{folder}/{v}" if k.endswith("password_file") else v for k, v in change.items()}
    flags = {k: v for k, v in (broker | changed | {"kafka.timeout_s": "5"}).items() if v is not None}
    with pytest.raises((BrokerAway, BrokerRefuses), match=message) as e:
        ensure_topics(load(flags=flags).kafka, "stranger")
    assert password(STRANGER) not in str(e.value) and password(OWNER) not in str(e.value)


def test_a_run_over_tls_with_passwords(stack, broker, tmp_path):
    model = make_demo_model(tmp_path / "model", seed=0)
    s = stack.settings("secure", **broker, **SMALL, **{
        "model.path": str(model), "run.dir": str(tmp_path), "run.max_steps": 2, "reference.enabled": "false"})
    made = Run(s).go(lambda s: load_prompts(s, "demo", size=200))
    assert made["steps"] == 2 and made["accounting_adds_up"]
    for file in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.log")]:
        assert password(OWNER) not in file.read_text(), f"{file} tells the password"
    assert password(OWNER) not in json.dumps(made)
