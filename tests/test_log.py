"""Reading with clients that are not there yet."""

import pytest
from kafka import TopicPartition
from kafka.errors import MetadataEmptyBrokerList

from operators import log


class Client:
    """Fails `failures` times as a client does whose broker is fenced."""

    def __init__(self, failures, partitions=frozenset({0, 1})):
        self.failures, self.partitions = failures, partitions

    def partitions_for_topic(self, name):
        self.failures -= 1
        if self.failures >= 0:
            raise MetadataEmptyBrokerList("brokers=[]")
        return self.partitions

    def end_offsets(self, partitions):
        return dict.fromkeys(partitions, 7)


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch):
    monkeypatch.setattr(log.time, "sleep", lambda s: None)


def test_a_broker_that_is_fenced_for_a_moment_is_asked_again():
    assert log.ends(Client(3), "r.steps") == {TopicPartition("r.steps", 0): 7, TopicPartition("r.steps", 1): 7}


def test_one_that_stays_away_is_said():
    with pytest.raises(MetadataEmptyBrokerList):
        log.ends(Client(1000), "r.steps")


def test_a_topic_that_is_not_there_is_said():
    with pytest.raises(log.NoTopic, match="no topic 'r.steps'"):
        log.ends(Client(0, None), "r.steps")
