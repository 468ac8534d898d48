"""Reading with clients that are not there yet."""

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError, MetadataEmptyBrokerList

from operators import log
from schemas.settings import KafkaSettings


class Client:
    """Fails `failures` times as a client does whose broker is fenced."""

    def __init__(self, failures, partitions=frozenset({0, 1})):
        self.failures, self.partitions = failures, partitions

    def _answer(self, answer):
        self.failures -= 1
        if self.failures >= 0:
            raise MetadataEmptyBrokerList("brokers=[]")
        return answer

    def partitions_for_topic(self, name):
        return self._answer(self.partitions)

    def end_offsets(self, partitions):
        return self._answer(dict.fromkeys(partitions, 7))

    def beginning_offsets(self, partitions):
        return self._answer(dict.fromkeys(partitions, 3))

    def topics(self):
        return self._answer({"r.steps"})

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch):
    monkeypatch.setattr(log.time, "sleep", lambda s: None)


def test_a_broker_that_is_fenced_for_a_moment_is_asked_again():
    assert log.ends(Client(3), "r.steps") == {TopicPartition("r.steps", 0): 7, TopicPartition("r.steps", 1): 7}


def test_whoever_asks_for_topics_asks_again(monkeypatch):
    monkeypatch.setattr(log, "consumer", lambda kafka: Client(3))
    log.wait_for_topic(KafkaSettings(), "r.steps")
    assert log.beginnings(Client(3), [TopicPartition("r.steps", 0)]) == {TopicPartition("r.steps", 0): 3}


def test_a_client_that_has_waited_for_its_whole_timeout_is_asked_once():
    asked = []

    def question():
        asked.append(1)
        raise KafkaTimeoutError("no metadata within 60 s")

    with pytest.raises(KafkaTimeoutError):
        log.asked(question)
    assert len(asked) == 1


def test_one_that_stays_away_is_said():
    with pytest.raises(MetadataEmptyBrokerList):
        log.ends(Client(1000), "r.steps")


def test_a_topic_that_is_not_there_is_said():
    with pytest.raises(log.NoTopic, match="no topic 'r.steps'"):
        log.ends(Client(0, None), "r.steps")
