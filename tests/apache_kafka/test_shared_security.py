"""Our own connections to Apache Kafka with SASL."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from millstream.broker.protocol.messages import METADATA
from millstream.client.address import kafka_address
from millstream.client.kafka.shared.connection import BrokerConnection
from millstream.errors import ConfigError
from millstream.testing import kafka as testing_kafka
from millstream.testing.free_ports import free_ports
from millstream.testing.kafka import ApacheKafka, why_not

pytestmark = pytest.mark.thorough

PASSWORD = "a pässword"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
LISTENER = "listener.name.sasl"


@pytest.fixture
def port(monkeypatch):
    """Start a node with users, whose listener with SASL is at this port."""
    if why_not():
        pytest.skip(f"no Apache Kafka: {why_not()}")
    plain, control, with_sasl = free_ports(3)
    monkeypatch.setattr(testing_kafka, "free_ports", lambda _: (plain, control))
    here = "://127.0.0.1:"
    settings = {
        "listeners": f"PLAINTEXT{here}{plain},SASL{here}{with_sasl},CONTROLLER{here}{control}",
        "listener.security.protocol.map": (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT"
        ),
        "inter.broker.listener.name": "PLAINTEXT",
        f"{LISTENER}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        f"{LISTENER}.plain.sasl.jaas.config": f'{PLAIN} user_alice="secret";',
        f"{LISTENER}.scram-sha-256.sasl.jaas.config": SCRAM,
        f"{LISTENER}.scram-sha-512.sasl.jaas.config": SCRAM,
    }
    with ApacheKafka(settings) as node:
        admin = AdminClient({"bootstrap.servers": node.address})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            upsert = UserScramCredentialUpsertion(
                "alice=b,c", ScramCredentialInfo(mechanism, 8192), PASSWORD.encode()
            )
            admin.alter_user_scram_credentials([upsert])["alice=b,c"].result(60)
        yield with_sasl


def connection(port, mechanism, user, password):
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "timeout": "30 seconds",
    }
    address = kafka_address(f"kafka://127.0.0.1:{port}?{urlencode(options)}")
    return BrokerConnection("127.0.0.1", port, address)


def test_a_user_comes_in_and_another_one_does_not(port):
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        with connection(port, mechanism, "alice=b,c", PASSWORD) as opened:
            assert opened.request(METADATA, {"topics": []})["brokers"]
        with pytest.raises(ConfigError, match="refused the user"):
            connection(port, mechanism, "alice=b,c", "wrong")
    with connection(port, "PLAIN", "alice", "secret") as opened:
        assert opened.request(METADATA, {"topics": []})["brokers"]
    with pytest.raises(ConfigError, match="refused the user"):
        connection(port, "PLAIN", "alice", "wrong")
