"""A transaction whose records several processes send, over the death of the broker."""

from __future__ import annotations

import pytest
from broker.broker_process import AsProcess
from broker.shared_topics import written

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from millstream.client import connect
from millstream.client.kafka.shared.brokers import Brokers
from millstream.client.kafka.shared.sender import PartitionSender
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.testing.free_ports import free_ports

BATCHES = [encode_records([SimpleRecord(1000 + n, b"%d" % n, b"v")] * 3) for n in range(20)]


@pytest.mark.parametrize("sent_before", [1, 20])
def test_a_transaction_goes_on_with_the_next_broker(tmp_path, sent_before):
    (port,) = free_ports(1)
    folder, listen = tmp_path / "log", f"127.0.0.1:{port}"
    address = f"kafka://{listen}?timeout=30+seconds"
    with AsProcess(folder, listen=listen) as first, connect(address) as log:
        log.create_topic("t")
        producer = log.shared_producer("id", "1 minute")
        transaction = producer.begin()
        producer.add_partitions("t", [0])
        with Brokers(transaction.address) as brokers:
            sender = PartitionSender(brokers, transaction, "t", 0)
            for batch in BATCHES[:sent_before]:
                sender.send(batch)
            first.kill()
            with AsProcess(folder, listen=listen):
                for batch in BATCHES[sent_before:]:
                    sender.send(batch)
                sent = sender.finish()
                producer.commit("w", 0, [sent])
                producer.close()
                (records,) = written(address, "t", ("key",))
                assert log.fence("w") == 0
    assert records == [(b"%d" % (number // 3),) for number in range(60)]
